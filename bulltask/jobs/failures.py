"""Size limits for failures, because Redis stores them in the job and sends them to all listeners of the queue."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from types import TracebackType
from typing import Final

__all__ = [
    "ERROR_FIELD",
    "REASON_CHARS",
    "TRACES_CHARS",
    "TRACE_CHARS",
    "reason_of",
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
"""The field of a failed job's hash with its pickled exception, if the job's serializer is cloudpickle; BullMQ ignores
it."""

_ELLIPSIS: Final = "\n…\n"


def reason_of(exc: BaseException) -> str:
    """Return an exception's message, or the name of its class if it has none."""
    try:
        return truncate_reason(str(exc)) or type(exc).__name__
    except Exception:  # noqa: BLE001 - a user's exception with a broken __str__ must not block the outcome
        return type(exc).__name__


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
