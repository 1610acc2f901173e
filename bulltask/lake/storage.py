"""The storage of a lake: Delta tables below a root in a file system or an object store, and the pipeline's lock.

::

    LAKE/bronze/events/_delta_log/…                    each directory is a Delta table
    LAKE/bronze/events/dt=2026-11-22/events-….parquet
    LAKE/silver/jobs/dt=2026-11-22/b000000017-….parquet
    LAKE/_pipeline/open_jobs/…                         the pipeline's state, a Delta table, too
    LAKE/_pipeline/checkpoint/, LAKE/_pipeline/lock    in a file system
    LAKE/_pipeline/brokers/eu/…                        the same for the pipeline of the broker eu, if there are several

A write is one commit of one table: first its files are written, where no reader sees them, then the commit names them.
Readers open a table at one version, so they see all rows of a commit or none. Files of a killed write stay unnamed
until ``bulltask pipeline maintain`` removes them.

Some commits need more, because delta-rs does not detect these conflicts:

* A **batch** carries its number as an application transaction of its pipeline. delta-rs refuses the same number only
  while both commits are under way; :meth:`Lake.commit` therefore also compares it with the table's.
* A **rewrite** (compaction, rebuilt days, removed rows) replaces files. A second rewrite that began before the first
  has ended would bring back or double rows, so each one carries the next number of another application transaction.
* A **claim** fences earlier writers of batches, where no lock can (:meth:`Lake.claim`): it puts the next number of a
  third application transaction into each of these tables. A writer's commits repeat its own number, so delta-rs refuses
  one that is under way during a claim, and :meth:`Lake.commit` one that begins later.
"""

from __future__ import annotations

import copy
import json
import os
import re
import secrets
import sys
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from functools import cached_property
from pathlib import Path
from time import time
from typing import Any, Final, Self

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, QueryBuilder, Schema, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.fs import DeltaStorageHandler
from deltalake.transaction import AddAction, RemoveAction
from pyarrow.fs import FileSelector, FileSystem, LocalFileSystem, PyFileSystem, SubTreeFileSystem

from bulltask.jobs.errors import ConfigError, LakeError, LakeInUseError
from bulltask.lake.tables import (
    ATTEMPTS,
    BROKERS,
    EVENTS,
    GAPS,
    JOBS,
    TABLES,
    Kind,
    Table,
    check_broker,
    open_events_of,
    queue_prefix,
)

if sys.platform != "win32":
    import fcntl

_URL: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")  # a Path of s3a://bucket is s3a:/bucket
_UNSUPPORTED: Final = frozenset("%[]\\^|")  # characters that delta-rs confuses in the path of a directory
_SCHEMES: Final = {"s3": "s3", "s3a": "s3", "abfss": "abfss", "abfs": "abfs", "az": "az", "gs": "gs"}

_LOG_FILE: Final = re.compile(r"(\d{20})\.(json|checkpoint)\b")

_BATCHES: Final = "bulltask"
_REWRITES: Final = "bulltask-rewrites"
_CLAIMS: Final = "bulltask-claims"

_CLAIMED: Final = (EVENTS, GAPS, ATTEMPTS, JOBS)  # the tables that batches are written to, beside the state

_CONFIGURATION: Final = {
    # Every commit reads the log since the last checkpoint, several times.
    "delta.checkpointInterval": "20",
    "delta.logRetentionDuration": "interval 30 days",
    "delta.deletedFileRetentionDuration": "interval 7 days",
}
_STATISTICS: Final = ("queue", "job_id", "id", "event_ms")
"""Columns whose smallest and greatest value each file's entry in the log has, so that look-ups skip files."""

_DISTINCT: Final = frozenset({"event_id", "id", "incarnation", "job_id"})
"""Columns whose values hardly repeat: without dictionaries of them, files of events are a fifth smaller."""

_QUERIES: Final = {"datafusion.optimizer.repartition_file_scans": "false"}  # else each thread reads a file's metadata

_SCANS: Final = 8
"""How many parts of a table one query reads at the same time: a part's files are opened one after the other."""

_MAX_TRIES: Final = 20
"""How often a commit is tried while other processes commit."""

_MAX_STATISTIC: Final = 256  # characters

_TYPES: Final[Mapping[Kind, Any]] = {
    Kind.TEXT: pa.string(),
    Kind.INT: pa.int32(),
    Kind.LONG: pa.int64(),
    Kind.DOUBLE: pa.float64(),
    Kind.FLAG: pa.bool_(),
    Kind.TIME: pa.timestamp("us", tz="UTC"),
    Kind.TEXTS: pa.list_(pa.string()),
    Kind.COUNTS: pa.map_(pa.int32(), pa.int64()),
    Kind.MONEY: pa.decimal128(18, 6),
}


def arrow_schema(table: Table) -> Any:
    """Return the Arrow schema (``pyarrow.Schema``) of a table: its columns, then its partition."""
    columns = [pa.field(column.name, _TYPES[column.kind]) for column in table.columns]
    return pa.schema([*columns, pa.field(table.partition, pa.string())])


@dataclass(frozen=True, slots=True)
class DataFile:
    """A Parquet file of a table.

    Attributes:
        path: Its path in the table's directory, with ``/``.
        size: Its size in bytes.
        partition: The value of the table's partition: the day as text, or the shard.
        rows: The number of rows.
        low, high: The smallest and the greatest value of some columns; a column whose values are unknown is missing.
    """

    path: str
    size: int
    partition: str
    rows: int
    low: Mapping[str, Any]
    high: Mapping[str, Any]


class Lake:
    """The tables of a lake.

    Args:
        root: A directory, or a URL (``s3://``, ``s3a://``, ``abfss://``, ``gs://``, ``file://``). A directory must have
            the same path for the driver and all executors.
        storage_options: Credentials and endpoint of an object store, by delta-rs' names (``AWS_ACCESS_KEY_ID``,
            ``AWS_ENDPOINT_URL`` …); default: those of the environment.
        broker: The name of the broker, in a lake of several. They share the tables; each has its own pipeline.

    Attributes:
        root: The absolute path of the directory, or the URL.
        broker: The name of the broker; ``""`` without a name.
        queue_prefix: How the names of the broker's queues begin in the tables.
        open_events: The table with the state of the broker's pipeline.
        is_migrating: Whether this process converts the lake from the layout of older versions.

    Raises:
        ConfigError: The root is empty, or a URL of an unsupported kind; or the broker's name is invalid.
    """

    def __init__(self, root: str | Path, storage_options: Mapping[str, str] | None = None, broker: str = "") -> None:
        self.root = _parse_root(root)
        self.broker = check_broker(broker)
        self.queue_prefix = queue_prefix(broker)
        self.open_events = open_events_of(broker)
        # The applications of the pipeline's transactions; the first is also the key of its metadata.
        suffix = f":{broker}" if broker else ""
        self._batches = _BATCHES + suffix
        self._claims = _CLAIMS + suffix
        self._options = dict(storage_options or {})
        self.is_migrating = False
        self._claim: int | None = None
        self._opening: dict[str, threading.Lock] = {}  # of each table: threads of the dashboard share a lake
        self._snapshots: dict[str, Snapshot] = {}

    def __repr__(self) -> str:
        return f"Lake({self.root!r})"  # without credentials

    def __reduce__(self) -> tuple[type[Self], tuple[str, Mapping[str, str], str], Mapping[str, Any]]:
        return type(self), (self.root, self._options, self.broker), {"_claim": self._claim}

    def of_broker(self, broker: str) -> Self:
        """Return the lake for the pipeline of a broker."""
        return type(self)(self.root, self._options, broker)

    def of_all_brokers(self) -> list[Self]:
        """Return the lake for the pipeline of each broker: of that without a name, and of those that have one."""
        entries = self.files.get_file_info(FileSelector(BROKERS, allow_not_found=True))
        return [self.of_broker(name) for name in ("", *sorted(entry.base_name for entry in entries))]

    def has_queue(self, queue: str) -> bool:
        """Whether a name in the tables is that of a queue of the lake's broker."""
        return queue.startswith(self.queue_prefix) if self.broker else ":" not in queue

    @property
    def directory(self) -> Path | None:
        """The lake's directory; ``None`` for a lake in an object store."""
        return None if _URL.match(self.root) else Path(self.root)

    @property
    def files(self) -> FileSystem:
        """Arrow's file system, in which paths are relative to the root."""
        if self.directory is not None:
            return SubTreeFileSystem(self.root, LocalFileSystem())
        return PyFileSystem(DeltaStorageHandler(self.root, self._options))

    def internal(self, *parts: str) -> Path:
        """Return a path in the directory of the broker's pipeline; only for a lake in a file system."""
        assert self.directory is not None
        return self.directory.joinpath(self.open_events.layer, *parts)

    def check(self) -> None:
        """Raise ``LakeError`` if there is no lake, or one of an old layout."""
        self.check_layout()
        if all(self.open(table) is None for table in (*TABLES.values(), self.open_events)):
            raise LakeError(
                f"there is no lake in {self.root} (no bronze/ or silver/): use the --lake of 'bulltask pipeline run', "
                "which creates the tables"
            )

    def check_layout(self, table: Table | None = None) -> None:
        """Raise ``LakeError`` if the lake, or a table's directory, is from before the tables were Delta tables."""
        if self.directory is None or self.is_migrating:
            return
        directories = () if table is None else Path(self.location(table)).glob("dt=*/queue=*")
        if (self.directory / "_pipeline/head.json").exists() or any(directories):
            raise LakeError(
                f"the lake in {self.root} was written by an older version of bulltask: 'bulltask pipeline "
                f"migrate-lake --lake {self.root}' makes Delta tables of it"
            )

    def open(self, table: Table) -> Snapshot | None:
        """Return the latest version of a table; ``None`` if it does not exist.

        Raises:
            LakeError: The table's log cannot be read, or the lake has an old layout.
        """
        with self._opening.setdefault(table.full_name, threading.Lock()):
            known = self._snapshots.get(table.full_name)
            try:
                if known is None:
                    handle = DeltaTable(self.location(table), storage_options=self._options or None)
                else:
                    handle = known.handle
                    handle.update_incremental()
            except TableNotFoundError:
                self._snapshots.pop(table.full_name, None)
                self.check_layout()  # files beside those of the old layout would be lost when it is converted
                return None
            except (DeltaError, OSError) as exc:
                raise LakeError(f"{self.location(table)} cannot be read: {exc}") from exc
            if known is None or known.version != handle.version():
                known = Snapshot(table, handle, self._options, self._batches)
                self._snapshots[table.full_name] = known
            return known

    def existing(self, table: Table) -> Snapshot:
        """Return the latest version of a table that exists."""
        snapshot = self.open(table)
        assert snapshot is not None
        return snapshot

    def create(self, table: Table) -> Snapshot:
        """Return the latest version of a table, which is created if it does not exist."""
        if (existing := self.open(table)) is not None:
            return existing
        self.check_layout(table)
        statistics = [name for name in arrow_schema(table).names if name in _STATISTICS]
        with suppress(CommitFailedError):  # another process has created it meanwhile
            DeltaTable.create(
                self.location(table),
                arrow_schema(table),
                mode="ignore",
                partition_by=[table.partition],
                name=table.full_name,
                description=table.doc,
                configuration={
                    **_CONFIGURATION,
                    **table.configuration,
                    "delta.dataSkippingStatsColumns": ",".join(statistics),
                },
                storage_options=self._options or None,
            )
        return self.existing(table)

    def claim(self) -> Self:
        """Become the only writer of the broker's batches: the next commit of any earlier one fails. Return this object.

        Raises:
            LakeInUseError: Another process has claimed the lake meanwhile.
        """
        number = 0
        for table in (*_CLAIMED, self.open_events):
            while True:
                current = self.create(table)
                last = _number(current.handle, self._claims)
                if table is _CLAIMED[0]:
                    number = last + 1
                elif number <= last:
                    raise self.taken_over_error()
                # Old commits leave the log: the one with the last batch's record must not, even if no batch follows.
                record = current.last_metadata() if table in {EVENTS, self.open_events} else None
                properties = self._properties(None, None, number, record)
                with suppress(CommitFailedError):  # another process has committed a batch, or a claim
                    schema = arrow_schema(table)
                    current.handle.create_write_transaction([], "append", schema, commit_properties=properties)
                    break
        self._claim = number
        return self

    def check_claim(self) -> None:
        """Raise ``LakeInUseError`` if another process has claimed the lake since :meth:`claim` was called."""
        if self._claim is not None and (current := self.open(EVENTS)) is not None:
            self._claim_of(current)

    def location(self, table: Table) -> str:
        """Return the path or URL of a table's directory."""
        return f"{self.root}/{table.layer}/{table.name}"

    def write(self, table: Table, rows: Any, prefix: str) -> list[DataFile]:
        """Write rows to new files, one for each value of the partition; a commit adds them to the table.

        Args:
            rows: A ``pyarrow.Table`` with the columns of :func:`arrow_schema`, in any order.
            prefix: How the files' names begin.
        """
        written: list[DataFile] = []
        schema, files = arrow_schema(table), self.files
        columns = [name for name in schema.names if name != table.partition]
        # Times are stored as differences: with dictionaries, silver's files are a third larger, and slower to read.
        times = [name for name in columns if name == "event_ms" or schema.field(name).type == _TYPES[Kind.TIME]]
        repeating = [name for name in columns if name not in {*_DISTINCT, *times}]
        for value in pc.unique(rows[table.partition]).to_pylist():
            part = rows.filter(pc.equal(rows[table.partition], value)).select(columns)
            path = f"{table.partition}={value}/{prefix}-{secrets.token_hex(8)}.parquet"
            full = f"{table.layer}/{table.name}/{path}"
            stored = part.cast(pa.schema([schema.field(name) for name in columns]))
            if self.directory is not None:
                (self.directory / full).parent.mkdir(parents=True, exist_ok=True)
            with files.open_output_stream(full) as stream:
                blooms = _bloom_filters(table, part)
                pq.write_table(
                    stored,
                    stream,
                    table.row_group,
                    compression="zstd",
                    use_dictionary=repeating,
                    column_encoding=dict.fromkeys(times, "DELTA_BINARY_PACKED"),
                    bloom_filter_options=blooms,
                )
                size = int(stream.tell())
            written.append(DataFile(path, size, value, part.num_rows, *_ends(part)))
        return written

    def commit(
        self,
        table: Table,
        files: Sequence[DataFile],
        *,
        batch: int | None = None,
        metadata: Mapping[str, Any] | None = None,
        replaced: Collection[DataFile] = (),
        since: Snapshot | None = None,
    ) -> bool:
        """Add files to a table in one commit, which creates the table if needed.

        Args:
            files: New files, from :meth:`write`.
            batch: The number of the batch that the commit belongs to.
            metadata: JSON values, which :meth:`Snapshot.last_metadata` returns.
            replaced: Files of the snapshot ``since`` that the commit removes from the table.
            since: The snapshot from which a rewrite has been computed.

        Returns:
            Whether the commit was made; ``False`` if the table already has the batch.

        Raises:
            LakeInUseError: Another process has replaced files since the snapshot, writes the same batch, or has claimed
                the lake.
            LakeError: A file is not in the driver's directory, or a rewrite would drop columns of a newer version.
        """
        current = self.create(table)
        claim = self._claim_of(current)
        if batch is not None and current.batch >= batch:
            return False
        self._check_written(table, files)
        self._add_columns(current, is_rewrite=since is not None)
        now_ms = int(time() * 1000)
        actions: list[AddAction | RemoveAction] = [_add(table, file, now_ms) for file in files]
        actions += [_remove(table, file, now_ms) for file in replaced]
        for tries_left in reversed(range(_MAX_TRIES)):
            try:
                if since is not None and current.rewrites != since.rewrites:
                    raise self._conflict(table)
                current.handle.create_write_transaction(
                    actions,
                    mode="append",
                    schema=arrow_schema(table),
                    partition_by=[table.partition],
                    commit_properties=self._properties(batch, since, claim, metadata),
                )
            except CommitFailedError as exc:
                # For delta-rs, adding files conflicts with any removal of files, such as that of a compaction.
                current = self.create(table)
                claim = self._claim_of(current)
                if not tries_left or _is_overtaken(current, batch, replaced):
                    raise self._conflict(table) from exc
            else:
                return True
        raise AssertionError

    def delete(self, table: Table, files: Iterable[DataFile]) -> None:
        """Delete files that no version of the table needs any more."""
        system = self.files
        for file in files:
            with suppress(FileNotFoundError):
                system.delete_file(f"{table.layer}/{table.name}/{file.path}")

    def delete_unnamed(self, table: Table) -> None:
        """Delete files of writes that were killed more than a day ago."""
        if (snapshot := self.open(table)) is not None:
            for path in snapshot.handle.vacuum(24, enforce_retention_duration=False, full=True):
                self.delete(table, [DataFile(path, 0, "", 0, {}, {})])

    def vacuum(
        self, table: Table, older_than: timedelta | None = None, *, never_committed: bool = True, dry_run: bool = False
    ) -> int:
        """Delete files that the table's current version does not have, and return their number.

        Args:
            table: An existing table.
            older_than: How long ago (whole hours) a commit has removed them, or they were written if no commit ever
                named them; default: the table's property ``delta.deletedFileRetentionDuration``, 7 days.
            never_committed: Whether to delete files that no commit ever named: those of killed writes, but also those
                of writes that have not been committed yet.
            dry_run: Only count them.
        """
        hours = None if older_than is None else int(older_than / timedelta(hours=1))
        deleted = self.existing(table).handle.vacuum(
            hours, dry_run=dry_run, enforce_retention_duration=hours is None, full=never_committed
        )
        return len(deleted)

    def write_checkpoint(self, table: Table) -> None:
        """Write a checkpoint of an existing table's log, so that readers need not read every commit."""
        self.existing(table).handle.create_checkpoint()

    def shorten_log(self, table: Table, first: int) -> None:
        """Delete the log of versions before ``first``, whose statistics have values of rows, such as ids."""
        self.write_checkpoint(table)
        system, last = self.files, self.existing(table).version
        for entry in system.get_file_info(FileSelector(f"{table.layer}/{table.name}/_delta_log")):
            if match := _LOG_FILE.match(entry.base_name):
                kept_from = last if match[2] == "checkpoint" else min(first, last)
                if int(match[1]) < kept_from:
                    system.delete_file(entry.path)

    def _add_columns(self, current: Snapshot, *, is_rewrite: bool) -> None:
        """Add the columns to a table that it lacks because an older version of bulltask created it."""
        schema, stored = arrow_schema(current.table), {field.name for field in current.handle.schema().fields}
        if is_rewrite and (unknown := stored - set(schema.names)):
            raise LakeError(
                f"{self.location(current.table)} has columns of a newer version of bulltask, which would be lost: "
                f"{', '.join(sorted(unknown))}; nothing was written: use that version"
            )
        if missing := [field for field in schema if field.name not in stored]:
            current.handle.alter.add_columns(list(Schema.from_arrow(pa.schema(missing)).fields))

    def _check_written(self, table: Table, files: Iterable[DataFile]) -> None:
        """Check that the driver has the files: an executor may have another directory at the lake's path."""
        for file in files if self.directory is not None else ():
            path = Path(self.location(table), file.path)
            if not path.is_file() or path.stat().st_size != file.size:
                what = f"a task has written {file.path} of {table.full_name}, but the driver does not have this file"
                raise self.not_shared_error(what, "table")

    def not_shared_error(self, what: str, unchanged: str) -> LakeError:
        """Return the error for a file that a process cannot find; nothing was added to ``unchanged``."""
        return LakeError(
            f"[BULLTASK_LAKE_NOT_SHARED] {what}: {self.root} must be the same directory for the driver and for all "
            f"executors. Nothing was added to the {unchanged}: mount the directory on every node and try again"
        )

    def taken_over_error(self) -> LakeInUseError:
        """Return the error for a writer of batches after another one has begun."""
        return LakeInUseError(
            f"another 'bulltask pipeline run' or 'forget' has begun to write to {self.root}, so this one ends: let "
            "only one of them run at a time; the next run continues after the lake's last event"
        )

    def _claim_of(self, current: Snapshot) -> int | None:
        """Return the claim that commits of a table carry, if it is one of a claimed lake; check that it is the last."""
        claim = self._claim if current.table in {*_CLAIMED, self.open_events} else None
        if claim is not None and claim < _number(current.handle, self._claims):
            raise self.taken_over_error()
        return claim

    def _properties(
        self, batch: int | None, since: Snapshot | None, claim: int | None, metadata: Mapping[str, Any] | None
    ) -> CommitProperties:
        transactions = [] if batch is None else [Transaction(self._batches, batch)]
        transactions += [] if claim is None else [Transaction(self._claims, claim)]
        transactions += [] if since is None else [Transaction(_REWRITES, since.rewrites + 1)]
        stored = {self._batches: json.dumps(metadata)} if metadata else None
        return CommitProperties(custom_metadata=stored, app_transactions=transactions or None)

    def _conflict(self, table: Table) -> LakeInUseError:
        return LakeInUseError(
            f"another process has changed {self.location(table)} at the same time; nothing was written: try again"
        )


class Snapshot:
    """A version of a table. Later commits do not change it."""

    def __init__(self, table: Table, handle: DeltaTable, options: Mapping[str, str], pipeline: str) -> None:
        self.table = table
        self.version = handle.version()
        self._pipeline = pipeline
        self.handle = handle  # which later snapshots share: it may be at a later version
        self._options = dict(options)

    def _at_version(self) -> DeltaTable:
        if self.handle.version() == self.version:
            return self.handle
        return DeltaTable(self.handle.table_uri, version=self.version, storage_options=self._options or None)

    # Finding these numbers reads the log again, so readers do not.

    @cached_property
    def batch(self) -> int:
        """The number of the pipeline's last batch in the table."""
        return _number(self._at_version(), self._pipeline)

    @cached_property
    def rewrites(self) -> int:
        """The number of the last rewrite."""
        return _number(self._at_version(), _REWRITES)

    @cached_property
    def _actions(self) -> Any:
        """The log's entries of the files, as an Arrow table."""
        return pa.table(self._at_version().get_add_actions())

    @cached_property
    def _partition_of_each(self) -> Any:
        """The partition's value for each of `_actions`."""
        if not self._actions.num_rows:
            return pa.chunked_array([], pa.string())
        return pc.struct_field(self._actions["partition"], self.table.partition)

    @cached_property
    def partitions(self) -> list[str]:
        """The values of the partition, in order."""
        return sorted(pc.unique(self._partition_of_each).to_pylist())

    def files(self, partitions: Collection[str] | None = None) -> list[DataFile]:
        """Return the files, in a stable order; by default those of all partitions."""
        actions = self._actions
        if partitions is not None:
            actions = actions.filter(pc.is_in(self._partition_of_each, pa.array(partitions, pa.string())))
        files = (
            DataFile(
                row["path"], row["size_bytes"], row["partition"][self.table.partition], row["num_records"],
                _known(row.get("min")), _known(row.get("max")),
            )
            for row in actions.to_pylist()
        )  # fmt: skip
        return sorted(files, key=lambda file: (file.partition, file.path))

    def find(self, where: str, columns: Sequence[str] = ("*",), *, partitions: Collection[str] | None = None) -> Any:
        """Return columns (``pyarrow.Table``) of the rows for which a condition in SQL is true, in any order.

        The version is this one or a later one. Bloom filters are read before rows, so finding an id takes little time.

        Args:
            where: The condition.
            columns: The columns; default: all.
            partitions: Values of the partition, of which the rows are; default: all of this version.

        Raises:
            deltalake.exceptions.DeltaError: The condition is invalid.
        """
        values = sorted(self.partitions if partitions is None else partitions)
        parts = [has_one_of(self.table.partition, values[start::_SCANS]) for start in range(min(_SCANS, len(values)))]
        scans = [f"SELECT {', '.join(columns)} FROM t WHERE ({where}) AND {part}" for part in parts or ["false"]]  # noqa: S608
        return pa.table(QueryBuilder(_QUERIES).register("t", self.handle).execute(" UNION ALL ".join(scans)))

    def written_at(self, partition: str) -> datetime | None:
        """Return when the partition's newest file was added; ``None`` if it has no files."""
        is_of_partition = pc.equal(self._partition_of_each, partition)
        newest = pc.max(self._actions["modification_time"].filter(is_of_partition)).as_py()
        return None if newest is None else datetime.fromtimestamp(newest / 1000, UTC)

    def last_metadata(self) -> Any:
        """Return the metadata of the latest commit that has any; ``None`` if there is none in the log."""
        return next(self.metadata(), None)

    def metadata(self) -> Iterator[Any]:
        """Yield the metadata of the pipeline's commits, newest first, as far back as the log goes."""
        seen = 0
        # The last commit is usually enough, and each takes a third of a millisecond.
        for limit in (1, 20, None):
            entries = self.handle.history(limit)
            for entry in entries[seen:]:
                if (stored := entry.get(self._pipeline)) is not None:
                    yield json.loads(stored)
            if limit is None or len(entries) < limit:
                return
            seen = len(entries)


def has_one_of(column: str, values: Iterable[str]) -> str:
    """Return the condition in SQL that a column has one of some values."""
    texts = ", ".join("'{}'".format(value.replace("'", "''")) for value in values)
    return f"{column} IN ({texts})"


def batch_prefix(batch: int) -> str:
    """Return how the names of a batch's files begin."""
    return f"b{batch:09d}"


def _is_overtaken(current: Snapshot, batch: int | None, replaced: Collection[DataFile]) -> bool:
    """Whether another process has committed the batch, or removed one of the replaced files."""
    is_taken = batch is not None and current.batch >= batch
    return is_taken or not {file.path for file in replaced} <= {file.path for file in current.files()}


def _number(handle: DeltaTable, application: str) -> int:
    version = handle.transaction_version(application)
    return -1 if version is None else version


def _known(values: Mapping[str, Any] | None) -> Mapping[str, Any]:
    return {name: value for name, value in (values or {}).items() if name in _STATISTICS and value is not None}


def _ends(rows: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the smallest and the greatest value of the columns in `_STATISTICS`."""
    low: dict[str, Any] = {}
    high: dict[str, Any] = {}
    for name in _STATISTICS:
        if name in rows.column_names:
            ends = pc.min_max(rows[name]).as_py()
            if ends["min"] is not None and len(f"{ends['max']}") <= _MAX_STATISTIC >= len(f"{ends['min']}"):
                low[name], high[name] = ends["min"], ends["max"]
    return low, high


def _bloom_filters(table: Table, rows: Any) -> dict[str, dict[str, float]]:
    """Return the options of the Bloom filters, by which look-ups skip row groups: any day may have a random id."""
    if table.full_name not in TABLES or table.id_column not in rows.column_names:
        return {}
    distinct, of_file = pc.count_distinct(rows[table.id_column]).as_py(), rows.num_rows
    return {table.id_column: {"ndv": max(1, distinct * min(table.row_group, of_file) // of_file), "fpp": 0.01}}


def _add(table: Table, file: DataFile, now_ms: int) -> AddAction:
    stats = {"numRecords": file.rows, "minValues": file.low, "maxValues": file.high}
    return AddAction(file.path, file.size, {table.partition: file.partition}, now_ms, True, json.dumps(stats))


def _remove(table: Table, file: DataFile, now_ms: int) -> RemoveAction:
    return RemoveAction(file.path, True, now_ms, file.size, {table.partition: file.partition})


def _parse_root(root: str | Path) -> str:
    text = str(root)
    if not text:
        raise ConfigError("the lake's root is empty: give a directory, or a URL such as s3://bucket/lake")
    match = _URL.match(text)
    scheme, rest = ("file", "") if match is None else (match[1].lower(), text[match.end() :].strip("/"))
    if scheme == "file":
        directory = str(Path(text).absolute()) if match is None else f"/{rest}"
        if unsupported := sorted(_UNSUPPORTED.intersection(directory)):
            raise ConfigError(
                f"{directory} cannot be the root of a lake: Delta tables allow no {unsupported[0]} in a path"
            )
        return directory
    if scheme not in _SCHEMES or not rest:
        known = ", ".join(f"{name}://" for name in ("s3", "s3a", "abfss", "gs", "file"))
        raise ConfigError(f"{text} cannot be the root of a lake: use a directory or a URL that begins with {known}")
    return f"{_SCHEMES[scheme]}://{rest}"


def days_of(snapshot: Snapshot | None) -> list[date]:
    """Return the days that a table has rows of, in order."""
    return [] if snapshot is None else [date.fromisoformat(day) for day in snapshot.partitions]


_LOCK: Final = "lock"


class RunLock:
    """The lock of the pipeline that writes a broker's events to a lake, acquired by the constructor.

    A ``kill -9`` releases it, too.

    An object store has no locks. There, the constructor claims the lake: an earlier pipeline's next commit fails.

    Attributes:
        lake: The lake to write to with this lock.

    Raises:
        ConfigError: The system is Windows, which lacks the locks.
        LakeError: The lake has an old layout.
        LakeInUseError: Another pipeline is already writing to the lake.
    """

    def __init__(self, lake: Lake) -> None:
        if sys.platform == "win32":
            raise ConfigError(
                "on Windows, bulltask cannot write to a lake: run this command in WSL 2 or a Linux container"
            )
        lake.check_layout()
        self._releasing = threading.RLock()
        self._file = -1
        self.lake = copy.copy(lake).claim() if lake.directory is None else lake
        if lake.directory is None:
            return
        path = lake.internal(_LOCK)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            pid = os.read(self._file, 20).decode("ascii", "replace").strip()
            os.close(self._file)
            raise LakeInUseError(
                f"process {pid} is already writing {lake.broker and f'the events of {lake.broker} '}to the lake "
                f"{lake.root}: stop it, or choose another directory"
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


def writer_pid(lake: Lake) -> int | None:
    """Return the id of the process on this machine that writes the broker's events to a lake; ``None`` for none."""
    if sys.platform == "win32" or lake.directory is None:
        return None
    try:
        file = os.open(lake.internal(_LOCK), os.O_RDONLY | os.O_CLOEXEC)
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
