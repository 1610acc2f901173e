"""How many workers: the model against known values and against a simulation, the recommendation against its rows."""

from __future__ import annotations

import heapq
import random
import re
from datetime import timedelta
from typing import Any

import pytest

from bulltask.errors import ConfigError
from bulltask.lake.capacity import recommend
from bulltask.lake.log_histogram import bucket_of
from bulltask.lake.queueing import Load, fewest_workers, waiting_probability
from tests.support.lake import at

# Erlang C from its definition, load**c/c! * c/(c-load) / (sum of load**k/k! for k < c + the same), by hand:
KNOWN = [
    (1, 0.5, 0.5),  # one worker: the load itself
    (2, 1.0, 1 / 3),
    (3, 2.0, 4 / 9),
    (2, 1.5, 9 / 14),
    (4, 3.0, 27 / 53),
]


@pytest.mark.parametrize(("workers", "load", "share"), KNOWN)
def test_the_share_that_waits_is_erlangs(workers: int, load: float, share: float) -> None:
    assert waiting_probability(workers, load) == pytest.approx(share, rel=1e-12)


def test_erlangs_formula_holds_for_thousands_of_workers() -> None:
    assert waiting_probability(5_000, 4_900) == pytest.approx(0.09, abs=0.03)  # by the square root rule
    assert waiting_probability(5_000, 5_000) == waiting_probability(5_000, 6_000) == 1.0


def test_waits_for_one_worker_match_the_formula() -> None:
    # M/M/1: the share that waits longer than t is load * e^(-(1 - load) t / run)
    assert Load(5, 0.1).late_fraction(1, 0.4) == pytest.approx(0.5 * 2.718281828**-2)


def simulated(load: Load, workers: int, within_s: float, jobs: int) -> float:
    """The share of late attempts among so many."""
    chance, now, late = random.Random(11), 0.0, 0
    free = [0.0] * workers
    for _ in range(jobs):
        now += chance.expovariate(load.per_s)
        begins = max(now, heapq.heappop(free))
        late += begins - now > within_s
        heapq.heappush(free, begins + chance.expovariate(1 / load.run_s))
    return late / jobs


def test_the_model_matches_a_simulation() -> None:
    load = Load(20, 0.4)
    assert simulated(load, 9, 0.5, 200_000) == pytest.approx(load.late_fraction(9, 0.5), rel=0.15)


@pytest.mark.parametrize("load", [Load(0.01, 1), Load(5, 0.1), Load(20, 0.4), Load(300, 2.5), Load(10, 1, 9.0)])
@pytest.mark.parametrize("within_s", [0.0, 0.1, 2.0])
def test_the_fewest_workers_are_enough_and_one_less_is_not(load: Load, within_s: float) -> None:
    workers = fewest_workers(load, within_s, 0.99)
    assert load.late_fraction(workers, within_s) <= 0.01
    assert workers - 1 <= load.workers or load.late_fraction(workers - 1, within_s) > 0.01


def test_runs_that_vary_more_need_more_workers_and_steadier_ones_no_fewer() -> None:
    usual = fewest_workers(Load(20, 1), 2, 0.99)
    assert fewest_workers(Load(20, 1, 20.0), 2, 0.99) > usual == fewest_workers(Load(20, 1, 0.0), 2, 0.99)


def minute(index: int, enqueued: int, *runs_ms: int, **others: Any) -> dict[str, Any]:
    ended = dict.fromkeys(("failed", "retried", "stalled", "waiting_children"), 0) | {"completed": len(runs_ms)}
    begins = at("2026-11-22 10:00") + timedelta(minutes=index)
    counts = [(bucket_of(run), 1) for run in runs_ms]
    row = {"queue": "mail", "name": "send", "minute": begins, "enqueued": enqueued, "run_counts": counts}
    return row | ended | {"complete": True} | others


def test_the_busiest_minute_decides_and_the_reasoning_names_it() -> None:
    rows = [minute(0, 30, 400, 400), minute(1, 1_200, 400), minute(2, 0, 400)]
    found = recommend(rows, peak_factor=1.0)
    assert found is not None
    assert (found.peak_minute, found.attempts_per_s) == (at("2026-11-22 10:01"), 20.0)
    assert found.run_s == pytest.approx(0.4, rel=0.01)
    assert found.workers == fewest_workers(Load(20, found.run_s, 0.0), 2.0, 0.99)
    assert found.expected.in_time >= 0.99
    assert any("1,200 jobs (20 per second)" in line for line in found.reasoning)
    assert any(f"With {found.workers} workers" in line for line in found.reasoning)
    assert any("one job at a time" in line for line in found.assumptions)


def test_attempts_that_are_made_again_are_work_too() -> None:
    once = recommend([minute(0, 600, 1_000, 1_000)], peak_factor=1)
    twice = recommend([minute(0, 600, 1_000, 1_000, completed=1, retried=1)], peak_factor=1)
    assert once is not None
    assert twice is not None
    assert twice.load == pytest.approx(2 * once.load)
    assert twice.workers > once.workers


def test_tasks_that_share_the_workers_are_added_up_and_weighed() -> None:
    rows = [minute(0, 60, 100), minute(0, 60, 10_000, name="render"), minute(1, 100, name="send")]
    found = recommend(rows, peak_factor=1)
    assert found is not None
    assert found.load == pytest.approx(10.1, rel=0.01)  # 1/s of 0.1 s and 1/s of 10 s
    assert not any("Run times vary" in line for line in found.reasoning)
    assert found.run_s == pytest.approx(5.05, rel=0.01)


def test_the_minute_with_the_most_work_decides_not_that_with_the_most_jobs_and_of_equals_the_last() -> None:
    rows = [minute(0, 60, 10_000, name="render"), minute(1, 600, 10), minute(2, 60, 10_000, name="render")]
    found = recommend(rows)
    assert found is not None
    assert found.peak_minute == at("2026-11-22 10:02")


def test_an_attempt_that_waits_for_children_is_work_too_and_the_peak_factor_is_no_arrival() -> None:
    waiting = recommend([minute(0, 60, 500, 500, completed=1, waiting_children=1)], peak_factor=2)
    assert waiting is not None
    assert waiting.attempts_per_s == 2.0
    assert waiting.load == pytest.approx(2 * 2.0 * waiting.run_s)


def test_the_reasoning_mentions_runs_that_vary_within_a_task() -> None:
    found = recommend([minute(0, 60, *[10] * 99, 100_000)])
    assert found is not None
    assert any(line.startswith("Run times vary widely (the variance is ") for line in found.reasoning)


def test_the_reasoning_mentions_too_few_workers_and_rounds_no_share_up_to_all() -> None:
    found = recommend([minute(0, 180, 500)], target=0.1, peak_factor=1)  # 1.5 workers are busy
    assert found is not None
    assert found.workers == 2
    assert any("; with 1, the queue would grow without bound" in line for line in found.reasoning)
    idle = recommend([minute(0, 1, 1)])
    assert idle is not None
    assert idle.expected.in_time > 0.9999
    assert any(line.startswith("With 1 worker, 99.99 % of the attempts") for line in idle.reasoning)


def test_minutes_with_lost_events_are_not_counted_unless_there_are_no_others() -> None:
    lost = minute(1, 6_000, complete=False)
    found = recommend([minute(0, 60, 500), lost])
    assert found is not None
    assert found.peak_minute == at("2026-11-22 10:00")  # the other one has a hundred times the jobs
    assert any(line.startswith("Not counted: 1 minute with") for line in found.reasoning)
    alone = recommend([lost | {"run_counts": {bucket_of(500): 3}}])
    assert alone is not None
    assert alone.peak_minute == at("2026-11-22 10:01")
    assert not any(line.startswith("Not counted") for line in alone.reasoning)


def test_observed_workers_are_the_sums_of_all_queues() -> None:
    seen = [
        {"minute": at("2026-11-22 10:00"), "queue": queue, "busy_workers": 1.5, "peak_workers": 4}
        for queue in ("mail", "other")
    ]
    found = recommend([minute(0, 60, 500)], seen)
    assert found is not None
    assert (found.observed_mean, found.observed_peak) == (3.0, 8)
    assert any(
        "Observed in 1 minute: 3 attempts ran at a time on average, 8 at most" in line for line in found.reasoning
    )


def test_observed_workers_are_a_mean_and_a_maximum_over_the_minutes() -> None:
    seen = [
        {"minute": at(f"2026-11-22 10:0{index}"), "queue": "mail", "busy_workers": busy, "peak_workers": 2 * busy}
        for index, busy in enumerate([1, 3])
    ]
    found = recommend([minute(0, 60, 500)], seen)
    assert found is not None
    assert (found.observed_mean, found.observed_peak) == (2.0, 6)


def test_nouns_after_one_are_singular() -> None:
    seen = [{"minute": at("2026-11-22 10:00"), "queue": "mail", "busy_workers": 1.0, "peak_workers": 1}]
    found = recommend([minute(0, 1, 60_000)], seen, target=0.01, within=timedelta(days=1), peak_factor=1)
    assert found is not None
    told = " ".join(found.reasoning)
    assert "UTC: 1 job (0.0167 per second) with 1 attempt each." in told
    assert "Observed in 1 minute: 1 attempt ran at a time on average, 1 at most." in told
    full, few = recommend([minute(0, 99, 600)], peak_factor=1), recommend([minute(0, 1, 500)])
    assert full is not None
    assert few is not None
    assert "which keeps 1 worker busy all the time." in full.reasoning[1]
    assert full.reasoning[2].endswith("and growth: 1 worker.")
    assert any(line.startswith("With 1 worker, 99.") for line in few.reasoning)
    assert not any("1 jobs" in line or "1 workers" in line for line in (*found.reasoning, *few.reasoning))


@pytest.mark.parametrize(
    ("jobs", "runs_ms", "told"),
    [
        (1, 5, "which keeps less than 0.001 workers busy all the time"),
        (60, 3_600_000, "which keeps 3,6\\d\\d workers busy all the time"),
        (120_000, 1, r"120,000 jobs \(2,000 per second\)"),
    ],
)
def test_numbers_are_written_without_an_exponent(jobs: int, runs_ms: int, told: str) -> None:
    found = recommend([minute(0, jobs, runs_ms)])
    assert found is not None
    assert re.search(told, " ".join(found.reasoning))


def test_the_peak_factor_and_a_shorter_wait_ask_for_more() -> None:
    rows = [minute(0, 1_200, 1_000)]
    usual, growth, quick = recommend(rows), recommend(rows, peak_factor=2), recommend(rows, within=timedelta(0))
    assert usual is not None
    assert growth is not None
    assert quick is not None
    assert growth.workers > usual.workers < quick.workers
    assert usual.load == pytest.approx(24, rel=0.01)
    assert growth.load == pytest.approx(40, rel=0.01)


def test_without_jobs_or_runs_there_is_nothing_to_say() -> None:
    assert recommend([]) is None
    assert recommend([minute(0, 0, 400)]) is None
    assert recommend([minute(0, 50)]) is None


@pytest.mark.parametrize(
    "wrong", [{"target": 1.0}, {"target": 99}, {"peak_factor": 0.5}, {"peak_factor": float("nan")}, {"within": -1}]
)
def test_an_invalid_target_is_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        recommend([minute(0, 60, 500)], **wrong)
