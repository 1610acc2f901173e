"""The tables of a report, at their edges: no job, no price, no time, half a gap."""

from __future__ import annotations

import os
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from bulltask.lake.report import sections, tables
from bulltask.lake.report.aggregates import by_task
from bulltask.lake.report.data import ReportData, read
from bulltask.lake.report.period import Period
from bulltask.lake.tables import TASK_MINUTE
from tests.support.gold import queue_minute, task_minute
from tests.support.lake import LakeBuilder, at
from tests.support.lake_report import DAY, period


@pytest.fixture
def lake(tmp_path: Path) -> LakeBuilder:
    return LakeBuilder(tmp_path).gold("task_minute", [task_minute("10:00", finished=1)])


def data(lake: LakeBuilder, days: Period = DAY) -> ReportData:
    return read(lake.layout, days)


def column(grid: tables.ReportTable, name: str) -> list[Any]:
    place = [one.name for one in grid.columns].index(name)
    return [row[place] for row in grid.rows]


def test_the_most_expensive_task_comes_first_and_a_task_without_jobs_has_no_cost_per_job(lake: LakeBuilder) -> None:
    row = {"queue": "mail", "dt": "2026-11-22", "attempts": 1, "jobs": 1, "busy_s": 10.0, "wasted_s": 5.0}
    lake.gold(
        "cost_day",
        [
            {**row, "name": "long", "busy_s": 99.0, "cost": Decimal(1)},
            {**row, "name": "dear", "cost": Decimal(2)},
            {**row, "name": "no-job", "jobs": 0, "busy_s": 0.5, "wasted_s": 0.25, "cost": Decimal("0.5")},
        ],
    )
    found = sections.costs(data(lake))
    assert [(one.name, one.per_job) for one in found] == [("dear", Decimal(2)), ("long", Decimal(1)), ("no-job", None)]
    assert [one.wasted for one in found] == [0.5, 5 / 99, 0.5]


def test_tasks_that_only_stalled_are_among_the_retries(lake: LakeBuilder) -> None:
    counts: list[dict[str, Any]] = [{name: 1} for name in ("retried", "stalled", "waiting_children")]
    lake.gold("task_minute", [task_minute("10:00", *one, **one) for one in counts])
    assert set(column(sections.retries(by_task(data(lake))), "name")) == {"retried", "stalled"}


def test_a_lower_bound_is_marked_as_such(lake: LakeBuilder) -> None:
    gap = {"lost": 1, "reason": "gone", "after_at": at("2026-11-22 10:00"), "detected_at": at("2026-11-22 10:01")}
    lake.gaps([{**gap, "after_id": "1-0", "exact": False}, {**gap, "after_id": "2-0", "exact": True, "lost": 2}])
    shown = sections.gaps(data(lake))
    assert sorted(zip(column(shown, "lost"), column(shown, "exact"), strict=True)) == [(1, "at least"), (2, "exact")]


def test_of_the_jobs_that_failed_alike_five_are_named_the_latest_first(lake: LakeBuilder) -> None:
    row = {"queue": "mail", "name": "send", "error_fingerprint": "no", "count": 3}
    for day, ids in ((21, ["c", "b", "a"]), (22, ["f", "e", "d"])):
        lake.gold("errors_day", [{**row, "last_seen": at(f"2026-11-{day}"), "sample_job_ids": ids}])
    [failure] = sections.failures(data(lake, period("2026-11-21..2026-11-22")))
    assert failure.sample_job_ids == ["f", "e", "d", "c", "b"]


def test_a_minute_that_only_the_queue_s_table_calls_incomplete_is_incomplete(lake: LakeBuilder) -> None:
    lake.gold("capacity_minute", [queue_minute("10:07", complete=False)])
    assert data(lake).incomplete == {"mail": {int(at("2026-11-22 10:07").timestamp()) // 60}}


def test_days_without_gold_tables_are_known(lake: LakeBuilder) -> None:
    for day in (20, 22):
        lake.attempts([{"job_id": "1", "outcome": "failed", "ended_at": at(f"2026-11-{day}")}])
    found = data(lake, period("2026-11-20..2026-11-22"))
    assert found.unbuilt == [date(2026, 11, 20)]
    assert found.day_range == (date(2026, 11, 20), date(2026, 11, 22))


def test_gold_was_built_when_its_last_day_was(lake: LakeBuilder) -> None:
    lake.gold("task_minute", [task_minute(at("2026-11-21 10:00"), finished=1)])
    for day, built in ((21, 2_000), (22, 1_000)):
        os.utime(lake.layout.day(TASK_MINUTE, date(2026, 11, day)), (built, built))
    assert data(lake, period("2026-11-21..2026-11-22")).built_at == datetime.fromtimestamp(1_000, UTC)
