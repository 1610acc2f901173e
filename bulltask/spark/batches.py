"""Write the pipeline's batches. Spark calls `BatchWriter` for each batch.

Spark's tasks have then written the batch's events to files (:mod:`~bulltask.spark.bronze`). The driver does the rest,
one commit for each table, in this order::

    bronze.events -> bronze.gaps -> silver.attempts -> silver.jobs -> _pipeline/open_jobs, with the batch's record

Each commit has the batch's number, and a table refuses a number that it already has. The process may be killed at any
moment. Before the first commit, nothing has happened: Spark runs the batch again. After it, :func:`complete` makes the
missing commits from the files that ``bronze.events`` has, because Redis may have trimmed these events by then.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final, Self

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StringType

from bulltask.jobs.clock import mono_ms, wall_ms
from bulltask.jobs.errors import LakeError
from bulltask.lake.formatting import pluralize
from bulltask.lake.ledger import BatchRecord, QueueRecord, last_record
from bulltask.lake.storage import Lake, Snapshot, arrow_schema, batch_prefix
from bulltask.lake.tables import ATTEMPTS, EVENTS, GAPS, JOBS, MAX_TIME_MS
from bulltask.spark.bronze import ReadPart, gap_rows, merge_parts
from bulltask.spark.open_jobs import SHARDS, FoldPlan, FoldResult, fold
from bulltask.spark.sink import vectorized_udf
from bulltask.spark.source.offsets import StreamId, batch_start, decode_offsets
from bulltask.spark.source.options import row_name
from bulltask.spark.source.planning import ExpectedRows, expected_rows

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

_MIN_EVENTS_FOR_EXECUTORS: Final = 50_000
"""Smaller batches are folded by the driver: a Spark job would take longer."""

_ROWS_PER_TASK: Final = 100_000
"""Two tasks need a third more CPU time than one, because each of them looks for its jobs among all events."""

_MIN_ROWS_BY_SHARD: Final = 20_000
"""Fewer open events are rewritten to one file."""

_MAX_OPEN_FILES: Final = 40
_MAX_UNUSED_ROWS: Final = 20_000
"""The open events are rewritten if, apart from this number of rows, more than half of their rows no longer count; or if
they have more files than this, and one more for every so many rows."""

_TIME_OUT_SLACK: Final = 1 / 32
"""Reading all open jobs takes time, so a batch does not do it whenever a single one times out, but a little later."""


@dataclass(frozen=True, slots=True)
class BatchRead:
    """A batch whose events are in ``bronze.events``: the metadata of that commit.

    Attributes:
        number: The number of the batch.
        query, batch: The beginning of the id of the Spark query, and Spark's number of the batch.
        detected_us: When its gaps were detected: microseconds since the epoch.
        open_job_timeout_ms: The time without events after which an open job times out.
        read_ms: How long reading took.
        part: The files, the counts of each queue, and the gaps.
    """

    number: int
    query: str
    batch: int
    detected_us: int
    open_job_timeout_ms: int
    read_ms: int
    part: ReadPart

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Self:
        """Decode the result of :meth:`to_json`."""
        return cls(**{**stored, "part": ReadPart.from_json(stored["part"])})

    def to_json(self) -> dict[str, Any]:
        """Return the batch as JSON values, without the statistics of files."""
        files = [replace(file, low={}, high={}) for file in self.part.files]
        return {**asdict(self), "part": replace(self.part, files=files).to_json()}

    @property
    def events(self) -> int:
        """The number of rows of ``bronze.events``."""
        return sum(queue.events for queue in self.part.queues.values())

    @property
    def newest_ms(self) -> int:
        """The time of the newest event up to the year 9999; 0 without events."""
        ends_ms = [StreamId.parse(record.last).ms for record in self.part.queues.values() if record.last]
        # Ignore later times: compared with them, all jobs would be too old.
        return max((ms for ms in ends_ms if ms <= MAX_TIME_MS), default=0)

    @property
    def oldest_ms(self) -> int:
        """The time of the oldest event; 0 without events."""
        return min((StreamId.parse(record.first).ms for record in self.part.queues.values() if record.first), default=0)


@dataclass(frozen=True)
class BatchWriter:
    """Writes each batch. Spark serializes it for the process that runs the batches, so it has no references to Spark.

    ``hash_tag`` is whether BullMQ's name for queue ``emails`` is ``{emails}``.
    """

    lake: Lake
    checkpoint: Path
    open_job_timeout_ms: int
    hash_tag: bool

    def __call__(self, batch: DataFrame, batch_id: int) -> None:
        """Write a batch, unless it is already in the lake."""
        head, query = complete(self.lake), query_of(self.checkpoint)
        if head.queries.get(query) == batch_id:
            return  # the batch is complete, but Spark was killed before it committed its checkpoint
        if query in head.queries and (batch_id <= head.queries[query] or head.query not in {"", query}):
            self.lake.check_claim()
            raise LakeError(
                f"batch {batch_id} of query {query} and later batches are already in {self.lake.root}: the checkpoint "
                f"is older than the lake. Delete {self.checkpoint}: the next run continues after the lake's last event"
            )
        start_ms = mono_ms()
        part = merge_parts(ReadPart.from_json(json.loads(row.part)) for row in batch.collect())
        prefix = self.lake.queue_prefix
        named = {name.removeprefix(prefix): record for name, record in part.queues.items()}
        check_complete(self.lake.root, self.checkpoint, batch_id, named, hash_tag=self.hash_tag)
        detected_us = (datetime.now(UTC) - _EPOCH) // timedelta(microseconds=1)
        number, timeout_ms, read_ms = head.number + 1, self.open_job_timeout_ms, mono_ms() - start_ms
        read = BatchRead(number, query, batch_id, detected_us, timeout_ms, read_ms, part)
        if not self.lake.commit(EVENTS, part.files, batch=number, metadata=read.to_json()):
            raise self.lake.taken_over_error()
        _complete(self.lake, head, read, batch.sparkSession)


def query_of(checkpoint: Path) -> str:
    """Return the beginning of a query's id, from Spark's checkpoint, because Spark Connect does not provide it."""
    return str(json.loads((checkpoint / "metadata").read_text())["id"]).replace("-", "")[:8]


def complete(lake: Lake) -> BatchRecord:
    """Complete the batch that was interrupted after its events had been added to ``bronze.events``, if there is one.

    Returns:
        The record of the last batch; that of no batch before the first.

    Raises:
        LakeError: The lake lacks batches in ``_pipeline/open_jobs``.
    """
    events = lake.open(EVENTS)
    head = last_record(lake) or BatchRecord()
    if events is None or events.batch <= head.number:
        return head
    if events.batch > head.number + 1:
        raise LakeError(
            f"{lake.location(EVENTS)} has batch {events.batch:,}, but {lake.location(lake.open_events)} only has "
            f"{head.number:,}: restore both from the same backup"
        )
    stored = (stored for stored in events.metadata() if stored.get("number") == events.batch)
    return _complete(lake, head, BatchRead.from_json(next(stored)), None)


def _complete(lake: Lake, head: BatchRecord, read: BatchRead, spark: SparkSession | None) -> BatchRecord:
    """Make the commits that follow the commit of the events. Without a session, the driver does all the work."""
    number, steps_ms = read.number, {"read": read.read_ms}
    gaps = gap_rows(read.part.gaps, _EPOCH + timedelta(microseconds=read.detected_us))
    if gaps:
        rows = pa.Table.from_pylist(gaps, arrow_schema(GAPS))
        lake.commit(GAPS, lake.write(GAPS, rows, batch_prefix(number)), batch=number)
    plan = _plan(head, read, lake.open(lake.open_events))
    with _step(steps_ms, "derive"):
        folded = _fold(lake, plan, read.events, spark)
    with _step(steps_ms, "commit"):
        for table, files in ((ATTEMPTS, folded.attempts), (JOBS, folded.jobs)):
            if files:
                lake.commit(table, files, batch=number)
    record = _record(head, read, plan, folded, steps_ms)
    replaced = plan.open_files if plan.rewrites else []
    if lake.commit(lake.open_events, folded.open_jobs, batch=number, metadata=record.to_json(), replaced=replaced):
        lake.delete(lake.open_events, replaced)
    return record


def _plan(head: BatchRecord, read: BatchRead, before: Snapshot | None) -> FoldPlan:
    open_files = [] if before is None else before.files()
    stored = sum(file.rows for file in open_files)
    time_out_before_ms = max(read.newest_ms, head.newest_event_ms) - read.open_job_timeout_ms
    late_ms = time_out_before_ms - round(read.open_job_timeout_ms * _TIME_OUT_SLACK)
    has_old_jobs = 0 < head.idle_since_ms < late_ms
    has_many_files = len(open_files) > _MAX_OPEN_FILES + stored // _MAX_UNUSED_ROWS
    rewrites = has_old_jobs or has_many_files or stored > 2 * head.open_job_events + _MAX_UNUSED_ROWS
    return FoldPlan(
        read.number,
        read.part.files,
        open_files,
        rewrites,
        by_shard=rewrites and head.open_job_events > _MIN_ROWS_BY_SHARD,
        time_out_before_ms=time_out_before_ms if has_old_jobs or 0 < read.oldest_ms < time_out_before_ms else 0,
    )


def _fold(lake: Lake, plan: FoldPlan, events: int, spark: SparkSession | None) -> FoldResult:
    if not events and not plan.rewrites:
        return FoldResult((), (), (), 0, 0, 0)
    if spark is None or events < _MIN_EVENTS_FOR_EXECUTORS:
        return fold(lake, plan)

    total = events + sum(file.rows for file in plan.open_files if plan.rewrites)
    tasks = max(1, min(SHARDS, total // _ROWS_PER_TASK))
    fold_shards = vectorized_udf(partial(_fold_shards, lake, plan), StringType())
    column = fold_shards(F.col("id")).alias("result")
    rows = spark.range(0, SHARDS, 1, tasks).select(column).where("result is not null").collect()
    results = [FoldResult.from_json(json.loads(row.result)) for row in rows]
    return FoldResult(
        [file for result in results for file in result.attempts],
        [file for result in results for file in result.jobs],
        [file for result in results for file in result.open_jobs],
        sum(result.open_before for result in results),
        sum(result.open_after for result in results),
        min((result.idle_since_ms for result in results if result.idle_since_ms), default=0),
    )


def _fold_shards(lake: Lake, plan: FoldPlan, arrays: Iterator[pa.Array]) -> Iterator[pa.Array]:
    """Fold the shards of a task together; return the result as JSON beside the first of them, and nulls beside others.

    A function of columns returns as many elements as it gets.
    """
    for shards in arrays:
        result = json.dumps(fold(lake, plan, None if len(shards) == SHARDS else shards.to_pylist()).to_json())
        yield pa.array([result, *[None] * (len(shards) - 1)], pa.string())


def _record(
    head: BatchRecord, read: BatchRead, plan: FoldPlan, folded: FoldResult, steps_ms: Mapping[str, int]
) -> BatchRecord:
    queues = read.part.queues
    lost = {queue: head.lost.get(queue, 0) + record.lost for queue, record in queues.items() if record.lost}
    gaps = {queue: head.gaps.get(queue, 0) + record.gaps for queue, record in queues.items() if record.gaps}
    others = 0 if plan.rewrites else head.open_job_events - folded.open_before
    idle_ms = [ms for ms in (folded.idle_since_ms, head.idle_since_ms if others else 0) if ms]
    return BatchRecord(
        number=read.number,
        written_ms=wall_ms(),
        newest_event_ms=max(head.newest_event_ms, read.newest_ms),
        queues=queues,
        last_ids={**head.last_ids, **{queue: record.last for queue, record in queues.items() if record.last}},
        lost={**head.lost, **lost},
        gaps={**head.gaps, **gaps},
        attempts=sum(file.rows for file in folded.attempts),
        jobs=sum(file.rows for file in folded.jobs),
        open_job_events=others + folded.open_after,
        idle_since_ms=min(idle_ms, default=0),
        steps_ms=steps_ms,
        query=read.query,
        queries={**head.queries, read.query: read.batch},
    )


@contextmanager
def _step(steps_ms: dict[str, int], name: str) -> Iterator[None]:
    start_ms = mono_ms()
    yield
    steps_ms[name] = mono_ms() - start_ms


# An executor may have another directory at the lake's path (a local disk instead of a shared one); the commit of its
# files then fails. Events may also be missing from a read. Offsets count every entry that was ever added, so a batch's
# start and end offsets determine its number of rows.


def check_complete(
    root: str, checkpoint: Path, batch_id: int, records: Mapping[str, QueueRecord], *, hash_tag: bool
) -> None:
    """Compare the records of a batch, by queue name without the hash tag, with its offsets.

    Raises:
        LakeError: Rows are missing or duplicated.
    """
    end = _offset(checkpoint, batch_id)
    begin = batch_start(None if batch_id == 0 else _offset(checkpoint, batch_id - 1), end)
    if begin is None:  # an older version of bulltask planned the first batch
        return
    expectations: defaultdict[str, ExpectedRows] = defaultdict(partial(ExpectedRows, 0))
    for name, end_offset in decode_offsets(end).items():
        # Two queues may have the same name: offsets also contain queues that are now skipped.
        expectations[row_name(name, hash_tag=hash_tag)] += expected_rows(begin.get(name), end_offset)
    for queue, expected in expectations.items():
        record = records.get(queue, QueueRecord())
        if not expected.is_met(record.events, record.lost, record.gaps):
            events = "events" if expected.count is None else pluralize(expected.count, "event")
            raise LakeError(
                f"[BULLTASK_BATCH_INCOMPLETE] batch {batch_id} should contain {events} from queue {queue!r}, "
                f"but its tasks have read {record.events:,} and recorded {record.lost:,} as lost. Nothing was added to "
                f"{root}: run the pipeline again before Redis trims these events"
            )


def _offset(checkpoint: Path, number: int) -> dict[str, Any]:
    """Return the offset at which a batch ends: the last line of Spark's file, after two header lines."""
    stored: dict[str, Any] = json.loads((checkpoint / "offsets" / str(number)).read_text().splitlines()[-1])
    return stored
