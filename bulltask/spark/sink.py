"""Write rows as jobs: ``enqueue``, and the writers of ``format("bulltask")``.

Each distinct row becomes one job, however often Spark retries a task: the same row of the same write always has the
same id. Spark passes copies of a batch writer to its tasks, so all tasks have the same write id. A streaming query's
writer is recreated for each batch, so its write id is derived from the query and the batch, which stay the same when a
batch is run again.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import lru_cache
from itertools import islice, repeat
from typing import Any, Final, Literal, TypedDict, Unpack, cast

import pyarrow as pa
import uuid_utils
from pyspark import TaskContext
from pyspark.sql import Column, DataFrame, SparkSession, Window, is_remote
from pyspark.sql import functions as F
from pyspark.sql import types as T
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.pandas.functions import arrow_udf

from bulltask.config.config import Config
from bulltask.config.parsers import choice
from bulltask.jobs import codec
from bulltask.jobs.clock import Duration, mono_ms, to_ms
from bulltask.jobs.errors import (
    ConfigError,
    DecodeError,
    EncodeError,
    InvalidNameError,
    PayloadTooLargeError,
    did_you_mean,
)
from bulltask.jobs.job import JobOptions, NewJob, check_size
from bulltask.jobs.names import bullmq_name, check_job_id, check_job_name, check_queue_name
from bulltask.jobs.payloads import PayloadCodec
from bulltask.queue.context import AddOptions, build_job
from bulltask.spark.source.connection import SentToTasks, broker_of, gc_paused
from bulltask.spark.source.options import BrokerOptions, WriteOptions, broker_options, read_options
from bulltask.transport.broker import Broker
from bulltask.transport.scripts.add import IdempotentWrite, SendResult

NUMBER: Final = "bulltask_number"
"""The column that numbers equal rows."""

_ROW: Final = "bulltask_row"
"""The column with the user's whole row, if invalid rows are collected."""

_NOT_FINITE: Final = "NaN or Infinity in "
"""The beginning of the data of a row with numbers that JSON does not support, which is otherwise not JSON."""

_WRITE_ID: Final = re.compile(r"[^\x00-\x20\x7f{}\ud800-\udfff]{1,200}")


def check_columns(schema: T.StructType, *, queue: str | None, id_column: str | None) -> str:
    """Check the schema before anything is written, and return the name of the column with the ids; ``""`` without ids.

    ``queue`` is ``None`` if a column contains the queues; the default of ``id_column`` is ``id``, if it exists.

    Raises:
        ConfigError: A column is missing, has the wrong type, or would be ignored silently.
    """
    names = schema.fieldNames()
    id_name = id_column if id_column is not None else ("id" if "id" in names else "")
    known = [name for name in ("name", "data", id_name, "queue" if queue is None else "") if name]
    columns_text = f"the rows have the columns {', '.join(names) or '(none)'}"
    for name in known:
        if name not in names:
            advice = ""
            if name == "queue":
                advice = ", or the option queue (for a table in SQL: INSERT INTO … WITH (`queue` = '…') …)"
            raise ConfigError(
                f"[BULLTASK_COLUMN_MISSING] a write of jobs needs the column {name!r}{advice}; {columns_text}"
            )
        if not isinstance(kind := schema[name].dataType, T.StringType):
            conversion = "to_json(...)" if name == "data" else "cast('string')"
            raise ConfigError(
                f"[BULLTASK_COLUMN_TYPE] column {name!r} must contain strings, not {kind.simpleString()}: "
                f"use {conversion}"
            )
    if unknown := sorted(set(names) - set(known)):
        raise ConfigError(
            f"[BULLTASK_COLUMN_UNKNOWN] unknown column {unknown[0]!r}: jobs are built from the columns "
            f"{', '.join(known)}; put job data into the column 'data', as JSON. In SQL, insert into a view or table "
            "that declares only these columns"
        )
    return id_name


def reject_single_job_options(options: Mapping[str, Any]) -> None:
    """Raise ``ConfigError`` for an option that makes no sense for several jobs."""
    if single := [name for name in ("job_id", "parent") if name in options]:
        raise ConfigError(
            f"[BULLTASK_OPTION_INVALID] {single[0]} applies to a single job, but these options are for all jobs"
        )


class _IncompleteRowError(ConfigError):
    """A row lacks its job's name, queue or id."""


_ROW_ERRORS: Final = (_IncompleteRowError, InvalidNameError, DecodeError, EncodeError, PayloadTooLargeError)
"""The errors of a row; others concern the whole write."""


@lru_cache(maxsize=1_000)
def _checked_names(queue: str, name: str, hash_tag: bool) -> str:
    """Check the names, which many rows have in common, and return BullMQ's name for the queue."""
    check_job_name(name)
    return bullmq_name(check_queue_name(queue), hash_tag=hash_tag)


def derived_id(write_id: str, queue: str, name: str, data: bytes, number: int = 0) -> str:
    """Return the id of a row's job: ``s`` and 24 hexadecimal digits.

    BullMQ 5.62 rejects ids that are numbers or contain a ``:``, so the id begins with a letter. Equal rows are the same
    job unless they are numbered. ``queue`` is BullMQ's name, so that ``emails`` and ``{emails}`` are the same. In the
    data, which is normalized JSON, the order of keys matters, and 1 differs from 1.0.
    """
    return "s" + hashlib.sha256(_id_prefix(write_id, queue, name, number) + data).hexdigest()[:24]


@lru_cache(maxsize=1_000)
def _id_prefix(write_id: str, queue: str, name: str, number: int) -> bytes:
    # None of these parts can contain a control character, so the separator is unambiguous.
    return f"{write_id}\0{queue}\0{name}\0{number or ''}\0".encode()


def check_write_id(write_id: str | None) -> str:
    """Return ``write_id`` if it may be part of a Redis key, else raise ``ConfigError``.

    For ``None``, return a new id. Such ids sort by time.
    """
    if write_id is None:
        return uuid_utils.uuid7().hex
    if not isinstance(write_id, str) or not _WRITE_ID.fullmatch(write_id):
        raise ConfigError(
            f"write id {write_id!r:.60} must be a string of 1 to 200 characters without spaces, control characters or "
            "braces"
        )
    return write_id


_log = logging.getLogger(__name__)  # without a handler, it writes to the driver's stderr


@dataclass
class TaskCommit(WriterCommitMessage):
    """The commit message of a task: the id of the write, and the number of its rows by the status of their jobs."""

    write_id: str
    counts: Counter[str]


class _Writer(SentToTasks):
    """What both writers have in common: Spark accepts the mode ``overwrite``, but a queue is never cleared."""

    def __init__(self, options: WriteOptions, schema: T.StructType, *, overwrite: bool) -> None:
        if overwrite:
            raise ConfigError(
                "[BULLTASK_OVERWRITE] jobs are added to a queue and never replace existing jobs: "
                "write with mode('append'), or with outputMode('append') or ('update') in a streaming query"
            )
        self._write_id = options.write_id
        self._sender = _row_sender(options, schema, options.job_opts)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int | None = None) -> None:
        """Log that sent jobs are not removed, and how to resume. Spark calls this when it gives up on a task."""
        finished = [message for message in messages if isinstance(message, TaskCommit)]
        write_id = self._sender.write_id if batchId is None else f"of batch {batchId}"
        _log.error(
            "%s %d of %d tasks had finished, with %d rows; rows from unfinished tasks are not counted.",
            resume_hint(finished[0].write_id if finished else write_id),
            len(finished),
            len(messages),
            sum(message.counts.total() for message in finished),
        )


class JobsWriter(_Writer, DataSourceArrowWriter):
    """Performs a batch write; without a write id, a new id is created."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Send the rows of a task."""
        return _send(self._sender, iterator)


class JobsStreamWriter(_Writer, DataSourceStreamArrowWriter):
    """Performs the writes of a streaming query; each batch is a separate write. A write id replaces the query's id."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Send the rows of one task in a batch; raise ``ConfigError`` outside a task of a streaming query."""
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
        return _send(replace(self._sender, write_id=f"{self._write_id or query}-{batch}"), iterator)


def _send(sender: RowSender, batches: Iterable[pa.RecordBatch]) -> TaskCommit:
    return TaskCommit(sender.write_id, Counter(row.status for results in sender.results(batches) for row in results))


def _row_sender(options: WriteOptions, schema: T.StructType, job_opts: Mapping[str, Any]) -> RowSender:
    """Return the sender of a write, whose options and columns are checked before any job is built."""
    id_column = check_columns(schema, queue=options.queue, id_column=options.id_column)
    reject_single_job_options(job_opts)
    try:
        sample = build_job("any", "any", None, job_opts, options.config)
    except TypeError as exc:
        raise ConfigError(f"[BULLTASK_OPTION_INVALID] options of jobs: {exc}") from exc
    return RowSender(
        options.config,
        check_write_id(options.write_id),
        options.queue,
        sample.options,
        sample.timestamp_ms,
        id_column,
        options.chunk_size,
        options.idempotency_ttl_ms if options.idempotent else None,
    )


@dataclass(frozen=True, slots=True)
class RejectedRow:
    """The result of an invalid row, for which no job was sent: why it is invalid."""

    reason: str
    id: None = None
    status: Literal["rejected"] = "rejected"


@dataclass(frozen=True, slots=True)
class RowSender:
    """Makes jobs of the rows of a task, like ``Queue.add``, and sends them.

    Spark serializes it for the executors, so it holds no connection.

    Attributes:
        queue: The queue; ``None`` if the column ``queue`` contains the queues.
        timestamp_ms: When the jobs were created; ``None`` for the time of sending.
        id_column: The column with the jobs' ids; ``""`` to derive the ids from the rows.
        idempotency_ttl_ms: How long Redis keeps the ids of added jobs; ``None``: not at all; every row counts as added.
        collects_invalid: Whether an invalid row has a result; otherwise the first one raises its error.
    """

    config: Config = field(repr=False)  # its URL may have a password
    write_id: str
    queue: str | None
    options: JobOptions
    timestamp_ms: int | None
    id_column: str = ""
    chunk_size: int = 500
    idempotency_ttl_ms: int | None = None
    collects_invalid: bool = False

    def results(self, batches: Iterable[pa.RecordBatch]) -> Iterator[list[SendResult | RejectedRow]]:
        """Send all rows of some Arrow batches; yield the results of each batch's rows.

        The rows of a round trip are checked before it is sent. Jobs that were sent before an error are not removed,
        because they may have run; retrying the write adds the missing ones. Every error has a note that says so
        (``[BULLTASK_WRITE_ABORTED]``). If a job is sent twice because a reply was lost, the second reply counts.
        """
        broker = broker_of(self.config)
        rows = unanswered = 0
        try:
            for batch in batches:
                new_jobs = map(self._job_or_reason, *self._columns(batch))
                results: list[SendResult | RejectedRow] = []
                with gc_paused():
                    while built := list(islice(new_jobs, self.chunk_size)):
                        unanswered = len(built)
                        sent = iter(self._send(broker, [job for job in built if isinstance(job, NewJob)]))
                        results += [job if isinstance(job, RejectedRow) else next(sent) for job in built]
                        rows, unanswered = rows + len(built), 0
                yield results
        except Exception as exc:
            maybe = f", and perhaps some of the next {unanswered:,}" if unanswered else ""
            exc.add_note(
                f"{resume_hint(self.write_id)} This task had sent {rows:,} rows{maybe}; other tasks may have "
                "sent theirs."
            )
            raise
        finally:
            broker.close()

    def _columns(self, batch: pa.RecordBatch) -> Iterator[Iterable[Any]]:
        """Yield the columns of an Arrow batch, in the order of `_job`'s arguments; a default for each that it lacks."""
        for name, default in (("name", None), ("data", None), ("queue", None), (self.id_column, None), (NUMBER, 0)):
            has_column = name in batch.schema.names
            yield batch.column(name).to_pylist() if has_column else repeat(default, batch.num_rows)

    def _job_or_reason(
        self, name: str | None, data: str | None, queue: str | None, job_id: str | None, number: int
    ) -> NewJob | RejectedRow:
        try:
            return self._job(name, data, queue if self.queue is None else self.queue, job_id, number)
        except _ROW_ERRORS as exc:
            if not self.collects_invalid:
                raise
            return RejectedRow(str(exc))

    def _job(self, name: str | None, data: str | None, queue: str | None, job_id: str | None, number: int) -> NewJob:
        if name is None or queue is None or (self.id_column and job_id is None):
            missing = "name" if name is None else "queue" if queue is None else "id"
            raise _IncompleteRowError(
                f"[BULLTASK_ROW_INCOMPLETE] a row has no {missing}: name={name!r:.80}, queue={queue!r:.80}, "
                f"id={job_id!r:.80}, data={data!r:.200}"
            )
        wire_queue = _checked_names(queue, name, self.config.queue_hash_tag)
        encoded = self._encoded_data(name, data, queue)
        if self.id_column:
            new_id = check_job_id(cast(str, job_id))
        else:
            new_id = derived_id(self.write_id, wire_queue, name, encoded, number)
        if (payloads := PayloadCodec(self.config)).encrypts(queue):  # after the id, because each encryption differs
            encoded = payloads.dump_job_data(codec.decode(encoded), queue, name, f"the data of job {name}")
        return NewJob(queue, new_id, name, encoded, self.options, timestamp_ms=self.timestamp_ms, has_custom_id=True)

    def _encoded_data(self, name: str, data: str | None, queue: str) -> bytes:
        """Return the data in normalized JSON, without spaces, so that equal data has the same encoding."""
        try:
            value = codec.decode(data, exact=True)
        except (DecodeError, EncodeError) as exc:
            kind, problem, text = type(exc), str(exc), data or ""
            if text.startswith(_NOT_FINITE):
                kind, text = EncodeError, text.removeprefix(_NOT_FINITE)
                problem = "JSON does not support NaN and Infinity; with on_nan='null', null is sent instead"
            raise kind(f"data of a row for job {name} in queue {queue}: {problem}; got {text!r:.80}") from exc
        description = f"the data of job {name}"
        encoded = codec.encode(value, what=description, limit=self.config.max_payload)
        check_size(encoded, self.options, self.config.max_payload, description)
        return encoded

    def _send(self, broker: Broker, jobs: list[NewJob]) -> list[SendResult]:
        if not jobs:
            return []
        if self.idempotency_ttl_ms is None:
            return [SendResult(job_id, "added") for job_id in broker.producer.send(jobs)]
        return broker.producer.send_once(jobs, IdempotentWrite(self.write_id, self.idempotency_ttl_ms))


def resume_hint(write_id: str) -> str:
    """Return the instruction for resuming a failed write."""
    return (
        f"[BULLTASK_WRITE_ABORTED] The write {write_id} has failed. The jobs that it has sent are not removed: write "
        "the same rows again with this write id to add the missing ones. A streaming query does so when it is started "
        "again with its checkpoint."
    )


SEND_RESULT: Final = T.StructType([T.StructField(name, T.StringType()) for name in ("id", "status", "reason")])
"""A row's result: the id of its job, and ``added`` or ``duplicate``; or ``rejected`` and the reason."""

WEEK: Final = timedelta(days=7)


class SendOptions(TypedDict, total=False):
    """The common arguments of ``enqueue``, ``enqueue_stream`` and ``map_dataframe``.

    Attributes:
        write_id: Makes the write safe to retry: the same rows with the same id add no job twice. Default: a new id.
        chunk_size: The number of jobs in one round trip to Redis; default: 500.
        idempotency_ttl: How long Redis keeps the ids of added jobs, counted from the last job; default: 7 days.
        on_nan: What to do with NaN and Infinity, which JSON does not support: the row is invalid (``error``, the
            default), or they are sent as null (``null``).
    """

    write_id: str
    chunk_size: int
    idempotency_ttl: Duration
    on_nan: Literal["error", "null"]


class WriteArguments(SendOptions, BrokerOptions, total=False):
    """Further arguments of ``enqueue`` and ``enqueue_stream``: also those of `SendOptions` and `BrokerOptions`.

    Attributes:
        opts: The options of every job, as for ``Queue.add``.
    """

    opts: AddOptions


class EnqueueOptions(WriteArguments, total=False):
    """Further arguments of ``enqueue``, in addition to :class:`WriteArguments`.

    Attributes:
        on_duplicate_rows: What to do with rows that have the same name and data: add one job for all of them
            (``collapse``, the default), add a job for each (``keep``), or raise an error before anything is sent
            (``error``). With ``job_id``, ids are compared instead, and ``keep`` is not allowed.
        on_invalid_rows: What to do with rows of which no job can be made, such as rows without a name, with an invalid
            id, or with too much data: raise the error of the first (``error``, the default), or send the other rows and
            return these in ``rejected_rows`` (``collect``). Executors then keep a copy of all rows.
    """

    on_duplicate_rows: Literal["collapse", "keep", "error"]
    on_invalid_rows: Literal["error", "collect"]


@dataclass(frozen=True, slots=True)
class EnqueueResult:
    """The result of a write.

    Spark adds up the results of its tasks' successful attempts. Jobs that a failed attempt added count as duplicates in
    the next attempt; ``added``, ``duplicates`` and ``rejected`` always add up to ``rows``.

    Attributes:
        write_id: The id of the write. ``gather(result, …)`` uses it to find the jobs, for ``idempotency_ttl``.
        queue: The queue's name without the hash tag.
        rows: The number of rows.
        added: The number of added jobs.
        duplicates: The number of rows whose job already existed, or had already been added by this write.
        seconds: The duration of the write.
        partitions: The number of tasks that had rows.
        rejected: The number of invalid rows; 0 unless ``on_invalid_rows`` is ``collect``.
        rejected_rows: The invalid rows, with the columns of the DataFrame and ``rejected_reason``; ``None`` unless
            ``on_invalid_rows`` is ``collect``. Executors keep them until this DataFrame is garbage-collected.
    """

    write_id: str
    queue: str
    rows: int
    added: int
    duplicates: int
    seconds: float
    partitions: int
    rejected: int = 0
    rejected_rows: DataFrame | None = field(default=None, repr=False, compare=False)


def enqueue(
    df: DataFrame,
    queue: str,
    *,
    name: str | Column,
    data: Column | Sequence[str],
    job_id: Column | None = None,
    **options: Unpack[EnqueueOptions],
) -> EnqueueResult:
    """Add one job to a queue for each distinct row of a DataFrame, however often Spark retries a task.

    Rows with the same name and data (with ``job_id``, rows with the same id) become one job, unless
    ``on_duplicate_rows`` is changed.

    A job's id is ``job_id``, or derived from the write, the queue, the job's name and its data. A write cannot be
    rolled back: jobs that were sent before an error are not removed. Retry the write with the same write id to add the
    missing jobs.

    Args:
        df: The rows.
        queue: The queue's name.
        name: The name of all jobs (for a bulltask worker, the task's name), or a column with names.
        data: A column with the jobs' data (JSON strings, or any type that ``to_json`` accepts), or column names; these
            columns become an object. Decimals become strings, and timestamps have microseconds, so that both are
            exact. A number in a JSON string that has more digits than a ``float`` is invalid.
        job_id: A column with the ids, as strings. BullMQ rejects ids that are numbers or contain a ``:``.
        options: The options of :class:`WriteArguments` and :class:`EnqueueOptions`.

    Returns:
        The number of added jobs, and other counts.

    Raises:
        TypeError: An option is unknown.
        ConfigError: An option or a column is invalid, ``df`` is a streaming DataFrame, or there are equal rows
            and ``on_duplicate_rows`` is ``error``.
    """
    start_ms = mono_ms()
    check_option_names(options, EnqueueOptions)
    if df.isStreaming:
        raise ConfigError("enqueue needs a batch DataFrame; use enqueue_stream for a streaming DataFrame")
    on_nan, collect = row_policies(options)
    rows = standard_rows(df, name, data, job_id, on_nan=on_nan, whole_row=collect)
    compared = ["name", "data"] if job_id is None else ["id"]
    with described(df.sparkSession, f"bulltask: look for equal rows for queue {queue}"):
        rows = number_duplicates(rows, compared, options.get("on_duplicate_rows", "collapse"))
    source = read_options(WriteOptions, write_options(queue, options))
    sender = _row_sender(source, rows.drop(NUMBER, _ROW).schema, options.get("opts", {}))
    sender = replace(sender, collects_invalid=collect)

    sent = send_rows(sender)(F.struct(*(column for column in rows.columns if column != _ROW)))
    results = rows.select(F.spark_partition_id().alias("part"), sent.alias("sent"), *[F.col(_ROW)][:collect])
    rejected_rows = None
    with sending(sender, df.sparkSession, f"enqueue rows in queue {queue}"):
        if collect:
            results = results.localCheckpoint()  # so that counting them and looking at them sends nothing again
            rejected = results.where("sent.status = 'rejected'")
            rejected_rows = rejected.select(f"{_ROW}.*", F.col("sent.reason").alias("rejected_reason"))
        counts = results.select("part", "sent.status").groupBy("part", "status").count().collect()
    rows_of = Counter[str]()
    for row in counts:
        rows_of[row["status"]] += row["count"]
    return EnqueueResult(
        sender.write_id,
        queue,
        rows=rows_of.total(),
        added=rows_of["added"],
        duplicates=rows_of["duplicate"],
        seconds=(mono_ms() - start_ms) / 1000,
        partitions=len({row["part"] for row in counts}),
        rejected=rows_of["rejected"],
        rejected_rows=rejected_rows,
    )


def check_option_names(given: Mapping[str, object], kind: type) -> None:
    """Raise ``TypeError`` for an option that the ``TypedDict`` does not have."""
    known = kind.__annotations__  # a TypedDict includes inherited names
    if unknown := sorted(set(given) - set(known)):
        name, names = unknown[0], sorted(known)
        raise TypeError(f"unknown option {name!r}; known options are {', '.join(names)}{did_you_mean(name, names)}")


def send_rows(sender: RowSender) -> Callable[[Column], Column]:
    """Return a column function that sends the job for a row, given as a struct, and returns :data:`SEND_RESULT`."""

    def send(structs: Iterator[pa.StructArray]) -> Iterator[pa.Array]:
        for results in sender.results(map(pa.RecordBatch.from_struct_array, structs)):
            columns = (
                [result.id for result in results],
                [result.status for result in results],
                [result.reason if isinstance(result, RejectedRow) else None for result in results],
            )
            yield pa.StructArray.from_arrays([pa.array(values, pa.string()) for values in columns], SEND_RESULT.names)

    return vectorized_udf(send, SEND_RESULT)


@contextmanager
def described(spark: SparkSession, text: str) -> Iterator[None]:
    """Give the jobs of Spark that run meanwhile a description in the Spark UI, unless the program has set one."""
    context = None if is_remote() else spark.sparkContext
    if context is None or context.getLocalProperty(_DESCRIPTION) is not None:
        yield
        return
    context.setLocalProperty(_DESCRIPTION, text)
    try:
        yield
    finally:
        with suppress(AttributeError):  # it was stopped
            context.setLocalProperty(_DESCRIPTION, cast(str, None))  # removes it


_DESCRIPTION: Final = "spark.job.description"


@contextmanager
def sending(sender: RowSender, spark: SparkSession, text: str) -> Iterator[None]:
    """Describe the jobs of Spark that send rows meanwhile, and add the resume hint to every error.

    Errors from tasks have the hint already, but the error for a lost executor does not.
    """
    try:
        with described(spark, f"bulltask: {text}, write {sender.write_id}"):
            yield
    except Exception as exc:
        exc.add_note(resume_hint(sender.write_id))
        raise


def row_policies(options: Mapping[str, Any]) -> tuple[str, bool]:
    """Return ``on_nan``, and whether invalid rows are collected; raise ``ConfigError`` for other values."""
    on_nan = choice("error", "null")(options.get("on_nan", "error"), "on_nan")
    on_invalid = choice("error", "collect")(options.get("on_invalid_rows", "error"), "on_invalid_rows")
    return on_nan, on_invalid == "collect"


def standard_rows(
    df: DataFrame,
    name: str | Column,
    data: Column | Sequence[str],
    job_id: Column | None,
    *,
    on_nan: str = "error",
    whole_row: bool = False,
) -> DataFrame:
    """Return the rows with the standard columns of a write; raise ``ConfigError`` if ``data`` is a single name."""
    if isinstance(data, str):
        raise ConfigError(f"data must be a column, or a list of column names: [{data!r}], not {data!r}")
    data_column = data if isinstance(data, Column) else F.struct(*data)
    columns = {"name": F.lit(name) if isinstance(name, str) else name, "data": data_column}
    if job_id is not None:
        columns["id"] = job_id
    if whole_row:
        columns[_ROW] = F.struct("*")
    rows = df.select(*(column.alias(alias) for alias, column in columns.items()))
    return rows if isinstance(rows.schema["data"].dataType, T.StringType) else with_json(rows, "data", on_nan)


# The defaults of ``to_json`` write milliseconds.
_JSON_OPTIONS: Final = {
    "ignoreNullFields": "false",
    "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX",
    "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
}


def with_json(rows: DataFrame, name: str, on_nan: str) -> DataFrame:
    """Return the rows with the values of one column as JSON: nulls as ``null``, decimals as strings.

    If ``on_nan`` is not ``null``, a value with NaN or Infinity becomes a text that :class:`RowSender` rejects.
    """
    column, kind = F.col(name), rows.schema[name].dataType
    description = kind.simpleString()  # to convert nothing if there are no such numbers
    if "decimal" in description:
        column = _converted(column, kind, lambda value, leaf: value.cast("string") if leaf is T.DecimalType else value)
    data = F.to_json(column, _JSON_OPTIONS)
    if "float" in description or "double" in description:
        # x - x is NaN if x is NaN or infinite
        finite = _converted(
            column, kind, lambda value, leaf: F.when(~F.isnan(value - value), value) if leaf in _FLOATS else value
        )
        nulls = F.to_json(finite, _JSON_OPTIONS)
        data = nulls if on_nan == "null" else F.when(data != nulls, F.concat(F.lit(_NOT_FINITE), data)).otherwise(data)
    return rows.withColumn(name, data)


_FLOATS: Final = frozenset({T.FloatType, T.DoubleType})


def _converted(value: Column, kind: T.DataType, convert: Callable[[Column, type[T.DataType]], Column]) -> Column:
    """Return a value with all values in it converted, given each with its type; keys of maps stay as they are."""
    match kind:
        case T.ArrayType():
            return F.transform(value, lambda item: _converted(item, kind.elementType, convert))
        case T.MapType():
            return F.transform_values(value, lambda _, item: _converted(item, kind.valueType, convert))
        case T.StructType():
            parts = (_converted(value[part.name], part.dataType, convert).alias(part.name) for part in kind)
            return F.when(value.isNotNull(), F.struct(*parts))
        case _:
            return convert(value, type(kind))


def number_duplicates(rows: DataFrame, columns: Sequence[str], mode: str) -> DataFrame:
    """Number rows that are equal in these columns to keep them, or raise ``ConfigError`` if there are any."""
    choice("collapse", "keep", "error")(mode, "on_duplicate_rows")
    if mode == "keep":
        if "id" in columns:
            raise ConfigError("on_duplicate_rows='keep' cannot be used with job_id, which sets the ids")
        # Equal rows go to one task. They are interchangeable, so no order is needed.
        window = Window.partitionBy(*columns).orderBy(*columns)
        return rows.withColumn(NUMBER, F.row_number().over(window).cast("long") - 1)
    if mode == "error" and (duplicate := rows.groupBy(*columns).count().where("count > 1").first()) is not None:
        values = ", ".join(f"{column} {duplicate[column]!r:.80}" for column in columns)
        raise ConfigError(
            f"[BULLTASK_DUPLICATE_ROWS] {duplicate['count']} rows have the same {values}; nothing was sent"
        )
    return rows


def write_options(queue: str, arguments: WriteArguments) -> dict[str, str]:
    """Return the options of ``format("bulltask")`` that correspond to the arguments of ``enqueue``, except ``opts``."""
    options = {
        **broker_options(arguments, queue),
        "chunkSize": str(arguments.get("chunk_size", 500)),
        "idempotencyTtl": f"{max(1, to_ms(arguments.get('idempotency_ttl', WEEK), 'idempotency_ttl')) / 1000:.3f}s",
    }
    write_id = arguments.get("write_id")
    return options if write_id is None else {**options, "writeId": write_id}


class _Sent(SentToTasks):
    def __init__(self, function: Callable[[Iterator[Any]], Iterator[pa.Array]]) -> None:
        self.function = function


def vectorized_udf(
    function: Callable[[Iterator[Any]], Iterator[pa.Array]], returns: T.DataType
) -> Callable[[Column], Column]:
    """Return a column function (an iterator Arrow UDF), called once in each task with an iterator of Arrow arrays.

    ``mapInArrow`` would do the same for whole rows, but needs pandas. For each array, the function yields one of the
    same length. Spark treats it as nondeterministic, so it never skips a call or calls it twice.
    """
    sent = _Sent(function)

    def typed(arrays: Iterator[pa.Array]) -> Iterator[pa.Array]:
        # Spark uses these annotations to decide how to call the function.
        return sent.function(arrays)

    udf: Any = arrow_udf  # its stub lacks structs and the return type UserDefinedFunction
    return cast("Callable[[Column], Column]", udf(typed, returns).asNondeterministic())
