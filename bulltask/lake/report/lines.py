"""What happened when: the lines of a report's charts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

from bulltask.lake.report.data import Axis, Data
from bulltask.lake.report.tallies import QueueTally, TaskTally
from bulltask.lake.size_classes import merged, percentile

__all__ = ["LINES", "Line", "backlog", "busy", "percentiles", "rates"]

LINES: Final = 7
"""So many lines a reader can tell apart; the last one may stand for all others."""


@dataclass(slots=True)
class Line:
    """One line: a value, or none, for each point of the axis.

    Attributes:
        label: what it is of.
        values: from left to right.
        others: whether it stands for all that have no line of their own.
    """

    label: str
    values: list[float | None]
    others: bool = False


def rates(data: Data, axis: Axis, names: Sequence[str]) -> list[Line]:
    """Return how many a minute there were of what some columns of gold.task_minute count."""
    lines = [Line(name, [0.0] * axis.points) for name in names]
    for row in data.tasks.group_by("at").aggregate([(name, "sum") for name in names]).to_pylist():
        for line in lines:
            line.values[axis.place(row["at"])] = (row[f"{line.label}_sum"] or 0) / axis.step
    return lines


def percentiles(counts: Any, axis: Axis, tallies: Sequence[TaskTally], share: float) -> list[Line]:
    """Return a percentile over time for each of some tasks, of which the last may stand for several.

    Args:
        counts: ``waits`` or ``runs`` of the data.
        axis: the time.
        tallies: the tasks.
        share: 0.95 for the 95th percentile.
    """
    owners = {key: place for place, tally in enumerate(tallies) for key in tally.keys}
    found: defaultdict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    columns = (counts[name].to_pylist() for name in ("queue", "name", "at", "size_class", "count"))
    for queue, name, at, size_class, count in zip(*columns, strict=True):
        if (place := owners.get((queue, name))) is not None:
            found[place, axis.place(at)].append((size_class, count))
    return [
        Line(
            tally.label,
            [percentile(merged([found.get((place, point))]), share) for point in range(axis.points)],
            others=len(tally.keys) > 1,
        )
        for place, tally in enumerate(tallies)
    ]


def busy(data: Data, axis: Axis, tallies: Sequence[QueueTally]) -> list[Line]:
    """Return how many attempts of each queue ran at a time."""
    return _by_queue(data, axis, tallies, "busy_workers_sum", axis.step)


def backlog(data: Data, axis: Axis, tallies: Sequence[QueueTally]) -> list[Line]:
    """Return by how much each queue has grown since the axis begins."""
    lines = _by_queue(data, axis, tallies, "backlog_delta_sum", 1)
    return [Line(line.label, list(accumulate(value or 0 for value in line.values)), line.others) for line in lines]


def _by_queue(data: Data, axis: Axis, tallies: Sequence[QueueTally], column: str, divisor: int) -> list[Line]:
    many = len(tallies) > LINES
    shown = [tally.queue for tally in tallies[: LINES - 1 if many else LINES]]
    lines = {queue: Line(queue, [0.0] * axis.points) for queue in shown}
    rest = Line(f"{len(tallies) - len(shown)} others", [0.0] * axis.points, others=True)
    for row in data.queues.select(["queue", "at", column]).to_pylist():
        values, place = lines.get(row["queue"], rest).values, axis.place(row["at"])
        values[place] = (values[place] or 0.0) + (row[column] or 0) / divisor
    return [*lines.values(), *([rest] if many else [])]
