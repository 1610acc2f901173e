"""Generate the tables of options in ``how-to/spark.md`` and of columns in ``reference/lake.md``.

Run this file to update the pages; ``tests/unit/test_spark_docs.py`` fails if they are out of date.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from bulltask.lake.tables import TABLES, Table
from bulltask.spark.source.options import (
    REQUIRED,
    CountsOptions,
    EventsOptions,
    JobsOptions,
    Option,
    SourceOptions,
    StreamOptions,
    WriteOptions,
    options_of,
)

HERE = Path(__file__).parent
OPERATIONS: Mapping[type[SourceOptions], str] = {
    JobsOptions: "jobs",
    EventsOptions: "events",
    CountsOptions: "counts",
    StreamOptions: "streaming",
    WriteOptions: "write",
}
"""The text in the column "used by"."""


def pages() -> Mapping[Path, str]:
    """Return the pages with updated tables."""
    generated = {"how-to/spark.md": {"options": options()}, "reference/lake.md": {"tables": tables()}}
    return {HERE / name: _replace_tables(HERE / name, parts) for name, parts in generated.items()}


def options() -> str:
    """Return the table of the source's options."""
    lines = ["| option | used by | default | meaning |", "|---|---|---|---|"]
    rows = dict.fromkeys(row for kind in OPERATIONS for row in options_of(kind).values())
    return "\n".join([*lines, *map(_option, rows)]) + "\n"


def tables() -> str:
    """Return a section for each table of the lake."""
    return "\n".join(line for table in TABLES.values() for line in _section(table))


def _option(row: Option) -> str:
    words = [word for kind, word in OPERATIONS.items() if row in options_of(kind).values()]
    operations = "all" if len(words) == len(OPERATIONS) else ", ".join(words)
    meaning, _, computed = row.doc.partition("; default: ")
    if computed:
        default = computed
    elif row.default is REQUIRED:
        default = "required"
    elif row.default is None:
        default = "none"
    else:
        default = f"`{str(row.default).lower() if isinstance(row.default, bool) else row.default}`"
    return f"| `{row.name}` | {operations} | {default} | {meaning} |"


def _section(table: Table) -> Iterator[str]:
    yield f"### {table.full_name}\n"
    yield f"**Row:** {table.doc}.\n"
    yield f"**Key:** {_names(table.key)}.\n"
    yield "| column | type | meaning |"
    yield "|---|---|---|"
    for column in table.columns:
        yield f"| `{column.name}` | {column.kind} | {column.doc.replace('|', '&#124;')} |"
    yield ""


def _names(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _replace_tables(page: Path, parts: Mapping[str, str]) -> str:
    text = page.read_text()
    for name, part in parts.items():
        begin, end = f"<!-- {name}: written by docs/spark_tables.py -->\n", f"<!-- /{name} -->"
        before, marker, rest = text.partition(begin)
        assert marker, f"{page.name} has no line {begin!r}"
        text = f"{before}{begin}\n{part}\n{end}{rest.partition(end)[2]}"
    return text


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
