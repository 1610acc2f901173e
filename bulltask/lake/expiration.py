"""Remove old days from tables; does not require a JVM."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date

from bulltask.jobs.errors import ConfigError, did_you_mean
from bulltask.lake.atomic_swap import AtomicSwap, OnStep, ignore_step
from bulltask.lake.layout import Layout
from bulltask.lake.tables import TABLES, Table

__all__ = ["ExpiredDay", "expire", "find_tables"]


@dataclass(frozen=True, slots=True)
class ExpiredDay:
    """A day of a table that was removed, or would be.

    Attributes:
        table: The table's full name.
        day: The day, ``dt``.
        files: The number of files.
        size: The size of the files in bytes.
    """

    table: str
    day: date
    files: int
    size: int


def find_tables(names: Iterable[str]) -> list[Table]:
    """Return tables by their full names, and all tables of a layer by the layer's name.

    Raises:
        ConfigError: There is no table or layer with that name.
    """
    tables: dict[str, Table] = {}
    for name in names:
        matching = {full: table for full, table in TABLES.items() if name in {full, table.layer}}
        if not matching:
            known = [*TABLES, *dict.fromkeys(table.layer for table in TABLES.values())]
            raise ConfigError(f"unknown table {name!r}{did_you_mean(name, known)}")
        tables |= matching
    return list(tables.values())


def expire(
    layout: Layout, tables: Sequence[Table], *, before: date, dry_run: bool = True, on_step: OnStep = ignore_step
) -> list[ExpiredDay]:
    """Remove old days from tables. The pipeline's own state (checkpoint, open jobs) is always kept.

    Args:
        layout: The lake.
        tables: The tables.
        before: Remove days before this one.
        dry_run: Remove nothing; only return the days.
        on_step: For tests, as in :class:`~bulltask.lake.atomic_swap.AtomicSwap`.

    Raises:
        LakeError: There is no lake.
    """
    layout.check()
    expired = [
        (layout.day(table, day), _measure(layout, table, day))
        for table in tables
        for day in layout.days(table)
        if day < before
    ]
    if not dry_run and expired:
        with AtomicSwap(layout, on_step) as swaps:
            for directory, _ in expired:
                swaps.swap(None, None, [directory])
    return [day for _, day in expired]


def _measure(layout: Layout, table: Table, day: date) -> ExpiredDay:
    sizes = [file.stat().st_size for file in layout.day(table, day).rglob("[!_.]*.parquet")]
    return ExpiredDay(table.full_name, day, len(sizes), sum(sizes))
