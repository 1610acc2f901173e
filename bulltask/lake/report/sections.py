"""The sections of a report as tables: tasks, failures, capacity, objectives, cost, gaps; and tables as text."""

from __future__ import annotations

import csv
import io
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from decimal import Decimal
from typing import Annotated, Any, Final, get_type_hints

from bulltask.lake.capacity import Recommendation, recommend
from bulltask.lake.formatting import CONTROL, Unit, format_value, json_text, one_line, shorten
from bulltask.lake.log_histogram import percentile
from bulltask.lake.records import Row, to_json
from bulltask.lake.report.data import UNKNOWN, QueueAggregate, ReportData, TaskAggregate


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
    """A table, whose rows have a value or ``None`` for each column; ``note`` is a sentence below it."""

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
    rows = [dict(zip(names, map(to_json, row), strict=True)) for row in table.rows]
    return json_text(rows) + "\n"


def as_csv(table: ReportTable) -> str:
    """Return CSV with a header.

    Text that a spreadsheet would read as a formula gets a leading ``'``; control characters are escaped: ``\\x1b``.
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([column.name for column in table.columns])
    writer.writerows([_csv_cell(to_json(value)) for value in row] for row in table.rows)
    return out.getvalue()


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


def table_of(kind: type[Any], items: Iterable[Any]) -> ReportTable:
    """Return objects as a table, with a column for each field whose type is annotated with a heading and a unit."""
    hints = get_type_hints(kind, include_extras=True).items()
    columns = [ReportColumn(name, *hint.__metadata__) for name, hint in hints if hasattr(hint, "__metadata__")]
    return ReportTable(columns, [[getattr(item, column.name) for column in columns] for item in items])


@dataclass(frozen=True, slots=True)
class Recommendations:
    """Recommended concurrencies: for workers of all queues, and for separate workers of each queue."""

    overall: Recommendation | None = None
    by_queue: Mapping[str, Recommendation] = field(default_factory=dict)


def recommend_concurrency(task_minutes: Sequence[Row], queue_minutes: Sequence[Row], **target: Any) -> Recommendations:
    """Recommend concurrencies, from rows of ``gold.task_minute`` and ``gold.capacity_minute``.

    ``target`` is the target, as in :func:`bulltask.lake.capacity.recommend`.
    """
    tasks, queues = _grouped(task_minutes, "queue"), _grouped(queue_minutes, "queue")
    found = {queue: recommend(rows, queues.get(queue, ()), **target) for queue, rows in tasks.items()}
    by_queue = {queue: concurrency for (queue,), concurrency in found.items() if concurrency}
    return Recommendations(recommend(task_minutes, queue_minutes, **target), by_queue)


_QUEUE: Final = ReportColumn("queue", "Queue", Unit.NAME)
_NAME: Final = ReportColumn("name", "Task", Unit.NAME)


@dataclass(frozen=True, slots=True)
class Failure:
    """The failures of one task with one fingerprint in the period."""

    queue: Annotated[str, "Queue", Unit.NAME]
    name: Annotated[str, "Task", Unit.NAME]
    error_fingerprint: Annotated[str, "Error fingerprint", Unit.TEXT]
    count: Annotated[int, "Failures", Unit.COUNT]
    fraction: Annotated[float, "Share of the task's failures", Unit.FRACTION]
    first_seen: Annotated[datetime | None, "First seen", Unit.TIME]
    last_seen: Annotated[datetime | None, "Last seen", Unit.TIME]
    sample_failed_reason: Annotated[str, "Example", Unit.TEXT]
    sample_job_ids: Annotated[Sequence[str], "Job IDs", Unit.TEXTS]


@dataclass(frozen=True, slots=True)
class Reason:
    """The failures of all tasks with one fingerprint.

    ``tasks`` are the failures by task, most frequent first; ``names`` are the names of the first tasks.
    """

    error_fingerprint: Annotated[str, "Error fingerprint", Unit.TEXT]
    count: Annotated[int, "Failures", Unit.COUNT]
    fraction: Annotated[float, "Of all failures", Unit.FRACTION]
    names: Annotated[Sequence[str], "Tasks", Unit.TEXTS]
    first_seen: Annotated[datetime | None, "First seen", Unit.TIME]
    last_seen: Annotated[datetime | None, "Last seen", Unit.TIME]
    tasks: Sequence[Failure]


@dataclass(slots=True)
class Cost:
    """The cost of one task, or of several, in the whole period; see ``gold.cost_day``.

    ``wasted_s`` and ``wasted`` are of attempts that failed, stalled or were requeued. The cost is ``None`` without a
    price, and so is that of a finished job without jobs.
    """

    queue: Annotated[str | None, "Queue", Unit.NAME]
    name: Annotated[str, "Task", Unit.NAME]
    jobs: Annotated[int, "Jobs", Unit.COUNT]
    attempts: Annotated[int, "Attempts", Unit.COUNT]
    busy_s: Annotated[float, "Busy time", Unit.SECONDS]
    wasted_s: Annotated[float, "Wasted time", Unit.SECONDS]
    wasted: Annotated[float | None, "Wasted fraction", Unit.FRACTION] = field(init=False)
    cost: Annotated[Decimal | None, "Cost", Unit.MONEY]
    per_job: Annotated[Decimal | None, "Per job", Unit.MONEY] = field(init=False)

    def __post_init__(self) -> None:
        self.wasted = self.wasted_s / self.busy_s if self.busy_s else None
        self.per_job = round(self.cost / self.jobs, 9) if self.jobs and self.cost is not None else None

    @classmethod
    def total(cls, rows: Sequence[Row], name: str) -> Cost:
        """Add up rows of ``gold.cost_day``."""
        queues = {row["queue"] for row in rows}
        prices = [row["cost"] for row in rows if row["cost"] is not None]
        columns = ("jobs", "attempts", "busy_s", "wasted_s")
        sums: dict[str, Any] = {column: sum(row[column] or 0 for row in rows) for column in columns}
        cost = sum(prices, Decimal(0)) if prices else None
        return cls(queues.pop() if len(queues) == 1 else None, name, **sums, cost=cost)

    @classmethod
    def combine(cls, parts: Sequence[Cost], name: str) -> Cost:
        """Combine several costs."""
        return cls.total([asdict(part) for part in parts], name)


@dataclass(frozen=True, slots=True)
class ObjectiveResult:
    """How many durations of a task met an objective; the attained fraction is ``None`` if none was measured."""

    queue: Annotated[str, "Queue", Unit.NAME]
    name: Annotated[str, "Task", Unit.NAME]
    metric: Annotated[str, "Metric", Unit.TEXT]
    threshold_ms: Annotated[int, "Threshold", Unit.MS]
    target: Annotated[float, "Target", Unit.FRACTION]
    measured: Annotated[int, "Measured", Unit.COUNT]
    good: Annotated[int, "Good", Unit.COUNT]
    attainment: Annotated[float | None, "Attained", Unit.FRACTION]
    error_budget_remaining: Annotated[float | None, "Error budget remaining", Unit.FRACTION]
    complete: Annotated[bool, "Complete", Unit.FLAG]


_MAX_NAMED: Final = 4
"""The maximum number of tasks listed for a reason."""


def failures(data: ReportData) -> list[Failure]:
    """Return the failures by task and reason, most frequent first."""
    totals: Counter[tuple[str, str | None]] = Counter()
    for day in data.errors:
        totals[day["queue"], day["name"]] += day["count"]
    result = []
    for (queue, name, key), days in _grouped(data.errors, "queue", "name", "error_fingerprint").items():
        count, latest = sum(day["count"] for day in days), max(days, key=lambda day: str(day["last_seen"]))
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
                [job_id for day in reversed(days) for job_id in day["sample_job_ids"] or ()][:5],
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
        tasks.sort(key=lambda failure: -failure.count)
        names = list(dict.fromkeys(shorten(task.name) for task in tasks))[:_MAX_NAMED]
        last = max((failure.last_seen for failure in tasks if failure.last_seen is not None), default=None)
        first = _earliest(failure.first_seen for failure in tasks)
        result.append(Reason(key, count, count / total, names, first, last, tasks))
    return sorted(result, key=lambda reason: (-reason.count, reason.error_fingerprint))


def costs(data: ReportData) -> list[Cost]:
    """Return the cost of each task, most expensive first."""
    by_task = _grouped(data.costs, "queue", "name").items()
    result = [Cost.total(days, name or UNKNOWN) for (_, name), days in by_task]
    return sorted(result, key=lambda cost: (-(cost.cost or 0), -cost.busy_s, cost.name))


def objectives(data: ReportData) -> list[ObjectiveResult]:
    """Return the results of the objectives, smallest remaining error budget first; days are combined."""
    results = []
    for key, days in _grouped(data.slos, "queue", "name", "metric", "threshold_ms", "target").items():
        queue, name, metric, threshold_ms, target = key
        measured, good = sum(day["measured"] for day in days), sum(day["good"] for day in days)
        attainment = good / measured if measured else None
        left = None if attainment is None or target >= 1 else 1 - (1 - attainment) / (1 - target)
        complete = all(day["complete"] for day in days)
        numbers = threshold_ms, target, measured, good, attainment, left
        results.append(ObjectiveResult(queue, name or UNKNOWN, metric, *numbers, complete))
    return sorted(results, key=lambda it: (it.error_budget_remaining is None, it.error_budget_remaining or 0, it.name))


def short_errors(rows: Iterable[Failure]) -> ReportTable:
    """Return failures as a table for a terminal, without examples, with short reasons and one job each."""
    shortened = []
    for failure in rows:
        reason, ids = failure.error_fingerprint, failure.sample_job_ids[:1]
        reason = reason if len(reason) <= 80 else f"{reason[:80]}…"
        shortened.append(replace(failure, error_fingerprint=reason, sample_job_ids=ids))
    return table_of(Failure, shortened).without("sample_failed_reason")


def capacity(queues: Sequence[QueueAggregate], recommendations: Recommendations) -> ReportTable:
    """Return the load of queues as a table, with the recommended concurrency for separate workers of each queue."""
    table = table_of(QueueAggregate, queues)
    if not recommendations.by_queue:
        return table
    concurrencies = {queue: recommendation.concurrency for queue, recommendation in recommendations.by_queue.items()}
    rows = [[*row, concurrencies.get(aggregate.queue)] for row, aggregate in zip(table.rows, queues, strict=True)]
    return ReportTable([*table.columns, ReportColumn("concurrency", "Recommended concurrency", Unit.COUNT)], rows)


def tasks(aggregates: Iterable[TaskAggregate]) -> ReportTable:
    """Return the jobs, wait and run times of tasks as a table."""
    durations = [(metric, percent) for metric in ("wait", "run") for percent in (50, 95, 99)]
    columns = [
        _QUEUE,
        _NAME,
        ReportColumn("jobs", "Jobs", Unit.COUNT),
        ReportColumn("failure_rate", "Failed", Unit.FRACTION),
        *(
            ReportColumn(f"{metric}_p{percent}", f"{metric.title()} p{percent}", Unit.MS)
            for metric, percent in durations
        ),
    ]
    rows = []
    for task in aggregates:
        percentiles = (percentile(getattr(task, metric), percent / 100) for metric, percent in durations)
        rows.append([task.queue, task.label, task.counts["finished"], task.failure_rate, *percentiles])
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
            shares = [requeued, requeued / attempts, stalled, stalled / attempts]
            rows.append([task.queue, task.label, task.attempts, *shares, task.counts["wasted_ms"]])
    return ReportTable(columns, rows)


def _grouped(rows: Iterable[Row], *names: str) -> dict[tuple[Any, ...], list[Row]]:
    """Group rows by the values of some columns, in order."""
    groups: defaultdict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        groups[tuple(row[name] for name in names)].append(row)
    return dict(groups)


def _earliest(times: Iterable[datetime | None]) -> datetime | None:
    return min((time for time in times if time is not None), default=None)
