"""Time limits: runs that take longer than they may."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from bulltask.worker.slots import SlotView
from bulltask.worker.states import Cause

__all__ = ["Limits"]


class Limits:
    """Responsible for noticing that a run has passed one of its deadlines, which its child has written into its slot.

    Args:
        late: gives the slots whose run may have passed one at a moment.
        interrupt: ends a run (:meth:`~bulltask.worker.supervisor.interrupting.Interrupting.interrupt`).
    """

    interval_ms = 100

    def __init__(self, late: Callable[[int], Iterable[SlotView]], interrupt: Callable[[SlotView, Cause], bool]) -> None:
        self._late, self._interrupt = late, interrupt

    def tick(self, now_ms: int, _missed: int, /) -> None:
        """Look at every run once."""
        for view in tuple(self._late(now_ms)):
            deadlines = view.deadlines
            if 0 < deadlines.hard_at_ms <= now_ms:
                self._interrupt(view, Cause.HARD_LIMIT)
            elif 0 < deadlines.soft_at_ms <= now_ms:
                self._interrupt(view, Cause.SOFT_LIMIT)
