"""``rate_limit`` of tasks: its forms, and the interval between starts."""

from __future__ import annotations

import math
from typing import Any

import pytest

from bulltask import App, ConfigError
from bulltask.config.parsers import TaskRate, task_rate


@pytest.mark.parametrize(
    ("value", "jobs", "period_s"),
    [
        (5, 5, 1),
        (0.5, 1, 2),
        ("5", 5, 1),
        ("10/s", 10, 1),
        ("100/m", 100, 60),
        ("1000/h", 1000, 3600),
        ("24/d", 24, 86_400),
        ("0.5/m", 1, 120),
        ("100/30s", 100, 30),
        (" 1 / 500 ms ", 1, 0.5),
    ],
)
def test_a_rate_is_a_number_per_second_or_a_string(value: object, jobs: float, period_s: float) -> None:
    rate = task_rate(value, "rate_limit")
    assert rate == TaskRate.of(jobs, period_s * 1000)
    assert rate.tolerance_ms == min(period_s * 10, 1000)
    assert rate.interval_ms * jobs == pytest.approx(period_s * 1000 + rate.tolerance_ms)


@pytest.mark.parametrize("value", [None, 0, 0.0, "0", "0/m"])
def test_none_and_zero_mean_no_limit(value: Any) -> None:
    assert task_rate(value, "rate_limit") is None


@pytest.mark.parametrize(
    "value", ["often", "10/x", "-1/s", -1, True, False, math.inf, math.nan, "1/0s", [], "1/m/s", ""]
)
def test_an_invalid_rate_is_rejected_when_the_task_is_defined(value: Any) -> None:
    with pytest.raises(ConfigError, match="rate_limit must be a number of jobs per second, or a rate such as '100/m'"):
        App("shop").task(rate_limit=value)(print)


@pytest.mark.parametrize("value", ["1/366d", 2_000_000])
def test_a_rate_has_bounds(value: Any) -> None:
    with pytest.raises(
        ConfigError, match="rate_limit must be between 1 job per 365 days and 1,000,000 jobs per second"
    ):
        task_rate(value, "rate_limit")


@pytest.mark.parametrize("jobs", [1, 2, 7, 10, 100, 1_000])
def test_no_period_has_more_starts_than_the_limit(jobs: int) -> None:
    """The starts of `startOrThrottle`, if all of them are as early as possible after a pause."""
    period = 60_000.0
    rate = TaskRate.of(jobs, period)
    starts, next_start, now = [], 0.0, 1e6
    for _ in range(3 * jobs):
        now = max(now, next_start)
        next_start = max(next_start, now - rate.tolerance_ms) + rate.interval_ms
        starts.append(now)
    assert max(sum(start <= at < start + period - 1e-3 for at in starts) for start in starts) == jobs
