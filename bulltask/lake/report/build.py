"""Build a report: its figures, charts and tables, independent of the output format."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final

from bulltask.lake.formatting import Unit, format_value, pluralize, shorten
from bulltask.lake.layout import Layout
from bulltask.lake.read import TableReader, check_queues, known_queues, normalize_queue
from bulltask.lake.report.aggregates import (
    MAX_TASKS,
    QueueAggregate,
    TaskAggregate,
    by_queue,
    by_task,
    incomplete_minutes,
    top_with_others,
)
from bulltask.lake.report.charts import Chart, Ranges, bands, chart, ranges
from bulltask.lake.report.data import Axis, ReportData, busiest_day, read
from bulltask.lake.report.period import Period
from bulltask.lake.report.recommendations import CapacityTarget, Recommendations, recommend_concurrency
from bulltask.lake.report.sections import Cost, Failure, Reason, costs, failures, reasons
from bulltask.lake.report.series import backlog, busy, percentiles, rates
from bulltask.lake.tables import CAPACITY_MINUTE, TASK_MINUTE

__all__ = ["Alert", "Figure", "Report", "make_report"]

_REASONS: Final = 10
"""How many failure reasons are listed."""

_RATES: Final = ("added", "completed", "failed")
_REPEATED: Final = ("requeued", "stalled")


@dataclass(frozen=True, slots=True)
class Figure:
    """A key figure with a label, a value, a detail, and whether the value is bad."""

    label: str
    value: str
    detail: str
    bad: bool = False


@dataclass(frozen=True, slots=True)
class Alert:
    """A warning at the top of the report.

    Attributes:
        kind: ``incomplete``, ``unbuilt`` or ``empty``.
        title: The problem.
        text: What it means, and what to do.
    """

    kind: str
    title: str
    text: str


@dataclass(frozen=True, slots=True)
class Report:
    """A report.

    Attributes:
        data: The data.
        created_at: When the report was created.
        alerts: Warnings at the top.
        figures: Key figures.
        charts: The charts by name: ``throughput``, ``wait``, ``run``, ``requeues``, ``busy``, ``backlog``; without
            charts that have no values.
        ranges: Percentiles of tasks, ``wait`` and ``run``.
        tasks: Aggregates of tasks; at most ``MAX_TASKS``, of which the last can combine the remaining tasks.
        failures: Failures of each task, by reason.
        reasons: The most frequent reasons across all tasks.
        reasons_left: The number of further reasons, and of their failures.
        costs: Costs of tasks, in the same form as ``tasks``.
        queues: Aggregates of queues.
        recommendations: Recommended concurrencies.
    """

    data: ReportData
    created_at: datetime
    alerts: Sequence[Alert]
    figures: Sequence[Figure]
    charts: dict[str, Chart]
    ranges: dict[str, Ranges]
    tasks: Sequence[TaskAggregate]
    failures: Sequence[Failure]
    reasons: Sequence[Reason]
    reasons_left: tuple[int, int]
    costs: Sequence[Cost]
    queues: Sequence[QueueAggregate]
    recommendations: Recommendations

    @property
    def empty(self) -> bool:
        """Whether the report has no data."""
        return self.data.axis is None

    @property
    def covered(self) -> str:
        """The period with data: ``13:02 to 14:37 UTC``, with dates if there are several days."""
        if self.data.axis is None:
            return ""
        first, end = (
            datetime.fromtimestamp(minute * 60, UTC)
            for minute in (self.data.axis.start, self.data.axis.start + self.data.axis.minutes)
        )
        if len(self.data.period.days) > 1:
            return f"{first:%Y-%m-%d %H:%M} to {end:%Y-%m-%d %H:%M} UTC"
        return f"{first:%H:%M} to {end:%H:%M} UTC" if first.date() == end.date() else f"{first:%H:%M} to 24:00 UTC"


def _report(data: ReportData, recommendations: Recommendations, created_at: datetime, *, build: str) -> Report:
    """Build a report from its data.

    Args:
        data: The data of the period.
        recommendations: Recommended concurrencies.
        created_at: When the report was created.
        build: The command that builds the gold tables, for the warning that there are no gold tables.
    """
    aggregates, axis = by_task(data), data.axis
    queues = by_queue(data, axis.minutes if axis else 0)
    failed, prices = failures(data), costs(data)
    all_reasons = reasons(failed)
    top = top_with_others(aggregates)
    return Report(
        data,
        created_at,
        _alerts(data, build),
        _figures(data, aggregates, queues, prices) if axis else [],
        _charts(data, axis, aggregates, queues) if axis else {},
        {kind: drawn for kind in ("wait", "run") if (drawn := ranges(top, kind)) is not None},
        top,
        failed,
        all_reasons[:_REASONS],
        (len(all_reasons[_REASONS:]), sum(reason.count for reason in all_reasons[_REASONS:])),
        _top_costs(prices),
        queues,
        recommendations,
    )


def _top_costs(prices: Sequence[Cost]) -> list[Cost]:
    if len(prices) <= MAX_TASKS:
        return list(prices)
    rest = prices[MAX_TASKS - 1 :]
    return [*prices[: MAX_TASKS - 1], Cost.combine(rest, f"{len(rest)} others")]


def _alerts(data: ReportData, build: str) -> list[Alert]:
    alerts = []
    if data.axis is None:
        queues = [shorten(name) for name in data.period.queues]
        names_text = f" in {'queue' if len(queues) == 1 else 'queues'} {', '.join(queues)}" if queues else ""
        alerts.append(Alert("empty", f"No jobs{names_text} for {data.period.title}", _empty_advice(data, build)))
    incomplete = incomplete_minutes(data)
    if minutes := len({minute for lost_minutes in incomplete.values() for minute in lost_minutes}):
        events = sum(gap.lost for gap in data.gaps)
        bound = "" if all(gap.exact for gap in data.gaps) else "at least "
        names = ", ".join(sorted(shorten(queue) for queue, lost_minutes in incomplete.items() if lost_minutes))
        text = f"Events of {names} were lost: {bound}{events:,}" if events else f"Events of {names} were lost"
        alerts.append(
            Alert(
                "incomplete",
                f"Incomplete: {pluralize(minutes, 'minute')}",
                f"{text}. The counts for these minutes are too low; charts shade them. The gaps are listed at the end.",
            )
        )
    if data.unbuilt:
        days = ", ".join(map(str, data.unbuilt[:5])) + (", …" if len(data.unbuilt) > 5 else "")
        alerts.append(
            Alert(
                "unbuilt",
                f"Not included: {days}",
                f"There are events for these days, but no gold tables yet. Build them: {build}",
            )
        )
    return alerts


def _empty_advice(data: ReportData, build: str) -> str:
    """Return advice for a report without data."""
    if data.unbuilt or data.day_range is None:
        return f"If you expected data, build the gold tables: {build}"
    first, last = data.day_range
    return f"The lake has days from {first} to {last}."


def _figures(
    data: ReportData, aggregates: Sequence[TaskAggregate], queues: Sequence[QueueAggregate], prices: Sequence[Cost]
) -> list[Figure]:
    total, minutes = TaskAggregate.combine(aggregates, "all"), data.axis.minutes if data.axis else 1
    finished, failed = total.counts["finished"], total.counts["failed"]
    running = total.counts["busy_ms"] / 60_000 / minutes
    peak = max((queue.busy_peak or 0 for queue in queues), default=0)
    peak_text = f"peak {format_value(peak, Unit.COUNT)}" + (" in one queue" if len(queues) > 1 else "")
    return [
        Figure(
            "Finished jobs",
            format_value(finished, Unit.COUNT),
            f"{format_value(finished / minutes, Unit.NUMBER)} per minute",
        ),
        Figure("Failed", format_value(total.failure_rate, Unit.FRACTION), pluralize(failed, "job"), bad=failed > 0),
        _durations("Wait, p95", total.wait),
        _durations("Run time, p95", total.run),
        Figure("Busy slots", format_value(running, Unit.NUMBER), peak_text),
        _price(Cost.combine(prices, "all")),
    ]


def _durations(label: str, percentile: Callable[[float], int | None]) -> Figure:
    median = format_value(percentile(0.5), Unit.MS)
    return Figure(label, format_value(percentile(0.95), Unit.MS), f"median {median}")


def _price(total: Cost) -> Figure:
    if total.cost is not None:
        return Figure(
            "Cost", format_value(total.cost, Unit.MONEY), f"{format_value(total.per_job, Unit.MONEY)} per job"
        )
    return Figure(
        "Run time", format_value(total.busy_s, Unit.SECONDS), f"{format_value(total.wasted, Unit.FRACTION)} wasted"
    )


def _charts(
    data: ReportData, axis: Axis, aggregates: Sequence[TaskAggregate], queues: Sequence[QueueAggregate]
) -> dict[str, Chart]:
    lost = bands(axis, {minute for minutes in incomplete_minutes(data).values() for minute in minutes})
    task_labels = {key: aggregate.label for aggregate in aggregates for key in aggregate.keys}
    others = len(task_labels) - len(data.shown)
    names = [task_labels[key] for key in data.shown] + ([f"{others} others"] if others else [])
    specs = {
        "throughput": ("Jobs per minute", "", rates(data, axis, _RATES)),
        "wait": ("Wait for a worker, p95", "ms", percentiles(data.waits, axis, names, 0.95, others=others > 0)),
        "run": ("Run time, p95", "ms", percentiles(data.runs, axis, names, 0.95, others=others > 0)),
        "requeues": ("Attempts per minute", "", rates(data, axis, _REPEATED)),
        "busy": ("Busy slots", "slots", busy(data, axis, queues)),
        "backlog": ("Backlog since the start", "jobs", backlog(data, axis, queues)),
    }
    charts = {}
    for name, (title, unit, lines) in specs.items():
        values = [value for line in lines for value in line.values if value is not None]
        if any(values) or (values and name == "throughput"):
            charts[name] = chart(title, unit, axis, lines, lost)
    return charts


def make_report(
    layout: Layout, period: Period, target: CapacityTarget | None = None, *, created_at: datetime | None = None
) -> Report:
    """Build the report of some days; :func:`~bulltask.lake.report.page.html` and others format it.

    Args:
        layout: The lake.
        period: The days, and the queues with or without the hash tag.
        target: The capacity target; default: 99% of the attempts start within 2 s.
        created_at: The creation time of the report; default: now.

    Raises:
        LakeError: There is no lake, or it cannot be read.
        ConfigError: The target is out of range, or the lake has no data for a queue.
    """
    if period.queues:
        period = _with_lake_names(layout, period)
    data = read(layout, period)
    recommendations = recommend_concurrency(*busiest_day(layout, data), target or CapacityTarget())
    build = f"bulltask pipeline build gold --lake {shlex.quote(str(layout.root))} --days {period}"
    return _report(data, recommendations, created_at or datetime.now(UTC), build=build)


def _with_lake_names(layout: Layout, period: Period) -> Period:
    """Return the period with its queues named as in the lake."""
    reader = TableReader(layout)
    known = known_queues(reader)
    if not known.issuperset(normalize_queue(queue, known) for queue in period.queues):  # gold is kept longest
        for table in (TASK_MINUTE, CAPACITY_MINUTE):
            known |= reader.scan(table, reader.days(table), _queues_in, columns=["queue"])
    names = tuple(normalize_queue(queue, known) for queue in period.queues)
    check_queues(layout.root, names, known)
    return replace(period, queues=names)


def _queues_in(batches: Iterator[Any]) -> set[str]:
    return {queue for batch in batches for queue in batch["queue"].unique().to_pylist()}
