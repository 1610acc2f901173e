"""All that a report says, before anybody decides how it looks."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
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
"""So many reasons of failures are shown on their own."""

_RATES: Final = {"enqueued": "added", "completed": "completed", "failed": "failed"}
_AGAIN: Final = {"retried": "retried", "stalled": "stalled"}


@dataclass(frozen=True, slots=True)
class Figure:
    """A number of the headline: what it is, the number, a word about it, whether it is bad."""

    label: str
    value: str
    detail: str
    bad: bool = False


@dataclass(frozen=True, slots=True)
class Alert:
    """What to know before reading on.

    Attributes:
        kind: ``incomplete``, ``unbuilt`` or ``empty``.
        title: what is wrong.
        text: what that means, and what to do.
    """

    kind: str
    title: str
    text: str


@dataclass(frozen=True, slots=True)
class Report:
    """A whole report.

    Attributes:
        data: what it was made of.
        made_at: when.
        alerts: the first thing to read.
        figures: the headline.
        charts: by name: ``throughput``, ``wait``, ``run``, ``retries``, ``busy``, ``backlog``; those without a value
            are not there.
        ranges: percentiles of tasks, ``wait`` and ``run``.
        tasks: what tasks did; at most ``MOST``, of which the last may stand for all others.
        failures: why jobs failed, for each task.
        reasons: the same of all tasks, the most frequent reasons.
        reasons_left: how many reasons are not among them, and how many failures that are.
        costs: what tasks cost, as ``tasks``.
        queues: what queues did.
        recommendations: numbers of workers.
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
        """Whether there is nothing to show."""
        return self.data.axis is None

    @property
    def covered(self) -> str:
        """From when to when something happened: ``13:02 to 14:37 UTC``, with days where there are several."""
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
    """Return what a report says.

    Args:
        data: the period.
        recommendations: how many workers it needs.
        made_at: now.
        build: the command that makes gold tables, for those who have none.
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
        told = f"Events of {names} were lost: {least}{events:,}" if events else f"Events of {names} were lost"
        found.append(
            Alert(
                "incomplete",
                f"Incomplete: {pluralize(minutes, 'minute')}",
                f"{told}. Counts of that time are too low; charts have it shaded, and its gaps are listed at the end.",
            )
        )
    if data.unbuilt:
        days = ", ".join(map(str, data.unbuilt[:5])) + (", …" if len(data.unbuilt) > 5 else "")
        found.append(Alert("unbuilt", f"Not in here: {days}", f"There are events of it, but no tables yet: {build}"))
    return found


def _instead(data: ReportData, build: str) -> str:
    """What to do when there is nothing to show."""
    if data.unbuilt or data.held is None:
        return f"If there should be some, build the tables: {build}"
    first, last = data.held
    return f"Nothing of that is in the lake, whose days go from {first} to {last}."


def _figures(
    data: ReportData, aggregates: Sequence[TaskAggregate], queues: Sequence[QueueAggregate], prices: Sequence[Cost]
) -> list[Figure]:
    whole, minutes = TaskAggregate.together(aggregates, "all"), data.axis.minutes if data.axis else 1
    done, failed = whole.counts["done"], whole.counts["failed"]
    running = whole.counts["busy_ms"] / 60_000 / minutes
    peak = max((queue.busy_peak or 0 for queue in queues), default=0)
    most = f"peak {format_value(peak, Unit.COUNT)}" + (" in one queue" if len(queues) > 1 else "")
    return [
        Figure("Jobs done", format_value(done, Unit.COUNT), f"{format_value(done / minutes, Unit.NUMBER)} a minute"),
        Figure("Failed", format_value(whole.failure_rate, Unit.PART), pluralize(failed, "job"), bad=failed > 0),
        Figure("Wait, p95", format_value(whole.wait(0.95), Unit.MS), f"half: {format_value(whole.wait(0.5), Unit.MS)}"),
        Figure("Run, p95", format_value(whole.run(0.95), Unit.MS), f"half: {format_value(whole.run(0.5), Unit.MS)}"),
        Figure("Busy workers", format_value(running, Unit.NUMBER), most),
        _price(Cost.together(prices, "all")),
    ]


def _price(whole: Cost) -> Figure:
    if whole.cost is not None:
        return Figure("Cost", format_value(whole.cost, Unit.MONEY), f"{format_value(whole.per_job, Unit.MONEY)} a job")
    return Figure(
        "Worker time", format_value(whole.busy_s, Unit.SECONDS), f"{format_value(whole.wasted, Unit.PART)} wasted"
    )


def _charts(
    data: ReportData, axis: Axis, aggregates: Sequence[TaskAggregate], queues: Sequence[QueueAggregate]
) -> dict[str, Chart]:
    lost = bands(axis, {minute for minutes in incomplete_minutes(data).values() for minute in minutes})
    called = {key: tally.label for tally in aggregates for key in tally.keys}
    others = len(called) - len(data.shown)
    names = [called[key] for key in data.shown] + ([f"{others} others"] if others else [])
    wanted = {
        "throughput": ("Jobs a minute", "", _called(rates(data, axis, list(_RATES)), _RATES)),
        "wait": ("Wait for a worker, p95", "ms", percentiles(data.waits, axis, names, 0.95, others=others > 0)),
        "run": ("Run, p95", "ms", percentiles(data.runs, axis, names, 0.95, others=others > 0)),
        "retries": ("Attempts a minute", "", _called(rates(data, axis, list(_AGAIN)), _AGAIN)),
        "busy": ("Busy workers", "workers", busy(data, axis, queues)),
        "backlog": ("Backlog, since the beginning", "jobs", backlog(data, axis, queues)),
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
    """Return what there is to say of some days. :func:`~bulltask.lake.report.page.html` and others make it readable.

    Args:
        layout: where the lake is.
        period: the days, and the queues, in the lake's spelling or BullMQ's.
        target: what the recommended workers should be able to do; 99 % of the attempts start within 2 s by default.
        made_at: now.

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
    """The period with its queues as the lake calls them."""
    reader = TableReader(layout)
    known = known_queues(reader)
    if not known.issuperset(normalize_queue(queue, known) for queue in period.queues):  # gold may be kept for longest
        for table in (TASK_MINUTE, CAPACITY_MINUTE):
            known |= reader.over(table, reader.days(table), _queues_in, columns=["queue"])
    names = tuple(normalize_queue(queue, known) for queue in period.queues)
    check_queues(layout.root, names, known)
    return replace(period, queues=names)


def _queues_in(batches: Iterator[Any]) -> set[str]:
    return {queue for batch in batches for queue in batch["queue"].unique().to_pylist()}
