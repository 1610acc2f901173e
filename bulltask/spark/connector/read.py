"""Jobs and events as DataFrames: ``format("bulltask")`` with arguments instead of string options."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final, Literal, Unpack

from pyspark.sql import DataFrame, DataFrameReader, SparkSession
from pyspark.sql.streaming.readwriter import DataStreamReader
from pyspark.sql.types import StructType

from bulltask.config.parsers import choice
from bulltask.jobs.errors import ConfigError, did_you_mean
from bulltask.spark.connector.session import register
from bulltask.spark.source.broker_options import BrokerOptions, broker_options
from bulltask.spark.source.schemas import TABLES

__all__ = ["counts", "events", "jobs", "stream_events"]

_LOSS_OPTIONS: Final = {"fail": ("true", "false"), "gap": ("false", "true")}


def jobs(
    spark: SparkSession,
    queues: str | Sequence[str] = "*",
    states: str | Sequence[str] = ("completed", "failed"),
    *,
    columns: Sequence[str] | None = None,
    partitions: int | None = None,
    **connection: Unpack[BrokerOptions],
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
        connection: The options of `BrokerOptions`.

    Returns:
        The table ``jobs`` of ``format("bulltask")``, with a row for each job.

    Raises:
        ConfigError: A column does not exist. Other invalid arguments are reported when Spark reads the rows.
    """
    options = {"state": ",".join([states] if isinstance(states, str) else states)}
    if partitions is not None:
        options["numPartitions"] = str(partitions)
    return _batch(spark, "jobs", columns, _options(queues, connection) | options)


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
    return _batch(spark, "events", columns, _options(queues, connection))


def counts(spark: SparkSession, queues: str | Sequence[str] = "*", **connection: Unpack[BrokerOptions]) -> DataFrame:
    """Return the number of jobs in each state of each queue: ``queue``, ``state``, ``jobs``.

    Args:
        spark: The session.
        queues: Queue names, or ``*`` for all.
        connection: The options of `BrokerOptions`.
    """
    return _batch(spark, "counts", None, _options(queues, connection))


def stream_events(
    spark: SparkSession,
    queues: str | Sequence[str] = "*",
    *,
    starting: Literal["earliest", "latest"] = "earliest",
    max_events_per_trigger: int | None = 200_000,
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
    fail, rows = _LOSS_OPTIONS[choice(*_LOSS_OPTIONS)(on_loss, "on_loss")]
    options = {
        "startingOffsets": starting,
        "maxEventsPerTrigger": str(max_events_per_trigger).lower(),  # the option's value for no limit is "none"
        "alignQueues": str(align).lower(),
        "failOnDataLoss": fail,
        "gapRows": rows,
    }
    reader: DataStreamReader = _registered(spark).readStream.format("bulltask")
    return reader.options(**_options(queues, connection), table="events", **options).load()


def _batch(spark: SparkSession, table: str, columns: Sequence[str] | None, options: dict[str, str]) -> DataFrame:
    reader: DataFrameReader = _registered(spark).read.format("bulltask").options(table=table, **options)
    return (reader if columns is None else reader.schema(_select(table, columns))).load()


def _registered(spark: SparkSession) -> SparkSession:
    register(spark)
    return spark


def _select(table: str, columns: Sequence[str]) -> StructType:
    fields = {field.name: field for field in TABLES[table].fields}
    for name in columns:
        if name not in fields:
            raise ConfigError(f"table {table} has no column {name!r}{did_you_mean(name, fields)}")
    return StructType([fields[name] for name in columns])


def _options(queues: str | Sequence[str], connection: BrokerOptions) -> dict[str, str]:
    known = BrokerOptions.__annotations__
    if unknown := sorted(set(connection) - set(known)):
        raise TypeError(f"unknown argument {unknown[0]!r}{did_you_mean(unknown[0], known)}")
    named = queues if isinstance(queues, str) else json.dumps(list(queues))
    return {**broker_options(connection), "queue": named}
