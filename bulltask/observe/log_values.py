"""Log lines of events, and the values of their fields."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from bulltask import events

__all__ = ["ERROR_CHARS", "NAME_CHARS", "Line", "iso_time", "seconds", "shorten"]

ERROR_CHARS = 2_000
NAME_CHARS = 200

Line = tuple[int, type[events.Event], Callable[[Any], None]]
"""A level, an event class, and the function that writes its line."""


def shorten(text: str, chars: int) -> str:
    """Return at most ``chars`` characters of the text."""
    return text if len(text) <= chars else f"{text[: chars - 1]}…"


def seconds(ms: float) -> float:
    """Return a duration in seconds."""
    return round(ms / 1000, 6)


def iso_time(epoch_ms: int) -> str:
    """Return a time in ISO 8601 format, in UTC."""
    return datetime.fromtimestamp(epoch_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
