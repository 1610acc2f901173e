"""List a table's files at one moment, even while directories are being swapped.

A swap (:mod:`bulltask.lake.atomic_swap`) writes an intent file, moves the old directories away and then moves the new
directory to its final path. While the intent exists, the new directory is part of the table, at either path.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from bulltask.lake.layout import Layout, list_directories, partition_value
from bulltask.lake.tables import Table

__all__ = ["list_files"]

_MAX_RETRIES = 50
"""How many times a day is listed again because directories were swapped."""


@dataclass(frozen=True, slots=True)
class _Intent:
    """A swap whose new directory does not have its final path yet.

    Attributes:
        new: The current path of the new directory; ``None`` if the old directories are only removed.
        target: Its final path.
        old: The directories that are removed.
    """

    new: Path | None
    target: Path | None
    old: frozenset[Path]


def list_files(layout: Layout, table: Table, day: date, queue: str | None = None) -> list[tuple[Path, Path]]:
    """Return the files of a table's day, each with the directory whose path contains its partitions.

    Args:
        layout: The lake.
        table: The table.
        day: The day.
        queue: Only files of this queue.

    Raises:
        FileNotFoundError: Directories were swapped each time they were listed.
    """
    for _ in range(_MAX_RETRIES):
        before, intents = _swap_version(layout), _intents(layout)
        files = _list_day(layout, table, day, queue, intents)
        changed = any(intent.new is not None and not intent.new.exists() for intent in intents)
        if not changed and _swap_version(layout) == before:
            return files
    raise FileNotFoundError(f"{layout.day(table, day)}: its directories are being swapped too often")


def _swap_version(layout: Layout) -> int:
    """Return a value that changes whenever a swap begins or ends."""
    try:
        return layout.internal("intents").stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _intents(layout: Layout) -> list[_Intent]:
    intents = []
    for path in layout.internal("intents").glob("*.json"):
        try:
            stored = json.loads(path.read_text())
        except FileNotFoundError:
            continue  # completed: _swap_version has changed
        new, target = (None if stored[name] is None else layout.root / stored[name] for name in ("new", "target"))
        if new is None or new.exists():  # else it has its final path, which can be the path of an old directory
            intents.append(_Intent(new, target, frozenset(layout.root / old for old in stored["old"])))
    return intents


def _list_day(
    layout: Layout, table: Table, day: date, queue: str | None, intents: list[_Intent]
) -> list[tuple[Path, Path]]:
    root, day_directory = layout.table(table), layout.day(table, day)
    removed = frozenset[Path]().union(*(intent.old for intent in intents))
    roots = [(day_directory, day_directory)]
    roots += [(intent.new, intent.target) for intent in intents if intent.new and intent.target]
    files: list[tuple[Path, Path]] = []
    for directory, target in roots:
        if target != day_directory and day_directory not in target.parents:
            continue
        names = target.relative_to(root).parts
        if "queue" in table.partitions[: len(names)] and queue not in {None, partition_value(names[1])}:
            continue
        skipped = removed if directory == day_directory else ()
        files += _walk(directory, target, table.partitions[len(names) :], queue, skipped)
    return files


def _walk(
    directory: Path, target: Path, partitions: tuple[str, ...], queue: str | None, removed: Collection[Path]
) -> Iterator[tuple[Path, Path]]:
    """Yield the files below a directory as if the directory were at ``target``."""
    if directory in removed:
        return
    if not partitions:
        if directory.is_dir():
            file_names = sorted(path.name for path in directory.iterdir() if path.suffix == ".parquet")
            yield from ((directory / name, target) for name in file_names if name[0] not in "_.")
        return
    for subdirectory in list_directories(directory):
        if partitions[0] != "queue" or queue in {None, partition_value(subdirectory.name)}:
            yield from _walk(subdirectory, target / subdirectory.name, partitions[1:], queue, removed)
