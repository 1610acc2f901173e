"""The sections of a report as tables: tasks, failures, capacity, objectives, cost, gaps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Any, Final

from bulltask.lake.formatting import Unit
from bulltask.lake.report.aggregates import UNKNOWN, QueueAggregate, TaskAggregate
from bulltask.lake.report.data import ReportData
from bulltask.lake.report.tables import ReportColumn, ReportTable

__all__ = [
    "Cost",
    "Failure",
    "Reason",
    "capacity",
    "cost",
    "costs",
    "errors",
    "failures",
    "gaps",
    "reasons",
    "requeues",
    "slo",
    "tasks",
]

Row = Mapping[str, Any]

_QUEUE: Final = ReportColumn("queue", "Queue", Unit.NAME)
_NAME: Final = ReportColumn("name", "Task", Unit.NAME)


@dataclass(frozen=True, slots=True)
class Failure:
    """The failures of one task with one fingerprint in the whole period.

    Attributes:
        queue: The queue.
        name: The task's name.
        error_fingerprint: The fingerprint of the failures.
        count: The number of failures.
        fraction: Their fraction of all failures of the task.
        first_seen: End of the first failed attempt.
        last_seen: End of the last failed attempt.
        sample_failed_reason: The reason for one of the failures.
        sample_job_ids: Up to five jobs, latest first.
    """

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
    """The failures of all tasks with one fingerprint.

    Attributes:
        error_fingerprint: The fingerprint of the failures.
        count: The number of failures.
        fraction: Their fraction of all failures.
        tasks: The failures by task, most frequent first.
        first_seen: End of the first failed attempt.
        last_seen: End of the last failed attempt.
    """

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
    return ReportTable(columns, [[getattr(row, column.name) for column in columns] for row in rows])


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
    return ReportTable(columns, [[getattr(row, column.name) for column in columns] for row in rows])


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
        left = _error_budget_remaining(attainment, target)
        rows.append([queue, name or UNKNOWN, metric, threshold_ms, target, measured, good, attainment, left, complete])
    return ReportTable(columns, sorted(rows, key=lambda row: (row[8] is None, row[8], row[1])))


def _error_budget_remaining(attained: float | None, target: float) -> float | None:
    return None if attained is None or target >= 1 else 1 - (1 - attained) / (1 - target)


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
    return ReportTable(columns, [[getattr(aggregate, column.name) for column in columns] for aggregate in aggregates])


def tasks(aggregates: Iterable[TaskAggregate]) -> ReportTable:
    """Return the jobs, wait and run times of tasks as a table."""
    quantiles = (0.5, 0.95, 0.99)
    columns = [
        _QUEUE,
        _NAME,
        ReportColumn("jobs", "Jobs", Unit.COUNT),
        ReportColumn("failure_rate", "Failed", Unit.FRACTION),
        *(
            ReportColumn(f"wait_p{quantile * 100:.0f}", f"Wait p{quantile * 100:.0f}", Unit.MS)
            for quantile in quantiles
        ),
        *(ReportColumn(f"run_p{quantile * 100:.0f}", f"Run p{quantile * 100:.0f}", Unit.MS) for quantile in quantiles),
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
    return ReportTable(
        columns,
        [_requeued(task) for task in aggregates if task.counts["requeued"] or task.counts["stalled"]],
    )


def _requeued(aggregate: TaskAggregate) -> list[Any]:
    requeued, stalled, attempts = aggregate.counts["requeued"], aggregate.counts["stalled"], aggregate.attempts or 1
    return [
        aggregate.queue,
        aggregate.label,
        aggregate.attempts,
        requeued,
        requeued / attempts,
        stalled,
        stalled / attempts,
        aggregate.counts["wasted_ms"],
    ]


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
    return ReportTable(columns, [[getattr(gap, column.name) for column in columns] for gap in data.gaps])


def _grouped(rows: Iterable[Row], *names: str) -> dict[tuple[Any, ...], list[Row]]:
    """Group rows by the values of some columns, in order."""
    groups: defaultdict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        groups[tuple(row[name] for name in names)].append(row)
    return dict(groups)


def _earliest(times: Iterable[datetime | None]) -> datetime | None:
    return min((time for time in times if time is not None), default=None)
