"""Tables of a report, and their output as text, Markdown, JSON or CSV."""

from __future__ import annotations

import csv
import io
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Any, Final

from bulltask.lake.formatting import CONTROL, Unit, format_value, json_text, one_line

__all__ = ["ReportColumn", "ReportTable", "as_csv", "as_json", "as_markdown", "as_text", "markdown_text"]


@dataclass(frozen=True, slots=True)
class ReportColumn:
    """A column with its name in JSON and CSV, its heading, and the kind of its values."""

    name: str
    heading: str
    unit: Unit

    @property
    def is_text(self) -> bool:
        """Whether the column is left-aligned."""
        return self.unit in {Unit.TEXT, Unit.NAME, Unit.TEXTS, Unit.TIME, Unit.FLAG}


@dataclass(slots=True)
class ReportTable:
    """A table.

    Attributes:
        columns: The columns.
        rows: A value or ``None`` for each column.
        note: A sentence below the table.
    """

    columns: Sequence[ReportColumn]
    rows: Sequence[Sequence[Any]] = ()
    note: str = ""

    def cells(self) -> list[list[str]]:
        """Return the rows as formatted text."""
        return [
            [format_value(value, column.unit) for value, column in zip(row, self.columns, strict=True)]
            for row in self.rows
        ]

    def without(self, *names: str) -> ReportTable:
        """Return the table without some columns."""
        indexes = [index for index, column in enumerate(self.columns) if column.name not in names]
        rows = [[row[index] for index in indexes] for row in self.rows]
        return ReportTable([self.columns[index] for index in indexes], rows, self.note)

    def first(self, max_rows: int, rest: str) -> ReportTable:
        """Return the first rows. The note has the number of omitted rows and ``rest``, the command that lists them."""
        if len(self.rows) <= max_rows:
            return self
        return ReportTable(self.columns, self.rows[:max_rows], f"{len(self.rows) - max_rows:,} others: {rest}")


def as_text(table: ReportTable) -> str:
    """Return aligned columns for a terminal."""
    head = [column.heading for column in table.columns]
    lines = [head, *table.cells()]
    widths = [max(len(line[index]) for line in lines) for index in range(len(head))]
    padded = (
        "  ".join(
            cell.ljust(width) if column.is_text else cell.rjust(width)
            for cell, width, column in zip(line, widths, table.columns, strict=True)
        ).rstrip()
        for line in lines
    )
    return "\n".join([*padded, *([f"\n{table.note}"] if table.note else [])]) + "\n"


def as_markdown(table: ReportTable) -> str:
    """Return a Markdown table, in which untrusted text cannot leave its cell."""
    heads = [column.heading for column in table.columns]
    rule = ["---" if column.is_text else "---:" for column in table.columns]
    lines = [heads, rule, *([markdown_text(cell) for cell in row] for row in table.cells())]
    note = f"\n{table.note}\n" if table.note else ""
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n" + note


_MARKUP: Final = re.compile(
    r"[\\`*\[\]<>|~&$@#]"  # code, emphasis, links, HTML, cells, formulas, mentions
    r"|(?<![^\W_])_|_(?![^\W_])"  # emphasis, but not within a name
    r"|:(?=//)|(?<=www)\."  # automatic links
    r"|^[+=-](?=[\s=-]|$)|(?<=^\d)[.)](?=\s|$)"  # lists, headings, rules
)


def markdown_text(text: str) -> str:
    """Return text that Markdown shows literally on one line: without links, HTML or cells."""
    # Entities work in every renderer, even where backslashes do not (| in tables on GitHub).
    return _MARKUP.sub(lambda match: f"&#{ord(match[0])};", one_line(text))


def as_json(table: ReportTable) -> str:
    """Return a JSON list of objects, with times in ISO 8601 and money as text."""
    names = [column.name for column in table.columns]
    rows = [dict(zip(names, map(_plain, row), strict=True)) for row in table.rows]
    return json_text(rows) + "\n"


def as_csv(table: ReportTable) -> str:
    """Return CSV with a header.

    Text that a spreadsheet would read as a formula gets a leading ``'``; control characters are escaped: ``\\x1b``.
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([column.name for column in table.columns])
    writer.writerows([_csv_cell(_plain(value)) for value in row] for row in table.rows)
    return out.getvalue()


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat()
    return str(value) if isinstance(value, Decimal) else value


def _csv_cell(value: Any) -> Any:
    text = " ".join(map(str, value)) if isinstance(value, list | tuple) else value
    if not isinstance(text, str):
        return text
    # Spreadsheets ignore what precedes the sign, and read full-width signs, too.
    is_formula = (
        text[:1] in {"\t", "\r"} or unicodedata.normalize("NFKC", CONTROL.sub("", text[:200])).lstrip()[:1] in _SIGNS
    )
    return f"'{one_line(text)}" if is_formula else one_line(text)


_SIGNS: Final = frozenset("=+-@")
