"""``gather``: the results of jobs as a DataFrame, with a row for each requested id."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Unpack

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StringType, StructField, StructType

from bulltask.config.config import Config
from bulltask.jobs.clock import Duration, to_ms, wall_ms
from bulltask.jobs.codec import decode_text
from bulltask.jobs.errors import ConfigError
from bulltask.spark.sink import EnqueueResult, check_option_names, vectorized_udf
from bulltask.spark.source.columns import arrow_schema
from bulltask.spark.source.connection import Connection
from bulltask.spark.source.options import BrokerOptions, WriteOptions, broker_options, read_options
from bulltask.transport.call import QueueKeys, command
from bulltask.transport.scripts.add import scan_added_ids
from bulltask.transport.scripts.job import job_fields

RESULT_FIELDS: Final = StructType(
    [StructField(name, StringType()) for name in ("state", "return_value", "failed_reason")]
).add("finished_ms", "long")
_ARROW: Final = pa.struct(list(arrow_schema(RESULT_FIELDS)))
_IDS_PER_ROUND_TRIP: Final = 1_000
_FIELDS: Final = ("timestamp", "returnvalue", "failedReason")
_UNFINISHED: Final = "unfinished"
_MISSING: Final[Mapping[str, object]] = {"state": "missing"}


class GatherOptions(BrokerOptions, total=False):
    """Further arguments of ``gather``, in addition to :class:`bulltask.spark.source.options.BrokerOptions`.

    Attributes:
        poll: The time between two checks of unfinished jobs (seconds or ``timedelta``); default: 2 seconds.
    """

    poll: Duration


def gather(
    ids: DataFrame | EnqueueResult, queue: str, *, wait: Duration | None = 0, **options: Unpack[GatherOptions]
) -> DataFrame:
    """Return the results of jobs: ``id``, ``state``, ``return_value``, ``failed_reason``, ``finished_at``.

    There is a row for each id. ``state`` is ``completed``, ``failed``, ``unfinished``, or ``missing`` if the job is not
    in Redis. ``return_value`` is JSON. Results are looked up each time the rows are needed; use ``cache()`` or write
    the rows to keep them.

    Args:
        ids: Rows with a column ``id``, or the result of ``enqueue``, whose ids Redis keeps for its ``idempotency_ttl``.
        queue: The queue's name.
        wait: How long to wait for unfinished jobs, counted from this call (seconds or ``timedelta``), by the executors'
            clocks; ``0`` (default) does not wait, ``None`` waits without limit. Unfinished jobs are not an error.
        options: The options of :class:`GatherOptions`.

    Raises:
        TypeError: An option is unknown.
        ConfigError: An option is invalid, there is no string column ``id``, or Redis has no job from the write.
    """
    check_option_names(options, GatherOptions)
    source = read_options(WriteOptions, broker_options(options, queue))
    poll_ms = max(1, to_ms(options.get("poll", 2.0), "poll"))
    lookup = JobLookup(source.config, source.keys(queue), lookup_deadline_ms(wait), poll_ms)
    rows = _ids_of_write(ids, lookup) if isinstance(ids, EnqueueResult) else ids
    if not isinstance(rows.schema["id"].dataType if "id" in rows.columns else None, StringType):
        raise ConfigError(f"gather needs a column 'id' of strings; the rows have {rows.schema.simpleString()}")
    results = rows.select("id", vectorized_udf(lookup.look_up, RESULT_FIELDS)(F.col("id")).alias("found"))
    return results.select(
        "id",
        "found.state",
        "found.return_value",
        "found.failed_reason",
        F.timestamp_millis("found.finished_ms").alias("finished_at"),
    )


def lookup_deadline_ms(wait: Duration | None) -> float:
    """Return `JobLookup.deadline_ms` for the argument ``wait`` of ``gather`` or ``map_dataframe``."""
    if wait is None:
        return math.inf
    wait_ms = to_ms(wait, "wait")
    return wall_ms() + wait_ms if wait_ms else 0


@dataclass(frozen=True, slots=True)
class JobLookup:
    """Looks up the jobs of a queue and waits for them, on the executors.

    ``deadline_ms`` is when to stop waiting for unfinished jobs, by this machine's clock; 0 does not wait.
    """

    config: Config = field(repr=False)  # its URL may have a password
    keys: QueueKeys
    deadline_ms: float
    poll_ms: int

    def look_up(self, arrays: Iterator[pa.Array]) -> Iterator[pa.Array]:
        """Yield the results of the jobs with these ids: one array of results for each array of ids."""
        with Connection(self.config) as connection:
            for ids in arrays:
                yield self._look_up_page(connection, ids.to_pylist())

    def _look_up_page(self, connection: Connection, ids: Sequence[str | None]) -> pa.Array:
        """Return a row for each of ``ids``, in order; a null id is a missing job."""
        results: dict[str | None, Mapping[str, object]] = {None: _MISSING}
        unfinished = [job_id for job_id in dict.fromkeys(ids) if job_id is not None]
        while unfinished:
            for start in range(0, len(unfinished), _IDS_PER_ROUND_TRIP):
                results.update(self._query(connection, unfinished[start : start + _IDS_PER_ROUND_TRIP]))
            unfinished = [job_id for job_id in unfinished if results[job_id]["state"] == _UNFINISHED]
            left_ms = self.deadline_ms - wall_ms()
            if left_ms <= 0:
                break
            if unfinished:
                threading.Event().wait(min(left_ms, self.poll_ms) / 1000)
        return pa.array([results[job_id] for job_id in ids], _ARROW)

    def _query(self, connection: Connection, ids: Sequence[str]) -> Iterator[tuple[str, Mapping[str, object]]]:
        keys = self.keys
        # Read the sets first: if a job is in a set of finished jobs, its hash has the result, but not the other way
        # around. The score is the time at which the job finished.
        completed, failed, *hashes = connection.run_many(
            [
                command("ZMSCORE", keys.completed, *ids),
                command("ZMSCORE", keys.failed, *ids),
                *(job_fields(keys, job_id, _FIELDS) for job_id in ids),
            ]
        )
        return zip(ids, map(_parse_result, completed, failed, hashes), strict=True)


def _parse_result(completed: Any, failed: Any, raw: Sequence[bytes | None]) -> Mapping[str, object]:
    created, result, reason = (None if value is None else decode_text(value) for value in raw)
    if created is None:
        return _MISSING
    if completed is not None:
        return {"state": "completed", "return_value": result, "finished_ms": int(float(completed))}
    if failed is not None:
        return {"state": "failed", "failed_reason": reason, "finished_ms": int(float(failed))}
    return {"state": _UNFINISHED}


def _ids_of_write(write: EnqueueResult, lookup: JobLookup) -> DataFrame:
    """Return the ids of the jobs that the write added."""
    queue = lookup.keys.queue
    if write.queue != queue:
        raise ConfigError(f"the write {write.write_id} added its jobs to queue {write.queue}, not to {queue}")
    cursor, ids = "0", dict[str, None]()
    with Connection(lookup.config) as connection:
        while True:
            cursor, page = connection.run(scan_added_ids(lookup.keys, write.write_id, cursor))
            ids |= dict.fromkeys(page)
            if cursor == "0":
                break
    if write.rows > write.rejected and not ids:
        raise ConfigError(
            f"Redis has no job from the write {write.write_id} in queue {queue}: its ids have expired, or another "
            "server was used; pass a DataFrame with the job ids instead"
        )
    spark = SparkSession.active()
    return spark.createDataFrame(pa.table({"id": pa.array(ids, pa.string())}))
