"""The lifecycle derived with NumPy arrays equals the fold over events, for histories of every kind."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import asdict, replace

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bulltask.lake.storage import arrow_schema
from bulltask.lake.tables import ATTEMPTS, JOBS
from bulltask.spark.lifecycle import STATE_AFTER
from tests.support.job_histories import REASONS, far_future_histories, histories, random_events, remove_ranges
from tests.support.lifecycle_oracle import LifecycleEvent, lifecycle
from tests.support.silver_rows import (
    COLUMNS,
    arrow_rows,
    assert_same,
    attempt_row,
    attempts,
    events_table,
    job_row,
    jobs,
)

ANY_EVENT = st.builds(
    LifecycleEvent,
    queue=st.sampled_from(["mail", "photos"]),
    job_id=st.sampled_from(["a", "b"]),
    event_ms=st.integers(0, 50),
    event_seq=st.integers(0, 1200),
    event=st.sampled_from([*STATE_AFTER, "progress"]),
    name=st.sampled_from([None, "send"]),
    prev=st.sampled_from([None, "active", "waiting", "completed"]),
    failed_reason=st.sampled_from([None, *REASONS]),
)


def assert_arrays_are_fold(events: list[LifecycleEvent], table: pa.Table | None = None) -> tuple[int, int]:
    """Compare both derivations; return the numbers of jobs and attempts."""
    table = events_table(events) if table is None else table
    job_rows = lifecycle(events)
    attempt_rows = [attempt_row(attempt) for job in job_rows for attempt in job.attempts]
    assert_same(arrow_rows(attempts(table)), attempt_rows)
    assert_same(arrow_rows(jobs(table)), [job_row(job) for job in job_rows])
    return len(job_rows), len(attempt_rows)


@pytest.mark.slow
def test_arrays_and_python_derive_the_same_lifecycle_in_2100_random_histories(
    record_property: Callable[[str, object], None],
) -> None:
    seeds = range(700)
    events = [replace(event, queue=f"whole-{seed}") for seed in seeds for event in histories(seed, 2)]
    events += [
        replace(event, queue=f"gaps-{seed}")
        for seed in seeds
        for event in remove_ranges(histories(seed, 2), random.Random(seed))
    ]
    events += [replace(event, queue=f"noise-{seed}") for seed in seeds for event in random_events(seed, 24)]
    random.Random(0).shuffle(events)
    job_count, attempt_count = assert_arrays_are_fold(events)
    record_property("jobs", job_count)
    record_property("attempts", attempt_count)
    assert job_count > 5_000
    assert attempt_count > 10_000


@pytest.mark.slow
@given(st.lists(ANY_EVENT, max_size=12, unique_by=lambda event: (event.queue, event.event_ms, event.event_seq)))
def test_arrays_and_python_derive_the_same_lifecycle_from_any_events(events: list[LifecycleEvent]) -> None:
    assert_arrays_are_fold(events)


def test_times_after_the_year_9999_become_the_end_of_that_year() -> None:
    events = [replace(event, queue=f"far-{seed}") for seed in range(100) for event in far_future_histories(seed, 3)]
    assert_arrays_are_fold(events)
    rows = jobs(events_table(events))
    ended = [moment for moment in rows["finished_at"].to_pylist() if moment is not None]
    assert {moment.year for moment in ended} == {9999}
    assert max(ended) == max(rows["created_at"].drop_null().to_pylist())
    assert max(rows["total_ms"].drop_null().to_pylist()) < 10_000_000
    assert any(one.startswith("9223372036854775") for one in rows["incarnation"].drop_null().to_pylist())


def test_chunked_tables_and_equal_ids_in_two_queues_are_supported() -> None:
    events = [replace(event, queue=queue) for queue in ("a", "b") for event in histories(7, 6)]
    chunks = [
        pa.Table.from_pylist([asdict(event) for event in events[at : at + 5]], COLUMNS) for at in range(0, 200, 5)
    ]
    assert_arrays_are_fold(events[:200], pa.concat_tables(chunks))


def test_no_rows_are_derived_from_gap_rows_and_events_without_a_job() -> None:
    kinds = ("drained", "bulltask.gap", "paused", "added")
    table = pa.Table.from_pylist(
        [{"queue": "q", "event_ms": 1, "event_seq": 0, "event": kind} for kind in kinds], COLUMNS
    )
    assert (attempts(table).num_rows, jobs(table).num_rows) == (0, 0)


def test_derived_rows_have_the_schemas_of_the_lakes_tables() -> None:
    table = events_table(histories(1, 3))
    for rows, table_name in ((attempts(table), ATTEMPTS), (jobs(table), JOBS)):
        expected = [field for field in arrow_schema(table_name) if field.name != "dt"]
        assert list(rows.schema) == expected
        assert list(rows.slice(0, 0).schema) == expected
