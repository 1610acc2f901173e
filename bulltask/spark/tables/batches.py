"""One batch of a lake's stream after the other: what Spark calls for each of them.

::

    read Redis once -> staging: bronze -> staging: silver, carry -> into the tables -> ledger -> Spark notes the batch

Spark does the first step; the rest is done here, with Arrow (:mod:`~bulltask.spark.tables.silver`).

Nothing is in the tables before all of it is written, and the ledger decides what counts. So a batch may be killed at
any moment: done again, it first takes away what it had put into the tables.
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

from bulltask.clock import mono_ms, wall_ms
from bulltask.errors import LakeError
from bulltask.lake.atomic_swap import hold_swaps
from bulltask.lake.layout import Layout, batch_of, ingest_id, listed
from bulltask.lake.ledger import BatchRecord, Ledger
from bulltask.lake.staging import Staging, write_file
from bulltask.lake.tables import ATTEMPTS, EVENTS, GAPS, JOBS, Table
from bulltask.spark.tables import bronze
from bulltask.spark.tables.completeness import check_complete
from bulltask.spark.tables.silver import derive_silver
from bulltask.spark.tables.state import earlier_events, read_open_events

__all__ = ["BatchWriter"]

_CARRY: Final = "carry"  # under staging

_WRITTEN: Final = (EVENTS, GAPS, ATTEMPTS, JOBS)

_CONF: Final[Mapping[str, str]] = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    # Of few rows that are known beforehand there is nothing to adapt to, and each look costs time.
    "spark.sql.adaptive.enabled": "false",
    # A task has rows of few queues: it writes their files side by side, and need not sort the rows for it.
    "spark.sql.maxConcurrentOutputFileWriters": "64",
}
"""Of the session of the stream, which is a copy of the user's."""


@dataclass(frozen=True)
class BatchWriter:
    """Responsible for what each batch writes; it travels to where Spark runs it, and holds nothing of Spark.

    Attributes:
        root: directory of the lake.
        max_open_ms: how long a job may be without an event until it is given up.
        hash_tag: queue ``emails`` is BullMQ's ``{emails}``.
    """

    root: str
    max_open_ms: int
    hash_tag: bool

    def __call__(self, batch: DataFrame, batch_id: int) -> None:
        """Write a batch.

        Raises:
            LakeError: the lake is ahead of the checkpoint, or not all of the batch is there.
        """
        layout = Layout(self.root)
        ledger, ingest = Ledger(layout), ingest_id(_query_id(layout), batch_id)
        head = ledger.head()
        if head is not None and head.ingest == ingest:
            return  # Spark had no time to note that it was done
        if ledger.has(ingest):
            raise LakeError(
                f"batch {ingest} is in the lake {layout.root} already, and others behind it: the checkpoint is older "
                f"than the lake. Remove {layout.checkpoint}, and the stream goes on behind the lake's last event"
            )
        _clean_up(layout, ledger)
        _Batch(self, layout, ledger, head, ingest).write(batch)


class _Batch:
    """Responsible for one batch, from its rows to its record."""

    def __init__(
        self, rules: BatchWriter, layout: Layout, ledger: Ledger, head: BatchRecord | None, ingest: str
    ) -> None:
        self._rules, self._layout, self._ledger, self._ingest = rules, layout, ledger, ingest
        self._head = head or BatchRecord("", number=0)
        self._staging = Staging(layout, ingest)
        self._carry, self._carried, self._oldest_ms = self._head.carry, self._head.carried, self._head.oldest_ms
        self._steps_ms: dict[str, int] = {}

    def write(self, batch: DataFrame) -> None:
        for name, value in _CONF.items():
            batch.sparkSession.conf.set(name, value)
        with self._step("bronze"):
            read = bronze.stage(batch, self._staging, datetime.now(UTC))
            check_complete(self._layout, self._ingest, read.queues, hash_tag=self._rules.hash_tag)
        counts = self._derive(read) if read.events else {}
        with self._step("publish"):
            self._ledger.announce(self._ingest)
            self._staging.publish(_WRITTEN)
            self._publish_carry()
        self._ledger.finish(self._record(read, counts))
        self._staging.clear()
        for old in listed(self._layout.carry):
            if old.name != self._carry:
                shutil.rmtree(old)

    def _derive(self, read: bronze.BronzeBatch) -> dict[Table, int]:
        """Write what the events say of attempts and jobs, and what is left of them; how many rows there are."""
        with self._step("tell"):
            carry = None if self._carry is None else read_open_events(self._layout, self._carry)
            # What is looked up must not be on its way from one directory to another: nobody looks again.
            with hold_swaps(self._layout):
                find_earlier = partial(earlier_events, self._layout)
                derived = derive_silver(read.lifecycle_events, carry, find_earlier, self._give_up_ms(read))
        tables = {ATTEMPTS: derived.attempts, JOBS: derived.jobs}
        for table, rows in tables.items():
            with self._step(table.name):
                self._staging.write(table, rows)
        self._carried, self._carry = derived.open_events.num_rows, None
        self._oldest_ms = pc.min(derived.open_events["event_ms"]).as_py() or 0
        if self._carried:
            with self._step("carry"):
                self._carry = self._ingest
                write_file(self._staging.place(_CARRY), derived.open_events)
        return {table: rows.num_rows for table, rows in tables.items()}

    def _give_up_ms(self, read: bronze.BronzeBatch) -> int:
        """Since when a job must have had an event; 0 where nothing is as old."""
        give_up_ms = max(read.newest_ms, self._head.clock_ms) - self._rules.max_open_ms
        oldest_ms = min(read.oldest_ms, self._head.oldest_ms or read.oldest_ms)
        return give_up_ms if oldest_ms < give_up_ms else 0

    def _publish_carry(self) -> None:
        if self._carry == self._ingest:
            self._layout.carry.mkdir(exist_ok=True)
            self._staging.place(_CARRY).rename(self._layout.carry / self._ingest)

    def _record(self, read: bronze.BronzeBatch, counts: Mapping[Table, int]) -> BatchRecord:
        head = self._head
        query, number = batch_of(self._ingest)
        lost = {queue: head.lost.get(queue, 0) + seen.lost for queue, seen in read.queues.items() if seen.lost}
        return BatchRecord(
            self._ingest,
            previous=head.ingest or None,
            number=head.number + 1,
            written_ms=wall_ms(),
            clock_ms=max(head.clock_ms, read.newest_ms),
            queues=read.queues,
            ends={**head.ends, **{queue: seen.last for queue, seen in read.queues.items() if seen.last}},
            lost={**head.lost, **lost},
            attempts=counts.get(ATTEMPTS, 0),
            jobs=counts.get(JOBS, 0),
            carry=self._carry,
            carried=self._carried,
            oldest_ms=self._oldest_ms,
            steps_ms=self._steps_ms,
            queries={**head.queries, query: number},
        )

    @contextmanager
    def _step(self, name: str) -> Iterator[None]:
        began_ms = mono_ms()
        yield
        self._steps_ms[name] = mono_ms() - began_ms


def _clean_up(layout: Layout, ledger: Ledger) -> None:
    """Take away what a batch has left that was killed while it was put into the tables."""
    left, head = ledger.publishing(), ledger.head()
    if left is not None and (head is None or head.ingest != left):
        layout.forget(left, _WRITTEN)
        shutil.rmtree(layout.carry / left, ignore_errors=True)


def _query_id(layout: Layout) -> str:
    """Spark's id of the query, which is the same as long as the checkpoint is; there is none to ask under Connect."""
    return str(json.loads((layout.checkpoint / "metadata").read_text())["id"])
