"""Cancels individual attempts: after a time limit, or because their job was revoked."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final

from bulltask.clock import mono_ms
from bulltask.events import CancelRequested
from bulltask.events.bus import Bus
from bulltask.worker.slot import UNKNOWN_ATTEMPT, SlotView
from bulltask.worker.states import CancelReason, SlotState
from bulltask.worker.supervisor.child_pool import ChildPool
from bulltask.worker.supervisor.killed_attempts import KilledAttempt

__all__ = ["GRACE_MS", "Canceller"]

GRACE_MS: Final = 5_000
"""How long a cancelled attempt may take to end before its child is killed."""

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
        since_ms: When the request was made.
    """

    attempt: int
    kill_at_ms: int | None
    notify_at_ms: int = 0
    pause_ms: int = 100
    since_ms: int = field(default_factory=mono_ms)


class Canceller:
    """Cancels individual attempts: sends a request to the child, and kills the child if the attempt does not end.

    A signal makes the child read the request. It is sent again until the child acknowledges the request, because an
    attempt can be cancelled only in its task's code (:mod:`bulltask.worker.child.cancellation`). If the child is
    killed, its other jobs run again, and no crash is counted.

    An async attempt cannot end while another one blocks the event loop. If the loop has not turned since the request,
    the attempt that blocks it fails, and the one that was to be cancelled is released, unless its job was revoked.

    Args:
        pool: The children.
        bus: Receives an event for every request.
    """

    interval_ms = 100

    def __init__(self, pool: ChildPool, bus: Bus) -> None:
        self._pool, self._bus = pool, bus
        self._requests: dict[str, CancelRequest] = {}

    def cancel(self, view: SlotView, reason: CancelReason) -> bool:
        """Cancel an attempt.

        At the hard limit of a sync task the child is killed immediately; a soft limit can be set to warn the task.

        Args:
            view: The attempt's slot when the decision was made.
            reason: Why the attempt is cancelled.

        Returns:
            False if the attempt has ended, was already cancelled for this or a stronger reason, or is part of a
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
        running = {view.job_id for view in views if view.state in {SlotState.ACTIVE, SlotState.SETTLING}}
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
            request.notify_at_ms, request.pause_ms = (
                mono_ms() + request.pause_ms,
                min(2 * request.pause_ms, _MAX_INTERVAL_MS),
            )
