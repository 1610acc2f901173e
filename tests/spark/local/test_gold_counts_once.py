"""Gold counts each job and attempt once, even if it has rows on several days, whichever days are built."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import date, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from bulltask.lake.reader import latest_rows
from bulltask.lake.storage import Lake, arrow_schema
from bulltask.lake.tables import ATTEMPTS, JOBS, Table
from bulltask.spark.gold import DaySpan, read_inputs
from tests.support.lake import LakeBuilder, at

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

Rows = list[dict[str, Any]]

EARLY, LATE = date(2026, 11, 11), date(2026, 11, 21)
SEPARATE, TOGETHER = [DaySpan(EARLY, EARLY), DaySpan(LATE, LATE)], [DaySpan(EARLY, LATE)]
THEN, NOW, BACKFILLED_AT = at("2026-11-11 10:00"), at("2026-11-21 12:00"), at("2026-11-22 08:00")
OPEN = {"ended_at": None, "outcome": "open"}


def attempt(job_id: str, started_at: datetime, **values: Any) -> dict[str, Any]:
    ended_at = started_at + timedelta(seconds=1)
    row = {"job_id": job_id, "incarnation": "5-0", "name": job_id, "outcome": "completed", "started_at": started_at}
    return {**row, "ended_at": ended_at, "as_of": ended_at, **values}


def job(job_id: str, finished_at: datetime | None, state: str = "completed", **values: Any) -> dict[str, Any]:
    row = {"job_id": job_id, "incarnation": "5-0", "name": job_id, "created_at": THEN, "state": state}
    return {**row, "finished_at": finished_at, "as_of": finished_at, **values}


BACKFILLED: Any = {"source": "snapshot", "as_of": BACKFILLED_AT}
"""Columns of a row that a backfill wrote to add the outcome of a job that finished within a gap."""

ATTEMPTS_OF = {
    "end in a snapshot": [attempt("a", THEN, **OPEN, as_of=NOW), attempt("a", THEN, **BACKFILLED)],
    "two attempts with one number, the first in a snapshot": [attempt("b", NOW), attempt("b", THEN, **BACKFILLED)],
    "two attempts with one number, the last in a snapshot": [attempt("c", THEN), attempt("c", NOW, **BACKFILLED)],
    "unknown incarnation": [attempt("d", THEN, incarnation=None), attempt("d", NOW, incarnation=None)],
    "timed out and continued": [attempt("e", THEN, **OPEN, as_of=THEN), attempt("e", THEN, ended_at=NOW, as_of=NOW)],
}
JOBS_OF = {
    "removed long after it completed": [job("a", None, "removed", as_of=NOW), job("a", THEN, **BACKFILLED)],
    "failed and manually retried": [job("b", THEN, "failed"), job("b", NOW)],
    "timed out and continued": [job("c", None, "active", as_of=THEN), job("c", NOW)],
    "completed, retried and timed out": [job("d", THEN), job("d", None, "waiting", as_of=NOW)],
    "unknown incarnation": [
        job("e", THEN, incarnation=None, created_at=None), job("e", NOW, incarnation=None, created_at=None)
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    builder = LakeBuilder(tmp_path_factory.mktemp("lake"))
    builder.attempts([row for rows in ATTEMPTS_OF.values() for row in rows])
    builder.jobs([row for rows in JOBS_OF.values() for row in rows])
    gap = {
        "last_id_before": "1-0",
        "last_at_before": THEN - timedelta(hours=1),
        "first_at_after": THEN + timedelta(hours=1),
    }
    return builder.gaps([{**gap, "detected_at": THEN + timedelta(hours=2), "lost": 9}]).lake


def latest_of(table: Table, rows: Rows) -> Rows:
    """Return the row that supersedes the others, as a reader of the whole table does."""
    full_rows = [{"queue": "mail", "attempt": 1, **row} for row in rows]
    schema = pa.schema([field for field in arrow_schema(table) if field.name != "dt"])
    latest: Rows = latest_rows(pa.Table.from_pylist(full_rows, schema), table).to_pylist()
    return latest


def counted_events(rows: Iterable[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return the events that gold counts, each with its day."""
    events = []
    for row in rows:
        finished_at = row.get("finished_at") or (row["as_of"] if row.get("state") == "removed" else None)
        times = {"started": row.get("started_at"), "ended": row.get("ended_at"), "finished": finished_at}
        events += [(event, str(time.date())) for event, time in times.items() if time is not None]
    return sorted(events)


@pytest.fixture(scope="module", params=[SEPARATE, TOGETHER], ids=["separate", "together"])
def inputs(request: pytest.FixtureRequest, spark: SparkSession, lake: Lake) -> list[tuple[DaySpan, Rows, Rows]]:
    """The attempts and jobs that are read to build some days, separately or together."""
    read = [(span, read_inputs(spark, lake, span)) for span in request.param]
    return [(span, tables.attempts.toArrow().to_pylist(), tables.jobs.toArrow().to_pylist()) for span, tables in read]


def counted_within(rows: Rows, name: str, span: DaySpan) -> list[tuple[str, str]]:
    events = counted_events(row for row in rows if row["name"] == name)
    return [(event, day) for event, day in events if str(span.first) <= day <= str(span.last)]


@pytest.mark.parametrize("case", ATTEMPTS_OF)
def test_an_attempt_is_counted_once_whichever_days_are_built(
    inputs: list[tuple[DaySpan, Rows, Rows]], case: str
) -> None:
    rows = ATTEMPTS_OF[case]
    counted = [event for span, attempts, _ in inputs for event in counted_within(attempts, rows[0]["name"], span)]
    assert sorted(counted) == counted_events(latest_of(ATTEMPTS, rows))


@pytest.mark.parametrize("case", JOBS_OF)
def test_a_job_is_counted_once_whichever_days_are_built(inputs: list[tuple[DaySpan, Rows, Rows]], case: str) -> None:
    rows = JOBS_OF[case]
    counted = [event for span, _, jobs in inputs for event in counted_within(jobs, rows[0]["name"], span)]
    assert sorted(counted) == counted_events(latest_of(JOBS, rows))
