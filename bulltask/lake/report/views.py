"""The tables and notes of a report, for HTML and Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from bulltask.lake.formatting import Unit, format_value, shorten
from bulltask.lake.report import sections
from bulltask.lake.report.aggregates import QueueAggregate
from bulltask.lake.report.build import Report
from bulltask.lake.report.recommendations import Recommendations, expectations
from bulltask.lake.report.sections import Cost, Failure, Reason
from bulltask.lake.report.tables import ReportColumn, ReportTable

__all__ = [
    "MAX_ROWS",
    "capacity_table",
    "notes",
    "queues_shown",
    "recommendation_text",
    "short_errors",
    "steps",
    "tables",
]


MAX_ROWS: Final = 20
"""The maximum number of rows of a table on the page; the most important rows come first."""

_MAX_NAMED: Final = 4
"""The maximum number of tasks listed for a reason."""


_REASON_WIDTH: Final = 80
"""The maximum length of a reason in a terminal."""


def tables(report: Report) -> Mapping[str, ReportTable]:
    """Return the report's tables by name, without columns that are the same in all rows."""
    has_queues = len(report.queues) > 1
    priced = any(cost.cost is not None for cost in report.costs)
    hidden_columns = () if has_queues else ("queue",)
    total = [Cost.combine(report.costs, "All")] if len(report.costs) > 1 else []
    result = {
        "tasks": sections.tasks(report.tasks).without(*hidden_columns),
        "reasons": _reasons(report.reasons),
        "requeues": sections.requeues(report.tasks).without(*hidden_columns),
        "capacity": capacity_table(report.queues, report.recommendations if has_queues else Recommendations()).first(
            MAX_ROWS, "bulltask pipeline report capacity"
        ),
        "slo": sections.slo(report.data).first(MAX_ROWS, "bulltask pipeline report slo").without(*hidden_columns),
        "cost": sections.cost([*report.costs, *total]).without(
            *hidden_columns, *(() if priced else ("cost", "per_job"))
        ),
        "gaps": sections.gaps(report.data).first(MAX_ROWS, "bulltask pipeline gaps"),
    }
    return (
        {**result, "expectations": expectations(report.recommendations.overall)}
        if report.recommendations.overall
        else result
    )


def _reasons(found: Sequence[Reason]) -> ReportTable:
    columns = [
        ReportColumn("error_fingerprint", "Error fingerprint", Unit.TEXT),
        ReportColumn("count", "Failures", Unit.COUNT),
        ReportColumn("fraction", "Of all failures", Unit.FRACTION),
        ReportColumn("tasks", "Tasks", Unit.TEXTS),
        ReportColumn("first_seen", "First seen", Unit.TIME),
        ReportColumn("last_seen", "Last seen", Unit.TIME),
    ]
    return ReportTable(
        columns,
        [
            [
                reason.error_fingerprint,
                reason.count,
                reason.fraction,
                list(dict.fromkeys(shorten(task.name) for task in reason.tasks))[:_MAX_NAMED],
                reason.first_seen,
                reason.last_seen,
            ]
            for reason in found
        ],
    )


def short_errors(found: Sequence[Failure]) -> ReportTable:
    """Return failures as a table for a terminal, without examples and with one job each."""
    shortened = (
        replace(
            failure,
            error_fingerprint=failure.error_fingerprint
            if len(failure.error_fingerprint) <= _REASON_WIDTH
            else failure.error_fingerprint[:_REASON_WIDTH] + "…",
            sample_job_ids=failure.sample_job_ids[:1],
        )
        for failure in found
    )
    return sections.errors(shortened).without("sample_failed_reason")


def capacity_table(queues: Sequence[QueueAggregate], recommendations: Recommendations) -> ReportTable:
    """Return the load of queues as a table, with the recommended concurrency for separate workers of each queue."""
    table = sections.capacity(queues)
    if not recommendations.by_queue:
        return table
    concurrencies = {queue: recommendation.concurrency for queue, recommendation in recommendations.by_queue.items()}
    rows = [[*row, concurrencies.get(aggregate.queue)] for row, aggregate in zip(table.rows, queues, strict=True)]
    return ReportTable([*table.columns, ReportColumn("concurrency", "Recommended concurrency", Unit.COUNT)], rows)


def recommendation_text(recommendations: Recommendations) -> str:
    """Return the recommendation as text; ``""`` if there is none."""
    recommendation = recommendations.overall
    if recommendation is None:
        return ""
    condition = " if the same workers process all these queues" if len(recommendations.by_queue) > 1 else ""
    target, max_wait = (
        format_value(recommendation.target, Unit.FRACTION),
        format_value(recommendation.max_wait_s, Unit.SECONDS),
    )
    summary = (
        f"Recommended concurrency{condition}: {recommendation.concurrency:,}, so that {target} of the attempts start"
        f" within {max_wait}, even in the busiest minute."
    )
    return "\n".join(["", summary, "", *(f"* {line}" for line in recommendation.reasoning), ""])


def queues_shown(report: Report, max_names: int = 8) -> str:
    """Return the names of the report's queues, or the number of queues if there are many."""
    names = [
        shorten(name) for name in sorted(aggregate.queue for aggregate in report.queues) or report.data.period.queues
    ]
    if not names:
        return "all queues"
    return (
        ("queue " if len(names) == 1 else "queues ") + ", ".join(names)
        if len(names) <= max_names
        else f"{len(names)} queues"
    )


def notes(report: Report) -> list[str]:
    """Return notes on how to read the numbers."""
    lines = [
        "All times are in UTC, by Redis' clock; backfilled jobs have the times of their clients' clocks. Each point on"
        f" a chart covers {steps(report.data.axis.step if report.data.axis else 1)}; numbers per minute are averages"
        " over that time.",
        "Percentiles of wait and run times are computed from log histograms (gold.task_minute), within 1% of the exact"
        " values. Waits below 50 ms are only as accurate as the clocks.",
        "Wait is the time from when a job is due until an attempt starts; run is the time from its start to its end.",
        "Finished jobs are completed or failed. Events do not contain failure reasons for requeued attempts,"
        " so only the last failure reason of a job is shown.",
        "After a requeued attempt, its job runs again: the attempt failed, was released (a shutdown, a rate limit)"
        " or rescheduled by its task, or its child crashed. Events do not distinguish these cases.",
        "Wasted time is the run time of attempts that failed, stalled or were requeued. For a task that reschedules"
        " itself, for example to poll, it includes the task's normal work.",
        "Backlog is the number of jobs added minus the number of jobs finished or removed since the start of the"
        " charts, including delayed jobs. After the first lost event of a queue, its backlog is unknown.",
    ]
    if report.data.built_at is not None:
        lines.append(f"The gold tables were built at {report.data.built_at:%Y-%m-%d %H:%M} UTC.")
    return lines


def steps(minutes: int) -> str:
    """Return a duration in words: ``a minute``, ``10 minutes``, ``2 hours``."""
    if minutes == 1:
        return "a minute"
    return f"{minutes} minutes" if minutes < 60 else f"{minutes // 60} hours" if minutes > 60 else "an hour"
