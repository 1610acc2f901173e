"""What a rate limit allows, counted from the moments at which jobs were taken."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["max_starts_per_window"]

_EARLY_MS = 5
"""Moments are whole milliseconds, those of the limit's end too."""


def max_starts_per_window(starts_ms: Iterable[int], duration_ms: int) -> int:
    """Return the largest number of starts in one window.

    As BullMQ counts: the first start opens a window, and the first one after its end the next.

    Args:
        starts_ms: when jobs were taken, by the server's clock.
        duration_ms: how long a window lasts.
    """
    most = count = 0
    ends_ms = -1
    for start_ms in sorted(starts_ms):
        if start_ms >= ends_ms - _EARLY_MS:
            ends_ms, count = start_ms + duration_ms, 0
        count += 1
        most = max(most, count)
    return most
