"""Which row of a job gold counts when several days have rows of it: the same one, whatever days are built."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import date, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from bulltask.lake.arrow import arrow_schema, latest_rows
from bulltask.lake.layout import Layout
from bulltask.lake.tables import ATTEMPTS, JOBS, Table
from bulltask.spark.gold.build import read_inputs
from bulltask.spark.gold.facts import DaySpan
from tests.support.lake import LakeBuilder, at

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

Rows = list[dict[str, Any]]

EARLY, LATE = date(2026, 11, 11), date(2026, 11, 21)
ALONE, TOGETHER = [DaySpan(EARLY, EARLY), DaySpan(LATE, LATE)], [DaySpan(EARLY, LATE)]
THEN, NOW, FILLED = at("2026-11-11 10:00"), at("2026-11-21 12:00"), at("2026-11-22 08:00")
OPEN = {"ended_at": None, "outcome": "open"}


def ran(job_id: str, started_at: datetime, **values: Any) -> dict[str, Any]:
    ended = started_at + timedelta(seconds=1)
    row = {"job_id": job_id, "incarnation": "5-0", "name": job_id, "outcome": "completed", "started_at": started_at}
    return {**row, "ended_at": ended, "as_of": ended, **values}


def job(job_id: str, finished_at: datetime | None, state: str = "completed", **values: Any) -> dict[str, Any]:
    row = {"job_id": job_id, "incarnation": "5-0", "name": job_id, "created_at": THEN, "state": state}
    return {**row, "finished_at": finished_at, "as_of": finished_at, **values}


FOUND: Any = {"source": "snapshot", "as_of": FILLED}
"""Written by a backfill, which knows the end of a job that was in a gap."""

ATTEMPTS_OF = {
    "its end is in a snapshot": [ran("a", THEN, **OPEN, as_of=NOW), ran("a", THEN, **FOUND)],
    "two have its number, and the first one is in a snapshot": [ran("b", NOW), ran("b", THEN, **FOUND)],
    "two have its number, and the last one is in a snapshot": [ran("c", THEN), ran("c", NOW, **FOUND)],
    "its beginning is unknown": [ran("d", THEN, incarnation=None), ran("d", NOW, incarnation=None)],
    "it was given up and came up again": [ran("e", THEN, **OPEN, as_of=THEN), ran("e", THEN, ended_at=NOW, as_of=NOW)],
}
JOBS_OF = {
    "it was removed, and had been done long before": [job("a", None, "removed", as_of=NOW), job("a", THEN, **FOUND)],
    "it failed and was retried by hand": [job("b", THEN, "failed"), job("b", NOW)],
    "it was given up and came up again": [job("c", None, "active", as_of=THEN), job("c", NOW)],
    "it was done and is given up": [job("d", THEN), job("d", None, "waiting", as_of=NOW)],
    "its beginning is unknown": [
        job("e", THEN, incarnation=None, created_at=None), job("e", NOW, incarnation=None, created_at=None)
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> Layout:
    lake = LakeBuilder(tmp_path_factory.mktemp("lake"))
    lake.attempts([row for rows in ATTEMPTS_OF.values() for row in rows])
    lake.jobs([row for rows in JOBS_OF.values() for row in rows])
    gap = {"after_id": "1-0", "after_at": THEN - timedelta(hours=1), "first_at": THEN + timedelta(hours=1)}
    return lake.gaps([{**gap, "detected_at": THEN + timedelta(hours=2), "lost": 9}]).layout


def that_count(table: Table, rows: Rows) -> Rows:
    """Of rows of one key, the one that counts, by what readers of the whole table do."""
    whole = [{"queue": "mail", "attempt": 1, **row} for row in rows]
    schema = pa.schema([field for field in arrow_schema(table) if field.name not in {"dt", "ingest_id"}])
    found: Rows = latest_rows(pa.Table.from_pylist(whole, schema), table).to_pylist()
    return found


def happened(rows: Iterable[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """What gold counts of rows, and the day of it."""
    found = []
    for row in rows:
        over = row.get("finished_at") or (row["as_of"] if row.get("state") == "removed" else None)
        moments = {"begun": row.get("started_at"), "ended": row.get("ended_at"), "over": over}
        found += [(what, str(moment.date())) for what, moment in moments.items() if moment is not None]
    return sorted(found)


@pytest.fixture(scope="module", params=[ALONE, TOGETHER], ids=["alone", "together"])
def inputs(request: pytest.FixtureRequest, spark: SparkSession, layout: Layout) -> list[tuple[DaySpan, Rows, Rows]]:
    """The attempts and the jobs that are read for some days, which are built each for itself or all at once."""
    read = [(span, read_inputs(spark, layout, span)) for span in request.param]
    return [(span, one.attempts.toArrow().to_pylist(), one.jobs.toArrow().to_pylist()) for span, one in read]


def counted(rows: Rows, name: str, span: DaySpan) -> list[tuple[str, str]]:
    told = happened(row for row in rows if row["name"] == name)
    return [(what, day) for what, day in told if str(span.first) <= day <= str(span.last)]


@pytest.mark.parametrize("case", ATTEMPTS_OF)
def test_an_attempt_counts_once_whatever_days_are_built(inputs: list[tuple[DaySpan, Rows, Rows]], case: str) -> None:
    rows = ATTEMPTS_OF[case]
    found = [one for span, attempts, _ in inputs for one in counted(attempts, rows[0]["name"], span)]
    assert sorted(found) == happened(that_count(ATTEMPTS, rows))


@pytest.mark.parametrize("case", JOBS_OF)
def test_a_job_counts_once_whatever_days_are_built(inputs: list[tuple[DaySpan, Rows, Rows]], case: str) -> None:
    rows = JOBS_OF[case]
    found = [one for span, _, jobs in inputs for one in counted(jobs, rows[0]["name"], span)]
    assert sorted(found) == happened(that_count(JOBS, rows))
