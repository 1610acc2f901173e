"""Jobs, attempts, events and snapshots of the lake as values. Times are in UTC, durations in seconds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any, Self

from bulltask.jobs import codec
from bulltask.jobs.errors import DecodeError

Row = Mapping[str, Any]


def _value(row: Row, column: str) -> Any:
    """Return a column's value: times in ``datetime.UTC`` instead of Arrow's named zone, milliseconds as seconds."""
    value = row[column]
    if isinstance(value, datetime):
        return value.astimezone(UTC)
    return value / 1000 if column.endswith("_ms") and value is not None else value


def _decoded(column: str) -> Callable[[Row], Any]:
    """Return a function that decodes a column's JSON."""

    def decode(row: Row) -> Any:
        try:
            return codec.decode(row[column])
        except DecodeError:
            return row[column]

    return decode


def _stacktrace(row: Row) -> tuple[str, ...]:
    traces = _decoded("stacktrace")(row)
    return tuple(trace for trace in traces if isinstance(trace, str)) if isinstance(traces, list) else ()


@dataclass(frozen=True, slots=True)
class _Record:
    """A row. ``column`` in a field's metadata is the column that has another name, or a function of the row."""

    @classmethod
    def of(cls, row: Row) -> Self:
        """Create the object from a table row."""
        columns = ((field.name, field.metadata.get("column", field.name)) for field in fields(cls))
        return cls(**{name: column(row) if callable(column) else _value(row, column) for name, column in columns})


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord(_Record):
    """One incarnation of a job: a row of ``silver.jobs``. An id that is used again has several.

    Attributes:
        id: The job's id.
        queue: The queue, without BullMQ's braces.
        name: The task's name; ``None`` if the added event is missing.
        state: ``completed``, ``failed``, ``removed`` (before it finished), or the last state of an open job
            that timed out.
        created_at: When it was added; ``None`` if unknown.
        started_at: When a worker first acquired it; ``None`` if unknown.
        finished_at: When it finished; ``None`` if it was removed or timed out.
        seen_at: When it finished; for jobs that have not finished, their last event. Searches use this time.
        attempt_count: The number of attempts with any outcome; can be greater than BullMQ's ``attempts_made``.
        stalls: The number of stalled attempts.
        wait_time: Seconds that it waited for a worker, in all attempts.
        run_time: Seconds that it ran, in all attempts.
        total: Seconds from ``created_at`` to ``finished_at``.
        failed_reason: Why the job failed; ``None`` if it did not.
        error_fingerprint: The first line of ``failed_reason`` with ``#`` for quoted text, numbers and hex numbers.
        parent_key: Redis key of its parent job, from a snapshot.
        data_bytes: Size of its data, from a snapshot.
        source: ``events`` or ``snapshot``.
        as_of: The time of the last event that the row contains.
        incarnation: Id of the added event, which identifies the incarnation.
    """

    id: str = field(metadata={"column": "job_id"})
    queue: str
    name: str | None
    state: str
    created_at: datetime | None
    started_at: datetime | None = field(metadata={"column": "first_started_at"})
    finished_at: datetime | None
    seen_at: datetime = field(metadata={"column": lambda row: _value(row, "finished_at") or _value(row, "as_of")})
    attempt_count: int | None
    stalls: int | None
    wait_time: float | None = field(metadata={"column": "wait_ms"})
    run_time: float | None = field(metadata={"column": "run_ms"})
    total: float | None = field(metadata={"column": "total_ms"})
    failed_reason: str | None
    error_fingerprint: str | None
    parent_key: str | None
    data_bytes: int | None
    source: str | None
    as_of: datetime
    incarnation: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRecord(_Record):
    """One attempt of a job, or a release before its start: a row of ``silver.attempts``.

    Attributes:
        attempt: Its number, from 1; that of a release is negative, from -1.
        incarnation: The incarnation of the job; see :class:`JobRecord`.
        queued_at: When it began to wait; ``None`` if unknown.
        started_at: When a worker acquired it; ``None`` if unknown, and for a release.
        ended_at: When it ended; ``None`` if unknown.
        wait_time: Seconds that it waited.
        run_time: Seconds that it ran.
        outcome: ``completed``, ``failed`` (and so did the job), ``requeued`` (the job runs again: the attempt failed,
            was released after its start or rescheduled, or its child crashed), ``stalled``, ``waiting-children``,
            ``released`` (before its start), or ``open`` if the outcome is unknown.
        failed_reason: Why the job failed; events do not contain failure reasons for requeued attempts.
        error_fingerprint: As in :class:`JobRecord`.
        worker: The worker id (for a Node.js worker, its name), from a snapshot.
        source: ``events`` or ``snapshot``.
    """

    attempt: int
    incarnation: str | None
    queued_at: datetime | None
    started_at: datetime | None
    ended_at: datetime | None
    wait_time: float | None = field(metadata={"column": "wait_ms"})
    run_time: float | None = field(metadata={"column": "run_ms"})
    outcome: str
    failed_reason: str | None
    error_fingerprint: str | None
    worker: str | None
    source: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EventRecord(_Record):
    """One event of a job in its queue's stream: a row of ``bronze.events``.

    Attributes:
        id: The id of the stream entry.
        at: Its time, by Redis' clock.
        event: ``added``, ``active``, ``completed`` … as BullMQ writes it.
        name: The task's name; only ``added`` has it.
        prev: The previous state of the job.
        delay_until: When a ``delayed`` job is due.
        failed_reason: Why the job failed; only ``failed`` has it.
        return_value: The result of ``completed`` as JSON.
        attempts_made: The number of attempts that count toward the job's maximum; only in ``retries-exhausted``.
        extra: All other fields as a JSON object.
    """

    id: str = field(metadata={"column": "event_id"})
    at: datetime = field(metadata={"column": "event_at"})
    event: str
    name: str | None
    prev: str | None
    delay_until: datetime | None
    failed_reason: str | None
    return_value: str | None
    attempts_made: int | None
    extra: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotRecord(_Record):
    """A job's hash when ``bulltask pipeline snapshot`` read it: a row of ``bronze.jobs``.

    Attributes:
        at: When it was read.
        state: Its state at that time.
        name: The task's name.
        data: Its data. Malformed JSON is text, also in the options and the result.
        opts: Its options, under BullMQ's stored names.
        return_value: Its result; ``None`` if it has none.
        failed_reason: Why its last failed attempt failed.
        stacktrace: The tracebacks of its failed attempts.
        priority: 1 is the highest; 0 means no priority.
        delay: Its delay in seconds.
        attempts_made: The number of attempts that count toward its maximum: they completed or failed.
        attempts_started: The number of attempts that started, with any outcome.
        worker: Id of the worker that ran it last (for a Node.js worker, its name).
        parent_key: Redis key of its parent job.
    """

    at: datetime = field(metadata={"column": "snapshot_at"})
    state: str | None
    name: str | None
    data: Any = field(metadata={"column": _decoded("data")})
    opts: Any = field(metadata={"column": _decoded("opts")})
    return_value: Any = field(metadata={"column": _decoded("return_value")})
    failed_reason: str | None
    stacktrace: tuple[str, ...] = field(metadata={"column": _stacktrace})
    priority: int | None
    delay: float | None = field(metadata={"column": "delay_ms"})
    attempts_made: int | None
    attempts_started: int | None
    worker: str | None
    parent_key: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobHistory:
    """The history of a job id in the lake.

    Attributes:
        id: The job's id.
        queue: The queue, without BullMQ's braces.
        incarnations: The jobs with this id that finished, were removed or timed out, newest first; several if the
            id was used again.
        attempts: The attempts of all of them, in order.
        events: The events of all of them, in order.
        snapshot: The newest snapshot; ``None`` if there is none.
    """

    id: str
    queue: str
    incarnations: tuple[JobRecord, ...]
    attempts: tuple[AttemptRecord, ...]
    events: tuple[EventRecord, ...]
    snapshot: SnapshotRecord | None

    @property
    def job(self) -> JobRecord | None:
        """The newest job with this id; ``None`` until it has finished."""
        return self.incarnations[0] if self.incarnations else None


@dataclass(frozen=True, slots=True)
class JobPage:
    """A page of the jobs that a search has found.

    Attributes:
        jobs: The jobs, newest first.
        cursor: The cursor of the next page; ``None`` on the last page.
    """

    jobs: tuple[JobRecord, ...]
    cursor: str | None


def to_json(value: Any) -> Any:
    """Return a result of :class:`bulltask.lake.history.History` as JSON: times in ISO 8601, durations in seconds."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_json(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, dict):
        return {_key(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    return value.isoformat() if isinstance(value, date) else str(value) if isinstance(value, Decimal) else value


def _key(key: Any) -> str:
    """Return a key as text; the percentile 50.0 becomes ``50``."""
    return str(int(key)) if isinstance(key, float) and key.is_integer() else str(key)
