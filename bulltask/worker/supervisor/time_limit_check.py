"""Time limits: runs that take longer than they may."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from bulltask.worker.slots import SlotView
from bulltask.worker.states import CancelReason

__all__ = ["TimeLimitCheck"]


class TimeLimitCheck:
    """Responsible for noticing that a run has passed one of its deadlines, which its child has written into its slot.

    Args:
        late: gives the slots whose run may have passed one at a moment.
        cancel: ends a run (:meth:`~bulltask.worker.supervisor.canceller.Canceller.interrupt`).
    """

    interval_ms = 100

    def __init__(
        self, late: Callable[[int], Iterable[SlotView]], cancel: Callable[[SlotView, CancelReason], bool]
    ) -> None:
        self._late, self._cancel = late, cancel

    def tick(self, now_ms: int, _missed: int, /) -> None:
        """Look at every run once."""
        for view in tuple(self._late(now_ms)):
            deadlines = view.deadlines
            if 0 < deadlines.hard_at_ms <= now_ms:
                self._cancel(view, CancelReason.HARD_LIMIT)
            elif 0 < deadlines.soft_at_ms <= now_ms:
                self._cancel(view, CancelReason.SOFT_LIMIT)
