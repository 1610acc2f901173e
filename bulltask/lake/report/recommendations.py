"""How many workers the report advises: for all queues together, and for each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from bulltask.lake.capacity import Recommendation, recommend
from bulltask.lake.formatting import Unit
from bulltask.lake.report.data import Row
from bulltask.lake.report.tables import ReportColumn, ReportTable

__all__ = ["CapacityTarget", "Recommendations", "expectations", "recommend_workers"]


@dataclass(frozen=True, slots=True)
class CapacityTarget:
    """What the workers should be able to do.

    Attributes:
        within: seconds that a job may wait.
        share: part of the attempts that may not wait longer.
        peak_factor: by how much more may come than in the busiest minute.
    """

    within: float = 2.0
    share: float = 0.99
    peak_factor: float = 1.2


@dataclass(frozen=True, slots=True)
class Recommendations:
    """Recommended numbers of workers.

    Attributes:
        overall: when the same workers serve all queues; None where nothing has run.
        by_queue: when each queue has its own.
    """

    overall: Recommendation | None = None
    by_queue: Mapping[str, Recommendation] = field(default_factory=dict)


def recommend_workers(
    task_minutes: Iterable[Row], queue_minutes: Iterable[Row], target: CapacityTarget
) -> Recommendations:
    """Say how many workers are needed.

    Args:
        task_minutes: rows of gold.task_minute.
        queue_minutes: rows of gold.capacity_minute.
        target: how long jobs may wait.

    Raises:
        ConfigError: the target is out of range.
    """
    tasks, queues = _by_queue(task_minutes), _by_queue(queue_minutes)
    whole = _recommended([row for rows in tasks.values() for row in rows], queues, target)
    if len(tasks) == 1:
        return Recommendations(whole, {queue: whole for queue in tasks if whole})
    each = {queue: _recommended(rows, {queue: queues.get(queue, [])}, target) for queue, rows in tasks.items()}
    return Recommendations(whole, {queue: found for queue, found in each.items() if found})


def _recommended(rows: list[Row], queues: Mapping[str, list[Row]], target: CapacityTarget) -> Recommendation | None:
    seen = [row for minutes in queues.values() for row in minutes]
    return recommend(rows, seen, within=target.within, share=target.share, peak_factor=target.peak_factor)


def _by_queue(rows: Iterable[Row]) -> dict[str, list[Row]]:
    found: defaultdict[str, list[Row]] = defaultdict(list)
    for row in rows:
        found[row["queue"]].append(row)
    return dict(found)


def expectations(found: Recommendation) -> ReportTable:
    """What to expect of the recommended number of workers and of those around it."""
    columns = [
        ReportColumn("workers", "Workers", Unit.COUNT),
        ReportColumn("share", "In time", Unit.PART),
        ReportColumn("utilisation", "Busy", Unit.PART),
    ]
    return ReportTable(columns, [[one.workers, one.share, one.utilisation] for one in found.choices])
