"""Build a report: its figures, charts and tables, and format it as a self-contained HTML file or as Markdown."""

from __future__ import annotations

import base64
import hashlib
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache, partial
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final

from bulltask.lake.formatting import Unit, format_value, one_line, pluralize, shorten
from bulltask.lake.reader import TableReader, check_queues, known_queues, normalize_queue
from bulltask.lake.report import sections
from bulltask.lake.report.charts import Chart, Ranges, backlog, bands, busy, chart, percentiles, ranges, rates
from bulltask.lake.report.data import (
    Axis,
    Period,
    QueueAggregate,
    ReportData,
    TaskAggregate,
    busiest_day,
    by_queue,
    by_task,
    incomplete_minutes,
    read,
    top_with_others,
)
from bulltask.lake.report.sections import (
    CapacityTarget,
    Cost,
    Failure,
    Reason,
    Recommendations,
    ReportColumn,
    ReportTable,
    as_markdown,
    costs,
    expectations,
    failures,
    markdown_text,
    reasons,
    recommend_concurrency,
)
from bulltask.lake.storage import Lake
from bulltask.lake.tables import CAPACITY_MINUTE, TASK_MINUTE

if TYPE_CHECKING:
    from jinja2 import Environment

__all__ = [
    "Report",
    "capacity_table",
    "html",
    "make_report",
    "markdown",
    "notes",
    "recommendation_text",
    "short_errors",
    "steps",
    "tables",
]


_REASONS: Final = 10
"""How many failure reasons are listed."""


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
    """Build a report; ``build`` is the command that builds the gold tables, for the warning that there are none."""
    aggregates, axis = by_task(data), data.axis
    queues = by_queue(data, axis.minutes if axis else 0)
    failed, prices = failures(data), costs(data)
    all_reasons = reasons(failed)
    top = top_with_others(aggregates, TaskAggregate.combine)
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
        top_with_others(prices, Cost.combine),
        queues,
        recommendations,
    )


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
        "throughput": ("Jobs per minute", "", rates(data, axis, ("added", "completed", "failed"))),
        "wait": ("Wait for a worker, p95", "ms", percentiles(data.waits, axis, names, 0.95, others=others > 0)),
        "run": ("Run time, p95", "ms", percentiles(data.runs, axis, names, 0.95, others=others > 0)),
        "requeues": ("Attempts per minute", "", rates(data, axis, ("requeued", "stalled"))),
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
    lake: Lake, period: Period, target: CapacityTarget | None = None, *, created_at: datetime | None = None
) -> Report:
    """Build the report of some days; :func:`~bulltask.lake.report.page.html` and others format it.

    The queues may have the hash tag. The default target is that 99% of the attempts start within 2 s.

    Raises:
        LakeError: There is no lake, or it cannot be read.
        ConfigError: The target is out of range, or the lake has no data for a queue.
    """
    if period.queues:
        period = _with_lake_names(lake, period)
    data = read(lake, period)
    recommendations = recommend_concurrency(*busiest_day(lake, data), target or CapacityTarget())
    build = f"bulltask pipeline build gold --lake {shlex.quote(lake.root)} --days {period}"
    return _report(data, recommendations, created_at or datetime.now(UTC), build=build)


def _with_lake_names(lake: Lake, period: Period) -> Period:
    """Return the period with its queues named as in the lake."""
    reader = TableReader(lake)
    known = known_queues(reader)
    if not known.issuperset(normalize_queue(queue, known) for queue in period.queues):  # gold is kept longest
        for table in (TASK_MINUTE, CAPACITY_MINUTE):
            known |= reader.scan(table, reader.days(table), _queues_in, columns=["queue"])
    names = tuple(normalize_queue(queue, known) for queue in period.queues)
    check_queues(lake.root, names, known)
    return replace(period, queues=names)


def _queues_in(batches: Iterator[Any]) -> set[str]:
    return {queue for batch in batches for queue in batch["queue"].unique().to_pylist()}


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
    if report.recommendations.overall:
        result["expectations"] = expectations(report.recommendations.overall)
    return result


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
    target = format_value(recommendation.target, Unit.FRACTION)
    max_wait = format_value(recommendation.max_wait_s, Unit.SECONDS)
    summary = (
        f"Recommended concurrency{condition}: {slots(recommendation.concurrency)}, so that {target} of the attempts"
        f" start within {max_wait}, even in the busiest minute."
    )
    return "\n".join(["", summary, "", *(f"* {line}" for line in recommendation.reasoning), ""])


def slots(count: int) -> str:
    """Return a concurrency as text: it counts neither workers nor machines."""
    return f"{pluralize(count, 'slot')} across all workers"


def queues_shown(report: Report, max_names: int = 8) -> str:
    """Return the names of the report's queues, or the number of queues if there are many."""
    names = [
        shorten(name) for name in sorted(aggregate.queue for aggregate in report.queues) or report.data.period.queues
    ]
    if not names:
        return "all queues"
    if len(names) > max_names:
        return f"{len(names)} queues"
    return ("queue " if len(names) == 1 else "queues ") + ", ".join(names)


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
        "After a requeued attempt, its job runs again: the attempt failed, was released after its start (a shutdown) or"
        " rescheduled by its task, or its child crashed. Events do not distinguish these cases. A release before the"
        " start (a shutdown, a rate limit) is no attempt.",
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


_BLOCKS: Final = "▁▂▃▄▅▆▇█"
_WIDTH: Final = 60


def markdown(report: Report) -> str:
    """Return the Markdown of a report, in which untrusted text cannot become markup."""
    covered = f" · {report.covered}" if report.covered else ""
    lines = [
        f"# Jobs, {report.data.period.title}\n",
        f"{markdown_text(queues_shown(report))}{covered} · created {report.created_at:%Y-%m-%d %H:%M} UTC\n",
    ]
    lines += [f"> **{markdown_text(alert.title)}**\n>\n> {markdown_text(alert.text)}\n" for alert in report.alerts]
    if not report.empty:
        lines.append("| | | |\n|---|---:|---|")
        lines += [f"| {figure.label} | **{figure.value}** | {figure.detail} |" for figure in report.figures]
        lines += ["", *_sections(report), "---\n", *(f"* {note}" for note in notes(report)), ""]
    return "\n".join(lines)


def _sections(report: Report) -> Iterator[str]:
    report_tables, charts = tables(report), report.charts

    def section(name: str, without_rows: str) -> str:
        table = report_tables[name]
        return as_markdown(table) if table.rows else without_rows

    yield "## Throughput\n"
    yield from _sparks(charts["throughput"])
    yield "## Wait and run times\n"
    yield as_markdown(report_tables["tasks"])
    yield "## Failures\n"
    yield section("reasons", "No jobs failed.\n")
    if report.reasons_left[0]:
        reasons, count = report.reasons_left
        yield f"{reasons:,} other reasons: {count:,} failures\n"
    yield "## Requeued and stalled attempts\n"
    yield section("requeues", "No attempts were requeued or stalled.\n")
    yield "## Capacity\n"
    yield recommendation_text(report.recommendations)
    if "busy" in charts:
        yield from _sparks(charts["busy"])
    yield as_markdown(report_tables["capacity"])
    yield "## Objectives\n"
    yield section("slo", "No objectives are set.\n")
    yield "## Cost\n"
    yield section("cost", "No attempts ran.\n")
    yield "## Completeness\n"
    lost = any(alert.kind == "incomplete" for alert in report.alerts)
    yield section("gaps", "The gaps are no longer in bronze.gaps.\n" if lost else "No events were lost.\n")


def _sparks(chart: Chart) -> Iterator[str]:
    """Yield a sparkline for each line of a chart."""
    yield f"{chart.title}, over time:\n"
    yield "| | | |\n|---|---|---|"
    for line in chart.payload["lines"]:
        values = [value or 0 for value in line["values"]]
        highest = format_value(max(values), Unit(chart.payload["unit"]))
        yield f"| {markdown_text(line['label'])} | {_spark(values)} | at most {highest} |"
    yield ""


def _spark(values: Sequence[float]) -> str:
    size = -(-len(values) // _WIDTH)
    means = [sum(part) / len(part) for part in (values[at : at + size] for at in range(0, len(values), size))]
    highest = max(*means, 0.0) or 1.0
    return "".join(_BLOCKS[max(0, round(mean / highest * (len(_BLOCKS) - 1)))] for mean in means)


# Names of tasks and failure reasons are untrusted: Jinja2 escapes them, and the page's Content Security Policy allows
# only the page's script.


_MAX_EXAMPLE: Final = 4_000
"""The maximum length of an example reason; some reasons contain whole documents."""

_SECTIONS: Final = (
    ("throughput", "Throughput"),
    ("durations", "Wait and run times"),
    ("failures", "Failures"),
    ("requeues", "Requeued, stalled"),
    ("capacity", "Capacity"),
    ("slo", "Objectives"),
    ("cost", "Cost"),
    ("completeness", "Completeness"),
)


def html(report: Report) -> str:
    """Return the page of a report."""
    from markupsafe import Markup  # noqa: PLC0415 - Markdown does not need it

    report_tables, script = tables(report), _resource("report.js")
    slo = sections.slo(report.data).first(MAX_ROWS, "")
    return (
        _environment()
        .get_template("report.html")
        .render(
            report=report,
            tables=report_tables,
            objectives=[dict(zip((column.name for column in slo.columns), row, strict=True)) for row in slo.rows],
            many_queues=len(report.queues) > 1,
            queues=one_line(queues_shown(report)),
            priced=any(cost.cost is not None for cost in report.costs),
            incomplete=any(incomplete_minutes(report.data).values()),
            sections=_SECTIONS,
            notes=notes(report),
            point=_point_text(report),
            seen=partial(_time_range, short=len(report.data.period.days) == 1),
            expected=_recommended_index(report),
            # Files of this package, not text from a lake.
            style=Markup(_resource("report.css")),  # noqa: S704
            script=Markup(script),  # noqa: S704
            script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        )
    )


def _point_text(report: Report) -> str:
    """Return the time that a point in a chart covers, if it is more than a minute."""
    step = report.data.axis.step if report.data.axis else 1
    return "" if step == 1 else f"mean of {steps(step)}"


def _time_range(reason: Reason, *, short: bool) -> str:
    """Return the first and last time, without dates in a report for a single day."""
    times = (time for time in (reason.first_seen, reason.last_seen) if time is not None)
    texts = dict.fromkeys(f"{time:%H:%M}" if short else f"{time:%Y-%m-%d %H:%M}" for time in times)
    return " to ".join(texts)


def _recommended_index(report: Report) -> int | None:
    """Return the index of the recommended concurrency among the estimates."""
    recommendation = report.recommendations.overall
    if recommendation is None:
        return None
    return [estimate.concurrency for estimate in recommendation.estimates].index(recommendation.concurrency)


def _resource(name: str) -> str:
    return files("bulltask.lake.report").joinpath("templates", name).read_text("utf-8")


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined  # noqa: PLC0415 - Markdown does not need it

    environment = Environment(
        loader=PackageLoader("bulltask.lake.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    for unit in Unit:
        environment.filters[unit.name.lower()] = partial(format_value, unit=unit)
    environment.filters.update(line=one_line, lines=_lines)
    return environment


def _lines(text: str) -> str:
    """Return text of several lines without control characters."""
    shortened = text if len(text) <= _MAX_EXAMPLE else text[:_MAX_EXAMPLE] + " …"
    return "\n".join(one_line(line.replace("\t", "    ")) for line in shortened.splitlines())
