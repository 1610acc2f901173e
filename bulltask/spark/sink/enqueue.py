"""``enqueue``: add a job for each row of a DataFrame, and report how many were added."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Literal, TypedDict, Unpack, cast

import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as F
from pyspark.sql import functions as fn
from pyspark.sql.pandas.functions import arrow_udf
from pyspark.sql.types import DataType, StringType, StructField, StructType

from bulltask.clock import Duration, mono_ms, to_ms
from bulltask.config.urls import SecretUrl
from bulltask.errors import ConfigError, did_you_mean
from bulltask.queue.add_options import AddOptions
from bulltask.spark.sink.rows import NUMBER, JobBuilder, check_columns, check_job_options, check_write_id, new_write_id
from bulltask.spark.sink.writer import RowSender, resume_hint
from bulltask.spark.source.broker_options import broker_options
from bulltask.spark.source.options import WriteOptions, read_options

__all__ = [
    "WEEK",
    "EnqueueOptions",
    "EnqueueReport",
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

SEND_RESULT: Final = StructType([StructField("id", StringType()), StructField("outcome", StringType())])
"""The result of a row: the id of its job, and whether the job was added."""

WEEK: Final = timedelta(days=7)


class WriteArguments(TypedDict, total=False):
    """Arguments of every function that turns rows into jobs.

    Attributes:
        opts: Options of every job, as for ``Queue.add``.
        write_id: Makes the write repeatable: the same rows with the same id add nothing that was added before. A new
            one if omitted.
        batch: Jobs in one round trip; 500 if omitted.
        fence_ttl: How long Redis remembers what the write has added, counted from its last job; 7 days if omitted.
        url, prefix, queue_hash_tag: Where Redis is, and how queues are named; bulltask's settings if omitted.
    """

    opts: AddOptions
    write_id: str
    batch: int
    fence_ttl: Duration
    url: str | SecretUrl
    prefix: str
    queue_hash_tag: bool


class EnqueueOptions(WriteArguments, total=False):
    """Further arguments of ``enqueue``, in addition to :class:`WriteArguments`.

    Attributes:
        on_duplicate_rows: Rows with equal name and data become one job (``collapse``, the default), one job each
            (``number``), or are rejected before anything is sent (``error``). With ``job_id``, ids are compared
            instead, and ``number`` is not allowed.
    """

    on_duplicate_rows: Literal["collapse", "number", "error"]


@dataclass(frozen=True, slots=True)
class EnqueueReport:
    """The result of a write.

    Spark adds up what the successful attempts of its tasks reported. Jobs that a failed attempt had added count as
    duplicated in the attempt that followed; added and duplicated always make up all rows.

    Attributes:
        write_id: The write; ``gather(report, …)`` finds its jobs by it as long as the fence is kept.
        queue: The user's name of the queue.
        rows: How many rows were read.
        added: Jobs that did not exist before.
        duplicated: Rows whose job existed already, or had been added by this write before.
        seconds: How long the write took.
        partitions: Tasks that had rows.
    """

    write_id: str
    queue: str
    rows: int
    added: int
    duplicated: int
    seconds: float
    partitions: int


def enqueue(
    df: DataFrame,
    queue: str,
    *,
    name: str | Column,
    data: Column | Sequence[str],
    job_id: Column | None = None,
    **more: Unpack[EnqueueOptions],
) -> EnqueueReport:
    """Add a job to a queue for each row of a DataFrame, each exactly once, however often Spark runs a task.

    A job's id is ``job_id``, or derived from the write, the queue, the job's name and its data. A write cannot be
    rolled back: what was sent before an error stays, and repeating the write adds what is missing.

    Args:
        df: The rows.
        queue: The queue, named as everywhere in bulltask.
        name: The name of all jobs (for a bulltask worker, the task's name); or a column with names.
        data: A column with the jobs' data: JSON strings, or anything that ``to_json`` accepts; or names of columns,
            which become an object.
        job_id: A column with the ids, as strings; BullMQ accepts no id that is a number or contains a ``:``.
        more: See :class:`WriteArguments` and :class:`EnqueueOptions`.

    Returns:
        How many jobs were added.

    Raises:
        TypeError: An option is unknown.
        ConfigError: An option or a column is invalid, ``df`` is a stream, or there are equal rows and they are not
            allowed.
    """
    began_ms = mono_ms()
    check_option_names(more, EnqueueOptions)
    if df.isStreaming:
        raise ConfigError("enqueue sends the rows of a table; enqueue_stream sends those of a stream")
    rows = standard_rows(df, name, data, job_id)
    rows = number_duplicates(
        rows, ["name", "data"] if job_id is None else ["id"], more.get("on_duplicate_rows", "collapse")
    )
    sender = _sender(rows.drop(NUMBER).schema, queue, more)

    part = F.spark_partition_id().alias("part")
    outcomes = rows.select(part, send_rows(sender)(F.struct(*rows.columns))["outcome"].alias("outcome"))
    with resume_hint_on_error(sender):
        counts = outcomes.groupBy("part", "outcome").count().collect()
    done = {(one["part"], one["outcome"]): one["count"] for one in counts}
    total, added = sum(done.values()), sum(count for (_, outcome), count in done.items() if outcome == "added")
    seconds, partitions = (mono_ms() - began_ms) / 1000, len({part for part, _ in done})
    return EnqueueReport(sender.builder.write_id, queue, total, added, total - added, seconds, partitions)


def check_option_names(given: Mapping[str, object], kind: type) -> None:
    """Check for unknown names among options.

    Raises:
        TypeError: There is one; the message lists the known ones.
    """
    known = kind.__annotations__  # a TypedDict includes those that it inherits
    if unknown := sorted(set(given) - set(known)):
        raise TypeError(f"unknown option {unknown[0]!r}; known are {', '.join(known)}")


def send_rows(sender: RowSender) -> Callable[[Column], Column]:
    """Return a function of a struct of a row's columns that sends the row's job and returns :data:`SEND_RESULT`."""

    def send(structs: Iterator[pa.StructArray]) -> Iterator[pa.Array]:
        for found in sender.outcomes(map(pa.RecordBatch.from_struct_array, structs)):
            ids = pa.array((one.id for one in found), pa.string(), size=len(found))
            yield pa.StructArray.from_arrays([ids, pa.array([one.outcome for one in found])], ["id", "outcome"])

    return vectorized_udf(send, SEND_RESULT)


@contextmanager
def resume_hint_on_error(sender: RowSender) -> Iterator[None]:
    """Add the resume hint to every error: errors of tasks have it, but that of a lost executor does not."""
    try:
        yield
    except Exception as exc:
        exc.add_note(resume_hint(sender.builder.write_id))
        raise


def standard_rows(df: DataFrame, name: str | Column, data: Column | Sequence[str], job_id: Column | None) -> DataFrame:
    """Return the rows with the columns that a write expects.

    Raises:
        ConfigError: ``data`` is a single name, not a list of names.
    """
    if isinstance(data, str):
        raise ConfigError(f"data must be a column, or a list of names of columns: [{data!r}], not {data!r}")
    content = data if isinstance(data, Column) else F.struct(*data)
    columns = {"name": F.lit(name) if isinstance(name, str) else name, "data": content}
    if job_id is not None:
        columns["id"] = job_id
    rows = df.select(*(column.alias(to) for to, column in columns.items()))
    if not isinstance(rows.schema["data"].dataType, StringType):
        rows = rows.withColumn("data", as_json("data"))
    return rows


def as_json(column: str | Column) -> Column:
    """Return a column as JSON that includes nulls, as ``null``."""
    return F.to_json(column, {"ignoreNullFields": "false"})


def number_duplicates(rows: DataFrame, same: Sequence[str], wanted: str) -> DataFrame:
    """Number equal rows, or reject them.

    Args:
        rows: The rows.
        same: The columns that are compared.
        wanted: The value of ``on_duplicate_rows``.

    Raises:
        ConfigError: There are equal rows and they are not allowed; or ``wanted`` is invalid.
    """
    if wanted not in {"collapse", "number", "error"}:
        raise ConfigError(f"on_duplicate_rows must be collapse, number or error, not {wanted!r}")
    if wanted == "number":
        if "id" in same:
            raise ConfigError("on_duplicate_rows='number' gives equal rows different ids; with job_id they have ids")
        # This puts equal rows into one task. They are interchangeable, so no order is needed.
        place = Window.partitionBy(*same).orderBy(*same)
        return rows.withColumn(NUMBER, F.row_number().over(place).cast("long") - 1)
    if wanted == "error" and (twice := rows.groupBy(*same).count().where("count > 1").first()) is not None:
        shown = ", ".join(f"{column} {twice[column]!r:.80}" for column in same)
        raise ConfigError(f"[BULLTASK_DUPLICATE_ROWS] {twice['count']} rows have the same {shown}; nothing was sent")
    return rows


def _sender(schema: StructType, queue: str, more: EnqueueOptions) -> RowSender:
    options = read_options(WriteOptions, write_options(queue, more))
    shared = check_job_options(more.get("opts", {}), options.config)
    columns = check_columns(schema, queue=queue, id_column=None)
    builder = JobBuilder(
        options.config, check_write_id(options.write_id or new_write_id()), queue, shared, bool(columns.id)
    )
    return RowSender(builder, columns, options.batch, options.fence_ttl_ms)


def write_options(queue: str, more: WriteArguments) -> dict[str, str]:
    """Return the options of ``format("bulltask")`` that correspond to the arguments of ``enqueue``, except ``opts``."""
    options = {
        **broker_options(more),
        "queue": queue,
        "batch": str(more.get("batch", 500)),
        "fenceTtl": f"{max(1, to_ms(more.get('fence_ttl', WEEK), 'fence_ttl')) / 1000:.3f}s",
    }
    write_id = more.get("write_id")
    return options if write_id is None else {**options, "writeId": write_id}


@dataclass(frozen=True, slots=True)
class FileColumns:
    """What the columns of a file mean.

    Attributes:
        data: Columns that become a job's data.
        name: The name of all jobs; or.
        name_column: The column with their names.
        id_column: The column with their ids; ``None``: ids are derived from the rows.
    """

    data: Sequence[str]
    name: str | None = None
    name_column: str | None = None
    id_column: str | None = None


def enqueue_file(
    spark: SparkSession, path: str, queue: str, names: FileColumns, **more: Unpack[EnqueueOptions]
) -> EnqueueReport:
    """Add a job to a queue for each row of a Parquet file or a directory of them, as ``enqueue`` does.

    Args:
        spark: The session.
        path: The file.
        queue: The queue.
        names: What the columns mean.
        more: As for ``enqueue``.

    Raises:
        ConfigError: There is no such column, or as for ``enqueue``.
    """
    rows = spark.read.parquet(path)
    for column in (*names.data, names.name_column, names.id_column):
        if column is not None and column not in rows.columns:
            hint = did_you_mean(column, rows.columns)
            raise ConfigError(f"{path} has no column {column!r}{hint}; it has {', '.join(rows.columns)}")
    return enqueue(
        rows,
        queue,
        name=fn.col(names.name_column) if names.name_column is not None else str(names.name),
        data=list(names.data),
        job_id=None if names.id_column is None else fn.col(names.id_column).cast("string"),
        **more,
    )


def vectorized_udf(
    function: Callable[[Iterator[Any]], Iterator[pa.Array]], returns: DataType
) -> Callable[[Column], Column]:
    """Make a column function (an iterator Arrow UDF): it is called once in each task, with an iterator of Arrow arrays.

    ``mapInArrow`` would do the same for whole rows, but needs pandas. Spark treats the function as nondeterministic, so
    it neither skips a call nor makes it twice.

    Args:
        function: Returns for each array one of the same length.
        returns: The type of its elements.
    """

    def whole(arrays: Iterator[pa.Array]) -> Iterator[pa.Array]:
        # Spark decides by these annotations how to call it.
        return function(arrays)

    make: Any = arrow_udf  # its stub lacks structs, and that the result is a UserDefinedFunction
    return cast("Callable[[Column], Column]", make(whole, returns).asNondeterministic())
