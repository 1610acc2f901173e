"""Convert a lake of the layout that bulltask had before its tables were Delta tables, in place.

::

    LAKE/bronze/events/dt=2026-11-22/queue=mail/ingest_id=3f0c2a91-00000017/part-*.parquet
    LAKE/gold/task_minute/dt=…/part-*.parquet
    LAKE/_pipeline/head.json, batches/, publishing.json    the record of the last batch, and of an unfinished one
    LAKE/_pipeline/open_jobs/3f0c2a91-00000017/            the events of open jobs
    LAKE/_pipeline/intents/                                replacements of directories that may be unfinished

Each day of a table becomes one commit, and the old files are deleted only after all tables and the record of the last
batch have been converted. A conversion that is killed is continued by the next one; ``head.json`` is deleted last.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from bulltask.jobs.errors import ConfigError, DecodeError
from bulltask.lake.ledger import VERSION, BatchRecord, last_record
from bulltask.lake.maintenance import portions
from bulltask.lake.storage import DataFile, Lake, RunLock, arrow_schema, batch_prefix
from bulltask.lake.tables import OPEN_EVENTS, TABLES, Table

_PREFIX: Final = "migrated"

_OLD_STATE: Final = ("batches", "checkpoint", "intents", "new", "publishing.json", "staging", "trash", "head.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Migration:
    """What the conversion of one table did, or would do in a dry run.

    Attributes:
        table: Its full name.
        days: The number of days to convert; those that an earlier, killed conversion has converted do not count.
        files_before, files_after: The number of their files, and of the new files; the latter is 0 in a dry run, as is
            ``rows_after``.
        rows_before, rows_after: The number of their rows; fewer in silver, where superseded rows are dropped.
        bytes_before: The size of the old files; as much space must be free, because they are deleted last.
    """

    table: str
    days: int
    files_before: int
    files_after: int = 0
    rows_before: int
    rows_after: int = 0
    bytes_before: int


def migrate(lake: Lake, *, dry_run: bool = False) -> list[Migration]:
    """Convert the tables and the pipeline's state, and delete the old files.

    Args:
        lake: A lake in a file system.
        dry_run: Only count what is to be converted.

    Returns:
        What was done for each table that has files of the old layout.

    Raises:
        ConfigError: The lake is in an object store, or has nothing to convert.
        LakeInUseError: A pipeline is writing to the lake.
    """
    root = lake.directory
    if root is None:
        raise ConfigError(f"{lake.root} is a URL, and lakes of older versions were in file systems only")
    old = {table: days for table in TABLES.values() if (days := _old_days(root, table))}
    if not old and not lake.internal("head.json").exists():
        raise ConfigError(f"there is nothing to convert in {lake.root}: no files of the layout of older versions")
    lake.is_migrating = True
    if dry_run:
        return [_count(lake, table, days) for table, days in old.items()]
    with RunLock(lake):
        _finish_replacements(lake, root)
        old = {table: days for table in TABLES.values() if (days := _old_days(root, table))}
        results = [_convert(lake, table, days) for table, days in old.items()]
        _convert_state(lake)
        for table, days in old.items():
            _delete_old(lake, table, days)
        _delete_old_state(lake)
    return results


def _old_days(root: Path, table: Table) -> dict[str, list[Path]]:
    """Return the files of the old layout by day: those in directories of queues; in gold, those without a log."""
    directory, found = root / table.layer / table.name, dict[str, list[Path]]()
    is_gold = table.layer == "gold"
    # The pipeline's old state is deleted after the files of gold: without it, gold has been converted completely.
    if is_gold and not (root / "_pipeline/head.json").exists() and (directory / "_delta_log").exists():
        return {}
    for day in sorted(directory.glob("dt=*")):
        files = day.glob("*.parquet" if is_gold else "queue=*/ingest_id=*/*.parquet")
        if old := sorted(file for file in files if not file.name.startswith(("_", ".", f"{_PREFIX}-"))):
            found[day.name.removeprefix("dt=")] = old
    return found


def _unfinished_batch(lake: Lake) -> str | None:
    """Return the ``ingest_id`` of a batch that was killed while its files were moved into the tables."""
    publishing, head = (_read(lake.internal(name)) for name in ("publishing.json", "head.json"))
    if publishing is None or (head is not None and head["ingest_id"] == publishing["ingest_id"]):
        return None
    return str(publishing["ingest_id"])


def _remaining(lake: Lake, table: Table, days: Mapping[str, Sequence[Path]]) -> dict[str, list[Path]]:
    """Return the files of days that are not converted, without those of an unfinished batch."""
    snapshot, unfinished = lake.open(table), _unfinished_batch(lake)
    files = () if snapshot is None else snapshot.files()
    done = {file.partition for file in files if f"/{_PREFIX}-" in file.path}
    return {
        day: [file for file in files if file.parent.name != f"ingest_id={unfinished}"]
        for day, files in days.items()
        if day not in done
    }


def _count(lake: Lake, table: Table, days: Mapping[str, Sequence[Path]]) -> Migration:
    remaining = _remaining(lake, table, days)
    files = [file for day_files in remaining.values() for file in day_files]
    return Migration(
        table=table.full_name,
        days=len(remaining),
        files_before=len(files),
        rows_before=sum(pq.read_metadata(file).num_rows for file in files),
        bytes_before=sum(file.stat().st_size for file in files),
    )


def _convert(lake: Lake, table: Table, days: Mapping[str, Sequence[Path]]) -> Migration:
    counted = _count(lake, table, days)
    written: list[DataFile] = []
    for day, files in _remaining(lake, table, days).items():
        new: list[DataFile] = []
        for queue, queue_files in _by_queue(table, files):
            same = {"dt": day} if queue is None else {"dt": day, "queue": queue}
            for rows in portions(table, _dataset(table, queue_files, same)):
                new += lake.write(table, _with_columns(rows, same), _PREFIX)
        lake.commit(table, new)
        written += new
    return replace(counted, files_after=len(written), rows_after=sum(file.rows for file in written))


def _by_queue(table: Table, files: Sequence[Path]) -> Iterator[tuple[str | None, list[Path]]]:
    """Yield the files of each queue; those of gold contain the queue's name."""
    if table.layer == "gold":
        yield None, [*files]
        return
    for name, of_queue in groupby(files, lambda file: file.parent.parent.name):
        yield unquote(name.removeprefix("queue=")), [*of_queue]


def _dataset(table: Table, files: Sequence[Path], missing: Collection[str]) -> Any:
    """Return the rows of old files without some columns of the table; those that a later version added are null."""
    schema = pa.schema([field for field in arrow_schema(table) if field.name not in missing])
    return ds.dataset([str(file) for file in files], schema=schema, format="parquet")


def _with_columns(rows: Any, values: Mapping[str, Any]) -> Any:
    """Add columns that have one value in all rows."""
    for name, value in values.items():
        rows = rows.append_column(name, pa.repeat(value, rows.num_rows))
    return rows


def _convert_state(lake: Lake) -> None:
    """Commit the events of open jobs with the record of the last batch, as the pipeline does."""
    stored = _read(lake.internal("head.json"))
    if stored is None or last_record(lake) is not None:
        return
    if stored.get("version") != 1:
        raise DecodeError(f"{lake.internal('head.json')} has version {stored.get('version')!r}, not 1")
    # The last events of the open jobs are not older than this.
    record = BatchRecord.from_json({**stored, "version": VERSION, "idle_since_ms": stored["oldest_open_event_ms"]})
    written: list[DataFile] = []
    if stored["open_jobs_ingest_id"] is not None:
        same = {"batch": record.number, "shard": "all"}
        files = sorted(lake.internal("open_jobs", stored["open_jobs_ingest_id"]).glob("*.parquet"))
        rows = _with_columns(_dataset(OPEN_EVENTS, files, same).to_table(), same)
        written = lake.write(OPEN_EVENTS, rows, batch_prefix(record.number))
    lake.commit(OPEN_EVENTS, written, batch=record.number, metadata=record.to_json())


def _delete_old(lake: Lake, table: Table, days: Mapping[str, Sequence[Path]]) -> None:
    for day, files in days.items():
        queues = Path(lake.location(table), f"dt={day}").glob("queue=*")
        _delete(files if table.layer == "gold" else queues)


def _delete_old_state(lake: Lake) -> None:
    open_jobs = (path for path in lake.internal("open_jobs").glob("*/") if not path.name.startswith(("_", "shard=")))
    _delete([*open_jobs, *map(lake.internal, _OLD_STATE)])


def _delete(paths: Iterable[Path]) -> None:
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _finish_replacements(lake: Lake, root: Path) -> None:
    """Carry out the replacements of directories that a killed command has recorded."""
    for path in sorted(lake.internal("intents").glob("*.json")):
        intent = json.loads(path.read_text())
        new = None if intent["new"] is None else root / intent["new"]
        # A new directory that has already been moved may have the path of an old one.
        if new is None or new.exists():
            for name in intent["old"]:
                shutil.rmtree(root / name, ignore_errors=True)
            if new is not None:
                target = root / intent["target"]
                target.parent.mkdir(parents=True, exist_ok=True)
                new.rename(target)
        path.unlink()


def _read(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else None
