"""Cancels attempts that exceed their time limits."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from bulltask.worker.slot import SlotView
from bulltask.worker.states import CancelReason

__all__ = ["TimeLimitCheck"]


class TimeLimitCheck:
    """Checks the deadlines that children have written into their slots.

    Args:
        overdue: Returns the slots whose attempt may have passed a deadline.
        cancel: Cancels an attempt (:meth:`~bulltask.worker.supervisor.canceller.Canceller.cancel`).
    """

    interval_ms = 100

    def __init__(
        self, overdue: Callable[[int], Iterable[SlotView]], cancel: Callable[[SlotView, CancelReason], bool]
    ) -> None:
        self._overdue, self._cancel = overdue, cancel

    def tick(self, now_ms: int, _missed: int, /) -> None:
        """Check all attempts."""
        for view in tuple(self._overdue(now_ms)):
            deadlines = view.deadlines
            if 0 < deadlines.hard_at_ms <= now_ms:
                self._cancel(view, CancelReason.HARD_LIMIT)
            elif 0 < deadlines.soft_at_ms <= now_ms:
                self._cancel(view, CancelReason.SOFT_LIMIT)
