"""The writers of ``format("bulltask")``: each row becomes a job, once, however often Spark runs a task again.

Spark hands a batch writer to its tasks as it was made, so the write id that is made here is the same in all of them.
A stream's writer is made anew at every step; there the write id comes from the query and the batch, which the task
knows and which stay the same when a batch is run again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from bulltask.errors import ConfigError
from bulltask.spark.sink.ids import check_write_id, new_write_id, write_id_of_batch
from bulltask.spark.sink.rows import JobMaker, check_columns, check_job_options
from bulltask.spark.sink.sending import Sending, Sums, how_to_go_on
from bulltask.spark.source.options import WriteOptions

__all__ = ["JobsStreamWriter", "JobsWriter", "Wrote"]

_log = logging.getLogger(__name__)  # without a handler it writes to stderr, which is the driver's


@dataclass
class Wrote(WriterCommitMessage):
    """What a task says when it is done.

    Attributes:
        write_id: the write that its jobs belong to.
        sums: what it has sent.
    """

    write_id: str
    sums: Sums


class JobsWriter(DataSourceArrowWriter):
    """Responsible for a batch write.

    Args:
        options: of the write; without a write id it gets a new one.
        schema: of the rows.
        overwrite: the mode is ``overwrite``.

    Raises:
        ConfigError: a column or an option is wrong, or existing jobs were to be overwritten.
    """

    def __init__(self, options: WriteOptions, schema: StructType, *, overwrite: bool) -> None:
        refuse_overwrite(overwrite=overwrite)
        self._sending = _sending(options, schema, options.write_id or new_write_id())

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Send the rows of a task."""
        return Wrote(self._sending.maker.write_id, self._sending.send(iterator))

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Log what stays, and how to go on; Spark calls it in the driver when a task has failed for good."""
        _log_abort(self._sending.maker.write_id, messages)


class JobsStreamWriter(DataSourceStreamArrowWriter):
    """Responsible for the writes of a stream; each batch is a write of its own.

    Args:
        options: of the write; a write id takes the place of the query's id.
        schema: of the rows.
        overwrite: the mode is ``complete``, in which a batch would take the place of those before it.

    Raises:
        ConfigError: as of :class:`JobsWriter`.
    """

    def __init__(self, options: WriteOptions, schema: StructType, *, overwrite: bool) -> None:
        refuse_overwrite(overwrite=overwrite)
        self._chosen = options.write_id
        self._sending = _sending(options, schema, options.write_id or "of-the-query")

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Send the rows of a task of a batch.

        Raises:
            ConfigError: it is not called in a task of a streaming query.
        """
        context = TaskContext.get()
        query = context.getLocalProperty("sql.streaming.queryId") if context else None
        batch = context.getLocalProperty("streaming.sql.batchId") if context else None
        if query is None or batch is None:
            raise ConfigError("a streaming write runs in a task of a streaming query, which says its id and batch")
        return self.write_batch(iterator, query, batch)

    def write_batch(self, iterator: Iterator[pa.RecordBatch], query: str, batch: str) -> Wrote:
        """Send the rows of a task of the batch ``batch`` of the query ``query``."""
        write_id = write_id_of_batch(self._chosen or query, batch)
        sending = replace(self._sending, maker=replace(self._sending.maker, write_id=write_id))
        return Wrote(write_id, sending.send(iterator))

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Log what stays, and how to go on; Spark calls it in the driver when a task has failed for good."""
        wrote = next((one.write_id for one in messages if isinstance(one, Wrote)), None)
        _log_abort(wrote or f"of batch {batchId}", messages)


def refuse_overwrite(*, overwrite: bool) -> None:
    """Refuse a mode in which what is there is cleared first; Spark asks nobody, and nothing would be cleared.

    Raises:
        ConfigError: ``overwrite`` is true.
    """
    if overwrite:
        raise ConfigError(
            "[BULLTASK_OVERWRITE] jobs are added to a queue and never take the place of those that are there: "
            "write with mode('append'), or with outputMode('append') or ('update') in a stream"
        )


def _log_abort(write_id: str, messages: Sequence[WriterCommitMessage | None]) -> None:
    done = [one.sums for one in messages if isinstance(one, Wrote)]
    _log.error(
        "%s Of %d tasks %d had ended, with %d rows; what the others have sent is not counted.",
        how_to_go_on(write_id), len(messages), len(done), sum(one.rows for one in done),
    )  # fmt: skip


def _sending(options: WriteOptions, schema: StructType, write_id: str) -> Sending:
    columns = check_columns(schema, queue=options.queue, id_column=options.id_column)
    alike = check_job_options(options.job_opts, options.config)
    maker = JobMaker(options.config, check_write_id(write_id), options.queue, alike, bool(columns.id))
    return Sending(maker, columns, options.batch, options.fence_ttl_ms if options.fence else None)
