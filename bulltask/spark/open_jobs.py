"""The silver rows of a batch, and the events of open jobs that are kept for later batches.

``_pipeline/open_jobs`` has the events of the jobs that are open. Rewriting all of them in each batch would make a batch
slower with each open job, so a batch only adds the rows of its own jobs: those of a job that is still open, and a row
without an event for a job that no longer is. Of a job's rows, only those of the last batch count. Now and then, a batch
reads all rows and writes the current ones (`FoldPlan.rewrites`).

A large batch is folded by Spark's executors: each task handles the jobs of some shards, with the open events of the
same shards. The functions in this module therefore work on all shards or on some.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from functools import partial
from typing import Any, Final, Self
from zlib import crc32

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from bulltask.lake.history import CLOCK_DIFFERENCE, day_portions
from bulltask.lake.reader import TableReader, dataset_of
from bulltask.lake.storage import DataFile, Lake, arrow_schema, batch_prefix
from bulltask.lake.tables import ATTEMPTS, EVENTS, JOBS
from bulltask.spark.lifecycle import LIFECYCLE_COLUMNS, derive_silver, job_numbers, lifecycle_events

SHARDS: Final = 8
"""The number of shards. Stored rows depend on it."""

_ALL_SHARDS: Final = "all"
_KEY: Final = ["queue", "job_id"]
_MANY_ROWS: Final = 50_000
"""Of files with more rows, only the row groups are read that may have one of the wanted jobs."""

_MAX_CACHED_FILES: Final = 10_000

Ints = npt.NDArray[np.int64]

_SCAN: Final = {"batch_size": 131_072, "batch_readahead": 4, "fragment_readahead": 8}


@dataclass(frozen=True, slots=True)
class FoldPlan:
    """What a batch's fold reads and how it writes.

    Attributes:
        number: The number of the batch.
        files: The batch's files of ``bronze.events``.
        open_files: The files of the table of open events.
        rewrites: Whether the fold replaces these files, instead of adding some.
        by_shard: Whether each shard gets its own file of open events; otherwise, all are in one.
        time_out_before_ms: Open jobs whose last event is older time out; 0 if no job does.
    """

    number: int
    files: Sequence[DataFile]
    open_files: Sequence[DataFile]
    rewrites: bool
    by_shard: bool
    time_out_before_ms: int


@dataclass(frozen=True, slots=True)
class FoldResult:
    """What a fold has written.

    Attributes:
        attempts, jobs, open_jobs: The new files of each table.
        open_before: The number of current open events among those that were read.
        open_after: The number of open events that were written.
        idle_since_ms: The time of the last event of the open job, among those, that has been idle for the longest time;
            0 without open jobs.
    """

    attempts: Sequence[DataFile]
    jobs: Sequence[DataFile]
    open_jobs: Sequence[DataFile]
    open_before: int
    open_after: int
    idle_since_ms: int

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Self:
        """Decode the result of :meth:`to_json`."""
        files = {name: [DataFile(**file) for file in stored[name]] for name in ("attempts", "jobs", "open_jobs")}
        return cls(**{**stored, **files})

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        return asdict(self)


def fold(lake: Lake, plan: FoldPlan, shards: Collection[int] | None = None) -> FoldResult:
    """Derive the silver rows of a batch's events, of all jobs or those of some shards; write these and open events."""
    new = dataset_of(lake, EVENTS, plan.files).to_table(columns=list(LIFECYCLE_COLUMNS), **_SCAN)
    new = lifecycle_events(new if shards is None else new.filter(pa.array(np.isin(_shards(new), list(shards)))))
    before = open_events(lake, plan.open_files, None if plan.rewrites else new, shards)
    find_earlier = partial(earlier_events, lake, new)
    derived = derive_silver(new, before if before.num_rows else None, find_earlier, plan.time_out_before_ms)
    prefix, after = batch_prefix(plan.number), derived.open_events
    rows = after if plan.rewrites else pa.concat_tables([after, _ended(before, after)])
    stored_shards = pa.array(_shards(rows).astype(str)) if plan.by_shard else pa.repeat(_ALL_SHARDS, rows.num_rows)
    rows = rows.append_column("batch", pa.repeat(plan.number, rows.num_rows)).append_column("shard", stored_shards)
    return FoldResult(
        lake.write(ATTEMPTS, derived.attempts, prefix),
        lake.write(JOBS, derived.jobs, prefix),
        lake.write(lake.open_events, rows, prefix),
        before.num_rows,
        after.num_rows,
        _idle_since_ms(after),
    )


def open_events(
    lake: Lake, files: Sequence[DataFile], jobs: pa.Table | None = None, shards: Collection[int] | None = None
) -> pa.Table:
    """Return the open events in files of the table: of some jobs (``queue``, ``job_id``), or of all."""
    if shards is not None:
        files = [file for file in files if file.partition in {_ALL_SHARDS, *map(str, shards)}]
    chosen = None if jobs is None else pc.field("job_id").isin(pc.unique(jobs["job_id"]))
    dataset = dataset_of(lake, lake.open_events, files)
    if jobs is not None and sum(file.rows for file in files) > _MANY_ROWS:
        dataset = _row_groups(lake, dataset, jobs)
    rows = dataset.to_table(columns=[*LIFECYCLE_COLUMNS, "batch"], filter=chosen, **_SCAN)
    if shards is not None and any(file.partition == _ALL_SHARDS for file in files):
        rows = rows.filter(pa.array(np.isin(_shards(rows), list(shards))))
    wanted = rows if jobs is None else jobs
    numbers = job_numbers(pa.concat_tables([wanted.select(_KEY), rows.select(_KEY)]))
    row_jobs = numbers[wanted.num_rows :]
    batches = rows["batch"].to_numpy()
    newest = np.zeros(np.max(numbers, initial=-1) + 1, np.int64)
    np.maximum.at(newest, row_jobs, batches)
    is_current = (batches == newest[row_jobs]) & (row_jobs <= np.max(numbers[: wanted.num_rows], initial=-1))
    return rows.filter(pc.and_(pa.array(is_current), pc.is_valid(rows["event"]))).select(LIFECYCLE_COLUMNS)


_indexes: dict[str, tuple[Ints, Ints]] = {}
"""Of files that this process has read before: the hashes of the jobs in each row group, and the number of the group.

They are sorted by hash. Files never change.
"""


def _row_groups(lake: Lake, dataset: Any, jobs: pa.Table) -> Any:
    """Return the part of a dataset with the row groups that may have rows of some jobs."""
    fragments, wanted = [], _hashes(jobs)
    if len(_indexes) > _MAX_CACHED_FILES:
        _indexes.clear()
    for fragment in dataset.get_fragments():
        key = f"{lake.root}/{fragment.path}"
        if key not in _indexes:
            _indexes[key] = _index(fragment)
        hashes, groups = _indexes[key]
        first, end = np.searchsorted(hashes, wanted), np.searchsorted(hashes, wanted, "right")
        found: set[int] = set()
        while np.any(first < end):  # a job may be in several row groups
            found.update(np.unique(groups[first[first < end]]).tolist())
            first = first + 1
        if found:
            fragments.append(fragment.subset(row_group_ids=sorted(found)))
    return ds.FileSystemDataset(fragments, dataset.schema, dataset.format, dataset.filesystem)


def _index(fragment: Any) -> tuple[Ints, Ints]:
    parts = [_hashes(group.to_table(columns=_KEY)) for group in fragment.split_by_row_group()]
    hashes = np.concatenate([np.zeros(0, np.int64), *parts])
    groups = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    order = np.argsort(hashes)
    return hashes[order], groups[order]


def _hashes(rows: pa.Table) -> Ints:
    """Return the hashes, only valid in this process, of the rows' jobs, sorted."""
    return np.unique(np.fromiter(map(hash, pc.unique(_joined(rows, *_KEY)).to_pylist()), np.int64))


def earlier_events(lake: Lake, new: pa.Table, jobs: pa.Table) -> pa.Table | None:
    """Return the events of some jobs (``queue``, ``job_id``) in the lake, except new ones; ``None`` if there are none.

    Of an id that was used again, these are at least the events of the last job.
    """
    reader = TableReader(lake)
    queues, ids = (pc.unique(jobs[name]).to_pylist() for name in _KEY)
    schema = pa.schema([arrow_schema(EVENTS).field(name) for name in LIFECYCLE_COLUMNS])
    rows = reader.scan(
        EVENTS,
        _days_since_added(reader, jobs),
        lambda batches: pa.Table.from_batches(batches, schema),
        columns=LIFECYCLE_COLUMNS,
        queue=queues,
        job_ids=ids,
    )
    rows = rows.filter(pc.is_in(_joined(rows, *_KEY), _joined(jobs, *_KEY)))
    # The batch's own events are in the table, too.
    entry = (*_KEY, "event_ms", "event_seq")
    rows = rows.filter(pc.invert(pc.is_in(_joined(rows, *entry), _joined(new, *entry))))
    return rows if rows.num_rows else None


def _days_since_added(reader: TableReader, jobs: pa.Table) -> list[date]:
    """Return the days of events since the last of the jobs with each id was added; all days if one is unknown.

    If ids are random, each day may have the jobs: the newest days are read first, as most jobs are retried soon.
    """
    days, first = reader.days(EVENTS), date.max
    wanted = {(row["queue"], row["job_id"]) for row in jobs.to_pylist()}
    ids = {job_id for _, job_id in wanted}
    for portion in day_portions(reader.days(JOBS)[::-1]):
        rows = reader.rows(JOBS, portion, columns=[*_KEY, "created_at"], job_ids=ids)
        found = [row for row in rows if (row["queue"], row["job_id"]) in wanted]
        if any(row["created_at"] is None for row in found):
            break
        first = min((first, *(row["created_at"].date() for row in found)))
        wanted.difference_update((row["queue"], row["job_id"]) for row in found)
        if not wanted:
            return [day for day in days if day >= first - CLOCK_DIFFERENCE]
    return days


def _ended(before: pa.Table, after: pa.Table) -> pa.Table:
    """Return a row without an event for each job that was open before and is not after."""
    numbers = job_numbers(pa.concat_tables([after.select(_KEY), before.select(_KEY)]))
    _, first = np.unique(numbers, return_index=True)
    ended = before.select(_KEY).take(first[first >= after.num_rows] - after.num_rows)
    columns = [
        ended[field.name] if field.name in _KEY else pa.nulls(ended.num_rows, field.type) for field in after.schema
    ]
    return pa.Table.from_arrays(columns, schema=after.schema)


def _idle_since_ms(events: pa.Table) -> int:
    jobs = job_numbers(events)
    last_ms = np.zeros(np.max(jobs, initial=-1) + 1, np.int64)
    np.maximum.at(last_ms, jobs, events["event_ms"].to_numpy())
    return int(np.min(last_ms)) if len(last_ms) else 0


def _shards(events: pa.Table) -> Ints:
    """Return the shard of each event's job; it is the same in all processes."""
    hashes = np.zeros(events.num_rows, np.int64)
    for name in _KEY:
        encoded = events[name].fill_null("").combine_chunks().dictionary_encode()
        values = np.array([crc32(text.encode()) for text in encoded.dictionary.to_pylist()], np.int64)
        hashes ^= values[encoded.indices.to_numpy()] if len(values) else 0
    return hashes % SHARDS


def _joined(rows: pa.Table, *names: str) -> Any:
    """Return the values of some columns as one text."""
    return pc.binary_join_element_wise(*(rows[name].cast(pa.string()) for name in names), "\0")
