"""The outcome of an attempt whose task raises ``Ignore``, perhaps after setting a final state."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Final

from bulltask.errors import PermanentError, TaskCancelled
from bulltask.jobs.states import REVOKED
from bulltask.worker.child.outcomes import CompletedOutcome, FailedOutcome

__all__ = ["outcome_of_ignored"]

_NO_REASON: Final = "the task has set the state FAILURE"


def outcome_of_ignored(
    reported: tuple[str, Any] | None, encode: Callable[[Any], CompletedOutcome | FailedOutcome]
) -> CompletedOutcome | FailedOutcome:
    """Return the outcome of an attempt that ended with ``Ignore``.

    Args:
        reported: The state and meta of the last ``update_state`` in this attempt, ``None`` if there was none.
        encode: Returns the outcome of an attempt with this result.
    """
    state, meta = reported or ("", None)
    match state:
        case "FAILURE":
            return _failed(meta)
        case "REVOKED":
            return FailedOutcome(REVOKED, "", REVOKED, TaskCancelled(REVOKED))
        case "SUCCESS":
            return encode(meta)
        case _:
            return CompletedOutcome(b"null", None, ignored=True)


def _failed(meta: Any) -> FailedOutcome:
    """Return the outcome for a reason, or for Celery's form of an exception: ``exc_type`` and ``exc_message``."""
    kind, reason = "", meta
    if isinstance(meta, dict) and "exc_type" in meta:
        module, reason = meta.get("exc_module"), meta.get("exc_message")
        kind = f"{module}.{meta['exc_type']}" if module and module != "builtins" else str(meta["exc_type"])
    text = _text(reason) or kind or _NO_REASON
    # AsyncResult reads the exception's class from the last line of a Python traceback.
    trace = f"Traceback (most recent call last):\n{kind}: {text}\n" if kind else ""
    return FailedOutcome(text, trace, "permanent", PermanentError(text), expected=True)


def _text(reason: Any) -> str:
    if isinstance(reason, Sequence) and not isinstance(reason, str):
        return "\n".join(map(str, reason))
    return reason if isinstance(reason, str) else "" if reason is None else json.dumps(reason)
