"""The parts of a stored job, one after the other: each is read from a job's hash, whichever client wrote it.

Retention, time limits, a checkpoint, the failure of an attempt, and the results that a job receives from its child
jobs. ``bulltask.jobs.job`` puts them together.

A user's invalid option raises ``ConfigError``. A malformed field raises ``DecodeError``, and what prevents an attempt,
such as a missing result, raises ``InvalidJobError``.
"""

from __future__ import annotations

import json
import re
import traceback
import zlib
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Final

from bulltask.jobs import codec
from bulltask.jobs.clock import Duration, to_ms, value_class
from bulltask.jobs.codec import MAX_SAFE_INTEGER, number
from bulltask.jobs.errors import (
    BulltaskError,
    ConfigError,
    DecodeError,
    InvalidJobError,
    SoftTimeLimitExceeded,
    TimeLimitExceeded,
)

__all__ = [
    "ARGUMENTS_CHARS",
    "CHECKPOINT_FIELD",
    "ERROR_FIELD",
    "GROUP",
    "KEEP_ALL",
    "KEEP_FAILED",
    "NO_CHECKPOINT",
    "NO_LIMITS",
    "NO_RESULTS",
    "REASON_CHARS",
    "REPLACEMENT_FIELD",
    "TRACES_CHARS",
    "TRACE_CHARS",
    "Checkpoint",
    "ChildResults",
    "KeepJobs",
    "Replacement",
    "Shape",
    "TimeLimits",
    "arguments_for",
    "class_in_trace",
    "error_type",
    "keep_option",
    "keep_to_wire",
    "member_id",
    "reason_of",
    "storable_arguments",
    "stored_keep",
    "trace_text",
    "truncate_reason",
    "truncate_traces",
    "whole",
]

KeepJobs = bool | int | Mapping[str, Any]
"""``True``: remove immediately; ``False``: keep all; ``n``: keep the newest ``n``; ``{"age": seconds, "count": n}``."""

KEEP_ALL: Final[Mapping[str, int]] = {"count": -1}

KEEP_FAILED: Final[Mapping[str, int]] = {"age": 7 * 86_400, "count": 100_000}
"""How long failed jobs are kept by default. BullMQ keeps them forever; a hundred thousand take about 600 MB."""


def keep_option(value: Any, name: str) -> bool | int | dict[str, int]:
    """Return the stored value of ``removeOnComplete`` or ``removeOnFail``; ``name`` identifies an invalid one."""
    if isinstance(value, bool):
        return value
    if not isinstance(value, Mapping):
        return whole(value, name, low=-1)
    if unknown := sorted(set(value) - {"age", "count"}):
        raise ConfigError(f"{name} has no key {unknown[0]!r:.200}; use age, count")
    wire: dict[str, int] = {}
    if value.get("age") is not None:
        wire["age"] = -(-to_ms(value["age"], f"{name}.age") // 1000)  # BullMQ counts whole seconds here
    if value.get("count") is not None:
        wire["count"] = whole(value["count"], f"{name}.count", low=0)
    return wire


def stored_keep(option: object) -> Mapping[str, int] | None:
    """Return BullMQ's ``keepJobs`` map for a stored ``removeOnComplete`` or ``removeOnFail``, ``None`` without it.

    Any client may have written it: a limit that is not a number is ignored, as in Node.
    """
    if isinstance(option, dict):  # not Mapping, whose check takes longer
        return {key: bound for key in ("count", "age") if (bound := number(option.get(key))) is not None}
    if isinstance(option, bool):
        return {"count": 0} if option else KEEP_ALL
    count = number(option)
    return None if count is None else {"count": count}


def whole(value: Any, name: str, *, low: int) -> int:
    """Return an option that is an integer of ``low`` or more."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= MAX_SAFE_INTEGER:
        raise ConfigError(f"{name} must be an integer of {low} or more, not {value!r:.200}")
    return value


def keep_to_wire(keep_ms: int) -> object:
    """Return ``keepJobs`` for a duration; BullMQ counts ``age`` in whole seconds, and zero keeps no job."""
    return {"age": max(1, keep_ms // 1000)} if keep_ms else True


_SOFT: Final = "softTimeLimit"
_HARD: Final = "timeLimit"


@value_class
class TimeLimits:
    """Time limits of one attempt in milliseconds, ``None`` for no limit.

    After the soft limit, the task is interrupted and may clean up; after the hard limit, the attempt is stopped.
    """

    soft_ms: int | None = None
    hard_ms: int | None = None

    @classmethod
    def of(cls, soft: Duration | None, hard: Duration | None) -> TimeLimits:
        """Return the limits for values in seconds or ``timedelta``, each of 0.001 s or more."""
        return NO_LIMITS if soft is hard is None else cls(_ms(soft, "soft_time_limit"), _ms(hard, "time_limit"))

    @classmethod
    def from_wire(cls, options: Mapping[str, Any]) -> TimeLimits:
        """Read the limits from a job's bulltask options; a value that is not a positive number means no limit."""
        if _SOFT not in options and _HARD not in options:
            return NO_LIMITS
        return cls(_stored_ms(options.get(_SOFT)), _stored_ms(options.get(_HARD)))

    def to_wire(self) -> dict[str, object]:
        """Return the limits as they are stored in a job's bulltask options."""
        stored = {_SOFT: self.soft_ms, _HARD: self.hard_ms}
        return {name: limit_ms for name, limit_ms in stored.items() if limit_ms is not None}

    def check(self, whose: str, prefix: str = "") -> None:
        """Check that the soft limit is shorter; in a message, ``prefix`` begins the names of the settings."""
        if self.soft_ms is not None and self.hard_ms is not None and self.soft_ms >= self.hard_ms:
            raise ConfigError(
                f"{prefix}soft_time_limit ({_text(self.soft_ms)}) of {whose} must be shorter than "
                f"{prefix}time_limit ({_text(self.hard_ms)}): otherwise it has no effect"
            )

    def with_defaults(self, defaults: TimeLimits) -> TimeLimits:
        """Return these limits; limits that are not set come from ``defaults``."""
        if self is NO_LIMITS:  # nearly every job
            return defaults
        soft_ms = defaults.soft_ms if self.soft_ms is None else self.soft_ms
        return TimeLimits(soft_ms, defaults.hard_ms if self.hard_ms is None else self.hard_ms)

    def shortest(self, other: TimeLimits) -> TimeLimits:
        """Return the shorter soft limit and the shorter hard limit of the two."""
        return TimeLimits(_shorter(self.soft_ms, other.soft_ms), _shorter(self.hard_ms, other.hard_ms))

    @property
    def soft_s(self) -> float | None:
        """The soft limit in seconds."""
        return None if self.soft_ms is None else self.soft_ms / 1000

    @property
    def hard_s(self) -> float | None:
        """The hard limit in seconds."""
        return None if self.hard_ms is None else self.hard_ms / 1000

    def soft_exceeded(self, task: str) -> SoftTimeLimitExceeded:
        """Return the exception for exceeding the soft limit."""
        return SoftTimeLimitExceeded(f"task {task} ran longer than its soft time limit of {_text(self.soft_ms)}")

    def hard_exceeded(self, task: str, *, killed: bool = False) -> TimeLimitExceeded:
        """Return the exception for exceeding the hard limit; ``killed``: the child process was killed."""
        end = " and its child was killed" if killed else ""
        return TimeLimitExceeded(f"task {task} ran longer than its time limit of {_text(self.hard_ms)}{end}")


NO_LIMITS: Final = TimeLimits()


def _shorter(first_ms: int | None, second_ms: int | None) -> int | None:
    return min((limit_ms for limit_ms in (first_ms, second_ms) if limit_ms is not None), default=None)


def _ms(limit: Duration | None, name: str) -> int | None:
    if limit is None:
        return None
    if (limit_ms := to_ms(limit, name)) < 1:
        raise ConfigError(f"{name} must be 0.001 s or more, not {limit!r:.200}; leave it out for no limit")
    return limit_ms


def _stored_ms(limit: object) -> int | None:
    if isinstance(limit, bool) or not isinstance(limit, int | float) or not 1 <= limit < 2**53:
        return None
    return int(limit)


def _text(limit_ms: int | None) -> str:
    return f"{(limit_ms or 0) / 1000:g} s"


CHECKPOINT_FIELD: Final = "bulltask:checkpoint"
"""The field of a job's hash with its :class:`Checkpoint`; BullMQ ignores it."""

NO_CHECKPOINT: Final = ""
"""The field's value after the job has completed, so that a retry starts from the beginning."""


@value_class
class Checkpoint:
    """How far a checkpointed task got.

    Attributes:
        cursor: The position after the last finished item; ``None`` before the first one.
        items: The number of finished items, in all attempts.
        attempts_started: The job's started attempts (``ats``) when the checkpoint was stored.
        done: The task's loop has ended.
    """

    cursor: codec.Json = None
    items: int = 0
    attempts_started: int = 0
    done: bool = False

    def to_json(self, job_id: str) -> str:
        """Return the value of the field."""
        cursor = codec.encode(self.cursor, what=f"the cursor of job {job_id}").decode()
        return (
            f'{{"cursor":{cursor},"items":{self.items},"started":{self.attempts_started},'
            f'"done":{"true" if self.done else "false"}}}'
        )

    @classmethod
    def from_json(cls, stored: str, job_id: str) -> Checkpoint:
        """Read the value of the field; ``NO_CHECKPOINT`` is a checkpoint before the first item."""
        if stored == NO_CHECKPOINT:
            return cls()
        value: Any = codec.decode(stored, what=f"field {CHECKPOINT_FIELD} of job {job_id}")
        try:
            items, started = value["items"], value["started"]
            if isinstance(items, int) and isinstance(started, int):
                return cls(value["cursor"], items, started, value["done"] is True)
        except (TypeError, LookupError):
            pass
        raise DecodeError(
            f"field {CHECKPOINT_FIELD} of job {job_id} is not a checkpoint: {stored[:80]!r}; remove the field to "
            "restart the job from the beginning"
        )


REASON_CHARS: Final = 10_000
"""Maximum length of a job's ``failedReason`` in characters."""

TRACE_CHARS: Final = 50_000
"""Maximum length of one traceback in characters."""

TRACES_CHARS: Final = 500_000
"""Maximum total length of a job's tracebacks in characters; the newest are kept."""

ERROR_FIELD: Final = "bulltask:error"
"""The field of a failed job's hash with its pickled exception, if the job's serializer is cloudpickle, or with the
exception's arguments, if its message is not its only one; BullMQ ignores it."""

ARGUMENTS_CHARS: Final = 2_000
"""Maximum length of the stored arguments of an exception; longer ones are not stored."""

GROUP: Final = "bulltask:group"
"""Stored instead of the first argument of an ``ExceptionGroup``; its message and its exceptions follow."""

_REPR_CHARS: Final = 200
_PYTHON_TRACE: Final = "Traceback (most recent call last):"
_CLASS: Final = re.compile(r"[\w.]+")
_MAX_GROUPS: Final = 5

_ELLIPSIS: Final = "\n…\n"


def reason_of(exc: BaseException) -> str:
    """Return an exception's message, or the name of its class if it has none."""
    try:
        return truncate_reason(str(exc)) or type(exc).__name__
    except Exception:  # noqa: BLE001 - a user's exception with a broken __str__ must not block the outcome
        return type(exc).__name__


def storable_arguments(exc: BaseException) -> list[object]:
    """Return the arguments of an exception in a form that JSON can represent; ``[]`` if its message is enough.

    For an exception group, the arguments are :data:`GROUP`, its message, and its exceptions, each with the name of its
    class, its message and its arguments.

    The first item is the checksum of the message, because another client may run the job again, and does not remove the
    arguments. An argument that JSON cannot represent is replaced with its ``repr()``, as in Celery.
    """
    if isinstance(exc, ExceptionGroup):
        return _storable_group(exc)
    args = exc.args
    if len(args) < 2 and (not args or isinstance(args[0], str)):
        return []
    stored, room = list[object]([_checksum(reason_of(exc))]), ARGUMENTS_CHARS
    for argument in args:
        try:
            size = len(codec.encode(argument))
            stored.append(argument)
        except (BulltaskError, ValueError):
            stored.append(text := _repr(argument))
            size = len(text)
        room -= size
    return stored if room >= 0 else []


def _storable_group(group: ExceptionGroup[Exception]) -> list[object]:
    stored: list[object] = [_checksum(reason_of(group)), GROUP, group.message, _members(group, _MAX_GROUPS)]
    try:
        return stored if len(codec.encode(stored)) <= REASON_CHARS else []
    except (BulltaskError, ValueError):
        return []


def _members(group: BaseExceptionGroup[BaseException], depth: int) -> list[object]:
    members: list[object] = []
    for each in group.exceptions:
        if isinstance(each, ExceptionGroup) and depth:
            members.append([GROUP, each.message, _members(each, depth - 1)])
        else:
            kind = type(each)
            name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
            args = [] if isinstance(each, BaseExceptionGroup) else storable_arguments(each)[1:]
            members.append([name, reason_of(each), args])
    return members


def arguments_for(reason: str, stored: object) -> tuple[object, ...]:
    """Return what :func:`storable_arguments` returned, if it belongs to a failure with this reason."""
    if isinstance(stored, list) and len(stored) > 1 and stored[0] == _checksum(reason):
        return tuple(stored[1:])
    return ()


def _checksum(reason: str) -> int:
    return zlib.crc32(reason.encode("utf-8", "replace"))


def _repr(value: object) -> str:
    try:
        return repr(value)[:_REPR_CHARS]
    except Exception:  # noqa: BLE001 - a user's class
        return f"<{type(value).__name__}>"


def truncate_reason(reason: str) -> str:
    """Return ``reason``, or only its beginning and end if it is too long."""
    return _truncate(reason, REASON_CHARS)


def trace_text(exc: BaseException, frames: TracebackType | None) -> str:
    """Return the traceback of ``exc`` with ``frames`` as text.

    If the reason is truncated in the job, it is truncated in the same way in the traceback, because ``AsyncResult``
    searches the traceback for the reason.
    """
    text = "".join(traceback.format_exception(type(exc), exc, frames))
    if len(text) > REASON_CHARS:
        try:
            message = str(exc)
        except Exception:  # noqa: BLE001 - as in reason_of()
            message = ""
        if len(message) > REASON_CHARS:
            text = text.replace(message, truncate_reason(message))
    return _truncate(text, TRACE_CHARS)


def class_in_trace(reason: str, trace: str) -> str:
    """Return the class name in the traceback: the text in front of the message on its last line.

    This is a plain text search, because compiling a message of 20 MB (Node sets no limit) as a regular expression takes
    half a minute.
    """
    if _PYTHON_TRACE not in trace:
        return ""
    text, message = trace.rstrip(), reason.rstrip()
    if text.endswith(f": {message}"):
        return text[: -len(message) - 2].rpartition("\n")[2]
    lines = text if len(message) <= REASON_CHARS else ""  # bulltask does not write longer messages
    end = len(lines)
    while (end := lines.rfind(f": {message}\n", 0, end)) >= 0:  # notes come after the message
        name = lines[lines.rfind("\n", 0, end) + 1 : end]
        if _CLASS.fullmatch(name):
            return name
    return text.rpartition("\n")[2]


def error_type(reason: str, trace: str) -> str:
    """Return the class of a failure's error, from its traceback of Python or stack of Node.js; ``""`` if unknown."""
    if name := class_in_trace(reason, trace):
        return name if _CLASS.fullmatch(name) else ""
    name, _, rest = trace.partition(": ")
    return name if reason and rest.startswith(reason) and _CLASS.fullmatch(name) else ""


def truncate_traces(traces: Sequence[str], max_traces: int | None) -> list[str]:
    """Return the newest ``max_traces`` tracebacks (``None``: all) that fit into the job."""
    kept: list[str] = []
    room = TRACES_CHARS
    for trace in reversed(traces if max_traces is None else traces[len(traces) - min(max_traces, len(traces)) :]):
        text = _truncate(trace, TRACE_CHARS)  # any client may have written this traceback
        room -= len(text)
        if room < 0:
            break
        kept.append(text)
    return kept[::-1]


def _truncate(text: str, max_chars: int) -> str:
    if len(text) <= max_chars:
        return text
    kept_chars = max_chars - len(_ELLIPSIS)
    return f"{text[: kept_chars // 2]}{_ELLIPSIS}{text[-(kept_chars - kept_chars // 2) :]}"


# BullMQ stores the results of a job's children by their full keys, in no particular order. A job in a canvas also
# stores, among bulltask's options, which parameter receives the results, and their order:
#
# * ``to``: the name of the parameter. If it is empty, the data is a list, and the results become its first item.
# * ``shape``: ``"queue:id"`` for the result of that job; 3 for a list of three results; ``[null, 2]`` for a list of one
#   result and a list of two. In a list, ``null`` is the child job whose id is derived from its position
#   (:func:`member_id`). Thus, a job with ten thousand children does not store ten thousand ids. The shape is stored as
#   JSON text, because msgpack and Lua lose a ``null`` in a list.
#
# A job that ignores the result of the previous step stores :data:`NO_RESULTS`, so that it fails with that step's error.


REPLACEMENT_FIELD: Final = "bulltask:replacement"
"""The field of a job's hash with its :class:`Replacement`; BullMQ ignores it."""

Shape = None | int | str | Sequence["Shape"]
"""The structure of results, as above."""

NO_RESULTS: Final = {"to": ""}
"""The stored form for a job in a canvas that waits for other jobs, but receives no result from them."""


def member_id(job_id: str, index: int) -> str:
    """Return the id of the child job whose result is item ``index`` of the list that job ``job_id`` receives."""
    return f"{job_id}.{index}"


@value_class
class ChildResults:
    """The argument that a job receives from its child jobs; ``parameter`` is ``""`` for the first item of a list."""

    parameter: str
    shape: Shape

    def to_wire(self) -> dict[str, object]:
        """Return the stored form."""
        return {"to": self.parameter, "shape": json.dumps(self.shape, separators=(",", ":"))}

    @classmethod
    def from_wire(cls, stored: Mapping[str, Any]) -> ChildResults | None:
        """Read the stored form; ``None`` if the job receives no results."""
        if "shape" not in stored:
            return None
        try:
            parameter, shape = str(stored["to"]), json.loads(stored["shape"])
        except (KeyError, TypeError, ValueError):
            raise InvalidJobError(f"the option for the results of child jobs is malformed: {stored!r:.200}") from None
        return cls(parameter, shape)

    def value(self, results: Mapping[str, Any], base_id: str) -> Any:
        """Return the results, by the full keys of the child jobs, in the order and structure of the shape.

        The ids of the child jobs are derived from ``base_id``.
        """
        by_id = {key.rpartition(":")[2]: value for key, value in results.items()}
        return _value(self.shape, base_id, by_id, results)

    def add_to(self, data: Any, results: Mapping[str, Any], job_id: str) -> Any:
        """Return the job's data, a mapping or a list of positional arguments, with the results as in :meth:`value`."""
        value = self.value(results, job_id)
        if self.parameter and isinstance(data, dict):
            given = data.get(self.parameter)
            # A list is stored only for ``*args``, which the results precede.
            return {**data, self.parameter: value if given is None else [value, *given]}
        if not self.parameter and isinstance(data, list):
            return [value, *data]
        expected = "an object" if self.parameter else "an array"
        raise InvalidJobError(
            f"job {job_id} cannot receive the results of its child jobs: expected {expected}, not {data!r:.200}"
        )


@value_class
class Replacement:
    """The return value of a job whose task has replaced itself with a canvas (``self.replace``).

    ``shape`` is the structure of the results of the canvas's last jobs, whose ids are derived from ``base_id``.
    """

    base_id: str
    shape: Shape

    def to_json(self) -> str:
        """Return the stored form."""
        return json.dumps([self.base_id, self.shape], separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Replacement:
        """Read the stored form."""
        try:
            base_id, shape = json.loads(text)
            return cls(str(base_id), shape)
        except (TypeError, ValueError):
            raise InvalidJobError(f"the field {REPLACEMENT_FIELD} is malformed: {text!r:.200}") from None

    def result(self, results: Mapping[str, Any]) -> Any:
        """Return the result of the canvas from those of the job's children, as :meth:`ChildResults.value` does."""
        return ChildResults("", self.shape).value(results, self.base_id)


def _value(shape: Shape, job_id: str, by_id: Mapping[str, Any], by_key: Mapping[str, Any]) -> Any:
    """Return the results of a shape; ``job_id`` is the id of the child job that ``None`` stands for."""
    if isinstance(shape, int | Sequence) and not isinstance(shape, str):
        parts: Sequence[Shape] = [None] * shape if isinstance(shape, int) else shape
        return [_value(part, member_id(job_id, index), by_id, by_key) for index, part in enumerate(parts)]
    if shape is None and job_id in by_id:
        return by_id[job_id]
    for key, value in by_key.items():
        if shape is not None and key.endswith(f":{shape}"):
            return value
    raise InvalidJobError(f"the result of child job {shape or job_id} is missing")
