"""The queueing model matches known values and a simulation; recommendations match the rows that they are based on."""

from __future__ import annotations

import heapq
import random
import re
from datetime import timedelta
from typing import Any

import pytest

from bulltask.errors import ConfigError
from bulltask.lake.capacity import Load, min_slots, recommend, waiting_probability
from bulltask.lake.log_histogram import bucket_of
from tests.support.lake import at

# Erlang C, computed from its definition: load**c/c! * c/(c-load) / (sum of load**k/k! for k < c + the same).
KNOWN = [
    (1, 0.5, 0.5),  # one slot: the load itself
    (2, 1.0, 1 / 3),
    (3, 2.0, 4 / 9),
    (2, 1.5, 9 / 14),
    (4, 3.0, 27 / 53),
]


@pytest.mark.parametrize(("slots", "load", "fraction"), KNOWN)
def test_the_fraction_of_waiting_jobs_matches_erlang_c(slots: int, load: float, fraction: float) -> None:
    assert waiting_probability(slots, load) == pytest.approx(fraction, rel=1e-12)


def test_erlang_c_is_computed_for_thousands_of_slots() -> None:
    assert waiting_probability(5_000, 4_900) == pytest.approx(0.09, abs=0.03)  # from the square root staffing rule
    assert waiting_probability(5_000, 5_000) == waiting_probability(5_000, 6_000) == 1.0


def test_waits_for_one_slot_match_the_formula() -> None:
    # M/M/1: the fraction that waits longer than t is load * e^(-(1 - load) t / run)
    assert Load(5, 0.1).late_fraction(1, 0.4) == pytest.approx(0.5 * 2.718281828**-2)


def simulate(load: Load, slots: int, max_wait_s: float, jobs: int) -> float:
    """Return the fraction of late attempts in a simulation of ``jobs`` jobs."""
    rng, now, late = random.Random(11), 0.0, 0
    free = [0.0] * slots
    for _ in range(jobs):
        now += rng.expovariate(load.per_s)
        start = max(now, heapq.heappop(free))
        late += start - now > max_wait_s
        heapq.heappush(free, start + rng.expovariate(1 / load.run_s))
    return late / jobs


def test_the_model_matches_a_simulation() -> None:
    load = Load(20, 0.4)
    assert simulate(load, 9, 0.5, 200_000) == pytest.approx(load.late_fraction(9, 0.5), rel=0.15)


@pytest.mark.parametrize("load", [Load(0.01, 1), Load(5, 0.1), Load(20, 0.4), Load(300, 2.5), Load(10, 1, 9.0)])
@pytest.mark.parametrize("max_wait_s", [0.0, 0.1, 2.0])
def test_the_minimum_number_of_slots_meets_the_target_and_one_less_does_not(load: Load, max_wait_s: float) -> None:
    slots = min_slots(load, max_wait_s, 0.99)
    assert load.late_fraction(slots, max_wait_s) <= 0.01
    assert slots - 1 <= load.busy_slots or load.late_fraction(slots - 1, max_wait_s) > 0.01


def test_run_times_that_vary_more_need_more_slots() -> None:
    usual = min_slots(Load(20, 1), 2, 0.99)
    assert min_slots(Load(20, 1, 20.0), 2, 0.99) > usual == min_slots(Load(20, 1, 0.0), 2, 0.99)


def minute(index: int, added: int, *runs_ms: int, **others: Any) -> dict[str, Any]:
    ended = dict.fromkeys(("failed", "requeued", "stalled", "waiting_children"), 0) | {"completed": len(runs_ms)}
    start = at("2026-11-22 10:00") + timedelta(minutes=index)
    counts = [(bucket_of(run), 1) for run in runs_ms]
    row = {"queue": "mail", "name": "send", "minute": start, "added": added, "run_histogram_ms": counts}
    return row | ended | {"complete": True} | others


def test_the_recommendation_is_based_on_the_busiest_minute() -> None:
    rows = [minute(0, 30, 400, 400), minute(1, 1_200, 400), minute(2, 0, 400)]
    result = recommend(rows, peak_factor=1.0)
    assert result is not None
    assert (result.peak_minute, result.load.per_s) == (at("2026-11-22 10:01"), 20.0)
    assert result.load.run_s == pytest.approx(0.4, rel=0.01)
    assert result.concurrency == min_slots(Load(20, result.load.run_s, 0.0), 2.0, 0.99)
    assert result.expected.in_time >= 0.99
    assert any("1,200 jobs (20 per second)" in line for line in result.reasoning)
    assert any(f"With {result.concurrency} slots" in line for line in result.reasoning)
    assert any("one job at a time" in line for line in result.assumptions)


def test_retried_attempts_add_to_the_load() -> None:
    once = recommend([minute(0, 600, 1_000, 1_000)], peak_factor=1)
    twice = recommend([minute(0, 600, 1_000, 1_000, completed=1, requeued=1)], peak_factor=1)
    assert once is not None
    assert twice is not None
    assert twice.load.busy_slots == pytest.approx(2 * once.load.busy_slots)
    assert twice.concurrency > once.concurrency


def test_the_loads_of_all_tasks_are_added_up() -> None:
    rows = [minute(0, 60, 100), minute(0, 60, 10_000, name="render"), minute(1, 100, name="send")]
    result = recommend(rows, peak_factor=1)
    assert result is not None
    assert result.load.busy_slots == pytest.approx(10.1, rel=0.01)  # 1/s of 0.1 s and 1/s of 10 s
    assert not any("Run times vary" in line for line in result.reasoning)
    assert result.load.run_s == pytest.approx(5.05, rel=0.01)


def test_the_peak_is_the_last_minute_with_the_most_work() -> None:
    rows = [minute(0, 60, 10_000, name="render"), minute(1, 600, 10), minute(2, 60, 10_000, name="render")]
    result = recommend(rows)
    assert result is not None
    assert result.peak_minute == at("2026-11-22 10:02")


def test_attempts_that_wait_for_children_add_to_the_load() -> None:
    waiting = recommend([minute(0, 60, 500, 500, completed=1, waiting_children=1)], peak_factor=2)
    assert waiting is not None
    assert waiting.load.per_s == 2 * 2.0
    assert waiting.load.busy_slots == pytest.approx(4.0 * waiting.load.run_s)


def test_the_reasoning_mentions_run_times_that_vary() -> None:
    result = recommend([minute(0, 60, *[10] * 99, 100_000)])
    assert result is not None
    assert any(line.startswith("Run times vary widely (the variance is ") for line in result.reasoning)


def test_the_reasoning_mentions_too_few_slots_and_never_rounds_up_to_100() -> None:
    result = recommend([minute(0, 180, 500)], target=0.1, peak_factor=1)  # 1.5 slots are busy
    assert result is not None
    assert result.concurrency == 2
    assert any("; with 1, the queue would grow without bound" in line for line in result.reasoning)
    idle = recommend([minute(0, 1, 1)])
    assert idle is not None
    assert idle.expected.in_time > 0.9999
    assert any(line.startswith("With 1 slot, 99.99% of the attempts") for line in idle.reasoning)


def test_minutes_with_lost_events_are_used_only_if_no_others_exist() -> None:
    lost = minute(1, 6_000, complete=False)
    result = recommend([minute(0, 60, 500), lost])
    assert result is not None
    assert result.peak_minute == at("2026-11-22 10:00")  # the incomplete minute has a hundred times the jobs
    assert any(line.startswith("Not counted: 1 minute with") for line in result.reasoning)
    alone = recommend([lost | {"run_histogram_ms": {bucket_of(500): 3}}])
    assert alone is not None
    assert alone.peak_minute == at("2026-11-22 10:01")
    assert not any(line.startswith("Not counted") for line in alone.reasoning)


def test_observed_busy_slots_are_summed_across_queues() -> None:
    observed = [
        {"minute": at("2026-11-22 10:00"), "queue": queue, "busy_slots": 1.5, "peak_slots": 4}
        for queue in ("mail", "other")
    ]
    result = recommend([minute(0, 60, 500)], observed)
    assert result is not None
    assert any("Observed in 1 minute: 3 busy slots on average, 8 at most" in line for line in result.reasoning)


def test_observed_busy_slots_are_a_mean_and_a_maximum_over_the_minutes() -> None:
    observed = [
        {"minute": at(f"2026-11-22 10:0{index}"), "queue": "mail", "busy_slots": busy, "peak_slots": 2 * busy}
        for index, busy in enumerate([1, 3])
    ]
    result = recommend([minute(0, 60, 500)], observed)
    assert result is not None
    assert any("2 busy slots on average, 6 at most" in line for line in result.reasoning)


def test_nouns_are_singular_after_the_number_one() -> None:
    observed = [{"minute": at("2026-11-22 10:00"), "queue": "mail", "busy_slots": 1.0, "peak_slots": 1}]
    result = recommend([minute(0, 1, 60_000)], observed, target=0.01, max_wait=timedelta(days=1), peak_factor=1)
    assert result is not None
    reasoning = " ".join(result.reasoning)
    assert "UTC: 1 job (0.02 per second) with 1 attempt each." in reasoning
    assert "Observed in 1 minute: 1 busy slot on average, 1 at most." in reasoning
    full, few = recommend([minute(0, 99, 600)], peak_factor=1), recommend([minute(0, 1, 500)])
    assert full is not None
    assert few is not None
    assert "which keeps 1 slot busy all the time." in full.reasoning[1]
    assert full.reasoning[2].endswith("for bursts and growth, this is 1 slot.")
    assert any(line.startswith("With 1 slot, 99.") for line in few.reasoning)
    assert not re.search(r"(?<![\d.])1 (jobs|slots)", " ".join((*result.reasoning, *few.reasoning)))


@pytest.mark.parametrize(
    ("jobs", "runs_ms", "text"),
    [
        (1, 5, "which keeps < 0.0001 slots busy all the time"),
        (60, 3_600_000, "which keeps 3,6\\d\\d slots busy all the time"),
        (120_000, 1, r"120,000 jobs \(2,000 per second\)"),
    ],
)
def test_numbers_are_written_without_an_exponent(jobs: int, runs_ms: int, text: str) -> None:
    result = recommend([minute(0, jobs, runs_ms)])
    assert result is not None
    assert re.search(text, " ".join(result.reasoning))


def test_a_peak_factor_and_a_shorter_wait_need_more_slots() -> None:
    rows = [minute(0, 1_200, 1_000)]
    usual, growth, quick = recommend(rows), recommend(rows, peak_factor=2), recommend(rows, max_wait=timedelta(0))
    assert usual is not None
    assert growth is not None
    assert quick is not None
    assert growth.concurrency > usual.concurrency < quick.concurrency
    assert usual.load.busy_slots == pytest.approx(24, rel=0.01)
    assert growth.load.busy_slots == pytest.approx(40, rel=0.01)


def test_no_recommendation_is_made_without_jobs_or_runs() -> None:
    assert recommend([]) is None
    assert recommend([minute(0, 0, 400)]) is None
    assert recommend([minute(0, 50)]) is None


@pytest.mark.parametrize(
    "target", [{"target": 1.0}, {"target": 99}, {"peak_factor": 0.5}, {"peak_factor": float("nan")}, {"max_wait": -1}]
)
def test_an_invalid_target_is_rejected_by_name(target: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(target))):
        recommend([minute(0, 60, 500)], **target)
