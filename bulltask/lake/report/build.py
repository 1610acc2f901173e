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
    MOST,
    QueueAggregate,
    TaskAggregate,
    by_queue,
    by_task,
    incomplete_minutes,
    top_with_rest,
)
from bulltask.lake.report.charts import Chart, Ranges, bands, chart, ranges
from bulltask.lake.report.data import Axis, ReportData, busiest_day, read
from bulltask.lake.report.period import Period
from bulltask.lake.report.recommendations import CapacityTarget, Recommendations, recommend_workers
from bulltask.lake.report.sections import Cost, Failure, Reason, costs, failures, reasons
from bulltask.lake.report.series import Series, backlog, busy, percentiles, rates
from bulltask.lake.tables import CAPACITY_MINUTE, TASK_MINUTE

__all__ = ["Alert", "Figure", "Report", "make_report"]

_REASONS: Final = 10
"""How many failure reasons are listed."""

_RATES: Final = {"enqueued": "added", "completed": "completed", "failed": "failed"}
_AGAIN: Final = {"retried": "retried", "stalled": "stalled"}


@dataclass(frozen=True, slots=True)
class Figure:
    """A key figure: its label, value, detail, and whether it is bad."""

    label: str
    value: str
    detail: str
    bad: bool = False


@dataclass(frozen=True, slots=True)
class Alert:
    """A warning at the top of the report.

    Attributes:
        kind: ``incomplete``, ``unbuilt`` or ``empty``.
        title: the problem.
        text: what it means, and what to do.
    """

    kind: str
    title: str
    text: str


@dataclass(frozen=True, slots=True)
class Report:
    """A report.

    Attributes:
        data: its data.
        made_at: when it was made.
        alerts: warnings at the top.
        figures: key figures.
        charts: by name: ``throughput``, ``wait``, ``run``, ``retries``, ``busy``, ``backlog``; charts without values
            are left out.
        ranges: percentiles of tasks, ``wait`` and ``run``.
        tasks: aggregates of tasks; at most ``MOST``, of which the last can combine all others.
        failures: failures of each task, by reason.
        reasons: the most frequent reasons over all tasks.
        reasons_left: the number of other reasons, and of their failures.
        costs: costs of tasks, in the same form as ``tasks``.
        queues: aggregates of queues.
        recommendations: recommended numbers of workers.
    """

    data: ReportData
    made_at: datetime
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
        """Whether it has no data."""
        return self.data.axis is None

    @property
    def covered(self) -> str:
        """The time with data: ``13:02 to 14:37 UTC``, with dates if there are several days."""
        if self.data.axis is None:
            return ""
        first, end = (
            datetime.fromtimestamp(minute * 60, UTC)
            for minute in (self.data.axis.start, self.data.axis.start + self.data.axis.minutes)
        )
        if len(self.data.period.days) > 1:
            return f"{first:%Y-%m-%d %H:%M} to {end:%Y-%m-%d %H:%M} UTC"
        return f"{first:%H:%M} to {end:%H:%M} UTC" if first.date() == end.date() else f"{first:%H:%M} to 24:00 UTC"


def _report(data: ReportData, recommendations: Recommendations, made_at: datetime, *, build: str) -> Report:
    """Build a report from its data.

    Args:
        data: the data of the period.
        recommendations: recommended numbers of workers.
        made_at: the time of the report.
        build: the command that builds the gold tables, for the warning that there are none.
    """
    aggregates, axis = by_task(data), data.axis
    queues = by_queue(data, axis.minutes if axis else 0)
    failed, prices = failures(data), costs(data)
    why = reasons(failed)
    shown = top_with_rest(aggregates)
    return Report(
        data,
        made_at,
        _alerts(data, build),
        _figures(data, aggregates, queues, prices) if axis else [],
        _charts(data, axis, aggregates, queues) if axis else {},
        {of: found for of in ("wait", "run") if (found := ranges(shown, of)) is not None},
        shown,
        failed,
        why[:_REASONS],
        (len(why[_REASONS:]), sum(one.count for one in why[_REASONS:])),
        _topped_costs(prices),
        queues,
        recommendations,
    )


def _topped_costs(prices: Sequence[Cost]) -> list[Cost]:
    if len(prices) <= MOST:
        return list(prices)
    rest = prices[MOST - 1 :]
    return [*prices[: MOST - 1], Cost.together(rest, f"{len(rest)} others")]


def _alerts(data: ReportData, build: str) -> list[Alert]:
    found = []
    if data.axis is None:
        of = f" of {', '.join(map(shorten, data.period.queues))}" if data.period.queues else ""
        found.append(Alert("empty", f"No jobs{of} on {data.period.title}", _instead(data, build)))
    lost = incomplete_minutes(data)
    if minutes := len({minute for each in lost.values() for minute in each}):
        events = sum(gap.lost for gap in data.gaps)
        least = "" if all(gap.exact for gap in data.gaps) else "at least "
        names = ", ".join(sorted(shorten(queue) for queue, each in lost.items() if each))
        text = f"Events of {names} were lost: {least}{events:,}" if events else f"Events of {names} were lost"
        found.append(
            Alert(
                "incomplete",
                f"Incomplete: {pluralize(minutes, 'minute')}",
                f"{text}. Counts of that time are too low. Charts show it shaded; the gaps are listed at the end.",
            )
        )
    if data.unbuilt:
        days = ", ".join(map(str, data.unbuilt[:5])) + (", …" if len(data.unbuilt) > 5 else "")
        found.append(Alert("unbuilt", f"Not included: {days}", f"There are events, but no gold tables yet: {build}"))
    return found


def _instead(data: ReportData, build: str) -> str:
    """Return what to do if there is no data."""
    if data.unbuilt or data.held is None:
        return f"If there should be some, build the gold tables: {build}"
    first, last = data.held
    return f"The lake has days from {first} to {last}."


def _figures(
    data: ReportData, aggregates: Sequence[TaskAggregate], queues: Sequence[QueueAggregate], prices: Sequence[Cost]
) -> list[Figure]:
    whole, minutes = TaskAggregate.together(aggregates, "all"), data.axis.minutes if data.axis else 1
    done, failed = whole.counts["finished"], whole.counts["failed"]
    running = whole.counts["busy_ms"] / 60_000 / minutes
    peak = max((queue.busy_peak or 0 for queue in queues), default=0)
    most = f"peak {format_value(peak, Unit.COUNT)}" + (" in one queue" if len(queues) > 1 else "")
    return [
        Figure("Jobs done", format_value(done, Unit.COUNT), f"{format_value(done / minutes, Unit.NUMBER)} per minute"),
        Figure("Failed", format_value(whole.failure_rate, Unit.PART), pluralize(failed, "job"), bad=failed > 0),
        _durations("Wait, p95", whole.wait),
        _durations("Run, p95", whole.run),
        Figure("Busy workers", format_value(running, Unit.NUMBER), most),
        _price(Cost.together(prices, "all")),
    ]


def _durations(label: str, percentile: Callable[[float], int | None]) -> Figure:
    median = format_value(percentile(0.5), Unit.MS)
    return Figure(label, format_value(percentile(0.95), Unit.MS), f"median {median}")


def _price(whole: Cost) -> Figure:
    if whole.cost is not None:
        return Figure(
            "Cost", format_value(whole.cost, Unit.MONEY), f"{format_value(whole.per_job, Unit.MONEY)} per job"
        )
    return Figure(
        "Worker time", format_value(whole.busy_s, Unit.SECONDS), f"{format_value(whole.wasted, Unit.PART)} wasted"
    )


def _charts(
    data: ReportData, axis: Axis, aggregates: Sequence[TaskAggregate], queues: Sequence[QueueAggregate]
) -> dict[str, Chart]:
    lost = bands(axis, {minute for minutes in incomplete_minutes(data).values() for minute in minutes})
    called = {key: aggregate.label for aggregate in aggregates for key in aggregate.keys}
    others = len(called) - len(data.shown)
    names = [called[key] for key in data.shown] + ([f"{others} others"] if others else [])
    wanted = {
        "throughput": ("Jobs per minute", "", _called(rates(data, axis, list(_RATES)), _RATES)),
        "wait": ("Wait for a worker, p95", "ms", percentiles(data.waits, axis, names, 0.95, others=others > 0)),
        "run": ("Run, p95", "ms", percentiles(data.runs, axis, names, 0.95, others=others > 0)),
        "retries": ("Attempts per minute", "", _called(rates(data, axis, list(_AGAIN)), _AGAIN)),
        "busy": ("Busy workers", "workers", busy(data, axis, queues)),
        "backlog": ("Backlog since the start", "jobs", backlog(data, axis, queues)),
    }
    made = {}
    for name, (title, unit, lines) in wanted.items():
        values = [value for line in lines for value in line.values if value is not None]
        if any(values) or (values and name == "throughput"):
            made[name] = chart(title, unit, axis, lines, lost)
    return made


def _called(lines: Sequence[Series], names: dict[str, str]) -> list[Series]:
    return [replace(line, label=names[line.label]) for line in lines]


def make_report(
    layout: Layout, period: Period, target: CapacityTarget | None = None, *, made_at: datetime | None = None
) -> Report:
    """Build the report of some days; :func:`~bulltask.lake.report.page.html` and others format it.

    Args:
        layout: the lake.
        period: the days, and the queues in the lake's spelling or BullMQ's.
        target: the capacity target; default: 99 % of the attempts start within 2 s.
        made_at: the time of the report; default: now.

    Raises:
        LakeError: there is no lake, or it cannot be read.
        ConfigError: the target is out of range, or the lake has nothing of a queue.
    """
    if period.queues:
        period = _spelled(layout, period)
    data = read(layout, period)
    recommendations = recommend_workers(*busiest_day(layout, data), target or CapacityTarget())
    build = f"bulltask pipeline build gold --root {shlex.quote(str(layout.root))} --days {period}"
    return _report(data, recommendations, made_at or datetime.now(UTC), build=build)


def _spelled(layout: Layout, period: Period) -> Period:
    """Return the period with its queues in the lake's spelling."""
    reader = TableReader(layout)
    known = known_queues(reader)
    if not known.issuperset(normalize_queue(queue, known) for queue in period.queues):  # gold is kept longest
        for table in (TASK_MINUTE, CAPACITY_MINUTE):
            known |= reader.over(table, reader.days(table), _queues_in, columns=["queue"])
    names = tuple(normalize_queue(queue, known) for queue in period.queues)
    check_queues(layout.root, names, known)
    return replace(period, queues=names)


def _queues_in(batches: Iterator[Any]) -> set[str]:
    return {queue for batch in batches for queue in batch["queue"].unique().to_pylist()}
