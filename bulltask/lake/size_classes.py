"""Times by size class: how the gold tables keep waits and runs so that percentiles of minutes add up to those of days.

A class holds the values up to 2 % longer than the class below it, so a percentile that is read from the counts is
within 1 % of the exact one, rounded to milliseconds (up to 50 ms it is exact), whatever the values are like. Unlike a
sketch, the counts of minutes add up to exactly those of their hour, a table that is built again has the same rows, and
no library is needed to read them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

__all__ = ["GROWTH", "ZERO", "Counts", "class_of", "merged", "moments", "percentile", "share_within", "value_of"]

GROWTH: Final = 1.02
"""How much longer the longest value of a class is than that of the class below."""

ZERO: Final = -1
"""The class of 0 ms; that of 1 ms is 0. What is below 0, by clocks that disagree, counts as 0."""

Counts = Mapping[int, int]
"""How many values there are of each class."""


def class_of(ms: int) -> int:
    """Return the class that a length in milliseconds is of."""
    return ZERO if ms <= 0 else math.ceil(math.log(ms) / math.log(GROWTH))


def value_of(size_class: int) -> int:
    """Return the length in milliseconds that stands for a class: within 1 % of all in it."""
    return 0 if size_class == ZERO else round(2 * GROWTH**size_class / (GROWTH + 1))


def merged(parts: Iterable[Counts | Iterable[tuple[int, int]] | None]) -> dict[int, int]:
    """Add up counts, for example those of the minutes of a day.

    Args:
        parts: the values of ``wait_counts`` or ``run_counts``, as mappings or, as Arrow gives them, lists of pairs;
            none counts as empty.
    """
    total: Counter[int] = Counter()
    for part in parts:
        for size_class, count in _pairs(part):
            total[size_class] += count
    return dict(sorted(total.items()))


def _pairs(part: Counts | Iterable[tuple[int, int]] | None) -> Iterable[tuple[int, int]]:
    if part is None:
        return ()
    return part.items() if isinstance(part, Mapping) else part


def percentile(counts: Counts, share: float) -> int | None:
    """Return the milliseconds that a share of the values do not pass, within 1 %; none when there are no values.

    Args:
        counts: how many there are of each class.
        share: 0 to 1, 0.95 for the 95th percentile.
    """
    wanted, seen = math.ceil(share * sum(counts.values())), 0
    for size_class, count in sorted(counts.items()):
        seen += count
        if seen >= wanted:
            return value_of(size_class)
    return None


def share_within(counts: Counts, ms: int) -> float | None:
    """Return which share of the values, 0 to 1, is not longer than so many milliseconds; none when there are none.

    Values within 2 % of ``ms`` may be counted on either side.
    """
    total = sum(counts.values())
    return sum(count for size_class, count in counts.items() if size_class <= class_of(ms)) / total if total else None


def moments(counts: Counts) -> tuple[float, float]:
    """Return the mean of the values in milliseconds and their variance; zeros when there are none."""
    total = sum(counts.values())
    if not total:
        return 0.0, 0.0
    mean = sum(value_of(size_class) * count for size_class, count in counts.items()) / total
    return mean, sum((value_of(size_class) - mean) ** 2 * count for size_class, count in counts.items()) / total
