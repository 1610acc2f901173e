"""The data of a report: read from gold tables with Arrow, and aggregated for each task and queue.

Neither a JVM nor Redis is needed. Each day is aggregated to the steps of the charts before the next is read, so memory
does not grow with the number of jobs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta
from functools import partial
from operator import itemgetter
from typing import Annotated, Any, Final, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from bulltask.jobs.errors import ConfigError
from bulltask.lake.formatting import Unit, shorten
from bulltask.lake.log_histogram import Histogram, merge_histograms
from bulltask.lake.reader import GapRow, TableReader, find_gaps, half_built_days
from bulltask.lake.records import Row
from bulltask.lake.storage import Lake, arrow_schema
from bulltask.lake.tables import ATTEMPTS, CAPACITY_MINUTE, COST_DAY, ERRORS_DAY, EVENTS, SLO_DAY, TASK_MINUTE, Table

T = TypeVar("T")

_MAX_DAYS: Final = 366
_DAY: Final = timedelta(days=1)

Span = tuple[datetime, datetime]
"""A start and an end, which is not included."""


@dataclass(frozen=True, slots=True)
class Period:
    """Whole days (UTC) and queues.

    Attributes:
        first: The first day.
        last: The last day, which is included.
        queues: Names of queues; empty for all.

    Raises:
        ConfigError: There are more than 366 days.
    """

    first: date
    last: date
    queues: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if (self.last - self.first).days >= _MAX_DAYS:
            raise ConfigError(f"{self.first}..{self.last} has more than {_MAX_DAYS} days: choose fewer days")

    @property
    def days(self) -> list[date]:
        """All days, in order."""
        return [self.first + _DAY * offset for offset in range((self.last - self.first).days + 1)]

    @property
    def span(self) -> Span:
        """The start and end; the end is not included."""
        return datetime.combine(self.first, time(), UTC), datetime.combine(self.last + _DAY, time(), UTC)

    @property
    def title(self) -> str:
        """``22 November 2026``, or ``20 November to 22 November 2026``."""
        last = f"{self.last.day} {self.last:%B %Y}"
        if self.first == self.last:
            return last
        year = f" {self.first:%Y}" if self.first.year != self.last.year else ""
        return f"{self.first.day} {self.first:%B}{year} to {last}"

    def __str__(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}..{self.last}"


TaskKey = tuple[str, str | None]
"""A queue, and the name of a task or ``None`` if the job's added event was lost."""

MAX_SERIES: Final = 7
"""The maximum number of lines that readers can distinguish. The last line can combine the remaining tasks."""

_NULL: Final = "\0"
"""A separator that names of queues and tasks cannot contain."""

_PAIRS: Final = pa.list_(pa.struct([("key", pa.int32()), ("value", pa.int64())]))
_MINUTE_US: Final = 60_000_000
_STEPS: Final = (1, 2, 5, 10, 15, 30, 60, 120, 180, 360, 720, 1440)
_MAX_POINTS: Final = 240
_TASK_SUMS: Final = (
    "added", "started", "completed", "failed", "requeued", "stalled", "waiting_children", "finished", "busy_ms",
    "wasted_ms",
)  # fmt: skip
_QUEUE_AGGREGATES: Final = {
    **{name: (name, "sum") for name in ("added", "finished_or_removed", "backlog_delta", "busy_slots", "utilization")},
    **{name: (name, "max") for name in ("peak_slots", "wait_p95", "capacity")},
    "peak_utilization": ("utilization", "max"),
}
_LOAD: Final = (
    "queue", "name", "minute", "complete",
    "added", "completed", "failed", "requeued", "stalled", "waiting_children",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Axis:
    """The time axis of charts: from the first minute with data to the last.

    Attributes:
        start: Its first minute; minutes are counted from the Unix epoch.
        step: Minutes per point; it divides a day.
        points: The number of points.
    """

    start: int
    step: int
    points: int

    @classmethod
    def spanning(cls, first: int, last: int) -> Axis:
        """Create the axis from the first to the last minute, with at most as many points as a chart can show."""
        step = next((step for step in _STEPS if last // step - first // step < _MAX_POINTS), _STEPS[-1])
        return cls(first // step * step, step, last // step - first // step + 1)

    def index(self, minute: int) -> int:
        """Return the index of a minute's point."""
        return (minute - self.start) // self.step

    @property
    def minutes(self) -> int:
        """The number of minutes that it covers."""
        return self.points * self.step


@dataclass(frozen=True, slots=True)
class DurationHistograms:
    """Histograms of durations (:mod:`bulltask.lake.log_histogram`), of each task and over time.

    The key of ``over_time`` is an index of ``ReportData.shown``, or the next index for all other tasks, and a minute of
    the axis.
    """

    by_task: defaultdict[TaskKey, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))
    over_time: defaultdict[tuple[int, int], Counter[int]] = field(default_factory=lambda: defaultdict(Counter))


class ReportData:
    """The data of a period, read from a lake and aggregated for a report.

    Attributes:
        period: The period.
        axis: The time axis; ``None`` if the gold tables have no minutes in the period.
        tasks: ``gold.task_minute``: ``queue``, ``name``, ``at`` (a minute of the axis), sums of counts and times.
        shown: The tasks that have a separate line in charts.
        waits: Histograms of the wait times.
        runs: Histograms of the run times.
        queues: ``gold.capacity_minute``: ``queue``, ``at``, sums and maxima.
        errors: Rows of gold.errors_day.
        slos: Rows of gold.slo_day.
        costs: Rows of gold.cost_day.
        gaps: Gaps that overlap the period.
        incomplete: The minutes of each queue that are incomplete in gold or overlap a gap.
        unbuilt: Days with events but without gold tables, or with some of an earlier build because the last was killed.
        day_range: The first and the last day in the lake; ``None`` if it is empty.
        built_at: When the gold tables of the last day were written; ``None`` if there are none.
    """

    def __init__(self, lake: Lake, period: Period) -> None:
        reader = TableReader(lake)
        axis, incomplete = _axis_and_losses(reader, period)
        step = axis.step if axis else 1
        self.period = period
        self.axis = axis
        self.tasks = _over_time(reader, TASK_MINUTE, period, step, ["queue", "name"], sums(*_TASK_SUMS))
        self.shown = _shown(self.tasks)
        waits, runs = _histograms(reader, period, step, self.shown)
        self.waits = waits
        self.runs = runs
        self.queues = _over_time(reader, CAPACITY_MINUTE, period, step, ["queue"], _QUEUE_AGGREGATES)
        rows = partial(reader.rows, days=period.days, queue=period.queues or None)
        self.errors = sorted(rows(ERRORS_DAY), key=itemgetter("dt"))
        self.slos = rows(SLO_DAY)
        self.costs = rows(COST_DAY)
        self.gaps = find_gaps(lake, since=period.span[0], until=period.span[1], queues=period.queues or None)
        self.incomplete = _with_gaps(incomplete, self.gaps, period)
        with_events, built = {*reader.days(EVENTS), *reader.days(ATTEMPTS)}, {*reader.days(TASK_MINUTE)}
        self.unbuilt = [day for day in period.days if day in with_events - built | {*half_built_days(lake)}]
        self.day_range = (min(with_events | built), max(with_events | built)) if with_events | built else None
        self.built_at = _built_at(lake, period)


def busiest_day(lake: Lake, data: ReportData) -> tuple[list[Row], list[Row]]:
    """Return the minutes of the day with the longest busy time: rows of tasks and of queues.

    Only one day is returned, because each row becomes a Python object. The run histogram of a task's day is in one of
    its rows.
    """
    if not data.tasks.num_rows:
        return [], []
    by_day = aggregated(
        data.tasks.append_column("day", pc.divide(data.tasks["at"], 1440)), ["day"], sums("busy_ms", "added")
    )
    busiest = max(by_day.to_pylist(), key=lambda row: (row["busy_ms"], row["added"], row["day"]))["day"]
    day = datetime.fromtimestamp(busiest * 86_400, UTC).date()
    reader, period = TableReader(lake), Period(day, day, data.period.queues)
    tasks = next(_days(reader, TASK_MINUTE, period, _LOAD)).to_pylist()
    queues = next(_days(reader, CAPACITY_MINUTE, period, ["queue", "minute", "busy_slots", "peak_slots"]))
    runs = _histograms(reader, period, 1440, [])[1].by_task
    for row in tasks:
        row["run_histogram_ms"] = runs.pop((row["queue"], row["name"]), None)
    return tasks, queues.to_pylist()


def _axis_and_losses(reader: TableReader, period: Period) -> tuple[Axis | None, dict[str, set[int]]]:
    """Return the axis, and the minutes of each queue that are marked as incomplete."""
    bounds: list[int] = []
    incomplete: defaultdict[str, set[int]] = defaultdict(set)
    for table in (TASK_MINUTE, CAPACITY_MINUTE):
        for day in _days(reader, table, period, ["queue", "minute", "complete"]):
            if day.num_rows:
                bounds += pc.min_max(_minutes(day["minute"])).as_py().values()
            lost = day.filter(pc.invert(day["complete"]))
            for queue, minute in zip(lost["queue"].to_pylist(), _minutes(lost["minute"]).to_pylist(), strict=True):
                incomplete[queue].add(minute)
    return Axis.spanning(min(bounds), max(bounds)) if bounds else None, dict(incomplete)


def _with_gaps(marked: Mapping[str, set[int]], gaps: Sequence[GapRow], period: Period) -> dict[str, set[int]]:
    """Return the minutes of each queue that are marked as incomplete or overlap a gap."""
    begin, end = (int(moment.timestamp()) // 60 for moment in period.span)
    incomplete = dict(marked)
    for gap in gaps:
        last = gap.first_at_after or gap.detected_at
        first = gap.last_at_before or gap.first_at_after or last
        minutes = range(max(begin, int(first.timestamp()) // 60), min(end, int(last.timestamp()) // 60 + 1))
        incomplete[gap.queue] = incomplete.get(gap.queue, set()) | set(minutes)
    return incomplete


def _days(reader: TableReader, table: Table, period: Period, columns: Sequence[str]) -> Iterator[Any]:
    """Yield a table's days, one after the other."""
    full_schema = arrow_schema(table)
    schema = pa.schema([full_schema.field(name) for name in columns])
    for day in period.days:
        queues = period.queues or None
        yield reader.scan(
            table, [day], lambda batches: pa.Table.from_batches(batches, schema), columns=columns, queue=queues
        )


def _minutes(column: Any) -> Any:
    return pc.divide(pc.cast(column, pa.int64()), _MINUTE_US)


def _with_steps(table: Any, step: int) -> Any:
    at = pc.multiply(pc.divide(_minutes(table["minute"]), step), step)
    return table.append_column("at", at)


def aggregated(table: Any, key: list[str], columns: Mapping[str, tuple[str, str]]) -> Any:
    """Aggregate the rows of each key: each new column is an old one's ``sum`` or ``max``."""
    names = [f"{column}_{function}" for column, function in columns.values()]
    grouped = table.group_by(key).aggregate(list(columns.values()))
    return grouped.select([*key, *names]).rename_columns([*key, *columns])


def sums(*names: str) -> dict[str, tuple[str, str]]:
    """Return the sums of some columns, under their names, for :func:`aggregated`."""
    return {name: (name, "sum") for name in names}


def _over_time(
    reader: TableReader, table: Table, period: Period, step: int, key: list[str], columns: Mapping[str, tuple[str, str]]
) -> Any:
    """Return aggregates of each task or queue for each point of the axis."""
    names = dict.fromkeys([*key, "minute", *(column for column, _ in columns.values())])
    days = _days(reader, table, period, list(names))
    return pa.concat_tables(aggregated(_with_steps(day, step), [*key, "at"], columns) for day in days)


def _shown(tasks: Any) -> list[TaskKey]:
    """Return the tasks that have a separate line: the tasks with the longest busy time."""
    columns = sums("busy_ms", "finished", "added", "started")
    totals = aggregated(tasks, ["queue", "name"], columns).to_pylist()
    active = [row for row in totals if any(row[name] for name in columns)]
    active.sort(key=lambda row: (-row["busy_ms"], -row["finished"], row["queue"], row["name"] or ""))
    shown = active if len(active) <= MAX_SERIES else active[: MAX_SERIES - 1]
    return [(row["queue"], row["name"]) for row in shown]


def _histograms(
    reader: TableReader, period: Period, step: int, shown: list[TaskKey]
) -> tuple[DurationHistograms, DurationHistograms]:
    """Return the histograms of wait and run times."""
    waits, runs = DurationHistograms(), DurationHistograms()
    for day in _days(reader, TASK_MINUTE, period, ["queue", "name", "minute", "wait_histogram_ms", "run_histogram_ms"]):
        names = pc.binary_join_element_wise(day["queue"], pc.fill_null(day["name"], _NULL), _NULL)
        tasks = names.combine_chunks().dictionary_encode()
        pairs = (text.split(_NULL, 1) for text in tasks.dictionary.to_pylist())
        keys = [(queue, None if name == _NULL else name) for queue, name in pairs]
        lines = pa.array([shown.index(key) if key in shown else len(shown) for key in keys], pa.int32())
        rows = pa.table({"task": tasks.indices, "line": lines.take(tasks.indices), "at": _with_steps(day, step)["at"]})
        for histograms, column in ((waits, "wait_histogram_ms"), (runs, "run_histogram_ms")):
            flat = _flatten(rows, day[column])
            for row in aggregated(flat, ["task", "bucket"], sums("count")).to_pylist():
                histograms.by_task[keys[row["task"]]][row["bucket"]] += row["count"]
            for row in aggregated(flat, ["line", "at", "bucket"], sums("count")).to_pylist():
                histograms.over_time[row["line"], row["at"]][row["bucket"]] += row["count"]
    return waits, runs


def _flatten(rows: Any, counts: Any) -> Any:
    """Return one row per bucket of each row's histogram."""
    lists = counts.cast(_PAIRS).combine_chunks()  # Arrow's list functions crash the process on map arrays
    parents, pairs = pc.list_parent_indices(lists), pc.list_flatten(lists)
    flat = rows.take(parents)
    return flat.append_column("bucket", pc.struct_field(pairs, 0)).append_column("count", pc.struct_field(pairs, 1))


def _built_at(lake: Lake, period: Period) -> datetime | None:
    snapshot = lake.open(TASK_MINUTE)
    times = [snapshot.written_at(f"{day}") for day in period.days] if snapshot else []
    return next((time for time in reversed(times) if time is not None), None)


MAX_TASKS: Final = 15
"""The maximum number of listed tasks; the remaining tasks are combined."""

UNKNOWN: Final = "(name lost)"
"""The label of attempts whose added event, which contains the name, was lost."""


@dataclass(slots=True)
class TaskAggregate:
    """The aggregates of one task, or of several combined.

    Attributes:
        keys: The queue and name of each task.
        label: The label.
        counts: Sums of columns of gold.task_minute: ``finished``, ``failed``, ``busy_ms`` and so on.
        wait: Histogram of the wait times.
        run: Histogram of the run times.
    """

    keys: list[TaskKey]
    label: str
    counts: Counter[str]
    wait: Histogram = field(default_factory=dict)
    run: Histogram = field(default_factory=dict)

    @property
    def queue(self) -> str | None:
        """The queue; ``None`` for tasks of several queues."""
        queues = {queue for queue, _ in self.keys}
        return queues.pop() if len(queues) == 1 else None

    @property
    def attempts(self) -> int:
        """The number of ended attempts."""
        return sum(self.counts[name] for name in ("completed", "failed", "requeued", "stalled", "waiting_children"))

    @property
    def failure_rate(self) -> float | None:
        """The fraction of finished jobs that failed."""
        return self.counts["failed"] / self.counts["finished"] if self.counts["finished"] else None

    @classmethod
    def combine(cls, aggregates: Sequence[TaskAggregate], label: str) -> TaskAggregate:
        """Combine several aggregates."""
        return cls(
            [key for aggregate in aggregates for key in aggregate.keys],
            label,
            sum((aggregate.counts for aggregate in aggregates), Counter[str]()),
            merge_histograms(aggregate.wait for aggregate in aggregates),
            merge_histograms(aggregate.run for aggregate in aggregates),
        )


@dataclass(slots=True)
class QueueAggregate:
    """The aggregates of one queue and its workers, with the columns of their table.

    The backlog is how much the queue has grown; it is unknown if events were lost. Means are over the minutes from the
    first to the last of the report. The capacity is as configured, or else the observed peak.
    """

    queue: Annotated[str, "Queue", Unit.NAME]
    added: Annotated[int, "Added", Unit.COUNT]
    finished_or_removed: Annotated[int, "Finished or removed", Unit.COUNT]
    backlog: Annotated[int | None, "Backlog", Unit.COUNT]
    busy_mean: Annotated[float, "Busy slots, mean", Unit.NUMBER]
    busy_peak: Annotated[int | None, "Busy slots, peak", Unit.COUNT]
    utilization_mean: Annotated[float, "Utilization, mean", Unit.FRACTION]
    utilization_peak: Annotated[float | None, "Utilization, peak", Unit.FRACTION]
    capacity: Annotated[int | None, "Capacity", Unit.COUNT]
    wait_p95: Annotated[int | None, "Wait p95, worst minute", Unit.MS]
    incomplete: Annotated[int, "Incomplete minutes", Unit.COUNT]


def by_task(data: ReportData) -> list[TaskAggregate]:
    """Return the aggregates of each task, in descending order of busy time.

    A label is the task's name, with the queue if several queues have a task with this name.
    """
    rows = aggregated(data.tasks, ["queue", "name"], sums(*_TASK_SUMS)).to_pylist()
    counts = {(row["queue"], row["name"]): Counter({name: row[name] or 0 for name in _TASK_SUMS}) for row in rows}
    # A minute with lost events has a row without a task name, often with only zeros.
    counted = {key: count for key, count in counts.items() if key[1] is not None or any(count.values())}
    uses = Counter(name for _, name in counted)
    aggregates = []
    for key, count in counted.items():
        queue, name = key
        label = shorten(name or UNKNOWN) + (f" ({shorten(queue)})" if uses[name] > 1 else "")
        aggregates.append(TaskAggregate([key], label, count, data.waits.by_task[key], data.runs.by_task[key]))
    return sorted(aggregates, key=lambda task: (-task.counts["busy_ms"], -task.attempts, task.label))


def top_with_others(items: Sequence[T], combine: Callable[[Sequence[T], str], T]) -> list[T]:
    """Return the aggregates or costs of at most `MAX_TASKS` tasks; the last one combines the remaining tasks."""
    if len(items) <= MAX_TASKS:
        return list(items)
    rest = items[MAX_TASKS - 1 :]
    return [*items[: MAX_TASKS - 1], combine(rest, f"{len(rest)} others")]


def by_queue(data: ReportData, minutes: int) -> list[QueueAggregate]:
    """Return the aggregates of each queue; means are over the ``minutes`` that the report covers."""
    aggregates = []
    columns = {name: (name, function) for name, (_, function) in _QUEUE_AGGREGATES.items()}
    for row in aggregated(data.queues, ["queue"], columns).to_pylist():
        lost = data.incomplete.get(row["queue"], ())
        aggregates.append(
            QueueAggregate(
                row["queue"],
                added=row["added"] or 0,
                finished_or_removed=row["finished_or_removed"] or 0,
                backlog=None if lost else row["backlog_delta"] or 0,
                busy_mean=(row["busy_slots"] or 0) / max(minutes, 1),
                busy_peak=row["peak_slots"],
                utilization_mean=(row["utilization"] or 0) / max(minutes, 1),
                utilization_peak=row["peak_utilization"],
                capacity=row["capacity"],
                wait_p95=row["wait_p95"],
                incomplete=len(lost),
            )
        )
    return sorted(aggregates, key=lambda aggregate: (-aggregate.busy_mean, aggregate.queue))
