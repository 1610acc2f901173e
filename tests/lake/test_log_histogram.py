"""Log histograms: accurate percentiles, and exact sums of histograms."""

from __future__ import annotations

import itertools
import math
import random
import statistics

import pytest

from bulltask.lake.log_histogram import (
    ZERO,
    bucket_of,
    bucket_value,
    mean_and_variance,
    merge_histograms,
    percentile,
)

BORDERS = [base + near for power in range(5, 34) for base in (2**power,) for near in (-1, 0, 1)]


def counts_of(values: list[int]) -> dict[int, int]:
    return merge_histograms({bucket_of(value): 1} for value in values)


def nearest_rank(values: list[int], fraction: float) -> int:
    return sorted(values)[max(math.ceil(fraction * len(values)), 1) - 1]


def test_values_up_to_50_ms_are_exact() -> None:
    assert [bucket_value(bucket_of(ms)) for ms in range(51)] == [*range(51)]


def test_longer_values_are_accurate_to_one_percent() -> None:
    values = {ms: bucket_value(bucket_of(ms)) for ms in (51, 99, 100, *BORDERS, 86_400_000)}
    assert {ms: value for ms, value in values.items() if abs(value - ms) > ms * 0.01 + 0.5} == {}


def test_negative_values_count_as_zero() -> None:
    assert bucket_of(-30) == bucket_of(0) == ZERO
    assert percentile(counts_of([-30, 0]), 0.99) == 0


@pytest.mark.parametrize("shape", ["even", "tail", "steps"])
@pytest.mark.parametrize("fraction", [0.5, 0.95, 0.99, 1.0])
def test_percentiles_are_accurate_to_one_percent(shape: str, fraction: float) -> None:
    rng = random.Random(shape)
    draw = {
        "even": lambda: rng.randint(0, 10_000),
        "tail": lambda: int(rng.lognormvariate(5, 2)),
        "steps": lambda: rng.choice([3, 250, 30_000]),
    }[shape]
    values = [draw() for _ in range(2_000)]
    exact = nearest_rank(values, fraction)
    assert abs((percentile(counts_of(values), fraction) or 0) - exact) <= exact * 0.01 + 0.5


def test_an_hour_is_exactly_the_sum_of_its_minutes() -> None:
    rng = random.Random(7)
    minutes = [[int(rng.expovariate(0.001)) for _ in range(rng.randint(0, 40))] for _ in range(60)]
    hour = merge_histograms([*map(counts_of, minutes), None, [(ZERO, 0)]])
    assert {bucket: count for bucket, count in hour.items() if count} == counts_of([*itertools.chain(*minutes)])


def test_histograms_may_be_pairs_as_arrow_returns_them() -> None:
    assert merge_histograms([[(5, 1), (7, 2)], {7: 1}]) == {5: 1, 7: 3}


def test_mean_and_variance_are_close_to_those_of_the_values() -> None:
    values = [int(random.Random(seed).lognormvariate(6, 1)) for seed in range(3_000)]
    mean, variance = mean_and_variance(counts_of(values))
    assert mean == pytest.approx(statistics.mean(values), rel=0.01)
    assert variance == pytest.approx(statistics.pvariance(values), rel=0.03)


def test_an_empty_histogram_has_no_percentile() -> None:
    assert (percentile({}, 0.5), mean_and_variance({})) == (None, (0.0, 0.0))
