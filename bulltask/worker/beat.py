"""Keeps the job schedulers in Redis: stores ``beat_schedule``, and adds next iterations that are missing.

Begin with :class:`Beat`, a service of the supervisor. :func:`read_entries` checks the schedule's entries.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, timedelta
from typing import TYPE_CHECKING, Any, Final

from bulltask.app import App
from bulltask.config.parsers import time_zone
from bulltask.jobs.clock import mono_ms, value_class, zone_of
from bulltask.jobs.errors import (
    BrokerError,
    BrokerNotReadyError,
    BrokerUnavailableError,
    BulltaskError,
    ConfigError,
    JobError,
    did_you_mean,
)
from bulltask.jobs.job import NewJob
from bulltask.jobs.names import check_scheduler_id
from bulltask.jobs.payloads import PayloadCodec
from bulltask.jobs.schedules import Repeat, crontab
from bulltask.queue.schedulers import all_rows, put, remove_scheduler, restore_iterations
from bulltask.registry.call import check_args, check_kwargs
from bulltask.registry.options import CallOptions
from bulltask.registry.task import AnyTask
from bulltask.transport.call import QueueKeys, SyncClient
from bulltask.transport.operation import Operation, execute, run_sync
from bulltask.transport.scripts.queue import (
    CHECK_MS,
    BeatLabel,
    add_beat_queue,
    beat_queues,
    claim_check,
    has_schedule_workers,
    leave_schedule,
    read_label,
    register_schedule_version,
    remove_beat_queue,
    remove_job_scheduler,
)
from bulltask.worker.broker_backoff import ReconnectBackoff

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

__all__ = [
    "Beat",
    "BeatEntry",
    "BeatWorker",
    "Changes",
    "entry_problems",
    "read_entries",
    "reconcile",
    "unregistered_tasks",
]


_KEYS: Final = ("task", "schedule", "args", "kwargs", "options", "relative")
_INVALID_OPTIONS: Final = ("countdown", "eta", "job_id", "timestamp", "deduplication", "parent")


@value_class(frozen=True)
class BeatEntry:
    """A valid entry of ``beat_schedule``. Its name is the id of its job scheduler.

    ``data`` changes only when the template's data changes, even if the encrypted data is never the same.
    """

    name: str
    rule: Repeat
    job: NewJob
    data: str

    @property
    def digest(self) -> str:
        """A short hash that changes with the entry and the settings that it depends on."""
        content = [self.job.name, self.data, self.rule.to_wire(), self.job.options.to_template()]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def read_entries(app: App) -> list[BeatEntry] | None:
    """Return the entries of ``app.conf.beat_schedule`` and ``app.add_periodic_task``, ``None`` if there are none."""
    app._set_up_periodic_tasks()
    schedule = app._config.beat_schedule
    if schedule is None and not app._periodic_tasks:
        return None
    return [_parse_entry(app, name, entry) for name, entry in {**(schedule or {}), **app._periodic_tasks}.items()]


def entry_problems(app: App) -> list[str]:
    """Return what is wrong with the entries of ``beat_schedule``, without freezing the app's settings.

    An entry may still be invalid together with other settings: :func:`read_entries`.
    """
    schedule, problems = app.conf.beat_schedule, []
    for name, entry in (schedule or {}).items():
        try:
            _check_entry(name, entry)
            _parse_rule(entry, time_zone(app.conf.timezone, "timezone"))
            task, args, kwargs, options = _parse_call(entry)
            CallOptions.of(options)
            if (registered := app.tasks.get(task)) is not None:
                registered._codec.arguments.bind(args, kwargs)
        except (BulltaskError, TypeError, ValueError) as exc:
            problems.append(f"beat_schedule[{name!r}]: {exc}")
    return problems


def unregistered_tasks(app: App) -> dict[str, str]:
    """Return the entries of ``beat_schedule`` whose task the app does not have, with the task's name."""
    entries = (app.conf.beat_schedule or {}).items()
    names = {name: _task_name(entry.get("task")) for name, entry in entries if isinstance(entry, Mapping)}
    return {name: task for name, task in names.items() if isinstance(task, str) and app.tasks.get(task) is None}


def _parse_entry(app: App, name: str, entry: object) -> BeatEntry:
    try:
        _check_entry(name, entry)
        assert isinstance(entry, Mapping)
        rule, job = _parse_rule(entry, app._config.timezone), app._build_job(*_parse_call(entry))
        return BeatEntry(name, rule, job, PayloadCodec(app._config).fingerprint(job))
    except (BulltaskError, TypeError, ValueError) as exc:
        raise ConfigError(f"beat_schedule[{name!r}]: {exc}") from exc


def _check_entry(name: str, entry: object) -> None:
    check_scheduler_id(name)
    if not isinstance(entry, Mapping):
        raise ConfigError(f"an entry must be a dictionary, not {entry!r}")
    for key in entry:
        if key not in _KEYS:
            raise ConfigError(f"unknown key {key!r}{did_you_mean(str(key), _KEYS)}")
    for key in ("task", "schedule"):
        if key not in entry:
            raise ConfigError(f"the key {key!r} is missing")
    if entry.get("relative"):
        raise ConfigError("relative intervals are not supported; use crontab(…)")


def _parse_rule(entry: Mapping[str, Any], timezone: str) -> Repeat:
    schedule = entry["schedule"]
    if isinstance(schedule, crontab):
        schedule = schedule.pattern
    if isinstance(schedule, str):
        # The time zone is always stored, because otherwise Node.js would use its machine's.
        return replace(Repeat.of(cron=schedule), tz=timezone)
    if isinstance(schedule, int | float | timedelta) and not isinstance(schedule, bool):
        return Repeat.of(every=schedule)
    raise ConfigError(f"schedule must be crontab(…), a timedelta, seconds or a cron pattern, not {schedule!r}")


def _task_name(task: object) -> object:
    return task.name if isinstance(task, AnyTask) else task


def _parse_call(entry: Mapping[str, Any]) -> tuple[str, tuple[Any, ...], dict[str, Any], Mapping[str, Any]]:
    """Return the task's name, the arguments and the options."""
    task, options = entry["task"], entry.get("options") or {}
    name = _task_name(task)
    if not isinstance(name, str):
        raise ConfigError(f"task must be the name of a task, not {task!r}")
    if not isinstance(options, Mapping):
        raise ConfigError(f"options must be a dictionary, not {options!r}")
    for option in _INVALID_OPTIONS:
        if options.get(option) is not None:
            raise ConfigError(f"the option {option} cannot be used for scheduled jobs")
    return name, tuple(check_args(entry.get("args"), name)), dict(check_kwargs(entry.get("kwargs"), name)), options


# Keeps the job schedulers in Redis: stores ``beat_schedule``, and adds next iterations that are missing.
#
# There is no beat process: the worker that acquires a scheduler's job adds the next one. The template of the
# scheduler's jobs contains its owner (``opts.bulltask``: ``beat`` is the app's name, ``digest`` a hash of the entry).
# Node.js keeps these fields. A scheduler with the same id that another client created has no owner, and is not changed.
#
# Old and new workers may run side by side. All workers of an app register the version of the schedule that they run,
# and only those of the newest version change it (``scheduleVersion.lua``).


_PAGE: Final = 1_000
_RESTORE_MS: Final = 20
"""How long a tick may look for missing iterations; a page of schedulers takes about that long."""
_RESTORE_QUEUES: Final = 100
"""How many queues a tick may look at: a worker with thousands of idle queues must not keep Redis busy."""
_UNNAMED: Final = "app"
"""The name of an app that was created without one."""
_RETRYABLE: Final = (BrokerUnavailableError, BrokerNotReadyError)


@dataclass(slots=True)
class Changes:
    """The changes to one queue, as entry names.

    Attributes:
        foreign: Entries whose scheduler belongs to another client and was not changed.
        orphaned: Schedulers of programs whose app has no name, and that run no worker.
    """

    added: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    orphaned: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BeatWorker:
    """The worker whose service keeps the schedulers; ``program`` identifies it if its app has no name."""

    id: str = ""
    queues: Sequence[str] = ()
    program: str = ""


class Beat:
    """A service that keeps the schedulers in Redis, when the worker starts or has reconnected, and once a minute.

    It updates the schedulers of ``beat_schedule`` to match the entries, if the worker runs the newest version of its
    app's schedule. It adds missing iterations of all schedulers in the worker's queues. Usually one of the workers does
    this for all; after a start or a reconnection, each of them does.

    If ``entries`` is ``None``, no entry is stored or removed.
    """

    interval_ms = 1_000

    def __init__(
        self,
        app: App,
        entries: Sequence[BeatEntry] | None,
        client: SyncClient,
        backoff: ReconnectBackoff,
        logger: FilteringBoundLogger,
        worker: BeatWorker = BeatWorker(),
    ) -> None:
        self._app = app
        self._entries = entries
        self._client = client
        self._clock = app._broker.clock
        self._backoff = backoff
        self._logger = logger
        self._worker_id = worker.id
        self._owner = (app._config.prefix, owner_of(app, worker.program))
        content = sorted(f"{entry.job.queue} {entry.name} {entry.digest}" for entry in entries or ())
        self._version = hashlib.sha256("\n".join(content).encode()).hexdigest()[:16]
        self._consumed = worker.queues
        self._number = self._due_ms = 0
        self._forced = True
        self._queues: set[str] | None = None
        self._cursors: dict[str, str] = {}
        self._reported: set[str] = set()

    def tick(self, now_ms: int, _missed: int, /) -> None:
        """Check what is due; a large queue is checked in several ticks."""
        if now_ms < self._due_ms and not self._cursors:
            return
        try:
            if now_ms >= self._due_ms:
                self._update_schedule()
                self._due_ms = now_ms + CHECK_MS
            self._restore_iterations()
        except _RETRYABLE as exc:
            if exc.node is None:  # otherwise, the other nodes of the cluster may be available
                self._backoff.record_failure(exc)
            return
        self._backoff.reset()

    def check_now(self, *_: object) -> None:
        """Check everything in the next tick, because Redis may have lost data, or its clock has gone back."""
        self._queues = None
        self._forced = True
        self._due_ms = 0
        self._cursors.clear()

    def leave(self) -> None:
        """Record that this worker stops, so that the schedule of the remaining workers applies at once."""
        if self._number and not self._backoff.is_active:
            with suppress(BrokerError):
                self._client.run(leave_schedule(*self._owner, self._worker_id))

    def _update_schedule(self) -> None:
        if self._queues is None:
            self._queues = self._queues_to_update()
        for queue in sorted(self._queues):
            self._update(queue, [entry for entry in self._entries or () if entry.job.queue == queue])
            self._queues.discard(queue)
        if not self._cursors:  # otherwise, the last check of a queue with many schedulers is not over yet
            queues = {*self._consumed, *(entry.job.queue for entry in self._entries or ())}
            self._cursors = dict.fromkeys(queues, "0" if self._forced else "")
        self._queues = None
        self._forced = False

    def _queues_to_update(self) -> set[str]:
        """Return the queues whose schedulers may have to be changed: none if a newer version is in effect."""
        if self._entries is None:
            if self._forced and (queues := self._client.run(beat_queues(*self._owner))):
                self._warn_once(
                    "beat_schedule is not set, but Redis contains this app's schedules; set it to {} to remove them",
                    queues=sorted(queues),
                )
            return set()
        version, now_ms = self._version, self._clock.now_ms()
        state = self._client.run(
            register_schedule_version(*self._owner, self._worker_id, version, self._number, now_ms)
        )
        self._number = state.number
        if state.in_effect != version:
            self._warn_once(
                "Other workers of this app run a newer beat_schedule: this worker's is not used",
                app=self._app.name,
                workers=state.workers,
                hint="This worker's beat_schedule is used when they have stopped",
            )
        elif self._forced or state.is_due:
            return self._client.run(beat_queues(*self._owner)) | {entry.job.queue for entry in self._entries}
        return set()

    def _update(self, queue: str, entries: Sequence[BeatEntry]) -> None:
        try:
            if entries:
                self._client.run(add_beat_queue(*self._owner, queue))
            operation = reconcile(self._app._broker.keys(queue), entries, self._owner[1], self._clock.now_ms())
            changes = run_sync(self._client, operation)
            if not entries:
                self._client.run(remove_beat_queue(*self._owner, queue))
        except _RETRYABLE:
            raise
        except BulltaskError as exc:
            # For example, Redis is out of memory or rejects a command. The worker continues with the stored schedules.
            self._warn_once("Schedule not updated", level="error", queue=queue, error=str(exc))
        else:
            self._log(queue, changes)

    def _log(self, queue: str, changes: Changes) -> None:
        names = {"added": changes.added, "changed": changes.changed, "removed": changes.removed}
        if fields := {field: value for field, value in names.items() if value}:
            log = self._logger.warning if changes.removed else self._logger.info
            log("Schedule updated", queue=queue, app=self._app.name, **fields)
        for name, error in changes.failed.items():
            self._warn_once("Schedule not updated", level="error", queue=queue, scheduler=name, error=error)
        for name in changes.foreign:
            self._warn_once(
                "A job scheduler with this name belongs to another client and was not changed; rename the entry of "
                "beat_schedule, or remove the scheduler",
                queue=queue,
                scheduler=name,
            )
        if changes.orphaned:
            self._warn_once(
                "Schedules were added by an app without a name, and none of its workers runs",
                queue=queue,
                schedulers=sorted(changes.orphaned),
                hint="Remove them with queue.schedulers.remove(…) if nothing needs them. An app with a name, such as "
                "App('shop'), removes the schedules that are no longer in its code",
            )

    def _restore_iterations(self) -> None:
        until_ms = mono_ms() + _RESTORE_MS
        for _ in range(min(len(self._cursors), _RESTORE_QUEUES)):
            queue, cursor = next(iter(self._cursors.items()))
            try:
                cursor = self._restore_page(queue, cursor)
            except _RETRYABLE:
                raise
            except BulltaskError as exc:
                self._warn_once("Schedules not checked", level="error", queue=queue, error=str(exc))
                cursor = "0"
            self._cursors[queue] = cursor
            if cursor == "0":
                del self._cursors[queue]
            if mono_ms() >= until_ms:
                return

    def _restore_page(self, queue: str, cursor: str) -> str:
        """Add missing iterations of about a thousand schedulers; return the cursor of the next call, ``0`` at the end.

        The cursor ``""`` means that another worker may check the queue.
        """
        keys = self._app._broker.keys(queue)
        if cursor != "0" and not self._client.run(claim_check(keys, continued=bool(cursor))):
            return "0"
        operation = restore_iterations(keys, cursor or "0", self._clock.now_ms(), zone_of(self._app._config.timezone))
        cursor, restored = run_sync(self._client, operation)
        if restored:
            self._logger.warning("Missing jobs of schedules added again", queue=queue, schedulers=restored)
        return cursor

    def _warn_once(self, event: str, *, level: str = "warning", **fields: object) -> None:
        """Log a line, unless this worker has logged it before."""
        if (line := f"{event} {fields}") not in self._reported:
            self._reported.add(line)
            getattr(self._logger, level)(event, **fields)


def owner_of(app: App, program: str) -> str:
    """Return the name under which an app owns its schedulers: its own, or one for the program if it has none."""
    return f"{_UNNAMED}@{hashlib.sha256(program.encode()).hexdigest()[:16]}" if app.name == _UNNAMED else app.name


def reconcile(keys: QueueKeys, entries: Sequence[BeatEntry], owner: str, now_ms: int) -> Operation[Changes]:
    """Update the schedulers of one queue to match its entries, except those that belong to other apps."""
    changes = Changes()
    rows, paused = (yield from all_rows(keys)), (yield from all_rows(keys, paused=True))
    labels, next_ms = (yield from _read_labels(keys, paused, paused=True)), dict(rows)
    labels |= yield from _read_labels(keys, rows)
    abandoned = yield from _abandoned_owners(keys.prefix, owner, labels.values(), now_ms)
    for entry in entries:
        label = labels.get(entry.name)
        if label is None or label.owner == owner or label.owner in abandoned:
            yield from _store(
                keys, entry, (label, BeatLabel(owner, entry.digest)), (next_ms.get(entry.name, 0), now_ms), changes
            )
        elif not (_is_unnamed(owner) and _is_unnamed(label.owner) and label.digest == entry.digest):
            changes.foreign.append(entry.name)  # otherwise, the same program runs on another machine
    names = {entry.name for entry in entries}
    for scheduler_id, label in labels.items():
        if scheduler_id in names:
            continue
        if label.owner == owner:
            yield from remove_scheduler(keys, scheduler_id)
            changes.removed.append(scheduler_id)
        elif label.owner in abandoned:
            changes.orphaned.append(scheduler_id)
    return changes


def _abandoned_owners(prefix: str, owner: str, labels: Iterable[BeatLabel], now_ms: int) -> Operation[set[str]]:
    """Return the other programs whose app has no name and that run no worker; empty if this app has a name."""
    if not _is_unnamed(owner):
        return set()
    others = sorted({label.owner for label in labels if _is_unnamed(label.owner)} - {owner})
    live = (yield [has_schedule_workers(prefix, other, now_ms) for other in others]) if others else []
    return {other for other, has_workers in zip(others, live, strict=True) if not has_workers}


def _is_unnamed(owner: str) -> bool:
    return owner == _UNNAMED or owner.startswith(f"{_UNNAMED}@")


def _is_stopped(rule: Repeat, next_ms: int, now_ms: int) -> bool:
    """Whether the next iteration is more than two intervals away, because the server's clock has gone back."""
    if rule.every_ms is not None:
        return next_ms > now_ms + 2 * rule.every_ms
    coming_ms = rule.next_ms(now_ms, UTC)
    following_ms = None if coming_ms is None else rule.next_ms(coming_ms, UTC)
    return following_ms is not None and next_ms > following_ms


def _read_labels(
    keys: QueueKeys, rows: Sequence[tuple[str, int]], *, paused: bool = False
) -> Operation[dict[str, BeatLabel]]:
    """Return the label of each of the queue's schedulers. Nothing else is read, because there may be many."""
    labels: dict[str, BeatLabel] = {}
    for first in range(0, len(rows), _PAGE):
        ids = [scheduler_id for scheduler_id, _ in rows[first : first + _PAGE]]
        page = yield [read_label(keys, scheduler_id, paused=paused) for scheduler_id in ids]
        labels.update(zip(ids, page, strict=True))
    return labels


def _store(
    keys: QueueKeys,
    entry: BeatEntry,
    labels: tuple[BeatLabel | None, BeatLabel],
    times_ms: tuple[int, int],
    changes: Changes,
) -> Operation[None]:
    """Create or change an entry's scheduler, unless it has the new one of the labels and continues."""
    (old, new), (next_ms, now_ms) = labels, times_ms
    if old == new:
        if not _is_stopped(entry.rule, next_ms, now_ms):
            return
        # An interval would continue from the time of its next iteration.
        yield from execute(remove_job_scheduler(keys, entry.name))
    rule = entry.rule
    if rule.every_ms is not None:
        # As in Celery, the first iteration runs one interval after deployment.
        rule = replace(rule, start_ms=now_ms + rule.every_ms)
    try:
        fields = {"beat": new.owner, "digest": new.digest}
        if (yield from put(keys, entry.name, rule, entry.job, fields, now_ms)) is None:
            changes.failed[entry.name] = "no time ever matches it"
        else:
            (changes.added if old is None else changes.changed).append(entry.name)
    except JobError as exc:
        changes.failed[entry.name] = str(exc)
