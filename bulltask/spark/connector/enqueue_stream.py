"""``enqueue_stream``: the rows of a streaming DataFrame as jobs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Unpack

from pyspark.sql import Column, DataFrame
from pyspark.sql.streaming.query import StreamingQuery

from bulltask.clock import Duration, to_ms
from bulltask.errors import ConfigError
from bulltask.spark.connector.session import register
from bulltask.spark.sink.enqueue import WriteArguments, check_option_names, standard_rows, write_options
from bulltask.spark.sink.writer import JobsStreamWriter
from bulltask.spark.source.options import WriteOptions, read_options

__all__ = ["EnqueueStreamOptions", "enqueue_stream"]


class EnqueueStreamOptions(WriteArguments, total=False):
    """What else ``enqueue_stream`` may be told, beside :class:`bulltask.spark.sink.enqueue.WriteArguments`.

    ``write_id`` takes the place of the query's id in the ids of jobs: give one, and a new checkpoint of the same source
    adds nothing that was added before. Times in ``opts`` are lengths, no moments.

    Attributes:
        trigger: how often a batch is made: seconds, ``timedelta``, or Spark's words (``"5 seconds"``, which it is if
            left out).
        available_now: send what is there now, in batches, and end.
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
    **more: Unpack[EnqueueStreamOptions],
) -> StreamingQuery:
    """Add a job to a queue for each row of a streaming DataFrame, and start to do so.

    Each batch is a write of its own, whose id comes from the query and the batch: a batch that Spark runs again after
    a crash adds what is missing, and the same row in a later batch is another job. Rows of one batch whose name and
    data are equal are one job.

    Args:
        df: the rows, of ``spark.readStream``.
        queue: the queue, spelled as everywhere in bulltask.
        name: the name of all jobs, which for a bulltask worker is the task's; or a column with names.
        data: a column with the jobs' data: texts of JSON, or anything that ``to_json`` takes; or names of columns,
            which become an object.
        checkpoint: where Spark keeps how far it is; with the same place the query goes on where it was.
        job_id: a column with the ids, texts; BullMQ takes none that is a number or has a ``:``.
        more: see :class:`EnqueueStreamOptions`.

    Returns:
        The query, running. ``query.stop()`` ends it.

    Raises:
        TypeError: there is no such option.
        ConfigError: an option or a column is wrong, or ``df`` is no stream.
    """
    check_option_names(more, EnqueueStreamOptions)
    if not df.isStreaming:
        raise ConfigError("enqueue_stream needs a stream (spark.readStream); enqueue sends the rows of a table")
    rows = standard_rows(df, name, data, job_id)
    options = write_options(queue, more) | {"jobOpts": _plain(more.get("opts", {}))}
    JobsStreamWriter(read_options(WriteOptions, options), rows.schema, overwrite=False)  # to be told now what is wrong
    register(df.sparkSession)
    writer = rows.writeStream.format("bulltask").outputMode("append").options(**options)
    writer = writer.option("checkpointLocation", checkpoint)
    if more.get("available_now", False):
        return writer.trigger(availableNow=True).start()
    return writer.trigger(processingTime=_interval(more.get("trigger", "5 seconds"))).start()


def _interval(trigger: Duration | str) -> str:
    return trigger if isinstance(trigger, str) else f"{to_ms(trigger, 'trigger')} milliseconds"


def _plain(opts: Mapping[str, Any]) -> str:
    """Options of jobs as JSON: Spark builds the writer anew for each batch, from texts."""

    def plain(value: object) -> object:
        if isinstance(value, timedelta):
            return value.total_seconds()
        raise ConfigError(
            f"opts of a stream are numbers, texts, lengths of time and mappings of these, not {value!r}: they are the "
            "same for every batch, whenever it comes"
        )

    return json.dumps(dict(opts), default=plain)
