"""``enqueue_stream``: add a job for each distinct row in each batch of a streaming DataFrame."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Unpack

from pyspark.sql import Column, DataFrame
from pyspark.sql.streaming.query import StreamingQuery

from bulltask.jobs.clock import Duration, to_ms
from bulltask.jobs.errors import ConfigError
from bulltask.spark.connector.session import register
from bulltask.spark.sink.enqueue import WriteArguments, check_option_names, standard_rows, write_options
from bulltask.spark.sink.writer import JobsStreamWriter
from bulltask.spark.source.options import WriteOptions, read_options

__all__ = ["EnqueueStreamOptions", "enqueue_stream"]


class EnqueueStreamOptions(WriteArguments, total=False):
    """Further arguments of ``enqueue_stream``, in addition to :class:`bulltask.spark.sink.enqueue.WriteArguments`.

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
    rows = standard_rows(df, name, data, job_id)
    writer_options = write_options(queue, options) | {"jobOpts": _encode_opts(options.get("opts", {}))}
    JobsStreamWriter(read_options(WriteOptions, writer_options), rows.schema, overwrite=False)  # report errors now
    register(df.sparkSession)
    writer = rows.writeStream.format("bulltask").outputMode("append").options(**writer_options)
    writer = writer.option("checkpointLocation", checkpoint)
    if options.get("available_now", False):
        return writer.trigger(availableNow=True).start()
    return writer.trigger(processingTime=_interval(options.get("trigger", "5 seconds"))).start()


def _interval(trigger: Duration | str) -> str:
    return trigger if isinstance(trigger, str) else f"{to_ms(trigger, 'trigger')} milliseconds"


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
