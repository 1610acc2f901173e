"""Replace directories of files atomically: a ``kill -9`` at any moment neither loses nor duplicates a row.

A file system renames one directory at a time. So the new files are written where no reader looks; an intent file
describes the swap; the old directories are moved away, the new one is moved to its place, and the intent is removed. A
process that is killed in between leaves the intent, and the next writer completes it.

Between the two moves a reader can miss the rows of that partition; after a kill, until the next command that writes.
Readers that cannot read again use a :func:`hold_swaps` block, for which swaps wait.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final, Self

import uuid_utils

from bulltask.lake.layout import Layout

__all__ = ["STEPS", "AtomicSwap", "OnStep", "finish_intents", "hold_swaps", "ignore_step"]

STEPS: Final = ("written", "intended", "moved-away", "in-place", "cleared")
"""The steps of a swap, in order; tests kill the process after each of them."""

OnStep = Callable[[str], None]


def ignore_step(_: str) -> None:
    """Do nothing; only tests act on steps."""


class AtomicSwap:
    """The swaps of one command; a context manager, which first completes the swaps of killed processes.

    Args:
        layout: the lake.
        on_step: called with each of :data:`STEPS`.
    """

    def __init__(self, layout: Layout, on_step: OnStep = ignore_step) -> None:
        self._layout, self._reached = layout, on_step
        self._name, self._count = uuid_utils.uuid7().hex, 0
        self._held: IO[bytes] | None = None

    def __enter__(self) -> Self:
        finish_intents(self._layout)
        self._drafts.parent.mkdir(parents=True, exist_ok=True)
        # The lock shows that the process which owns the drafts is alive.
        self._held = _lock_of(self._drafts).open("wb")
        fcntl.flock(self._held, fcntl.LOCK_EX)
        self._drafts.mkdir()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._held is not None
        shutil.rmtree(self._drafts, ignore_errors=True)
        _lock_of(self._drafts).unlink(missing_ok=True)
        self._held.close()

    def new_directory(self) -> Path:
        """Return a path for new files in the lake's file system; it does not exist yet."""
        self._count += 1
        return self._drafts / str(self._count)

    def swap(self, new: Path | None, place: Path | None, old: Sequence[Path]) -> None:
        """Replace old directories by a new one.

        Args:
            new: a path from :meth:`new_directory`, completely written; ``None`` to only remove the old directories.
            place: the new directory's place; it must not exist unless it is one of the old directories.
            old: the directories to remove.
        """
        self._reached("written")
        self._count += 1
        name = f"{self._name}-{self._count}"
        root = self._layout.root
        intent = {
            "new": None if new is None else str(new.relative_to(root)),
            "place": None if place is None else str(place.relative_to(root)),
            "old": [str(one.relative_to(root)) for one in old],
        }
        with _exclusive(self._layout):
            path = self._layout.own("intents", f"{name}.json")
            _write_atomically(path, json.dumps(intent))
            self._reached("intended")
            _finish(self._layout, path, self._reached)
            self._reached("cleared")

    @property
    def _drafts(self) -> Path:
        return self._layout.own("new", self._name)


def finish_intents(layout: Layout) -> int:
    """Complete the swaps of killed commands and remove their unfinished files; every writer does this first.

    Returns:
        The number of completed swaps.
    """
    if not _intents(layout) and not _all_drafts(layout):
        return 0
    with _exclusive(layout):
        intents = _intents(layout)
        for intent in intents:
            _finish(layout, intent, ignore_step)
        for drafts in _all_drafts(layout):
            _clear_if_abandoned(drafts)
    return len(intents)


def _intents(layout: Layout) -> list[Path]:
    return sorted(layout.own("intents").glob("*.json"))


def _all_drafts(layout: Layout) -> list[Path]:
    return sorted(drafts for drafts in layout.own("new").glob("*") if drafts.is_dir())


def _finish(layout: Layout, path: Path, on_step: OnStep) -> None:
    """Carry out an intent, or the rest of it."""
    intent = json.loads(path.read_text())
    trash = layout.own("trash", path.stem)
    new = None if intent["new"] is None else layout.root / intent["new"]
    # If the new directory has already been moved, it may be at the place of an old one, which must not be removed.
    if new is None or new.exists():
        trash.mkdir(parents=True, exist_ok=True)
        for number, one in enumerate(intent["old"]):
            if (old := layout.root / one).exists():
                old.rename(trash / str(number))
        on_step("moved-away")
        if new is not None:
            place = layout.root / intent["place"]
            place.parent.mkdir(parents=True, exist_ok=True)
            new.rename(place)
    on_step("in-place")
    shutil.rmtree(trash, ignore_errors=True)
    path.unlink()


def _clear_if_abandoned(drafts: Path) -> None:
    """Remove the new files of a command that died before it wrote an intent."""
    with _lock_of(drafts).open("ab") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return  # its process is alive
        shutil.rmtree(drafts, ignore_errors=True)
        _lock_of(drafts).unlink(missing_ok=True)


def _lock_of(drafts: Path) -> Path:
    return drafts.with_name(drafts.name + ".lock")


@contextmanager
def hold_swaps(layout: Layout) -> Iterator[None]:
    """Hold back swaps while a block reads directories.

    Do not swap inside the block: it would wait for itself.
    """
    while True:
        with _locked(layout, fcntl.LOCK_SH):
            if not _intents(layout):
                yield
                return
        finish_intents(layout)


@contextmanager
def _exclusive(layout: Layout) -> Iterator[None]:
    """Let one process at a time move directories."""
    with _locked(layout, fcntl.LOCK_EX):
        yield


@contextmanager
def _locked(layout: Layout, how: int) -> Iterator[None]:
    """Hold a file lock, which the kernel releases if the process dies."""
    place = layout.own("intents")
    place.mkdir(parents=True, exist_ok=True)
    with (place / ".lock").open("ab") as held:
        fcntl.flock(held, how)
        yield


def _write_atomically(path: Path, text: str) -> None:
    """Write a file that readers see whole or not at all."""
    temporary = path.with_suffix(".temporary")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
