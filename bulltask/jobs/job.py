"""A job in BullMQ's format, as a sender writes it and as a worker reads it.

Field and option names in Redis are BullMQ's. bulltask stores its additional options in the option ``bulltask``, which
Node ignores. It also tells workers that bulltask sent the job, because such jobs have another retry policy.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from bulltask.errors import DecodeError
from bulltask.jobs import codec
from bulltask.jobs.backoff import Backoff, bullmq_delay_ms, bulltask_delay_ms
from bulltask.jobs.checkpoint import CHECKPOINT_FIELD
from bulltask.jobs.child_results import REPLACEMENT_FIELD
from bulltask.jobs.codec import Json
from bulltask.jobs.failures import truncate_reason, truncate_traces
from bulltask.jobs.hash_fields import check_parent, read_int
from bulltask.jobs.numbers import counter, number
from bulltask.jobs.retention import KEEP_ALL, keep_to_wire
from bulltask.jobs.stored_options import BULLTASK_KEY, StoredOptions, read_options
from bulltask.jobs.time_limits import NO_LIMITS, TimeLimits
from bulltask.value_class import value_class

__all__ = [
    "INCOMPATIBLE_FIELD",
    "MAX_PRIORITY",
    "RELEASES_FIELD",
    "JobOptions",
    "JobRef",
    "NewJob",
    "ParentLink",
    "Progress",
    "RunningJob",
]

MAX_PRIORITY: Final = 2**21 - 1
"""Largest priority that every version of BullMQ accepts (5.62: 2^21, 6.x: one less)."""

RELEASES_FIELD: Final = "bulltask:releases"
"""The field of a job's hash with :attr:`RunningJob.releases`; BullMQ ignores it."""

INCOMPATIBLE_FIELD: Final = "bulltask:incompatible"
"""The field of a job's hash with the time since when no worker could run it; BullMQ ignores it."""

_REPLACEMENT: Final = REPLACEMENT_FIELD.encode()
_CHECKPOINT: Final = CHECKPOINT_FIELD.encode()
_RELEASES: Final = RELEASES_FIELD.encode()
_IF_ANY: Final = ("retries", "sender", "origin", "canvas")
_OF_ONE_JOB: Final = frozenset({"jobId", "delay", "timestamp", "parent", "de"})
Progress = Json


@value_class
class JobRef:
    """Address of a job: its queue's name in the app, and its id."""

    queue: str
    id: str


@value_class(kw_only=True)
class JobOptions:
    """Options of a job; :meth:`to_wire` translates them to BullMQ's names.

    Attributes:
        attempts: Maximum number of attempts, including the first.
        backoff: Delay between attempts; ``None`` retries immediately.
        delay_ms: Delay before the job may run, counted from when it is sent.
        eta_ms: Epoch milliseconds before which the job may not run. If both ``delay_ms`` and ``eta_ms`` are set, the
            later time applies.
        priority: 0 for none (runs before all others), else 1 (first) to 2,097,151 (last).
        lifo: Add the job to the front of the queue.
        keep_completed_ms, keep_failed_ms: Retention of the finished job, ``None`` for no limit.
        expires_in_ms, expires_ms: Time since the job was sent, or epoch milliseconds, after which a worker fails the
            job instead of running it.
        time_limits: Limits of one attempt, if the sender sets any.
        headers: The sender's headers as JSON, ``""`` for none.
        ignore_result: Whether the return value is not stored; ``None``: the task's option applies.
        max_explicit_retries: How many retries the task may request; ``None``: as many as ``attempts`` permits.
        retries: Retries before this job, if it continues a job of another queue.
        sender: The app and the host that send the job, ``shop@web-1``; ``""`` if no app does.
        origin: The ids of the job whose task sent this one, and of its first ancestor; empty for most jobs.
        canvas: The job's place in a canvas, in its stored form; empty for most jobs.
        more: Further options under BullMQ's stored names, already checked: ``kl``, ``de``, ``fpof`` …; they override
            the fields above.
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
    ignore_result: bool | None = None
    max_explicit_retries: int | None = None
    retries: int = 0
    sender: str = ""
    origin: Mapping[str, str] = field(default_factory=dict)
    canvas: Mapping[str, object] = field(default_factory=dict)
    more: Mapping[str, object] = field(default_factory=dict)

    def delay_at(self, now_ms: int) -> int:
        """Return the milliseconds from ``now_ms`` until the job may run."""
        return max(self.delay_ms, 0 if self.eta_ms is None else self.eta_ms - now_ms)

    @property
    def has_times(self) -> bool:
        """Whether :meth:`to_wire` depends on the time at which the job is sent."""
        return self.eta_ms is not None or self.expires_in_ms is not None

    def to_wire(self, now_ms: int) -> dict[str, object]:
        """Return the ``opts`` that BullMQ stores for a job sent at ``now_ms`` (server time)."""
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
            wire["removeOnComplete"] = keep_to_wire(self.keep_completed_ms)
        if self.keep_failed_ms is not None:
            wire["removeOnFail"] = keep_to_wire(self.keep_failed_ms)
        wire[BULLTASK_KEY] = self._bulltask_options(now_ms)
        wire.update(self.more)
        return wire

    def to_template(self, **bulltask_options: object) -> dict[str, object]:
        """Return the ``opts`` that a job scheduler stores for its jobs, without those that differ from job to job.

        Args:
            bulltask_options: Further options that only bulltask reads.
        """
        wire = {name: value for name, value in self.to_wire(0).items() if name not in _OF_ONE_JOB}
        options: dict[str, object] = {**self._bulltask_options(0), **bulltask_options}
        options.pop("sender", None)  # workers on several hosts store the same scheduler
        if self.expires_in_ms is not None:
            # The duration counts from each job's scheduled time.
            options["ttl"] = options.pop("expires")
        return {**wire, BULLTASK_KEY: options}

    @property
    def deduplication_id(self) -> str | None:
        """The job's deduplication id."""
        stored = self.more.get("de")
        return str(stored["id"]) if isinstance(stored, Mapping) else None

    def _bulltask_options(self, now_ms: int) -> dict[str, object]:
        options: dict[str, object] = {"v": 1}
        if self.expires_in_ms is not None:
            options["expires"] = now_ms + self.expires_in_ms
        elif self.expires_ms is not None:
            options["expires"] = self.expires_ms
        options.update(self.time_limits.to_wire())
        if self.headers:
            # A string, because msgpack -> Lua -> cjson keeps only 14 digits of a number and turns [] into {}.
            options["headers"] = self.headers
        if self.ignore_result is not None:
            options["ignore_result"] = self.ignore_result
        if self.max_explicit_retries is not None:
            options["max_explicit_retries"] = self.max_explicit_retries
        options.update((name, value) for name in _IF_ANY if (value := getattr(self, name)))
        return options


@dataclass(frozen=True, slots=True)
class ParentLink:
    """A child's link to its parent, and the effect of the child's failure on the parent.

    Attributes:
        key: Full Redis key of the parent's hash.
        data: BullMQ's parent map: ``id``, ``queueKey`` and at most one of ``fpof``, ``cpof``, ``idof``, ``rdof``.
    """

    key: str
    data: Mapping[str, object]


@value_class
class NewJob:
    """A job to be sent: its options have been checked, and its data is JSON.

    Attributes:
        parent: The parent job.
        has_children: The job is sent together with children, for which it waits.
        timestamp_ms: Creation time to store, ``None`` for the time when the job is sent.
        has_custom_id: The caller set the id, so it is stored among the options.
    """

    queue: str
    id: str
    name: str
    data: bytes
    options: JobOptions
    parent: ParentLink | None = None
    has_children: bool = False
    timestamp_ms: int | None = None
    has_custom_id: bool = False

    @property
    def ref(self) -> JobRef:
        """The job's reference (queue and id)."""
        return JobRef(self.queue, self.id)

    def opts(self, now_ms: int) -> dict[str, object]:
        """Return the ``opts`` to store if the job is sent at ``now_ms`` (server time)."""
        wire = self.options.to_wire(now_ms)
        if self.has_custom_id:
            # A generated id is not stored, as in Node. Otherwise, a copy of the job with these options (bull-board's
            # "Duplicate") would have the same id, and would not be added.
            wire["jobId"] = self.id
        return wire


@value_class
class RunningJob:
    """A job that a worker has acquired.

    ``data`` is decoded during the attempt, so that malformed data fails the job like any other error.

    Attributes:
        attempts_made: Earlier attempts that count toward the maximum: BullMQ's ``atm``, and those in another queue from
            which ``self.retry(queue=…)`` has moved the job.
        attempts_started: Started attempts including this attempt (``ats``, and those in another queue); larger than
            ``attempts_made`` + 1 after a stall or a crash.
        deferred_failure: If set, the job must fail with this reason instead of running (``defa``).
        scheduler_id: The job scheduler that added it, ``""`` for none (``rjk``).
        malformed: The job's hash cannot be read. It fails with ``deferred_failure``; BullMQ's script may not be able
            to process it (:func:`bulltask.transport.scripts.move.fail_malformed`).
        replacement: The stored :class:`bulltask.jobs.child_results.Replacement`, ``""`` for none.
        parent_key: Full Redis key of the parent's hash, ``""`` for none.
        checkpoint: The stored :class:`bulltask.jobs.checkpoint.Checkpoint`, ``""`` for none.
        releases: How many attempts in a row have ended with a release without progress (``max_releases``).
        processed_on_ms: When this attempt was acquired.
    """

    queue: str
    id: str
    name: str
    data: bytes
    opts: StoredOptions
    timestamp_ms: int
    priority: int
    attempts_made: int
    attempts_started: int
    deferred_failure: str
    scheduler_id: str
    stacktrace: bytes | None
    malformed: bool = False
    replacement: str = ""
    parent_key: str = ""
    checkpoint: str = ""
    processed_on_ms: int = 0
    releases: int = 0

    @classmethod
    def read(cls, queue: str, job_id: str, flat: Sequence[bytes]) -> RunningJob:
        """Like :meth:`from_hash`, but return a :meth:`placeholder` for a job that cannot be read."""
        raw = _fields(flat)
        if b"name" not in raw:
            return cls.placeholder(queue, job_id, f"job {job_id} has no name: it was not added by a BullMQ client")
        try:
            return cls._from_fields(queue, job_id, raw)
        except DecodeError as exc:
            return cls.placeholder(queue, job_id, str(exc))

    @classmethod
    def from_hash(cls, queue: str, job_id: str, flat: Sequence[bytes]) -> RunningJob:
        """Read the flat list of fields that ``moveToActive`` and ``moveToFinished`` return.

        Raises:
            DecodeError: A field has an unexpected value; the message names the job and the field.
        """
        return cls._from_fields(queue, job_id, _fields(flat))

    @classmethod
    def _from_fields(cls, queue: str, job_id: str, raw: Mapping[bytes, bytes]) -> RunningJob:
        opts = read_options(raw.get(b"opts", b"{}"), job_id)
        if b"parent" in raw or b"parentKey" in raw:
            check_parent(raw, job_id)
        return cls(
            queue=queue,
            id=job_id,
            name=codec.decode_text(raw.get(b"name")),
            data=raw.get(b"data", b"null"),
            opts=opts,
            timestamp_ms=read_int(raw, b"timestamp", job_id),
            priority=read_int(raw, b"priority", job_id),
            attempts_made=read_int(raw, b"atm", job_id, counter) + opts.retries_before,
            attempts_started=read_int(raw, b"ats", job_id, counter) + opts.retries_before,
            stacktrace=raw.get(b"stacktrace"),
            # Few jobs have these.
            deferred_failure=codec.decode_text(raw[b"defa"]) if b"defa" in raw else "",
            scheduler_id=codec.decode_text(raw[b"rjk"]) if b"rjk" in raw else "",
            replacement=codec.decode_text(raw[_REPLACEMENT]) if _REPLACEMENT in raw else "",
            parent_key=codec.decode_text(raw[b"parentKey"]) if b"parentKey" in raw else "",
            checkpoint=codec.decode_text(raw[_CHECKPOINT]) if _CHECKPOINT in raw else "",
            releases=read_int(raw, _RELEASES, job_id, counter) if _RELEASES in raw else 0,
            processed_on_ms=read_int(raw, b"processedOn", job_id),
        )

    @classmethod
    def placeholder(cls, queue: str, job_id: str, problem: str) -> RunningJob:
        """Return a placeholder for a malformed job, so that it fails with ``problem`` instead of stalling."""
        return cls(queue, job_id, "", b"null", StoredOptions(), 0, 0, 0, 1, problem, "", None, malformed=True)

    @property
    def is_repeated(self) -> bool:
        """True if a job scheduler, or a repeatable job of older BullMQ versions, added the job."""
        return bool(self.scheduler_id) or "repeat" in self.opts

    @property
    def deduplication_id(self) -> str:
        """The job's deduplication id, ``""`` for none."""
        return self.opts.deduplication_id

    @property
    def sent_by_bulltask(self) -> bool:
        """True if bulltask sent the job."""
        return bool(self.opts.bulltask)

    @property
    def attempts(self) -> int:
        """Maximum number of attempts as stored; 0 and 1 both mean a single attempt."""
        return self.opts.attempts

    @property
    def lifo(self) -> bool:
        """True if retries go to the front of the queue."""
        return self.opts.get("lifo") is True

    @property
    def expires_ms(self) -> int | None:
        """Epoch milliseconds after which the job must not run."""
        own = self.opts.bulltask
        if "ttl" in own:  # added by a job scheduler: counted from the scheduled time
            return self.timestamp_ms + _number(self.opts.get("delay")) + _number(own["ttl"])
        return _number(own["expires"]) if "expires" in own else None

    @property
    def canvas(self) -> Mapping[str, Any]:
        """The job's place in a canvas, empty for most jobs."""
        return self.opts.canvas

    @property
    def headers(self) -> dict[str, Any]:
        """The sender's headers."""
        text = self.opts.bulltask.get("headers")
        value = codec.decode(text, what=f"headers of job {self.id}") if isinstance(text, str) else None
        return value if isinstance(value, dict) else {}

    def backoff(self) -> Backoff | None:
        """The job's backoff, ``None`` for an immediate retry.

        Raises:
            DecodeError: It is malformed.
        """
        return Backoff.from_wire(self.opts.get("backoff"))

    def retry_delay_ms(self, attempts_made: int) -> int:
        """Return the delay that the job's backoff prescribes after ``attempts_made`` failed attempts.

        Raises:
            DecodeError: The stored backoff is malformed.
        """
        backoff = self.backoff()
        if backoff is None:
            return 0
        return (
            bulltask_delay_ms(backoff, attempts_made)
            if self.sent_by_bulltask
            else bullmq_delay_ms(backoff, attempts_made)
        )

    def failure_fields(self, reason: str, trace: str) -> list[str]:
        """Return BullMQ's fields for a failed attempt: the truncated reason, and the attempts' tracebacks."""
        traces = truncate_traces([*self.traces(), *([trace] if trace else [])], self.trace_limit())
        safe = truncate_reason(reason).encode("utf-8", "replace").decode()
        return ["failedReason", safe, "stacktrace", json.dumps(traces, separators=(",", ":"))]

    def keep(self, option: str, otherwise: Mapping[str, int] | None = None) -> Mapping[str, int]:
        """Return BullMQ's ``keepJobs`` map for ``removeOnComplete`` or ``removeOnFail``.

        Args:
            option: The stored name.
            otherwise: The worker's option, for jobs without the option; ``None`` keeps the job.
        """
        kept = self.opts.keep[option]
        return (otherwise or KEEP_ALL) if kept is None else kept

    def traces(self) -> list[str]:
        """Return the tracebacks of earlier attempts; malformed tracebacks are dropped."""
        try:
            traces = codec.decode(self.stacktrace)
        except DecodeError:
            return []
        return [text for text in traces if isinstance(text, str)] if isinstance(traces, list) else []

    def trace_limit(self) -> int | None:
        """Return the maximum number of tracebacks (``stackTraceLimit``), ``None`` for no limit."""
        limit = self.opts.get("stackTraceLimit")
        return limit if isinstance(limit, int) and not isinstance(limit, bool) and limit >= 0 else None


def _fields(flat: Sequence[bytes]) -> dict[bytes, bytes]:
    parts = iter(flat)
    return dict(zip(parts, parts, strict=True))


def _number(value: object) -> int:
    """Return a numeric option; any other value counts as 0, as in BullMQ's scripts."""
    return number(value) or 0
