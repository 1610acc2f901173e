"""Renews the locks of running jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from bulltask.clock import mono_ms
from bulltask.config.config import Config
from bulltask.errors import BrokerError
from bulltask.events import Bus, HeartbeatFailed, HeartbeatSucceeded, RunningJobLostLock
from bulltask.transport.client_types import SyncClient
from bulltask.transport.keys import QueueKeys
from bulltask.transport.scripts.move import find_by_token, renew_locks
from bulltask.worker.broker_backoff import QueueBackoff, ReconnectBackoff
from bulltask.worker.slot import SlotView
from bulltask.worker.states import HAS_JOB, SlotState

__all__ = ["Heartbeat"]

_RETRY_MS: Final = 500
"""Interval between attempts to renew the locks during and after an outage."""

_MAY_HAVE_FETCHED: Final = {SlotState.RESERVED, SlotState.SETTLING, SlotState.UNCERTAIN, SlotState.RELEASING}


class Heartbeat:
    """Renews the locks of all the children's jobs, with one call per queue and tick.

    It runs in the supervisor, so a child that holds the GIL, is swapped out or is suspended keeps its locks, even the
    lock of a job that Redis has sent in a reply that the child has not read yet. A failed renewal is logged and
    counted, and never stops the job; the next tick retries it. After an outage the next tick follows soon, so that
    expired locks are reacquired before any worker checks for stalled jobs.

    Args:
        queues: The worker's queues, in the order of the slots' queue index.
        views: Returns the slots of all children.
        client: The supervisor's client.
        config: Lock duration and renewal interval.
        bus: Receives an event for every renewal.
        backoff: The supervisor's backoff.
    """

    def __init__(
        self,
        queues: Sequence[QueueKeys],
        views: Callable[[], Iterable[SlotView]],
        client: SyncClient,
        config: Config,
        bus: Bus,
        backoff: ReconnectBackoff,
    ) -> None:
        self._queues, self._views, self._client, self._bus, self._backoff = queues, views, client, bus, backoff
        self._queue_backoff = QueueBackoff(queues, bus, config)
        self._lock_ms = config.lock_ms
        # Four times per lock duration, as in BullMQ, so that a failed tick does no harm.
        self._interval_ms = max(50, config.renew_ms // 2)
        self._attempted_ms = 0
        self._unavailable = False
        self._failures: dict[int, int] = {}
        self._reported_lost: set[tuple[str, int]] = set()

    @property
    def interval_ms(self) -> int:
        """Milliseconds between ticks; short after a server error, until a renewal succeeds."""
        return min(_RETRY_MS, self._interval_ms) if self._unavailable else self._interval_ms

    def has_renewed(self, index: int) -> bool:
        """Whether the last renewal of queue ``index``'s locks succeeded; if not, they may have expired."""
        return index not in self._failures

    def tick(self, _now_ms: int, _missed: int, /) -> None:
        """Renew every lock."""
        if self._unavailable and self._backoff.is_active and mono_ms() - self._attempted_ms < self._interval_ms:
            return  # other services are trying to reconnect, and each call may take its whole timeout
        self._attempted_ms = mono_ms()
        views_by_queue, unknown = self._locked_slots()
        server_error: BrokerError | None = None
        is_unavailable = False
        for index, views in enumerate(views_by_queue):
            # After a server error, skip the other queues, because each call may take its whole timeout, which delays
            # the recovery of dead children's jobs.
            error = server_error or self._renew(index, views, unknown)
            if error is not None and not self._queue_backoff.affects_queue(error):
                server_error = error
            is_unavailable = is_unavailable or (error is not None and error.node is not None)
            self._record(index, views, error)
        self._unavailable = is_unavailable or server_error is not None

    def _locked_slots(self) -> tuple[list[list[SlotView]], list[str]]:
        """Return the slots whose job is known, by queue, and the tokens that may lock an unknown job."""
        views_by_queue: list[list[SlotView]] = [[] for _ in self._queues]
        unknown, attempts, now_ms = [], set(), mono_ms()
        for view in self._views():
            attempts.add((view.token, view.attempt))
            if view.state in HAS_JOB and view.job_id:
                views_by_queue[view.queue_index].append(view)
            elif view.state in HAS_JOB:
                unknown.append(view.token)
            # A child that holds the GIL may not have read the reply to its fetch yet.
            if view.state in _MAY_HAVE_FETCHED and now_ms - view.since_ms >= self._interval_ms:
                unknown.append(view.token)
        self._reported_lost &= attempts
        return views_by_queue, unknown

    def _renew(self, index: int, views: Sequence[SlotView], unknown: Sequence[str]) -> BrokerError | None:
        """Renew the locks of one queue; return the error if that failed."""
        keys = self._queues[index]
        started_ms = mono_ms()
        try:
            pairs = {(view.token, view.job_id) for view in views}
            if unknown:
                pairs.update(self._client.run(find_by_token(keys, unknown)))
            if not pairs:
                return None
            lost = set(self._client.run(renew_locks(keys, list(pairs), self._lock_ms)))
        except BrokerError as exc:
            if self._queue_backoff.affects_queue(exc):
                self._queue_backoff.record_failure(index, exc)
            elif not self._unavailable:
                self._backoff.record_failure(exc)
            return exc
        # Only if renewals have failed: a Redis at maxmemory renews locks, but rejects the other services' calls.
        if self._unavailable:
            self._backoff.reset()
        self._queue_backoff.reset(index)
        self._report_lost(keys, [view for view in views if view.job_id in lost])
        self._bus.emit(HeartbeatSucceeded(keys.queue, len(pairs) - len(lost), mono_ms() - started_ms))
        return None

    def _record(self, index: int, views: Sequence[SlotView], error: BrokerError | None) -> None:
        if error is None or not views:
            self._failures.pop(index, None)
            return
        attempt = self._failures[index] = self._failures.get(index, 0) + 1
        job_ids = tuple(view.job_id for view in views)
        self._bus.emit(HeartbeatFailed(self._queues[index].queue, job_ids, str(error), attempt))

    def _report_lost(self, keys: QueueKeys, lost: Sequence[SlotView]) -> None:
        """Report each attempt that has lost its lock, once."""
        # Only active slots, because the lock may be gone while an outcome is being written: the job was just settled.
        running = {
            view
            for view in lost
            if view.state is SlotState.ACTIVE and (view.token, view.attempt) not in self._reported_lost
        }
        if running and (lost_now := sorted(running.intersection(self._views()), key=lambda view: view.job_id)):
            self._reported_lost.update((view.token, view.attempt) for view in lost_now)
            for view in lost_now:
                self._bus.emit(RunningJobLostLock(view.job_id, keys.queue))
