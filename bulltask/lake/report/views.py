"""What the HTML and Markdown of a report share: its tables and notes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from bulltask.lake.formatting import Unit, format_value, pluralize, shorten
from bulltask.lake.report import sections
from bulltask.lake.report.aggregates import QueueAggregate
from bulltask.lake.report.build import Report
from bulltask.lake.report.recommendations import Recommendations, expectations
from bulltask.lake.report.sections import Cost, Failure, Reason
from bulltask.lake.report.tables import ReportColumn, ReportTable

__all__ = ["ROWS", "capacity_table", "notes", "queues_shown", "recommendation_text", "short_errors", "steps", "tables"]


ROWS: Final = 20
"""How many rows of a table are on the page; the first ones matter most."""

_MAX_NAMED: Final = 4
"""How many tasks of a reason are listed."""


_REASON_WIDTH: Final = 80
"""Characters of a reason in a terminal."""


def tables(report: Report) -> Mapping[str, ReportTable]:
    """Return the report's tables by name, without columns that are the same in all rows or of no use to readers."""
    several = len(report.queues) > 1
    priced = any(cost.cost is not None for cost in report.costs)
    hidden = () if several else ("queue",)
    total = [Cost.together(report.costs, "All")] if len(report.costs) > 1 else []
    found = {
        "tasks": sections.tasks(report.tasks).without(*hidden),
        "reasons": _reasons(report.reasons),
        "retries": sections.retries(report.tasks).without(*hidden),
        "capacity": capacity_table(report.queues, report.recommendations if several else Recommendations()).first(
            ROWS, "bulltask pipeline report capacity"
        ),
        "slo": sections.slo(report.data).first(ROWS, "bulltask pipeline report slo").without(*hidden),
        "cost": sections.cost([*report.costs, *total]).without(*hidden, *(() if priced else ("cost", "per_job"))),
        "gaps": sections.gaps(report.data).first(ROWS, "bulltask pipeline gaps"),
    }
    return (
        {**found, "expectations": expectations(report.recommendations.overall)}
        if report.recommendations.overall
        else found
    )


def _reasons(found: Sequence[Reason]) -> ReportTable:
    columns = [
        ReportColumn("error_fingerprint", "Reason", Unit.TEXT),
        ReportColumn("count", "Failures", Unit.COUNT),
        ReportColumn("share", "Of all", Unit.PART),
        ReportColumn("tasks", "Tasks", Unit.TEXTS),
        ReportColumn("first_seen", "First", Unit.TIME),
        ReportColumn("last_seen", "Last", Unit.TIME),
    ]
    return ReportTable(
        columns,
        [
            [
                one.error_fingerprint,
                one.count,
                one.share,
                list(dict.fromkeys(shorten(task.name) for task in one.tasks))[:_MAX_NAMED],
                one.first_seen,
                one.last_seen,
            ]
            for one in found
        ],
    )


def short_errors(found: Sequence[Failure]) -> ReportTable:
    """Return failures as a table for a terminal, without examples and with one job each."""
    cut = (
        replace(
            one,
            error_fingerprint=one.error_fingerprint
            if len(one.error_fingerprint) <= _REASON_WIDTH
            else one.error_fingerprint[:_REASON_WIDTH] + "…",
            sample_job_ids=one.sample_job_ids[:1],
        )
        for one in found
    )
    return sections.errors(cut).without("sample_reason")


def capacity_table(queues: Sequence[QueueAggregate], recommendations: Recommendations) -> ReportTable:
    """Return the load of queues as a table, with the workers that each queue needs if it has its own."""
    table = sections.capacity(queues)
    if not recommendations.by_queue:
        return table
    workers = {queue: found.workers for queue, found in recommendations.by_queue.items()}
    rows = [[*row, workers.get(aggregate.queue)] for row, aggregate in zip(table.rows, queues, strict=True)]
    return ReportTable([*table.columns, ReportColumn("workers", "Workers needed", Unit.COUNT)], rows)


def recommendation_text(recommendations: Recommendations) -> str:
    """Return the recommendation as text; ``""`` if there is none."""
    found = recommendations.overall
    if found is None:
        return ""
    several = " if the same workers serve all these queues" if len(recommendations.by_queue) > 1 else ""
    share, within = format_value(found.share, Unit.PART), format_value(found.within_s, Unit.SECONDS)
    summary = (
        f"{pluralize(found.workers, 'worker')} recommended{several}, so that {share} of the attempts start within"
        f" {within}, also in the busiest minute."
    )
    return "\n".join(["", summary, "", *(f"* {one}" for one in found.reasoning), ""])


def queues_shown(report: Report, most: int = 8) -> str:
    """Return the names of the report's queues, or their number if they are many."""
    names = [
        shorten(name) for name in sorted(aggregate.queue for aggregate in report.queues) or report.data.period.queues
    ]
    if not names:
        return "all queues"
    return (
        ("queue " if len(names) == 1 else "queues ") + ", ".join(names)
        if len(names) <= most
        else f"{len(names)} queues"
    )


def notes(report: Report) -> list[str]:
    """Return notes on how to read the numbers."""
    found = [
        "All times are UTC, by Redis' clock. A point of a chart covers"
        f" {steps(report.data.axis.step if report.data.axis else 1)}; rates are means over it.",
        "Waits and runs are stored as a log histogram per minute (gold.task_minute), and the histograms are added up:"
        " percentiles are within 1 % of the exact ones. Waits below 50 ms are only as exact as the clocks.",
        "Wait is the time from when a job is due to the start of the attempt, run is from there to the attempt's end.",
        "Jobs done have completed or finally failed. Events do not contain the reason of a retried attempt, so failures"
        " show the last reason only.",
        "Wasted time is that of attempts that ended in a retry, a stall or a failure.",
        "Backlog is jobs added minus jobs done since the start of the charts, including delayed jobs. After lost events"
        " of a queue, its backlog is unknown.",
    ]
    if report.data.built_at is not None:
        found.append(f"The gold tables were built {report.data.built_at:%Y-%m-%d %H:%M} UTC.")
    return found


def steps(minutes: int) -> str:
    """Return a duration in words: ``a minute``, ``10 minutes``, ``2 hours``."""
    if minutes == 1:
        return "a minute"
    return f"{minutes} minutes" if minutes < 60 else f"{minutes // 60} hours" if minutes > 60 else "an hour"
