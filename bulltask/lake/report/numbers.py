"""All that a report says, before anybody decides how it looks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Final

from bulltask.lake.plural import counted
from bulltask.lake.report.advice import Advice
from bulltask.lake.report.charts import Chart, Ranges, bands, chart, ranges
from bulltask.lake.report.data import Axis, Data
from bulltask.lake.report.lines import Line, backlog, busy, percentiles, rates
from bulltask.lake.report.tallies import MOST, QueueTally, TaskTally, by_queue, by_task, incomplete_minutes, topped
from bulltask.lake.report.topics import Cost, Failure, Reason, costs, failures, reasons
from bulltask.lake.report.wording import Unit, shortened, written

__all__ = ["Alert", "Figure", "Report", "report"]

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
        advice: numbers of workers.
    """

    data: Data
    made_at: datetime
    alerts: Sequence[Alert]
    figures: Sequence[Figure]
    charts: dict[str, Chart]
    ranges: dict[str, Ranges]
    tasks: Sequence[TaskTally]
    failures: Sequence[Failure]
    reasons: Sequence[Reason]
    reasons_left: tuple[int, int]
    costs: Sequence[Cost]
    queues: Sequence[QueueTally]
    advice: Advice

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


def report(data: Data, advice: Advice, made_at: datetime, *, build: str) -> Report:
    """Return what a report says.

    Args:
        data: the period.
        advice: how many workers it needs.
        made_at: now.
        build: the command that makes gold tables, for those who have none.
    """
    tallies, axis = by_task(data), data.axis
    queues = by_queue(data, axis.minutes if axis else 0)
    failed, prices = failures(data), costs(data)
    why = reasons(failed)
    shown = topped(tallies)
    return Report(
        data,
        made_at,
        _alerts(data, build),
        _figures(data, tallies, queues, prices) if axis else [],
        _charts(data, axis, tallies, queues) if axis else {},
        {of: found for of in ("wait", "run") if (found := ranges(shown, of)) is not None},
        shown,
        failed,
        why[:_REASONS],
        (len(why[_REASONS:]), sum(one.count for one in why[_REASONS:])),
        _topped_costs(prices),
        queues,
        advice,
    )


def _topped_costs(prices: Sequence[Cost]) -> list[Cost]:
    if len(prices) <= MOST:
        return list(prices)
    rest = prices[MOST - 1 :]
    return [*prices[: MOST - 1], Cost.together(rest, f"{len(rest)} others")]


def _alerts(data: Data, build: str) -> list[Alert]:
    found = []
    if data.axis is None:
        of = f" of {', '.join(map(shortened, data.period.queues))}" if data.period.queues else ""
        found.append(Alert("empty", f"No jobs{of} on {data.period.title}", _instead(data, build)))
    lost = incomplete_minutes(data)
    if minutes := len({minute for each in lost.values() for minute in each}):
        events = sum(gap.lost for gap in data.gaps)
        least = "" if all(gap.exact for gap in data.gaps) else "at least "
        names = ", ".join(sorted(shortened(queue) for queue, each in lost.items() if each))
        told = f"Events of {names} were lost: {least}{events:,}" if events else f"Events of {names} were lost"
        found.append(
            Alert(
                "incomplete",
                f"Incomplete: {counted(minutes, 'minute')}",
                f"{told}. Counts of that time are too low; charts have it shaded, and its gaps are listed at the end.",
            )
        )
    if data.unbuilt:
        days = ", ".join(map(str, data.unbuilt[:5])) + (", …" if len(data.unbuilt) > 5 else "")
        found.append(Alert("unbuilt", f"Not in here: {days}", f"There are events of it, but no tables yet: {build}"))
    return found


def _instead(data: Data, build: str) -> str:
    """What to do when there is nothing to show."""
    if data.unbuilt or data.held is None:
        return f"If there should be some, build the tables: {build}"
    first, last = data.held
    return f"Nothing of that is in the lake, whose days go from {first} to {last}."


def _figures(
    data: Data, tallies: Sequence[TaskTally], queues: Sequence[QueueTally], prices: Sequence[Cost]
) -> list[Figure]:
    whole, minutes = TaskTally.together(tallies, "all"), data.axis.minutes if data.axis else 1
    done, failed = whole.counts["done"], whole.counts["failed"]
    running = whole.counts["busy_ms"] / 60_000 / minutes
    peak = max((queue.busy_peak or 0 for queue in queues), default=0)
    most = f"peak {written(peak, Unit.COUNT)}" + (" in one queue" if len(queues) > 1 else "")
    return [
        Figure("Jobs done", written(done, Unit.COUNT), f"{written(done / minutes, Unit.NUMBER)} a minute"),
        Figure("Failed", written(whole.failure_rate, Unit.PART), counted(failed, "job"), bad=failed > 0),
        Figure("Wait, p95", written(whole.wait(0.95), Unit.MS), f"half: {written(whole.wait(0.5), Unit.MS)}"),
        Figure("Run, p95", written(whole.run(0.95), Unit.MS), f"half: {written(whole.run(0.5), Unit.MS)}"),
        Figure("Busy workers", written(running, Unit.NUMBER), most),
        _price(Cost.together(prices, "all")),
    ]


def _price(whole: Cost) -> Figure:
    if whole.cost is not None:
        return Figure("Cost", written(whole.cost, Unit.MONEY), f"{written(whole.per_job, Unit.MONEY)} a job")
    return Figure("Worker time", written(whole.busy_s, Unit.SECONDS), f"{written(whole.wasted, Unit.PART)} wasted")


def _charts(data: Data, axis: Axis, tallies: Sequence[TaskTally], queues: Sequence[QueueTally]) -> dict[str, Chart]:
    lost = bands(axis, {minute for minutes in incomplete_minutes(data).values() for minute in minutes})
    called = {key: tally.label for tally in tallies for key in tally.keys}
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


def _called(lines: Sequence[Line], names: dict[str, str]) -> list[Line]:
    return [replace(line, label=names[line.label]) for line in lines]
