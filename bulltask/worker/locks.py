"""Services of the supervisor for the locks of jobs: renews those of its children, and finds those that have expired."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from bulltask.config.config import Config
from bulltask.jobs.clock import mono_ms
from bulltask.jobs.errors import BrokerError
from bulltask.observe.bus import Bus
from bulltask.observe.events import (
    HeartbeatFailed,
    HeartbeatSucceeded,
    JobStalled,
    RedisReconnected,
    RedisRecovered,
    RunningJobLostLock,
    StalledCheckSkipped,
)
from bulltask.transport.broker import Broker
from bulltask.transport.call import Call, QueueKeys, SyncClient, command
from bulltask.transport.scripts.move import find_by_token, lock_expiries, move_stalled_jobs_to_wait, renew_locks
from bulltask.worker.broker_backoff import QueueBackoff, ReconnectBackoff
from bulltask.worker.slots import HAS_JOB, SlotState, SlotView

__all__ = ["Heartbeat", "StalledCheck"]


_RETRY_MS: Final = 500
"""Interval between attempts to renew the locks during and after an outage."""

_MAY_HAVE_FETCHED: Final = {SlotState.RESERVED, SlotState.FINISHING, SlotState.NO_REPLY, SlotState.RELEASING}


class Heartbeat:
    """Renews the locks of all the children's jobs, with one call per queue and tick.

    It runs in the supervisor, so a child that holds the GIL, is swapped out or is suspended keeps its locks, even the
    lock of a job that Redis has sent in a reply that the child has not read yet. A failed renewal is logged and
    counted, and never stops the job; the next tick retries it. After an outage the next tick follows soon, so that
    expired locks are reacquired before any worker checks for stalled jobs.
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
        self._queues = queues
        self._views = views
        self._client = client
        self._bus = bus
        self._backoff = backoff
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
        # Only active slots, because the lock may be gone while an outcome is being written: the job was just finished.
        running = {
            view
            for view in lost
            if view.state is SlotState.ACTIVE and (view.token, view.attempt) not in self._reported_lost
        }
        if running and (lost_now := sorted(running.intersection(self._views()), key=lambda view: view.job_id)):
            self._reported_lost.update((view.token, view.attempt) for view in lost_now)
            for view in lost_now:
                self._bus.emit(RunningJobLostLock(view.job_id, keys.queue))


_MAX_TICK_MS: Final = 100
_CONTINUE_MS: Final = 200
"""How long a tick checks a queue, and after which time the next one continues."""

_REACQUIRE_MS: Final = 5_000
"""Time after an outage until every worker has reconnected and reacquired its locks."""
_FEW: Final = 100
"""With more queues, one round trip finds those of 100 queues that have active jobs, because each check takes two."""


class StalledCheck:
    """Finds stalled jobs of any worker and recovers them.

    Every worker of a queue checks; BullMQ's ``stalled-check`` key allows one check per interval. If a check is still
    running when the next one is due, the next one is skipped and counted.

    After an outage, locks may have expired even though their workers are alive. Therefore, nothing is checked during an
    outage, a queue whose locks this worker has not renewed yet is skipped, and after a long outage the first check
    waits until the other workers have had time to reacquire their locks.

    If thousands of jobs are active, a check consists of many calls. A tick makes them for a limited time, because the
    supervisor has other work, and the next tick continues after a short time.
    """

    def __init__(
        self,
        broker: Broker,
        queues: Sequence[QueueKeys],
        has_renewed: Callable[[int], bool],
        client: SyncClient,
        bus: Bus,
        backoff: ReconnectBackoff,
    ) -> None:
        config = broker.config
        self._queues = queues
        self._client = client
        self._clock = broker.clock
        self._bus = bus
        self._backoff = backoff
        self._queue_backoff = QueueBackoff(queues, bus, config)
        self._max_stalled = config.max_stalled_count
        self._interval_ms = config.stalled_interval_ms
        # Shorter than the interval, because a key with the full lifetime would often still exist at the next tick, for
        # a millisecond, and stalled jobs would wait for one more interval.
        self._throttle_ms = self._interval_ms * 9 // 10
        self._unfinished: dict[int, tuple[int, int]] = {}  # queue's index: time of the check, jobs that are left
        self._has_renewed = has_renewed
        self._may_expire_ms = config.lock_ms // 2
        self._not_before_ms = 0
        self._unreachable: set[int] = set()
        bus.subscribe(RedisReconnected, self._wait_for_others)
        bus.subscribe(RedisRecovered, self._wait_for_others)

    @property
    def interval_ms(self) -> int:
        """Milliseconds between ticks."""
        return _CONTINUE_MS if self._unfinished else self._interval_ms

    def tick(self, _now_ms: int, missed: int, /) -> None:
        """Check every queue, or continue the checks that are not finished."""
        if missed and not self._unfinished:
            for keys in self._queues:
                self._bus.emit(StalledCheckSkipped(keys.queue, missed))
        if self._backoff.is_active or mono_ms() < self._not_before_ms:
            return
        try:
            for index in [*self._unfinished] or self._with_active_jobs():
                if self._has_renewed(index) and mono_ms() >= self._not_before_ms:
                    self._try_to_check(index)
        except BrokerError as exc:  # do not check the other queues: each call may take its whole timeout
            self._backoff.record_failure(exc)

    def _with_active_jobs(self) -> Sequence[int]:
        """Return the indexes of the queues to check: of many, only those that have active jobs or broke before."""
        if len(self._queues) <= _FEW:
            return range(len(self._queues))
        found: list[int] = []
        for start in range(0, len(self._queues), _FEW):
            some = range(start, min(start + _FEW, len(self._queues)))
            calls: list[Call[int]] = [
                command("EXISTS", self._queues[index].active, self._queues[index].stalled) for index in some
            ]
            replies = self._client.try_many(calls)
            found += [index for index, count in zip(some, replies, strict=True) if count != 0]
        return found

    def _wait_for_others(self, event: RedisReconnected | RedisRecovered) -> None:
        if event.duration_ms >= self._may_expire_ms:
            self._not_before_ms = mono_ms() + _REACQUIRE_MS

    def _try_to_check(self, index: int) -> None:
        """Check a queue. If its node of a cluster was unreachable, only check whether the node is reachable again."""
        try:
            if index not in self._unreachable:
                self._check(index)
                return
            self._client.run(command("EXISTS", self._queues[index].probe))
            self._unreachable.discard(index)
            self._not_before_ms = mono_ms() + _REACQUIRE_MS
        except BrokerError as exc:
            if not QueueBackoff.affects_queue(exc):
                raise
            self._queue_backoff.record_failure(index, exc)
            if exc.node is not None:
                self._unreachable.add(index)

    def _check(self, index: int) -> None:
        until_ms, keys = mono_ms() + _MAX_TICK_MS, self._queues[index]
        now_ms, left = self._unfinished.pop(index, (self._clock.now_ms(), None))
        while True:
            call = move_stalled_jobs_to_wait(keys, self._max_stalled, self._throttle_ms, now_ms, left)
            stalled, left = self._client.run(call)
            expiries_ms: list[int | None] = [None] * len(stalled)
            try:
                expiries_ms = self._client.run(lock_expiries(keys, stalled, self._throttle_ms, now_ms))
            finally:
                for job_id, expired_ms in zip(stalled, expiries_ms, strict=True):
                    self._bus.emit(JobStalled(job_id, keys.queue, expired_ms))
            if not left:
                break
            if mono_ms() >= until_ms:
                self._unfinished[index] = (now_ms, left)
                break
        self._queue_backoff.reset(index)
