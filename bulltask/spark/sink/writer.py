"""The writers of ``format("bulltask")``, and the sender of a task's rows.

Each distinct row becomes one job, however often Spark retries a task. Spark passes copies of a batch writer to its
tasks, so all tasks have the same write id. A streaming query's writer is recreated for each batch, so its write id is
derived from the query and the batch, which stay the same when a batch is run again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from bulltask.jobs.errors import ConfigError
from bulltask.jobs.job import NewJob
from bulltask.spark.sink.rows import (
    JobBuilder,
    RowColumns,
    check_columns,
    check_job_options,
    check_write_id,
    column_values,
    new_write_id,
    write_id_of_batch,
)
from bulltask.spark.source.connection import broker_of, gc_paused
from bulltask.spark.source.options import WriteOptions
from bulltask.transport.broker import Broker
from bulltask.transport.scripts.add import IdempotentWrite, SendResult

__all__ = ["JobsStreamWriter", "JobsWriter", "RowSender", "TaskCommit", "WriteCounts", "resume_hint"]

_log = logging.getLogger(__name__)  # without a handler, it writes to the driver's stderr


@dataclass
class TaskCommit(WriterCommitMessage):
    """The commit message of a task.

    Attributes:
        write_id: The id of the write.
        counts: The counts of sent rows.
    """

    write_id: str
    counts: WriteCounts


class JobsWriter(DataSourceArrowWriter):
    """Performs a batch write.

    Args:
        options: The options of the write; without a write id, a new id is created.
        schema: The schema of the rows.
        overwrite: Whether the mode is ``overwrite``.

    Raises:
        ConfigError: A column or an option is invalid, or the mode is ``overwrite``.
    """

    def __init__(self, options: WriteOptions, schema: StructType, *, overwrite: bool) -> None:
        reject_overwrite(overwrite=overwrite)
        self._sender = _sender(options, schema, options.write_id or new_write_id())

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Send the rows of a task."""
        return TaskCommit(self._sender.builder.write_id, self._sender.send(iterator))

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Log that sent jobs are not removed, and how to resume. Spark calls this when it gives up on a task."""
        _log_abort(self._sender.builder.write_id, messages)


class JobsStreamWriter(DataSourceStreamArrowWriter):
    """Performs the writes of a streaming query; each batch is a separate write.

    Args:
        options: The options of the write; a write id replaces the query's id.
        schema: The schema of the rows.
        overwrite: Whether the mode is ``complete``, in which a batch would replace earlier batches.

    Raises:
        ConfigError: As for :class:`JobsWriter`.
    """

    def __init__(self, options: WriteOptions, schema: StructType, *, overwrite: bool) -> None:
        reject_overwrite(overwrite=overwrite)
        self._write_id = options.write_id
        self._sender = _sender(options, schema, options.write_id or "unused")

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Send the rows of one task in a batch.

        Raises:
            ConfigError: The method is not called in a task of a streaming query.
        """
        context = TaskContext.get()
        query = context.getLocalProperty("sql.streaming.queryId") if context else None
        batch = context.getLocalProperty("streaming.sql.batchId") if context else None
        if query is None or batch is None:
            raise ConfigError(
                "a streaming write must run in a task of a streaming query: Spark has set no query id or batch id"
            )
        return self.write_batch(iterator, query, batch)

    def write_batch(self, iterator: Iterator[pa.RecordBatch], query: str, batch: str) -> TaskCommit:
        """Send the rows of one task, in the batch ``batch`` of the query ``query``."""
        write_id = write_id_of_batch(self._write_id or query, batch)
        sender = replace(self._sender, builder=replace(self._sender.builder, write_id=write_id))
        return TaskCommit(write_id, sender.send(iterator))

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Log that sent jobs are not removed, and how to resume. Spark calls this when it gives up on a task."""
        write_id = next((message.write_id for message in messages if isinstance(message, TaskCommit)), None)
        _log_abort(write_id or f"of batch {batchId}", messages)


def reject_overwrite(*, overwrite: bool) -> None:
    """Reject the mode ``overwrite``: Spark would accept it, but a queue is never cleared.

    Raises:
        ConfigError: ``overwrite`` is true.
    """
    if overwrite:
        raise ConfigError(
            "[BULLTASK_OVERWRITE] jobs are added to a queue and never replace existing jobs: "
            "write with mode('append'), or with outputMode('append') or ('update') in a streaming query"
        )


def _log_abort(write_id: str, messages: Sequence[WriterCommitMessage | None]) -> None:
    finished = [message.counts for message in messages if isinstance(message, TaskCommit)]
    _log.error(
        "%s %d of %d tasks had finished, with %d rows; rows from unfinished tasks are not counted.",
        resume_hint(write_id), len(finished), len(messages), sum(counts.rows for counts in finished),
    )  # fmt: skip


def _sender(options: WriteOptions, schema: StructType, write_id: str) -> RowSender:
    columns = check_columns(schema, queue=options.queue, id_column=options.id_column)
    shared = check_job_options(options.job_opts, options.config)
    builder = JobBuilder(options.config, check_write_id(write_id), options.queue, shared, bool(columns.id))
    return RowSender(builder, columns, options.chunk_size, options.idempotency_ttl_ms if options.idempotent else None)


@dataclass(frozen=True, slots=True)
class WriteCounts:
    """The counts of a task's rows.

    Attributes:
        rows: The number of rows.
        added: The number of added jobs.
        duplicates: The number of rows whose job already existed, or had already been added by this write. If a job is
            sent twice because the first reply was lost, the second reply counts.
    """

    rows: int = 0
    added: int = 0
    duplicates: int = 0


@dataclass(frozen=True, slots=True)
class RowSender:
    """Sends the rows of a task. Spark serializes it for the executors, so it holds no connection.

    Attributes:
        builder: The builder of the jobs.
        columns: The names of the id and queue columns.
        chunk_size: The number of jobs in one round trip.
        idempotency_ttl_ms: How long Redis keeps the ids of added jobs; ``None``: it does not keep them, and every row
            counts as added.
    """

    builder: JobBuilder
    columns: RowColumns
    chunk_size: int
    idempotency_ttl_ms: int | None

    def send(self, batches: Iterable[pa.RecordBatch]) -> WriteCounts:
        """Send all rows of some Arrow batches and count the results; raises the same errors as :meth:`results`."""
        rows = added = 0
        for results in self.results(batches):
            rows += len(results)
            added += sum(result.status == "added" for result in results)
        return WriteCounts(rows, added, rows - added)

    def results(self, batches: Iterable[pa.RecordBatch]) -> Iterator[list[SendResult]]:
        """Send all rows of some Arrow batches; yield the results of each batch's rows.

        The rows of a round trip are checked before it is sent.

        Raises:
            BulltaskError: A row is not a valid job, or Redis cannot be reached. Jobs that were already sent are
                not removed, because they may have run; retrying the write adds the missing ones. Every error that
                interrupts the write has a note that says so (``[BULLTASK_WRITE_ABORTED]``).
        """
        broker = broker_of(self.builder.config)
        rows = 0
        try:
            for batch in batches:
                new_jobs = map(self.builder.build, *column_values(batch, self.columns))
                results: list[SendResult] = []
                with gc_paused():
                    while jobs_ := list(islice(new_jobs, self.chunk_size)):
                        results += self._send(broker, jobs_)
                        rows += len(jobs_)
                yield results
        except Exception as exc:
            exc.add_note(f"{resume_hint(self.builder.write_id)} This attempt had sent {rows:,} rows.")
            raise
        finally:
            broker.close()

    def _send(self, broker: Broker, jobs: list[NewJob]) -> list[SendResult]:
        if self.idempotency_ttl_ms is None:
            return [SendResult(job_id, "added") for job_id in broker.producer.send(jobs)]
        return broker.producer.send_once(jobs, IdempotentWrite(self.builder.write_id, self.idempotency_ttl_ms))


def resume_hint(write_id: str) -> str:
    """Return the instruction for resuming a failed write."""
    return (
        f"[BULLTASK_WRITE_ABORTED] The write {write_id} has failed. The jobs that it has sent are not removed: write "
        "the same rows again with this write id to add the missing ones. A streaming query does so when it is started "
        "again with its checkpoint."
    )
