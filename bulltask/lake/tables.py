"""The tables of the lake: their columns, what each one means, and in which unit.

This is the one place that says so. Spark's and Arrow's types are made from it, the documentation's tables are compared
with it, and what the lake's readers need not know (a JVM, Redis) is not imported here.

``bronze`` is what was read, ``silver`` what it says of jobs and attempts, ``gold`` what people ask. Times are UTC. A
time of an event is Redis' clock; one of a job's hash is the clock of the client that wrote it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

__all__ = [
    "ATTEMPTS",
    "CAPACITY_MINUTE",
    "COST_DAY",
    "ERRORS_DAY",
    "EVENTS",
    "GAPS",
    "JOBS",
    "REPAIRS",
    "SLO_DAY",
    "SNAPSHOTS",
    "TABLES",
    "TASK_MINUTE",
    "Column",
    "Kind",
    "Table",
]


class Kind(StrEnum):
    """What a column holds; each has one type in Spark and one in Arrow."""

    TEXT = "string"
    INT = "int"
    LONG = "bigint"
    DOUBLE = "double"
    FLAG = "boolean"
    TIME = "timestamp"  # microseconds, UTC
    TEXTS = "array<string>"
    COUNTS = "map<int,bigint>"  # how many there are of each size class: bulltask.lake.log_histogram
    MONEY = "decimal(18,6)"


@dataclass(frozen=True, slots=True)
class Column:
    """One column: its name, its kind, what it means."""

    name: str
    kind: Kind
    doc: str


@dataclass(frozen=True, slots=True)
class Table:
    """One table.

    Attributes:
        layer: ``bronze``, ``silver`` or ``gold``.
        name: in its layer.
        doc: one row of it.
        partitions: the columns that are not in the files but in the names of their directories, outermost first.
            They hold texts, and are not among ``columns``.
        key: the columns of which no two rows have the same. In silver, the row with the latest ``as_of`` counts.
        columns: all others.
    """

    layer: str
    name: str
    doc: str
    partitions: tuple[str, ...]
    key: tuple[str, ...]
    columns: tuple[Column, ...]

    @property
    def full_name(self) -> str:
        """``silver.jobs``."""
        return f"{self.layer}.{self.name}"


def _columns(kinds: Mapping[str, Kind], lines: str) -> tuple[Column, ...]:
    """Read a table of ``name kind meaning``, a line each."""
    rows = (line.split(maxsplit=2) for line in lines.strip().splitlines())
    return tuple(Column(name, kinds[kind], doc) for name, kind, doc in rows)


_KINDS: Final = {kind.name.lower(): kind for kind in Kind}
_BY_BATCH: Final = ("dt", "queue", "ingest_id")
_BY_DAY: Final = ("dt",)

EVENTS: Final = Table(
    "bronze",
    "events",
    "one entry of a queue's event stream; dt is the day of event_at",
    _BY_BATCH,
    ("queue", "event_id"),
    _columns(
        _KINDS,
        """
        event_id text the entry's id in its stream
        event_ms long first part of event_id: milliseconds since 1970 by Redis' clock
        event_seq long second part of event_id: numbers the entries of a millisecond
        event_at time event_ms as a time; the end of the year 9999 where it is later
        event text added, waiting, active, completed, failed, delayed, stalled, ... as BullMQ writes it
        job_id text the job it is about; none for drained, paused, resumed, cleaned
        name text name of the task; only added has it
        prev text the state that the job left
        delay_until time of delayed: when the job is due
        failed_reason text of failed: the reason as it was written
        return_value text of completed: the result as JSON
        attempts_made int of retries-exhausted: how many attempts there were
        extra text all other fields as a JSON object
        """,
    ),
)
GAPS: Final = Table(
    "bronze",
    "gaps",
    "events of one queue that were gone before they were read; dt is the day of detected_at",
    _BY_BATCH,
    ("queue", "after_id", "detected_at"),
    _columns(
        _KINDS,
        """
        after_id text id of the last event before the gap
        first_id text id of the first event behind it; none when there is none yet
        lost long how many events are lost
        exact flag whether lost is the count, or the least that it can be
        reason text trimmed, at-read, gone, recreated or rolled-back
        after_at time time of after_id; none when the gap begins with the stream
        first_at time time of first_id
        detected_at time when the batch that found it was written
        """,
    ),
)
SNAPSHOTS: Final = Table(
    "bronze",
    "jobs",
    "one job as its hash was when it was read; dt is the day of finished_at, else of snapshot_at",
    _BY_BATCH,
    ("queue", "id", "snapshot_at"),
    _columns(
        _KINDS,
        """
        state text the state in which it was found
        id text of the job
        name text of its task
        data text its data as JSON
        opts text its options as JSON
        created_at time when it was made, by the clock of its sender
        delay_ms long milliseconds it waits before it is due
        priority int 0 is none, 1 the highest
        processed_at time start of the last attempt, by the worker's clock
        finished_at time end of the last attempt, by the worker's clock
        attempts_made int attempts that ended by themselves
        attempts_started int attempts that began
        stalled_count int how often it stalled
        return_value text its result as JSON
        failed_reason text the last reason
        stacktrace text a JSON list of texts, one for each attempt that failed
        parent_key text Redis key of its parent job
        worker text name of the worker that ran it last, where that has one
        snapshot_at time when it was read
        """,
    ),
)
REPAIRS: Final = Table(
    "bronze",
    "repairs",
    "what one backfill found of the jobs that a gap hides; dt is the day of repaired_at",
    _BY_BATCH,
    ("queue", "after_id", "detected_at", "repaired_at"),
    _columns(
        _KINDS,
        """
        after_id text names the gap, with queue and detected_at
        detected_at time that of the gap; each life of a stream may have a gap behind 0-0
        repaired_rows long jobs of which silver knows the end from their hash now
        repaired_at time when
        """,
    ),
)
ATTEMPTS: Final = Table(
    "silver",
    "attempts",
    "one attempt of a job; dt is the day of ended_at, else of as_of",
    _BY_BATCH,
    ("queue", "job_id", "life", "attempt"),
    _columns(
        _KINDS,
        """
        job_id text of the job
        life text id of the event that added the job, as a job id can be used again; none when that was not seen
        attempt int from 1
        name text of the task; none when the event that added the job was not seen
        queued_at time since when it waited; none when that was not seen, as for the next two
        started_at time when a worker took it
        ended_at time when it ended
        wait_ms long started_at - queued_at, milliseconds
        run_ms long ended_at - started_at, milliseconds
        outcome text completed, failed, retry, stalled, waiting-children, or open: no end was seen
        reason text why it failed for good; events do not have the reason of an attempt that is made again
        error_key text first line of reason with # for quotes, numbers and hex
        worker text name of the worker, where a snapshot knows it
        source text events or snapshot
        as_of time what the row knows ends here; of rows with one key the latest counts
        """,
    ),
)
JOBS: Final = Table(
    "silver",
    "jobs",
    "one life of a job that is done; dt is the day of finished_at, else of as_of",
    _BY_BATCH,
    ("queue", "job_id", "life"),
    _columns(
        _KINDS,
        """
        job_id text of the job
        life text as in silver.attempts
        name text of the task
        created_at time when it was added
        first_started_at time when a worker took it first
        finished_at time when it was done; none for one that was removed before, or given up as open
        state text completed, failed, removed, or the last that was seen of one that is older than max_open
        attempts int how many there were; jobs given back to the queue count as well
        stalls int how many of them stalled
        wait_ms long milliseconds it waited for a worker, in all attempts
        run_ms long milliseconds it ran, in all attempts
        total_ms long finished_at - created_at, milliseconds
        final_reason text why it failed
        error_key text as in silver.attempts
        parent_key text Redis key of its parent job, where a snapshot knows it
        data_bytes int size of its data, where a snapshot knows it
        source text events or snapshot
        as_of time as in silver.attempts
        """,
    ),
)
TASK_MINUTE: Final = Table(
    "gold",
    "task_minute",
    "one task of one queue in one minute",
    _BY_DAY,
    ("queue", "name", "minute"),
    _columns(
        _KINDS,
        """
        queue text of the jobs
        name text of the task; none for jobs whose beginning was lost, and in each minute that a gap touches
        minute time its first moment
        enqueued long jobs added in it
        started long attempts begun in it
        completed long attempts that ended in it, completed
        failed long attempts that ended in it, failed for good
        retried long attempts that ended in it and are made again
        stalled long attempts that ended in it as stalled
        parked long attempts that ended in it because the job waits for its children
        done long jobs completed or failed for good in it
        removed long jobs removed in it before they were done
        wait_p50 long half of the attempts begun in it had waited up to so many milliseconds, within 1 %
        wait_p95 long the same of 95 in 100
        wait_p99 long the same of 99 in 100
        run_p50 long half of the attempts ended in it had run up to so many milliseconds, within 1 %
        run_p95 long the same of 95 in 100
        run_p99 long the same of 99 in 100
        busy_ms long milliseconds in it, added up, that attempts ran; one whose end was not seen counts none
        wasted_ms long the part of busy_ms of attempts that ended in a retry, a stall or a failure
        wait_counts counts how many waits there were of each size class; those of minutes add up to those of hours
        run_counts counts the same of the runs
        events_lost long lost events of the queue, of gaps that touch it; a gap counts whole in each minute it touches
        complete flag no gap of the queue touches it
        """,
    ),
)
ERRORS_DAY: Final = Table(
    "gold",
    "errors_day",
    "one kind of failure of one task in one day",
    _BY_DAY,
    ("queue", "name", "error_key"),
    _columns(
        _KINDS,
        """
        queue text of the jobs
        name text of the task
        error_key text what the failures have in common
        count long attempts that failed for good so; events do not tell the reasons of attempts that are made again
        share double part of all failures of the task in that day, 0 to 1
        first_seen time end of the first of them
        last_seen time end of the last
        sample_reason text the reason of the last, whole
        sample_job_ids texts up to five jobs, the latest first
        """,
    ),
)
CAPACITY_MINUTE: Final = Table(
    "gold",
    "capacity_minute",
    "one queue in one minute",
    _BY_DAY,
    ("queue", "minute"),
    _columns(
        _KINDS,
        """
        queue text its name
        minute time its first moment
        arrivals long jobs added in it
        departures long jobs done in it, or removed before
        backlog_delta long arrivals - departures; not meaningful from the first incomplete minute on
        busy_workers double attempts that ran at a time, on average
        peak_workers long the most attempts that ran at one moment
        capacity long attempts that can run at a time: as given, else the most that ran at one moment of the day
        utilisation double busy_workers / capacity; none without a capacity
        wait_p95 long 95 in 100 of the attempts begun in it had waited up to so many milliseconds, within 1 %
        complete flag no gap of the queue touches it
        """,
    ),
)
SLO_DAY: Final = Table(
    "gold",
    "slo_day",
    "one objective for one task in one day",
    _BY_DAY,
    ("queue", "name", "metric", "objective_ms"),
    _columns(
        _KINDS,
        """
        queue text of the jobs
        name text of the task
        metric text wait (of first attempts begun in it), run (of attempts ended in it) or total (of jobs done in it)
        objective_ms long milliseconds that are still good
        target double part that is to be good, 0 to 1
        total long how many were measured
        good long how many were good; for total, a failed job is not
        attainment double good / total
        budget_left double part of the error budget that is left: 1 - (1 - attainment) / (1 - target); overdrawn below 0
        complete flag no gap of the queue touches the day
        """,
    ),
)
COST_DAY: Final = Table(
    "gold",
    "cost_day",
    "what one task cost in one day",
    _BY_DAY,
    ("queue", "name"),
    _columns(
        _KINDS,
        """
        queue text of the jobs
        name text of the task
        jobs long jobs done
        attempts long attempts that ended
        busy_s double seconds of the day, added up, that attempts ran
        wasted_s double the part of it of attempts that ended in a retry, a stall or a failure
        cost money busy_s times the price of a worker's second; none where no price is given, as the next
        cost_per_job money cost / jobs; none without jobs
        complete flag no gap of the queue touches the day
        """,
    ),
)

TABLES: Final[Mapping[str, Table]] = {
    table.full_name: table
    for table in (
        EVENTS, GAPS, SNAPSHOTS, REPAIRS,
        ATTEMPTS, JOBS,
        TASK_MINUTE, ERRORS_DAY, CAPACITY_MINUTE, SLO_DAY, COST_DAY,
    )
}  # fmt: skip
"""All tables by full name."""
