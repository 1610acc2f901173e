"""Recommended numbers of workers, for all queues together and for each queue."""

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
    """The target for the recommended workers.

    Attributes:
        within: how many seconds an attempt may wait.
        share: share of attempts that wait no longer, 0 to 1.
        peak_factor: safety factor on the load of the busiest minute.
    """

    within: float = 2.0
    share: float = 0.99
    peak_factor: float = 1.2


@dataclass(frozen=True, slots=True)
class Recommendations:
    """Recommended numbers of workers.

    Attributes:
        overall: if the same workers serve all queues; ``None`` if nothing has run.
        by_queue: if each queue has its own workers.
    """

    overall: Recommendation | None = None
    by_queue: Mapping[str, Recommendation] = field(default_factory=dict)


def recommend_workers(
    task_minutes: Iterable[Row], queue_minutes: Iterable[Row], target: CapacityTarget
) -> Recommendations:
    """Recommend numbers of workers.

    Args:
        task_minutes: rows of gold.task_minute.
        queue_minutes: rows of gold.capacity_minute.
        target: the capacity target.

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
    """Return a table of the effect of the recommended number of workers, and of slightly more and fewer."""
    columns = [
        ReportColumn("workers", "Workers", Unit.COUNT),
        ReportColumn("share", "In time", Unit.PART),
        ReportColumn("utilisation", "Busy", Unit.PART),
    ]
    return ReportTable(columns, [[one.workers, one.share, one.utilisation] for one in found.choices])
