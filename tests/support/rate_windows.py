"""Count how many jobs start in the windows of a rate limit."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["max_starts_per_window"]

_TOLERANCE_MS = 5
"""Tolerance: times are whole milliseconds, including the end of a window."""


def max_starts_per_window(starts_ms: Iterable[int], duration_ms: int) -> int:
    """Return the maximum number of starts in one window.

    As in BullMQ, the first start opens a window, and the first start after its end opens the next.

    Args:
        starts_ms: The times at which jobs were acquired, by the server's clock.
        duration_ms: The length of a window.
    """
    maximum = count = 0
    ends_ms = -1
    for start_ms in sorted(starts_ms):
        if start_ms >= ends_ms - _TOLERANCE_MS:
            ends_ms, count = start_ms + duration_ms, 0
        count += 1
        maximum = max(maximum, count)
    return maximum
