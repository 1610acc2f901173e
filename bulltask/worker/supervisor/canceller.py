"""Ending single runs: because they take too long, or because somebody wants them ended."""

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
"""So long a run may take to end that was told to, before its child is killed."""


_MOST_MS: Final = 5_000
"""A signal cuts system calls short, and not every library goes on with them: it comes ever more seldom."""


@dataclass(slots=True)
class CancelRequest:
    """A run that was told to end.

    Attributes:
        kill_at_ms: when its child is killed if it goes on, ``None`` for never.
        again_at_ms, pause_ms: when it is told again unless it has heard, and how much later the time after.
    """

    run: int
    kill_at_ms: int | None
    notify_at_ms: int = 0
    pause_ms: int = 100


class Canceller:
    """Responsible for ending single runs: it tells the child, and kills the child where that does not help.

    A child hears of an order by a signal, which is sent again until it has obeyed: it obeys only while the task's own
    code runs (:mod:`bulltask.worker.child.cancellation`). A run that takes no notice is killed with its child, whose
    other jobs run again; that costs them nothing.

    Args:
        pool: the children.
        bus: hears of every order.
    """

    interval_ms = 100

    def __init__(self, pool: ChildPool, bus: Bus) -> None:
        self._pool, self._bus = pool, bus
        self._requests: dict[str, CancelRequest] = {}

    def cancel(self, view: SlotView, reason: CancelReason) -> bool:
        """Have a run ended.

        A sync task that reaches its hard limit is killed at once: it was told before, or wanted no soft limit.

        Args:
            view: the slot of the run, as it was when that was decided.
            reason: why.

        Returns:
            False if the run has ended by now, or is to end for this or a more pressing cause already.
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
        """Have the runs of some jobs of a queue ended; return those of them that this worker's children have."""
        held = [view for view in self._pool.views() if view.queue_index == queue_index and view.job_id in job_ids]
        found = {view.job_id for view in held if view.state in {SlotState.ACTIVE, SlotState.SETTLING}}
        for view in held:
            self.cancel(view, CancelReason.REVOKED)
        return found

    def tick(self, _now_ms: int, _missed: int, /) -> None:
        """Tell those again that have not heard, and kill those that do not end."""
        for token in tuple(self._requests):
            self._pursue(token)

    def _pursue(self, token: str) -> None:
        request, view = self._requests[token], self._pool.view(token)
        if view is None or view.run not in {request.run, UNKNOWN_RUN} or view.state is not SlotState.ACTIVE:
            del self._requests[token]  # it has ended
        elif view.run == UNKNOWN_RUN:
            pass  # it is just being written
        elif request.kill_at_ms is not None and mono_ms() >= request.kill_at_ms:
            self._pool.kill_run(KilledRun.of(view))
            del self._requests[token]
        elif not view.acknowledged and mono_ms() >= request.notify_at_ms:
            self._pool.notify(token)
            request.notify_at_ms, request.pause_ms = mono_ms() + request.pause_ms, min(2 * request.pause_ms, _MOST_MS)
