"""Replace directories of files atomically: a ``kill -9`` at any moment neither loses nor duplicates a row.

A file system can rename only one directory at a time. Therefore, the new files are written where no reader looks; an
intent file describes the swap; the old directories are moved away, the new one is moved to its final path, and the
intent is removed. A process that is killed in between leaves the intent, and the next writer completes it.

Between the two moves, a reader can miss the rows of that partition. After a kill, this lasts until the next command
that writes. Readers that cannot retry a read use a :func:`hold_swaps` block; swaps wait until it ends.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final, Self

import uuid_utils

from bulltask.lake.layout import Layout
from bulltask.lake.lock import check_platform

if sys.platform != "win32":
    import fcntl

__all__ = ["STEPS", "AtomicSwap", "OnStep", "finish_intents", "hold_swaps", "ignore_step"]

STEPS: Final = ("files-written", "intent-written", "moved-away", "in-place", "cleared")
"""The steps of a swap, in order. Tests kill the process after each step."""

OnStep = Callable[[str], None]


def ignore_step(_: str) -> None:
    """Do nothing; only tests act on steps."""


class AtomicSwap:
    """The swaps of one command: a context manager that first completes the swaps of killed processes.

    Args:
        layout: The lake.
        on_step: Called with each of :data:`STEPS`.
    """

    def __init__(self, layout: Layout, on_step: OnStep = ignore_step) -> None:
        self._layout = layout
        self._on_step = on_step
        self._name = uuid_utils.uuid7().hex
        self._count = 0
        self._lock_file: IO[bytes] | None = None

    def __enter__(self) -> Self:
        check_platform()
        finish_intents(self._layout)
        self._temporary.parent.mkdir(parents=True, exist_ok=True)
        # The lock shows that the process which owns the temporary files is alive.
        self._lock_file = _lock_path(self._temporary).open("wb")
        fcntl.flock(self._lock_file, fcntl.LOCK_EX)
        self._temporary.mkdir()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._lock_file is not None
        shutil.rmtree(self._temporary, ignore_errors=True)
        _lock_path(self._temporary).unlink(missing_ok=True)
        self._lock_file.close()

    def new_directory(self) -> Path:
        """Return a path for new files in the lake's file system. It does not exist yet."""
        self._count += 1
        return self._temporary / str(self._count)

    def swap(self, new: Path | None, target: Path | None, old: Sequence[Path]) -> None:
        """Replace old directories with a new one.

        Args:
            new: A path from :meth:`new_directory`, completely written; ``None`` to only remove the old directories.
            target: The new directory's final path; it must not exist unless it is one of the old directories.
            old: The directories to remove.
        """
        self._on_step("files-written")
        self._count += 1
        name = f"{self._name}-{self._count}"
        root = self._layout.root
        intent = {
            "new": None if new is None else str(new.relative_to(root)),
            "target": None if target is None else str(target.relative_to(root)),
            "old": [str(path.relative_to(root)) for path in old],
        }
        with _exclusive(self._layout):
            path = self._layout.internal("intents", f"{name}.json")
            _write_atomically(path, json.dumps(intent))
            self._on_step("intent-written")
            _finish(self._layout, path, self._on_step)
            self._on_step("cleared")

    @property
    def _temporary(self) -> Path:
        return self._layout.internal("new", self._name)


def finish_intents(layout: Layout) -> int:
    """Complete the swaps of killed commands and remove their unfinished files; every writer does this first.

    Returns:
        The number of completed swaps.
    """
    if not _intents(layout) and not _all_temporary(layout):
        return 0
    check_platform()
    with _exclusive(layout):
        intents = _intents(layout)
        for intent in intents:
            _finish(layout, intent, ignore_step)
        for temporary in _all_temporary(layout):
            _remove_if_abandoned(temporary)
    return len(intents)


def _intents(layout: Layout) -> list[Path]:
    return sorted(layout.internal("intents").glob("*.json"))


def _all_temporary(layout: Layout) -> list[Path]:
    return sorted(temporary for temporary in layout.internal("new").glob("*") if temporary.is_dir())


def _finish(layout: Layout, path: Path, on_step: OnStep) -> None:
    """Carry out an intent, or the rest of it."""
    intent = json.loads(path.read_text())
    trash = layout.internal("trash", path.stem)
    new = None if intent["new"] is None else layout.root / intent["new"]
    # If the new directory has already been moved, it may have the path of an old one, which must not be removed.
    if new is None or new.exists():
        trash.mkdir(parents=True, exist_ok=True)
        for number, name in enumerate(intent["old"]):
            if (old := layout.root / name).exists():
                old.rename(trash / str(number))
        on_step("moved-away")
        if new is not None:
            target = layout.root / intent["target"]
            target.parent.mkdir(parents=True, exist_ok=True)
            new.rename(target)
    on_step("in-place")
    shutil.rmtree(trash, ignore_errors=True)
    path.unlink()


def _remove_if_abandoned(temporary: Path) -> None:
    """Remove the new files of a command that died before it wrote an intent."""
    with _lock_path(temporary).open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return  # its process is alive
        shutil.rmtree(temporary, ignore_errors=True)
        _lock_path(temporary).unlink(missing_ok=True)


def _lock_path(temporary: Path) -> Path:
    return temporary.with_name(temporary.name + ".lock")


@contextmanager
def hold_swaps(layout: Layout) -> Iterator[None]:
    """Let no process swap directories while a ``with`` block reads them.

    A swap inside the block would wait forever, because it waits for the end of the block.
    """
    if sys.platform == "win32":  # no process there swaps, and others would not see its lock
        yield
        return
    while True:
        with _file_lock(layout, fcntl.LOCK_SH):
            if not _intents(layout):
                yield
                return
        finish_intents(layout)


@contextmanager
def _exclusive(layout: Layout) -> Iterator[None]:
    """Let one process at a time move directories."""
    with _file_lock(layout, fcntl.LOCK_EX):
        yield


@contextmanager
def _file_lock(layout: Layout, operation: int) -> Iterator[None]:
    """Hold a file lock, which the kernel releases if the process dies."""
    directory = layout.internal("intents")
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / ".lock").open("ab") as file:
        fcntl.flock(file, operation)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # a process that was forked in the meantime has the file open, too


def _write_atomically(path: Path, text: str) -> None:
    """Write a file atomically: readers see all of it, or no file."""
    temporary = path.with_suffix(".temporary")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
