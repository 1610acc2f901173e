"""Services of the supervisor that end attempts: after a time limit, or because their job was revoked.

Begin with :class:`Canceller`, which the other two call. Children enforce their own limits, of jobs and memory:
:class:`~bulltask.worker.slots.ChildLimits`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Final

from bulltask.jobs.clock import mono_ms
from bulltask.jobs.errors import BrokerError, BulltaskError, JobError
from bulltask.jobs.names import Revocation
from bulltask.observe.bus import Bus
from bulltask.observe.events import CancelRequested, JobRevoked
from bulltask.transport.broker import Broker
from bulltask.transport.call import QueueKeys, SyncClient, command
from bulltask.transport.cluster_slots import slot_of_key
from bulltask.transport.operation import run_sync
from bulltask.transport.scripts.job import RevocationRequests, revocation_requests
from bulltask.worker.broker_backoff import QueueBackoff, ReconnectBackoff
from bulltask.worker.child_pool import ChildPool
from bulltask.worker.recovery import KilledAttempt
from bulltask.worker.slots import IDLE_MS, UNKNOWN_ATTEMPT, CancelReason, SlotState, SlotView

__all__ = ["GRACE_MS", "Canceller", "RevocationCheck", "TimeLimitCheck"]


GRACE_MS: Final = 5_000
"""How long a cancelled attempt may take to end before its child is killed."""

_INTERVAL_MS: Final = 100
_MAX_INTERVAL_MS: Final = 5_000
"""Maximum interval between signals. The interval grows, because signals interrupt system calls, and not all libraries
retry those."""


@dataclass(slots=True)
class CancelRequest:
    """A request to cancel an attempt.

    Attributes:
        kill_at_ms: When the child is killed if the attempt continues; ``None`` for never.
        notify_at_ms: When the signal is sent again unless the child acknowledges the request.
        pause_ms: The interval after that signal.
    """

    attempt: int
    kill_at_ms: int | None
    notify_at_ms: int = 0
    pause_ms: int = 100
    since_ms: int = field(default_factory=mono_ms)


class Canceller:
    """Cancels individual attempts: sends a request to the child, and kills the child if the attempt does not end.

    A signal makes the child read the request. It is sent again until the child acknowledges the request, because an
    attempt can be cancelled only in its task's code (:mod:`bulltask.worker.cancellation`). If the child is
    killed, its other jobs run again, and no crash is counted.

    An async attempt cannot end while another one blocks the event loop. If the loop has not turned since the request,
    the attempt that blocks it fails, and the one that was to be cancelled is released, unless its job was revoked.
    """

    def __init__(self, pool: ChildPool, bus: Bus) -> None:
        self._pool = pool
        self._bus = bus
        self._requests: dict[str, CancelRequest] = {}

    @property
    def interval_ms(self) -> int:
        """Milliseconds between ticks; short while attempts are being cancelled, or will be."""
        return _INTERVAL_MS if self._requests or self._pool.interrupt_at_ms is not None else IDLE_MS

    def cancel(self, view: SlotView, reason: CancelReason) -> bool:
        """Cancel an attempt whose slot this was when the decision was made.

        At the hard limit of a sync task the child is killed immediately; a soft limit can be set to warn the task.
        Returns False if the attempt has ended, was already cancelled for this or a stronger reason, or is part of a
        running batch and cannot be stopped alone.
        """
        current = self._pool.view(view.token)
        if current is None or current.attempt != view.attempt or current.attempt == UNKNOWN_ATTEMPT:
            return False
        if current.state is not SlotState.ACTIVE or reason <= current.cancel_reason:
            return False
        if reason is CancelReason.REVOKED and current.deadlines.in_batch:
            return False  # the same call also runs other jobs
        self._pool.request_cancel(current.token, current.attempt, reason)
        kill_now = reason is CancelReason.HARD_LIMIT and not current.deadlines.is_async
        grace_ms = 0 if kill_now else GRACE_MS
        self._requests[current.token] = CancelRequest(
            current.attempt, mono_ms() + grace_ms if reason >= CancelReason.HARD_LIMIT else None
        )
        self._bus.emit(CancelRequested(current.job_id, self._pool.index_of(current.token), reason.name.lower()))
        self._enforce(current.token)
        return True

    def cancel_jobs(self, queue_index: int, job_ids: Collection[str]) -> set[str]:
        """Cancel the attempts of these jobs in a queue; return the ids of those that this worker is running."""
        views = [view for view in self._pool.views() if view.queue_index == queue_index and view.job_id in job_ids]
        running = {view.job_id for view in views if view.state in {SlotState.ACTIVE, SlotState.FINISHING}}
        for view in views:
            self.cancel(view, CancelReason.REVOKED)
        return running

    def tick(self, now_ms: int, _missed: int, /) -> None:
        """Resend requests that have not been acknowledged, and kill children whose attempt has not ended in time.

        Shortly before the worker kills its children, cancel all attempts.
        """
        if self._pool.interrupt_at_ms is not None and now_ms >= self._pool.interrupt_at_ms:
            for view in tuple(self._pool.views()):
                self.cancel(view, CancelReason.SHUTDOWN)
        for token in tuple(self._requests):
            self._enforce(token)

    def _kill(self, view: SlotView, request: CancelRequest) -> None:
        found = self._pool.loop_blockers(view.token, request.since_ms) if view.deadlines.is_async else None
        blocked_ms, blockers = found or (0, [view])
        if blockers is None:  # C code that holds the GIL
            overdue = self._pool.overdue_in_child(view.token, mono_ms())
            blockers = [view] if len(overdue) <= 1 or view.cancel_reason is CancelReason.REVOKED else None
        if blockers is None:
            self._pool.kill_blocked(view.token, blocked_ms, is_crash=True)
            return
        if view.cancel_reason is CancelReason.REVOKED or view.token in {blocker.token for blocker in blockers}:
            self._pool.kill_to_cancel(KilledAttempt.of(view))
        for blocker in blockers:
            if blocker.token != view.token:
                self._pool.kill_to_cancel(KilledAttempt.of(blocker, blocked_ms))
        if not blockers:
            self._pool.kill_blocked(view.token, blocked_ms, is_crash=False)

    def _enforce(self, token: str) -> None:
        request, view = self._requests[token], self._pool.view(token)
        if view is None or view.attempt not in {request.attempt, UNKNOWN_ATTEMPT} or view.state is not SlotState.ACTIVE:
            del self._requests[token]  # the attempt has ended
        elif view.attempt == UNKNOWN_ATTEMPT:
            pass  # the slot is being written
        elif request.kill_at_ms is not None and mono_ms() >= request.kill_at_ms:
            self._kill(view, request)
            del self._requests[token]
        elif not view.acknowledged and mono_ms() >= request.notify_at_ms:
            self._pool.notify(token)
            request.notify_at_ms = mono_ms() + request.pause_ms
            request.pause_ms = min(2 * request.pause_ms, _MAX_INTERVAL_MS)


class TimeLimitCheck:
    """Checks the deadlines that children have written into their slots."""

    def __init__(self, pool: ChildPool, cancel: Callable[[SlotView, CancelReason], bool]) -> None:
        self._pool = pool
        self._cancel = cancel
        self._is_close = False

    @property
    def interval_ms(self) -> int:
        """Milliseconds between ticks; short if a deadline is close, or may soon be."""
        return _INTERVAL_MS if self._is_close or self._pool.has_short_limits else IDLE_MS

    def tick(self, now_ms: int, _missed: int, /) -> None:
        """Check all attempts."""
        views = tuple(self._pool.overdue_views(now_ms + IDLE_MS))
        self._is_close = bool(views)
        for view in views:
            deadlines = view.deadlines
            if 0 < deadlines.hard_at_ms <= now_ms:
                self._cancel(view, CancelReason.HARD_LIMIT)
            elif 0 < deadlines.soft_at_ms <= now_ms:
                self._cancel(view, CancelReason.SOFT_LIMIT)


_MAX_PER_TICK: Final = 100
"""Maximum number of jobs without a worker that one tick fails, with two round trips each."""
_MAX_GROUP: Final = 500
_MAX_GROUPS: Final = 100
"""Maximum number of commands with which one tick looks for requests."""


class RevocationCheck:
    """Ends jobs that have a revocation request in Redis (docs/adr/0025-revoked-jobs.md).

    Attempts in this worker are cancelled. The first worker that reads the request fails a job that is not running:
    the job's worker died, its attempt failed and would be retried, or it has never run. A job that another worker is
    running is left to that worker.

    While Redis is unavailable, nothing is checked. The requests are stored in Redis, so no request is lost.
    """

    interval_ms = 1_000

    def __init__(  # noqa: PLR0913, PLR0917 - one for each part that it connects
        self,
        broker: Broker,
        queues: Sequence[QueueKeys],
        cancel_jobs: Callable[[int, Collection[str]], Collection[str]],
        client: SyncClient,
        bus: Bus,
        backoff: ReconnectBackoff,
        may_have: Callable[[], bool] = lambda: True,
    ) -> None:
        self._may_have = may_have
        self._broker = broker
        self._queues = queues
        self._cancel_jobs = cancel_jobs
        self._client = client
        self._bus = bus
        self._backoff = backoff
        self._queue_backoff = QueueBackoff(queues, bus, broker.config)
        self._skipped = [0] * len(queues)
        self._groups = _groups(queues, in_cluster=broker.topology is not None)
        self._next_group = 0

    def add_queue(self, _keys: QueueKeys) -> None:
        """Check another queue, too, which is now the last one."""
        self._skipped.append(0)
        self._groups = _groups(self._queues, in_cluster=self._broker.topology is not None)
        self._next_group = 0

    def tick(self, _now_ms: int, _missed: int, /) -> None:
        """Check the requests of every queue in one round trip; a large number is checked in several ticks."""
        if self._backoff.is_active:
            return  # other services are trying to reconnect, and each call may take its whole timeout
        now_ms = self._broker.clock.now_ms()
        try:
            indexes = self._with_requests()
            calls = [revocation_requests(self._queues[index], now_ms, self._skipped[index]) for index in indexes]
            for index, requests in zip(indexes, self._client.try_many(calls) if calls else (), strict=True):
                with self._queue_backoff.recording(index):
                    self._handle_requests(index, requests)
                    self._queue_backoff.reset(index)
        except BrokerError as exc:
            self._backoff.record_failure(exc)

    def _with_requests(self) -> Sequence[int]:
        """Return the indexes of the queues that may have requests; one command checks up to 500 queues."""
        if len(self._queues) == 1:
            if self._may_have():
                return (0,)
            self._skipped[0] = 0
            return ()
        groups = self._groups[self._next_group :][:_MAX_GROUPS]
        self._next_group = (self._next_group + len(groups)) % len(self._groups)
        replies = self._client.try_many(
            [command("EXISTS", *(self._queues[index].revoked for index in group)) for group in groups]
        )
        found: list[int] = []
        for group, count in zip(groups, replies, strict=True):
            if count == 0:
                for index in group:
                    self._skipped[index] = 0
                    self._queue_backoff.reset(index)
            else:  # after an error reply, too, which may affect only one of the queues
                found += group
        return found

    def _handle_requests(self, index: int, requests: RevocationRequests | BulltaskError | None) -> None:
        if isinstance(requests, BulltaskError):
            raise requests
        self._skipped[index] = 0 if requests is None else requests.next_skipped
        if requests is None:
            return
        # This worker may run jobs without a lock, if the lock expired while Redis was unavailable.
        cancelled = self._cancel_jobs(index, {*requests.locked, *requests.unlocked})
        for job_id in [job_id for job_id in requests.unlocked if job_id not in cancelled][:_MAX_PER_TICK]:
            self._revoke(self._queues[index], job_id)

    def _revoke(self, keys: QueueKeys, job_id: str) -> None:
        try:
            revocation = run_sync(self._client, self._broker.revocation(keys.queue, job_id, terminate=True))
        except JobError:  # another client tried to revoke the next job of a job scheduler, which is impossible
            self._client.run(command("ZREM", keys.revoked, job_id))
        else:
            if revocation is Revocation.REVOKED:
                self._bus.emit(JobRevoked(job_id, keys.queue))


def _groups(queues: Sequence[QueueKeys], *, in_cluster: bool) -> list[list[int]]:
    """Return the indexes of the queues in groups whose keys one command can name."""
    by_slot: dict[int, list[int]] = {}
    for index, keys in enumerate(queues):
        by_slot.setdefault(slot_of_key(keys.base) if in_cluster else 0, []).append(index)
    return [slot[start : start + _MAX_GROUP] for slot in by_slot.values() for start in range(0, len(slot), _MAX_GROUP)]
