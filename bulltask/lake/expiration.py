"""Remove old days from tables; needs no JVM."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date

from bulltask.errors import ConfigError, did_you_mean
from bulltask.lake.atomic_swap import AtomicSwap, OnStep, ignore_step
from bulltask.lake.layout import Layout
from bulltask.lake.tables import TABLES, Table

__all__ = ["ExpiredDay", "expire", "tables_named"]


@dataclass(frozen=True, slots=True)
class ExpiredDay:
    """A day of a table that was removed, or would be.

    Attributes:
        table: the table's full name.
        day: the day, ``dt``.
        files: the number of its files.
        size: their bytes.
    """

    table: str
    day: date
    files: int
    size: int


def tables_named(names: Iterable[str]) -> list[Table]:
    """Return tables by their full names, or all of a layer by its name.

    Raises:
        ConfigError: there is no table or layer with that name.
    """
    found: dict[str, Table] = {}
    for name in names:
        some = {full: table for full, table in TABLES.items() if name in {full, table.layer}}
        if not some:
            known = [*TABLES, *dict.fromkeys(table.layer for table in TABLES.values())]
            raise ConfigError(f"unknown table {name!r}{did_you_mean(name, known)}")
        found |= some
    return list(found.values())


def expire(
    layout: Layout, tables: Sequence[Table], *, before: date, dry_run: bool = True, on_step: OnStep = ignore_step
) -> list[ExpiredDay]:
    """Remove old days from tables. What the pipeline itself needs (its checkpoint, open jobs) is always kept.

    Args:
        layout: the lake.
        tables: the tables.
        before: remove days before this one.
        dry_run: only return the days.
        on_step: for tests, as in :class:`~bulltask.lake.atomic_swap.AtomicSwap`.

    Raises:
        LakeError: there is no lake.
    """
    layout.check()
    found = [
        (layout.day(table, day), _measured(layout, table, day))
        for table in tables
        for day in layout.days(table)
        if day < before
    ]
    if not dry_run and found:
        with AtomicSwap(layout, on_step) as swaps:
            for directory, _ in found:
                swaps.swap(None, None, [directory])
    return [one for _, one in found]


def _measured(layout: Layout, table: Table, day: date) -> ExpiredDay:
    sizes = [file.stat().st_size for file in layout.day(table, day).rglob("[!_.]*.parquet")]
    return ExpiredDay(table.full_name, day, len(sizes), sum(sizes))
