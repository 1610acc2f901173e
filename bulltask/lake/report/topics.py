"""The tables of a report: tasks, failures, capacity, objectives, cost, gaps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Any, Final

from bulltask.lake.report.data import Data
from bulltask.lake.report.grids import Column, Grid
from bulltask.lake.report.tallies import UNKNOWN, QueueTally, TaskTally
from bulltask.lake.report.wording import Unit

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
    "retries",
    "slo",
    "tasks",
]

Row = Mapping[str, Any]

_QUEUE: Final = Column("queue", "Queue", Unit.NAME)
_NAME: Final = Column("name", "Task", Unit.NAME)


@dataclass(frozen=True, slots=True)
class Failure:
    """One kind of failure of one task in the whole period.

    Attributes:
        queue: of its jobs.
        name: of the task.
        error_key: what the failures have in common.
        count: how many.
        share: part of all failures of the task.
        first_seen: end of the first.
        last_seen: end of the last.
        sample_reason: the reason of one of them.
        sample_job_ids: up to five jobs, the latest first.
    """

    queue: str
    name: str
    error_key: str
    count: int
    share: float
    first_seen: datetime | None
    last_seen: datetime | None
    sample_reason: str
    sample_job_ids: Sequence[str]


@dataclass(frozen=True, slots=True)
class Reason:
    """Why jobs failed, whatever their task.

    Attributes:
        error_key: what the failures have in common.
        count: how many.
        share: part of all failures.
        tasks: those that failed so, the most frequent first.
        first_seen: end of the first.
        last_seen: end of the last.
    """

    error_key: str
    count: int
    share: float
    tasks: Sequence[Failure]
    first_seen: datetime | None
    last_seen: datetime | None


@dataclass(frozen=True, slots=True)
class Cost:
    """What one task, or several, cost in the whole period; see gold.cost_day."""

    queue: str | None
    name: str
    jobs: int
    attempts: int
    busy_s: float
    wasted_s: float
    cost: Decimal | None

    @property
    def per_job(self) -> Decimal | None:
        """Cost of a job that is done; None without jobs or without a price."""
        return round(self.cost / self.jobs, 9) if self.jobs and self.cost is not None else None

    @property
    def wasted(self) -> float | None:
        """Part of the busy time that ended in a retry, a stall or a failure."""
        return self.wasted_s / self.busy_s if self.busy_s else None

    @classmethod
    def together(cls, parts: Sequence[Cost], name: str) -> Cost:
        """Return several as one."""
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


def failures(data: Data) -> list[Failure]:
    """Return why jobs failed; the most frequent first."""
    found = _grouped(data.errors, "queue", "name", "error_key")
    totals: defaultdict[tuple[Any, ...], int] = defaultdict(int)
    for (queue, name, _), days in found.items():
        totals[queue, name] += sum(day["count"] for day in days)
    made = []
    for (queue, name, key), days in found.items():
        count, latest = sum(day["count"] for day in days), max(days, key=lambda day: str(day["last_seen"]))
        ids = [one for day in reversed(days) for one in day["sample_job_ids"] or ()]
        made.append(
            Failure(
                queue,
                name or UNKNOWN,
                key or "(no reason)",
                count,
                count / totals[queue, name] if totals[queue, name] else 0.0,
                _least(day["first_seen"] for day in days),
                latest["last_seen"],
                latest["sample_reason"] or "",
                ids[:5],
            )
        )
    return sorted(made, key=lambda one: (-one.count, one.name, one.error_key))


def reasons(found: Sequence[Failure]) -> list[Reason]:
    """Return the failures of all tasks by reason; the most frequent first."""
    by_key: defaultdict[str, list[Failure]] = defaultdict(list)
    for one in found:
        by_key[one.error_key].append(one)
    whole = sum(one.count for one in found) or 1
    made = []
    for key, tasks in by_key.items():
        count = sum(one.count for one in tasks)
        last = max((one.last_seen for one in tasks if one.last_seen is not None), default=None)
        first = _least(one.first_seen for one in tasks)
        made.append(Reason(key, count, count / whole, sorted(tasks, key=lambda one: -one.count), first, last))
    return sorted(made, key=lambda one: (-one.count, one.error_key))


def costs(data: Data) -> list[Cost]:
    """Return what each task cost; the dearest first."""
    made = [
        Cost.together([_cost(day) for day in days], name or UNKNOWN)
        for (_, name), days in _grouped(data.costs, "queue", "name").items()
    ]
    return sorted(made, key=lambda one: (-(one.cost or 0), -one.busy_s, one.name))


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


def errors(found: Iterable[Failure]) -> Grid:
    """Failures as a table."""
    columns = [
        _QUEUE,
        _NAME,
        Column("error_key", "Reason", Unit.TEXT),
        Column("count", "Failures", Unit.COUNT),
        Column("share", "Of the task's", Unit.PART),
        Column("first_seen", "First", Unit.TIME),
        Column("last_seen", "Last", Unit.TIME),
        Column("sample_reason", "Example", Unit.TEXT),
        Column("sample_job_ids", "Jobs", Unit.TEXTS),
    ]
    return Grid(columns, [[getattr(one, column.name) for column in columns] for one in found])


def cost(found: Iterable[Cost]) -> Grid:
    """Costs as a table."""
    columns = [
        _QUEUE,
        _NAME,
        Column("jobs", "Jobs", Unit.COUNT),
        Column("attempts", "Attempts", Unit.COUNT),
        Column("busy_s", "Busy", Unit.SECONDS),
        Column("wasted_s", "Wasted", Unit.SECONDS),
        Column("wasted", "Wasted part", Unit.PART),
        Column("cost", "Cost", Unit.MONEY),
        Column("per_job", "A job", Unit.MONEY),
    ]
    return Grid(columns, [[getattr(one, column.name) for column in columns] for one in found])


def slo(data: Data) -> Grid:
    """Objectives, the one with the least budget left first; several days are judged as one."""
    columns = [
        _QUEUE,
        _NAME,
        Column("metric", "Of", Unit.TEXT),
        Column("objective_ms", "Within", Unit.MS),
        Column("target", "Target", Unit.PART),
        Column("total", "Measured", Unit.COUNT),
        Column("good", "Good", Unit.COUNT),
        Column("attainment", "Attained", Unit.PART),
        Column("budget_left", "Budget left", Unit.PART),
        Column("complete", "Complete", Unit.FLAG),
    ]
    rows: list[Sequence[Any]] = []
    for key, days in _grouped(data.slos, "queue", "name", "metric", "objective_ms", "target").items():
        total, good = sum(day["total"] for day in days), sum(day["good"] for day in days)
        attained = good / total if total else None
        whole = all(day["complete"] for day in days)
        queue, name, metric, objective_ms, target = key
        left = _budget_left(attained, target)
        rows.append([queue, name or UNKNOWN, metric, objective_ms, target, total, good, attained, left, whole])
    return Grid(columns, sorted(rows, key=lambda row: (row[8] is None, row[8], row[1])))


def _budget_left(attained: float | None, target: float) -> float | None:
    return None if attained is None or target >= 1 else 1 - (1 - attained) / (1 - target)


def capacity(tallies: Iterable[QueueTally]) -> Grid:
    """Load of the queues."""
    columns = [
        _QUEUE,
        Column("arrivals", "Added", Unit.COUNT),
        Column("departures", "Done", Unit.COUNT),
        Column("backlog", "Backlog", Unit.COUNT),
        Column("busy_mean", "Busy, mean", Unit.NUMBER),
        Column("busy_peak", "Busy, peak", Unit.COUNT),
        Column("utilisation_mean", "Used, mean", Unit.PART),
        Column("utilisation_peak", "Used, peak", Unit.PART),
        Column("capacity", "Capacity", Unit.COUNT),
        Column("wait_p95", "Wait p95, worst minute", Unit.MS),
        Column("incomplete", "Incomplete minutes", Unit.COUNT),
    ]
    return Grid(columns, [[getattr(one, column.name) for column in columns] for one in tallies])


def tasks(tallies: Iterable[TaskTally]) -> Grid:
    """Jobs, waits and runs of tasks."""
    parts = (0.5, 0.95, 0.99)
    columns = [
        _QUEUE,
        _NAME,
        Column("jobs", "Jobs", Unit.COUNT),
        Column("failure_rate", "Failed", Unit.PART),
        *(Column(f"wait_p{part * 100:.0f}", f"Wait p{part * 100:.0f}", Unit.MS) for part in parts),
        *(Column(f"run_p{part * 100:.0f}", f"Run p{part * 100:.0f}", Unit.MS) for part in parts),
    ]
    rows = [
        [
            one.queue,
            one.label,
            one.counts["done"],
            one.failure_rate,
            *(one.wait(part) for part in parts),
            *(one.run(part) for part in parts),
        ]
        for one in tallies
    ]
    return Grid(columns, rows)


def retries(tallies: Iterable[TaskTally]) -> Grid:
    """Attempts that were made again or stalled."""
    columns = [
        _QUEUE,
        _NAME,
        Column("attempts", "Attempts", Unit.COUNT),
        Column("retried", "Retried", Unit.COUNT),
        Column("retried_part", "Retried part", Unit.PART),
        Column("stalled", "Stalled", Unit.COUNT),
        Column("stalled_part", "Stalled part", Unit.PART),
        Column("wasted_ms", "Time wasted", Unit.MS),
    ]
    return Grid(columns, [_retried(one) for one in tallies if one.counts["retried"] or one.counts["stalled"]])


def _retried(one: TaskTally) -> list[Any]:
    retried, stalled, all_of_them = one.counts["retried"], one.counts["stalled"], one.attempts or 1
    return [
        one.queue,
        one.label,
        one.attempts,
        retried,
        retried / all_of_them,
        stalled,
        stalled / all_of_them,
        one.counts["wasted_ms"],
    ]


def gaps(data: Data) -> Grid:
    """What was lost."""
    columns = [
        _QUEUE,
        Column("lost", "Events lost", Unit.COUNT),
        Column("exact", "Count", Unit.TEXT),
        Column("reason", "Why", Unit.TEXT),
        Column("after_at", "From", Unit.TIME),
        Column("first_at", "To", Unit.TIME),
        Column("detected_at", "Found", Unit.TIME),
        Column("repaired_rows", "Jobs repaired", Unit.COUNT),
    ]
    words = {True: "exact", False: "at least"}
    rows = [
        [words[gap.exact] if column.name == "exact" else getattr(gap, column.name) for column in columns]
        for gap in data.gaps
    ]
    return Grid(columns, rows)


def _grouped(rows: Iterable[Row], *names: str) -> dict[tuple[Any, ...], list[Row]]:
    """Rows with the same values in some columns, in order."""
    found: defaultdict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        found[tuple(row[name] for name in names)].append(row)
    return dict(found)


def _least(times: Iterable[datetime | None]) -> datetime | None:
    return min((time for time in times if time is not None), default=None)
