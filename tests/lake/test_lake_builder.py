"""The lakes that tests build have the pipeline's format."""

from __future__ import annotations

from datetime import date
from decimal import Decimal
from pathlib import Path

import pytest

from bulltask.lake.reader import TableReader
from bulltask.lake.tables import COST_DAY, EVENTS, JOBS, TABLES, TASK_MINUTE, Table
from tests.support.lake import LakeBuilder, at


def rows(builder: LakeBuilder, table: Table) -> list[dict]:
    return TableReader(builder.lake).rows(table)


def test_rows_are_read_back_with_the_partitions_of_their_times(tmp_path: Path) -> None:
    lake = LakeBuilder(tmp_path)
    end = at("2026-11-22 00:00", -1)
    lake.jobs([{"job_id": "1", "state": "failed", "finished_at": end, "queue": "a{b}%"}])
    (row,) = rows(lake, JOBS)
    assert {name: value for name, value in row.items() if value is not None} == {
        "job_id": "1", "state": "failed", "finished_at": end, "as_of": end, "source": "events",
        "dt": "2026-11-21", "queue": "a{b}%",
    }  # fmt: skip
    assert TableReader(lake.lake).days(JOBS) == [date(2026, 11, 21)]


def test_an_events_time_is_read_from_its_id(tmp_path: Path) -> None:
    lake = LakeBuilder(tmp_path)
    lake.events([{"event_id": "1795305600123-4", "event": "added", "job_id": "1"}], batch=7)
    (row,) = rows(lake, EVENTS)
    moment = at("2026-11-22 00:00", 123)
    assert (row["event_ms"], row["event_seq"], row["event_at"]) == (1795305600123, 4, moment)
    assert row["dt"] == "2026-11-22"
    snapshot = lake.lake.open(EVENTS)
    assert snapshot is not None
    assert snapshot.batch == 7


def test_gold_tables_are_partitioned_by_day_only(tmp_path: Path) -> None:
    lake = LakeBuilder(tmp_path)
    lake.gold("task_minute", [{"queue": "mail", "name": "send", "minute": at("2026-11-22 10:00"), "complete": True}])
    lake.gold("cost_day", [{"queue": "mail", "name": "send", "dt": date(2026, 11, 22), "cost": Decimal("1.5")}])
    assert [row["dt"] for row in rows(lake, TASK_MINUTE)] == ["2026-11-22"]
    assert rows(lake, COST_DAY)[0]["cost"] == Decimal("1.5")


@pytest.mark.parametrize("table", TABLES.values(), ids=lambda table: table.full_name)
def test_an_unknown_column_and_a_row_without_a_day_are_rejected(tmp_path: Path, table: Table) -> None:
    lake = LakeBuilder(tmp_path)
    with pytest.raises(ValueError, match="has no stat"):
        lake.write(table, [{"stat": "failed"}])
    with pytest.raises((ValueError, KeyError)):
        lake.write(table, [{}])
