"""Write the pipeline's batches. Spark calls `BatchWriter` for each batch.

::

    read Redis once -> staging: bronze -> staging: silver, open jobs -> publish -> ledger -> Spark's checkpoint

Spark does the first step; this module does the rest, with Arrow (:mod:`~bulltask.spark.tables.silver`).

A batch is published after all of its files are written, and it is committed once it is in the ledger. A batch may
therefore be killed at any moment: when it runs again, it first removes its files from the tables.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Final

import pyarrow.compute as pc
from pyspark.sql import DataFrame

from bulltask.jobs.clock import mono_ms, wall_ms
from bulltask.jobs.errors import LakeError
from bulltask.lake.atomic_swap import hold_swaps
from bulltask.lake.layout import Layout, batch_ingest_id, batch_of, list_directories
from bulltask.lake.ledger import BatchRecord, Ledger
from bulltask.lake.staging import Staging, write_file
from bulltask.lake.tables import ATTEMPTS, EVENTS, GAPS, JOBS, Table
from bulltask.spark.tables import bronze
from bulltask.spark.tables.completeness import check_complete
from bulltask.spark.tables.silver import derive_silver
from bulltask.spark.tables.state import earlier_events, read_open_events

__all__ = ["BatchWriter"]

_OPEN_JOBS: Final = "open_jobs"  # under staging

_TABLES: Final = (EVENTS, GAPS, ATTEMPTS, JOBS)

_CONF: Final[Mapping[str, str]] = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    # A batch is small and its size is known, so adaptive execution would only cost time.
    "spark.sql.adaptive.enabled": "false",
    # A task has rows from few queues: it can write their files at the same time, without sorting the rows first.
    "spark.sql.maxConcurrentOutputFileWriters": "64",
}
"""Settings of the query's session, which is a copy of the user's."""


@dataclass(frozen=True)
class BatchWriter:
    """Writes each batch. Spark serializes it for the process that runs the batches, so it has no references to Spark.

    Attributes:
        root: The directory of the lake.
        open_job_timeout_ms: The time without events after which an open job times out.
        hash_tag: Whether BullMQ's name for queue ``emails`` is ``{emails}``.
    """

    root: str
    open_job_timeout_ms: int
    hash_tag: bool

    def __call__(self, batch: DataFrame, batch_id: int) -> None:
        """Write a batch.

        Raises:
            LakeError: The lake is ahead of the checkpoint, or the batch is not complete.
        """
        layout = Layout(self.root)
        ledger, ingest_id = Ledger(layout), batch_ingest_id(_query_id(layout), batch_id)
        head = ledger.head()
        if head is not None and head.ingest_id == ingest_id:
            return  # the batch was committed, but Spark was killed before it committed its checkpoint
        if ledger.has(ingest_id):
            raise LakeError(
                f"batch {ingest_id} and later batches are already in {layout.root}: the checkpoint is older than the "
                f"lake. Delete {layout.checkpoint}: the next run continues after the lake's last event"
            )
        _clean_up(layout, ledger)
        _BatchRun(self, layout, ledger, head, ingest_id).write(batch)


class _BatchRun:
    """One batch, from its rows to its record in the ledger."""

    def __init__(
        self, writer: BatchWriter, layout: Layout, ledger: Ledger, head: BatchRecord | None, ingest_id: str
    ) -> None:
        self._writer = writer
        self._layout = layout
        self._ledger = ledger
        self._ingest_id = ingest_id
        self._head = head or BatchRecord("", number=0)
        self._staging = Staging(layout, ingest_id)
        self._open_jobs_ingest_id = self._head.open_jobs_ingest_id
        self._open_job_events = self._head.open_job_events
        self._oldest_ms = self._head.oldest_open_event_ms
        self._steps_ms: dict[str, int] = {}

    def write(self, batch: DataFrame) -> None:
        for name, value in _CONF.items():
            batch.sparkSession.conf.set(name, value)
        with self._step("bronze"):
            read = bronze.stage(batch, self._staging, datetime.now(UTC))
            check_complete(self._layout, self._ingest_id, read.queues, hash_tag=self._writer.hash_tag)
        counts = self._derive(read) if read.events else {}
        with self._step("publish"):
            self._ledger.begin_publishing(self._ingest_id)
            self._staging.publish(_TABLES)
            self._publish_open_jobs()
        self._ledger.commit(self._record(read, counts))
        self._staging.clear()
        for old in list_directories(self._layout.open_jobs):
            if old.name != self._open_jobs_ingest_id:
                shutil.rmtree(old)

    def _derive(self, read: bronze.BronzeBatch) -> dict[Table, int]:
        """Write the rows of attempts and jobs, and the open events; return the number of rows."""
        with self._step("derive"):
            open_events = (
                None if self._open_jobs_ingest_id is None else read_open_events(self._layout, self._open_jobs_ingest_id)
            )
            # Files must not be moved during the lookup, because it is not retried.
            with hold_swaps(self._layout):
                find_earlier = partial(earlier_events, self._layout)
                derived = derive_silver(
                    read.lifecycle_events, open_events, find_earlier, self._time_out_before_ms(read)
                )
        tables = {ATTEMPTS: derived.attempts, JOBS: derived.jobs}
        for table, rows in tables.items():
            with self._step(table.name):
                self._staging.write(table, rows)
        self._open_job_events = derived.open_events.num_rows
        self._open_jobs_ingest_id = None
        self._oldest_ms = pc.min(derived.open_events["event_ms"]).as_py() or 0
        if self._open_job_events:
            with self._step("open_jobs"):
                self._open_jobs_ingest_id = self._ingest_id
                write_file(self._staging.directory(_OPEN_JOBS), derived.open_events)
        return {table: rows.num_rows for table, rows in tables.items()}

    def _time_out_before_ms(self, read: bronze.BronzeBatch) -> int:
        """Return the cutoff: open jobs whose last event is older time out; 0 if no event is older."""
        time_out_before_ms = max(read.newest_ms, self._head.newest_event_ms) - self._writer.open_job_timeout_ms
        oldest_ms = min(read.oldest_ms, self._head.oldest_open_event_ms or read.oldest_ms)
        return time_out_before_ms if oldest_ms < time_out_before_ms else 0

    def _publish_open_jobs(self) -> None:
        if self._open_jobs_ingest_id == self._ingest_id:
            self._layout.open_jobs.mkdir(exist_ok=True)
            self._staging.directory(_OPEN_JOBS).rename(self._layout.open_jobs / self._ingest_id)

    def _record(self, read: bronze.BronzeBatch, counts: Mapping[Table, int]) -> BatchRecord:
        head = self._head
        query, number = batch_of(self._ingest_id)
        lost = {queue: head.lost.get(queue, 0) + record.lost for queue, record in read.queues.items() if record.lost}
        return BatchRecord(
            self._ingest_id,
            previous=head.ingest_id or None,
            number=head.number + 1,
            written_ms=wall_ms(),
            newest_event_ms=max(head.newest_event_ms, read.newest_ms),
            queues=read.queues,
            last_ids={**head.last_ids, **{queue: record.last for queue, record in read.queues.items() if record.last}},
            lost={**head.lost, **lost},
            attempts=counts.get(ATTEMPTS, 0),
            jobs=counts.get(JOBS, 0),
            open_jobs_ingest_id=self._open_jobs_ingest_id,
            open_job_events=self._open_job_events,
            oldest_open_event_ms=self._oldest_ms,
            steps_ms=self._steps_ms,
            queries={**head.queries, query: number},
        )

    @contextmanager
    def _step(self, name: str) -> Iterator[None]:
        start_ms = mono_ms()
        yield
        self._steps_ms[name] = mono_ms() - start_ms


def _clean_up(layout: Layout, ledger: Ledger) -> None:
    """Remove the files of a batch that was killed while it was published."""
    interrupted, head = ledger.publishing(), ledger.head()
    if interrupted is not None and (head is None or head.ingest_id != interrupted):
        layout.remove(interrupted, _TABLES)
        shutil.rmtree(layout.open_jobs / interrupted, ignore_errors=True)


def _query_id(layout: Layout) -> str:
    """Return Spark's id for the query, from the checkpoint, because Spark Connect does not provide it."""
    return str(json.loads((layout.checkpoint / "metadata").read_text())["id"])
