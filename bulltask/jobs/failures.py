"""Size limits for failures, because Redis stores them in the job and sends them to all listeners of the queue."""

from __future__ import annotations

import traceback
import zlib
from collections.abc import Sequence
from types import TracebackType
from typing import Final

from bulltask.errors import BulltaskError
from bulltask.jobs import codec

__all__ = [
    "ARGUMENTS_CHARS",
    "ERROR_FIELD",
    "GROUP",
    "REASON_CHARS",
    "TRACES_CHARS",
    "TRACE_CHARS",
    "arguments_for",
    "reason_of",
    "storable_arguments",
    "trace_text",
    "truncate_reason",
    "truncate_traces",
]

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
