"""A stored job as typed fields, whichever client wrote it, and the error callbacks that a canvas stores with a job.

A malformed field counts as missing, but a malformed callback raises ``InvalidJobError``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from bulltask.jobs import codec
from bulltask.jobs.clock import value_class
from bulltask.jobs.codec import int_field, json_field, mapping_field, number, text_field
from bulltask.jobs.errors import InvalidJobError, JobExpiredError
from bulltask.jobs.job import BULLTASK_KEY
from bulltask.jobs.names import REVOKED, JobState

__all__ = [
    "ETA",
    "FAILED_JOB_FIELD",
    "OF_CHORD",
    "Errback",
    "FailedJob",
    "Finished",
    "JobSnapshot",
    "StoredCall",
    "StoredJob",
    "StoredSnapshot",
    "read_errbacks",
    "stored_errbacks",
]

_EXPIRED: Final = f"{JobExpiredError.__module__}.{JobExpiredError.__qualname__}"
_NOT_STARTED: Final = (JobState.WAITING, JobState.PRIORITIZED, JobState.DELAYED)


@value_class(kw_only=True)
class StoredJob:
    """Every field of a job's hash in BullMQ 5.62.

    Times are epoch milliseconds, ``None`` if not set yet. Those that bulltask writes are the server's; Node.js writes
    its machine's.

    Attributes:
        queue: The queue's name in the app.
        data: The decoded data; ``None`` if malformed: see ``data_text``.
        opts: The stored options under BullMQ's stored names.
        delay_ms: The job's delay, 0 once it has been promoted.
        attempts_made: Attempts that count toward the maximum (``atm``).
        attempts_started: Started attempts (``ats``).
        stalled_count: How many times the job has stalled (``stc``).
        processed_by: Id of the worker that last acquired it, or the name of a Node.js worker (``pb``).
        deferred_failure: If set, the job fails with this reason when a worker acquires it (``defa``).
        parent: The stored parent map, with its failure flags.
        parent_key: Full Redis key of the parent's hash.
        deduplication_id: The deduplication id (``deid``).
        scheduler_id: Id of the job scheduler that added it (``rjk``).
        next_iteration_id: Id of the scheduler's next iteration (``nrjid``).
    """

    queue: str
    id: str
    name: str
    data_text: str
    data: Any
    opts: Mapping[str, Any]
    timestamp_ms: int
    delay_ms: int
    priority: int
    attempts_made: int
    attempts_started: int
    stalled_count: int
    processed_ms: int | None
    finished_ms: int | None
    processed_by: str | None
    progress: Any
    returnvalue: Any
    failed_reason: str | None
    stacktrace: tuple[str, ...]
    deferred_failure: str | None
    parent: Mapping[str, Any] | None
    parent_key: str | None
    deduplication_id: str | None
    scheduler_id: str | None
    next_iteration_id: str | None

    @classmethod
    def from_hash(cls, queue: str, job_id: str, flat: Sequence[bytes]) -> StoredJob:
        """Read a flat list of fields (``HGETALL``). Malformed fields count as missing, so that any job can be shown."""
        raw = dict(zip(flat[::2], flat[1::2], strict=True))
        return cls(
            queue=queue,
            id=job_id,
            name=codec.decode_text(raw.get(b"name")),
            data_text=codec.decode_text(raw.get(b"data")),
            data=json_field(raw, b"data"),
            opts=mapping_field(raw, b"opts") or {},
            timestamp_ms=int_field(raw, b"timestamp") or 0,
            delay_ms=int_field(raw, b"delay") or 0,
            priority=int_field(raw, b"priority") or 0,
            attempts_made=int_field(raw, b"atm") or 0,
            attempts_started=int_field(raw, b"ats") or 0,
            stalled_count=int_field(raw, b"stc") or 0,
            processed_ms=int_field(raw, b"processedOn"),
            finished_ms=int_field(raw, b"finishedOn"),
            processed_by=text_field(raw, b"pb"),
            progress=json_field(raw, b"progress"),
            returnvalue=json_field(raw, b"returnvalue"),
            failed_reason=text_field(raw, b"failedReason"),
            stacktrace=_texts(raw, b"stacktrace"),
            deferred_failure=text_field(raw, b"defa"),
            parent=mapping_field(raw, b"parent"),
            parent_key=text_field(raw, b"parentKey"),
            deduplication_id=text_field(raw, b"deid"),
            scheduler_id=text_field(raw, b"rjk"),
            next_iteration_id=text_field(raw, b"nrjid"),
        )


@value_class(frozen=True)
class Finished:
    """A job's outcome: the return value as JSON text, or the failure reason."""

    completed: bool
    text: str


@value_class
class StoredCall:
    """A job's name and arguments, and when it finished.

    Attributes:
        data: The arguments as they are stored, which may be an envelope.
        finished_ms: Epoch milliseconds, ``None`` before.
    """

    name: str
    data: bytes
    finished_ms: int | None

    @classmethod
    def from_fields(cls, name: bytes | None, data: bytes | None, finished: bytes | None) -> StoredCall | None:
        """Read the fields ``name``, ``data`` and ``finishedOn``; ``None`` if there is no such job."""
        if name is None:
            return None
        finished_ms = None if finished is None else int_field({b"finishedOn": finished}, b"finishedOn")
        return cls(codec.decode_text(name), data or b"null", finished_ms)


@value_class(frozen=True)
class JobSnapshot:
    """A job's state and outcome at one moment; ``state`` is ``UNKNOWN`` if the job does not exist.

    Attributes:
        returnvalue: The return value of a completed job, as from ``get()``.
        failed_reason: Why its last attempt failed, ``""`` if none has.
    """

    state: JobState
    returnvalue: Any
    failed_reason: str
    stacktrace: tuple[str, ...]
    progress: codec.Json
    attempts_made: int

    @property
    def waits_for_retry(self) -> bool:
        """Whether an attempt has failed, and the next one has not started."""
        return bool(self.failed_reason and self.attempts_made) and self.state in _NOT_STARTED

    @property
    def has_expired(self) -> bool:
        """Whether the job has failed because it had expired."""
        return bool(self.stacktrace) and self.stacktrace[-1].rstrip().endswith(f"{_EXPIRED}: {self.failed_reason}")

    @property
    def reported(self) -> tuple[str, Any] | None:
        """State and meta of the last ``update_state``, ``None`` if the task has reported something else, or nothing."""
        progress = self.progress
        if isinstance(progress, dict) and progress.keys() == {"state", "meta"} and isinstance(progress["state"], str):
            return progress["state"], progress["meta"]
        return None

    @property
    def celery_state(self) -> str:
        """The state under Celery's name; while the job is active, what its task has reported with ``update_state``."""
        if self.state is JobState.FAILED:
            return "REVOKED" if self.failed_reason == REVOKED or self.has_expired else "FAILURE"
        if self.state is JobState.ACTIVE:
            return "STARTED" if self.reported is None else self.reported[0]
        if self.state is JobState.COMPLETED:
            return "SUCCESS"
        return "RETRY" if self.waits_for_retry else "PENDING"


@value_class(frozen=True)
class StoredSnapshot(JobSnapshot):
    """A snapshot as it is stored: the return value is JSON text.

    Attributes:
        error: The stored form of the exception, ``""`` if only its message is stored.
    """

    returnvalue: str | None
    error: str = ""

    def with_value(self, value: object) -> JobSnapshot:
        """Return the snapshot that users see, with this return value."""
        return JobSnapshot(self.state, value, self.failed_reason, self.stacktrace, self.progress, self.attempts_made)


def _texts(raw: Mapping[bytes, bytes], name: bytes) -> tuple[str, ...]:
    value = json_field(raw, name)
    return tuple(text for text in value if isinstance(text, str)) if isinstance(value, list) else ()


FAILED_JOB_FIELD: Final = "bulltask:failedJob"
"""The field of a job's hash with the :class:`FailedJob` whose failure caused it to fail; BullMQ ignores it."""

OF_CHORD: Final = "chord"
"""The mark of an error callback of a chord, which is stored with the chord's body."""

ETA: Final = "eta"
"""The option of a stored error callback, among bulltask's, with the epoch milliseconds before which it may not run."""


@value_class
class FailedJob:
    """The job in a canvas that failed first, which caused the others to fail."""

    id: str
    task: str
    queue: str

    def to_dict(self) -> dict[str, str]:
        """Return it as an argument of an error callback."""
        return {"id": self.id, "task": self.task, "queue": self.queue}

    @classmethod
    def from_json(cls, text: str) -> FailedJob | None:
        """Read what :meth:`to_dict` returned; ``None`` if it is malformed."""
        try:
            stored = json.loads(text)
            return cls(str(stored["id"]), str(stored["task"]), str(stored["queue"]))
        except (ValueError, TypeError, LookupError):
            return None


@value_class
class Errback:
    """A call without the arguments that describe the failure.

    Attributes:
        queue: The qualified name of its queue, ``bull:{mail}``.
        task: Its task's name.
        data: The other arguments.
        opts: The options of its job, as they are stored.
        parameters: The parameters that receive the failed job's reference, the error message and the traceback; or the
            one that receives the failed job's id; or none. Their names are empty if the arguments are positional.
        cascades: Whether it is also called if a job before this one failed. If it is :data:`OF_CHORD`, it then
            describes this job, the chord's body, as in Celery, and not the member that failed.
    """

    queue: str
    task: str
    data: Any
    opts: Mapping[str, Any]
    parameters: tuple[str, ...]
    cascades: bool | str

    def data_of(self, own: Any, failed: FailedJob, reason: str, trace: str) -> Any:
        """Return the data of its job: the failure before ``own``, which is :attr:`data`, or was in its envelope."""
        every: list[Any] = [failed.to_dict(), reason, trace]
        values = [failed.id] if len(self.parameters) == 1 else every[: len(self.parameters)]
        if isinstance(own, list):
            return [*values, *own]
        data = dict(own)
        for name, value in reversed(list(zip(self.parameters, values, strict=True))):
            data[name] = [value, *data[name]] if isinstance(data.get(name), list) else value
        return data

    def opts_of(self, failed: FailedJob, root_id: str | None, now_ms: int) -> dict[str, Any]:
        """Return the options of its job, which descends from the failed one, and from that job's first ancestor.

        ``now_ms`` is the server's time, from which the delay counts.
        """
        own, origin = self.opts.get(BULLTASK_KEY), {"parent": failed.id, "root": root_id or failed.id}
        options = {**(own if isinstance(own, Mapping) else {}), "origin": origin}
        if len(self.parameters) > 1:  # the parameter that receives the reference, to which the worker adds attributes
            options["canvas"] = {"request": self.parameters[0]}
        delay_ms = max(number(self.opts.get("delay")) or 0, (number(options.pop(ETA, None)) or 0) - now_ms)
        delay = {"delay": delay_ms} if delay_ms > 0 else {}
        return {**self.opts, **delay, BULLTASK_KEY: options}


def stored_errbacks(errbacks: Sequence[Errback]) -> str:
    """Return error callbacks as they are stored: JSON text, because msgpack and Lua lose an empty list."""
    fields = [[it.queue, it.task, it.data, it.opts, it.parameters, it.cascades] for it in errbacks]
    return json.dumps(fields, separators=(",", ":"))


def read_errbacks(text: object) -> list[Errback]:
    """Read what :func:`stored_errbacks` returned."""
    try:
        return [
            Errback(queue, task, data, opts, tuple(parameters), cascades)
            for queue, task, data, opts, parameters, cascades in json.loads(str(text))
        ]
    except (ValueError, TypeError):
        raise InvalidJobError(f"the job's error callbacks are malformed: {text!r:.200}") from None
