"""Stores ``beat_schedule`` as job schedulers in Redis when a worker starts.

There is no beat process: the worker that acquires a scheduler's job adds the next one. The scheduler's owner is stored
in the template of its jobs (``opts.bulltask``: ``beat`` is the app's name, ``digest`` a hash of the entry). So owner
and scheduler cannot diverge, Node.js keeps the fields, and a scheduler with the same id from another client is
recognised as foreign.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from bulltask.app import App
from bulltask.clock import ServerClock
from bulltask.errors import BrokerNotReadyError, BrokerUnavailableError, BulltaskError, JobError
from bulltask.queue.schedulers import put
from bulltask.transport.client import Client
from bulltask.transport.keys import QueueKeys
from bulltask.transport.operation import Operation, execute, run_sync
from bulltask.transport.scripts.schedule import (
    BeatLabel,
    beat_queues,
    forget_queue,
    list_schedulers,
    note_queue,
    read_label,
    remove_job_scheduler,
)
from bulltask.worker.beat_entries import BeatEntry
from bulltask.worker.broker_backoff import ReconnectBackoff

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

__all__ = ["Beat", "Changes", "reconcile"]

_READ_AT_ONCE: Final = 1_000
_RETRY_MS: Final = 1_000
_AGAIN: Final = (BrokerUnavailableError, BrokerNotReadyError)
_NEVER_MS: Final = 86_400_000


@dataclass(slots=True)
class Changes:
    """The changes in one queue, by the names of entries.

    Attributes:
        foreign: Schedulers of these names belong to another client, and were not changed.
        failed: Entries that Redis refused, with the error.
    """

    added: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)


class Beat:
    """A service that brings the schedulers in Redis in line with the entries, once.

    Several workers may start at the same time: an unchanged entry is skipped, and creating a scheduler twice creates
    one. It is not repeated, because during a deployment old and new workers would remove each other's entries for as
    long as both run.

    Args:
        app: The app of the entries.
        entries: The result of ``read_entries``; with ``None`` nothing is changed.
        client: The supervisor's client.
        clock: The server's time.
        backoff: The supervisor's backoff.
        logger: Receives what was changed.
    """

    def __init__(
        self,
        app: App,
        entries: Sequence[BeatEntry] | None,
        client: Client,
        clock: ServerClock,
        backoff: ReconnectBackoff,
        logger: FilteringBoundLogger,
    ) -> None:
        self._app, self._entries, self._client, self._clock = app, entries, client, clock
        self._backoff, self._logger = backoff, logger
        self._place = (app.config.prefix, app.name)
        self._queues: set[str] | None = None
        self._done = False

    @property
    def interval_ms(self) -> int:
        """A second until it is done, then never again."""
        return _NEVER_MS if self._done else _RETRY_MS

    def tick(self, _now_ms: int, _missed: int, /) -> None:
        """Update every queue that is not up to date yet."""
        if self._done:
            return
        try:
            if self._queues is None:
                self._queues = self._client.run(beat_queues(*self._place))
                self._queues |= {entry.job.queue for entry in self._entries or ()}
            if self._entries is None:
                self._warn_of_orphans()
            else:
                for queue in sorted(self._queues):
                    self._update(queue, [entry for entry in self._entries if entry.job.queue == queue])
                    self._queues.discard(queue)
        except _AGAIN as exc:
            self._backoff.record_failure(exc)
            return
        self._backoff.reset()
        self._done = True

    def _update(self, queue: str, mine: Sequence[BeatEntry]) -> None:
        try:
            if mine:
                self._client.run(note_queue(*self._place, queue))
            operation = reconcile(self._app.broker.keys(queue), mine, self._app.name, self._clock.now_ms())
            changes = run_sync(self._client, operation)
            if not mine:
                self._client.run(forget_queue(*self._place, queue))
        except _AGAIN:
            raise
        except BulltaskError as exc:
            # Redis is full, forbids a command …: the worker continues with the schedules as they are.
            self._logger.error("Schedule not updated", queue=queue, error=str(exc))  # noqa: TRY400
        else:
            self._log(queue, changes)

    def _log(self, queue: str, changes: Changes) -> None:
        done = {"added": changes.added, "changed": changes.changed, "removed": changes.removed}
        if any(done.values()):
            self._logger.info("Schedule updated", queue=queue, **{word: names for word, names in done.items() if names})
        for name, why in changes.failed.items():
            self._logger.error("Schedule not updated", queue=queue, scheduler=name, error=why)
        for name in changes.foreign:
            self._logger.warning(
                "A job scheduler of this name belongs to another client and was not changed; rename the entry of "
                "beat_schedule, or remove the scheduler",
                queue=queue,
                scheduler=name,
            )

    def _warn_of_orphans(self) -> None:
        if self._queues:
            self._logger.warning(
                "beat_schedule is not set, but Redis has schedules of this app; set it to {} to remove them",
                queues=sorted(self._queues),
            )


def reconcile(keys: QueueKeys, entries: Sequence[BeatEntry], owner: str, now_ms: int) -> Operation[Changes]:
    """Bring the schedulers of one queue in line with the entries.

    Args:
        keys: The queue.
        entries: The queue's entries.
        owner: The app's name; schedulers of other apps are not changed.
        now_ms: The server's time.
    """
    changes = Changes()
    found = yield from _labels(keys)
    for entry in entries:
        label, wanted = found.get(entry.name), BeatLabel(owner, entry.digest)
        if label is not None and label.owner != owner:
            changes.foreign.append(entry.name)
        elif label != wanted:
            fault = yield from _put(keys, entry, wanted, now_ms)
            if fault:
                changes.failed[entry.name] = fault
            else:
                (changes.added if label is None else changes.changed).append(entry.name)
    names = {entry.name for entry in entries}
    for scheduler_id, label in found.items():
        if label.owner == owner and scheduler_id not in names:
            yield from execute(remove_job_scheduler(keys, scheduler_id))
            changes.removed.append(scheduler_id)
    return changes


def _labels(keys: QueueKeys) -> Operation[dict[str, BeatLabel]]:
    """Return the label of each scheduler of the queue; there may be very many, so nothing else is read."""
    rows: Sequence[tuple[str, int]] = yield from execute(list_schedulers(keys, 0, -1, asc=True))
    found: dict[str, BeatLabel] = {}
    for first in range(0, len(rows), _READ_AT_ONCE):
        ids = [scheduler_id for scheduler_id, _ in rows[first : first + _READ_AT_ONCE]]
        labels = yield [read_label(keys, scheduler_id) for scheduler_id in ids]
        found.update(zip(ids, labels, strict=True))
    return found


def _put(keys: QueueKeys, entry: BeatEntry, label: BeatLabel, now_ms: int) -> Operation[str]:
    """Create or change the scheduler of an entry; return the error, ``""`` for none."""
    rule = entry.rule
    if rule.every_ms is not None:
        # As in Celery, the first run of an interval is at its end, not at deployment.
        rule = replace(rule, start_ms=now_ms + rule.every_ms)
    try:
        own = {"beat": label.owner, "digest": label.digest}
        return "" if (yield from put(keys, entry.name, rule, entry.job, own, now_ms)) else "the schedule never fires"
    except JobError as exc:
        return str(exc)
