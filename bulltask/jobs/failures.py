"""How much of a failure is stored: Redis keeps it in the job and sends it to everybody who listens to the queue."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from types import TracebackType
from typing import Final

__all__ = ["REASON_CHARS", "TRACES_CHARS", "TRACE_CHARS", "bounded_reason", "bounded_traces", "reason_of", "trace_text"]

REASON_CHARS: Final = 10_000
"""Most characters of a job's ``failedReason``."""

TRACE_CHARS: Final = 50_000
"""Most characters of one traceback."""

TRACES_CHARS: Final = 500_000
"""Most characters of all tracebacks of a job; the newest stay."""

_LEFT_OUT: Final = "\n…\n"


def reason_of(exc: BaseException) -> str:
    """Return an exception's message, or the name of its class where it has none."""
    try:
        return bounded_reason(str(exc)) or type(exc).__name__
    except Exception:  # noqa: BLE001 - somebody's broken __str__ must not keep the job from being settled
        return type(exc).__name__


def bounded_reason(reason: str) -> str:
    """Return the beginning and the end of a reason that is too long, others as they are."""
    return _bounded(reason, REASON_CHARS)


def trace_text(exc: BaseException, frames: TracebackType | None) -> str:
    """Return the traceback with ``frames`` as text.

    A message that is stored in part stands here with the same parts: readers find it, and the class before it.
    """
    text = "".join(traceback.format_exception(type(exc), exc, frames))
    if len(text) > REASON_CHARS:
        try:
            message = str(exc)
        except Exception:  # noqa: BLE001 - as in reason_of()
            message = ""
        if len(message) > REASON_CHARS:
            text = text.replace(message, bounded_reason(message))
    return _bounded(text, TRACE_CHARS)


def bounded_traces(traces: Sequence[str], most: int | None) -> list[str]:
    """Return the newest ``most`` tracebacks (``None``: all) that have room in the job."""
    kept: list[str] = []
    room = TRACES_CHARS
    for trace in reversed(traces if most is None else traces[len(traces) - min(most, len(traces)) :]):
        text = _bounded(trace, TRACE_CHARS)  # of an earlier attempt, written by any client
        room -= len(text)
        if room < 0:
            break
        kept.append(text)
    return kept[::-1]


def _bounded(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    rest = most - len(_LEFT_OUT)
    return f"{text[: rest // 2]}{_LEFT_OUT}{text[-(rest - rest // 2) :]}"
