"""Read a report's data from gold tables with Arrow: no JVM, no Redis.

Each day is aggregated to the steps of the charts before the next is read, so memory does not grow with the number of
jobs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from bulltask.lake.arrow import arrow_schema
from bulltask.lake.gaps import GapRow, find_gaps
from bulltask.lake.layout import Layout
from bulltask.lake.read import TableReader
from bulltask.lake.report.period import Period
from bulltask.lake.tables import (
    ATTEMPTS,
    CAPACITY_MINUTE,
    COST_DAY,
    ERRORS_DAY,
    EVENTS,
    SLO_DAY,
    TASK_MINUTE,
    Table,
)

__all__ = ["MAX_SERIES", "Axis", "DurationHistograms", "ReportData", "Row", "TaskKey", "busiest_day", "read"]

TaskKey = tuple[str, str | None]
"""A queue, and the name of a task or ``None`` if the job's added event was lost."""

Row = Mapping[str, Any]

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
_QUEUE_SUMS: Final = ("added", "finished_or_removed", "backlog_delta", "busy_slots", "utilization")
_QUEUE_PEAKS: Final = ("peak_slots", "utilization", "wait_p95")
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
    """Histograms of durations (:mod:`bulltask.lake.log_histogram`).

    Attributes:
        by_task: A histogram for each task, across the whole period.
        over_time: A table with ``line`` (an index of ``ReportData.shown``, or the next index for all other tasks),
            ``at`` (a minute of the axis), ``bucket``, ``count``.
    """

    by_task: Mapping[TaskKey, Mapping[int, int]]
    over_time: Any


@dataclass(slots=True)
class ReportData:
    """The data of a period, aggregated for a report.

    Attributes:
        period: The period.
        axis: The time axis; ``None`` if the gold tables have no minutes in the period.
        tasks: ``gold.task_minute``: ``queue``, ``name``, ``at`` (a minute of the axis), sums of counts and times.
        shown: The tasks that have a separate line in charts.
        waits: Histograms of the wait times.
        runs: Histograms of the run times.
        queues: ``gold.capacity_minute``: ``queue``, ``at``, ``added_sum`` and so on; ``peak_slots_max`` and so on.
        errors: Rows of gold.errors_day.
        slos: Rows of gold.slo_day.
        costs: Rows of gold.cost_day.
        gaps: Gaps that overlap the period.
        incomplete: The incomplete minutes of each queue.
        unbuilt: Days with events but without gold tables.
        day_range: The first and the last day in the lake; ``None`` if it is empty.
        built_at: When the gold tables of the last day were written; ``None`` if there are none.
    """

    period: Period
    axis: Axis | None
    tasks: Any
    shown: list[TaskKey]
    waits: DurationHistograms
    runs: DurationHistograms
    queues: Any
    errors: list[Row] = field(default_factory=list)
    slos: list[Row] = field(default_factory=list)
    costs: list[Row] = field(default_factory=list)
    gaps: list[GapRow] = field(default_factory=list)
    incomplete: Mapping[str, set[int]] = field(default_factory=dict)
    unbuilt: list[date] = field(default_factory=list)
    day_range: tuple[date, date] | None = None
    built_at: datetime | None = None


def read(layout: Layout, period: Period) -> ReportData:
    """Read the data of a period.

    Args:
        layout: The lake.
        period: Its days and queues.

    Raises:
        LakeError: There is no lake, or it cannot be read.
    """
    reader = TableReader(layout)
    axis = _axis(reader, period)
    step = axis.step if axis else 1
    tasks = _task_minutes(reader, period, step)
    shown = _shown(tasks)
    return ReportData(
        period,
        axis,
        tasks,
        shown,
        *_histograms(reader, period, step, shown),
        _queue_minutes(reader, period, step),
        errors=_rows(reader, ERRORS_DAY, period),
        slos=_rows(reader, SLO_DAY, period),
        costs=_rows(reader, COST_DAY, period),
        gaps=find_gaps(layout, since=period.span[0], until=period.span[1], queues=period.queues or None),
        incomplete=_incomplete(reader, period),
        unbuilt=_unbuilt(reader, period),
        day_range=_day_range(reader),
        built_at=_built_at(layout, period),
    )


def busiest_day(layout: Layout, data: ReportData) -> tuple[list[Row], list[Row]]:
    """Return the minutes of the day with the longest busy time: rows of tasks and of queues.

    Only one day is returned, because each row becomes a Python object. The run histogram of a task's day is in one of
    its rows.
    """
    if not data.tasks.num_rows:
        return [], []
    by_day = data.tasks.append_column("day", pc.divide(data.tasks["at"], 1440)).group_by("day")
    days = by_day.aggregate([("busy_ms", "sum"), ("added", "sum")]).to_pylist()
    busiest = max(days, key=lambda row: (row["busy_ms_sum"], row["added_sum"], row["day"]))["day"]
    day = datetime.fromtimestamp(busiest * 86_400, UTC).date()
    reader, period = TableReader(layout), Period(day, day, data.period.queues)
    tasks = next(_days(reader, TASK_MINUTE, period, _LOAD)).to_pylist()
    queues = next(_days(reader, CAPACITY_MINUTE, period, ["queue", "minute", "busy_slots", "peak_slots"]))
    runs = dict(_histograms(reader, period, 1440, [])[1].by_task)
    for row in tasks:
        row["run_histogram_ms"] = runs.pop((row["queue"], row["name"]), None)
    return tasks, queues.to_pylist()


def _axis(reader: TableReader, period: Period) -> Axis | None:
    minutes: list[int] = []
    for table in (TASK_MINUTE, CAPACITY_MINUTE):
        for day in _days(reader, table, period, ["queue", "minute"]):
            if day.num_rows:
                bounds = pc.min_max(_minutes(day["minute"])).as_py()
                minutes += [bounds["min"], bounds["max"]]
    return Axis.spanning(min(minutes), max(minutes)) if minutes else None


def _queue_filter(period: Period) -> Any:
    return ds.field("queue").isin(list(period.queues)) if period.queues else None


def _days(reader: TableReader, table: Table, period: Period, columns: Sequence[str]) -> Iterator[Any]:
    """Yield a table's days, one after the other."""
    full_schema = arrow_schema(table)
    schema = pa.schema([full_schema.field(name) for name in columns])
    for day in period.days:
        yield reader.scan(
            table,
            [day],
            lambda batches: pa.Table.from_batches(batches, schema),
            where=_queue_filter(period),
            columns=columns,
        )


def _rows(reader: TableReader, table: Table, period: Period) -> list[Row]:
    columns = [column.name for column in table.columns]
    return [row for day in _days(reader, table, period, columns) for row in day.to_pylist()]


def _minutes(column: Any) -> Any:
    return pc.divide(pc.cast(column, pa.int64()), _MINUTE_US)


def _with_steps(table: Any, step: int) -> Any:
    at = pc.multiply(pc.divide(_minutes(table["minute"]), step), step)
    return table.append_column("at", at)


def _task_minutes(reader: TableReader, period: Period, step: int) -> Any:
    """Return the sums of each task for each point of the axis."""
    key, sums = ["queue", "name", "at"], [(name, "sum") for name in _TASK_SUMS]
    days = [
        _select(_with_steps(day, step).group_by(key).aggregate(sums), [*key, *_TASK_SUMS])
        for day in _days(reader, TASK_MINUTE, period, ["queue", "name", "minute", *_TASK_SUMS])
    ]
    texts = [("queue", pa.string()), ("name", pa.string())]
    return _concat(days, pa.schema([*texts, *((name, pa.int64()) for name in ("at", *_TASK_SUMS))]))


def _shown(tasks: Any) -> list[TaskKey]:
    """Return the tasks that have a separate line: the tasks with the longest busy time."""
    columns = [(name, "sum") for name in ("busy_ms", "finished", "added", "started")]
    ranked = [
        (-row["busy_ms_sum"], -row["finished_sum"], row["queue"], row["name"] or "", row["name"])
        for row in tasks.group_by(["queue", "name"]).aggregate(columns).to_pylist()
        if any(row[f"{name}_sum"] for name, _ in columns)
    ]
    keys = [(queue, name) for *_, queue, _, name in sorted(ranked, key=lambda item: item[:-1])]
    return keys if len(keys) <= MAX_SERIES else keys[: MAX_SERIES - 1]


def _histograms(
    reader: TableReader, period: Period, step: int, shown: list[TaskKey]
) -> tuple[DurationHistograms, DurationHistograms]:
    """Return the histograms of wait and run times."""
    totals: tuple[defaultdict[TaskKey, Counter[int]], ...] = (defaultdict(Counter), defaultdict(Counter))
    parts: tuple[list[Any], list[Any]] = ([], [])
    for day in _days(reader, TASK_MINUTE, period, ["queue", "name", "minute", "wait_histogram_ms", "run_histogram_ms"]):
        names = pc.binary_join_element_wise(day["queue"], pc.fill_null(day["name"], _NULL), _NULL)
        tasks = names.combine_chunks().dictionary_encode()
        keys = [(queue, None if name == _NULL else name) for queue, name in map(_split, tasks.dictionary.to_pylist())]
        lines = pa.array([shown.index(key) if key in shown else len(shown) for key in keys], pa.int32())
        rows = pa.table({"task": tasks.indices, "line": lines.take(tasks.indices), "at": _with_steps(day, step)["at"]})
        for index, column in enumerate(("wait_histogram_ms", "run_histogram_ms")):
            flat = _flatten(rows, day[column])
            for row in _sum_counts(flat, ["task", "bucket"]).to_pylist():
                totals[index][keys[row["task"]]][row["bucket"]] += row["count"]
            parts[index].append(_sum_counts(flat, ["line", "at", "bucket"]))
    schema = pa.schema([("line", pa.int32()), ("at", pa.int64()), ("bucket", pa.int32()), ("count", pa.int64())])
    waits, runs = (DurationHistograms(dict(totals[index]), _concat(parts[index], schema)) for index in (0, 1))
    return waits, runs


def _split(text: str) -> list[str]:
    return text.split(_NULL, 1)


def _flatten(rows: Any, counts: Any) -> Any:
    """Return one row per bucket of each row's histogram."""
    lists = counts.cast(_PAIRS).combine_chunks()  # Arrow's list functions crash the process on map arrays
    parents, pairs = pc.list_parent_indices(lists), pc.list_flatten(lists)
    flat = rows.take(parents)
    return flat.append_column("bucket", pc.struct_field(pairs, 0)).append_column("count", pc.struct_field(pairs, 1))


def _sum_counts(flat: Any, key: list[str]) -> Any:
    return _select(flat.group_by(key).aggregate([("count", "sum")]), [*key, "count"])


def _select(table: Any, names: list[str]) -> Any:
    """Select columns in this order, without the suffix of the aggregation."""
    renamed = table.rename_columns([name.removesuffix("_sum") for name in table.schema.names])
    return renamed.select(names)


def _queue_minutes(reader: TableReader, period: Period, step: int) -> Any:
    columns = ["queue", "minute", "capacity", *dict.fromkeys((*_QUEUE_SUMS, *_QUEUE_PEAKS))]
    sums = [(name, "sum") for name in _QUEUE_SUMS] + [(name, "max") for name in (*_QUEUE_PEAKS, "capacity")]
    names = ["queue", "at", *(f"{name}_{kind}" for name, kind in sums)]
    parts = {"busy_slots_sum", "utilization_sum", "utilization_max"}
    types = [pa.string(), *(pa.float64() if name in parts else pa.int64() for name in names[1:])]
    days = [
        _with_steps(day, step).group_by(["queue", "at"]).aggregate(sums).select(names)
        for day in _days(reader, CAPACITY_MINUTE, period, columns)
    ]
    return _concat(days, pa.schema(list(zip(names, types, strict=True))))


def _concat(parts: list[Any], schema: Any) -> Any:
    return pa.concat_tables([part.cast(schema) for part in parts]) if parts else schema.empty_table()


def _incomplete(reader: TableReader, period: Period) -> dict[str, set[int]]:
    incomplete: defaultdict[str, set[int]] = defaultdict(set)
    for table in (TASK_MINUTE, CAPACITY_MINUTE):
        for day in _days(reader, table, period, ["queue", "minute", "complete"]):
            lost = day.filter(pc.invert(day["complete"]))
            for queue, minute in zip(lost["queue"].to_pylist(), _minutes(lost["minute"]).to_pylist(), strict=True):
                incomplete[queue].add(minute)
    return dict(incomplete)


def _unbuilt(reader: TableReader, period: Period) -> list[date]:
    days_with_events = {*reader.days(EVENTS), *reader.days(ATTEMPTS)}
    built_days = {*reader.days(TASK_MINUTE)}
    return [day for day in period.days if day in days_with_events and day not in built_days]


def _day_range(reader: TableReader) -> tuple[date, date] | None:
    days = [day for table in (EVENTS, ATTEMPTS, TASK_MINUTE) for day in reader.days(table)]
    return (min(days), max(days)) if days else None


def _built_at(layout: Layout, period: Period) -> datetime | None:
    times = [directory.stat().st_mtime for day in period.days if (directory := layout.day(TASK_MINUTE, day)).is_dir()]
    return datetime.fromtimestamp(times[-1], UTC) if times else None
