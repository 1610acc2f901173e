"""The data source ``format("bulltask")``, sessions that have it, and functions that read with it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import wraps
from typing import Any, Final, Literal, ParamSpec, TypeVar, Unpack

from pyspark.sql import Column, DataFrame, DataFrameReader, SparkSession, is_remote
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    DataSourceWriter,
)
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamReader
from pyspark.sql.types import StructType

import bulltask
from bulltask.config.parsers import choice
from bulltask.jobs.clock import Duration, to_ms
from bulltask.jobs.errors import BulltaskError, ConfigError, MissingExtraError
from bulltask.spark.sink import (
    JobsStreamWriter,
    JobsWriter,
    WriteArguments,
    check_option_names,
    row_policies,
    standard_rows,
    write_options,
)
from bulltask.spark.source.columns import select_columns
from bulltask.spark.source.options import (
    MAX_EVENTS_PER_TRIGGER,
    BrokerOptions,
    CountsOptions,
    EventsOptions,
    JobsOptions,
    StreamOptions,
    WriteOptions,
    broker_options,
    option_of,
    read_options,
)
from bulltask.spark.source.readers import CountsReader, EventsReader, EventsStreamReader, JobsReader

P = ParamSpec("P")
R = TypeVar("R")


def _in_one_line(method: Callable[P, R]) -> Callable[P, R]:
    """Let Spark show an error of the user as one line, without a traceback of Spark's processes and of bulltask."""

    @wraps(method)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(*args, **kwargs)
        except BulltaskError:
            if "pyspark.sql.worker.utils" in sys.modules:  # a process of Spark that plans a query, and exits now
                os.environ["SPARK_HIDE_TRACEBACK"] = "1"
            raise

    return checked


class BulltaskSource(DataSource):
    """The data source of ``format("bulltask")``: checks the options and returns the reader or writer of a table.

    No reader accepts filters (``pushFilters``), because Spark would use the plan of a filtered read for later queries
    with other filters. Options restrict a read instead: see ADR 54.
    """

    @classmethod
    def name(cls) -> str:
        """Return the name for ``format()`` and ``USING``."""
        return "bulltask"

    @_in_one_line
    def schema(self) -> StructType:
        """Return the columns of the table: all, or those of the option ``columns``."""
        return select_columns(option_of(self.options, "table"), None, option_of(self.options, "columns"))

    @_in_one_line
    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader of the table, for all columns or those that the user selected."""
        table = option_of(self.options, "table")
        columns = select_columns(table, schema)
        if table == "events":
            return EventsReader(read_options(EventsOptions, self.options), columns)
        if table == "counts":
            return CountsReader(read_options(CountsOptions, self.options), columns)
        return JobsReader(read_options(JobsOptions, self.options), columns)

    @_in_one_line
    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """Return the reader of a streaming query of events; other tables raise ``ConfigError``."""
        # Spark requests the columns before it reports that this is a streaming query.
        if option_of(self.options, "table") != "events":
            raise ConfigError(
                "[BULLTASK_OPTION_MISSING] a streaming query can read only events: add option('table', 'events')"
            )
        return EventsStreamReader(read_options(StreamOptions, self.options), select_columns("events", schema))

    @_in_one_line
    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Return the writer of a batch: each distinct row becomes a job. ``overwrite`` is rejected."""
        return JobsWriter(read_options(WriteOptions, self.options), schema, overwrite=overwrite)

    @_in_one_line
    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
        """Return the writer of a streaming query, which writes each batch like :meth:`writer`."""
        return JobsStreamWriter(read_options(WriteOptions, self.options), schema, overwrite=overwrite)


_REQUIRED_CONF: Final[Mapping[str, str]] = {
    "spark.sql.session.timeZone": "UTC",
    # Other programs read Spark's default timestamp type as nanoseconds without a time zone.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    # A batch that is written again must replace only its own partitions.
    "spark.sql.sources.partitionOverwriteMode": "dynamic",
}

_LOCAL_CONF: Final[Mapping[str, str]] = {
    "spark.driver.host": "127.0.0.1",
    "spark.sql.shuffle.partitions": "4",
}
"""Settings for a session in this process: no lookup of this machine's name, and few partitions for small tables."""


def session(
    app: str = "bulltask",
    master: str | None = None,
    *,
    ui: bool = False,
    shuffle_partitions: int | None = None,
    conf: Mapping[str, str] | None = None,
) -> SparkSession:
    """Return a session with the settings that the pipeline needs, and with the data source ``bulltask``.

    If the process already has a session, it is used, because Spark has one session per process.

    Args:
        app: The application's name in the Spark UI and in logs.
        master: Spark's master: ``local[4]``, ``spark://…``, or ``sc://…`` for a Spark Connect server; default: the
            master given to ``spark-submit`` or in the environment variable ``SPARK_REMOTE``, else ``local[*]``.
        ui: Whether to serve the Spark UI; ignored with Spark Connect.
        shuffle_partitions: The partitions of a shuffled table; default: 4 with a local master, else Spark's default.
        conf: Further Spark settings, which override the settings above. With Spark Connect, only settings that a
            session may set.

    Returns:
        The session. ``session().stop()`` stops it.

    Raises:
        MissingExtraError: A package that Spark Connect needs is not installed.
    """
    # Otherwise Spark's Python workers use the `python3` on the PATH, which may lack packages that this process has.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    address = os.environ.get("SPARK_REMOTE", "") if master is None else master
    builder, settings = SparkSession.builder.appName(app), dict[str, Any](_REQUIRED_CONF)
    if address.startswith("sc://"):
        builder = builder.remote(address)
    else:
        settings["spark.ui.enabled"] = str(ui).lower()
        if master is not None:
            builder = builder.master(master)
            settings |= _LOCAL_CONF if master.startswith("local") else {}
    if shuffle_partitions is not None:
        settings["spark.sql.shuffle.partitions"] = str(shuffle_partitions)
    try:
        spark = builder.config(map=settings | dict(conf or {})).getOrCreate()
    except ImportError as exc:  # only the Connect client checks for packages; the error names the first
        raise MissingExtraError(f"Spark Connect: pip install 'pyspark[connect]' 'pandas<3' ({exc})") from exc
    register(spark)
    return spark


def register(spark: SparkSession, name: str = "bulltask") -> None:
    """Register ``format("bulltask")`` with a session.

    Spark finds bulltask by itself if it is installed on all nodes. This function is needed for another name, and if
    bulltask is passed with ``--py-files``.

    Args:
        spark: The session.
        name: The format's name.
    """
    archive = getattr(bulltask.__loader__, "archive", None)
    if archive is not None and not is_remote():
        _add_to_pythonpath(archive, spark)
    elif not is_remote() and _is_known(spark, name):
        return
    spark.dataSource.register(_source(name))


def _is_known(spark: SparkSession, name: str) -> bool:
    """Return whether the session has the source. Spark has found it, or would warn if it were registered again."""
    state: Any = spark._jsparkSession.sessionState()  # noqa: SLF001 - the Python API cannot tell
    return bool(state.dataSourceManager().dataSourceExists(name))


def _add_to_pythonpath(archive: str, spark: SparkSession) -> None:
    """Add bulltask's zip archive (``--py-files``) to the module path of all of Spark's Python processes.

    Spark adds such files to the path of executors and of this process, but not of the process that plans a
    streaming query.
    """
    environment = spark.sparkContext.environment
    paths = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    if archive not in paths:
        environment["PYTHONPATH"] = os.pathsep.join([*paths, archive])


def _source(name: str) -> type[DataSource]:
    if name == BulltaskSource.name():
        return BulltaskSource
    # Spark calls the class method `name`. The class is pickled by value, because it is not in a module.
    return type("NamedSource", (BulltaskSource,), {"name": classmethod(lambda _: name)})


class JobsReadOptions(BrokerOptions, total=False):
    """Further arguments of ``jobs``, in addition to :class:`bulltask.spark.source.options.BrokerOptions`.

    Attributes:
        ids: Read only the jobs with these ids, without listing others: milliseconds instead of a read of all.
        since, until: Read only jobs that finished at ``since`` or later, and before ``until``. Redis selects them,
            which is faster than a filter. Without a time zone, the times are in UTC.
    """

    ids: Sequence[str] | None
    since: datetime | None
    until: datetime | None


def jobs(
    spark: SparkSession,
    queues: str | Sequence[str] = "*",
    states: str | Sequence[str] = ("completed", "failed"),
    *,
    columns: Sequence[str] | None = None,
    partitions: int | None = None,
    **options: Unpack[JobsReadOptions],
) -> DataFrame:
    """Return the jobs in some queues, as they are in Redis when Spark reads the rows.

    Args:
        spark: The session.
        queues: Queue names, or ``*`` for all.
        states: BullMQ's names: ``wait``, ``active``, ``delayed``, ``prioritized``, ``waiting-children``, ``completed``,
            ``failed``, ``paused``; ``waiting`` is ``wait`` and ``paused``.
        columns: The columns to read. Reading fewer columns is faster. Select them here, because Spark does not push a
            query's column selection down to a Python data source.
        partitions: The maximum number of tasks; default: 2 for each core.
        options: The options of :class:`JobsReadOptions`.

    Returns:
        The table ``jobs`` of ``format("bulltask")``, with a row for each job.

    Raises:
        ConfigError: A column does not exist. Other invalid arguments are reported when Spark reads the rows.
    """
    values = {"state": ",".join([states] if isinstance(states, str) else states)}
    period = {"since": options.get("since"), "until": options.get("until")}
    values |= {name: moment.isoformat() for name, moment in period.items() if moment is not None}
    if (ids := options.get("ids")) is not None:
        values["id"] = json.dumps(list(ids))
    if partitions is not None:
        values["numPartitions"] = str(partitions)
    check_option_names(options, JobsReadOptions)
    return _batch(spark, "jobs", columns, broker_options(options, queues) | values)


def events(
    spark: SparkSession,
    queues: str | Sequence[str] = "*",
    *,
    columns: Sequence[str] | None = None,
    **connection: Unpack[BrokerOptions],
) -> DataFrame:
    """Return the events in the queues' event streams, by default the newest 10,000 of each queue.

    Args:
        spark: The session.
        queues: Queue names, or ``*`` for all.
        columns: The columns to read.
        connection: The options of `BrokerOptions`.

    Returns:
        The table ``events`` of ``format("bulltask")``, with a row for each event.

    Raises:
        ConfigError: A column does not exist.
    """
    check_option_names(connection, BrokerOptions)
    return _batch(spark, "events", columns, broker_options(connection, queues))


def counts(spark: SparkSession, queues: str | Sequence[str] = "*", **connection: Unpack[BrokerOptions]) -> DataFrame:
    """Return the number of jobs in each state of each queue: ``queue``, ``state``, ``jobs``.

    Args:
        spark: The session.
        queues: Queue names, or ``*`` for all.
        connection: The options of `BrokerOptions`.
    """
    check_option_names(connection, BrokerOptions)
    return _batch(spark, "counts", None, broker_options(connection, queues))


def stream_events(
    spark: SparkSession,
    queues: str | Sequence[str] = "*",
    *,
    starting: Literal["earliest", "latest"] = "earliest",
    max_events_per_trigger: int | None = MAX_EVENTS_PER_TRIGGER,
    align: bool = True,
    on_loss: Literal["fail", "gap"] = "fail",
    **connection: Unpack[BrokerOptions],
) -> DataFrame:
    """Return the events of some queues as a streaming DataFrame, each exactly once per checkpoint.

    Args:
        spark: The session.
        queues: Queue names, or ``*`` for all, including queues that are created later.
        starting: Where a new checkpoint begins.
        max_events_per_trigger: The maximum number of events in a batch, across all queues; ``None`` for no limit.
        align: If a batch cannot include all events of a queue, read no other queue past the time at which that queue
            was cut off, so that watermarks drop nothing.
        on_loss: What to do if events were trimmed before they were read: ``fail`` fails the query, and ``gap`` emits a
            row with the event ``bulltask.gap``.
        connection: The options of `BrokerOptions`.

    Returns:
        The streaming DataFrame.

    Raises:
        ConfigError: ``on_loss`` is invalid.
    """
    check_option_names(connection, BrokerOptions)
    fails = choice("fail", "gap")(on_loss, "on_loss") == "fail"
    options = {
        "startingOffsets": starting,
        "maxEventsPerTrigger": str(max_events_per_trigger).lower(),  # the option's value for no limit is "none"
        "alignQueues": str(align).lower(),
        "failOnDataLoss": str(fails).lower(),
        "gapRows": str(not fails).lower(),
    }
    register(spark)
    reader: DataStreamReader = spark.readStream.format("bulltask")
    return reader.options(**broker_options(connection, queues), table="events", **options).load()


def _batch(spark: SparkSession, table: str, columns: Sequence[str] | None, options: dict[str, str]) -> DataFrame:
    register(spark)
    reader: DataFrameReader = spark.read.format("bulltask").options(table=table, **options)
    if columns is not None:
        reader = reader.schema(select_columns(table, None, columns))
    return reader.load()


class EnqueueStreamOptions(WriteArguments, total=False):
    """Further arguments of ``enqueue_stream``, in addition to :class:`bulltask.spark.sink.WriteArguments`.

    ``write_id`` replaces the query's id, from which the jobs' ids are derived. A query with a new checkpoint but the
    same source and ``write_id`` therefore adds no job twice. Times in ``opts`` are durations, not points in time.

    Attributes:
        trigger: How often a batch starts: seconds, ``timedelta``, or Spark's syntax; default: ``"5 seconds"``.
        available_now: Send the rows that are available now, in batches, then stop.
    """

    trigger: Duration | str
    available_now: bool


def enqueue_stream(
    df: DataFrame,
    queue: str,
    *,
    name: str | Column,
    data: Column | Sequence[str],
    checkpoint: str,
    job_id: Column | None = None,
    **options: Unpack[EnqueueStreamOptions],
) -> StreamingQuery:
    """Start a query that adds a job to a queue for each distinct row in each batch of a streaming DataFrame.

    Each batch is a separate write; its id is derived from the query and the batch. A batch that Spark runs again after
    a crash adds only missing jobs. The same row in a later batch becomes another job. Rows in one batch with the same
    name and data become one job.

    Args:
        df: The rows, from ``spark.readStream``.
        queue: The queue's name.
        name: The name of all jobs (for a bulltask worker, the task's name), or a column with names.
        data: A column with the jobs' data (JSON strings, or any type that ``to_json`` accepts), or column names; these
            columns become an object.
        checkpoint: The directory for Spark's progress; with the same directory, the query continues where it left off.
        job_id: A column with the ids, as strings; BullMQ rejects ids that are numbers or contain a ``:``.
        options: The options of :class:`EnqueueStreamOptions`.

    Returns:
        The running query. ``query.stop()`` stops it.

    Raises:
        TypeError: An option is unknown.
        ConfigError: An option or a column is invalid, or ``df`` is not a streaming DataFrame.
    """
    check_option_names(options, EnqueueStreamOptions)
    if not df.isStreaming:
        raise ConfigError(
            "enqueue_stream needs a streaming DataFrame (spark.readStream); use enqueue for a batch DataFrame"
        )
    rows = standard_rows(df, name, data, job_id, on_nan=row_policies(options)[0])
    writer_options = write_options(queue, options) | {"jobOpts": _encode_opts(options.get("opts", {}))}
    JobsStreamWriter(read_options(WriteOptions, writer_options), rows.schema, overwrite=False)  # report errors now
    register(df.sparkSession)
    writer = rows.writeStream.format("bulltask").outputMode("append").options(**writer_options)
    # For the Spark UI. Two running queries cannot have the same name.
    if (title := f"bulltask: enqueue rows in queue {queue}") not in [q.name for q in df.sparkSession.streams.active]:
        writer = writer.queryName(title)
    writer = writer.option("checkpointLocation", checkpoint)
    if options.get("available_now", False):
        return writer.trigger(availableNow=True).start()
    trigger = options.get("trigger", "5 seconds")
    interval = trigger if isinstance(trigger, str) else f"{to_ms(trigger, 'trigger')} milliseconds"
    return writer.trigger(processingTime=interval).start()


def _encode_opts(opts: Mapping[str, Any]) -> str:
    """Return job options as JSON, because Spark recreates the writer from string options for each batch."""

    def encode(value: object) -> object:
        if isinstance(value, timedelta):
            return value.total_seconds()
        raise ConfigError(
            f"opts of a streaming query must be numbers, strings, durations or mappings of these, not {value!r}: they "
            "are the same for every batch"
        )

    return json.dumps(dict(opts), default=encode)
