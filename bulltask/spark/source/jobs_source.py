"""The batch reader of jobs: every job in the selected states once, read in parallel while workers move jobs.

The plan takes one look at each queue, in a transaction, so that no job is between two states. For states that workers
take jobs from, the plan holds the ids. Completed and failed jobs stay where they are, so most of them are split by the
time at which they ended. Only for the newest does the plan hold ids, because more jobs may end in the same millisecond.
That time comes from the worker's clock: if a clock is more than :data:`RECENT_MS` behind, a job that the plan has as
active may appear again among those that ended long before.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition
from pyspark.sql.types import StructType

from bulltask.spark.source.columns import hash_fields, job_batch
from bulltask.spark.source.connection import Connection
from bulltask.spark.source.options import JobsOptions
from bulltask.spark.source.pushdown import PushedFilters
from bulltask.spark.source.queues import select_queues
from bulltask.spark.source.schemas import arrow_schema
from bulltask.transport.call import Call
from bulltask.transport.keys import QueueKeys
from bulltask.transport.scripts.job import job_fields
from bulltask.transport.scripts.queue import LISTS, count_by_score, ids_by_score, list_ids, score_at

__all__ = ["JobsPartition", "JobsReader", "PushdownJobsReader"]

ENDED: Final = ("completed", "failed")

RECENT_MS: Final = 10_000
"""The plan lists ids of jobs that ended this long before the newest one; the clocks of workers may differ by as much.
"""


@dataclass(frozen=True)
class JobsPartition(InputPartition):
    """Jobs that one task reads.

    Attributes:
        queue: The user's name of the queue, ``""`` for a partition without jobs.
        wire: BullMQ's name of the queue.
        state: The jobs' state when the read was planned.
        low: When they ended at the earliest, as Redis writes bounds; for partitions without ``ids``.
        high: When they ended at the latest.
        ids: Their ids.
    """

    queue: str = ""
    wire: str = ""
    state: str = ""
    low: str = ""
    high: str = ""
    ids: Sequence[str] = field(default=(), repr=False)


class JobsReader(DataSourceReader):
    """Plans and performs one read of jobs; holds no connection and is cheap to create.

    Args:
        options: Where the jobs are.
        schema: The columns to read, in order.
    """

    def __init__(self, options: JobsOptions, schema: StructType) -> None:
        self._options, self._schema = options, arrow_schema(schema)
        self._filters = PushedFilters()

    def partitions(self) -> list[InputPartition]:
        """Look at the queues and split the read into tasks."""
        with Connection(self._options.config) as connection:
            found: list[InputPartition] = []
            for keys in select_queues(connection, self._options, self._filters):
                found += self._plan(connection, keys)
        # Spark would replace an empty list by a partition of its own, which read() does not know.
        return found or [JobsPartition()]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read one partition, in batches; runs in another process than :meth:`partitions`."""
        assert isinstance(partition, JobsPartition)
        if not partition.queue:
            return
        keys = QueueKeys(self._options.config.prefix, partition.wire, partition.queue)
        place = {"queue": partition.queue, "state": partition.state}
        names = hash_fields(self._schema.names)
        with Connection(self._options.config) as connection:
            ids = _ids(connection, keys, partition)
            for start in range(0, len(ids), self._options.batch):
                some = ids[start : start + self._options.batch]
                replies = connection.run_many([job_fields(keys, job_id, names) for job_id in some])
                yield job_batch(self._schema, place, some, replies)

    def _plan(self, connection: Connection, keys: QueueKeys) -> list[JobsPartition]:
        states = [state for state in self._options.states if self._filters.allows_state(state)]
        ended = [state for state in states if state in ENDED]
        newest = connection.run_many([score_at(keys, state, -1) for state in ended]) if ended else []
        edges = dict(zip(ended, map(_edge, newest), strict=True))
        calls = [self._listing(keys, state, edges.get(state)) for state in states]
        parts: list[JobsPartition] = []
        for state, ids in zip(states, connection.run_atomically(calls) if calls else (), strict=True):
            parts += self._cut_times(connection, keys, state, edges[state]) if state in edges else []
            parts += self._cut_ids(keys, state, ids)
        return parts

    def _listing(self, keys: QueueKeys, state: str, edge: str | None) -> Call[list[str]]:
        """Return the call for all ids of a state, or, for completed and failed jobs, those from the edge on."""
        if state in LISTS:
            return list_ids(keys, state)
        if edge is None:
            return ids_by_score(keys, state, "-inf", "+inf")
        low, high = self._filters.time_bounds()
        return ids_by_score(keys, state, max(low, edge, key=float), high)

    def _cut_times(self, connection: Connection, keys: QueueKeys, state: str, edge: str) -> list[JobsPartition]:
        """Split the jobs before the edge into time ranges with about the same number of jobs."""
        low, high = self._filters.time_bounds()
        high = f"({edge}" if float(edge) <= float(high) else high
        asked = [count_by_score(keys, state, "-inf", f"({low}"), count_by_score(keys, state, low, high)]
        before, count = connection.run_many(asked)
        if not count:
            return []
        parts = self._parts(count)
        ranks = [before + count * part // parts for part in range(1, parts)]
        scores = connection.run_many([score_at(keys, state, rank) for rank in ranks]) if ranks else []
        inside = {score for score in scores if score and float(low) < float(score) < float(high.removeprefix("("))}
        cuts = sorted(inside, key=float)
        bounds = zip([low, *cuts], [*(f"({cut}" for cut in cuts), high], strict=True)
        return [JobsPartition(keys.queue, keys.name, state, one, other) for one, other in bounds]

    def _cut_ids(self, keys: QueueKeys, state: str, ids: Sequence[str]) -> list[JobsPartition]:
        size = -(-len(ids) // self._parts(len(ids)))
        return [
            JobsPartition(keys.queue, keys.name, state, ids=ids[start : start + size])
            for start in range(0, len(ids), size or 1)
        ]

    def _parts(self, count: int) -> int:
        most = self._options.partitions or 2 * (os.cpu_count() or 1)
        return max(1, min(most, count // self._options.min_rows))


class PushdownJobsReader(JobsReader):
    """A reader that lets Redis apply filters. Spark refuses such a reader unless filters are enabled."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Apply the filters on state, queue and ``finished_at``; return those that Spark must still apply."""
        return [one for one in filters if not self._filters.push(one)]


def _edge(newest: str | None) -> str:
    return "-inf" if newest is None else str(int(float(newest)) - RECENT_MS)


def _ids(connection: Connection, keys: QueueKeys, partition: JobsPartition) -> Sequence[str]:
    if partition.ids:
        return partition.ids
    return connection.run(ids_by_score(keys, partition.state, partition.low, partition.high))
