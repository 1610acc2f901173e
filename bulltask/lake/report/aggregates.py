"""Aggregates for each task and queue across the whole period."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from bulltask.lake.formatting import shorten
from bulltask.lake.log_histogram import Histogram, merge_histograms, percentile
from bulltask.lake.report.data import ReportData, TaskKey

__all__ = [
    "MAX_TASKS",
    "UNKNOWN",
    "QueueAggregate",
    "TaskAggregate",
    "by_queue",
    "by_task",
    "incomplete_minutes",
    "labels",
    "top_with_others",
]

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
        waits: Histogram of the wait times.
        runs: Histogram of the run times.
    """

    keys: list[TaskKey]
    label: str
    counts: Counter[str]
    waits: Histogram = field(default_factory=dict)
    runs: Histogram = field(default_factory=dict)

    @property
    def queue(self) -> str | None:
        """The queue; ``None`` for tasks of several queues."""
        queues = {queue for queue, _ in self.keys}
        return queues.pop() if len(queues) == 1 else None

    @property
    def attempts(self) -> int:
        """The number of ended attempts."""
        return sum(self.counts[name] for name in ("completed", "failed", "requeued", "stalled", "waiting_children"))

    def wait(self, quantile: float) -> int | None:
        """Return a percentile of the wait times in milliseconds; ``quantile`` is 0 to 1."""
        return percentile(self.waits, quantile)

    def run(self, quantile: float) -> int | None:
        """Return a percentile of the run times in milliseconds; ``quantile`` is 0 to 1."""
        return percentile(self.runs, quantile)

    @property
    def failure_rate(self) -> float | None:
        """The fraction of finished jobs that failed."""
        return self.counts["failed"] / self.counts["finished"] if self.counts["finished"] else None

    @classmethod
    def combine(cls, aggregates: Sequence[TaskAggregate], label: str) -> TaskAggregate:
        """Combine several aggregates."""
        keys = [key for aggregate in aggregates for key in aggregate.keys]
        counts: Counter[str] = Counter()
        for aggregate in aggregates:
            counts.update(aggregate.counts)
        return cls(
            keys,
            label,
            counts,
            *(merge_histograms(getattr(aggregate, name) for aggregate in aggregates) for name in ("waits", "runs")),
        )


@dataclass(slots=True)
class QueueAggregate:
    """The aggregates of one queue and its workers.

    Attributes:
        queue: Its name.
        added: Jobs added.
        finished_or_removed: Jobs that finished or were removed.
        backlog: How much the queue has grown; ``None`` if events were lost, because it is unknown then.
        busy_mean: Mean number of busy slots, from the first to the last minute of the report.
        busy_peak: Maximum number of busy slots.
        utilization_mean: The mean fraction of busy slots.
        utilization_peak: The fraction of busy slots in the busiest minute.
        capacity: Number of slots: as configured, otherwise the observed peak.
        wait_p95: 95th percentile of the wait times in the worst minute, in milliseconds.
        incomplete: The number of minutes with lost events.
    """

    queue: str
    added: int
    finished_or_removed: int
    backlog: int | None
    busy_mean: float
    busy_peak: int | None
    utilization_mean: float
    utilization_peak: float | None
    capacity: int | None
    wait_p95: int | None
    incomplete: int


def by_task(data: ReportData) -> list[TaskAggregate]:
    """Return the aggregates of each task, in descending order of busy time."""
    names = data.tasks.schema.names[3:]
    sums = data.tasks.group_by(["queue", "name"]).aggregate([(name, "sum") for name in names]).to_pylist()
    counts = {(row["queue"], row["name"]): Counter({name: row[f"{name}_sum"] or 0 for name in names}) for row in sums}
    # A minute with lost events has a row without a task name, often with only zeros.
    counted = {key: count for key, count in counts.items() if key[1] is not None or any(count.values())}
    task_labels, waits, runs = labels(counted), data.waits.by_task, data.runs.by_task
    aggregates = [
        TaskAggregate([key], task_labels[key], count, waits.get(key, {}), runs.get(key, {}))
        for key, count in counted.items()
    ]
    return sorted(
        aggregates, key=lambda aggregate: (-aggregate.counts["busy_ms"], -aggregate.attempts, aggregate.label)
    )


def labels(keys: Iterable[TaskKey]) -> dict[TaskKey, str]:
    """Return labels of tasks: their names, with the queue if several queues have a task with this name."""
    keys = list(keys)
    uses = Counter(name for _, name in keys)
    return {
        (queue, name): shorten(name or UNKNOWN) + (f" ({shorten(queue)})" if uses[name] > 1 else "")
        for queue, name in keys
    }


def top_with_others(aggregates: Sequence[TaskAggregate], max_tasks: int = MAX_TASKS) -> list[TaskAggregate]:
    """Return at most ``max_tasks`` aggregates; the last combines the remaining tasks."""
    if len(aggregates) <= max_tasks:
        return list(aggregates)
    rest = aggregates[max_tasks - 1 :]
    return [*aggregates[: max_tasks - 1], TaskAggregate.combine(rest, f"{len(rest)} others")]


def by_queue(data: ReportData, minutes: int) -> list[QueueAggregate]:
    """Return the aggregates of each queue.

    Args:
        data: The period.
        minutes: The number of minutes that the report covers, for means.
    """
    names = data.queues.schema.names[2:]
    aggregations = [(name, "max" if name.endswith("_max") else "sum") for name in names]
    incomplete = incomplete_minutes(data)
    aggregates = []
    for sums in data.queues.group_by("queue").aggregate(aggregations).to_pylist():
        row: Mapping[str, Any] = {name: sums[f"{name}_{kind}"] for name, kind in aggregations}
        aggregates.append(
            QueueAggregate(
                queue=sums["queue"],
                added=row["added_sum"] or 0,
                finished_or_removed=row["finished_or_removed_sum"] or 0,
                backlog=None if incomplete.get(sums["queue"]) else row["backlog_delta_sum"] or 0,
                busy_mean=(row["busy_slots_sum"] or 0) / max(minutes, 1),
                busy_peak=row["peak_slots_max"],
                utilization_mean=(row["utilization_sum"] or 0) / max(minutes, 1),
                utilization_peak=row["utilization_max"],
                capacity=row["capacity_max"],
                wait_p95=row["wait_p95_max"],
                incomplete=len(incomplete.get(sums["queue"], ())),
            )
        )
    return sorted(aggregates, key=lambda aggregate: (-aggregate.busy_mean, aggregate.queue))


def incomplete_minutes(data: ReportData) -> dict[str, set[int]]:
    """Return the minutes of each queue that are incomplete in gold or overlap a gap."""
    begin, end = (int(moment.timestamp()) // 60 for moment in data.period.span)
    incomplete = {queue: set(minutes) for queue, minutes in data.incomplete.items()}
    for gap in data.gaps:
        last = gap.first_at_after or gap.detected_at
        first = gap.last_at_before or gap.first_at_after or last
        minutes = range(max(begin, int(first.timestamp()) // 60), min(end, int(last.timestamp()) // 60 + 1))
        incomplete.setdefault(gap.queue, set()).update(minutes)
    return incomplete
