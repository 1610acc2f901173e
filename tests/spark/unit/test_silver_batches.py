"""Silver derived batch by batch equals silver derived from all events together, for any batch boundaries."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pytest

from tests.support.batch_lake import IMMEDIATELY, NEVER, BatchLake, histories_in_queues, split_randomly
from tests.support.job_histories import histories, random_events, remove_ranges
from tests.support.lifecycle_oracle import LifecycleEvent, lifecycle
from tests.support.silver_rows import arrow_rows, assert_same, attempt_row, job_row


def derive_in_batches(event_lists: list[list[LifecycleEvent]], pieces: int, rng: random.Random) -> BatchLake:
    """Split each history into pieces; a batch has one piece of each, and may write inactive open jobs."""
    lake = BatchLake()
    for batch in zip(*(split_randomly(events, pieces, rng) for events in event_lists), strict=True):
        events = [event for part in batch for event in part]
        rng.shuffle(events)
        newest_ms = max((event.event_ms for event in events), default=0)
        lake.add_batch(events, rng.choice([NEVER, newest_ms - 700]))
    lake.add_batch([], IMMEDIATELY)
    return lake


def assert_is_fold(lake: BatchLake, events: list[LifecycleEvent]) -> tuple[int, int]:
    """Assert that the latest rows equal those derived from all events; return the numbers of jobs and attempts."""
    assert lake.open_event_count == 0
    job_rows = lifecycle(events)
    attempt_rows = [attempt_row(attempt) for job in job_rows for attempt in job.attempts]
    counts = {(job.queue, job.job_id, job.incarnation): job.attempt_count for job in job_rows}
    # A job that timed out while a worker had it, and was then released, has an open attempt until it starts again.
    actual = [row for row in arrow_rows(lake.latest_attempts()) if row[10] != "open" or row[3] <= counts[row[:3]]]
    assert_same(actual, attempt_rows)
    assert_same(arrow_rows(lake.latest_jobs()), [job_row(job) for job in job_rows])
    return len(job_rows), len(attempt_rows)


@pytest.mark.slow
def test_batches_derive_the_rows_of_all_events_in_600_random_histories(
    record_property: Callable[[str, object], None],
) -> None:
    rng = random.Random(11)
    event_lists = histories_in_queues("whole", 200, lambda seed: histories(seed, 3))
    event_lists += histories_in_queues("gaps", 200, lambda seed: remove_ranges(histories(seed, 3), random.Random(seed)))
    event_lists += histories_in_queues("noise", 200, lambda seed: random_events(seed, 30))
    lake = derive_in_batches(event_lists, 8, rng)
    jobs, attempts = assert_is_fold(lake, [event for events in event_lists for event in events])
    for name, count in {"jobs": jobs, "attempts": attempts, "looked_up": lake.looked_up}.items():
        record_property(name, count)
    assert jobs > 2000
    assert attempts > 4000
    assert lake.looked_up > 500


@pytest.mark.slow
def test_batches_of_at_most_one_event_derive_the_same_rows() -> None:
    for seed in range(3):
        events = [*histories(seed, 2), *random_events(seed, 12)]
        lake = derive_in_batches([events], 2 * len(events), random.Random(seed))
        assert_is_fold(lake, events)


def test_the_first_batch_of_a_lake_may_have_no_lifecycle_events() -> None:
    lake = BatchLake()
    lake.add_batch([])
    lake.add_batch([replace(event, event="progress") for event in history("added", "waiting")])
    assert (lake.open_event_count, lake.looked_up) == (0, 0)
    assert (lake.latest_attempts().num_rows, lake.latest_jobs().num_rows) == (0, 0)


def history(*steps: str) -> list[LifecycleEvent]:
    """Return the events of one job; a step is ``event`` or ``event<prev``, 10 ms after the previous step."""
    events = []
    for number, step in enumerate(steps):
        event, _, prev = step.partition("<")
        reason = "boom" if event == "failed" else None
        events.append(LifecycleEvent("q", "a", 1_000 + 10 * number, 0, event, prev=prev or None, failed_reason=reason))
    return events


HISTORY = history(
    "added", "waiting", "active", "waiting<active", "stalled", "active", "failed<active",
    "waiting<failed", "active", "completed<active", "removed<completed", "added", "waiting", "removed<waiting",
)  # fmt: skip


def columns(rows: pa.Table | None, *names: str) -> list[tuple[Any, ...]]:
    assert rows is not None
    return list(zip(*(rows[name].to_pylist() for name in names), strict=True))


def test_each_ended_attempt_and_finished_job_is_written_once() -> None:
    lake = BatchLake()
    for first, last in pairwise([0, 4, 5, 7, 8, 10, 12, len(HISTORY)]):
        lake.add_batch(HISTORY[first:last])
    assert columns(lake.attempts, "incarnation", "attempt", "outcome") == [
        ("1000-0", 1, "stalled"),
        ("1000-0", 2, "failed"),
        ("1000-0", 3, "completed"),
    ]
    assert columns(lake.jobs, "incarnation", "state", "attempt_count", "stalls") == [
        ("1000-0", "failed", 2, 1),
        ("1000-0", "completed", 3, 1),
        ("1110-0", "removed", 0, 0),
    ]
    assert lake.open_event_count == 0
    assert lake.looked_up == 1, "the manual retry"
    assert columns(lake.latest_jobs(), "incarnation") == [("1000-0",), ("1110-0",)]


def test_a_job_that_timed_out_is_rewritten_after_a_later_event() -> None:
    lake = BatchLake()
    events = history("added", "waiting", "active", "completed<active")
    lake.add_batch(events[:3])
    assert lake.open_event_count == 3
    other = replace(events[0], job_id="b", event_ms=9_000)
    lake.add_batch([other], time_out_before_ms=1_020)
    assert lake.open_event_count == 4, "the last event of job a is not older"
    lake.add_batch([replace(other, event="waiting", event_seq=1)], time_out_before_ms=1_021)
    assert lake.open_event_count == 2
    assert columns(lake.attempts, "outcome", "ended_at") == [("open", None)]
    assert columns(lake.jobs, "job_id", "state") == [("a", "active")]
    lake.add_batch(events[3:])
    assert lake.looked_up == 1
    assert columns(lake.latest_attempts(), "outcome", "run_ms") == [("completed", 10)]
    assert columns(lake.latest_jobs(), "state", "total_ms") == [("completed", 30)]


def test_a_rows_date_is_the_day_of_its_end_or_last_event() -> None:
    steps = history("added", "active", "waiting<active", "active", "completed<active")
    events = [replace(event, event_ms=86_400_000 * (20_000 + day)) for day, event in enumerate(steps)]
    lake = BatchLake()
    lake.add_batch(events)
    assert columns(lake.attempts, "attempt", "dt") == [(1, "2024-10-06"), (2, "2024-10-08")]
    assert columns(lake.jobs, "dt") == [("2024-10-08",)]
    lake = BatchLake()
    lake.add_batch(events[:2], IMMEDIATELY)
    assert columns(lake.attempts, "dt") == columns(lake.jobs, "dt") == [("2024-10-05",)]


def test_only_the_last_incarnation_of_a_job_remains_open() -> None:
    lake = BatchLake()
    lake.add_batch(history("added", "waiting", "active", "added", "waiting"))
    assert columns(lake.open_events, "event_ms") == [(1_030,), (1_040,)]


def test_a_manual_retry_does_not_rewrite_earlier_incarnations() -> None:
    steps = ["added", "waiting", "active", "completed<active"]
    lake = BatchLake()
    lake.add_batch(history(*steps, *steps))
    assert columns(lake.jobs, "incarnation") == [("1000-0",), ("1040-0",)]
    lake.add_batch(history(*steps, *steps, "waiting<completed", "active", "completed<active")[8:])
    assert columns(lake.jobs, "incarnation", "attempt_count") == [("1000-0", 1), ("1040-0", 1), ("1040-0", 2)]


def test_the_removal_of_a_finished_job_needs_no_earlier_events() -> None:
    lake = BatchLake()
    events = history("added", "waiting", "active", "completed<active", "removed<completed")
    lake.add_batch(events[:4])
    lake.add_batch(events[4:])
    assert lake.looked_up == 0
    assert columns(lake.jobs, "state") == [("completed",)]


def test_an_open_job_without_new_events_stays_unchanged() -> None:
    lake = BatchLake()
    events = history("added", "waiting", "active")
    lake.add_batch(events)
    before = lake.open_events
    lake.add_batch([replace(event, job_id="b") for event in history("added", "waiting", "active", "completed<active")])
    assert lake.open_events is not None
    assert lake.open_events.to_pylist() == before.to_pylist()  # type: ignore[union-attr]  # the first batch left it open
