"""Cancels single runs: after a time limit, or because their job was revoked."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from bulltask.clock import mono_ms
from bulltask.events import CancelRequested
from bulltask.events.bus import Bus
from bulltask.worker.slots import UNKNOWN_RUN, SlotView
from bulltask.worker.states import CancelReason, SlotState
from bulltask.worker.supervisor.child_pool import ChildPool
from bulltask.worker.supervisor.killed_runs import KilledRun

__all__ = ["GRACE_MS", "Canceller"]

GRACE_MS: Final = 5_000
"""How long a cancelled run may take to end before its child is killed."""


_MAX_INTERVAL_MS: Final = 5_000
"""Longest interval between signals. It grows, because a signal interrupts system calls and not all libraries retry."""


@dataclass(slots=True)
class CancelRequest:
    """A request to cancel a run.

    Attributes:
        kill_at_ms: When the child is killed if the run continues, ``None`` for never.
        notify_at_ms, pause_ms: When the signal is sent again unless the child acknowledges, and the interval after it.
    """

    run: int
    kill_at_ms: int | None
    notify_at_ms: int = 0
    pause_ms: int = 100


class Canceller:
    """Cancels single runs: requests it from the child, and kills the child if that does not help.

    A signal tells the child about the request. It is sent again until the child acknowledges, because a run can be
    cancelled only in the task's own code (:mod:`bulltask.worker.child.cancellation`). If a run does not end, its child
    is killed; the child's other jobs run again, without a crash being counted.

    Args:
        pool: The children.
        bus: Receives an event for every request.
    """

    interval_ms = 100

    def __init__(self, pool: ChildPool, bus: Bus) -> None:
        self._pool, self._bus = pool, bus
        self._requests: dict[str, CancelRequest] = {}

    def cancel(self, view: SlotView, reason: CancelReason) -> bool:
        """Cancel a run.

        A sync task at its hard limit is killed at once: a soft limit was the warning, if one was set.

        Args:
            view: The slot of the run when the decision was made.
            reason: Why.

        Returns:
            False if the run has ended, or was already cancelled for this or a stronger reason.
        """
        now = self._pool.view(view.token)
        if now is None or now.run != view.run or now.run == UNKNOWN_RUN or now.state is not SlotState.ACTIVE:
            return False
        if reason <= now.cancel_reason:
            return False
        self._pool.request_cancel(now.token, now.run, reason)
        at_once = reason is CancelReason.HARD_LIMIT and not now.deadlines.is_async
        grace_ms = 0 if at_once else GRACE_MS
        self._requests[now.token] = CancelRequest(
            now.run, None if reason is CancelReason.SOFT_LIMIT else mono_ms() + grace_ms
        )
        self._bus.emit(CancelRequested(now.job_id, self._pool.index_of(now.token), reason.name.lower()))
        self._pursue(now.token)
        return True

    def cancel_jobs(self, queue_index: int, job_ids: Collection[str]) -> set[str]:
        """Cancel the runs of these jobs of a queue; return the ids of those that this worker's children have."""
        held = [view for view in self._pool.views() if view.queue_index == queue_index and view.job_id in job_ids]
        found = {view.job_id for view in held if view.state in {SlotState.ACTIVE, SlotState.SETTLING}}
        for view in held:
            self.cancel(view, CancelReason.REVOKED)
        return found

    def tick(self, _now_ms: int, _missed: int, /) -> None:
        """Repeat requests that are not acknowledged, and kill children whose run does not end."""
        for token in tuple(self._requests):
            self._pursue(token)

    def _pursue(self, token: str) -> None:
        request, view = self._requests[token], self._pool.view(token)
        if view is None or view.run not in {request.run, UNKNOWN_RUN} or view.state is not SlotState.ACTIVE:
            del self._requests[token]  # the run has ended
        elif view.run == UNKNOWN_RUN:
            pass  # the slot is being written
        elif request.kill_at_ms is not None and mono_ms() >= request.kill_at_ms:
            self._pool.kill_run(KilledRun.of(view))
            del self._requests[token]
        elif not view.acknowledged and mono_ms() >= request.notify_at_ms:
            self._pool.notify(token)
            request.notify_at_ms, request.pause_ms = (
                mono_ms() + request.pause_ms,
                min(2 * request.pause_ms, _MAX_INTERVAL_MS),
            )
