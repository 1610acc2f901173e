"""One batch of a lake's stream after the other: what Spark calls for each of them.

::

    read Redis once -> staging: bronze -> staging: silver, carry -> into the tables -> ledger -> Spark notes the batch

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
from typing import Final

from pyspark.sql import DataFrame, SparkSession

from bulltask.clock import mono_ms, wall_ms
from bulltask.errors import LakeError
from bulltask.lake.layout import Layout, ingest_id
from bulltask.lake.ledger import BatchRecord, Ledger
from bulltask.lake.staging import Staging
from bulltask.lake.tables import ATTEMPTS, EVENTS, GAPS, JOBS
from bulltask.spark import bronze

__all__ = ["Batches"]

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
class Batches:
    """Responsible for what each batch writes; it travels to where Spark runs it, and holds nothing of Spark.

    Attributes:
        root: directory of the lake.
        max_open_ms: how long a job may be without an event until it is given up.
    """

    root: str
    max_open_ms: int

    def __call__(self, batch: DataFrame, batch_id: int) -> None:
        """Write a batch.

        Raises:
            LakeError: the lake is ahead of the checkpoint.
        """
        layout = Layout(self.root)
        ledger, ingest = Ledger(layout), ingest_id(_query_id(layout), batch_id)
        head = ledger.head()
        if head is not None and head.ingest == ingest:
            return  # Spark had no time to note that it was done
        if ledger.get(ingest) is not None:
            raise LakeError(
                f"batch {ingest} is in the lake {layout.root} already, and others behind it: the checkpoint is older "
                f"than the lake. Remove {layout.checkpoint}, and the stream goes on behind the lake's last event"
            )
        _mend(layout, ledger)
        _Batch(layout, ledger, head, ingest, self.max_open_ms).write(batch)


class _Batch:
    """Responsible for one batch, from its rows to its record."""

    def __init__(self, layout: Layout, ledger: Ledger, head: BatchRecord | None, ingest: str, max_open_ms: int) -> None:
        self._layout, self._ledger, self._ingest = layout, ledger, ingest
        self._head = head or BatchRecord("", number=0)
        self._max_open_ms = max_open_ms
        self._staging = Staging(layout, ingest)
        self._steps_ms: dict[str, int] = {}

    def write(self, batch: DataFrame) -> None:
        spark = batch.sparkSession
        for name, value in _CONF.items():
            spark.conf.set(name, value)
        with self._step("bronze"):
            read = bronze.stage(batch, self._staging, datetime.now(UTC))
        self._told(spark, read)
        with self._step("publish"):
            self._ledger.announce(self._ingest)
            self._staging.publish(_WRITTEN)
        self._ledger.finish(self._record(read))
        self._staging.clear()

    def _told(self, spark: SparkSession, read: bronze.Bronze) -> None:
        pass

    def _record(self, read: bronze.Bronze) -> BatchRecord:
        head = self._head
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
            steps_ms=self._steps_ms,
        )

    @contextmanager
    def _step(self, name: str) -> Iterator[None]:
        began_ms = mono_ms()
        yield
        self._steps_ms[name] = mono_ms() - began_ms


def _mend(layout: Layout, ledger: Ledger) -> None:
    """Take away what a batch has left that was killed while it was put into the tables."""
    left, head = ledger.publishing(), ledger.head()
    if left is not None and (head is None or head.ingest != left):
        layout.forget(left, _WRITTEN)
        shutil.rmtree(layout.carry / left, ignore_errors=True)


def _query_id(layout: Layout) -> str:
    """Spark's id of the query, which is the same as long as the checkpoint is; there is none to ask under Connect."""
    return str(json.loads((layout.checkpoint / "metadata").read_text())["id"])
