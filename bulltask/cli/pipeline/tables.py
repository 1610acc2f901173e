"""Tables of texts for terminals."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final

from bulltask.lake.plural import counted
from bulltask.lake.report.wording import one_line
from bulltask.lake.status import SetAside

__all__ = ["as_table", "set_aside_lines"]

_NUMBER: Final = re.compile(r"-|[\d,.]+( ?[a-zA-Z%]+)?")
"""A number, maybe with its unit; no time and no id, though these begin with digits too."""


def as_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return rows under a head, in columns as wide as they must be; columns of numbers stand to the right."""
    rows = [[one_line(text) for text in row] for row in rows]
    widths = [max(len(row[place]) for row in (head, *rows)) for place in range(len(head))]
    right = [bool(rows) and all(_NUMBER.fullmatch(row[place]) for row in rows) for place in range(len(head))]
    lines = [
        "  ".join(
            text.rjust(width) if to_right else text.ljust(width)
            for text, width, to_right in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in (head, *rows)
    ]
    return "\n".join(lines)


def set_aside_lines(aside: Sequence[SetAside]) -> Iterator[str]:
    """The lines that name queues which are not recorded."""
    if aside:
        yield f"\n{counted(len(aside), 'queue')} set aside, of which nothing is recorded:"
        yield from (f"  {one.queue}: {one.reason}" for one in aside)
