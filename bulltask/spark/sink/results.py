"""``gather``: the results of jobs as a DataFrame, with a row for each requested id."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypedDict, Unpack

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import LongType, StringType, StructField, StructType

from bulltask.clock import Duration, to_ms, wall_ms
from bulltask.config.config import Config
from bulltask.config.urls import SecretUrl
from bulltask.errors import ConfigError
from bulltask.jobs.codec import decode_text
from bulltask.spark.sink.enqueue import EnqueueReport, check_option_names, vectorized_udf
from bulltask.spark.source.broker_options import broker_options
from bulltask.spark.source.connection import Connection
from bulltask.spark.source.options import WriteOptions, read_options
from bulltask.transport.call import command
from bulltask.transport.keys import QueueKeys
from bulltask.transport.scripts.add import scan_fence
from bulltask.transport.scripts.job import job_fields

__all__ = ["RESULT_FIELDS", "GatherOptions", "JobLookup", "gather"]

RESULT_FIELDS: Final = StructType(
    [
        StructField("state", StringType()),
        StructField("return_value", StringType()),
        StructField("failed_reason", StringType()),
        StructField("finished_ms", LongType()),
    ]
)
_ARROW: Final = pa.struct(
    {"state": pa.string(), "return_value": pa.string(), "failed_reason": pa.string(), "finished_ms": pa.int64()}
)
_AT_ONCE: Final = 1_000
_FIELDS: Final = ("timestamp", "returnvalue", "failedReason", "finishedOn")
_UNFINISHED: Final = "unfinished"
_MISSING: Final[Mapping[str, object]] = {"state": "missing"}


class GatherOptions(TypedDict, total=False):
    """Further arguments of ``gather``.

    Attributes:
        poll: Seconds or ``timedelta`` between two checks of jobs that have not finished; 2 seconds if omitted.
        url, prefix, queue_hash_tag: Where Redis is, and how queues are named; bulltask's settings if omitted.
    """

    poll: Duration
    url: str | SecretUrl
    prefix: str
    queue_hash_tag: bool


def gather(
    ids: DataFrame | EnqueueReport, queue: str, *, wait: Duration | None = None, **more: Unpack[GatherOptions]
) -> DataFrame:
    """Return the results of jobs: ``id``, ``state``, ``return_value``, ``failed_reason``, ``finished_at``.

    There is a row for every id. ``state`` is ``completed``, ``failed``, ``unfinished``, or ``missing`` if Redis does
    not have the job (any more). ``return_value`` is JSON. As everything in Spark, results are looked up when the rows
    are needed, and again each time; ``cache()`` or write what you want to keep.

    Args:
        ids: Rows with a column ``id``; or the report of ``enqueue``, whose jobs are known as long as its fence is kept.
        queue: The queue, named as everywhere in bulltask.
        wait: How long from now to wait for jobs that have not finished, in seconds or as ``timedelta``, by the clocks
            of the executors; not at all if omitted.
        more: See :class:`GatherOptions`.

    Raises:
        TypeError: An option is unknown.
        ConfigError: An option is invalid, there is no column ``id`` of strings, or Redis knows no job of the report.
    """
    check_option_names(more, GatherOptions)
    options = _options(queue, more)
    until_ms = None if wait is None else wall_ms() + to_ms(wait, "wait")
    lookup = JobLookup(options.config, options.keys(queue), until_ms, max(1, to_ms(more.get("poll", 2.0), "poll")))
    rows = _rows_of(ids, lookup) if isinstance(ids, EnqueueReport) else ids
    if not isinstance(rows.schema["id"].dataType if "id" in rows.columns else None, StringType):
        raise ConfigError(f"gather needs a column 'id' of strings; the rows have {rows.schema.simpleString()}")
    found = rows.select("id", vectorized_udf(lookup.look_up, RESULT_FIELDS)(F.col("id")).alias("found"))
    return found.select(
        "id",
        "found.state",
        "found.return_value",
        "found.failed_reason",
        F.timestamp_millis("found.finished_ms").alias("finished_at"),
    )


@dataclass(frozen=True, slots=True)
class JobLookup:
    """Looks up jobs and waits for them; travels to the executors.

    Attributes:
        config: Where Redis is.
        keys: Of the queue.
        until_ms: Until when to wait for jobs that have not finished, by this machine's clock; ``None``: not at all.
        poll_ms: Time between two checks.
    """

    config: Config = field(repr=False)  # its URL may have a password
    keys: QueueKeys
    until_ms: float | None
    poll_ms: int

    def look_up(self, arrays: Iterator[pa.Array]) -> Iterator[pa.Array]:
        """Yield the results of the jobs with these ids, an array for each array."""
        with Connection(self.config) as connection:
            for ids in arrays:
                yield self._at(connection, ids.to_pylist())

    def _at(self, connection: Connection, ids: Sequence[str | None]) -> pa.Array:
        """Return a row for each of ``ids``, in order; a null id is a missing job."""
        found: dict[str | None, Mapping[str, object]] = {None: _MISSING}
        left = [one for one in dict.fromkeys(ids) if one is not None]
        while left:
            for start in range(0, len(left), _AT_ONCE):
                found.update(self._ask(connection, left[start : start + _AT_ONCE]))
            left = [one for one in left if found[one]["state"] == _UNFINISHED]
            left_ms = 0 if self.until_ms is None else self.until_ms - wall_ms()
            if left_ms <= 0:
                break
            if left:
                threading.Event().wait(min(left_ms, self.poll_ms) / 1000)
        return pa.array([found[one] for one in ids], _ARROW)

    def _ask(self, connection: Connection, ids: Sequence[str]) -> Iterator[tuple[str, Mapping[str, object]]]:
        keys = self.keys
        # The sets first: a job in the set of finished ones has its result in its hash, but not the other way round.
        done, failed, *raws = connection.run_many(
            [
                command("ZMSCORE", keys.completed, *ids),
                command("ZMSCORE", keys.failed, *ids),
                *(job_fields(keys, one, _FIELDS) for one in ids),
            ]
        )
        for one, is_done, is_failed, raw in zip(ids, done, failed, raws, strict=True):
            yield one, _read(is_done is not None, is_failed is not None, raw)


def _read(done: bool, failed: bool, raw: Sequence[bytes | None]) -> Mapping[str, object]:
    made, returned, reason, finished = raw
    if made is None:
        return _MISSING
    if done:
        value = None if returned is None else decode_text(returned)
        return {"state": "completed", "return_value": value, "finished_ms": _number(finished)}
    if failed:
        value = None if reason is None else decode_text(reason)
        return {"state": "failed", "failed_reason": value, "finished_ms": _number(finished)}
    return {"state": _UNFINISHED}


def _number(raw: bytes | None) -> int | None:
    try:
        return None if raw is None else int(float(raw))
    except (ValueError, OverflowError):
        return None


def _options(queue: str, more: GatherOptions) -> WriteOptions:
    return read_options(WriteOptions, {**broker_options(more), "queue": queue})


def _rows_of(report: EnqueueReport, lookup: JobLookup) -> DataFrame:
    """Return the ids that the write's fence holds."""
    queue = lookup.keys.queue
    if report.queue != queue:
        raise ConfigError(f"the write {report.write_id} went to queue {report.queue}, not to {queue}")
    cursor, ids = "0", dict[str, None]()
    with Connection(lookup.config) as connection:
        while True:
            cursor, some = connection.run(scan_fence(lookup.keys, report.write_id, cursor))
            ids |= dict.fromkeys(some)
            if cursor == "0":
                break
    if report.rows and not ids:
        raise ConfigError(
            f"Redis knows no job of the write {report.write_id} in queue {queue}: its fence has expired, or it used "
            "another server; pass the ids instead"
        )
    spark = SparkSession.active()
    return spark.createDataFrame(pa.table({"id": pa.array(ids, pa.string())}))
