"""Time series for a report's charts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from bulltask.lake.formatting import shorten
from bulltask.lake.log_histogram import merge_histograms, percentile
from bulltask.lake.report.aggregates import QueueAggregate, incomplete_minutes
from bulltask.lake.report.data import MAX_SERIES, Axis, DurationHistograms, ReportData

__all__ = ["Series", "backlog", "busy", "percentiles", "rates"]


@dataclass(slots=True)
class Series:
    """A series: a value or ``None`` for each point of the axis.

    Attributes:
        label: The label.
        values: The values, in order of time.
        others: Whether the series combines all tasks or queues without a separate series.
    """

    label: str
    values: list[float | None]
    others: bool = False


def rates(data: ReportData, axis: Axis, names: Sequence[str]) -> list[Series]:
    """Return how many jobs or attempts there were per minute, for some counters of gold.task_minute."""
    lines = [Series(name, [0.0] * axis.points) for name in names]
    for row in data.tasks.group_by("at").aggregate([(name, "sum") for name in names]).to_pylist():
        for line in lines:
            line.values[axis.index(row["at"])] = (row[f"{line.label}_sum"] or 0) / axis.step
    return lines


def percentiles(
    histograms: DurationHistograms, axis: Axis, labels: Sequence[str], quantile: float, *, others: bool
) -> list[Series]:
    """Return a percentile over time for each line of ``histograms``.

    Args:
        histograms: ``waits`` or ``runs`` of the data.
        axis: The time axis.
        labels: The label of each line.
        quantile: 0.95 for the 95th percentile.
        others: Whether the last line combines all tasks without a separate line.
    """
    counts: defaultdict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    columns = (histograms.over_time[name].to_pylist() for name in ("line", "at", "bucket", "count"))
    for line, at, bucket, count in zip(*columns, strict=True):
        counts[line, axis.index(at)].append((bucket, count))
    last = len(labels) - 1
    return [
        Series(
            label,
            [percentile(merge_histograms([counts.get((line, point))]), quantile) for point in range(axis.points)],
            others=others and line == last,
        )
        for line, label in enumerate(labels)
    ]


def busy(data: ReportData, axis: Axis, aggregates: Sequence[QueueAggregate]) -> list[Series]:
    """Return the number of busy slots of each queue."""
    return _by_queue(data, axis, aggregates, "busy_slots_sum", axis.step)


def backlog(data: ReportData, axis: Axis, aggregates: Sequence[QueueAggregate]) -> list[Series]:
    """Return how much each queue has grown since the start of the axis, up to its first lost event.

    After the first lost event the backlog is unknown: a job whose *added* event was lost would only count when it
    finishes.
    """
    lines = _by_queue(data, axis, aggregates, "backlog_delta_sum", 1)
    known_points, incomplete = [axis.points] * len(lines), incomplete_minutes(data)
    for index, aggregate in enumerate(aggregates):
        line = min(index, len(lines) - 1)  # the last line may combine several queues
        first_lost = min((axis.index(minute) for minute in incomplete.get(aggregate.queue, ())), default=axis.points)
        known_points[line] = min(known_points[line], max(first_lost, 0))
    for series, points in zip(lines, known_points, strict=True):
        sums = accumulate(value or 0 for value in series.values[:points])
        series.values = [*sums, *([None] * (axis.points - points))]
    return lines


def _by_queue(
    data: ReportData, axis: Axis, aggregates: Sequence[QueueAggregate], column: str, divisor: int
) -> list[Series]:
    has_rest = len(aggregates) > MAX_SERIES
    shown = [aggregate.queue for aggregate in aggregates[: MAX_SERIES - 1 if has_rest else MAX_SERIES]]
    lines = {queue: Series(shorten(queue), [0.0] * axis.points) for queue in shown}
    rest = Series(f"{len(aggregates) - len(shown)} others", [0.0] * axis.points, others=True)
    for row in data.queues.select(["queue", "at", column]).to_pylist():
        values, index = lines.get(row["queue"], rest).values, axis.index(row["at"])
        values[index] = (values[index] or 0.0) + (row[column] or 0) / divisor
    return [*lines.values(), *([rest] if has_rest else [])]
