"""Log histograms: percentiles near the exact ones, and histograms that add up."""

from __future__ import annotations

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


def nearest_rank(values: list[int], share: float) -> int:
    return sorted(values)[max(math.ceil(share * len(values)), 1) - 1]


@pytest.mark.parametrize("ms", [*range(51)])
def test_up_to_50_ms_a_value_is_exact(ms: int) -> None:
    assert bucket_value(bucket_of(ms)) == ms


@pytest.mark.parametrize("ms", [51, 99, 100, *BORDERS, 86_400_000])
def test_a_longer_value_comes_back_within_one_percent(ms: int) -> None:
    assert abs(bucket_value(bucket_of(ms)) - ms) <= ms * 0.01 + 0.5


def test_a_wait_that_clocks_make_negative_is_none() -> None:
    assert bucket_of(-30) == bucket_of(0) == ZERO
    assert percentile(counts_of([-30, 0]), 0.99) == 0


@pytest.mark.parametrize("shape", ["even", "tail", "steps"])
@pytest.mark.parametrize("share", [0.5, 0.95, 0.99, 1.0])
def test_a_percentile_is_within_one_percent_of_the_exact_one(shape: str, share: float) -> None:
    chance = random.Random(shape)
    draw = {
        "even": lambda: chance.randint(0, 10_000),
        "tail": lambda: int(chance.lognormvariate(5, 2)),
        "steps": lambda: chance.choice([3, 250, 30_000]),
    }[shape]
    values = [draw() for _ in range(2_000)]
    exact = nearest_rank(values, share)
    assert abs((percentile(counts_of(values), share) or 0) - exact) <= exact * 0.01 + 0.5


def test_an_hour_is_exactly_the_sum_of_its_minutes() -> None:
    chance = random.Random(7)
    minutes = [[int(chance.expovariate(0.001)) for _ in range(chance.randint(0, 40))] for _ in range(60)]
    hour = merge_histograms([*map(counts_of, minutes), None, [(ZERO, 0)]])
    assert {one: count for one, count in hour.items() if count} == counts_of([one for all_ in minutes for one in all_])


def test_pairs_as_arrow_gives_them_are_added_up_too() -> None:
    assert merge_histograms([[(5, 1), (7, 2)], {7: 1}]) == {5: 1, 7: 3}


def test_mean_and_variance_are_those_of_the_values() -> None:
    values = [int(random.Random(seed).lognormvariate(6, 1)) for seed in range(3_000)]
    mean, variance = mean_and_variance(counts_of(values))
    assert mean == pytest.approx(statistics.mean(values), rel=0.01)
    assert variance == pytest.approx(statistics.pvariance(values), rel=0.03)


def test_an_empty_histogram_has_no_percentile() -> None:
    assert (percentile({}, 0.5), mean_and_variance({})) == (None, (0.0, 0.0))
