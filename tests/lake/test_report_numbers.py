"""The numbers in a report on tables with known rows."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from bulltask.errors import ConfigError, LakeError
from bulltask.lake.log_histogram import percentile
from bulltask.lake.reader import GapRow
from bulltask.lake.report import sections
from bulltask.lake.report.data import (
    MAX_SERIES,
    MAX_TASKS,
    UNKNOWN,
    Axis,
    Period,
    ReportData,
    by_queue,
    by_task,
)
from bulltask.lake.report.page import notes
from bulltask.lake.storage import Lake
from bulltask.lake.tables import BACKFILLS
from tests.support.gold import queue_minute, task_minute
from tests.support.lake import LakeBuilder, at
from tests.support.lake_report import DAY, build_report, period, values


def as_dicts(table: sections.ReportTable) -> list[dict[str, Any]]:
    return [dict(zip((column.name for column in table.columns), row, strict=True)) for row in table.rows]


def slo_row(dt: str, good: int, complete: bool = True) -> dict[str, Any]:
    fixed = {"queue": "mail", "name": "send", "metric": "wait", "threshold_ms": 2000, "target": 0.99, "measured": 1000}
    return {**fixed, "dt": dt, "good": good, "complete": complete}


def cost_row(dt: str, name: str = "send", cost: str | None = "1.5", **other: Any) -> dict[str, Any]:
    fixed = {"queue": "mail", "jobs": 100, "attempts": 120, "busy_s": 60.0, "wasted_s": 15.0}
    return {**fixed, "dt": dt, "name": name, "cost": None if cost is None else Decimal(cost), **other}


def test_the_headline_adds_up_all_tasks_and_minutes(lake: LakeBuilder) -> None:
    lake.gold(
        "task_minute",
        [
            task_minute("10:00", waits=[10] * 98 + [5000] * 2, runs=[600] * 100, finished=100, completed=95, failed=5),
            task_minute("10:09", "resize", waits=[10] * 100, runs=[3000] * 100, finished=100, completed=100),
        ],
    ).gold("capacity_minute", [queue_minute("10:00", peak_slots=7)])
    lake.gold("cost_day", [cost_row("2026-11-22", jobs=200)])
    shown = {figure.label: (figure.value, figure.detail, figure.bad) for figure in build_report(lake).figures}
    assert shown == {
        "Finished jobs": ("200", "20 per minute", False),
        "Failed": ("2.5%", "5 jobs", True),
        "Wait, p95": ("10 ms", "median 10 ms", False),
        "Run time, p95": ("3.01 s", "median 606 ms", False),
        "Busy slots": ("0.6", "peak 7", False),
        "Cost": ("1.50", "0.0075 per job", False),
    }


def test_the_headline_without_a_price_shows_the_worker_time(lake: LakeBuilder) -> None:
    lake.gold("task_minute", [task_minute("10:00", finished=1)]).gold("cost_day", [cost_row("2026-11-22", cost=None)])
    last = build_report(lake).figures[-1]
    assert (last.label, last.value, last.detail) == ("Run time", "1 min", "25% wasted")


def test_a_tasks_percentiles_are_computed_across_all_minutes(lake: LakeBuilder) -> None:
    rows = [task_minute("10:00", waits=[10] * 99, runs=[1]), task_minute("10:01", waits=[40_000], runs=[1])]
    lake.gold("task_minute", rows)
    [task] = by_task(ReportData(lake.lake, DAY))
    assert (percentile(task.wait, 0.5), percentile(task.wait, 0.99)) == (10, 10)
    assert percentile(task.wait, 1.0) == pytest.approx(40_000, rel=0.01)


def test_a_percentile_chart_has_gaps_where_there_are_no_attempts(lake: LakeBuilder) -> None:
    lake.gold("task_minute", [task_minute("10:00", waits=[20]), task_minute("10:02", waits=[30, 50], added=2)])
    assert values(build_report(lake), "wait") == {"send": [20, None, 50]}


def test_the_busiest_tasks_have_lines_and_the_other_tasks_share_one(lake: LakeBuilder) -> None:
    rows = [task_minute("10:00", f"t{n}", runs=[1000 * (10 - n)], waits=[10 + n]) for n in range(9)]
    lake.gold("task_minute", [*rows, task_minute("10:01", None, runs=[1], waits=[40])])
    shown = values(build_report(lake), "wait")
    alone = {f"t{n}": [10 + n, None] for n in range(6)}
    assert shown == {**alone, "4 others": [18, 40]}


def test_rates_are_per_minute_for_every_step_of_the_axis(lake: LakeBuilder) -> None:
    rows = [task_minute(at("2026-11-22 00:00") + timedelta(minutes=n), added=6) for n in range(1440)]
    lake.gold("task_minute", rows)
    report = build_report(lake)
    assert report.data.axis == Axis(start=rows[0]["minute"].timestamp() // 60, step=10, points=144)
    assert values(report, "throughput")["added"] == [6] * 144


def test_the_axis_covers_only_the_time_with_data(lake: LakeBuilder) -> None:
    lake.gold("task_minute", [task_minute("13:02", finished=1)]).gold("capacity_minute", [queue_minute("13:05")])
    report = build_report(lake)
    assert (report.covered, report.data.axis and report.data.axis.points) == ("13:02 to 13:06 UTC", 4)


def test_several_days_share_one_axis_with_wider_steps(lake: LakeBuilder) -> None:
    lake.gold("task_minute", [task_minute("00:00", added=60), task_minute(at("2026-11-24 23:59"), added=60)])
    report = build_report(lake, period("2026-11-21..2026-11-25"))
    assert report.data.axis
    assert report.data.axis.step == 30
    assert [value for value in values(report, "throughput")["added"] if value] == [2, 2]
    assert report.covered == "2026-11-22 00:00 to 2026-11-25 00:00 UTC"


def test_a_report_includes_only_the_requested_queues(lake: LakeBuilder) -> None:
    for queue in ("mail", "{other}"):
        lake.gold("task_minute", [task_minute("10:00", queue=queue, finished=1)])
        lake.gold("capacity_minute", [queue_minute("10:00", queue=queue)])
        lake.gaps(
            [{"queue": queue, "last_id_before": "1-0", "lost": 1, "exact": True, "detected_at": at("2026-11-22 11:00")}]
        )
    report = build_report(lake, Period(DAY.first, DAY.last, ("{other}",)))
    assert [task.queue for task in report.tasks] == ["{other}"]
    assert [queue.queue for queue in report.queues] == ["{other}"]
    assert [gap.queue for gap in report.data.gaps] == ["{other}"]


def test_tasks_after_the_fourteenth_are_added_up_in_one_row(lake: LakeBuilder) -> None:
    lake.gold(
        "task_minute", [task_minute("10:00", f"t{n:03}", runs=[1000 + n], waits=[n], finished=1) for n in range(200)]
    )
    lake.gold("cost_day", [cost_row("2026-11-22", f"t{n:03}") for n in range(200)])
    report = build_report(lake)
    assert [task.label for task in report.tasks[:2]] == ["t199", "t198"]  # the busiest
    assert (len(report.tasks), report.tasks[-1].label) == (MAX_TASKS, "186 others")
    assert sum(task.counts["finished"] for task in report.tasks) == 200
    assert sum(sum(task.run.values()) for task in report.tasks) == 200
    assert [cost.name for cost in report.costs[14:]] == ["186 others"]
    assert sum(cost.cost or 0 for cost in report.costs) == 300
    assert [curve.others for curve in report.charts["wait"].curves] == [False] * 6 + [True]


def test_a_task_in_two_queues_is_named_with_its_queue(lake: LakeBuilder) -> None:
    lake.gold("task_minute", [task_minute("10:00", queue=queue, finished=1) for queue in ("a", "b")])
    assert sorted(task.label for task in by_task(ReportData(lake.lake, DAY))) == ["send (a)", "send (b)"]


def test_a_row_without_a_task_name_counts_only_if_attempts_ran(lake: LakeBuilder) -> None:
    lake.gold("task_minute", [task_minute("10:00", None, complete=False), task_minute("10:00", finished=1)])
    assert [task.label for task in by_task(ReportData(lake.lake, DAY))] == ["send"]
    lake.gold("task_minute", [task_minute("10:01", None, runs=[5])])
    assert {task.label: percentile(task.run, 0.5) for task in by_task(ReportData(lake.lake, DAY))} == {
        "send": None,
        UNKNOWN: 5,
    }


def test_objectives_of_several_days_are_combined(lake: LakeBuilder) -> None:
    lake.gold("slo_day", [slo_row("2026-11-21", 1000), slo_row("2026-11-22", 985, complete=False)])
    objectives = sections.objectives(ReportData(lake.lake, period("2026-11-21..2026-11-22")))
    [row] = as_dicts(sections.table_of(sections.ObjectiveResult, objectives))
    assert (row["measured"], row["good"], row["complete"]) == (2000, 1985, False)
    assert row["error_budget_remaining"] == pytest.approx(1 - (15 / 2000) / 0.01)


def test_the_objective_with_the_lowest_budget_comes_first(lake: LakeBuilder) -> None:
    rows = [{**slo_row("2026-11-22", good), "name": name} for name, good in (("fine", 1000), ("over", 900))]
    lake.gold("slo_day", rows)
    result = as_dicts(sections.table_of(sections.ObjectiveResult, sections.objectives(ReportData(lake.lake, DAY))))
    assert [(row["name"], round(row["error_budget_remaining"], 2)) for row in result] == [("over", -9.0), ("fine", 1.0)]


def test_costs_of_several_days_are_added_up(lake: LakeBuilder) -> None:
    lake.gold("cost_day", [cost_row("2026-11-21"), cost_row("2026-11-22"), cost_row("2026-11-22", "free", None)])
    paid, free = sections.costs(ReportData(lake.lake, period("2026-11-21..2026-11-22")))
    assert (paid.jobs, paid.cost, paid.per_job, paid.wasted) == (200, Decimal(3), Decimal("0.015"), 0.25)
    assert (free.name, free.cost, free.per_job) == ("free", None, None)


def error_row(name: str, key: str, count: int, first: str, last: str, *ids: str) -> dict[str, Any]:
    times = {"first_seen": at(f"2026-11-{first}"), "last_seen": at(f"2026-11-{last}"), "dt": f"2026-11-{last[:2]}"}
    return {
        "queue": "mail",
        "name": name,
        "error_fingerprint": key,
        "count": count,
        "sample_job_ids": list(ids),
        **times,
    }


def test_failures_of_several_days_and_tasks_are_grouped_by_reason(lake: LakeBuilder) -> None:
    rows = [
        error_row("send", "no answer", 3, "21 10:00", "21 11:00", "old"),
        error_row("send", "no answer", 4, "22 09:00", "22 12:00", "new", "newer"),
        error_row("send", "refused", 1, "22 10:00", "22 10:00", "x"),
        error_row("pay", "no answer", 2, "22 08:00", "22 13:00", "p"),
    ]
    lake.gold("errors_day", rows)
    report = build_report(lake, period("2026-11-21..2026-11-22"))
    first = report.failures[0]
    assert (first.name, first.count, first.fraction) == ("send", 7, 7 / 8)
    assert first.sample_job_ids == ["new", "newer", "old"]
    assert (first.first_seen, first.last_seen) == (at("2026-11-21 10:00"), at("2026-11-22 12:00"))
    by_reason = [
        (reason.error_fingerprint, reason.count, reason.fraction, [task.name for task in reason.tasks])
        for reason in report.reasons
    ]
    assert by_reason == [("no answer", 9, 0.9, ["send", "pay"]), ("refused", 1, 0.1, ["send"])]
    assert report.reasons[0].last_seen == at("2026-11-22 13:00")


def test_reasons_after_the_tenth_are_only_counted(lake: LakeBuilder) -> None:
    lake.gold("errors_day", [error_row("send", f"e{n}", 100 - n, "22 10:00", "22 10:00") for n in range(13)])
    report = build_report(lake)
    assert ([reason.count for reason in report.reasons][:2], len(report.reasons)) == ([100, 99], 10)
    assert report.reasons_left == (3, 90 + 89 + 88)


def test_a_queues_means_are_computed_across_all_minutes(lake: LakeBuilder) -> None:
    busy = {"busy_slots": 3.0, "utilization": 0.75, "capacity": 4, "peak_slots": 5, "wait_p95": 700}
    rows = [
        queue_minute("10:00", added=10, finished_or_removed=4, backlog_delta=6, **busy),
        queue_minute("10:03", finished_or_removed=6, backlog_delta=-6),
    ]
    lake.gold("capacity_minute", rows)
    data = ReportData(lake.lake, DAY)
    assert data.axis
    [queue] = by_queue(data, data.axis.minutes)
    assert (queue.added, queue.finished_or_removed, queue.backlog, queue.busy_mean) == (10, 10, 0, 0.75)
    assert (queue.busy_peak, queue.capacity, queue.wait_p95) == (5, 4, 700)
    assert (queue.utilization_mean, queue.utilization_peak) == (0.1875, 0.75)
    assert values(build_report(lake), "backlog") == {"mail": [6, 6, 6, 0]}


def test_the_backlog_is_unknown_after_the_first_lost_event(lake: LakeBuilder) -> None:
    rows = [
        queue_minute("10:00", added=10, finished_or_removed=4, backlog_delta=6),
        queue_minute(
            "10:01", added=3, finished_or_removed=8_000, backlog_delta=-7_997, complete=False
        ),  # after a backfill
        queue_minute("10:03", finished_or_removed=6, backlog_delta=-6),
        queue_minute("10:02", queue="images", added=2, backlog_delta=2),
    ]
    report = build_report(lake.gold("capacity_minute", rows))
    assert {queue.queue: queue.backlog for queue in report.queues} == {"mail": None, "images": 2}
    assert values(report, "backlog") == {"mail": [6, None, None, None], "images": [0, 0, 2, 2]}
    assert any("its backlog is unknown" in note for note in notes(report))


def test_a_gap_in_one_queue_ends_the_line_for_several_queues(lake: LakeBuilder) -> None:
    busy = [queue_minute("10:00", queue=f"q{n}", busy_slots=9.0, backlog_delta=1) for n in range(MAX_SERIES)]
    idle = [queue_minute("10:01", queue="idle", backlog_delta=1, complete=False)]
    lines = values(build_report(lake.gold("capacity_minute", busy + idle)), "backlog")
    assert lines["2 others"] == [1, None]
    assert lines["q0"] == [1, 1]


def gap(after: str | None, first: str | None, detected: str, **values: Any) -> dict[str, Any]:
    times = {"last_at_before": after, "first_at_after": first, "detected_at": detected}
    moments = {name: text and at(f"2026-11-{text}") for name, text in times.items()}
    return {"last_id_before": after or "0-0", "lost": 10, "exact": True, "loss_reason": "trimmed", **moments, **values}


def test_minutes_incomplete_in_both_gaps_and_gold_are_counted_once(lake: LakeBuilder) -> None:
    lake.gold("task_minute", [task_minute("10:01", complete=False), task_minute("10:07", complete=False)])
    lake.gaps([gap("22 10:00", "22 10:02", "22 10:03")])
    incomplete = ReportData(lake.lake, DAY).incomplete
    begin = int(at("2026-11-22 10:00").timestamp()) // 60
    assert {queue: sorted(minutes) for queue, minutes in incomplete.items()} == {
        "mail": [begin, begin + 1, begin + 2, begin + 7]
    }


@pytest.mark.parametrize(
    ("times", "minutes"),
    [
        (("21 23:00", "22 00:01", "22 00:05"), 2),  # starts on the day before: only this day's minutes count
        (("22 23:58", "24 10:00", "24 10:05"), 2),  # detected two days later
        (("21 10:00", None, "21 10:05"), 0),  # ends before the day
        (("21 10:00", "21 23:59", "22 00:05"), 0),  # only detected on this day
        (("23 00:00", "23 00:05", "23 00:06"), 0),  # after the day
        ((None, "22 10:00", "22 10:05"), 1),  # the start is unknown
        (("22 10:00", None, "22 10:05"), 6),  # the end is not known yet
    ],
)
def test_only_the_minutes_of_a_gap_on_the_reported_day_count(
    lake: LakeBuilder, times: tuple[str | None, str | None, str], minutes: int
) -> None:
    lake.gold("task_minute", [task_minute("10:00", finished=1)]).gaps([gap(*times)])
    data = ReportData(lake.lake, DAY)
    assert sum(map(len, data.incomplete.values())) == minutes
    assert len(data.gaps) == (minutes > 0)


def test_lost_events_are_the_first_alert(lake: LakeBuilder) -> None:
    lake.gold("task_minute", [task_minute("10:00", finished=1)])
    assert build_report(lake).alerts == []
    lake.gaps([gap("22 10:00", "22 10:01", "22 10:02"), gap("22 10:01", "22 10:03", "22 10:04", exact=False, lost=5)])
    [alert] = build_report(lake).alerts
    assert (alert.kind, alert.title) == ("incomplete", "Incomplete: 4 minutes")
    assert "Events of mail were lost: at least 15." in alert.text
    lake.gaps([gap("22 10:02", "22 10:04", "22 10:05", queue="images")])
    [alert] = build_report(lake).alerts
    assert alert.title == "Incomplete: 5 minutes"  # the minutes of two queues are not added up
    assert "Events of images, mail were lost: at least 25." in alert.text


def test_backfilled_jobs_are_shown_with_their_gap(lake: LakeBuilder) -> None:
    lake.gold("task_minute", [task_minute("10:00", finished=1)]).gaps([gap("22 10:00", "22 10:01", "22 10:02")])
    backfill = {"backfilled_at": at("2026-11-23 08:00"), "detected_at": at("2026-11-22 10:02")}
    rows = [
        {"last_id_before": "22 10:00", "backfilled_jobs": 3, **backfill},
        {"last_id_before": "other", "backfilled_jobs": 9, **backfill},
    ]
    lake.write(BACKFILLS, rows)
    assert [row["backfilled_jobs"] for row in as_dicts(sections.table_of(GapRow, ReportData(lake.lake, DAY).gaps))] == [
        3
    ]


def test_an_alert_lists_days_without_gold_with_the_command_to_build_them(lake: LakeBuilder) -> None:
    lake.gold("task_minute", [task_minute("10:00", finished=1)])
    lake.attempts([{"job_id": "1", "outcome": "completed", "ended_at": at("2026-11-21 10:00")}])
    [alert] = build_report(lake, period("2026-11-20..2026-11-22")).alerts
    assert (alert.kind, alert.title) == ("unbuilt", "Not included: 2026-11-21")
    assert f"bulltask pipeline build gold --lake {lake.root} --days 2026-11-20..2026-11-22" in alert.text


def test_an_alert_lists_only_the_first_days_without_gold(lake: LakeBuilder) -> None:
    lake.gold("task_minute", [task_minute("10:00", finished=1)])
    lake.attempts([{"job_id": "1", "outcome": "failed", "ended_at": at(f"2026-11-{day}")} for day in range(14, 20)])
    [alert] = build_report(lake, period("2026-11-14..2026-11-22")).alerts
    assert alert.title == "Not included: 2026-11-14, 2026-11-15, 2026-11-16, 2026-11-17, 2026-11-18, …"


def test_the_alert_for_a_day_without_data_names_the_lakes_days(lake: LakeBuilder) -> None:
    lake.gold("task_minute", [task_minute("10:00", finished=1)])
    report = build_report(lake, period("2026-11-25"))
    assert report.empty
    assert report.charts == {}
    [alert] = report.alerts
    assert (alert.kind, alert.title) == ("empty", "No jobs for 25 November 2026")
    assert alert.text == "The lake has days from 2026-11-22 to 2026-11-22."


def test_the_alerts_for_an_unbuilt_day_name_the_command_to_build_it(lake: LakeBuilder) -> None:
    lake.events([{"event_id": "1795305600000-0", "event": "added"}])
    day = "2026-11-22"
    [empty, unbuilt] = build_report(lake, period(day)).alerts
    assert (empty.kind, unbuilt.kind) == ("empty", "unbuilt")
    assert "build gold" in empty.text
    assert "build gold" in unbuilt.text


def test_a_report_without_a_lake_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(LakeError, match="there is no lake"):
        ReportData(Lake(tmp_path / "missing"), DAY)


def load_rows(queue: str, rate: int) -> tuple[Sequence[dict[str, Any]], Sequence[dict[str, Any]]]:
    tasks = [
        task_minute(f"10:{n:02}", queue=queue, added=rate, completed=rate, finished=rate, runs=[1000] * rate)
        for n in range(30)
    ]
    return tasks, [queue_minute(f"10:{n:02}", queue=queue, busy_slots=rate / 60, peak_slots=2) for n in range(30)]


def test_a_concurrency_is_recommended_for_all_queues_and_for_each_queue(lake: LakeBuilder) -> None:
    for queue, rate in (("mail", 60), ("images", 600)):
        tasks, queues = load_rows(queue, rate)
        lake.gold("task_minute", tasks).gold("capacity_minute", queues)
    report = build_report(lake)
    assert report.recommendations.overall
    overall, by_queue_name = report.recommendations.overall, report.recommendations.by_queue
    assert overall.load.busy_slots == pytest.approx(11 * 1.2, rel=0.02)
    assert by_queue_name["mail"].load.busy_slots == pytest.approx(1.2, rel=0.02)
    assert by_queue_name["mail"].concurrency + by_queue_name["images"].concurrency >= overall.concurrency >= 14


def test_the_recommendation_is_based_on_the_busiest_day(lake: LakeBuilder) -> None:
    tasks, queues = load_rows("mail", 600)
    lake.gold("task_minute", tasks).gold("capacity_minute", queues)
    lake.gold("task_minute", [task_minute(at("2026-11-23 09:00"), added=1, finished=1, completed=1, runs=[5])])
    report = build_report(lake, period("2026-11-22..2026-11-23"))
    assert report.recommendations.overall
    assert report.recommendations.overall.peak_minute.date() == date(2026, 11, 22)


def test_a_period_of_more_than_a_year_is_rejected() -> None:
    with pytest.raises(ConfigError, match="more than 366 days"):
        period("2024-01-01..2026-11-22")


def test_a_period_has_a_title() -> None:
    titles = ["2026-11-22", "2026-11-20..2026-11-22", "2025-12-31..2026-01-01"]
    assert [period(text).title for text in titles] == [
        "22 November 2026",
        "20 November to 22 November 2026",
        "31 December 2025 to 1 January 2026",
    ]
