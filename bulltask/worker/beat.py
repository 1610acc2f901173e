"""Stores ``beat_schedule`` as job schedulers in Redis when a worker starts.

There is no beat process: the worker that acquires a scheduler's job adds the next one. The template of the scheduler's
jobs contains its owner (``opts.bulltask``: ``beat`` is the app's name, ``digest`` a hash of the entry). Node.js keeps
these fields. A scheduler with the same id that another client created has no owner, and is not changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC
from typing import TYPE_CHECKING, Final

from bulltask.app import App
from bulltask.clock import ServerClock
from bulltask.errors import BrokerNotReadyError, BrokerUnavailableError, BulltaskError, JobError
from bulltask.queue.schedulers import all_rows, put
from bulltask.schedules.repeat import Repeat
from bulltask.transport.client_types import SyncClient
from bulltask.transport.keys import QueueKeys
from bulltask.transport.operation import Operation, execute, run_sync
from bulltask.transport.scripts.schedule import (
    BeatLabel,
    add_beat_queue,
    beat_queues,
    read_label,
    remove_beat_queue,
    remove_job_scheduler,
)
from bulltask.worker.beat_entries import BeatEntry
from bulltask.worker.broker_backoff import ReconnectBackoff

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

__all__ = ["Beat", "Changes", "reconcile"]

_PAGE: Final = 1_000
_RETRYABLE: Final = (BrokerUnavailableError, BrokerNotReadyError)


@dataclass(slots=True)
class Changes:
    """The changes to one queue, as entry names.

    Attributes:
        foreign: Entries whose scheduler belongs to another client and was not changed.
        failed: Entries whose scheduler could not be stored, with the error.
    """

    added: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)


class Beat:
    """A service that updates the schedulers in Redis to match the entries, once.

    Several workers may start at the same time: unchanged entries are skipped, and creating a scheduler twice creates
    only one. The service does not run again, because during a deployment old and new workers would remove each other's
    entries while both were running.

    Args:
        app: The app that the entries belong to.
        entries: The result of ``read_entries``; with ``None`` nothing is changed.
        client: The supervisor's client.
        clock: The server's time.
        backoff: The supervisor's backoff.
        logger: Logs the changes.
    """

    interval_ms = 1_000

    def __init__(
        self,
        app: App,
        entries: Sequence[BeatEntry] | None,
        client: SyncClient,
        clock: ServerClock,
        backoff: ReconnectBackoff,
        logger: FilteringBoundLogger,
    ) -> None:
        self._app, self._entries, self._client, self._clock = app, entries, client, clock
        self._backoff, self._logger = backoff, logger
        self._owner = (app.config.prefix, app.name)
        self._queues: set[str] | None = None
        self._done = False

    def tick(self, _now_ms: int, _missed: int, /) -> None:
        """Update every queue that is not up to date yet."""
        if self._done:
            return
        try:
            if self._queues is None:
                self._queues = self._client.run(beat_queues(*self._owner))
                self._queues |= {entry.job.queue for entry in self._entries or ()}
            if self._entries is None:
                self._warn_about_orphans()
            else:
                for queue in sorted(self._queues):
                    self._update(queue, [entry for entry in self._entries if entry.job.queue == queue])
                    self._queues.discard(queue)
        except _RETRYABLE as exc:
            if exc.node is None:  # otherwise, the other nodes of the cluster may be available
                self._backoff.record_failure(exc)
            return
        self._backoff.reset()
        self._done = True

    def update_again(self) -> None:
        """Update the schedulers again, because the server's clock has gone back."""
        self._queues, self._done = None, False

    def _update(self, queue: str, entries: Sequence[BeatEntry]) -> None:
        try:
            if entries:
                self._client.run(add_beat_queue(*self._owner, queue))
            operation = reconcile(self._app.broker.keys(queue), entries, self._app.name, self._clock.now_ms())
            changes = run_sync(self._client, operation)
            if not entries:
                self._client.run(remove_beat_queue(*self._owner, queue))
        except _RETRYABLE:
            raise
        except BulltaskError as exc:
            # For example, Redis is out of memory or rejects a command. The worker continues with the stored schedules.
            self._logger.error("Schedule not updated", queue=queue, error=str(exc))  # noqa: TRY400
        else:
            self._log(queue, changes)

    def _log(self, queue: str, changes: Changes) -> None:
        names = {"added": changes.added, "changed": changes.changed, "removed": changes.removed}
        if fields := {field: value for field, value in names.items() if value}:
            self._logger.info("Schedule updated", queue=queue, **fields)
        for name, error in changes.failed.items():
            self._logger.error("Schedule not updated", queue=queue, scheduler=name, error=error)
        for name in changes.foreign:
            self._logger.warning(
                "A job scheduler with this name belongs to another client and was not changed; rename the entry of "
                "beat_schedule, or remove the scheduler",
                queue=queue,
                scheduler=name,
            )

    def _warn_about_orphans(self) -> None:
        if self._queues:
            self._logger.warning(
                "beat_schedule is not set, but Redis contains this app's schedules; set it to {} to remove them",
                queues=sorted(self._queues),
            )


def reconcile(keys: QueueKeys, entries: Sequence[BeatEntry], owner: str, now_ms: int) -> Operation[Changes]:
    """Update the schedulers of one queue to match the entries.

    Args:
        keys: The queue.
        entries: The queue's entries.
        owner: The app's name; schedulers of other apps are not changed.
        now_ms: The server's time.
    """
    changes = Changes()
    rows = yield from all_rows(keys)
    labels, next_ms = (yield from _read_labels(keys, rows)), dict(rows)
    for entry in entries:
        label, new_label = labels.get(entry.name), BeatLabel(owner, entry.digest)
        is_stopped = label == new_label and _is_stopped(entry.rule, next_ms[entry.name], now_ms)
        if label is not None and label.owner != owner:
            changes.foreign.append(entry.name)
        elif label != new_label or is_stopped:
            if is_stopped:  # an interval would continue from the time of its next iteration
                yield from execute(remove_job_scheduler(keys, entry.name))
            error = yield from _put(keys, entry, new_label, now_ms)
            if error:
                changes.failed[entry.name] = error
            else:
                (changes.added if label is None else changes.changed).append(entry.name)
    names = {entry.name for entry in entries}
    for scheduler_id, label in labels.items():
        if label.owner == owner and scheduler_id not in names:
            yield from execute(remove_job_scheduler(keys, scheduler_id))
            changes.removed.append(scheduler_id)
    return changes


def _is_stopped(rule: Repeat, next_ms: int, now_ms: int) -> bool:
    """Whether the next iteration is more than two intervals away, because the server's clock has gone back."""
    if rule.every_ms is not None:
        return next_ms > now_ms + 2 * rule.every_ms
    coming_ms = rule.next_ms(now_ms, UTC)
    following_ms = None if coming_ms is None else rule.next_ms(coming_ms, UTC)
    return following_ms is not None and next_ms > following_ms


def _read_labels(keys: QueueKeys, rows: Sequence[tuple[str, int]]) -> Operation[dict[str, BeatLabel]]:
    """Return the label of each of the queue's schedulers. Nothing else is read, because there may be many."""
    labels: dict[str, BeatLabel] = {}
    for first in range(0, len(rows), _PAGE):
        ids = [scheduler_id for scheduler_id, _ in rows[first : first + _PAGE]]
        page = yield [read_label(keys, scheduler_id) for scheduler_id in ids]
        labels.update(zip(ids, page, strict=True))
    return labels


def _put(keys: QueueKeys, entry: BeatEntry, label: BeatLabel, now_ms: int) -> Operation[str]:
    """Create or change an entry's scheduler; return the error, ``""`` for none."""
    rule = entry.rule
    if rule.every_ms is not None:
        # As in Celery, the first iteration runs one interval after deployment.
        rule = replace(rule, start_ms=now_ms + rule.every_ms)
    try:
        fields = {"beat": label.owner, "digest": label.digest}
        return "" if (yield from put(keys, entry.name, rule, entry.job, fields, now_ms)) else "no time ever matches it"
    except JobError as exc:
        return str(exc)
