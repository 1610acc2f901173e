"""A job in BullMQ's format: as a sender writes it (:class:`NewJob`), and as a worker reads it (:class:`RunningJob`).

Field and option names in Redis are BullMQ's. bulltask stores its additional options in the option ``bulltask``, which
Node ignores; it also tells workers that bulltask sent the job, because such jobs have another retry policy. Durations
are seconds or ``timedelta`` for users; BullMQ stores milliseconds, and whole seconds for ages.

A job that is too large raises ``PayloadTooLargeError``, an invalid option raises ``ConfigError``, and a malformed field
raises ``DecodeError``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property, lru_cache, partial
from typing import Any, Final, Protocol

from bulltask.jobs import codec
from bulltask.jobs.backoff import Backoff, bullmq_delay_ms, bulltask_delay_ms, check_strategy, warn_about_long_delay
from bulltask.jobs.clock import Duration, to_epoch_ms, to_ms, value_class
from bulltask.jobs.codec import MAX_SAFE_INTEGER, counter, number, read_int
from bulltask.jobs.errors import BulltaskError, ConfigError, DecodeError, PayloadTooLargeError
from bulltask.jobs.fields import (
    CHECKPOINT_FIELD,
    KEEP_ALL,
    NO_LIMITS,
    REPLACEMENT_FIELD,
    TimeLimits,
    keep_option,
    keep_to_wire,
    stored_keep,
    truncate_reason,
    truncate_traces,
    whole,
)
from bulltask.jobs.names import check_reference, qualified_name

__all__ = [
    "BULLTASK_KEY",
    "FAILURE_FLAGS",
    "INCOMPATIBLE_FIELD",
    "MAX_PRIORITY",
    "RELEASES_FIELD",
    "STORED",
    "UNLIMITED_ATTEMPTS",
    "BackoffLike",
    "Deduplication",
    "HasJobRef",
    "JobOptions",
    "JobRef",
    "NewJob",
    "ParentLike",
    "ParentLink",
    "PlannedJob",
    "RunningJob",
    "StoredOptions",
    "check_priority",
    "check_size",
    "check_together",
    "in_order",
    "link_to_parent",
    "new_job_id",
    "stored_options",
    "text_chars",
    "unchecked_bytes",
]


_uuid7: Callable[[], object] | None = None


def new_job_id() -> str:
    """Return an id for a new job: a UUID of version 7, which begins with the time."""
    global _uuid7  # noqa: PLW0603 - imported when a process sends its first job: idle workers save half a MiB
    if _uuid7 is None:
        from uuid_utils import uuid7  # noqa: PLC0415

        _uuid7 = uuid7
    return str(_uuid7())


MAX_PRIORITY: Final = 2**21 - 1
"""Largest priority that every version of BullMQ accepts (5.62: 2^21, 6.x: one less)."""

UNLIMITED_ATTEMPTS: Final = 2**31 - 1
"""The number of attempts for ``max_retries=None``: the largest that BullMQ supports."""

RELEASES_FIELD: Final = "bulltask:releases"
"""The field of a job's hash with :attr:`RunningJob.releases`; BullMQ ignores it."""

INCOMPATIBLE_FIELD: Final = "bulltask:incompatible"
"""The field of a job's hash with the time since when no worker could run it; BullMQ ignores it."""


@value_class
class JobRef:
    """Address of a job: its queue's name in the app, and its id."""

    queue: str
    id: str


class HasJobRef(Protocol):
    """Anything with a job's id and queue: a ``Job``, an ``AsyncResult``, a ``JobRef``, ``self.request`` in a task."""

    @property
    def id(self) -> str:
        """The job's id."""
        ...

    @property
    def queue(self) -> str:
        """The name of the job's queue in the app."""
        ...


_IF_ANY: Final = ("retries", "sender", "origin", "canvas")
_OF_ONE_JOB: Final = frozenset({"jobId", "delay", "timestamp", "parent", "de"})


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
        packed: The cache of ``bulltask.transport.scripts.add``: the options in MessagePack.
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
    packed: tuple[int | None, bytes, bytes] | None = field(default=None, init=False, repr=False, compare=False)

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
        """Return the ``opts`` that a job scheduler stores for its jobs, without those that differ from job to job."""
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


@value_class
class ParentLink:
    """A child's link to its parent: the full Redis key of the parent's hash, and BullMQ's parent map.

    The map contains the effect of the child's failure on the parent: at most one of :data:`FAILURE_FLAGS`.
    """

    key: str
    data: Mapping[str, object]


@value_class
class NewJob:
    """A job to be sent: its options have been checked, and its data is JSON.

    Attributes:
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


@dataclass(slots=True, eq=False)
class PlannedJob:
    """A job in a flow that is being sent, with its child jobs.

    Attributes:
        has_custom_id: The caller set its id, so a job with this id may exist already.
        dependents: The other jobs of the same flow that wait for this job, besides its parent.
        result: The stored id, or the error; ``None`` until it has been sent.
    """

    job: NewJob
    has_custom_id: bool
    children: list[PlannedJob] = field(default_factory=list)
    dependents: list[PlannedJob] = field(default_factory=list)
    result: str | BulltaskError | None = None


def in_order(roots: Sequence[PlannedJob]) -> Iterator[PlannedJob]:
    """Iterate over all jobs level by level, parents before children, in the order in which Node adds them."""
    level = list(roots)
    while level:
        yield from level
        level = [child for planned in level for child in planned.children]


_DEDUPLICATION_FLAGS: Final = {"extend": "extend", "replace": "replace", "keep_last_if_active": "keepLastIfActive"}


@value_class(frozen=True)
class Deduplication:
    """Which jobs are duplicates of each other, and for how long, in one of BullMQ's modes.

    ``Deduplication("x")`` lasts until the first job has finished. With ``ttl``, it lasts for that time, even if the job
    finishes earlier. For a debounce, set ``ttl``, ``extend`` and ``replace``, and send the job with a ``delay``.

    Attributes:
        id: Jobs with this id are duplicates of each other.
        ttl: Seconds or ``timedelta``; ``None``: until the first job has finished.
        extend: Each duplicate restarts the ``ttl``.
        replace: A duplicate replaces the first job while that is delayed.
        keep_last_if_active: While the first job is active, the last duplicate is stored, and added when the first job
            has finished; the ``ttl`` is not used (BullMQ 5.72). A Node.js worker of BullMQ 5.62 does not add it.
    """

    id: str
    ttl: Duration | None = None
    extend: bool = False
    replace: bool = False
    keep_last_if_active: bool = False

    def to_wire(self) -> dict[str, object]:
        """Return the stored option ``de``."""
        if not isinstance(self.id, str) or not self.id:
            raise ConfigError(f"deduplication.id must be a non-empty string, not {self.id!r:.200}")
        try:
            self.id.encode()
        except UnicodeEncodeError:
            raise ConfigError(
                f"deduplication.id {self.id!r:.60} contains characters that UTF-8 cannot encode"
            ) from None
        wire: dict[str, object] = {"id": self.id}
        if self.ttl is not None:
            wire["ttl"] = to_ms(self.ttl, "deduplication.ttl")
        flags = zip(_DEDUPLICATION_FLAGS.items(), (self.extend, self.replace, self.keep_last_if_active), strict=True)
        return wire | {stored: True for (name, stored), value in flags if _flag(value, name)}


BackoffLike = Backoff | Mapping[str, Any] | Duration
"""A delay before every retry, or ``{"type": "exponential", "delay": 1, "jitter": 0.2, "max_delay": 3600}``."""

ParentLike = HasJobRef | Mapping[str, str]
"""A job, or ``{"id": …, "queue": …}``."""

FAILURE_FLAGS: Final[Mapping[str, str]] = {
    "fail_parent_on_failure": "fpof",
    "continue_parent_on_failure": "cpof",
    "ignore_dependency_on_failure": "idof",
    "remove_dependency_on_failure": "rdof",
}


def stored_options(given: Mapping[str, Any], strategies: Sequence[str] = ()) -> dict[str, object]:
    """Return the options of :data:`STORED` under BullMQ's names, without those that are ``None``.

    ``strategies`` is the setting ``backoff_strategies``.
    """
    flags = [name for name in FAILURE_FLAGS if given.get(name)]
    if len(flags) > 1:
        raise ConfigError(f"use only one of the options {', '.join(flags)}")
    wire: dict[str, object] = {}
    for name, (stored, read) in STORED.items():
        if (value := given.get(name)) is None:
            continue
        if (stored_value := read(value, name)) is not None:
            wire[stored] = stored_value
    backoff = wire.get("backoff")
    if isinstance(backoff, dict):
        check_strategy(backoff["type"], strategies)
        warn_about_long_delay(backoff.get("delay", 0), "backoff.delay")
    return wire


def _flag(value: Any, name: str) -> bool | None:
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be true or false, not {value!r:.200}")
    return value or None


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{name} must be a string, not {value!r:.200}")
    return value


def _backoff(value: Any, name: str) -> dict[str, object]:
    if isinstance(value, Backoff):
        return {**value.to_wire(), "type": value.type}
    if not isinstance(value, Mapping):
        return {"type": "fixed", "delay": to_ms(value, name)}
    _check_keys(value, {"type", "delay", "jitter", "max_delay"}, name)
    wire: dict[str, Any] = {"type": _text(value.get("type"), f"{name}.type")}
    if "delay" in value:
        wire["delay"] = to_ms(value["delay"], f"{name}.delay")
    if "jitter" in value:
        wire["jitter"] = value["jitter"]
    if value.get("max_delay") is not None:
        wire["maxDelay"] = to_ms(value["max_delay"], f"{name}.max_delay")
    # The check; the object is not stored, because it would add defaults.
    Backoff(wire["type"], wire.get("delay", 0), wire.get("jitter", 0.0), wire.get("maxDelay"))
    return wire


def _deduplication(value: Any, name: str) -> dict[str, object]:
    if isinstance(value, Mapping):
        _check_keys(value, {"id", "ttl", *_DEDUPLICATION_FLAGS}, name)
        value = Deduplication(**{"id": "", **value})
    return (value if isinstance(value, Deduplication) else Deduplication(value)).to_wire()


def _moment(value: Any, name: str) -> int:
    return to_epoch_ms(value, name) if isinstance(value, datetime) else to_ms(value, name)


def _check_keys(value: Mapping[str, Any], names: set[str], option: str) -> None:
    if unknown := sorted(set(value) - names):
        raise ConfigError(f"{option} has no key {unknown[0]!r:.200}; use {', '.join(sorted(names))}")


STORED: Final[Mapping[str, tuple[str, Callable[[Any, str], object]]]] = {
    "backoff": ("backoff", _backoff),
    "timestamp": ("timestamp", _moment),
    "remove_on_complete": ("removeOnComplete", keep_option),
    "remove_on_fail": ("removeOnFail", keep_option),
    "keep_logs": ("kl", partial(whole, low=0)),
    "stack_trace_limit": ("stackTraceLimit", partial(whole, low=0)),
    "size_limit": ("sizeLimit", partial(whole, low=1)),
    "deduplication": ("de", _deduplication),
    "telemetry_metadata": ("tm", _text),
    "omit_context": ("omc", _flag),
    **{name: (stored, _flag) for name, stored in FAILURE_FLAGS.items()},
}
"""Stored name and parser of each option; ``None`` from the parser is not stored."""


def link_to_parent(
    parent: ParentLike | None, stored: dict[str, object], *, prefix: str, hash_tag: bool
) -> ParentLink | None:
    """Return the link from a child to ``parent``; the parent's map contains the child's failure flag.

    Args:
        parent: If its ``queue`` contains a ``:``, it is BullMQ's qualified name (``bull:orders``).
        stored: The child's options as :func:`stored_options` returns them; the parent is added to them.
        prefix, hash_tag: The key prefix for a parent whose ``queue`` is a plain name, and whether it gets braces.
    """
    if parent is None:
        return None
    read = parent.get if isinstance(parent, Mapping) else lambda name: getattr(parent, name, None)
    job_id, queue = read("id"), read("queue")
    if not (isinstance(job_id, str) and job_id and isinstance(queue, str) and queue):
        raise ConfigError(f"parent must be a job, or a mapping with the strings id and queue, not {parent!r:.200}")
    check_reference(job_id)
    qualified = qualified_name(queue, prefix, hash_tag=hash_tag)
    stored["parent"] = {"id": job_id, "queue": qualified}
    flags = {flag: True for flag in FAILURE_FLAGS.values() if stored.get(flag)}
    return ParentLink(f"{qualified}:{job_id}", {"id": job_id, "queueKey": qualified, **flags})


def check_priority(value: object) -> int:
    """Return a valid priority; ``None`` is 0."""
    if value is None:
        return 0
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_PRIORITY:
        raise ConfigError(
            f"priority must be an integer from 1 (highest) to {MAX_PRIORITY}, or 0 for none, not {value!r:.200}"
        )
    return value


_MAX_OTHER_BYTES: Final = 1_000
_MAX_ESCAPE_BYTES: Final = 6
"""Upper bounds in bytes of JSON: for options without the sender's strings, and for a character in such a string."""


def check_size(data: bytes, options: JobOptions, limit: int | None, what: str) -> None:
    """Check a job's data against its ``size_limit``, and data and options together against ``max_payload``.

    ``limit`` is that setting, which the encoded data alone does not exceed; ``what`` is the data's name in messages.
    """
    size_limit = options.more.get("sizeLimit")
    if isinstance(size_limit, int) and len(data) > size_limit:
        raise PayloadTooLargeError(f"{what}: {len(data):,} bytes of JSON exceed the job's size_limit of {size_limit:,}")
    # The options are encoded only if that can matter, because encoding takes longer than everything else in a send.
    if limit is not None and len(data) > unchecked_bytes(options, limit):
        check_together(data, options.to_wire(0), limit, what)


def unchecked_bytes(options: JobOptions, limit: int | None) -> int:
    """Return up to how many bytes of data need no :func:`check_size`."""
    if "sizeLimit" in options.more:
        return -1
    return MAX_SAFE_INTEGER if limit is None else limit - _MAX_OTHER_BYTES - _MAX_ESCAPE_BYTES * text_chars(options)


def text_chars(options: JobOptions) -> int:
    """Count the characters in the options' strings that come from the sender; everything else is short."""
    chars = len(options.headers)
    for option in options.more.values():
        for part in option.values() if isinstance(option, Mapping) else (option,):
            chars += len(part) if isinstance(part, str) else 0
    return chars


def check_together(data: bytes, stored: Mapping[str, object], limit: int, what: str) -> None:
    """Check a job's encoded data and stored options together against ``max_payload``; ``what`` identifies the data."""
    rest = len(json.dumps(stored, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace"))
    if len(data) + rest > limit:
        raise PayloadTooLargeError(
            f"{what} ({len(data):,} bytes of JSON) and the job's options with its headers ({rest:,}) together exceed "
            f"the limit of {limit:,}; store them elsewhere and send a reference, or raise max_payload"
        )


BULLTASK_KEY: Final = "bulltask"
"""The option that contains bulltask's own options."""

_MAX_CACHED_BYTES: Final = 1_000
"""Longer options contain a canvas or headers, and are rarely equal to those of another job."""


class StoredOptions(dict[str, Any]):
    """A job's ``opts``. Do not change it: jobs with the same options share one object.

    The cached properties are therefore computed only once for all jobs with the same options.
    """

    @cached_property
    def bulltask(self) -> Mapping[str, Any]:
        """The options that only bulltask reads; empty if another client sent the job."""
        options = self.get(BULLTASK_KEY)
        return options if isinstance(options, dict) else {}

    @cached_property
    def attempts(self) -> int:
        """Maximum number of attempts; 0 and 1 both mean a single attempt."""
        return number(self.get("attempts")) or 0

    @cached_property
    def deduplication_id(self) -> str:
        """The deduplication id, ``""`` for none."""
        stored = self.get("de")
        return str(stored.get("id", "")) if isinstance(stored, dict) else ""

    @cached_property
    def keep(self) -> Mapping[str, Mapping[str, int] | None]:
        """BullMQ's ``keepJobs`` map for each retention option, ``None`` for one that is not set."""
        return {option: stored_keep(self.get(option)) for option in ("removeOnComplete", "removeOnFail")}

    @cached_property
    def canvas(self) -> Mapping[str, Any]:
        """The job's place in a canvas, empty for most jobs."""
        canvas = self.bulltask.get("canvas")
        return canvas if isinstance(canvas, dict) else {}

    @cached_property
    def may_expire(self) -> bool:
        """Whether the job has an expiry, see :attr:`RunningJob.expires_ms`."""
        return "ttl" in self.bulltask or "expires" in self.bulltask

    @cached_property
    def retries_before(self) -> int:
        """Retries in another queue, from which the job was moved."""
        return number(self.bulltask.get("retries")) or 0

    @cached_property
    def time_limits(self) -> TimeLimits:
        """The sender's limits for one attempt."""
        return TimeLimits.from_wire(self.bulltask)


def _read_options(stored: bytes, job_id: str) -> StoredOptions:
    """Return a job's options from the field ``opts``.

    Raises:
        DecodeError: The field is not a JSON object; the message names the job.
    """
    if len(stored) > _MAX_CACHED_BYTES:
        return _parse(stored, job_id)
    try:
        return _parse_once(stored)
    except DecodeError:
        return _parse(stored, job_id)  # for the message


def _parse(stored: bytes, job_id: str) -> StoredOptions:
    return StoredOptions(codec.decode_object(stored, what=f"field opts of job {job_id}"))


@lru_cache(maxsize=1_000)
def _parse_once(stored: bytes) -> StoredOptions:
    return _parse(stored, "")


_REPLACEMENT: Final = REPLACEMENT_FIELD.encode()
_CHECKPOINT: Final = CHECKPOINT_FIELD.encode()
_RELEASES: Final = RELEASES_FIELD.encode()


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
        replacement: The stored :class:`bulltask.jobs.fields.Replacement`, ``""`` for none.
        parent_key: Full Redis key of the parent's hash, ``""`` for none.
        checkpoint: The stored :class:`bulltask.jobs.fields.Checkpoint`, ``""`` for none.
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
        parts = iter(flat)
        raw = dict(zip(parts, parts, strict=True))
        if b"name" not in raw:
            return cls.placeholder(queue, job_id, f"job {job_id} has no name: it was not added by a BullMQ client")
        try:
            return cls._from_fields(queue, job_id, raw)
        except DecodeError as exc:
            return cls.placeholder(queue, job_id, str(exc))

    @classmethod
    def from_hash(cls, queue: str, job_id: str, flat: Sequence[bytes]) -> RunningJob:
        """Read the flat list of fields that ``moveToActive`` and ``moveToFinished`` return."""
        parts = iter(flat)
        return cls._from_fields(queue, job_id, dict(zip(parts, parts, strict=True)))

    @classmethod
    def _from_fields(cls, queue: str, job_id: str, raw: Mapping[bytes, bytes]) -> RunningJob:
        opts = _read_options(raw.get(b"opts", b"{}"), job_id)
        if b"parent" in raw or b"parentKey" in raw:
            _check_parent(raw, job_id)
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
        """Maximum number of attempts as stored, also in other queues; 0 and 1 both mean a single attempt."""
        return self.opts.attempts

    @property
    def attempts_in_queue(self) -> int:
        """:attr:`attempts` without those in another queue: the maximum of BullMQ's counter ``atm``."""
        return self.opts.attempts - self.opts.retries_before

    def max_attempts(self, max_retries: int | None = None) -> int:
        """Return the maximum number of attempts if a retry is requested; ``max_retries`` is the request's limit.

        Requests are ``self.retry()`` and ``autoretry_for``. For other errors, the maximum is :attr:`attempts`.
        """
        stored = self.opts.bulltask.get("max_explicit_retries")
        retries = stored if max_retries is None and isinstance(stored, int) else max_retries
        return max(1, self.attempts if retries is None else retries + 1)

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
        """The job's backoff, ``None`` for an immediate retry; ``DecodeError``: it is malformed."""
        return Backoff.from_wire(self.opts.get("backoff"))

    @property
    def waited_ms(self) -> int:
        """Time from when the job could first run until it was acquired."""
        return max(0, self.processed_on_ms - self.timestamp_ms - int(_number(self.opts.get("delay"))))

    def retry_delay_ms(self, attempts_made: int) -> int:
        """Return the delay that the job's backoff prescribes after ``attempts_made`` failed attempts."""
        backoff = self.backoff()
        if backoff is None:
            return 0
        delay_ms = bulltask_delay_ms if self.sent_by_bulltask else bullmq_delay_ms
        return delay_ms(backoff, attempts_made)

    def failure_fields(self, reason: str, trace: str) -> list[str]:
        """Return BullMQ's fields for a failed attempt: the truncated reason, and the attempts' tracebacks."""
        traces = truncate_traces([*self.traces(), *([trace] if trace else [])], self.trace_limit())
        safe = truncate_reason(reason).encode("utf-8", "replace").decode()
        return ["failedReason", safe, "stacktrace", json.dumps(traces, separators=(",", ":"))]

    def keep(self, option: str, otherwise: Mapping[str, int] | None = None) -> Mapping[str, int]:
        """Return BullMQ's ``keepJobs`` map for ``removeOnComplete`` or ``removeOnFail``.

        A job without the option gets the worker's (``otherwise``), or is kept if that is ``None``.
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


def _check_parent(raw: Mapping[bytes, bytes], job_id: str) -> None:
    """Check the fields ``parent`` and ``parentKey``, which BullMQ's scripts read when the job finishes.

    Raises:
        DecodeError: One of them is malformed.
    """
    parent = codec.decode_object(raw.get(b"parent", b"{}"), what=f"field parent of job {job_id}")
    # Node stores the id as the caller gave it, so it may be a number.
    if b"parent" in raw and not (isinstance(parent.get("id"), str | int) and isinstance(parent.get("queueKey"), str)):
        raise DecodeError(f"field parent of job {job_id} has no id and queueKey")
    # BullMQ's scripts search for the colon in quadratic time: a long string without a colon would block Redis.
    if b":" not in raw.get(b"parentKey", b":"):
        raise DecodeError(f"field parentKey of job {job_id} is not a job's key: {raw[b'parentKey'][:40]!r}")


def _number(value: object) -> int:
    """Return a numeric option; any other value counts as 0, as in BullMQ's scripts."""
    return number(value) or 0
