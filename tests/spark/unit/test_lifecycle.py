"""The lifecycle of jobs, derived from the events of their queue."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bulltask.spark.lifecycle.fold import JobRow, LifecycleEvent, lifecycle
from tests.support.job_histories import cut, histories, noise


def told(*steps: str) -> JobRow:
    """The row of one job: a step is ``event`` or ``event<prev``, 10 ms after the one before."""
    events = []
    for number, step in enumerate(steps):
        event, _, prev = step.partition("<")
        reason = "ValueError: 'x'" if event == "failed" else None
        events.append(LifecycleEvent("q", "a", 10 * number, 0, event, name="mail" * (event == "added") or None,
                            prev=prev or None, failed_reason=reason))  # fmt: skip
    (job,) = lifecycle(events)
    return job


def attempts(job: JobRow) -> list[tuple[object, ...]]:
    return [(one.attempt, one.queued_ms, one.started_ms, one.ended_ms, one.outcome) for one in job.attempts]


def test_a_job_that_completes_has_one_attempt_with_its_wait_and_its_run() -> None:
    job = told("added", "waiting", "active", "progress", "completed<active", "drained")
    (attempt,) = job.attempts
    assert attempts(job) == [(1, 10, 20, 40, "completed")]
    assert (attempt.life, attempt.name, attempt.wait_ms, attempt.run_ms, attempt.reason) == (
        "0-0",
        "mail",
        10,
        20,
        None,
    )
    assert (job.life, job.name, job.created_ms, job.first_started_ms) == ("0-0", "mail", 0, 20)
    assert (job.state, job.finished_ms, job.wait_ms, job.run_ms, job.total_ms) == ("completed", 40, 10, 20, 40)


@pytest.mark.parametrize(
    ("steps", "outcomes"),
    [
        (["delayed", "waiting<delayed", "active"], ["retry", "open"]),
        (["waiting<active", "active"], ["retry", "open"]),
        (["waiting<active", "stalled", "active"], ["stalled", "open"]),
        (["waiting-children<active", "waiting<waiting-children", "active"], ["waiting-children", "open"]),
        (["failed<active", "retries-exhausted", "waiting<failed", "active"], ["failed", "open"]),
        (["progress", "duplicated"], ["open"]),
        (["active"], ["open", "open"]),  # a hole between them
    ],
)
def test_every_end_of_an_attempt_has_its_outcome(steps: list[str], outcomes: list[str]) -> None:
    job = told("added", "waiting", "active", *steps)
    assert [one.outcome for one in job.attempts] == outcomes
    assert [one.attempt for one in job.attempts] == list(range(1, len(outcomes) + 1))
    assert job.state == "active"
    assert job.stalls == outcomes.count("stalled")


def test_a_stalled_attempt_ended_when_the_job_waited_again_and_that_wait_is_the_next_attempts() -> None:
    job = told("added", "waiting", "active", "waiting<active", "stalled", "active")
    assert attempts(job) == [(1, 10, 20, 30, "stalled"), (2, 30, 50, None, "open")]


def test_a_delay_is_not_a_wait() -> None:
    job = told("added", "delayed", "delayed", "waiting<delayed", "active", "completed")
    assert attempts(job) == [(1, 30, 40, 50, "completed")]


def test_a_failed_job_has_its_reason_and_a_retry_by_hand_takes_it_away() -> None:
    job = told("added", "waiting", "active", "failed<active")
    assert (job.state, job.final_reason, job.error_key) == ("failed", "ValueError: 'x'", "ValueError: #")
    assert (job.attempts[0].reason, job.attempts[0].error_key) == ("ValueError: 'x'", "ValueError: #")
    waits = told("added", "waiting", "active", "failed<active", "waiting<failed")
    assert (waits.state, waits.final_reason, waits.finished_ms, waits.total_ms) == ("waiting", None, None, None)
    again = told("added", "waiting", "active", "failed<active", "waiting<failed", "active", "completed<active")
    assert (again.state, again.final_reason, again.finished_ms) == ("completed", None, 60)
    assert [one.outcome for one in again.attempts] == ["failed", "completed"]


def test_a_removed_job_keeps_the_state_it_finished_in() -> None:
    assert told("added", "waiting", "active", "completed<active", "removed<completed").state == "completed"
    assert told("added", "waiting", "removed<wait").state == "removed"
    assert told("added").state == "unknown"


def test_a_reused_id_begins_another_incarnation_and_an_existing_one_does_not() -> None:
    steps = ["added", "waiting", "active", "completed", "added", "waiting", "duplicated", "active", "completed"]
    events = [LifecycleEvent("q", "a", ms, 0, event) for ms, event in enumerate(steps)]
    first, second = lifecycle(reversed(events))
    assert (first.life, second.life) == ("0-0", "4-0")
    assert [one.attempt for one in first.attempts + second.attempts] == [1, 1]


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (["completed<active"], [(1, None, None, 0, "completed")]),
        (["waiting", "completed<active"], [(1, None, None, 10, "completed")]),
        (["waiting<active", "active"], [(1, None, None, 0, "retry"), (2, 0, 10, None, "open")]),
        (["waiting<active", "stalled"], [(1, None, None, 0, "stalled")]),
        (["stalled", "active"], [(1, None, None, 0, "stalled"), (2, None, 10, None, "open")]),
        (["stalled", "waiting<active"], [(1, None, None, 0, "stalled")]),
        (["waiting-children<active"], [(1, None, None, 0, "waiting-children")]),
        (["delayed", "waiting-children", "waiting", "waiting<delayed", "removed"], []),
        (["active", "active"], [(1, None, 0, None, "open"), (2, None, 10, None, "open")]),
        (["active", "waiting<delayed", "active"], [(1, None, 0, None, "open"), (2, 10, 20, None, "open")]),
    ],
)
def test_what_a_hole_in_the_stream_hides_is_left_empty(steps: list[str], expected: list[tuple[object, ...]]) -> None:
    job = told(*steps)
    assert attempts(job) == expected
    assert (job.life, job.name, job.created_ms, job.total_ms) == (None, None, None, None)


@given(st.integers(0, 10_000))
def test_complete_histories_leave_only_running_attempts_open_and_times_are_ordered(seed: int) -> None:
    events = histories(seed, 5)
    rows = lifecycle(events)
    seen = Counter(event.event for event in events)
    found = [one for job in rows for one in job.attempts]
    assert len(found) == seen["active"], "each active is one attempt"
    assert len(rows) == seen["added"]
    assert sum(job.stalls for job in rows) == seen["stalled"]
    assert [one.outcome for one in found].count("failed") == seen["failed"]
    assert [one.outcome for one in found].count("completed") == seen["completed"]
    for job in rows:
        assert [one.attempt for one in job.attempts] == list(range(1, len(job.attempts) + 1))
        assert all(one.outcome != "open" for one in job.attempts[:-1])
        assert all(one.wait_ms is not None and one.wait_ms >= 0 for one in job.attempts)
        assert all((one.run_ms is None) == (one.outcome == "open") for one in job.attempts)


@given(st.integers(0, 10_000))
def test_a_cut_history_invents_no_time_and_no_finish(seed: int) -> None:
    whole = histories(seed, 5)
    left = cut(whole, random.Random(seed))
    times = {event.event_ms for event in left}
    ends = Counter(event.event for event in left)
    rows = lifecycle(left)
    found = [one for job in rows for one in job.attempts]
    assert {ms for one in found for ms in (one.queued_ms, one.started_ms, one.ended_ms) if ms is not None} <= times
    assert [one.outcome for one in found].count("failed") == ends["failed"]
    assert [one.outcome for one in found].count("completed") == ends["completed"]
    assert len([one for one in found if one.started_ms is not None]) == ends["active"]


@given(st.integers(0, 10_000))
def test_the_order_in_which_events_come_does_not_matter(seed: int) -> None:
    events = noise(seed, 30)
    shuffled = random.Random(seed).sample(events, len(events))
    assert lifecycle(shuffled) == lifecycle(events)
