"""The categories, and the type of a rule."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

__all__ = ["PERMANENT", "TRANSIENT", "UNKNOWN", "ErrorCategory", "Rule", "category_table"]


class ErrorCategory(StrEnum):
    """Whether an error is worth another attempt."""

    TRANSIENT = "transient"
    PERMANENT = "permanent"
    UNKNOWN = "unknown"


TRANSIENT, PERMANENT, UNKNOWN = ErrorCategory

Rule = Callable[[BaseException], ErrorCategory | None]
"""Returns an exception's category, or ``None`` if the rule does not apply."""


def category_table(*, transient: str = "", permanent: str = "") -> dict[str, ErrorCategory]:
    """Return a mapping from space-separated words to their category."""
    return dict.fromkeys(transient.split(), TRANSIENT) | dict.fromkeys(permanent.split(), PERMANENT)
