"""Log-scale histograms of durations, as in DDSketch, with a growth factor of 1.02.

The gold tables store wait and run times as such histograms, so histograms of minutes can be merged into histograms of
days. A bucket holds durations up to 2% longer than the bucket below it. A percentile is therefore within 1% of the
exact one, rounded to milliseconds, and exact up to 50 ms. Unlike in DDSketch, no buckets are collapsed: merged
histograms are exactly those of the longer period, rebuilt tables have the same rows, and reading them needs no library.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

GROWTH: Final = 1.02
"""The longest duration of a bucket divided by that of the bucket below (gamma in DDSketch)."""

ZERO: Final = -1
"""The bucket of 0 ms; that of 1 ms is 0. Negative durations, from clocks that disagree, count as 0."""

Histogram = Mapping[int, int]
"""The number of durations in each bucket."""


def bucket_of(ms: int) -> int:
    """Return the bucket of a duration in milliseconds."""
    return ZERO if ms <= 0 else math.ceil(math.log(ms) / math.log(GROWTH))


def bucket_value(bucket: int) -> int:
    """Return the duration in milliseconds that represents a bucket, within 1% of all durations in it."""
    return 0 if bucket == ZERO else round(2 * GROWTH**bucket / (GROWTH + 1))


def merge_histograms(histograms: Iterable[Histogram | Iterable[tuple[int, int]] | None]) -> dict[int, int]:
    """Add up histograms, for example those of the minutes of a day.

    Args:
        histograms: Values of ``wait_histogram_ms`` or ``run_histogram_ms``: mappings or, as Arrow returns them, lists
            of pairs; ``None`` is empty.
    """
    total: Counter[int] = Counter()
    for histogram in histograms:
        for bucket, count in histogram.items() if isinstance(histogram, Mapping) else histogram or ():
            total[bucket] += count
    return dict(sorted(total.items()))


def percentile(counts: Histogram, quantile: float) -> int | None:
    """Return a percentile in milliseconds, within 1%; ``None`` for an empty histogram. ``quantile`` is 0 to 1."""
    rank, seen = math.ceil(quantile * sum(counts.values())), 0
    for bucket, count in sorted(counts.items()):
        seen += count
        if seen >= rank:
            return bucket_value(bucket)
    return None


def mean_and_variance(counts: Histogram) -> tuple[float, float]:
    """Return the mean in milliseconds and the variance; zeros for an empty histogram."""
    total = sum(counts.values())
    if not total:
        return 0.0, 0.0
    mean = sum(bucket_value(bucket) * count for bucket, count in counts.items()) / total
    return mean, sum((bucket_value(bucket) - mean) ** 2 * count for bucket, count in counts.items()) / total
