"""BullMQ's job options under Python names, with the checks for tasks and queues.

The checks include all of those in Node's client; their errors name the option. Durations are seconds or ``timedelta``;
BullMQ stores milliseconds, and whole seconds for ages.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Protocol

from bulltask.clock import Duration, to_epoch_ms, to_ms
from bulltask.errors import ConfigError, PayloadTooLargeError
from bulltask.jobs.backoff import Backoff, check_strategy, warn_about_long_delay
from bulltask.jobs.codec import MAX_SAFE_INTEGER
from bulltask.jobs.job import MAX_PRIORITY, JobOptions, ParentLink
from bulltask.jobs.names import check_reference, qualified_name
from bulltask.jobs.retention import keep_option

__all__ = [
    "FAILURE_FLAGS",
    "STORED",
    "BackoffLike",
    "Deduplication",
    "HasJobRef",
    "ParentLike",
    "check_priority",
    "check_size",
    "check_together",
    "link_to_parent",
    "stored_options",
    "text_chars",
    "unchecked_bytes",
]


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


_DEDUPLICATION_FLAGS: Final = {"extend": "extend", "replace": "replace", "keep_last_if_active": "keepLastIfActive"}


@dataclass(frozen=True, slots=True)
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
        """Return the stored option ``de``.

        Raises:
            ConfigError: The id is empty or a value has the wrong type.
        """
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

_MAX_OTHER_BYTES: Final = 1_000
_MAX_ESCAPE_BYTES: Final = 6
"""Upper bounds in bytes of JSON: for options without the sender's strings, and for a character in such a string."""

FAILURE_FLAGS: Final[Mapping[str, str]] = {
    "fail_parent_on_failure": "fpof",
    "continue_parent_on_failure": "cpof",
    "ignore_dependency_on_failure": "idof",
    "remove_dependency_on_failure": "rdof",
}


def stored_options(given: Mapping[str, Any], strategies: Sequence[str] = ()) -> dict[str, object]:
    """Return the options of :data:`STORED` under BullMQ's names, without those that are ``None``.

    Args:
        given: The options.
        strategies: The setting ``backoff_strategies``.

    Raises:
        ConfigError: A value is invalid, or two options cannot be combined.
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


def link_to_parent(
    parent: ParentLike | None, stored: dict[str, object], *, prefix: str, hash_tag: bool
) -> ParentLink | None:
    """Return the link from a child to ``parent``; the parent's map contains the child's failure flag.

    Args:
        parent: The parent job, ``None`` for none. If its ``queue`` contains a ``:``, it is BullMQ's qualified name
            (``bull:orders``).
        stored: The child's options as :func:`stored_options` returns them; the parent is added to them.
        prefix: Key prefix, for a parent whose ``queue`` is a plain name.
        hash_tag: Whether such a name gets braces.

    Raises:
        ConfigError, InvalidNameError: ``parent`` is not a job.
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
    """Return a valid priority; ``None`` is 0.

    Raises:
        ConfigError: It is not an integer from 0 to :data:`bulltask.jobs.job.MAX_PRIORITY`.
    """
    if value is None:
        return 0
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_PRIORITY:
        raise ConfigError(
            f"priority must be an integer from 1 (highest) to {MAX_PRIORITY}, or 0 for none, not {value!r:.200}"
        )
    return value


def text_chars(options: JobOptions) -> int:
    """Count the characters in the options' strings that come from the sender; everything else is short."""
    chars = len(options.headers)
    for option in options.more.values():
        for part in option.values() if isinstance(option, Mapping) else (option,):
            chars += len(part) if isinstance(part, str) else 0
    return chars


def check_size(data: bytes, options: JobOptions, limit: int | None, what: str) -> None:
    """Check a job's data against its ``size_limit``, and data and options together against ``max_payload``.

    Args:
        data: The encoded data, which alone does not exceed ``limit``.
        options: The job's options.
        limit: The setting ``max_payload``; ``None`` for no limit.
        what: Name of the data in messages.

    Raises:
        PayloadTooLargeError: A limit is exceeded.
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


def check_together(data: bytes, stored: Mapping[str, object], limit: int, what: str) -> None:
    """Check a job's encoded data and stored options together against ``max_payload``.

    Raises:
        PayloadTooLargeError: They exceed it; ``what`` identifies the data in the message.
    """
    rest = len(json.dumps(stored, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace"))
    if len(data) + rest > limit:
        raise PayloadTooLargeError(
            f"{what} ({len(data):,} bytes of JSON) and the job's options with its headers ({rest:,}) together exceed "
            f"the limit of {limit:,}; store them elsewhere and send a reference, or raise max_payload"
        )


def _number(low: int) -> Callable[[Any, str], int]:
    def read(value: Any, name: str) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= MAX_SAFE_INTEGER:
            raise ConfigError(f"{name} must be an integer of {low} or more, not {value!r:.200}")
        return value

    return read


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
    wire: dict[str, object] = {"type": _text(value.get("type"), f"{name}.type")}
    if "delay" in value:
        wire["delay"] = to_ms(value["delay"], f"{name}.delay")
    if "jitter" in value:
        wire["jitter"] = value["jitter"]
    if value.get("max_delay") is not None:
        wire["maxDelay"] = to_ms(value["max_delay"], f"{name}.max_delay")
    _check_backoff(wire)
    return wire


def _check_backoff(wire: Mapping[str, Any]) -> None:
    """Check by constructing a Backoff; it is not stored, because it would add defaults."""
    Backoff(wire["type"], wire.get("delay", 0), wire.get("jitter", 0.0), wire.get("maxDelay"))


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
    "keep_logs": ("kl", _number(0)),
    "stack_trace_limit": ("stackTraceLimit", _number(0)),
    "size_limit": ("sizeLimit", _number(1)),
    "deduplication": ("de", _deduplication),
    "telemetry_metadata": ("tm", _text),
    "omit_context": ("omc", _flag),
    **{name: (stored, _flag) for name, stored in FAILURE_FLAGS.items()},
}
"""Stored name and parser of each option; ``None`` from the parser is not stored."""
