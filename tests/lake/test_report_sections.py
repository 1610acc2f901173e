"""Edge cases in a report's tables: no job, no price, no time, an inexact gap."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from bulltask.lake.reader import GapRow
from bulltask.lake.report import sections
from bulltask.lake.report.data import Period, ReportData, by_task
from tests.support.gold import queue_minute, task_minute
from tests.support.lake import LakeBuilder, at
from tests.support.lake_report import DAY, period


@pytest.fixture
def lake(tmp_path: Path) -> LakeBuilder:
    return LakeBuilder(tmp_path).gold("task_minute", [task_minute("10:00", finished=1)])


def data(lake: LakeBuilder, days: Period = DAY) -> ReportData:
    return ReportData(lake.lake, days)


def column(table: sections.ReportTable, name: str) -> list[Any]:
    index = [column.name for column in table.columns].index(name)
    return [row[index] for row in table.rows]


def test_costs_are_sorted_and_tasks_without_jobs_have_no_cost_per_job(lake: LakeBuilder) -> None:
    row = {"queue": "mail", "dt": "2026-11-22", "attempts": 1, "jobs": 1, "busy_s": 10.0, "wasted_s": 5.0}
    lake.gold(
        "cost_day",
        [
            {**row, "name": "long", "busy_s": 99.0, "cost": Decimal(1)},
            {**row, "name": "costly", "cost": Decimal(2)},
            {**row, "name": "no-job", "jobs": 0, "busy_s": 0.5, "wasted_s": 0.25, "cost": Decimal("0.5")},
        ],
    )
    costs = sections.costs(data(lake))
    assert [cost.name for cost in costs] == ["costly", "long", "no-job"]
    assert [cost.per_job for cost in costs] == [Decimal(2), Decimal(1), None]
    assert [cost.wasted for cost in costs] == [0.5, 5 / 99, 0.5]


def test_the_requeue_table_includes_tasks_that_only_stalled(lake: LakeBuilder) -> None:
    counts: list[dict[str, Any]] = [{name: 1} for name in ("requeued", "stalled", "waiting_children")]
    lake.gold("task_minute", [task_minute("10:00", *count, **count) for count in counts])
    assert set(column(sections.requeues(by_task(data(lake))), "name")) == {"requeued", "stalled"}


def test_an_inexact_gap_is_shown_as_a_lower_bound(lake: LakeBuilder) -> None:
    gap = {
        "lost": 1,
        "loss_reason": "stream-deleted",
        "last_at_before": at("2026-11-22 10:00"),
        "detected_at": at("2026-11-22 10:01"),
    }
    lake.gaps(
        [{**gap, "last_id_before": "1-0", "exact": False}, {**gap, "last_id_before": "2-0", "exact": True, "lost": 2}]
    )
    shown = sections.table_of(GapRow, data(lake).gaps)
    assert sorted(zip(column(shown, "lost"), column(shown, "exact"), strict=True)) == [(1, False), (2, True)]


def test_a_failure_lists_the_ids_of_its_five_latest_jobs(lake: LakeBuilder) -> None:
    row = {"queue": "mail", "name": "send", "error_fingerprint": "no", "count": 3}
    for day, ids in ((21, ["c", "b", "a"]), (22, ["f", "e", "d"])):
        lake.gold("errors_day", [{**row, "last_seen": at(f"2026-11-{day}"), "sample_job_ids": ids}])
    [failure] = sections.failures(data(lake, period("2026-11-21..2026-11-22")))
    assert failure.sample_job_ids == ["f", "e", "d", "c", "b"]


def test_a_minute_counts_as_incomplete_if_only_the_capacity_table_marks_it(lake: LakeBuilder) -> None:
    lake.gold("capacity_minute", [queue_minute("10:07", complete=False)])
    assert data(lake).incomplete == {"mail": {int(at("2026-11-22 10:07").timestamp()) // 60}}


def test_days_without_gold_tables_are_listed(lake: LakeBuilder) -> None:
    for day in (20, 22):
        lake.attempts([{"job_id": "1", "outcome": "failed", "ended_at": at(f"2026-11-{day}")}])
    result = data(lake, period("2026-11-20..2026-11-22"))
    assert result.unbuilt == [date(2026, 11, 20)]
    assert result.day_range == (date(2026, 11, 20), date(2026, 11, 22))


def test_the_build_time_of_gold_is_that_of_its_last_day(lake: LakeBuilder) -> None:
    lake.gold("task_minute", [task_minute(at("2026-11-21 10:00"), finished=1)])
    before = datetime.now(UTC)
    lake.gold("task_minute", [task_minute(at("2026-11-20 10:00"), finished=1)])
    built_at = data(lake, period("2026-11-21..2026-11-22")).built_at
    assert built_at is not None
    assert built_at <= before
