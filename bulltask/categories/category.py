"""The words: what an error can say about the next attempt, and what a rule is."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

__all__ = ["PERMANENT", "TRANSIENT", "UNKNOWN", "ErrorCategory", "Rule", "verdicts"]


class ErrorCategory(StrEnum):
    """What an error says about the next attempt."""

    TRANSIENT = "transient"
    PERMANENT = "permanent"
    UNKNOWN = "unknown"


TRANSIENT, PERMANENT, UNKNOWN = ErrorCategory

Rule = Callable[[BaseException], ErrorCategory | None]
"""Judges one exception; ``None`` is "no opinion"."""


def verdicts(*, transient: str = "", permanent: str = "") -> dict[str, ErrorCategory]:
    """Return a table from blank-separated words to what they mean."""
    return dict.fromkeys(transient.split(), TRANSIENT) | dict.fromkeys(permanent.split(), PERMANENT)
