"""A job as BullMQ stores it: what is written when it is added, what is read when it is picked up.

Field and option names on the wire are BullMQ's (PROTOCOL 2). What only bulltask knows goes into one own key of the
stored options, ``bulltask``, which Node keeps and ignores; its presence also tells a worker that the job was sent by
bulltask, which decides what is retried (``bulltask.worker.child.retry_decision``).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from bulltask.errors import DecodeError
from bulltask.jobs import codec
from bulltask.jobs.backoff import Backoff, bullmq_delay_ms, seed_delay_ms
from bulltask.jobs.codec import Json
from bulltask.jobs.failures import bounded_reason, bounded_traces
from bulltask.jobs.numbers import counter, field_number, number
from bulltask.jobs.retention import KEEP_ALL, stored_keep
from bulltask.jobs.time_limits import NO_LIMITS, TimeLimits
from bulltask.value_class import value_class

__all__ = [
    "MAX_PRIORITY",
    "OWN_KEY",
    "JobOptions",
    "JobRef",
    "NewJob",
    "ParentLink",
    "Progress",
    "RunningJob",
]

MAX_PRIORITY: Final = 2**21 - 1
"""Largest priority that every BullMQ accepts (5.62: 2^21, 6.x: one less)."""

OWN_KEY: Final = "bulltask"
_OF_ONE_JOB: Final = frozenset({"jobId", "delay", "timestamp", "parent", "de"})
Progress = Json


@value_class
class JobRef:
    """Which job: the queue as the user spells it, and the id."""

    queue: str
    id: str


@value_class(kw_only=True)
class JobOptions:
    """Options of a job; :meth:`to_wire` gives them BullMQ's names.

    Attributes:
        attempts: tries in all, the first one included.
        backoff: delay between tries; ``None`` retries at once.
        delay_ms: time before the job may run, from the moment it is sent.
        eta_ms: epoch milliseconds before which it must not run; the later one of both counts.
        priority: 0 for none (runs before every other), else 1 (first) to 2,097,151 (last).
        lifo: put it at the front of the queue.
        keep_completed_ms, keep_failed_ms: how long the finished job is kept, ``None`` for ever.
        expires_in_ms, expires_ms: time from sending, or epoch milliseconds, after which a worker fails the job
            instead of running it.
        time_limits: how long a run may take, where the sender says it.
        headers: JSON text of the sender's headers, ``""`` for none.
        more: further options under BullMQ's stored names (PROTOCOL 2.2), already checked: ``kl``, ``de``, ``fpof`` …;
            they win over the fields above.
    """

    attempts: int = 3
    backoff: Backoff | None = field(default_factory=Backoff)
    delay_ms: int = 0
    eta_ms: int | None = None
    priority: int = 0
    lifo: bool = False
    keep_completed_ms: int | None = None
    keep_failed_ms: int | None = None
    expires_in_ms: int | None = None
    expires_ms: int | None = None
    time_limits: TimeLimits = NO_LIMITS
    headers: str = ""
    more: Mapping[str, object] = field(default_factory=dict)

    def delay_at(self, now_ms: int) -> int:
        """Milliseconds from ``now_ms`` until the job may run."""
        return max(self.delay_ms, 0 if self.eta_ms is None else self.eta_ms - now_ms)

    def to_wire(self, now_ms: int) -> dict[str, object]:
        """The map that the add scripts store as the job's ``opts`` when it is sent at ``now_ms`` (server time)."""
        wire: dict[str, object] = {"attempts": self.attempts}
        if self.backoff is not None:
            wire["backoff"] = self.backoff.to_wire()
        if (delay_ms := self.delay_at(now_ms)) > 0:
            wire["delay"] = delay_ms
        if self.priority:
            wire["priority"] = self.priority
        if self.lifo:
            wire["lifo"] = True
        if self.keep_completed_ms is not None:
            wire["removeOnComplete"] = _keep_to_wire(self.keep_completed_ms)
        if self.keep_failed_ms is not None:
            wire["removeOnFail"] = _keep_to_wire(self.keep_failed_ms)
        wire[OWN_KEY] = self._own_to_wire(now_ms)
        wire.update(self.more)
        return wire

    def to_template(self, **own: object) -> dict[str, object]:
        """The map that a job scheduler keeps for its jobs, without what it says itself of each of them.

        Args:
            own: more of what only bulltask knows.
        """
        wire = {name: value for name, value in self.to_wire(0).items() if name not in _OF_ONE_JOB}
        mine: dict[str, object] = {**self._own_to_wire(0), **own}
        if self.expires_in_ms is not None:
            # Each job has its own moment to count from.
            mine["ttl"] = mine.pop("expires")
        return {**wire, OWN_KEY: mine}

    @property
    def deduplication_id(self) -> str | None:
        """The id under which the job is deduplicated."""
        said = self.more.get("de")
        return str(said["id"]) if isinstance(said, Mapping) else None

    def _own_to_wire(self, now_ms: int) -> dict[str, object]:
        own: dict[str, object] = {"v": 1}
        if self.expires_in_ms is not None:
            own["expires"] = now_ms + self.expires_in_ms
        elif self.expires_ms is not None:
            own["expires"] = self.expires_ms
        own.update(self.time_limits.to_wire())
        if self.headers:
            # A text inside the map: msgpack -> Lua -> cjson keeps only 14 digits and turns [] into {} (PROTOCOL 2.2).
            own["headers"] = self.headers
        return own


def _keep_to_wire(keep_ms: int) -> object:
    """BullMQ counts ``age`` in whole seconds; zero means that nothing is kept."""
    return {"age": max(1, keep_ms // 1000)} if keep_ms else True


@dataclass(frozen=True, slots=True)
class ParentLink:
    """Which job waits for a child, and what the child's failure means to it.

    Attributes:
        key: full key of the parent's hash.
        data: BullMQ's parent map: ``id``, ``queueKey`` and at most one of ``fpof``, ``cpof``, ``idof``, ``rdof``.
    """

    key: str
    data: Mapping[str, object]


@value_class
class NewJob:
    """A job that was not sent yet: everything checked, the data already JSON.

    Attributes:
        parent: the job that waits for this one.
        has_children: the job waits for children that are sent with it.
        timestamp_ms: creation time to store, ``None`` for the moment of sending.
        chosen: the caller gave the id, so that it is one of the options.
    """

    queue: str
    id: str
    name: str
    data: bytes
    options: JobOptions
    parent: ParentLink | None = None
    has_children: bool = False
    timestamp_ms: int | None = None
    chosen: bool = False

    @property
    def ref(self) -> JobRef:
        """The job's address."""
        return JobRef(self.queue, self.id)

    def opts(self, now_ms: int) -> dict[str, object]:
        """What is stored as ``opts`` when it is sent at ``now_ms`` (server time)."""
        wire = self.options.to_wire(now_ms)
        if self.chosen:
            # Only then, as Node does: whoever adds a copy with these options (bull-board's "Duplicate") gets an id of
            # its own. With ours, the copy would be this job again, and nothing be added.
            wire["jobId"] = self.id
        return wire


@value_class
class RunningJob:
    """A job that a worker has acquired.

    ``data`` is still text: decoding it is a step of the attempt, so that a malformed job fails like any other.

    Attributes:
        attempts_made: finished tries before this one (BullMQ's ``atm``).
        attempts_started: pick-ups, this one included (``ats``); larger than the above after a stall or a crash.
        deferred_failure: text with which the job must fail instead of running (``defa``).
        scheduler_id: the job scheduler that made it, ``""`` for none (``rjk``).
        malformed: its hash cannot be read: it fails with ``deferred_failure``, and BullMQ's own script might stop at
            it (:mod:`bulltask.transport.scripts.quarantine`).
    """

    queue: str
    id: str
    name: str
    data: bytes
    opts: Mapping[str, Any]
    timestamp_ms: int
    priority: int
    attempts_made: int
    attempts_started: int
    deferred_failure: str
    scheduler_id: str
    stacktrace: bytes | None
    malformed: bool = False

    @classmethod
    def read(cls, queue: str, job_id: str, flat: Sequence[bytes]) -> RunningJob:
        """:meth:`from_hash` for a job that is to be run or settled: one that cannot be stands in, and fails."""
        if b"name" not in flat[::2]:
            return cls.broken(queue, job_id, f"job {job_id} has no name: no client of BullMQ has added it")
        try:
            return cls.from_hash(queue, job_id, flat)
        except DecodeError as exc:
            return cls.broken(queue, job_id, str(exc))

    @classmethod
    def from_hash(cls, queue: str, job_id: str, flat: Sequence[bytes]) -> RunningJob:
        """Read the flat field list that ``moveToActive`` and fetch-next reply with.

        Raises:
            DecodeError: a field is not what BullMQ writes there; the message names job and field.
        """
        raw = dict(zip(flat[::2], flat[1::2], strict=True))
        opts = _object(raw, b"opts", job_id)
        if b"parent" in raw or b"parentKey" in raw:
            _check_parent(raw, job_id)
        return cls(
            queue=queue,
            id=job_id,
            name=codec.decode_text(raw.get(b"name")),
            data=raw.get(b"data", b"null"),
            opts=opts,
            timestamp_ms=_int(raw, b"timestamp", job_id),
            priority=_int(raw, b"priority", job_id),
            attempts_made=_int(raw, b"atm", job_id, counter),
            attempts_started=_int(raw, b"ats", job_id, counter),
            deferred_failure=codec.decode_text(raw.get(b"defa")),
            scheduler_id=codec.decode_text(raw.get(b"rjk")),
            stacktrace=raw.get(b"stacktrace"),
        )

    @classmethod
    def broken(cls, queue: str, job_id: str, problem: str) -> RunningJob:
        """Stand-in for a job whose hash cannot be read: it fails with ``problem`` instead of stalling for ever."""
        return cls(queue, job_id, "", b"null", {}, 0, 0, 0, 1, problem, "", None, malformed=True)

    @property
    def is_repeated(self) -> bool:
        """True when another job follows it by a rule: a job scheduler made it, or BullMQ before it had those."""
        return bool(self.scheduler_id) or "repeat" in self.opts

    @property
    def deduplication_id(self) -> str:
        """The id under which the job is deduplicated, ``""`` for none."""
        said = self.opts.get("de")
        return str(said.get("id", "")) if isinstance(said, dict) else ""

    @property
    def own(self) -> Mapping[str, Any]:
        """bulltask's own options; empty for a job that another client sent."""
        own = self.opts.get(OWN_KEY)
        return own if isinstance(own, dict) else {}

    @property
    def is_ours(self) -> bool:
        """True when bulltask sent the job."""
        return bool(self.own)

    @property
    def attempts(self) -> int:
        """Tries in all, as written in the job; 0 and 1 both mean a single one."""
        return _number(self.opts.get("attempts"))

    @property
    def lifo(self) -> bool:
        """True when retries go to the front of the queue."""
        return self.opts.get("lifo") is True

    @property
    def expires_ms(self) -> int | None:
        """Epoch milliseconds after which the job must not run any more."""
        if "ttl" in self.own:  # a job scheduler's job: from the moment for which it was made
            return self.timestamp_ms + _number(self.opts.get("delay")) + _number(self.own["ttl"])
        return _number(self.own["expires"]) if "expires" in self.own else None

    @property
    def time_limits(self) -> TimeLimits:
        """How long the sender lets a run take."""
        return TimeLimits.from_wire(self.own)

    @property
    def headers(self) -> dict[str, Any]:
        """The sender's headers."""
        text = self.own.get("headers")
        value = codec.decode(text, what=f"headers of job {self.id}") if isinstance(text, str) else None
        return value if isinstance(value, dict) else {}

    def backoff(self) -> Backoff | None:
        """The job's backoff, ``None`` for an immediate retry.

        Raises:
            DecodeError: it is malformed.
        """
        return Backoff.from_wire(self.opts.get("backoff"))

    def retry_delay_ms(self, made: int) -> int:
        """How long the job's own backoff waits after ``made`` failed attempts.

        Raises:
            DecodeError: the stored backoff is malformed.
        """
        backoff = self.backoff()
        if backoff is None:
            return 0
        return seed_delay_ms(backoff, made) if self.is_ours else bullmq_delay_ms(backoff, made)

    def failure_fields(self, reason: str, trace: str) -> list[str]:
        """BullMQ's fields of a failed attempt: the raw reason, and one traceback for each attempt that has one."""
        traces = bounded_traces([*self.traces(), *([trace] if trace else [])], self.trace_limit())
        safe = bounded_reason(reason).encode("utf-8", "replace").decode()
        return ["failedReason", safe, "stacktrace", json.dumps(traces, separators=(",", ":"))]

    def keep(self, option: str, otherwise: Mapping[str, int] | None = None) -> Mapping[str, int]:
        """BullMQ's ``keepJobs`` map for ``removeOnComplete`` or ``removeOnFail`` (PROTOCOL 4.7).

        Args:
            option: the stored name.
            otherwise: the worker's own option, for a job that says nothing; ``None``: it is kept.
        """
        kept = stored_keep(self.opts.get(option))
        return (otherwise or KEEP_ALL) if kept is None else kept

    def traces(self) -> list[str]:
        """The tracebacks of earlier attempts; a malformed field counts as none, so that the job can still fail."""
        try:
            found = codec.decode(self.stacktrace)
        except DecodeError:
            return []
        return [text for text in found if isinstance(text, str)] if isinstance(found, list) else []

    def trace_limit(self) -> int | None:
        """How many tracebacks are kept (``stackTraceLimit``), ``None`` for all."""
        limit = self.opts.get("stackTraceLimit")
        return limit if isinstance(limit, int) and not isinstance(limit, bool) and limit >= 0 else None


def _check_parent(raw: Mapping[bytes, bytes], job_id: str) -> None:
    parent = _object(raw, b"parent", job_id)
    # Node stores the id as it was given: a number counts as its text.
    if b"parent" in raw and not (isinstance(parent.get("id"), str | int) and isinstance(parent.get("queueKey"), str)):
        raise DecodeError(f"field parent of job {job_id} has no id and queueKey")
    # BullMQ's scripts look for the colon in a time that grows with the square of the length: Redis stands still.
    if b":" not in raw.get(b"parentKey", b":"):
        raise DecodeError(f"field parentKey of job {job_id} is not the key of a job: {raw[b'parentKey'][:40]!r}")


def _object(raw: Mapping[bytes, bytes], name: bytes, job_id: str) -> dict[str, Any]:
    found = codec.decode(raw.get(name, b"{}"), what=f"field {name.decode()} of job {job_id}")
    if not isinstance(found, dict):
        raise DecodeError(f"field {name.decode()} of job {job_id} is not a JSON object")
    return found


def _int(raw: Mapping[bytes, bytes], name: bytes, job_id: str, read: Callable[[bytes], int] = field_number) -> int:
    value = raw.get(name)
    if value is None:
        return 0
    try:
        return read(value)
    except ValueError as exc:
        raise DecodeError(f"field {name.decode()} of job {job_id} is not a number: {value[:40]!r}") from exc


def _number(value: object) -> int:
    """An option that should be a number; anything else counts as 0, as it does in BullMQ's scripts."""
    return number(value) or 0
