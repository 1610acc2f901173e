"""The batch reader of jobs: each job in the selected states once, read in parallel while workers move jobs.

The plan queries each queue in one transaction, so that no job is between two states. For states from which workers
acquire jobs, the plan contains the ids. Completed and failed jobs keep their state, so they are split by the time at
which they finished. The plan contains ids only for the newest of these jobs, because more jobs may finish in the same
millisecond. That time comes from the worker's clock: if a clock is more than :data:`RECENT_MS` behind, a job that is
active in the plan may appear again among the jobs that finished long before.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition
from pyspark.sql.types import StructType

from bulltask.spark.source.columns import hash_fields, job_record_batch
from bulltask.spark.source.connection import Connection
from bulltask.spark.source.options import JobsOptions
from bulltask.spark.source.pushdown import PushedFilters
from bulltask.spark.source.queues import select_queues
from bulltask.spark.source.schemas import arrow_schema
from bulltask.transport.call import Call, QueueKeys
from bulltask.transport.scripts.job import job_fields
from bulltask.transport.scripts.queue import LISTS, count_by_score, ids_by_score, list_ids, score_at

__all__ = ["JobsPartition", "JobsReader", "PushdownJobsReader"]

FINISHED: Final = ("completed", "failed")

RECENT_MS: Final = 10_000
"""The plan lists the ids of jobs that finished within this time before the newest one; workers' clocks may differ."""


@dataclass(frozen=True)
class JobsPartition(InputPartition):
    """The jobs that one task reads.

    Attributes:
        queue: The queue's name without the hash tag; ``""`` for a partition without jobs.
        bullmq_name: BullMQ's name for the queue.
        state: The state of the jobs when the read was planned.
        low: The earliest time at which the jobs finished, as a bound in Redis' syntax; for partitions without ``ids``.
        high: The latest time at which they finished.
        ids: The jobs' ids.
    """

    queue: str = ""
    bullmq_name: str = ""
    state: str = ""
    low: str = ""
    high: str = ""
    ids: Sequence[str] = field(default=(), repr=False)


class JobsReader(DataSourceReader):
    """Plans and performs one read of jobs. It holds no connection and is cheap to create.

    Args:
        options: The location and states of the jobs.
        schema: The columns to read, in order.
    """

    def __init__(self, options: JobsOptions, schema: StructType) -> None:
        self._options = options
        self._schema = arrow_schema(schema)
        self._filters = PushedFilters()

    def partitions(self) -> list[InputPartition]:
        """Query the queues and split the read into tasks."""
        with Connection(self._options.config) as connection:
            result: list[InputPartition] = []
            for keys in select_queues(connection, self._options, self._filters):
                result += self._plan(connection, keys)
        # Spark would replace an empty list with a default partition, which read() does not support.
        return result or [JobsPartition()]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read one partition as Arrow record batches. Runs in a different process from :meth:`partitions`."""
        assert isinstance(partition, JobsPartition)
        if not partition.queue:
            return
        keys = QueueKeys(self._options.config.prefix, partition.bullmq_name, partition.queue)
        constants = {"queue": partition.queue, "state": partition.state}
        names = hash_fields(self._schema.names)
        with Connection(self._options.config) as connection:
            ids = _ids(connection, keys, partition)
            for start in range(0, len(ids), self._options.fetch_size):
                page = ids[start : start + self._options.fetch_size]
                replies = connection.run_many([job_fields(keys, job_id, names) for job_id in page])
                yield job_record_batch(self._schema, constants, page, replies)

    def _plan(self, connection: Connection, keys: QueueKeys) -> list[JobsPartition]:
        states = [state for state in self._options.states if self._filters.allows_state(state)]
        finished = [state for state in states if state in FINISHED]
        newest = connection.run_many([score_at(keys, state, -1) for state in finished]) if finished else []
        edges = dict(zip(finished, map(_recent_edge, newest), strict=True))
        calls = [self._listing(keys, state, edges.get(state)) for state in states]
        result: list[JobsPartition] = []
        for state, ids in zip(states, connection.run_atomically(calls) if calls else (), strict=True):
            result += self._cut_times(connection, keys, state, edges[state]) if state in edges else []
            result += self._cut_ids(keys, state, ids)
        return result

    def _listing(self, keys: QueueKeys, state: str, edge: str | None) -> Call[list[str]]:
        """Return the call for all ids in a state or, for completed and failed jobs, the ids from the edge on."""
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
        calls = [count_by_score(keys, state, "-inf", f"({low}"), count_by_score(keys, state, low, high)]
        skipped, count = connection.run_many(calls)
        if not count:
            return []
        partition_count = self._parts(count)
        ranks = [skipped + count * number // partition_count for number in range(1, partition_count)]
        scores = connection.run_many([score_at(keys, state, rank) for rank in ranks]) if ranks else []
        cut_scores = {score for score in scores if score and float(low) < float(score) < float(high.removeprefix("("))}
        cuts = sorted(cut_scores, key=float)
        bounds = zip([low, *cuts], [*(f"({cut}" for cut in cuts), high], strict=True)
        return [JobsPartition(keys.queue, keys.name, state, begin, end) for begin, end in bounds]

    def _cut_ids(self, keys: QueueKeys, state: str, ids: Sequence[str]) -> list[JobsPartition]:
        size = -(-len(ids) // self._parts(len(ids)))
        return [
            JobsPartition(keys.queue, keys.name, state, ids=ids[start : start + size])
            for start in range(0, len(ids), size or 1)
        ]

    def _parts(self, count: int) -> int:
        max_parts = self._options.partitions or 2 * (os.cpu_count() or 1)
        return max(1, min(max_parts, count // self._options.min_rows))


class PushdownJobsReader(JobsReader):
    """A reader that lets Redis apply filters. Spark rejects it unless filter pushdown is enabled."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Apply filters on state, queue and ``finished_at``; return the filters that Spark must still apply."""
        return [item for item in filters if not self._filters.push(item)]


def _recent_edge(newest: str | None) -> str:
    return "-inf" if newest is None else str(int(float(newest)) - RECENT_MS)


def _ids(connection: Connection, keys: QueueKeys, partition: JobsPartition) -> Sequence[str]:
    if partition.ids:
        return partition.ids
    return connection.run(ids_by_score(keys, partition.state, partition.low, partition.high))
