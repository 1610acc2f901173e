"""Keep the tables of a lake fast and small (merge files, remove old days, delete files), and remove jobs from them.

The pipeline's own state is not touched: the newest commits of its log are the records of batches.

It may run while the pipeline and readers run: each change is one commit, and files are deleted a week after the commit
that replaced them. A run that is killed leaves only files that a later run deletes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Any, Final

import pyarrow as pa
import pyarrow.dataset as ds
from deltalake.exceptions import DeltaError

from bulltask.jobs.errors import ConfigError, LakeError, LakeInUseError
from bulltask.lake.ledger import last_record
from bulltask.lake.reader import dataset_of, files_with, latest_rows
from bulltask.lake.storage import DataFile, Lake, RunLock, Snapshot, arrow_schema, has_one_of
from bulltask.lake.tables import ATTEMPTS, ERRORS_DAY, EVENTS, FORGOTTEN, JOBS, SNAPSHOTS, TABLES, Table, find_tables

MAX_ROWS: Final = 1_000_000
"""How many rows of bronze a merged file has at most, because they are in memory while it is written."""

_MANY: Final = 100
"""How many small files the current day has before they are merged: each batch adds some."""

_TRIES: Final = 5


@dataclass(slots=True)
class Maintenance:
    """What the maintenance of one table did, or would do in a dry run.

    Attributes:
        table: Its full name.
        expired_days, expired_files: The number of days that were removed, and of their files.
        merged_days: The number of days whose files were merged.
        files_before, files_after: The number of files that were merged, and of those that replace them; the latter is
            0 in a dry run, as are the rows.
        rows_before, rows_after: The number of their rows; fewer in silver, where superseded rows are dropped.
        bytes_before, bytes_after: Their size.
        deleted_files: The number of files that were deleted: those that commits replaced a week ago or earlier, and
            those of killed writes.
    """

    table: str
    expired_days: int = 0
    expired_files: int = 0
    merged_days: int = 0
    files_before: int = 0
    files_after: int = 0
    rows_before: int = 0
    rows_after: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    deleted_files: int = 0


def parse_retention(texts: Sequence[str]) -> dict[Table, int]:
    """Parse texts such as ``bronze=90`` and ``silver.jobs=400``: how many days a table or a layer is kept.

    A table's own number counts more than that of its layer. Others raise ``ConfigError``.
    """
    keep: dict[Table, int] = {}
    for text in sorted(texts, key=lambda text: "." in text.partition("=")[0]):  # layers first
        name, _, days = text.partition("=")
        if not days.isdecimal() or not int(days):
            raise ConfigError(f"invalid retention {text!r}: write it like bronze.events=90 (days)")
        keep |= dict.fromkeys(find_tables([name.strip()]), int(days))
    return keep


def maintain(
    lake: Lake,
    *,
    keep: Mapping[Table, int] | None = None,
    target_mb: float = 128,
    today: date | None = None,
    dry_run: bool = False,
) -> list[Maintenance]:
    """Remove the days that are older than a table is kept, merge small files, and delete files that are not needed.

    Args:
        keep: How many days each table is kept, including today; default: all are kept forever.
        target_mb: The size of merged files in megabytes.
        today: The current day (UTC).
        dry_run: Change nothing.

    Returns:
        What was done for each existing table.

    Raises:
        ConfigError: The size is invalid.
        LakeError: There is no lake.
    """
    if not target_mb > 0:
        raise ConfigError(f"target_mb must be more than 0, not {target_mb!r}")
    lake.check()
    today, lakes = datetime.now(UTC).date() if today is None else today, lake.of_all_brokers()
    work = _Work(lake, today, int(target_mb * 1_000_000), dry_run, lakes)
    return [work.on(table, (keep or {}).get(table)) for table in TABLES.values() if lake.open(table) is not None]


def _rewrite(since: Snapshot, lake: Lake, new: Sequence[DataFile], replaced: Sequence[DataFile], **more: Any) -> None:
    """Replace files of a snapshot; if another process was faster, delete the new ones and raise ``LakeInUseError``."""
    try:
        lake.commit(since.table, new, replaced=replaced, since=since, **more)
    except LakeInUseError:
        lake.delete(since.table, new)
        raise


@dataclass(frozen=True, slots=True)
class _Work:
    """The maintenance of a lake's tables, one after the other."""

    lake: Lake
    today: date
    target: int  # bytes
    dry_run: bool
    lakes: Sequence[Lake]  # of all brokers

    def on(self, table: Table, keep: int | None) -> Maintenance:
        """Maintain a table of which some days are kept, or all."""
        done = Maintenance(table.full_name)
        if keep is not None:
            self._expire(table, f"{self.today - timedelta(keep - 1)}", done)
        for day in self.lake.existing(table).partitions:
            self._merge(table, day, done)
        if not self.dry_run:
            self.lake.write_checkpoint(table)
        done.deleted_files = self.lake.vacuum(table, dry_run=self.dry_run)
        return done

    def _expire(self, table: Table, first: str, done: Maintenance) -> None:
        snapshot = self.lake.existing(table)
        days = [day for day in snapshot.partitions if day < first]
        files = snapshot.files(days)
        if files and not self.dry_run:
            self.lake.commit(table, [], replaced=files, since=snapshot)
        done.expired_days = len(days)
        done.expired_files = len(files)

    def _merge(self, table: Table, day: str, done: Maintenance) -> None:
        """Merge the small files of a day; of a past day of silver, merge all files if any is small."""
        is_past = day < f"{self.today}"
        for tries_left in reversed(range(_TRIES)):
            snapshot = self.lake.existing(table)
            kept = _kept_files(self.lakes) if table is EVENTS else ()
            files = [file for file in snapshot.files([day]) if file.path not in kept]
            small = [file for file in files if file.size < self.target / 2]
            merged = files if is_past and small and table.layer == "silver" else small
            size, rows = sum(file.size for file in merged), sum(file.rows for file in merged)
            rows_per_file = max(1, int(rows * self.target / size)) if size else MAX_ROWS
            rows_per_file = rows_per_file if table.layer == "silver" else min(rows_per_file, MAX_ROWS)
            if len(merged) <= max(1 if is_past else _MANY, math.ceil(rows / rows_per_file)):
                return
            new: list[DataFile] = []
            if not self.dry_run:
                parts = portions(table, dataset_of(self.lake, table, merged), rows_per_file)
                new = [file for part in parts for file in self.lake.write(table, part, "merged")]
                try:
                    _rewrite(snapshot, self.lake, new, merged)
                except LakeInUseError:
                    if not tries_left:
                        raise
                    continue
            done.merged_days += 1
            done.files_before += len(merged)
            done.rows_before += rows
            done.bytes_before += size
            done.files_after += len(new)
            done.rows_after += sum(file.rows for file in new)
            done.bytes_after += sum(file.size for file in new)
            return


def _unfinished_batch(lake: Lake) -> int | None:
    """Return the number of the broker's batch that is in ``bronze.events`` but not complete; ``None`` for none."""
    record, events = last_record(lake), lake.open(EVENTS)
    return events.batch if events and events.batch > (0 if record is None else record.number) else None


def _kept_files(lakes: Iterable[Lake]) -> set[str]:
    """Return the paths of the files of ``bronze.events`` from which pipelines will finish batches that were killed."""
    return {
        file["path"]
        for lake in lakes
        if (number := _unfinished_batch(lake)) is not None
        for stored in lake.existing(EVENTS).metadata()
        if stored.get("number") == number
        for file in stored["part"]["files"]
    }


def portions(table: Table, dataset: Any, rows_per_file: int = MAX_ROWS) -> Iterator[Any]:
    """Yield a table's rows in portions, in order of the jobs, so that a look-up by id reads few row groups.

    Of silver rows with the same key, only the latest is kept.
    """
    if table.layer == "silver":  # the latest row of each job is known when all of a day are
        rows = latest_rows(dataset.to_table(), table)
        yield from (rows.slice(start, rows_per_file) for start in range(0, rows.num_rows, rows_per_file))
        return
    # Little read-ahead, because a day of events can be larger than the memory.
    batches = dataset.scanner(batch_size=131_072, batch_readahead=2, fragment_readahead=2).to_batches()
    kept: list[Any] = []
    for batch in batches:
        kept.append(batch)
        while sum(part.num_rows for part in kept) >= rows_per_file:
            rows = pa.Table.from_batches(kept)
            yield _in_order(rows.slice(0, rows_per_file))
            kept = rows.slice(rows_per_file).to_batches()
    if kept:
        yield _in_order(pa.Table.from_batches(kept))


def _in_order(rows: Any) -> Any:
    order = ("queue", "job_id", "id", "event_ms", "event_seq")
    names = [(name, "ascending") for name in order if name in rows.column_names]
    return rows.sort_by(names) if names else rows


# Forgetting removes jobs from all tables and from their earlier versions, as a law or a contract may demand.


JobKey = tuple[str, str]
"""A queue's name in the lake, and the id of a job."""

_OF_JOBS: Final = (EVENTS, SNAPSHOTS, ATTEMPTS, JOBS)
"""The tables with rows of single jobs; the pipelines' states have some, too."""

_KILLED_WRITE: Final = timedelta(hours=1)
"""The age at which a file that no commit has named is that of a killed write, not one that is about to be committed."""


@dataclass(frozen=True, slots=True)
class Forgotten:
    """What was removed from one table, or would be in a dry run.

    Attributes:
        table: Its full name.
        rows: The number of removed rows; in ``gold.errors_day``, of rows from which samples were removed.
        files: The number of files that were rewritten without them.
        old_files: The number of files of earlier versions that were deleted; 0 in a dry run.
    """

    table: str
    rows: int
    files: int
    old_files: int = 0


def jobs_with_id(lake: Lake, job_id: str, queue: str | None = None) -> set[JobKey]:
    """Return the jobs with an id in any table; raise ``ConfigError`` if several queues have one and none is given."""
    found = set[str]()
    for one, table in _tables(lake.of_all_brokers(), JOBS):
        if table is not ERRORS_DAY:
            rows = one.existing(table).find(has_one_of(table.id_column, [job_id]), ["queue"])
            found.update(rows["queue"].to_pylist())
    queues = found if queue is None else found & {queue}
    if len(queues) > 1:
        raise ConfigError(f"several queues have a job {job_id!r}: {', '.join(sorted(queues))}; choose one")
    return {(name, job_id) for name in queues}


def jobs_where(lake: Lake, table: Table, condition: str) -> set[JobKey]:
    """Return the jobs of the rows of a table for which a condition in SQL is true.

    Raises:
        ConfigError: The condition is invalid, or the table has no rows of single jobs.
    """
    if table not in _OF_JOBS:
        names = ", ".join(table.full_name for table in _OF_JOBS)
        raise ConfigError(f"{table.full_name} has no rows of single jobs: use one of {names}")
    if (snapshot := lake.open(table)) is None:
        return set()
    try:
        found = snapshot.find(condition, ["queue", table.id_column])
    except DeltaError as exc:
        reason = str(exc).splitlines()[0]
        raise ConfigError(f"{condition!r} is not a condition on {table.full_name}: {reason}") from exc
    return {(queue, job_id) for queue, job_id in zip(*found.to_pydict().values(), strict=True) if job_id is not None}


def forget(
    lake: Lake, jobs: Collection[JobKey], *, last: Table = JOBS, reason: str | None = None, dry_run: bool = False
) -> list[Forgotten]:
    """Remove all rows of jobs from the tables, and delete the files of earlier versions, which have these rows, too.

    If it is killed, the same call continues: the rows of the table ``last``, by which the jobs were found, are removed
    after all others. What was done is recorded in the table ``_pipeline/forgotten``, without the jobs' ids.

    Args:
        last: The table by whose rows the jobs were found.
        reason: A text for the record, such as the number of a request.
        dry_run: Only count the rows.

    Returns:
        What was removed from each table.

    Raises:
        LakeError: The last batch is not finished.
        LakeInUseError: The pipeline is writing to the lake, or another process has changed a table.
    """
    lakes = lake.of_all_brokers()
    if dry_run:
        counted = [(table, [count for *_, count in _matches(one, table, jobs)]) for one, table in _tables(lakes, last)]
        return [Forgotten(table.full_name, sum(counts), len(counts)) for table, counts in counted]
    for one in lakes:
        _check_finished(one)
    with ExitStack() as locks:  # a pipeline would write the events of an open job again
        locked = [locks.enter_context(RunLock(one)).lake for one in lakes]
        for one in locked:
            _check_finished(one)
        results = [_remove(one, table, jobs) for one, table in _tables(locked, last)]
        for one in locked:
            one.check_claim()
    _record(lake, results, len(jobs), reason)
    return results


def _check_finished(lake: Lake) -> None:
    if _unfinished_batch(lake) is not None:
        raise LakeError(
            f"the last batch {lake.broker and f'of {lake.broker} '}in {lake.root} is not finished, because its "
            "pipeline was killed or stopped: run 'bulltask pipeline run --once' first; nothing was removed"
        )


def _tables(lakes: Sequence[Lake], last: Table) -> list[tuple[Lake, Table]]:
    """Return the existing tables with rows of single jobs, in order of removal, each with the lake that writes it."""
    shared = [*(table for table in (ERRORS_DAY, *_OF_JOBS) if table is not last), last]
    found = [*((one, one.open_events) for one in lakes), *((lakes[0], table) for table in shared)]
    return [(one, table) for one, table in found if one.open(table) is not None]


def _remove(lake: Lake, table: Table, jobs: Collection[JobKey]) -> Forgotten:
    """Rewrite the files with rows of the jobs, and delete all files of earlier versions."""
    snapshot = lake.existing(table)
    replaced: list[DataFile] = []
    new: list[DataFile] = []
    removed = 0
    for file, rows, count in _matches(lake, table, jobs):
        replaced.append(file)
        removed += count
        if rows.num_rows:
            new += lake.write(table, rows, "kept")
    # The pipeline's record is in the newest commit of its state: old ones leave the log, also after a vacuum.
    metadata = snapshot.last_metadata() if table == lake.open_events else None
    if replaced or metadata:
        _rewrite(snapshot, lake, new, replaced, metadata=metadata)
    old_files = lake.vacuum(table, timedelta(0), never_committed=False) + lake.vacuum(table, _KILLED_WRITE)
    if replaced:
        lake.shorten_log(table, snapshot.version + 1)
    return Forgotten(table.full_name, removed, len(replaced), old_files)


def _matches(lake: Lake, table: Table, jobs: Collection[JobKey]) -> Iterator[tuple[DataFile, Any, int]]:
    """Yield each file with rows of the jobs, its other rows, and the number of those to remove."""
    wanted, ids = set(jobs), sorted({job_id for _, job_id in jobs})
    column, files = table.id_column, lake.existing(table).files()
    for file in files if table is ERRORS_DAY else files_with(files, column, ids):
        dataset = dataset_of(lake, table, [file])
        if table is not ERRORS_DAY and not dataset.count_rows(filter=ds.field(column).isin(ids)):
            continue
        rows = dataset.to_table()
        if table is ERRORS_DAY:
            kept, count = _without_samples(rows, wanted)
        else:
            keys = zip(rows["queue"].to_pylist(), rows[column].to_pylist(), strict=True)
            kept = rows.filter(pa.array([key not in wanted for key in keys], pa.bool_()))
            count = rows.num_rows - kept.num_rows  # other queues may have jobs with these ids
        if count:
            yield file, kept, count


def _without_samples(rows: Any, wanted: Collection[JobKey]) -> tuple[Any, int]:
    changed, all_rows = 0, rows.to_pylist()
    for row in all_rows:
        samples = row["sample_job_ids"] or []
        kept = [job_id for job_id in samples if (row["queue"], job_id) not in wanted]
        if len(kept) < len(samples):
            changed += 1
            row |= {"sample_job_ids": kept, "sample_failed_reason": None}  # whose reason it is, is unknown
    return pa.Table.from_pylist(all_rows, arrow_schema(ERRORS_DAY)), changed


def _record(lake: Lake, results: Sequence[Forgotten], jobs: int, reason: str | None) -> None:
    now = datetime.now(UTC)
    same = {"forgotten_at": now, "reason": reason, "jobs": jobs, "dt": f"{now.date()}"}
    rows = [{**same, **asdict(result), "table_name": result.table} for result in results]
    lake.commit(FORGOTTEN, lake.write(FORGOTTEN, pa.Table.from_pylist(rows, arrow_schema(FORGOTTEN)), "record"))
