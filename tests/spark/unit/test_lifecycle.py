"""The lifecycle of jobs is derived from their queue's events."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.job_histories import histories, random_events, remove_ranges
from tests.support.lifecycle_oracle import JobRow, LifecycleEvent, lifecycle


def derive(*steps: str) -> JobRow:
    """Return the row of one job; a step is ``event`` or ``event<prev``, 10 ms after the previous step."""
    events = []
    for number, step in enumerate(steps):
        event, _, prev = step.partition("<")
        reason = "ValueError: 'x'" if event == "failed" else None
        events.append(LifecycleEvent("q", "a", 10 * number, 0, event, name="mail" * (event == "added") or None,
                            prev=prev or None, failed_reason=reason))  # fmt: skip
    (job,) = lifecycle(events)
    return job


def attempts(job: JobRow) -> list[tuple[object, ...]]:
    return [(row.attempt, row.queued_ms, row.started_ms, row.ended_ms, row.outcome) for row in job.attempts]


def test_a_completed_job_has_an_attempt_with_its_wait_and_run_times() -> None:
    job = derive("added", "waiting", "active", "progress", "completed<active", "drained")
    (attempt,) = job.attempts
    assert attempts(job) == [(1, 10, 20, 40, "completed")]
    assert (attempt.incarnation, attempt.name, attempt.wait_ms, attempt.run_ms, attempt.failed_reason) == (
        "0-0",
        "mail",
        10,
        20,
        None,
    )
    assert (job.incarnation, job.name, job.created_ms, job.first_started_ms) == ("0-0", "mail", 0, 20)
    assert (job.state, job.finished_ms, job.wait_ms, job.run_ms, job.total_ms) == ("completed", 40, 10, 20, 40)


@pytest.mark.parametrize(
    ("steps", "outcomes"),
    [
        (["delayed", "waiting<delayed", "active"], ["requeued", "open"]),
        (["waiting<active", "active"], ["requeued", "open"]),
        (["waiting<active", "stalled", "active"], ["stalled", "open"]),
        (["waiting<active", "active", "delayed", "waiting<delayed", "active"], ["requeued", "requeued", "open"]),
        (["waiting-children<active", "waiting<waiting-children", "active"], ["waiting-children", "open"]),
        (["failed<active", "retries-exhausted", "waiting<failed", "active"], ["failed", "open"]),
        (["progress", "duplicated"], ["open"]),
        (["active"], ["open", "open"]),  # events between them are missing
    ],
)
def test_each_way_in_which_an_attempt_ends_has_its_outcome(steps: list[str], outcomes: list[str]) -> None:
    job = derive("added", "waiting", "active", *steps)
    assert [attempt.outcome for attempt in job.attempts] == outcomes
    assert [attempt.attempt for attempt in job.attempts] == list(range(1, len(outcomes) + 1))
    assert job.state == "active"
    assert job.stalls == outcomes.count("stalled")


def test_a_stalled_attempt_ends_when_its_job_waits_again() -> None:
    job = derive("added", "waiting", "active", "waiting<active", "stalled", "active")
    assert attempts(job) == [(1, 10, 20, 30, "stalled"), (2, 30, 50, None, "open")]


def test_a_release_is_no_attempt_and_the_job_has_waited_since_before_it() -> None:
    released = ["active", "released", "waiting<active"]
    job = derive("added", "waiting", *released, *released, "active", "waiting<active", *released[1:], "active")
    assert attempts(job) == [
        (-1, 10, None, 30, "released"), (-2, 10, None, 60, "released"), (1, 10, 80, 90, "requeued"),
        (-3, None, None, 100, "released"), (2, 90, 120, None, "open"),
    ]  # fmt: skip
    assert (job.attempt_count, job.releases, job.wait_ms, job.run_ms, job.first_started_ms) == (2, 3, 100, 10, 80)


def test_a_throttled_job_is_released_and_its_delay_is_no_wait_time() -> None:
    job = derive("added", "waiting", "active", "released", "delayed", "waiting<delayed", "active", "completed")
    assert attempts(job) == [(-1, 10, None, 30, "released"), (1, 50, 60, 70, "completed")]
    assert (job.attempt_count, job.wait_ms, job.run_ms) == (1, 10, 10)


def test_a_delay_is_not_counted_as_wait_time() -> None:
    job = derive("added", "delayed", "delayed", "waiting<delayed", "active", "completed")
    assert attempts(job) == [(1, 30, 40, 50, "completed")]


def test_a_failed_job_has_a_reason_until_it_is_retried_manually() -> None:
    job = derive("added", "waiting", "active", "failed<active")
    assert (job.state, job.failed_reason, job.error_fingerprint) == ("failed", "ValueError: 'x'", "ValueError: #")
    assert (job.attempts[0].failed_reason, job.attempts[0].error_fingerprint) == ("ValueError: 'x'", "ValueError: #")
    waiting = derive("added", "waiting", "active", "failed<active", "waiting<failed")
    assert (waiting.state, waiting.failed_reason, waiting.finished_ms, waiting.total_ms) == (
        "waiting",
        None,
        None,
        None,
    )
    retried = derive("added", "waiting", "active", "failed<active", "waiting<failed", "active", "completed<active")
    assert (retried.state, retried.failed_reason, retried.finished_ms) == ("completed", None, 60)
    assert [attempt.outcome for attempt in retried.attempts] == ["failed", "completed"]


def test_a_removed_job_keeps_the_state_it_finished_in() -> None:
    assert derive("added", "waiting", "active", "completed<active", "removed<completed").state == "completed"
    assert derive("added", "waiting", "removed<wait").state == "removed"
    assert derive("added").state == "unknown"


def test_a_reused_id_starts_an_incarnation_and_a_duplicate_does_not() -> None:
    steps = ["added", "waiting", "active", "completed", "added", "waiting", "duplicated", "active", "completed"]
    events = [LifecycleEvent("q", "a", ms, 0, event) for ms, event in enumerate(steps)]
    first, second = lifecycle(reversed(events))
    assert (first.incarnation, second.incarnation) == ("0-0", "4-0")
    assert [attempt.attempt for attempt in first.attempts + second.attempts] == [1, 1]


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (["completed<active"], [(1, None, None, 0, "completed")]),
        (["waiting", "completed<active"], [(1, None, None, 10, "completed")]),
        (["waiting<active", "active"], [(1, None, None, 0, "requeued"), (2, 0, 10, None, "open")]),
        (["waiting<active", "stalled"], [(1, None, None, 0, "stalled")]),
        (["stalled", "active"], [(1, None, None, 0, "stalled"), (2, None, 10, None, "open")]),
        (["stalled", "waiting<active"], [(1, None, None, 0, "stalled")]),
        (["waiting-children<active"], [(1, None, None, 0, "waiting-children")]),
        (["delayed", "waiting-children", "waiting", "waiting<delayed", "removed"], []),
        (["active", "active"], [(1, None, 0, None, "open"), (2, None, 10, None, "open")]),
        (["active", "waiting<delayed", "active"], [(1, None, 0, None, "open"), (2, 10, 20, None, "open")]),
    ],
)
def test_values_of_missing_events_are_null(steps: list[str], expected: list[tuple[object, ...]]) -> None:
    job = derive(*steps)
    assert attempts(job) == expected
    assert (job.incarnation, job.name, job.created_ms, job.total_ms) == (None, None, None, None)


@given(st.integers(0, 10_000))
def test_in_complete_histories_only_running_attempts_are_open(seed: int) -> None:
    events = histories(seed, 5)
    rows = lifecycle(events)
    seen = Counter(event.event for event in events)
    attempt_rows = [attempt for job in rows for attempt in job.attempts]
    assert len(attempt_rows) == seen["active"], "each active is one attempt or release"
    assert sum(job.releases for job in rows) == seen["released"]
    assert len(rows) == seen["added"]
    assert sum(job.stalls for job in rows) == seen["stalled"]
    assert [attempt.outcome for attempt in attempt_rows].count("failed") == seen["failed"]
    assert [attempt.outcome for attempt in attempt_rows].count("completed") == seen["completed"]
    for job in rows:
        started = [attempt for attempt in job.attempts if attempt.outcome != "released"]
        assert [attempt.attempt for attempt in started] == list(range(1, job.attempt_count + 1))
        numbers = sorted(attempt.attempt for attempt in job.attempts)
        assert numbers == [*range(-job.releases, 0), *range(1, job.attempt_count + 1)]
        assert all(attempt.outcome != "open" for attempt in job.attempts[:-1])
        assert all(attempt.wait_ms is not None and attempt.wait_ms >= 0 for attempt in started)
        assert all((attempt.run_ms is None) == (attempt.outcome == "open") for attempt in started)


@given(st.integers(0, 10_000))
def test_a_history_with_gaps_has_no_invented_times_or_outcomes(seed: int) -> None:
    whole = histories(seed, 5)
    left = remove_ranges(whole, random.Random(seed))
    times = {event.event_ms for event in left}
    ends = Counter(event.event for event in left)
    rows = lifecycle(left)
    attempt_rows = [attempt for job in rows for attempt in job.attempts]
    derived = {ms for row in attempt_rows for ms in (row.queued_ms, row.started_ms, row.ended_ms)}
    assert derived - {None} <= times
    assert [attempt.outcome for attempt in attempt_rows].count("failed") == ends["failed"]
    assert [attempt.outcome for attempt in attempt_rows].count("completed") == ends["completed"]
    started = len([attempt for attempt in attempt_rows if attempt.started_ms is not None])
    assert started <= ends["active"] <= started + ends["released"]


@given(st.integers(0, 10_000))
def test_the_lifecycle_does_not_depend_on_the_order_of_events(seed: int) -> None:
    events = random_events(seed, 30)
    shuffled = random.Random(seed).sample(events, len(events))
    assert lifecycle(shuffled) == lifecycle(events)
