"""Finds and recovers stalled jobs: active jobs whose lock has expired."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from bulltask.clock import mono_ms
from bulltask.errors import BrokerError
from bulltask.events import Bus, JobStalled, RedisReconnected, RedisRecovered, StalledCheckSkipped
from bulltask.transport.broker import Broker
from bulltask.transport.call import Call, command
from bulltask.transport.client_types import SyncClient
from bulltask.transport.keys import QueueKeys
from bulltask.transport.scripts.move import lock_expiries, move_stalled_jobs_to_wait
from bulltask.worker.broker_backoff import QueueBackoff, ReconnectBackoff

__all__ = ["StalledCheck"]

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

    Args:
        broker: Clock and settings.
        queues: The worker's queues, in the order of the slots' queue index.
        has_renewed: Whether this worker has renewed its locks in a queue, by the queue's index.
        client: The supervisor's client.
        bus: Receives an event for every stalled job.
        backoff: The supervisor's backoff.
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
        self._queues, self._client, self._clock, self._bus, self._backoff = queues, client, broker.clock, bus, backoff
        self._queue_backoff = QueueBackoff(queues, bus, config)
        self._max_stalled = config.max_stalled_count
        self._interval_ms = config.stalled_interval_ms
        # Shorter than the interval, because a key with the full lifetime would often still exist at the next tick, for
        # a millisecond, and stalled jobs would wait for one more interval.
        self._throttle_ms = self._interval_ms * 9 // 10
        self._unfinished: dict[int, tuple[int, int]] = {}  # queue's index: time of the check, jobs that are left
        self._has_renewed, self._may_expire_ms, self._not_before_ms = has_renewed, config.lock_ms // 2, 0
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
