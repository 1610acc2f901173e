"""The sections of a report as tables: tasks, failures, capacity, objectives, cost, gaps; and tables as text."""

from __future__ import annotations

import csv
import io
import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from typing import Any, Final

from bulltask.lake.capacity import Recommendation, recommend
from bulltask.lake.formatting import CONTROL, Unit, format_value, json_text, one_line
from bulltask.lake.report.data import UNKNOWN, QueueAggregate, ReportData, Row, TaskAggregate

__all__ = [
    "CapacityTarget",
    "Cost",
    "Failure",
    "Reason",
    "Recommendations",
    "ReportColumn",
    "ReportTable",
    "as_csv",
    "as_json",
    "as_markdown",
    "as_text",
    "capacity",
    "cost",
    "costs",
    "errors",
    "expectations",
    "failures",
    "gaps",
    "markdown_text",
    "reasons",
    "recommend_concurrency",
    "requeues",
    "slo",
    "tasks",
]


@dataclass(frozen=True, slots=True)
class ReportColumn:
    """A column with its name in JSON and CSV, its heading, and the kind of its values."""

    name: str
    heading: str
    unit: Unit

    @property
    def is_text(self) -> bool:
        """Whether the column is left-aligned."""
        return self.unit in {Unit.TEXT, Unit.NAME, Unit.TEXTS, Unit.TIME, Unit.FLAG}


@dataclass(slots=True)
class ReportTable:
    """A table.

    Attributes:
        columns: The columns.
        rows: A value or ``None`` for each column.
        note: A sentence below the table.
    """

    columns: Sequence[ReportColumn]
    rows: Sequence[Sequence[Any]] = ()
    note: str = ""

    def cells(self) -> list[list[str]]:
        """Return the rows as formatted text."""
        return [
            [format_value(value, column.unit) for value, column in zip(row, self.columns, strict=True)]
            for row in self.rows
        ]

    def without(self, *names: str) -> ReportTable:
        """Return the table without some columns."""
        indexes = [index for index, column in enumerate(self.columns) if column.name not in names]
        rows = [[row[index] for index in indexes] for row in self.rows]
        return ReportTable([self.columns[index] for index in indexes], rows, self.note)

    def first(self, max_rows: int, rest: str) -> ReportTable:
        """Return the first rows. The note has the number of omitted rows and ``rest``, the command that lists them."""
        if len(self.rows) <= max_rows:
            return self
        return ReportTable(self.columns, self.rows[:max_rows], f"{len(self.rows) - max_rows:,} others: {rest}")


def as_text(table: ReportTable) -> str:
    """Return aligned columns for a terminal."""
    head = [column.heading for column in table.columns]
    lines = [head, *table.cells()]
    widths = [max(len(line[index]) for line in lines) for index in range(len(head))]
    padded = (
        "  ".join(
            cell.ljust(width) if column.is_text else cell.rjust(width)
            for cell, width, column in zip(line, widths, table.columns, strict=True)
        ).rstrip()
        for line in lines
    )
    return "\n".join([*padded, *([f"\n{table.note}"] if table.note else [])]) + "\n"


def as_markdown(table: ReportTable) -> str:
    """Return a Markdown table, in which untrusted text cannot leave its cell."""
    heads = [column.heading for column in table.columns]
    rule = ["---" if column.is_text else "---:" for column in table.columns]
    lines = [heads, rule, *([markdown_text(cell) for cell in row] for row in table.cells())]
    note = f"\n{table.note}\n" if table.note else ""
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n" + note


_MARKUP: Final = re.compile(
    r"[\\`*\[\]<>|~&$@#]"  # code, emphasis, links, HTML, cells, formulas, mentions
    r"|(?<![^\W_])_|_(?![^\W_])"  # emphasis, but not within a name
    r"|:(?=//)|(?<=www)\."  # automatic links
    r"|^[+=-](?=[\s=-]|$)|(?<=^\d)[.)](?=\s|$)"  # lists, headings, rules
)


def markdown_text(text: str) -> str:
    """Return text that Markdown shows literally on one line: without links, HTML or cells."""
    # Entities work in every renderer, even where backslashes do not (| in tables on GitHub).
    return _MARKUP.sub(lambda match: f"&#{ord(match[0])};", one_line(text))


def as_json(table: ReportTable) -> str:
    """Return a JSON list of objects, with times in ISO 8601 and money as text."""
    names = [column.name for column in table.columns]
    rows = [dict(zip(names, map(_plain, row), strict=True)) for row in table.rows]
    return json_text(rows) + "\n"


def as_csv(table: ReportTable) -> str:
    """Return CSV with a header.

    Text that a spreadsheet would read as a formula gets a leading ``'``; control characters are escaped: ``\\x1b``.
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([column.name for column in table.columns])
    writer.writerows([_csv_cell(_plain(value)) for value in row] for row in table.rows)
    return out.getvalue()


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat()
    return str(value) if isinstance(value, Decimal) else value


def _csv_cell(value: Any) -> Any:
    text = " ".join(map(str, value)) if isinstance(value, list | tuple) else value
    if not isinstance(text, str):
        return text
    # Spreadsheets ignore what precedes the sign, and read full-width signs, too.
    is_formula = (
        text[:1] in {"\t", "\r"} or unicodedata.normalize("NFKC", CONTROL.sub("", text[:200])).lstrip()[:1] in _SIGNS
    )
    return f"'{one_line(text)}" if is_formula else one_line(text)


_SIGNS: Final = frozenset("=+-@")


@dataclass(frozen=True, slots=True)
class CapacityTarget:
    """The target of a recommendation: the ``fraction`` of attempts that wait at most ``max_wait`` seconds."""

    max_wait: float = 2.0
    fraction: float = 0.99
    peak_factor: float = 1.2


@dataclass(frozen=True, slots=True)
class Recommendations:
    """Recommended concurrencies: for workers of all queues, and for separate workers of each queue."""

    overall: Recommendation | None = None
    by_queue: Mapping[str, Recommendation] = field(default_factory=dict)


def recommend_concurrency(
    task_minutes: Iterable[Row], queue_minutes: Iterable[Row], target: CapacityTarget
) -> Recommendations:
    """Recommend concurrencies, from rows of ``gold.task_minute`` and ``gold.capacity_minute``."""
    tasks, queues = _by_queue(task_minutes), _by_queue(queue_minutes)
    overall = _recommend([row for rows in tasks.values() for row in rows], queues, target)
    if len(tasks) == 1:
        return Recommendations(overall, {queue: overall for queue in tasks if overall})
    by_queue = {queue: _recommend(rows, {queue: queues.get(queue, [])}, target) for queue, rows in tasks.items()}
    return Recommendations(
        overall, {queue: recommendation for queue, recommendation in by_queue.items() if recommendation}
    )


def _recommend(rows: list[Row], queues: Mapping[str, list[Row]], target: CapacityTarget) -> Recommendation | None:
    capacity_minutes = [row for minutes in queues.values() for row in minutes]
    return recommend(
        rows, capacity_minutes, max_wait=target.max_wait, target=target.fraction, peak_factor=target.peak_factor
    )


def _by_queue(rows: Iterable[Row]) -> dict[str, list[Row]]:
    groups: defaultdict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[row["queue"]].append(row)
    return dict(groups)


def expectations(recommendation: Recommendation) -> ReportTable:
    """Return a table of the effect of the recommended concurrency, and of slightly higher and lower ones."""
    columns = [
        ReportColumn("concurrency", "Concurrency", Unit.COUNT),
        ReportColumn("in_time", "Start within target", Unit.FRACTION),
        ReportColumn("utilization", "Utilization", Unit.FRACTION),
    ]
    return ReportTable(columns, _values(recommendation.estimates, columns))


_QUEUE: Final = ReportColumn("queue", "Queue", Unit.NAME)
_NAME: Final = ReportColumn("name", "Task", Unit.NAME)


@dataclass(frozen=True, slots=True)
class Failure:
    """The failures of one task with one fingerprint in the period; ``fraction`` is of all failures of the task."""

    queue: str
    name: str
    error_fingerprint: str
    count: int
    fraction: float
    first_seen: datetime | None
    last_seen: datetime | None
    sample_failed_reason: str
    sample_job_ids: Sequence[str]


@dataclass(frozen=True, slots=True)
class Reason:
    """The failures of all tasks with one fingerprint; ``tasks`` are the failures by task, most frequent first."""

    error_fingerprint: str
    count: int
    fraction: float
    tasks: Sequence[Failure]
    first_seen: datetime | None
    last_seen: datetime | None


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one task, or of several, in the whole period; see ``gold.cost_day``."""

    queue: str | None
    name: str
    jobs: int
    attempts: int
    busy_s: float
    wasted_s: float
    cost: Decimal | None

    @property
    def per_job(self) -> Decimal | None:
        """The cost per finished job; ``None`` without jobs or without a price."""
        return round(self.cost / self.jobs, 9) if self.jobs and self.cost is not None else None

    @property
    def wasted(self) -> float | None:
        """The fraction of busy time spent on attempts that failed, stalled or were requeued."""
        return self.wasted_s / self.busy_s if self.busy_s else None

    @classmethod
    def combine(cls, parts: Sequence[Cost], name: str) -> Cost:
        """Combine several costs."""
        queues = {part.queue for part in parts}
        priced = [part.cost for part in parts if part.cost is not None]
        return cls(
            queues.pop() if len(queues) == 1 else None,
            name,
            sum(part.jobs for part in parts),
            sum(part.attempts for part in parts),
            sum(part.busy_s for part in parts),
            sum(part.wasted_s for part in parts),
            sum(priced, Decimal(0)) if priced else None,
        )


def failures(data: ReportData) -> list[Failure]:
    """Return the failures by task and reason, most frequent first."""
    grouped = _grouped(data.errors, "queue", "name", "error_fingerprint")
    totals: defaultdict[tuple[Any, ...], int] = defaultdict(int)
    for (queue, name, _), days in grouped.items():
        totals[queue, name] += sum(day["count"] for day in days)
    result = []
    for (queue, name, key), days in grouped.items():
        count, latest = sum(day["count"] for day in days), max(days, key=lambda day: str(day["last_seen"]))
        ids = [job_id for day in reversed(days) for job_id in day["sample_job_ids"] or ()]
        result.append(
            Failure(
                queue,
                name or UNKNOWN,
                key or "(no reason)",
                count,
                count / totals[queue, name] if totals[queue, name] else 0.0,
                _earliest(day["first_seen"] for day in days),
                latest["last_seen"],
                latest["sample_failed_reason"] or "",
                ids[:5],
            )
        )
    return sorted(result, key=lambda failure: (-failure.count, failure.name, failure.error_fingerprint))


def reasons(task_failures: Sequence[Failure]) -> list[Reason]:
    """Return the failures of all tasks by reason, most frequent first."""
    by_key: defaultdict[str, list[Failure]] = defaultdict(list)
    for failure in task_failures:
        by_key[failure.error_fingerprint].append(failure)
    total = sum(failure.count for failure in task_failures) or 1
    result = []
    for key, tasks in by_key.items():
        count = sum(failure.count for failure in tasks)
        last = max((failure.last_seen for failure in tasks if failure.last_seen is not None), default=None)
        first = _earliest(failure.first_seen for failure in tasks)
        result.append(Reason(key, count, count / total, sorted(tasks, key=lambda failure: -failure.count), first, last))
    return sorted(result, key=lambda reason: (-reason.count, reason.error_fingerprint))


def costs(data: ReportData) -> list[Cost]:
    """Return the cost of each task, most expensive first."""
    result = [
        Cost.combine([_cost(day) for day in days], name or UNKNOWN)
        for (_, name), days in _grouped(data.costs, "queue", "name").items()
    ]
    return sorted(result, key=lambda cost: (-(cost.cost or 0), -cost.busy_s, cost.name))


def _cost(row: Row) -> Cost:
    return Cost(
        row["queue"],
        row["name"] or UNKNOWN,
        row["jobs"] or 0,
        row["attempts"] or 0,
        row["busy_s"] or 0.0,
        row["wasted_s"] or 0.0,
        row["cost"],
    )


def errors(rows: Iterable[Failure]) -> ReportTable:
    """Return failures as a table."""
    columns = [
        _QUEUE,
        _NAME,
        ReportColumn("error_fingerprint", "Error fingerprint", Unit.TEXT),
        ReportColumn("count", "Failures", Unit.COUNT),
        ReportColumn("fraction", "Share of the task's failures", Unit.FRACTION),
        ReportColumn("first_seen", "First seen", Unit.TIME),
        ReportColumn("last_seen", "Last seen", Unit.TIME),
        ReportColumn("sample_failed_reason", "Example", Unit.TEXT),
        ReportColumn("sample_job_ids", "Job IDs", Unit.TEXTS),
    ]
    return ReportTable(columns, _values(rows, columns))


def cost(rows: Iterable[Cost]) -> ReportTable:
    """Return costs as a table."""
    columns = [
        _QUEUE,
        _NAME,
        ReportColumn("jobs", "Jobs", Unit.COUNT),
        ReportColumn("attempts", "Attempts", Unit.COUNT),
        ReportColumn("busy_s", "Busy time", Unit.SECONDS),
        ReportColumn("wasted_s", "Wasted time", Unit.SECONDS),
        ReportColumn("wasted", "Wasted fraction", Unit.FRACTION),
        ReportColumn("cost", "Cost", Unit.MONEY),
        ReportColumn("per_job", "Per job", Unit.MONEY),
    ]
    return ReportTable(columns, _values(rows, columns))


def slo(data: ReportData) -> ReportTable:
    """Return objectives as a table, smallest remaining error budget first; days are combined."""
    columns = [
        _QUEUE,
        _NAME,
        ReportColumn("metric", "Metric", Unit.TEXT),
        ReportColumn("threshold_ms", "Threshold", Unit.MS),
        ReportColumn("target", "Target", Unit.FRACTION),
        ReportColumn("measured", "Measured", Unit.COUNT),
        ReportColumn("good", "Good", Unit.COUNT),
        ReportColumn("attainment", "Attained", Unit.FRACTION),
        ReportColumn("error_budget_remaining", "Error budget remaining", Unit.FRACTION),
        ReportColumn("complete", "Complete", Unit.FLAG),
    ]
    rows: list[Sequence[Any]] = []
    for key, days in _grouped(data.slos, "queue", "name", "metric", "threshold_ms", "target").items():
        measured, good = sum(day["measured"] for day in days), sum(day["good"] for day in days)
        attainment = good / measured if measured else None
        complete = all(day["complete"] for day in days)
        queue, name, metric, threshold_ms, target = key
        left = None if attainment is None or target >= 1 else 1 - (1 - attainment) / (1 - target)
        rows.append([queue, name or UNKNOWN, metric, threshold_ms, target, measured, good, attainment, left, complete])
    return ReportTable(columns, sorted(rows, key=lambda row: (row[8] is None, row[8], row[1])))


def capacity(aggregates: Iterable[QueueAggregate]) -> ReportTable:
    """Return the load of queues as a table."""
    columns = [
        _QUEUE,
        ReportColumn("added", "Added", Unit.COUNT),
        ReportColumn("finished_or_removed", "Finished or removed", Unit.COUNT),
        ReportColumn("backlog", "Backlog", Unit.COUNT),
        ReportColumn("busy_mean", "Busy slots, mean", Unit.NUMBER),
        ReportColumn("busy_peak", "Busy slots, peak", Unit.COUNT),
        ReportColumn("utilization_mean", "Utilization, mean", Unit.FRACTION),
        ReportColumn("utilization_peak", "Utilization, peak", Unit.FRACTION),
        ReportColumn("capacity", "Capacity", Unit.COUNT),
        ReportColumn("wait_p95", "Wait p95, worst minute", Unit.MS),
        ReportColumn("incomplete", "Incomplete minutes", Unit.COUNT),
    ]
    return ReportTable(columns, _values(aggregates, columns))


def tasks(aggregates: Iterable[TaskAggregate]) -> ReportTable:
    """Return the jobs, wait and run times of tasks as a table."""
    quantiles = (0.5, 0.95, 0.99)
    columns = [
        _QUEUE,
        _NAME,
        ReportColumn("jobs", "Jobs", Unit.COUNT),
        ReportColumn("failure_rate", "Failed", Unit.FRACTION),
        *(
            ReportColumn(f"{metric.lower()}_p{quantile * 100:.0f}", f"{metric} p{quantile * 100:.0f}", Unit.MS)
            for metric in ("Wait", "Run")
            for quantile in quantiles
        ),
    ]
    rows = [
        [
            aggregate.queue,
            aggregate.label,
            aggregate.counts["finished"],
            aggregate.failure_rate,
            *(aggregate.wait(quantile) for quantile in quantiles),
            *(aggregate.run(quantile) for quantile in quantiles),
        ]
        for aggregate in aggregates
    ]
    return ReportTable(columns, rows)


def requeues(aggregates: Iterable[TaskAggregate]) -> ReportTable:
    """Return requeued and stalled attempts as a table."""
    columns = [
        _QUEUE,
        _NAME,
        ReportColumn("attempts", "Attempts", Unit.COUNT),
        ReportColumn("requeued", "Requeued", Unit.COUNT),
        ReportColumn("requeued_fraction", "Requeued fraction", Unit.FRACTION),
        ReportColumn("stalled", "Stalled", Unit.COUNT),
        ReportColumn("stalled_fraction", "Stalled fraction", Unit.FRACTION),
        ReportColumn("wasted_ms", "Wasted time", Unit.MS),
    ]
    rows = []
    for task in aggregates:
        requeued, stalled, attempts = task.counts["requeued"], task.counts["stalled"], task.attempts or 1
        if requeued or stalled:
            wasted_ms = task.counts["wasted_ms"]
            shares = [requeued, requeued / attempts, stalled, stalled / attempts]
            rows.append([task.queue, task.label, task.attempts, *shares, wasted_ms])
    return ReportTable(columns, rows)


def gaps(data: ReportData) -> ReportTable:
    """Return gaps as a table."""
    columns = [
        _QUEUE,
        ReportColumn("lost", "Events lost", Unit.COUNT),
        ReportColumn("exact", "Exact number", Unit.FLAG),
        ReportColumn("loss_reason", "Reason", Unit.TEXT),
        ReportColumn("last_at_before", "Last event before", Unit.TIME),
        ReportColumn("first_at_after", "First event after", Unit.TIME),
        ReportColumn("detected_at", "Detected", Unit.TIME),
        ReportColumn("backfilled_jobs", "Jobs backfilled", Unit.COUNT),
    ]
    return ReportTable(columns, _values(data.gaps, columns))


def _values(items: Iterable[Any], columns: Sequence[ReportColumn]) -> list[list[Any]]:
    """Return the attributes of objects that have the names of the columns."""
    return [[getattr(item, column.name) for column in columns] for item in items]


def _grouped(rows: Iterable[Row], *names: str) -> dict[tuple[Any, ...], list[Row]]:
    """Group rows by the values of some columns, in order."""
    groups: defaultdict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        groups[tuple(row[name] for name in names)].append(row)
    return dict(groups)


def _earliest(times: Iterable[datetime | None]) -> datetime | None:
    return min((time for time in times if time is not None), default=None)
