"""``enqueue``: add a job for each distinct row of a DataFrame."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Literal, TypedDict, Unpack, cast

import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as F
from pyspark.sql.pandas.functions import arrow_udf
from pyspark.sql.types import DataType, StringType, StructField, StructType

from bulltask.config.urls import SecretUrl
from bulltask.jobs.clock import Duration, mono_ms, to_ms
from bulltask.jobs.errors import ConfigError, did_you_mean
from bulltask.queue.context import AddOptions
from bulltask.spark.sink.rows import NUMBER, JobBuilder, check_columns, check_job_options, check_write_id, new_write_id
from bulltask.spark.sink.writer import RowSender, resume_hint
from bulltask.spark.source.broker_options import broker_options
from bulltask.spark.source.options import WriteOptions, read_options

__all__ = [
    "WEEK",
    "EnqueueOptions",
    "EnqueueResult",
    "FileColumns",
    "WriteArguments",
    "as_json",
    "check_option_names",
    "enqueue",
    "enqueue_file",
    "number_duplicates",
    "resume_hint_on_error",
    "send_rows",
    "standard_rows",
    "vectorized_udf",
    "write_options",
]

SEND_RESULT: Final = StructType([StructField("id", StringType()), StructField("status", StringType())])
"""A row's result: the id of its job, and ``added`` or ``duplicate``."""

WEEK: Final = timedelta(days=7)


class WriteArguments(TypedDict, total=False):
    """The common arguments of all functions that send rows as jobs.

    Attributes:
        opts: The options of every job, as for ``Queue.add``.
        write_id: Makes the write safe to retry: the same rows with the same id add no job twice. Default: a new id.
        chunk_size: The number of jobs in one round trip to Redis; default: 500.
        idempotency_ttl: How long Redis keeps the ids of added jobs, counted from the last job; default: 7 days.
        url, prefix, queue_hash_tag: The location of Redis, and how queues are named; default: bulltask's settings.
    """

    opts: AddOptions
    write_id: str
    chunk_size: int
    idempotency_ttl: Duration
    url: str | SecretUrl
    prefix: str
    queue_hash_tag: bool


class EnqueueOptions(WriteArguments, total=False):
    """Further arguments of ``enqueue``, in addition to :class:`WriteArguments`.

    Attributes:
        on_duplicate_rows: What to do with rows that have the same name and data: add one job for all of them
            (``collapse``, the default), add a job for each (``keep``), or raise an error before anything is sent
            (``error``). With ``job_id``, ids are compared instead, and ``keep`` is not allowed.
    """

    on_duplicate_rows: Literal["collapse", "keep", "error"]


@dataclass(frozen=True, slots=True)
class EnqueueResult:
    """The result of a write.

    Spark adds up the results of its tasks' successful attempts. Jobs that a failed attempt added count as duplicates in
    the next attempt; ``added`` and ``duplicates`` always add up to ``rows``.

    Attributes:
        write_id: The id of the write. ``gather(result, …)`` uses it to find the jobs, for ``idempotency_ttl``.
        queue: The queue's name without the hash tag.
        rows: The number of rows.
        added: The number of added jobs.
        duplicates: The number of rows whose job already existed, or had already been added by this write.
        seconds: The duration of the write.
        partitions: The number of tasks that had rows.
    """

    write_id: str
    queue: str
    rows: int
    added: int
    duplicates: int
    seconds: float
    partitions: int


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
            columns become an object.
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
    rows = standard_rows(df, name, data, job_id)
    rows = number_duplicates(
        rows, ["name", "data"] if job_id is None else ["id"], options.get("on_duplicate_rows", "collapse")
    )
    sender = _sender(rows.drop(NUMBER).schema, queue, options)

    part = F.spark_partition_id().alias("part")
    statuses = rows.select(part, send_rows(sender)(F.struct(*rows.columns))["status"].alias("status"))
    with resume_hint_on_error(sender):
        counts = statuses.groupBy("part", "status").count().collect()
    counts_by_key = {(row["part"], row["status"]): row["count"] for row in counts}
    total, added = (
        sum(counts_by_key.values()),
        sum(count for (_, status), count in counts_by_key.items() if status == "added"),
    )
    seconds, partitions = (mono_ms() - start_ms) / 1000, len({part for part, _ in counts_by_key})
    return EnqueueResult(sender.builder.write_id, queue, total, added, total - added, seconds, partitions)


def check_option_names(given: Mapping[str, object], kind: type) -> None:
    """Check options for unknown names.

    Raises:
        TypeError: A name is unknown; the message lists the known names.
    """
    known = kind.__annotations__  # a TypedDict includes inherited names
    if unknown := sorted(set(given) - set(known)):
        raise TypeError(f"unknown option {unknown[0]!r}; known options are {', '.join(known)}")


def send_rows(sender: RowSender) -> Callable[[Column], Column]:
    """Return a column function that sends the job for a row, given as a struct, and returns :data:`SEND_RESULT`."""

    def send(structs: Iterator[pa.StructArray]) -> Iterator[pa.Array]:
        for results in sender.results(map(pa.RecordBatch.from_struct_array, structs)):
            ids = pa.array((result.id for result in results), pa.string(), size=len(results))
            yield pa.StructArray.from_arrays([ids, pa.array([result.status for result in results])], ["id", "status"])

    return vectorized_udf(send, SEND_RESULT)


@contextmanager
def resume_hint_on_error(sender: RowSender) -> Iterator[None]:
    """Add the resume hint to every error: errors from tasks have it, but the error for a lost executor does not."""
    try:
        yield
    except Exception as exc:
        exc.add_note(resume_hint(sender.builder.write_id))
        raise


def standard_rows(df: DataFrame, name: str | Column, data: Column | Sequence[str], job_id: Column | None) -> DataFrame:
    """Return the rows with the standard columns of a write.

    Raises:
        ConfigError: ``data`` is a single name, not a list of names.
    """
    if isinstance(data, str):
        raise ConfigError(f"data must be a column, or a list of column names: [{data!r}], not {data!r}")
    data_column = data if isinstance(data, Column) else F.struct(*data)
    columns = {"name": F.lit(name) if isinstance(name, str) else name, "data": data_column}
    if job_id is not None:
        columns["id"] = job_id
    rows = df.select(*(column.alias(alias) for alias, column in columns.items()))
    if not isinstance(rows.schema["data"].dataType, StringType):
        rows = rows.withColumn("data", as_json("data"))
    return rows


def as_json(column: str | Column) -> Column:
    """Return a column as JSON, with nulls as ``null``."""
    return F.to_json(column, {"ignoreNullFields": "false"})


def number_duplicates(rows: DataFrame, columns: Sequence[str], mode: str) -> DataFrame:
    """Number equal rows to keep them, or raise an error if there are any.

    Args:
        rows: The rows.
        columns: The columns to compare.
        mode: The value of ``on_duplicate_rows``.

    Raises:
        ConfigError: There are equal rows and ``mode`` is ``error``, or ``mode`` is invalid.
    """
    if mode not in {"collapse", "keep", "error"}:
        raise ConfigError(f"on_duplicate_rows must be collapse, keep or error, not {mode!r}")
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


def _sender(schema: StructType, queue: str, arguments: EnqueueOptions) -> RowSender:
    options = read_options(WriteOptions, write_options(queue, arguments))
    shared = check_job_options(arguments.get("opts", {}), options.config)
    columns = check_columns(schema, queue=queue, id_column=None)
    builder = JobBuilder(
        options.config, check_write_id(options.write_id or new_write_id()), queue, shared, bool(columns.id)
    )
    return RowSender(builder, columns, options.chunk_size, options.idempotency_ttl_ms)


def write_options(queue: str, arguments: WriteArguments) -> dict[str, str]:
    """Return the options of ``format("bulltask")`` that correspond to the arguments of ``enqueue``, except ``opts``."""
    options = {
        **broker_options(arguments),
        "queue": queue,
        "chunkSize": str(arguments.get("chunk_size", 500)),
        "idempotencyTtl": f"{max(1, to_ms(arguments.get('idempotency_ttl', WEEK), 'idempotency_ttl')) / 1000:.3f}s",
    }
    write_id = arguments.get("write_id")
    return options if write_id is None else {**options, "writeId": write_id}


@dataclass(frozen=True, slots=True)
class FileColumns:
    """How a file's columns are used.

    Attributes:
        data: The columns that become a job's data.
        name: The name of all jobs, unless ``name_column`` is set.
        name_column: The column with the jobs' names.
        id_column: The column with the jobs' ids; ``None``: ids are derived from the rows.
    """

    data: Sequence[str]
    name: str | None = None
    name_column: str | None = None
    id_column: str | None = None


def enqueue_file(
    spark: SparkSession, path: str, queue: str, names: FileColumns, **options: Unpack[EnqueueOptions]
) -> EnqueueResult:
    """Add a job to a queue for each distinct row of a Parquet file or a directory of them, as ``enqueue`` does.

    Args:
        spark: The session.
        path: The file.
        queue: The queue's name.
        names: How the columns are used.
        options: The options of ``enqueue``.

    Raises:
        ConfigError: A column does not exist, or as for ``enqueue``.
    """
    rows = spark.read.parquet(path)
    for column in (*names.data, names.name_column, names.id_column):
        if column is not None and column not in rows.columns:
            hint = did_you_mean(column, rows.columns)
            raise ConfigError(f"{path} has no column {column!r}{hint}; it has {', '.join(rows.columns)}")
    return enqueue(
        rows,
        queue,
        name=F.col(names.name_column) if names.name_column is not None else str(names.name),
        data=list(names.data),
        job_id=None if names.id_column is None else F.col(names.id_column).cast("string"),
        **options,
    )


def vectorized_udf(
    function: Callable[[Iterator[Any]], Iterator[pa.Array]], returns: DataType
) -> Callable[[Column], Column]:
    """Return a column function (an iterator Arrow UDF), called once in each task with an iterator of Arrow arrays.

    ``mapInArrow`` would do the same for whole rows, but needs pandas. Spark treats the function as nondeterministic, so
    it never skips a call or calls the function twice.

    Args:
        function: A function that yields an array of the same length for each array.
        returns: The type of the elements.
    """

    def typed(arrays: Iterator[pa.Array]) -> Iterator[pa.Array]:
        # Spark uses these annotations to decide how to call the function.
        return function(arrays)

    udf: Any = arrow_udf  # its stub lacks structs and the return type UserDefinedFunction
    return cast("Callable[[Column], Column]", udf(typed, returns).asNondeterministic())
