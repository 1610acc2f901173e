"""Format tables, times, durations and text from jobs for a terminal."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from shutil import get_terminal_size
from textwrap import wrap
from typing import Any, Final

import click

from bulltask.jobs.clock import moment_of
from bulltask.lake.formatting import CONTROL, json_text, one_line

__all__ = [
    "ago",
    "as_table",
    "check_can_ask",
    "duration_text",
    "echo",
    "field_lines",
    "in_one_line",
    "in_width",
    "iso",
    "print_json",
    "progress_bar",
    "safe",
    "stamp",
    "time_of",
]

_UNITS: Final = ((86_400.0, "d"), (3_600.0, "h"), (60.0, "min"))

_NAME_WIDTH: Final = 11

_NUMBER: Final = re.compile("[-\N{EN DASH}]|([<>] )?-?[\\d,.]+( ?[a-zA-Z%]+)?")
"""A number with an optional unit, or a dash. Times and ids do not match, although they begin with digits."""


def as_table(head: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str] = (), gap: str = "  ") -> str:
    """Return rows under a header in aligned columns, and below each row its note, unless that is ``""``.

    Columns of numbers are right-aligned.
    """
    rows = [[one_line(text) for text in row] for row in rows]
    widths = [max(len(row[index]) for row in (head, *rows)) for index in range(len(head))]
    right = [bool(rows) and all(_NUMBER.fullmatch(row[index]) for row in rows) for index in range(len(head))]
    lines = [
        gap.join(
            text.rjust(width) if to_right else text.ljust(width)
            for text, width, to_right in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in (head, *rows)
    ]
    below = [f"\n  {note}" if note else "" for note in ("", *(notes or [""] * len(rows)))]
    return "\n".join(map("".join, zip(lines, below, strict=True)))


def safe(text: str) -> str:
    """Escape control characters in text from a job, because a terminal would interpret them; keep newlines and tabs."""
    return CONTROL.sub(_escape, text.replace("\r\n", "\n"))


def echo(text: str, *, err: bool = False) -> None:
    """Print text that may contain names from Redis, a server's messages or jobs' data, with :func:`safe`."""
    click.echo(safe(text), err=err)


@contextmanager
def progress_bar(label: str) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar on stderr, if that is a terminal; yield the function that sets what is done, of how much."""
    if not sys.stderr.isatty():
        yield lambda _done, _total: None
        return
    with click.progressbar(length=1, label=label, file=sys.stderr, show_pos=True) as bar:

        def show(done: int, total: int) -> None:
            bar.length = max(1, total)
            bar.update(done - bar.pos)

        yield show


def field_lines(fields: Iterable[tuple[str, object]]) -> Iterator[str]:
    """Yield a line for each field that has a value; further lines of a value are aligned below the first."""
    for name, value in fields:
        if value not in (None, 0, "", "-"):
            first, *rest = safe(str(value)).splitlines() or [""]
            yield f"{name:<{_NAME_WIDTH}}{first}"
            yield from (" " * _NAME_WIDTH + line for line in rest)


def check_can_ask(command: str, options: Mapping[str, Any]) -> None:
    """Raise a ``UsageError`` if a command must ask for confirmation and there is nobody to answer."""
    if not (options["yes"] or options["dry_run"] or sys.stdin.isatty()):
        raise click.UsageError(f"{command} asks for confirmation: pass --yes, or --dry-run to count the jobs")


def print_json(document: Any) -> None:
    """Print a JSON document on standard output; ``docs/reference/schemas`` has the schema of each command's."""
    click.echo(json_text(document))


def in_one_line(text: str, max_chars: int = 255) -> str:
    """Return the text escaped, with its whitespace collapsed, truncated to ``max_chars`` characters."""
    line = " ".join(safe(text).split())
    return line if len(line) <= max_chars else line[: max_chars - 1] + "…"


def in_width(text: str, indent: str = "", margin: int = 0) -> Iterator[str]:
    """Yield a text in lines that fit the terminal; in one line if the output is not a terminal, for ``grep``."""
    columns = get_terminal_size((0, 0)).columns
    if not columns:
        yield indent + text
        return
    more: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
    yield from wrap(text, max(40, columns - margin), initial_indent=indent, subsequent_indent=indent, **more)


def time_of(ms: int | None) -> datetime | None:
    """Return a time in epoch milliseconds as a ``datetime``; ``None`` if it is missing, 0 or out of range."""
    return moment_of(ms or None)


def iso(ms: int | None) -> str | None:
    """Return a time in epoch milliseconds as JSON documents have it: in ISO 8601, or ``None`` as :func:`time_of`."""
    moment = time_of(ms)
    return None if moment is None else moment.isoformat()


def stamp(moment: datetime | None) -> str:
    """Return ``2026-11-22 14:00:03.250`` in UTC, or ``-`` for ``None``."""
    return "-" if moment is None else f"{moment.astimezone(UTC):%Y-%m-%d %H:%M:%S}.{moment.microsecond // 1000:03}"


def duration_text(seconds: float | None) -> str:
    """Return ``0.120 s``, ``12.3 s`` or ``2.5 h``, or ``-`` for ``None``."""
    if seconds is None:
        return "-"
    for size, unit in _UNITS:
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.3f} s" if seconds < 10 else f"{seconds:.1f} s"


def ago(moment: datetime, now: datetime) -> str:
    """Return ``3.0 h ago`` or ``in 12.0 s``."""
    seconds = (now - moment).total_seconds()
    return f"{duration_text(seconds)} ago" if seconds >= 0 else f"in {duration_text(-seconds)}"


def _escape(match: re.Match[str]) -> str:
    return match[0] if match[0] in "\n\t" else match[0].encode("unicode_escape").decode()
