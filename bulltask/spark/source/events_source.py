"""The batch readers of events and of counts.

When the read is planned, the stream is split into ranges of ids, each with the number of entries that it must return.
The stream is bounded, so it may be trimmed while it is read. The expected numbers make it possible to detect missing
rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition
from pyspark.sql.types import StructType

from bulltask.jobs.errors import EventsLostError
from bulltask.spark.source.columns import count_record_batch, event_record_batch
from bulltask.spark.source.connection import Connection
from bulltask.spark.source.offsets import StreamState
from bulltask.spark.source.options import CountsOptions, EventsOptions
from bulltask.spark.source.pushdown import PushedFilters
from bulltask.spark.source.queues import log_skipped, not_a_stream_reason, select_queues
from bulltask.spark.source.ranges import EntryRange
from bulltask.spark.source.schemas import arrow_schema
from bulltask.spark.source.streams import find_end, read_pages, read_states
from bulltask.transport.broker import STATES
from bulltask.transport.call import QueueKeys
from bulltask.transport.scripts.queue import state_size

__all__ = ["CountsReader", "EventsPartition", "EventsReader", "PushdownCountsReader", "PushdownEventsReader"]


@dataclass(frozen=True)
class EventsPartition(InputPartition):
    """The events that one task reads.

    Attributes:
        queue: The queue's name without the hash tag.
        span: The range of entries; ``None`` for a partition without events.
    """

    queue: str = ""
    span: EntryRange | None = None


class EventsReader(DataSourceReader):
    """Reads all events that are in the streams when the read is planned.

    Args:
        options: The location of the queues.
        schema: The columns to read, in order.
    """

    def __init__(self, options: EventsOptions, schema: StructType) -> None:
        self._options = options
        self._schema = arrow_schema(schema)
        self._filters = PushedFilters()

    def partitions(self) -> list[InputPartition]:
        """Query the streams and split them into ranges."""
        options = self._options
        unsupported: list[QueueKeys] | None = [] if options.skip_unsupported else None
        with Connection(options.config) as connection:
            queues = select_queues(connection, options, self._filters)
            result = [
                EventsPartition(keys.queue, span)
                for keys, state in zip(queues, read_states(connection, queues, unsupported), strict=True)
                for span in _cut(connection, keys, state, options.per_partition)
            ]
        log_skipped({keys.name: not_a_stream_reason(keys) for keys in unsupported or ()})
        # Spark would replace an empty list with a default partition, which read() does not support.
        return list[InputPartition](result) or [EventsPartition()]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read one range as Arrow record batches. Runs in a different process from :meth:`partitions`.

        Raises:
            EventsLostError: Entries of the range were trimmed after it was planned.
        """
        assert isinstance(partition, EventsPartition)
        if partition.span is None:
            return
        span, count = partition.span, 0
        keys = QueueKeys(self._options.config.prefix, span.queue, partition.queue)
        with Connection(self._options.config) as connection:
            for entries in read_pages(connection, keys, span.after, span.upto, self._options.fetch_size):
                count += len(entries)
                yield event_record_batch(self._schema, partition.queue, entries)
        gap = span.gap(count)
        if gap is not None:
            raise EventsLostError(gap.message)


class PushdownEventsReader(EventsReader):
    """A reader that queries only the queues that a filter names. Spark rejects it unless filter pushdown is enabled."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Apply filters on the queue; return the filters that Spark must still apply."""
        return [item for item in filters if not self._filters.push_queue(item)]


class CountsReader(DataSourceReader):
    """Reads the number of jobs in each state of each queue, with one row for each state.

    Args:
        options: The location of the queues.
        schema: The columns to read, in order.
    """

    def __init__(self, options: CountsOptions, schema: StructType) -> None:
        self._options = options
        self._schema = arrow_schema(schema)
        self._filters = PushedFilters()

    def partitions(self) -> list[InputPartition]:
        """Return one partition: counting takes one round trip."""
        return [InputPartition(None)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:  # noqa: ARG002 - there is only one
        """Count the jobs. Runs in a different process from :meth:`partitions`."""
        with Connection(self._options.config) as connection:
            queues = select_queues(connection, self._options, self._filters)
            numbers = iter(connection.run_many([state_size(keys, state) for keys in queues for state in STATES]))
        for keys in queues:
            yield count_record_batch(self._schema, keys.queue, {state: next(numbers) for state in STATES})


class PushdownCountsReader(CountsReader):
    """A reader that queries only the queues that a filter names. Spark rejects it unless filter pushdown is enabled."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Apply filters on the queue; return the filters that Spark must still apply."""
        return [item for item in filters if not self._filters.push_queue(item)]


def _cut(connection: Connection, keys: QueueKeys, state: StreamState | None, size: int) -> list[EntryRange]:
    """Split the whole stream into ranges of up to ``size`` entries."""
    if state is None or state.first is None:
        return []
    spans: list[EntryRange] = []
    after, remaining = state.first.before, state.length
    while remaining > size:
        last, count = find_end(connection, keys, after, state.last, size)
        if last is None or last == state.last:
            break
        spans.append(EntryRange(keys.name, after, last, count))
        after, remaining = last, remaining - count
    return [*spans, EntryRange(keys.name, after, state.last, remaining)]
