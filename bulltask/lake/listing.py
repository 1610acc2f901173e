"""List a table's files at one moment, also while directories are being swapped.

A swap (:mod:`bulltask.lake.atomic_swap`) writes an intent file, moves the old directories away and then the new one to
its place. As long as the intent exists, the new directory counts, wherever it is.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from bulltask.lake.layout import Layout, listed, partition_value
from bulltask.lake.tables import Table

__all__ = ["listed_files"]

_LOOKS = 50
"""How often a day is listed again because directories were swapped."""


@dataclass(frozen=True, slots=True)
class _Intent:
    """A swap whose new directory is not in its place yet.

    Attributes:
        new: the current path of the new directory; ``None`` if the old ones are only removed.
        place: its future path.
        old: the directories that are removed.
    """

    new: Path | None
    place: Path | None
    old: frozenset[Path]


def listed_files(layout: Layout, table: Table, day: date, queue: str | None = None) -> list[tuple[Path, Path]]:
    """Return the files of a table's day, each with the directory whose path has its partitions.

    Args:
        layout: the lake.
        table: the table.
        day: the day.
        queue: only files of this queue.

    Raises:
        FileNotFoundError: directories were swapped each time they were listed.
    """
    for _ in range(_LOOKS):
        before, intents = _moment(layout), _intents(layout)
        found = _listed(layout, table, day, queue, intents)
        moved = any(one.new is not None and not one.new.exists() for one in intents)
        if not moved and _moment(layout) == before:
            return found
    raise FileNotFoundError(f"{layout.day(table, day)}: its directories are swapped too often")


def _moment(layout: Layout) -> int:
    """Return a value that changes whenever a swap begins or ends."""
    try:
        return layout.own("intents").stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _intents(layout: Layout) -> list[_Intent]:
    found = []
    for path in layout.own("intents").glob("*.json"):
        try:
            said = json.loads(path.read_text())
        except FileNotFoundError:
            continue  # completed: the value of _moment has changed
        new, place = (None if said[name] is None else layout.root / said[name] for name in ("new", "place"))
        if new is None or new.exists():  # else it is in its place, which can be that of an old one
            found.append(_Intent(new, place, frozenset(layout.root / one for one in said["old"])))
    return found


def _listed(
    layout: Layout, table: Table, day: date, queue: str | None, intents: list[_Intent]
) -> list[tuple[Path, Path]]:
    root, top = layout.table(table), layout.day(table, day)
    gone = frozenset[Path]().union(*(one.old for one in intents))
    roots = [(top, top)] + [(one.new, one.place) for one in intents if one.new and one.place]
    found: list[tuple[Path, Path]] = []
    for directory, place in roots:
        if place != top and top not in place.parents:
            continue
        names = place.relative_to(root).parts
        if "queue" in table.partitions[: len(names)] and queue not in {None, partition_value(names[1])}:
            continue
        found += _walk(directory, place, table.partitions[len(names) :], queue, gone if directory == top else ())
    return found


def _walk(
    directory: Path, place: Path, partitions: tuple[str, ...], queue: str | None, gone: Collection[Path]
) -> Iterator[tuple[Path, Path]]:
    """Yield the files below a directory, which counts as if it were at ``place``."""
    if directory in gone:
        return
    if not partitions:
        if directory.is_dir():
            names = sorted(path.name for path in directory.iterdir() if path.suffix == ".parquet")
            yield from ((directory / name, place) for name in names if name[0] not in "_.")
        return
    for found in listed(directory):
        if partitions[0] != "queue" or queue in {None, partition_value(found.name)}:
            yield from _walk(found, place / found.name, partitions[1:], queue, gone)
