"""Times, lengths of time and foreign texts as a terminal shows them."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Final

__all__ = ["ago", "length", "one_line", "safe", "stamp"]

_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]")

_UNITS: Final = ((86_400.0, "d"), (3_600.0, "h"), (60.0, "min"))


def safe(text: str) -> str:
    """A text from a job without what a terminal would obey; lines and tabs stay."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text.replace("\r\n", "\n"))


def one_line(text: str, most: int = 255) -> str:
    """The same in one line, cut where it is too long."""
    line = " ".join(safe(text).split())
    return line if len(line) <= most else line[: most - 1] + "…"


def stamp(moment: datetime | None) -> str:
    """``2026-11-22 14:00:03.250`` in UTC, ``-`` for none."""
    return "-" if moment is None else f"{moment.astimezone(UTC):%Y-%m-%d %H:%M:%S}.{moment.microsecond // 1000:03}"


def length(seconds: float | None) -> str:
    """``0.120 s``, ``12.3 s``, ``2.5 h``; ``-`` for none."""
    if seconds is None:
        return "-"
    for size, unit in _UNITS:
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.3f} s" if seconds < 10 else f"{seconds:.1f} s"


def ago(moment: datetime, now: datetime) -> str:
    """``3.0 h ago``, ``in 12.0 s``."""
    seconds = (now - moment).total_seconds()
    return f"{length(seconds)} ago" if seconds >= 0 else f"in {length(-seconds)}"
