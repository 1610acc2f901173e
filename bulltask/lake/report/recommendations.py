"""Recommended concurrencies, for all queues together and for each queue."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from bulltask.lake.capacity import Recommendation, recommend
from bulltask.lake.formatting import Unit
from bulltask.lake.report.data import Row
from bulltask.lake.report.tables import ReportColumn, ReportTable

__all__ = ["CapacityTarget", "Recommendations", "expectations", "recommend_concurrency"]


@dataclass(frozen=True, slots=True)
class CapacityTarget:
    """The target for the recommended concurrency.

    Attributes:
        max_wait: How long an attempt may wait for a worker, in seconds.
        fraction: The fraction of attempts that wait no longer, 0 to 1.
        peak_factor: Safety factor on the load of the busiest minute.
    """

    max_wait: float = 2.0
    fraction: float = 0.99
    peak_factor: float = 1.2


@dataclass(frozen=True, slots=True)
class Recommendations:
    """Recommended concurrencies.

    Attributes:
        overall: The recommendation if the same workers process all queues; ``None`` if no attempt has run.
        by_queue: The recommendation for each queue if it has separate workers.
    """

    overall: Recommendation | None = None
    by_queue: Mapping[str, Recommendation] = field(default_factory=dict)


def recommend_concurrency(
    task_minutes: Iterable[Row], queue_minutes: Iterable[Row], target: CapacityTarget
) -> Recommendations:
    """Recommend a concurrency for all queues together and for each queue.

    Args:
        task_minutes: Rows of gold.task_minute.
        queue_minutes: Rows of gold.capacity_minute.
        target: The capacity target.

    Raises:
        ConfigError: The target is out of range.
    """
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
    return ReportTable(
        columns,
        [[estimate.concurrency, estimate.in_time, estimate.utilization] for estimate in recommendation.estimates],
    )
