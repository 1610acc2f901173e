"""Jobs, attempts, events and snapshots of the lake as values. Times are in UTC, durations in seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from datetime import UTC, date, datetime
from typing import Any, Self

from bulltask.jobs import codec
from bulltask.jobs.errors import DecodeError

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
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

    id: str
    queue: str
    name: str | None
    state: str
    created_at: datetime | None
    started_at: datetime | None
    finished_at: datetime | None
    seen_at: datetime
    attempt_count: int | None
    stalls: int | None
    wait_time: float | None
    run_time: float | None
    total: float | None
    failed_reason: str | None
    error_fingerprint: str | None
    parent_key: str | None
    data_bytes: int | None
    source: str | None
    as_of: datetime
    incarnation: str | None

    @classmethod
    def of(cls, row: Row) -> Self:
        """Create the object from a table row."""
        seen_at = {"seen_at": row["finished_at"] or row["as_of"]}
        return cls(
            **_fields(
                cls, {**row, **seen_at}, id="job_id", started_at="first_started_at", wait_time="wait_ms",
                run_time="run_ms", total="total_ms",
            )
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRecord:
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
    wait_time: float | None
    run_time: float | None
    outcome: str
    failed_reason: str | None
    error_fingerprint: str | None
    worker: str | None
    source: str | None

    @classmethod
    def of(cls, row: Row) -> Self:
        """Create the object from a table row."""
        return cls(**_fields(cls, row, wait_time="wait_ms", run_time="run_ms"))


@dataclass(frozen=True, slots=True, kw_only=True)
class EventRecord:
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

    id: str
    at: datetime
    event: str
    name: str | None
    prev: str | None
    delay_until: datetime | None
    failed_reason: str | None
    return_value: str | None
    attempts_made: int | None
    extra: str | None

    @classmethod
    def of(cls, row: Row) -> Self:
        """Create the object from a table row."""
        return cls(**_fields(cls, row, id="event_id", at="event_at"))


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotRecord:
    """A job's hash when ``bulltask pipeline snapshot`` read it: a row of ``bronze.jobs``.

    Attributes:
        at: When it was read.
        state: Its state at that time.
        name: The task's name.
        data_text: Its data as JSON; :attr:`data` is the value.
        opts_text: Its options as JSON, under BullMQ's stored names; :attr:`opts` is the value.
        return_value_text: Its result as JSON; :attr:`return_value` is the value.
        failed_reason: Why its last failed attempt failed.
        stacktrace_text: The stack traces as a JSON list; :attr:`stacktrace` is the value.
        priority: 1 is the highest; 0 means no priority.
        delay: Its delay in seconds.
        attempts_made: The number of attempts that count toward its maximum: they completed or failed.
        attempts_started: The number of attempts that started, with any outcome.
        worker: Id of the worker that ran it last (for a Node.js worker, its name).
        parent_key: Redis key of its parent job.
    """

    at: datetime
    state: str | None
    name: str | None
    data_text: str | None
    opts_text: str | None
    return_value_text: str | None
    failed_reason: str | None
    stacktrace_text: str | None
    priority: int | None
    delay: float | None
    attempts_made: int | None
    attempts_started: int | None
    worker: str | None
    parent_key: str | None

    @classmethod
    def of(cls, row: Row) -> Self:
        """Create the object from a table row."""
        texts = {f"{name}_text": name for name in ("data", "opts", "return_value", "stacktrace")}
        return cls(**_fields(cls, row, at="snapshot_at", delay="delay_ms", **texts))

    @property
    def data(self) -> Any:
        """Its data; ``None`` if it is missing or its JSON is malformed."""
        return _value(self.data_text)

    @property
    def opts(self) -> Any:
        """Its options; ``None`` if they are missing or their JSON is malformed."""
        return _value(self.opts_text)

    @property
    def return_value(self) -> Any:
        """Its result; ``None`` if it is missing or its JSON is malformed."""
        return _value(self.return_value_text)

    @property
    def stacktrace(self) -> tuple[str, ...]:
        """The tracebacks of its failed attempts."""
        traces = _value(self.stacktrace_text)
        return tuple(trace for trace in traces if isinstance(trace, str)) if isinstance(traces, list) else ()


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


def _fields(record: type[Any], row: Row, **columns: str) -> dict[str, Any]:
    """Return a record's fields from the columns with their names, or from ``columns``.

    Times are in ``datetime.UTC`` instead of Arrow's named zone, and milliseconds become seconds.
    """
    values = {}
    for field in fields(record):
        column = columns.get(field.name, field.name)
        value = row[column]
        if isinstance(value, datetime):
            value = value.astimezone(UTC)
        values[field.name] = value / 1000 if column.endswith("_ms") and value is not None else value
    return values


def _value(text: str | None) -> Any:
    try:
        return codec.decode(text)
    except DecodeError:
        return None


def to_json(value: Any) -> Any:
    """Return a result of :class:`bulltask.lake.history.History` as JSON: times in ISO 8601, durations in seconds."""
    if isinstance(value, SnapshotRecord):
        return _snapshot(value)
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_json(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, dict):
        return {_key(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    return value.isoformat() if isinstance(value, date) else value


def _key(key: Any) -> str:
    """Return a key as text; the percentile 50.0 becomes ``50``."""
    return str(int(key)) if isinstance(key, float) and key.is_integer() else str(key)


def _snapshot(snapshot: SnapshotRecord) -> dict[str, Any]:
    """Return a snapshot with its JSON strings decoded; data that is not JSON stays text."""
    names = (field.name for field in fields(snapshot) if not field.name.endswith("_text"))
    return {
        **{name: to_json(getattr(snapshot, name)) for name in names},
        "data": snapshot.data_text if snapshot.data is None else snapshot.data,
        "opts": snapshot.opts,
        "return_value": snapshot.return_value,
        "stacktrace": list(snapshot.stacktrace),
    }
