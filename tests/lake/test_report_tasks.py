"""A report's tasks: their selection, attempts and charts."""

from __future__ import annotations

from typing import Any

import pytest

from bulltask.lake.report.data import MAX_TASKS, ReportData, TaskAggregate, by_task, top_with_others
from tests.support.gold import task_minute
from tests.support.lake import LakeBuilder, at
from tests.support.lake_report import DAY, build_report, period, values


def test_attempts_with_every_outcome_are_counted(lake: LakeBuilder) -> None:
    ends: dict[str, Any] = {"completed": 1, "failed": 2, "requeued": 3, "stalled": 4, "waiting_children": 5}
    rows = [task_minute("10:00", f"t{n:02}", queue=f"q{n % 2}", **ends) for n in range(MAX_TASKS + 2)]
    lake.gold("task_minute", rows)
    shown = top_with_others(by_task(ReportData(lake.lake, DAY)), TaskAggregate.combine)
    assert [(task.queue, task.attempts) for task in shown[:2]] == [("q0", 15), ("q1", 15)]
    assert (shown[-1].label, shown[-1].queue, shown[-1].attempts) == ("3 others", None, 45)
    assert len(shown) == MAX_TASKS


def test_a_task_without_activity_has_no_line(lake: LakeBuilder) -> None:
    lake.gold("task_minute", [task_minute("10:00", finished=1), task_minute("10:00", "idle")])
    assert ReportData(lake.lake, DAY).shown == [("mail", "send")]


def test_a_concurrency_is_recommended_for_the_day_with_the_most_work(lake: LakeBuilder) -> None:
    lake.gold("task_minute", [task_minute("10:00", runs=[60_000] * 60, added=60, completed=60)])
    other = at("2026-11-21 10:00")
    lake.gold("task_minute", [task_minute(other, runs=[10] * 600, added=600, completed=600)])
    recommendations = build_report(lake, period("2026-11-21..2026-11-22")).recommendations.overall
    assert recommendations is not None
    assert recommendations.peak_minute == at("2026-11-22 10:00")


def test_the_charts_of_wait_and_run_times_differ(lake: LakeBuilder) -> None:
    lake.gold("task_minute", [task_minute("10:00", waits=[20], runs=[30, 50])])
    assert (values(build_report(lake), "wait"), values(build_report(lake), "run")) == ({"send": [20]}, {"send": [50]})


def test_the_throughput_chart_is_shown_without_added_or_ended_jobs(lake: LakeBuilder) -> None:
    lake.gold("task_minute", [task_minute("10:00", waits=[20])])
    report = build_report(lake)
    assert values(report, "throughput") == {"added": [0], "completed": [0], "failed": [0]}
    assert "requeues" not in report.charts


@pytest.mark.parametrize(("minute", "covered"), [("23:58", "23:58 to 23:59 UTC"), ("23:59", "23:59 to 24:00 UTC")])
def test_the_covered_time_of_a_day_ends_at_24_00(lake: LakeBuilder, minute: str, covered: str) -> None:
    lake.gold("task_minute", [task_minute(minute, finished=1)])
    assert build_report(lake).covered == covered
