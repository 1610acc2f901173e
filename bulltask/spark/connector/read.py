"""Jobs and events as DataFrames: ``format("bulltask")`` with arguments instead of string options."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final, Literal, Unpack

from pyspark.sql import DataFrame, DataFrameReader, SparkSession
from pyspark.sql.streaming.readwriter import DataStreamReader
from pyspark.sql.types import StructType

from bulltask.config.parsers import choice
from bulltask.errors import ConfigError, did_you_mean
from bulltask.spark.connector.session import register
from bulltask.spark.source.broker_options import BrokerOptions, broker_options
from bulltask.spark.source.schemas import TABLES

__all__ = ["counts", "events", "jobs", "stream_events"]

_LOSS: Final = {"fail": ("true", "false"), "gap": ("false", "true")}


def jobs(
    spark: SparkSession,
    queues: str | Sequence[str] = "*",
    states: str | Sequence[str] = ("completed", "failed"),
    *,
    columns: Sequence[str] | None = None,
    partitions: int | None = None,
    **where: Unpack[BrokerOptions],
) -> DataFrame:
    """Return the jobs of some queues, as Redis has them when the rows are needed.

    Args:
        spark: The session.
        queues: Names, or ``*`` for all.
        states: BullMQ's names: ``wait``, ``active``, ``delayed``, ``prioritized``, ``waiting-children``, ``completed``,
            ``failed``, ``paused``; ``waiting`` is ``wait`` and ``paused``.
        columns: Those to read; fewer are faster, and Spark does not tell a Python source which ones a query needs.
        partitions: Maximum number of tasks; 2 for each core by default.
        where: See `BrokerOptions`.

    Returns:
        The table ``jobs`` of ``format("bulltask")``, a row for each job.

    Raises:
        ConfigError: There is no such column. Other invalid arguments are reported when the rows are needed.
    """
    more = {"state": ",".join([states] if isinstance(states, str) else states)}
    if partitions is not None:
        more["numPartitions"] = str(partitions)
    return _batch(spark, "jobs", columns, _options(queues, where) | more)


def events(
    spark: SparkSession,
    queues: str | Sequence[str] = "*",
    *,
    columns: Sequence[str] | None = None,
    **where: Unpack[BrokerOptions],
) -> DataFrame:
    """Return the events that the queues' streams hold: the newest 10,000 of a queue, unless it keeps more.

    Args:
        spark: The session.
        queues: Names, or ``*`` for all.
        columns: Those to read.
        where: See `BrokerOptions`.

    Returns:
        The table ``events`` of ``format("bulltask")``, a row for each event.

    Raises:
        ConfigError: There is no such column.
    """
    return _batch(spark, "events", columns, _options(queues, where))


def counts(spark: SparkSession, queues: str | Sequence[str] = "*", **where: Unpack[BrokerOptions]) -> DataFrame:
    """Return how many jobs each queue has in each state: ``queue``, ``state``, ``jobs``.

    Args:
        spark: The session.
        queues: Names, or ``*`` for all.
        where: See `BrokerOptions`.
    """
    return _batch(spark, "counts", None, _options(queues, where))


def stream_events(
    spark: SparkSession,
    queues: str | Sequence[str] = "*",
    *,
    starting: Literal["earliest", "latest"] = "earliest",
    max_events_per_trigger: int | None = 200_000,
    align: bool = True,
    on_loss: Literal["fail", "gap"] = "fail",
    **where: Unpack[BrokerOptions],
) -> DataFrame:
    """Return the events of some queues as a stream, each exactly once per checkpoint.

    Args:
        spark: The session.
        queues: Names, or ``*`` for all, including those that appear later.
        starting: Where a new checkpoint begins.
        max_events_per_trigger: For all queues together; ``None``: no limit.
        align: Read no queue beyond the time of the slowest that has more, so that watermarks drop nothing.
        on_loss: If events were trimmed before they were read, ``fail`` ends the query, and ``gap`` emits a row
            ``bulltask.gap``.
        where: See `BrokerOptions`.

    Returns:
        The streaming DataFrame.

    Raises:
        ConfigError: ``on_loss`` is invalid.
    """
    fail, rows = _LOSS[choice(*_LOSS)(on_loss, "on_loss")]
    more = {
        "startingOffsets": starting,
        "maxEventsPerTrigger": str(max_events_per_trigger).lower(),  # the option's value for no limit is "none"
        "alignQueues": str(align).lower(),
        "failOnDataLoss": fail,
        "gapRows": rows,
    }
    reader: DataStreamReader = _ready(spark).readStream.format("bulltask")
    return reader.options(**_options(queues, where), table="events", **more).load()


def _batch(spark: SparkSession, table: str, columns: Sequence[str] | None, options: dict[str, str]) -> DataFrame:
    reader: DataFrameReader = _ready(spark).read.format("bulltask").options(table=table, **options)
    return (reader if columns is None else reader.schema(_some(table, columns))).load()


def _ready(spark: SparkSession) -> SparkSession:
    register(spark)
    return spark


def _some(table: str, columns: Sequence[str]) -> StructType:
    every = {field.name: field for field in TABLES[table].fields}
    for name in columns:
        if name not in every:
            raise ConfigError(f"{table} have no column {name!r}{did_you_mean(name, every)}")
    return StructType([every[name] for name in columns])


def _options(queues: str | Sequence[str], where: BrokerOptions) -> dict[str, str]:
    known = BrokerOptions.__annotations__
    if unknown := sorted(set(where) - set(known)):
        raise TypeError(f"a read has no argument {unknown[0]!r}{did_you_mean(unknown[0], known)}")
    named = queues if isinstance(queues, str) else json.dumps(list(queues))
    return {**broker_options(where), "queue": named}
