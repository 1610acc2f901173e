"""The tables of the lake: their columns, with type, meaning and unit.

The schemas for Spark and Arrow and the tables in the documentation are generated from this module, which imports
neither Spark nor Arrow.

``bronze`` tables contain the events as they were read, ``silver`` tables the jobs and attempts derived from them, and
``gold`` tables aggregates for reports. Times are in UTC. Event times come from Redis' clock, times in a job's hash from
the clock of the client that wrote them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

from bulltask.jobs.errors import ConfigError, did_you_mean

FINISHED: Final = ("completed", "failed")
"""The states of a finished job."""

MAX_TIME_MS: Final = 253_402_300_799_999
"""The end of the year 9999, the last time that Python and Spark can represent. Event ids can be later."""


class Kind(StrEnum):
    """The type of a column, which corresponds to one type in Spark and one in Arrow."""

    TEXT = "string"
    INT = "int"
    LONG = "bigint"
    DOUBLE = "double"
    FLAG = "boolean"
    TIME = "timestamp"  # microseconds, UTC
    TEXTS = "array<string>"
    COUNTS = "map<int,bigint>"  # a histogram: bulltask.lake.log_histogram
    MONEY = "decimal(18,6)"


@dataclass(frozen=True, slots=True)
class Column:
    """A column: its name, type and meaning."""

    name: str
    kind: Kind
    doc: str


@dataclass(frozen=True, slots=True)
class Table:
    """A table.

    Attributes:
        layer: ``bronze``, ``silver`` or ``gold``.
        name: Its name in the layer.
        doc: The meaning of a row.
        key: The columns that identify a row. In silver, if several rows have the same key, the one with the latest
            ``as_of`` is current.
        columns: The columns in the files.
        partition: The text column that is stored in directory names instead: ``dt``, the day (UTC).
        configuration: Properties of the Delta table.
        row_group: Rows in a row group of a file. A look-up by id in a merged file, which is in order of the ids, reads
            few of them.
    """

    layer: str
    name: str
    doc: str
    key: tuple[str, ...]
    columns: tuple[Column, ...]
    partition: str = "dt"
    configuration: Mapping[str, str] = field(default_factory=dict, compare=False)
    row_group: int = 65_536

    @property
    def full_name(self) -> str:
        """``silver.jobs``."""
        return f"{self.layer}.{self.name}"

    @property
    def id_column(self) -> str:
        """The column with the job's id, in a table with rows of single jobs."""
        return "id" if self.full_name == "bronze.jobs" else "job_id"


def _columns(lines: str) -> tuple[Column, ...]:
    """Parse lines of ``name kind meaning``."""
    rows = (line.split(maxsplit=2) for line in lines.strip().splitlines())
    return tuple(Column(name, Kind[kind.upper()], doc) for name, kind, doc in rows)


EVENTS: Final = Table(
    "bronze",
    "events",
    "one entry of a queue's event stream; dt is the day of event_at",
    ("queue", "event_id"),
    _columns("""
        queue text the queue, without BullMQ's braces; eu:mail for mail of the broker eu
        event_id text the entry's id in its stream
        event_ms long first part of event_id: epoch milliseconds
        event_seq long second part of event_id, from 0
        event_at time event_ms as a timestamp, until the year 9999
        event text BullMQ's name for the event: added, waiting, active, completed ...
        job_id text id of the job; null for events of the whole queue, such as paused
        name text name of the task; in added
        prev text previous state of the job
        delay_until time when the job is due; in delayed
        failed_reason text why the job failed; in failed
        return_value text result as JSON; in completed
        attempts_made int attempts made; in retries-exhausted
        extra text all other fields, as JSON
    """),
)
GAPS: Final = Table(
    "bronze",
    "gaps",
    "events of one queue that were lost before they were read; dt is the day of detected_at",
    ("queue", "last_id_before", "detected_at"),
    _columns("""
        queue text the queue
        last_id_before text id of the last event before the gap
        first_id_after text id of the first event after it; null if there is none yet
        lost long number of lost events
        exact flag false if lost is a lower bound
        loss_reason text why they were lost, as explained below
        last_at_before time time of last_id_before; null at the beginning of the stream
        first_at_after time time of first_id_after
        detected_at time when the gap was detected
    """),
)
SNAPSHOTS: Final = Table(
    "bronze",
    "jobs",
    "the hash of one job when it was read; dt is the day of finished_at, or else of snapshot_at",
    ("queue", "id", "snapshot_at"),
    _columns("""
        queue text the queue
        state text state of the job
        id text id of the job
        name text name of the task
        data text data as JSON
        opts text options as JSON
        created_at time when the job was added
        delay_ms long delay in milliseconds
        priority int 1 is the highest, 0 means none
        processed_at time start of the last attempt
        finished_at time end of the last attempt
        attempts_made int attempts that completed or failed
        attempts_started int attempts that started, with any outcome
        stalled_count int number of stalls
        return_value text result as JSON
        failed_reason text why the last failed attempt failed
        stacktrace text tracebacks of failed attempts, as JSON
        parent_key text Redis key of the parent job
        worker text id of the last worker; of a Node.js worker, the name
        snapshot_at time when the job was read
    """),
)
BACKFILLS: Final = Table(
    "bronze",
    "backfills",
    "the result of one backfill for one gap; dt is the day of backfilled_at",
    ("queue", "last_id_before", "detected_at", "backfilled_at"),
    _columns("""
        queue text the queue
        last_id_before text last_id_before of the gap
        detected_at time detected_at of the gap
        backfilled_jobs long jobs that it added to silver
        backfilled_at time when the backfill ran
    """),
)
ATTEMPTS: Final = Table(
    "silver",
    "attempts",
    "one attempt of a job, or one release before its start; dt is the day of ended_at, or else of as_of",
    ("queue", "job_id", "incarnation", "attempt"),
    _columns("""
        queue text the queue
        job_id text id of the job
        incarnation text id of the added event; null if that is missing
        attempt int number of the attempt, from 1; of a release, from -1 down
        name text name of the task; null without the added event
        queued_at time when the job began to wait; null if unknown
        started_at time when a worker acquired the job; null if unknown, and for a release
        ended_at time when the attempt ended; null if unknown
        wait_ms long started_at - queued_at, milliseconds
        run_ms long ended_at - started_at, milliseconds
        outcome text completed, failed, requeued, stalled, waiting-children, released, or open (unknown)
        failed_reason text why the job failed; null for requeued attempts
        error_fingerprint text first line of failed_reason, with # for quoted text, numbers and hex numbers
        worker text as in bronze.jobs, from a snapshot
        source text events, or snapshot if a backfill added the row
        as_of time time of the row's last event
    """),
)
JOBS: Final = Table(
    "silver",
    "jobs",
    "one finished or removed job; dt is the day of finished_at, or else of as_of",
    ("queue", "job_id", "incarnation"),
    _columns("""
        queue text the queue
        job_id text id of the job
        incarnation text as in silver.attempts
        name text name of the task
        created_at time when the job was added
        first_started_at time start of the first attempt
        finished_at time when the job finished; null if it did not
        state text completed, failed, removed, or the last one of a job that timed out
        attempt_count int number of attempts with any outcome, without releases
        stalls int number of stalled attempts
        wait_ms long milliseconds of waiting, in all attempts
        run_ms long milliseconds of running, in all attempts
        total_ms long finished_at - created_at, milliseconds
        failed_reason text why the job failed
        error_fingerprint text as in silver.attempts
        parent_key text Redis key of the parent job, from a snapshot
        data_bytes int size of the job's data in bytes, from a snapshot
        source text events, or snapshot if a backfill added the row
        as_of time as in silver.attempts
    """),
)
TASK_MINUTE: Final = Table(
    "gold",
    "task_minute",
    "one task of one queue in one minute",
    ("queue", "name", "minute"),
    _columns("""
        queue text queue of the jobs
        name text name of the task; null without an added event, and in a row per minute with a gap
        minute time start of the minute
        added long jobs added
        started long attempts started
        completed long attempts that completed
        failed long attempts that failed for good
        requeued long attempts after which the job runs again
        stalled long attempts that stalled
        waiting_children long attempts that ended to wait for child jobs
        released long releases of jobs before their start
        finished long jobs that completed or failed
        removed long jobs removed before they finished
        wait_p50 long median wait in milliseconds, within 1%
        wait_p95 long 95th percentile
        wait_p99 long 99th percentile
        run_p50 long median run time of attempts that ended
        run_p95 long 95th percentile
        run_p99 long 99th percentile
        busy_ms long milliseconds that attempts ran, if their end is known
        wasted_ms long part of busy_ms in attempts that failed, stalled or were requeued
        wait_histogram_ms counts log histogram of wait times; add up those of several minutes
        run_histogram_ms counts the same for run times
        events_lost long lost events of gaps that overlap the minute, each in full
        complete flag false if a gap overlaps the minute
    """),
)
ERRORS_DAY: Final = Table(
    "gold",
    "errors_day",
    "failures of one task with one fingerprint on one day",
    ("queue", "name", "error_fingerprint"),
    _columns("""
        queue text queue of the jobs
        name text name of the task
        error_fingerprint text as in silver.attempts
        count long number of failures, without requeued attempts
        fraction double share of the task's failures, 0 to 1
        first_seen time end of the first failed attempt
        last_seen time end of the last failed attempt
        sample_failed_reason text complete reason of the last failure
        sample_job_ids texts ids of up to five jobs, latest first
    """),
)
CAPACITY_MINUTE: Final = Table(
    "gold",
    "capacity_minute",
    "one queue in one minute",
    ("queue", "minute"),
    _columns("""
        queue text the queue
        minute time start of the minute
        added long jobs added
        finished_or_removed long jobs that finished or were removed
        backlog_delta long added - finished_or_removed; wrong from the first incomplete minute on
        busy_slots double mean number of attempts running at the same time
        peak_slots long maximum number of them
        capacity long slots, as configured, or the day's highest peak_slots
        utilization double busy_slots / capacity; null without a capacity
        wait_p95 long as in gold.task_minute
        complete flag false if a gap overlaps the minute
    """),
)
SLO_DAY: Final = Table(
    "gold",
    "slo_day",
    "one objective for one task on one day",
    ("queue", "name", "metric", "threshold_ms"),
    _columns("""
        queue text queue of the jobs
        name text name of the task
        metric text wait (of first attempts), run (of attempts) or total (of finished jobs)
        threshold_ms long longest good duration, milliseconds
        target double fraction that should be good, 0 to 1
        measured long measured durations
        good long number of good ones; in total, a failed job is not good
        attainment double good / measured
        error_budget_remaining double 1 - (1 - attainment) / (1 - target); negative if overspent
        complete flag false if a gap overlaps the day
    """),
)
COST_DAY: Final = Table(
    "gold",
    "cost_day",
    "the cost of one task on one day",
    ("queue", "name"),
    _columns("""
        queue text queue of the jobs
        name text name of the task
        jobs long finished jobs
        attempts long attempts that ended
        busy_s double seconds that attempts ran
        wasted_s double the same part of busy_s
        cost money busy_s times the price of a slot per second; null without a price
        cost_per_job money cost / jobs
        complete flag false if a gap overlaps the day
    """),
)

OPEN_EVENTS: Final = Table(
    "_pipeline",
    "open_jobs",
    "one event of a job that is open after a batch, for later batches; of a job's rows, only the last batch's count",
    ("queue", "job_id", "event_ms", "event_seq", "batch"),
    _columns("""
        queue text the queue
        job_id text id of the job
        event_ms long first part of the event's id
        event_seq long second part
        event text BullMQ's name for the event; null if the job is no longer open
        name text name of the task
        prev text previous state of the job
        failed_reason text why the job failed
        batch long number of the batch that wrote the row
    """),
    partition="shard",
    # Each batch's commit has the batch's record: a quarter of a day of records.
    configuration={
        "delta.logRetentionDuration": "interval 6 hours",
        "delta.deletedFileRetentionDuration": "interval 1 hours",
    },
    row_group=8_192,
)
"""The pipeline's state. It is not among the tables of a lake (:data:`TABLES`)."""

BROKERS: Final = "_pipeline/brokers"
"""The directory with the state of the pipeline of each broker that has a name."""


def open_events_of(broker: str) -> Table:
    """Return the table with the state of a broker's pipeline; ``""`` is the broker of a lake of one."""
    return replace(OPEN_EVENTS, layer=f"{BROKERS}/{broker}") if broker else OPEN_EVENTS


def queue_prefix(broker: str) -> str:
    """Return how the names of a broker's queues begin in the tables: ``eu:``. No queue has a ``:`` in its name."""
    return f"{broker}:" if broker else ""


def check_broker(name: str, what: str = "broker") -> str:
    """Return the name of a broker, which is empty in a lake of one; others raise ``ConfigError``."""
    if not re.fullmatch(r"([a-z0-9][a-z0-9-]*)?", name):
        raise ConfigError(f"{what}: the name must consist of a-z, 0-9 and '-', such as eu-west, not {name!r:.100}")
    return name


FORGOTTEN: Final = Table(
    "_pipeline",
    "forgotten",
    "the rows of one table that bulltask pipeline forget removed; dt is the day of forgotten_at",
    ("forgotten_at", "table_name"),
    _columns("""
        forgotten_at time when they were removed
        reason text what --reason gave, such as the number of a request
        jobs long number of jobs that were selected
        table_name text name of the table
        rows long number of removed rows; in gold.errors_day, of rows whose samples were removed
        files long number of files that were rewritten
        old_files long number of files of earlier versions that were deleted
    """),
)
"""The record of what was forgotten; like the pipeline's state, it is not among the tables of a lake."""

BUILT_FIRST: Final = COST_DAY
BUILT_LAST: Final = TASK_MINUTE
"""The tables of gold whose rows a build replaces first and last; each replacement is a commit of its own."""

TABLES: Final[Mapping[str, Table]] = {
    table.full_name: table
    for table in (
        EVENTS, GAPS, SNAPSHOTS, BACKFILLS,
        ATTEMPTS, JOBS,
        TASK_MINUTE, ERRORS_DAY, CAPACITY_MINUTE, SLO_DAY, COST_DAY,
    )
}  # fmt: skip
"""All tables by full name."""


def find_tables(names: Iterable[str]) -> list[Table]:
    """Return tables by their full names, and all tables of a layer by its name; others raise ``ConfigError``."""
    tables: dict[str, Table] = {}
    for name in names:
        matching = {full: table for full, table in TABLES.items() if name in {full, table.layer}}
        if not matching:
            known = [*TABLES, *dict.fromkeys(table.layer for table in TABLES.values())]
            raise ConfigError(f"unknown table {name!r}{did_you_mean(name, known)}")
        tables |= matching
    return list(tables.values())
