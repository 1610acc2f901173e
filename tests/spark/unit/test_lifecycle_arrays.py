"""The lifecycle on arrays equals the fold, for histories of every kind."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import asdict, replace

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bulltask.lake.arrow import arrow_schema
from bulltask.lake.tables import ATTEMPTS, JOBS
from bulltask.spark.lifecycle.arrow_rows import attempts, jobs
from bulltask.spark.lifecycle.fold import STATE_AFTER, LifecycleEvent, lifecycle
from tests.support.job_histories import REASONS, cut, far, histories, noise
from tests.support.silver_rows import COLUMNS, arrow_rows, assert_same, attempt_row, events_table, job_row

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
    table = events_table(events) if table is None else table
    told = lifecycle(events)
    tried = [attempt_row(one) for job in told for one in job.attempts]
    assert_same(arrow_rows(attempts(table)), tried)
    assert_same(arrow_rows(jobs(table)), [job_row(job) for job in told])
    return len(told), len(tried)


@pytest.mark.slow
def test_arrays_and_fold_agree_on_2100_random_histories(record_property: Callable[[str, object], None]) -> None:
    seeds = range(700)
    events = [replace(one, queue=f"whole-{seed}") for seed in seeds for one in histories(seed, 2)]
    events += [
        replace(one, queue=f"holes-{seed}") for seed in seeds for one in cut(histories(seed, 2), random.Random(seed))
    ]
    events += [replace(one, queue=f"noise-{seed}") for seed in seeds for one in noise(seed, 24)]
    random.Random(0).shuffle(events)
    told, tried = assert_arrays_are_fold(events)
    record_property("jobs", told)
    record_property("attempts", tried)
    assert told > 5_000
    assert tried > 10_000


@pytest.mark.slow
@given(st.lists(ANY_EVENT, max_size=12, unique_by=lambda one: (one.queue, one.event_ms, one.event_seq)))
def test_arrays_and_fold_agree_on_any_events(events: list[LifecycleEvent]) -> None:
    assert_arrays_are_fold(events)


def test_times_after_the_year_9999_become_its_end() -> None:
    events = [replace(one, queue=f"far-{seed}") for seed in range(100) for one in far(seed, 3)]
    assert_arrays_are_fold(events)
    told = jobs(events_table(events))
    ended = [moment for moment in told["finished_at"].to_pylist() if moment is not None]
    assert {moment.year for moment in ended} == {9999}
    assert max(ended) == max(told["created_at"].drop_null().to_pylist())
    assert max(told["total_ms"].drop_null().to_pylist()) < 10_000_000
    assert any(life.startswith("9223372036854775") for life in told["life"].drop_null().to_pylist())


def test_events_may_come_in_pieces_and_an_id_of_two_queues_is_two_jobs() -> None:
    events = [replace(one, queue=queue) for queue in ("a", "b") for one in histories(7, 6)]
    pieces = [pa.Table.from_pylist([asdict(one) for one in events[at : at + 5]], COLUMNS) for at in range(0, 200, 5)]
    assert_arrays_are_fold(events[:200], pa.concat_tables(pieces))


def test_rows_without_a_job_and_gap_rows_are_no_incarnations() -> None:
    odd = ("drained", "bulltask.gap", "paused", "added")
    table = pa.Table.from_pylist([{"queue": "q", "event_ms": 1, "event_seq": 0, "event": one} for one in odd], COLUMNS)
    assert (attempts(table).num_rows, jobs(table).num_rows) == (0, 0)


def test_rows_have_the_types_of_the_lakes_tables() -> None:
    table = events_table(histories(1, 3))
    for made, of in ((attempts(table), ATTEMPTS), (jobs(table), JOBS)):
        expected = [field for field in arrow_schema(of) if field.name not in {"dt", "ingest_id"}]
        assert list(made.schema) == expected
        assert list(made.slice(0, 0).schema) == expected
