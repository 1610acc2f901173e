"""What the page and the Markdown of a report have in common: its tables, and the notes below them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from bulltask.lake.plural import counted
from bulltask.lake.report import topics
from bulltask.lake.report.advice import Advice, expectations
from bulltask.lake.report.grids import Column, Grid
from bulltask.lake.report.numbers import Report
from bulltask.lake.report.tallies import QueueTally
from bulltask.lake.report.topics import Cost, Failure, Reason
from bulltask.lake.report.wording import Unit, shortened, written

__all__ = ["ROWS", "advised", "errors_in_short", "notes", "queues_shown", "steps", "tables", "told"]


ROWS: Final = 20
"""So many rows of a table are on the page; the first ones matter most."""

_NAMED: Final = 4
"""So many tasks of a reason are named."""


_LONGEST: Final = 80
"""Characters of a reason in a terminal."""


def tables(report: Report) -> Mapping[str, Grid]:
    """Return the report's tables by name; what is the same in all rows or of no use to readers is left out."""
    several = len(report.queues) > 1
    priced = any(cost.cost is not None for cost in report.costs)
    hidden = () if several else ("queue",)
    total = [Cost.together(report.costs, "All")] if len(report.costs) > 1 else []
    found = {
        "tasks": topics.tasks(report.tasks).without(*hidden),
        "reasons": _reasons(report.reasons),
        "retries": topics.retries(report.tasks).without(*hidden),
        "capacity": advised(report.queues, report.advice if several else Advice()).first(
            ROWS, "bulltask pipeline report capacity"
        ),
        "slo": topics.slo(report.data).first(ROWS, "bulltask pipeline report slo").without(*hidden),
        "cost": topics.cost([*report.costs, *total]).without(*hidden, *(() if priced else ("cost", "per_job"))),
        "gaps": topics.gaps(report.data).first(ROWS, "bulltask pipeline gaps"),
    }
    return {**found, "expectations": expectations(report.advice.together)} if report.advice.together else found


def _reasons(found: Sequence[Reason]) -> Grid:
    columns = [
        Column("error_key", "Reason", Unit.TEXT),
        Column("count", "Failures", Unit.COUNT),
        Column("share", "Of all", Unit.PART),
        Column("tasks", "Tasks", Unit.TEXTS),
        Column("first_seen", "First", Unit.TIME),
        Column("last_seen", "Last", Unit.TIME),
    ]
    return Grid(
        columns,
        [
            [
                one.error_key,
                one.count,
                one.share,
                list(dict.fromkeys(shortened(task.name) for task in one.tasks))[:_NAMED],
                one.first_seen,
                one.last_seen,
            ]
            for one in found
        ],
    )


def errors_in_short(found: Sequence[Failure]) -> Grid:
    """Return failures as a table for a terminal: without examples, and with one job each."""
    cut = (
        replace(
            one,
            error_key=one.error_key if len(one.error_key) <= _LONGEST else one.error_key[:_LONGEST] + "…",
            sample_job_ids=one.sample_job_ids[:1],
        )
        for one in found
    )
    return topics.errors(cut).without("sample_reason")


def advised(queues: Sequence[QueueTally], advice: Advice) -> Grid:
    """Return the load of queues and, where that is known, how many workers each needs when it has its own."""
    grid = topics.capacity(queues)
    if not advice.by_queue:
        return grid
    workers = {queue: found.workers for queue, found in advice.by_queue.items()}
    rows = [[*row, workers.get(tally.queue)] for row, tally in zip(grid.rows, queues, strict=True)]
    return Grid([*grid.columns, Column("workers", "Workers needed", Unit.COUNT)], rows)


def told(advice: Advice) -> str:
    """Return the recommendation in plain lines; nothing where there is none."""
    found = advice.together
    if found is None:
        return ""
    several = " when the same workers serve all these queues" if len(advice.by_queue) > 1 else ""
    need = f"{counted(found.workers, 'worker')} recommended{several}, so that"
    wish = f"{written(found.share, Unit.PART)} of the attempts begin within {written(found.within_s, Unit.SECONDS)}"
    return "\n".join(
        ["", f"{need} {wish}, also in the busiest minute.", "", *(f"* {one}" for one in found.reasoning), ""]
    )


def queues_shown(report: Report, most: int = 8) -> str:
    """Return the names of the report's queues, or how many they are."""
    names = [shortened(name) for name in sorted(tally.queue for tally in report.queues) or report.data.period.queues]
    if not names:
        return "all queues"
    return (
        ("queue " if len(names) == 1 else "queues ") + ", ".join(names)
        if len(names) <= most
        else f"{len(names)} queues"
    )


def notes(report: Report) -> list[str]:
    """Return what a reader has to know of the numbers."""
    found = [
        "All times are UTC, by Redis' clock. A point of a chart stands for"
        f" {steps(report.data.axis.step if report.data.axis else 1)}; its rate is the mean of them.",
        "Waits and runs are counted by size in each minute (gold.task_minute), and these counts are added up: a"
        " percentile of any time is within 1 % of the exact one. Waits below 50 ms are no more exact than the clocks.",
        "Wait is from a job's being due to the start of the attempt; run is from there to the attempt's end.",
        "Jobs done are those completed or failed for good. Events do not tell why an attempt that is made again had"
        " failed, so failures have the last reason only.",
        "Wasted is the time of attempts that ended in a retry, a stall or a failure.",
        "Backlog is jobs added minus jobs done since the beginning of the charts; jobs that are delayed are in it."
        " Where events of a queue were lost, it is not known from there on.",
    ]
    if report.data.built_at is not None:
        found.append(f"The gold tables were built {report.data.built_at:%Y-%m-%d %H:%M} UTC.")
    return found


def steps(minutes: int) -> str:
    """Return a number of minutes in words: ``a minute``, ``10 minutes``, ``2 hours``."""
    if minutes == 1:
        return "a minute"
    return f"{minutes} minutes" if minutes < 60 else f"{minutes // 60} hours" if minutes > 60 else "an hour"
