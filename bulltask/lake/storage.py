"""The storage of a lake: its directories, its pipeline's lock, atomic swaps, and the ledger of batches."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import date
from itertools import islice
from pathlib import Path
from typing import IO, Any, Final, Self
from urllib.parse import unquote

import uuid_utils

from bulltask.jobs.errors import ConfigError, DecodeError, LakeError, LakeInUseError, did_you_mean
from bulltask.lake.tables import TABLES, Table

if sys.platform != "win32":
    import fcntl

__all__ = [
    "STEPS",
    "AtomicSwap",
    "BatchRecord",
    "ExpiredDay",
    "Layout",
    "Ledger",
    "OnStep",
    "QueueRecord",
    "RunLock",
    "batch_ingest_id",
    "batch_of",
    "check_local",
    "expire",
    "find_tables",
    "finish_intents",
    "hold_swaps",
    "ignore_step",
    "list_directories",
    "list_files",
    "partition_name",
    "partition_value",
    "writer_pid",
]


# The directories of a lake.
#
# ::
#
#     LAKE/bronze/events/dt=2026-11-22/queue=emails/ingest_id=3f0c2a91-00000017/part-*.parquet
#     LAKE/silver/jobs/dt=…/queue=…/ingest_id=…/
#     LAKE/gold/task_minute/dt=…/
#     LAKE/_pipeline/                    the pipeline's state; readers skip names that begin with _ or .
#
# ``ingest_id`` identifies the write (a batch, or one run of a command) that created the files, so that a rerun write
# can remove the files of an earlier run.


_INTERNAL: Final = "_pipeline"

_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # a Path of s3a://bucket is s3a:/bucket

_ESCAPED: Final = {code: f"%{code:02X}" for code in (*range(1, 32), *map(ord, "\"#%'*/:=?\\{[]^"), 127)}
"""The characters that Spark escapes in the names of directories."""


def batch_ingest_id(query_id: str, batch_id: int) -> str:
    """Return the ``ingest_id`` of a batch. A batch that is run again has the same id.

    It begins with Spark's id of the query, because a new checkpoint has a new one, and numbers its batches from 0
    again.
    """
    return f"{query_id.replace('-', '')[:8]}-{batch_id:08d}"


def batch_of(ingest_id: str) -> tuple[str, int]:
    """Return the parts of an ``ingest_id``: the beginning of the query's id, and the number of the batch."""
    query, _, number = ingest_id.rpartition("-")
    return query, int(number)


def check_local(root: str | Path) -> None:
    """Raise ``ConfigError`` if a lake's directory is not in a file system, but in an object store."""
    if _URL.match(str(root)):
        raise ConfigError(
            f"{root} is a URL, but a lake must be a directory in a file system: object stores are not supported yet. "
            "Use a directory that the driver and all executors share"
        )


class Layout:
    """The paths of a lake, whose directory has the same path for all readers and writers."""

    def __init__(self, root: str | Path) -> None:
        check_local(root)
        self.root = Path(root)

    def check(self) -> None:
        """Raise ``LakeError`` if there is no lake."""
        if not any((self.root / name).is_dir() for name in ("bronze", "silver", "gold", _INTERNAL)):
            raise LakeError(
                f"there is no lake in {self.root} (no bronze/ or silver/): use the --lake of 'bulltask pipeline run', "
                "which creates the tables"
            )

    def table(self, table: Table) -> Path:
        """Return the directory of a table; it need not exist."""
        return self.root / table.layer / table.name

    def internal(self, *parts: str) -> Path:
        """Return a path in the pipeline's internal directory, which readers of the tables skip."""
        return self.root.joinpath(_INTERNAL, *parts)

    @property
    def checkpoint(self) -> Path:
        """The directory with Spark's checkpoint of the event stream."""
        return self.internal("checkpoint")

    @property
    def open_jobs(self) -> Path:
        """The directory with the events of open jobs, for the next batch."""
        return self.internal("open_jobs")

    def days(self, table: Table) -> list[date]:
        """Return the days that a table has directories for, in order."""
        names = (path.name for path in list_directories(self.table(table)) if path.name.startswith("dt="))
        return sorted(date.fromisoformat(name.removeprefix("dt=")) for name in names)

    def day(self, table: Table, day: date) -> Path:
        """Return the directory of a table's day."""
        return self.table(table) / f"dt={day.isoformat()}"

    def written_directories(self, table: Table, ingest_id: str) -> Iterator[Path]:
        """Yield a table's directories that the write with this ``ingest_id`` has created."""
        for day in list_directories(self.table(table)):
            for queue in list_directories(day):
                if (directory := queue / f"ingest_id={ingest_id}").is_dir():
                    yield directory

    def remove(self, ingest_id: str, tables: Iterable[Table] | None = None) -> None:
        """Remove the files of a write, before it is rerun, from these or all tables of bronze and silver."""
        for table in TABLES.values() if tables is None else tables:
            if "ingest_id" in table.partitions:
                for path in self.written_directories(table, ingest_id):
                    shutil.rmtree(path)


def partition_name(column: str, value: str) -> str:
    """Return the name of a partition's directory as Spark writes it: ``queue=%7Bmail}`` for the queue ``{mail}``."""
    return f"{column}={value.translate(_ESCAPED)}"


def partition_value(directory: str) -> str:
    """Return the value in the name of a partition's directory: ``{mail}`` for ``queue=%7Bmail}``."""
    return unquote(directory.partition("=")[2])


def list_directories(path: Path) -> list[Path]:
    """Return the data directories in a directory, in order; an empty list if the directory does not exist."""
    if not path.is_dir():
        return []
    return sorted(entry for entry in path.iterdir() if entry.is_dir() and entry.name[0] not in "_.")


_LOCK: Final = "lock"


def check_platform() -> None:
    """Raise ``ConfigError`` on Windows, which lacks the locks with which a process writes to a lake."""
    if sys.platform == "win32":
        raise ConfigError("on Windows, bulltask cannot write to a lake: run this command in WSL 2 or a Linux container")


class RunLock:
    """The lock of the pipeline that is writing to a lake, acquired by the constructor. A ``kill -9`` releases it, too.

    Raises:
        LakeInUseError: Another pipeline is already writing to the lake.
    """

    def __init__(self, layout: Layout) -> None:
        check_platform()
        path = layout.internal(_LOCK)
        self._releasing = threading.RLock()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            pid = os.read(self._file, 20).decode("ascii", "replace").strip()
            os.close(self._file)
            raise LakeInUseError(
                f"process {pid} is already writing to the lake {layout.root}: stop it, or choose another directory"
            ) from exc
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Release the lock; further calls only wait until it is released."""
        with self._releasing:
            file = self._file
            self._file = -1
            if file >= 0:
                with suppress(OSError):
                    # Closing is not enough: a process forked in the meantime would keep the lock until it exits.
                    fcntl.flock(file, fcntl.LOCK_UN)
                    os.close(file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def writer_pid(layout: Layout) -> int | None:
    """Return the id of the process on this machine whose pipeline is writing to a lake; ``None`` if there is none."""
    if sys.platform == "win32":
        return None
    try:
        file = os.open(layout.internal(_LOCK), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        text = os.read(file, 20).decode("ascii", "replace").strip()
        return int(text) if text.isdecimal() else None
    else:
        return None
    finally:
        os.close(file)


# List a table's files at one moment, even while directories are being swapped.
#
# A swap (:mod:`bulltask.lake.storage`) writes an intent file, moves the old directories away and then moves the new
# directory to its final path. While the intent exists, the new directory is part of the table, at either path.


_MAX_RETRIES: Final = 50
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
    """Return the files of a table's day, each with the directory whose path contains its partitions."""
    for _ in range(_MAX_RETRIES):
        before, intents = _swap_version(layout), _read_intents(layout)
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


def _read_intents(layout: Layout) -> list[_Intent]:
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


# Replace directories of files atomically: a ``kill -9`` at any moment neither loses nor duplicates a row.
#
# A file system can rename only one directory at a time. Therefore, the new files are written where no reader looks; an
# intent file describes the swap; the old directories are moved away, the new one is moved to its final path, and the
# intent is removed. A process that is killed in between leaves the intent, and the next writer completes it.
#
# Between the two moves, a reader can miss the rows of that partition. After a kill, this lasts until the next command
# that writes. Readers that cannot retry a read use a :func:`hold_swaps` block; swaps wait until it ends.


STEPS: Final = ("files-written", "intent-written", "moved-away", "in-place", "cleared")
"""The steps of a swap, in order. Tests kill the process after each step."""

OnStep = Callable[[str], None]


def ignore_step(_: str) -> None:
    """Do nothing; only tests act on steps."""


class AtomicSwap:
    """The swaps of one command: a context manager that first completes the swaps of killed processes.

    Only tests pass ``on_step``: it is called after each of the :data:`STEPS`.
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
        """Remove the old directories, and move a new one, from :meth:`new_directory`, to ``target``.

        The new directory must be completely written. Without one, the old directories are only removed.
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
        with _file_lock(self._layout, fcntl.LOCK_EX):
            path = self._layout.internal("intents", f"{name}.json")
            _write_json(path, intent)
            self._on_step("intent-written")
            _finish(self._layout, path, self._on_step)
            self._on_step("cleared")

    @property
    def _temporary(self) -> Path:
        return self._layout.internal("new", self._name)


def finish_intents(layout: Layout) -> int:
    """Complete the swaps of killed commands, and remove their unfinished files; return the number of these swaps.

    Every writer does this first.
    """
    if not _intents(layout) and not _all_temporary(layout):
        return 0
    check_platform()
    with _file_lock(layout, fcntl.LOCK_EX):
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


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Replace a file atomically: readers see the old content or the new one, even after a crash."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".temporary")
    with temporary.open("w") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


# The ledger: the records of a lake's committed batches.
#
# ::
#
#     LAKE/_pipeline/head.json                   the last committed batch
#     LAKE/_pipeline/batches/<ingest_id>.json    the last committed batches
#     LAKE/_pipeline/publishing.json             the batch whose files are being moved into the tables
#
# A batch is committed when it is the head. Files of a batch that is being published but is not the head are removed
# before anything else is written. If Spark was killed before it recorded the end of a committed batch, it reruns the
# batch, which then does nothing: Redis may have trimmed its events by then. Files are replaced atomically.


_VERSION: Final = 1

_MAX_RECORDS: Final = 2_000
_CLEANUP_SLACK: Final = 200
"""Old records are removed when the maximum is exceeded by this number, not after each batch."""


@dataclass(frozen=True, slots=True)
class QueueRecord:
    """The result of a batch for one queue.

    Attributes:
        events: The number of rows added to ``bronze.events``.
        first: Id of the first of these events; ``None`` if there are no events.
        last: Id of the last of these events.
        lost: The number of lost events.
        gaps: The number of rows added to ``bronze.gaps``.
    """

    events: int = 0
    first: str | None = None
    last: str | None = None
    lost: int = 0
    gaps: int = 0


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """A committed batch.

    Attributes:
        ingest_id: The ``ingest_id`` of its files.
        previous: The ``ingest_id`` of the previous batch, whose open jobs it read; ``None`` for a lake's first batch.
        number: The number of the batch, from 1, across checkpoints.
        written_ms: When it was committed, by this machine's clock.
        newest_event_ms: Time of the newest event ever read; 0 before the first.
        queues: The result for each queue, by name without the hash tag.
        last_ids: Id of the last event ever read from each queue.
        lost: The number of events ever lost in each queue, as far as it is known.
        gaps: The number of rows ever added to ``bronze.gaps`` for each queue.
        attempts: The number of rows added to ``silver.attempts``.
        jobs: The number of rows added to ``silver.jobs``.
        open_jobs_ingest_id: The ``ingest_id`` of the batch that wrote the events of the jobs that are open after this
            batch; ``None`` if no jobs are open.
        open_job_events: The number of these events.
        oldest_open_event_ms: The time of the oldest of them; 0 if no jobs are open.
        steps_ms: How long each step took.
        queries: The last batch number of each Spark query that has written to the lake, by the beginning of its id.
    """

    ingest_id: str
    previous: str | None = None
    number: int = 1
    written_ms: int = 0
    newest_event_ms: int = 0
    queues: Mapping[str, QueueRecord] = field(default_factory=dict)
    last_ids: Mapping[str, str] = field(default_factory=dict)
    lost: Mapping[str, int] = field(default_factory=dict)
    gaps: Mapping[str, int] = field(default_factory=dict)
    attempts: int = 0
    jobs: int = 0
    open_jobs_ingest_id: str | None = None
    open_job_events: int = 0
    oldest_open_event_ms: int = 0
    steps_ms: Mapping[str, int] = field(default_factory=dict)
    queries: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Self:
        """Decode the result of :meth:`to_json`; raise ``DecodeError`` if it has another version."""
        if stored.get("version") != _VERSION:
            raise DecodeError(
                f"the record of a batch has version {stored.get('version')!r}, but this bulltask reads "
                f"version {_VERSION}: the lake was written by another version of bulltask; use that "
                "version or a newer one"
            )
        added_later = ("gaps", "queries")  # missing in old records
        fields = {name: stored[name] for name in cls.__dataclass_fields__ if name not in added_later}
        fields |= {name: stored.get(name, {}) for name in added_later}
        fields["queues"] = {queue: QueueRecord(**record) for queue, record in fields["queues"].items()}
        return cls(**fields)

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON values."""
        return {"version": _VERSION, **asdict(self)}


class Ledger:
    """The records of a lake's batches."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._head = layout.internal("head.json")
        self._publishing = layout.internal("publishing.json")

    def head(self) -> BatchRecord | None:
        """Return the last committed batch; ``None`` before the first."""
        return _read_record(self._head)

    def get(self, ingest_id: str) -> BatchRecord | None:
        """Return the record of a batch; ``None`` if it does not exist or was removed."""
        return _read_record(self._file(ingest_id))

    def has(self, ingest_id: str) -> bool:
        """Whether a batch is committed, by the head, as uncommitted batches can have records, and old ones none."""
        head, (query, number) = self.head(), batch_of(ingest_id)
        if head is None:
            return False
        return number <= head.queries.get(query, -1) if head.queries else self._file(ingest_id).exists()

    def records(self) -> Iterator[BatchRecord]:
        """Yield the most recent batches, newest first, as far back as there are records."""
        record = self.head()
        while record is not None:
            yield record
            record = None if record.previous is None else self.get(record.previous)

    def publishing(self) -> str | None:
        """Return the ``ingest_id`` of an uncommitted batch whose files may be in the tables."""
        stored = _read(self._publishing)
        return None if stored is None else str(stored["ingest_id"])

    def begin_publishing(self, ingest_id: str) -> None:
        """Record that the files of a batch will be moved into the tables."""
        _write_json(self._publishing, {"ingest_id": ingest_id})

    def commit(self, record: BatchRecord) -> None:
        """Commit a batch."""
        _write_json(self._file(record.ingest_id), record.to_json())
        _write_json(self._head, record.to_json())
        self._publishing.unlink(missing_ok=True)
        self._remove_old_records()

    def _remove_old_records(self) -> None:
        files = set(self._layout.internal("batches").glob("[!_]*.json"))
        if len(files) > _MAX_RECORDS + _CLEANUP_SLACK:
            kept = {self._file(record.ingest_id) for record in islice(self.records(), _MAX_RECORDS)}
            for file in files - kept:
                file.unlink(missing_ok=True)

    def _file(self, ingest_id: str) -> Path:
        return self._layout.internal("batches", f"{ingest_id}.json")


def _read_record(path: Path) -> BatchRecord | None:
    stored = _read(path)
    return None if stored is None else BatchRecord.from_json(stored)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        stored: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    return stored


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
    """Return tables by their full names, and all tables of a layer by its name; others raise ``ConfigError``."""
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
    """Remove the days before this one from tables, or with ``dry_run`` only return them.

    The pipeline's own state (checkpoint, open jobs) is always kept.
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
