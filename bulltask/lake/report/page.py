"""Build a report: its figures, charts and tables, and format it as a self-contained HTML file or as Markdown."""

from __future__ import annotations

import base64
import hashlib
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache, partial
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from bulltask.lake.capacity import Estimate
from bulltask.lake.formatting import Unit, format_value, one_line, pluralize, shorten
from bulltask.lake.log_histogram import Histogram, percentile
from bulltask.lake.reader import GapRow, TableReader, check_queues, known_queues, normalize_queue
from bulltask.lake.report import sections
from bulltask.lake.report.charts import Chart, backlog, bands, percentiles, queue_lines, ranges, rates
from bulltask.lake.report.data import (
    Axis,
    Period,
    QueueAggregate,
    ReportData,
    TaskAggregate,
    busiest_day,
    by_queue,
    by_task,
    top_with_others,
)
from bulltask.lake.report.sections import Cost, ObjectiveResult, Reason, Recommendations, ReportTable
from bulltask.lake.storage import Lake
from bulltask.lake.tables import CAPACITY_MINUTE, TASK_MINUTE

if TYPE_CHECKING:
    from jinja2 import Environment

_REASONS: Final = 10
"""How many failure reasons are listed."""


class Figure(NamedTuple):
    """A key figure with a label, a value, a detail, and whether the value is bad."""

    label: str
    value: str
    detail: str
    bad: bool = False


class Alert(NamedTuple):
    """A warning at the top of the report: the problem, what it means, and what to do.

    ``kind`` is ``incomplete``, ``unbuilt`` or ``empty``.
    """

    kind: str
    title: str
    text: str


class Report:
    """A report; ``build`` is the command that builds the gold tables.

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
        objectives: The results of the objectives, the worst first.
        queues: Aggregates of queues.
        recommendations: Recommended concurrencies.
    """

    def __init__(self, data: ReportData, recommendations: Recommendations, created_at: datetime, *, build: str) -> None:
        aggregates, axis = by_task(data), data.axis
        queues = by_queue(data, axis.minutes if axis else 0)
        prices = sections.costs(data)
        self.data = data
        self.created_at = created_at
        self.alerts = _alerts(data, build)
        self.figures = _figures(data, aggregates, queues, prices) if axis else []
        self.charts = _charts(data, axis, aggregates, queues) if axis else {}
        self.tasks = top_with_others(aggregates, TaskAggregate.combine)
        self.ranges = {kind: drawn for kind in ("wait", "run") if (drawn := ranges(self.tasks, kind)) is not None}
        self.failures = sections.failures(data)
        reasons = sections.reasons(self.failures)
        self.reasons = reasons[:_REASONS]
        self.reasons_left = (len(reasons[_REASONS:]), sum(reason.count for reason in reasons[_REASONS:]))
        self.costs = top_with_others(prices, Cost.combine)
        self.objectives = sections.objectives(data)
        self.queues = queues
        self.recommendations = recommendations

    @property
    def empty(self) -> bool:
        """Whether the report has no data."""
        return self.data.axis is None

    @property
    def priced(self) -> bool:
        """Whether any task has a cost."""
        return any(cost.cost is not None for cost in self.costs)

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


def make_report(lake: Lake, period: Period, *, created_at: datetime | None = None, **target: Any) -> Report:
    """Build the report of some days; :func:`~bulltask.lake.report.page.html` and others format it.

    The queues may have the hash tag. ``target`` is that of the recommended concurrency (``max_wait``, ``target`` and
    ``peak_factor``), as in :func:`bulltask.lake.capacity.recommend`.

    Raises:
        LakeError: There is no lake, or it cannot be read.
        ConfigError: The target is out of range, or the lake has no data for a queue.
    """
    if period.queues:
        known = known_queues(TableReader(lake), TASK_MINUTE, CAPACITY_MINUTE)
        names = tuple(normalize_queue(queue, known) for queue in period.queues)
        check_queues(lake.root, names, known)
        period = replace(period, queues=names)
    data = ReportData(lake, period)
    recommendations = sections.recommend_concurrency(*busiest_day(lake, data), **target)
    build = f"bulltask pipeline build gold --lake {shlex.quote(lake.root)} --days {period}"
    return Report(data, recommendations, created_at or datetime.now(UTC), build=build)


def _alerts(data: ReportData, build: str) -> list[Alert]:
    """Return the warnings; ``build`` is the command that builds the gold tables."""
    alerts = []
    if data.axis is None:
        names_text = f" in {_queues_text(data.period.queues)}" if data.period.queues else ""
        if data.unbuilt or data.day_range is None:
            advice = f"If you expected data, build the gold tables: {build}"
        else:
            advice = f"The lake has days from {data.day_range[0]} to {data.day_range[1]}."
        alerts.append(Alert("empty", f"No jobs{names_text} for {data.period.title}", advice))
    if minutes := len({minute for lost_minutes in data.incomplete.values() for minute in lost_minutes}):
        events = sum(gap.lost for gap in data.gaps)
        bound = "" if all(gap.exact for gap in data.gaps) else "at least "
        names = ", ".join(sorted(shorten(queue) for queue, lost_minutes in data.incomplete.items() if lost_minutes))
        text = f"Events of {names} were lost: {bound}{events:,}" if events else f"Events of {names} were lost"
        text += ". The counts for these minutes are too low; charts shade them. The gaps are listed at the end."
        alerts.append(Alert("incomplete", f"Incomplete: {pluralize(minutes, 'minute')}", text))
    if data.unbuilt:
        days = ", ".join(map(str, data.unbuilt[:5])) + (", …" if len(data.unbuilt) > 5 else "")
        text = f"These days have events, but no gold tables, or their build was killed. Build them: {build}"
        alerts.append(Alert("unbuilt", f"Not included: {days}", text))
    return alerts


def _figures(
    data: ReportData, aggregates: Sequence[TaskAggregate], queues: Sequence[QueueAggregate], prices: Sequence[Cost]
) -> list[Figure]:
    total, minutes = TaskAggregate.combine(aggregates, "all"), data.axis.minutes if data.axis else 1
    finished, failed = total.counts["finished"], total.counts["failed"]
    running = total.counts["busy_ms"] / 60_000 / minutes
    peak = max((queue.busy_peak or 0 for queue in queues), default=0)
    peak_text = f"peak {format_value(peak, Unit.COUNT)}" + (" in one queue" if len(queues) > 1 else "")
    total_cost = Cost.combine(prices, "all")
    if total_cost.cost is not None:
        price = Figure("Cost", _money(total_cost.cost), f"{_money(total_cost.per_job)} per job")
    else:
        wasted = format_value(total_cost.wasted, Unit.FRACTION)
        price = Figure("Run time", format_value(total_cost.busy_s, Unit.SECONDS), f"{wasted} wasted")
    per_minute = format_value(finished / minutes, Unit.NUMBER)
    return [
        Figure("Finished jobs", format_value(finished, Unit.COUNT), f"{per_minute} per minute"),
        Figure("Failed", format_value(total.failure_rate, Unit.FRACTION), pluralize(failed, "job"), bad=failed > 0),
        _durations("Wait, p95", total.wait),
        _durations("Run time, p95", total.run),
        Figure("Busy slots", format_value(running, Unit.NUMBER), peak_text),
        price,
    ]


def _durations(label: str, histogram: Histogram) -> Figure:
    median, p95 = (format_value(percentile(histogram, quantile), Unit.MS) for quantile in (0.5, 0.95))
    return Figure(label, p95, f"median {median}")


_money: Final = partial(format_value, unit=Unit.MONEY)


def _charts(
    data: ReportData, axis: Axis, aggregates: Sequence[TaskAggregate], queues: Sequence[QueueAggregate]
) -> dict[str, Chart]:
    lost = bands(axis, {minute for minutes in data.incomplete.values() for minute in minutes})
    task_labels = {key: aggregate.label for aggregate in aggregates for key in aggregate.keys}
    others = len(task_labels) - len(data.shown)
    names = [task_labels[key] for key in data.shown] + ([f"{others} others"] if others else [])
    specs = {
        "throughput": ("Jobs per minute", "", rates(data, axis, ("added", "completed", "failed"))),
        "wait": ("Wait for a worker, p95", "ms", percentiles(data.waits, axis, names, 0.95, others=others > 0)),
        "run": ("Run time, p95", "ms", percentiles(data.runs, axis, names, 0.95, others=others > 0)),
        "requeues": ("Attempts per minute", "", rates(data, axis, ("requeued", "stalled"))),
        "busy": ("Busy slots", "slots", queue_lines(data, axis, queues, "busy_slots", axis.step)),
        "backlog": ("Backlog since the start", "jobs", backlog(data, axis, queues)),
    }
    charts = {}
    for name, (title, unit, lines) in specs.items():
        values = [value for line in lines for value in line.values if value is not None]
        if any(values) or (values and name == "throughput"):
            charts[name] = Chart(title, unit, axis, lines, lost)
    return charts


MAX_ROWS: Final = 20
"""The maximum number of rows of a table on the page; the most important rows come first."""


def tables(report: Report) -> Mapping[str, ReportTable]:
    """Return the report's tables by name, without columns that are the same in all rows."""
    has_queues = len(report.queues) > 1
    hidden_columns = () if has_queues else ("queue",)
    total = [Cost.combine(report.costs, "All")] if len(report.costs) > 1 else []
    result = {
        "tasks": sections.tasks(report.tasks).without(*hidden_columns),
        "reasons": sections.table_of(Reason, report.reasons),
        "requeues": sections.requeues(report.tasks).without(*hidden_columns),
        "capacity": sections.capacity(report.queues, report.recommendations if has_queues else Recommendations()).first(
            MAX_ROWS, "bulltask pipeline report capacity"
        ),
        "slo": sections.table_of(ObjectiveResult, report.objectives)
        .first(MAX_ROWS, "bulltask pipeline report slo")
        .without(*hidden_columns),
        "cost": sections.table_of(Cost, [*report.costs, *total]).without(
            *hidden_columns, *(() if report.priced else ("cost", "per_job"))
        ),
        "gaps": sections.table_of(GapRow, report.data.gaps).first(MAX_ROWS, "bulltask pipeline gaps"),
    }
    if report.recommendations.overall:
        result["expectations"] = sections.table_of(Estimate, report.recommendations.overall.estimates)
    return result


def recommendation_text(recommendations: Recommendations) -> str:
    """Return the recommendation as text; ``""`` if there is none."""
    recommendation = recommendations.overall
    if recommendation is None:
        return ""
    condition = " if the same workers process all these queues" if len(recommendations.by_queue) > 1 else ""
    target = format_value(recommendation.target, Unit.FRACTION)
    max_wait = format_value(recommendation.max_wait_s, Unit.SECONDS)
    summary = (
        f"Recommended concurrency{condition}: {pluralize(recommendation.concurrency, 'slot')} across all workers,"
        f" so that {target} of the attempts start within {max_wait}, even in the busiest minute."
    )
    return "\n".join(["", summary, "", *(f"* {line}" for line in recommendation.reasoning), ""])


def _queues_text(names: Sequence[str]) -> str:
    """Return the names of queues, or their number if there are many."""
    if not names or len(names) > 8:
        return f"{len(names) or 'all'} queues"
    return f"queue{'' if len(names) == 1 else 's'} {', '.join(map(shorten, names))}"


def notes(report: Report) -> list[str]:
    """Return notes on how to read the numbers."""
    values = {"step": _step_text(report.data.axis), "built_at": report.data.built_at}
    return _environment().get_template("notes.txt").render(values).splitlines()


def _step_text(axis: Axis | None) -> str:
    """Return the time that a point covers: ``1 min``, ``2 h``."""
    return format_value((axis.step if axis else 1) * 60, Unit.SECONDS)


_BLOCKS: Final = "▁▂▃▄▅▆▇█"
_WIDTH: Final = 60


def _spark(values: Sequence[float | None]) -> str:
    """Return a line of blocks whose heights are the means of values."""
    size = -(-len(values) // _WIDTH)
    numbers = [value or 0 for value in values]
    means = [sum(part) / len(part) for part in (numbers[at : at + size] for at in range(0, len(numbers), size))]
    highest = max(*means, 0.0) or 1.0
    return "".join(_BLOCKS[max(0, round(mean / highest * (len(_BLOCKS) - 1)))] for mean in means)


def _highest(values: Sequence[float | None], unit: str) -> str:
    return format_value(max(value or 0 for value in values), Unit(unit))


# Names of tasks and failure reasons are untrusted. Jinja2 escapes them in HTML, and the page's Content Security Policy
# allows only the page's script; in Markdown, the filters `md` and `markdown` escape them.


_MAX_EXAMPLE: Final = 4_000
"""The maximum length of an example reason; some reasons contain whole documents."""


def markdown(report: Report) -> str:
    """Return the Markdown of a report, in which untrusted text cannot become markup."""
    return _render("report.md", report, advice=recommendation_text(report.recommendations))


def html(report: Report) -> str:
    """Return the page of a report."""
    script, axis = _resource("report.js"), report.data.axis
    return _render(
        "report.html",
        report,
        max_rows=MAX_ROWS,
        point=f"mean of {_step_text(axis)}" if axis and axis.step > 1 else "",
        seen=partial(_time_range, short=len(report.data.period.days) == 1),
        style=_resource("report.css"),
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def _render(template: str, report: Report, **values: Any) -> str:
    return (
        _environment()
        .get_template(template)
        .render(
            report=report,
            tables=tables(report),
            queues=one_line(_queues_text(sorted(queue.queue for queue in report.queues) or report.data.period.queues)),
            incomplete=any(report.data.incomplete.values()),
            notes=notes(report),
            **values,
        )
    )


def _time_range(reason: Reason, *, short: bool) -> str:
    """Return the first and last time, without dates in a report for a single day."""
    times = (time for time in (reason.first_seen, reason.last_seen) if time is not None)
    texts = dict.fromkeys(f"{time:%H:%M}" if short else f"{time:%Y-%m-%d %H:%M}" for time in times)
    return " to ".join(texts)


def _resource(name: str) -> str:
    return files("bulltask.lake.report").joinpath("templates", name).read_text("utf-8")


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape  # noqa: PLC0415 - an extra

    environment = Environment(
        loader=PackageLoader("bulltask.lake.report"),
        autoescape=select_autoescape(["html"]),
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    for unit in Unit:
        environment.filters[unit.name.lower()] = partial(format_value, unit=unit)
    environment.filters |= {"line": one_line, "lines": _lines, "minute": lambda time: f"{time:%Y-%m-%d %H:%M}"}
    environment.filters |= {"md": sections.markdown_text, "markdown": sections.as_markdown}
    environment.filters |= {"spark": _spark, "highest": _highest}
    return environment


def _lines(text: str) -> str:
    """Return text of several lines without control characters."""
    shortened = text if len(text) <= _MAX_EXAMPLE else text[:_MAX_EXAMPLE] + " …"
    return "\n".join(one_line(line.replace("\t", "    ")) for line in shortened.splitlines())
