"""Send finished jobs again, selected by a condition on ``silver.jobs``: each once, even if the command runs twice."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, Final

import pyarrow as pa
from pyspark.errors import AnalysisException, ParseException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StringType, StructType

from bulltask.config.config import Config
from bulltask.jobs import codec
from bulltask.jobs.errors import ConfigError
from bulltask.jobs.job import BULLTASK_KEY, JobOptions, NewJob
from bulltask.lake.storage import Lake
from bulltask.lake.tables import FINISHED, JOBS, SNAPSHOTS
from bulltask.spark.lake_tables import check_shared, first_of_each, latest, read_table
from bulltask.spark.sink import vectorized_udf
from bulltask.spark.source.columns import JOBS as JOBS_READ
from bulltask.spark.source.columns import arrow_schema, hash_fields, job_record_batch
from bulltask.spark.source.connection import Connection, broker_of
from bulltask.spark.source.options import WriteOptions, read_options
from bulltask.transport.scripts.add import IdempotentWrite
from bulltask.transport.scripts.job import job_fields

_TOLERANCE: Final = "interval 1 minute"
"""How far the times in a job's hash, by its workers' clocks, may differ from the times of its events."""

_IDEMPOTENCY_TTL_MS: Final = 7 * 86_400_000

_FIELDS: Final = ("name", "data", "opts", "created_at", "finished_at")
_HASH: Final = StructType([JOBS_READ[name] for name in _FIELDS])
_JOBS_PER_ROUND_TRIP: Final = 500

_SINGLE_JOB_OPTIONS: Final = frozenset(
    {
        "jobId", "delay", "timestamp",  # the new job has a new id and is due immediately
        "parent", "fpof", "cpof", "idof", "rdof",  # its parent no longer waits for it
        "repeat", "repeatJobKey", "prevMillis",  # the schedule continues independently
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ReplaySelection:
    """The selection of finished jobs to send again."""

    where: str
    queue: str | None = None
    limit: int | None = None

    @property
    def write_id(self) -> str:
        """The write id, derived from the condition without redundant spaces, so that it is the same in the next run."""
        identity = "\0".join([" ".join(self.where.split()), self.queue or ""])
        return f"replay-{hashlib.sha256(identity.encode()).hexdigest()[:24]}"


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """The result of a replay or of a dry run.

    Attributes:
        where: The condition.
        write_id: The id of the write; the same condition for the same queue always has the same id.
        selected: The number of selected finished jobs.
        open_again: The number of selected jobs that were retried and are not finished. They are skipped.
        unknown: The number of selected jobs whose data is neither in Redis nor in a snapshot. They are skipped.
        unknown_ids: Some of these jobs, as ``queue/id``.
        sample: Some of the jobs that can be sent: ``queue``, ``job_id``, ``name``, ``state``, ``finished_at``,
            ``failed_reason``, ``data``.
        dry_run: Whether nothing was sent.
        added: The number of jobs that were sent.
        duplicates: The number of jobs that an earlier replay had already sent.
    """

    where: str
    write_id: str
    selected: int
    open_again: int
    unknown: int
    unknown_ids: Sequence[str]
    sample: Sequence[Mapping[str, Any]] = field(repr=False)
    dry_run: bool
    added: int = 0
    duplicates: int = 0

    @property
    def ready(self) -> int:
        """The number of jobs that can be sent."""
        return self.selected - self.open_again - self.unknown


def replay(
    spark: SparkSession, lake: Lake, source: Mapping[str, str], selection: ReplaySelection, *, dry_run: bool = True
) -> ReplayResult:
    """Send the selected finished jobs of the lake's broker again, with the same name, data and options, but a new id.

    The new id is derived from the job and the time when it finished. A job is therefore not sent again while its copy
    is in Redis, nor for 7 days after a replay with the same condition has sent it. Options that belong only to the
    original job are dropped: its delay, its parent, its schedule, and when it expires.

    Raises:
        ConfigError: The condition is invalid.
        LakeError: There is no lake.
    """
    lake.check()
    options = read_options(WriteOptions, {key: text for key, text in source.items() if key not in {"queue", "broker"}})
    in_redis = F.substr("queue", F.lit(len(lake.queue_prefix) + 1)).alias("queue")
    jobs = _with_data(_selected(spark, lake, selection), spark, lake, options, in_redis).cache()
    try:
        with check_shared(lake):
            counts = {row["status"]: row["count"] for row in jobs.groupBy("status").count().collect()}
        unknown = jobs.where("status = 'unknown'").orderBy("queue", "job_id").limit(20).collect()
        sample = jobs.where("status = 'ready'").orderBy("queue", "job_id").limit(5).collect()
        sent: Mapping[str, int] = {}
        if not dry_run and counts.get("ready"):
            write = IdempotentWrite(selection.write_id, _IDEMPOTENCY_TTL_MS)
            send = vectorized_udf(partial(_send, options.config, write), StringType())
            status = send(F.struct(in_redis, "new_id", "name", "data", "opts")).alias("status")
            rows = jobs.where("status = 'ready'").select(status).groupBy("status").count().collect()
            sent = {row["status"]: row["count"] for row in rows}
    finally:
        jobs.unpersist()
    columns = ("queue", "job_id", "name", "state", "finished_at", "failed_reason", "data")
    return ReplayResult(
        where=selection.where,
        write_id=selection.write_id,
        selected=sum(counts.values()),
        open_again=counts.get("open", 0),
        unknown=counts.get("unknown", 0),
        unknown_ids=[f"{row['queue']}/{row['job_id']}" for row in unknown],
        sample=[{name: row[name] for name in columns} for row in sample],
        dry_run=dry_run,
        added=sent.get("added", 0),
        duplicates=sum(sent.values()) - sent.get("added", 0),
    )


def _selected(spark: SparkSession, lake: Lake, selection: ReplaySelection) -> DataFrame:
    """Return the selected jobs, with the ids of their replays."""
    rows = latest(read_table(spark, lake, JOBS), JOBS).where(F.col("state").isin(*FINISHED))
    prefix = lake.queue_prefix
    rows = rows.where(F.col("queue").startswith(prefix) if prefix else ~F.col("queue").contains(":"))
    if selection.queue is not None:
        rows = rows.where(F.col("queue") == prefix + selection.queue)
    try:
        rows = rows.where(selection.where)
        assert rows.schema  # forces Spark to check the condition now
    except (AnalysisException, ParseException) as exc:
        first = str(exc).strip().splitlines()[0]
        raise ConfigError(f"the condition {selection.where!r} is invalid for silver.jobs: {first}") from exc
    if selection.limit is not None:
        rows = rows.orderBy("queue", "job_id", "incarnation").limit(selection.limit)
    ended_us = F.unix_micros(F.coalesce("finished_at", "as_of")).cast("string")
    identity = F.concat_ws("\0", "queue", "job_id", F.coalesce("incarnation", F.lit("")), ended_us)
    return rows.withColumn("new_id", F.concat(F.lit("s"), F.substring(F.sha2(identity, 256), 1, 24)))


def _with_data(rows: DataFrame, spark: SparkSession, lake: Lake, options: WriteOptions, in_redis: Column) -> DataFrame:
    """Add the data of each job, from Redis, where its queue has the name ``in_redis``, or from the latest snapshot."""
    look_up = vectorized_udf(partial(_look_up, options), _HASH)
    with_hash = rows.withColumn("hash", look_up(F.struct(in_redis, "job_id")))
    with_redis = with_hash.withColumn("in_redis", _is_same_incarnation("hash"))
    snapshots = read_table(spark, lake, SNAPSHOTS).selectExpr(
        "queue", "id AS job_id", "snapshot_at",
        "struct(name, data, opts, created_at, finished_at) AS kept",
    )  # fmt: skip
    joined = with_redis.join(snapshots, ["queue", "job_id"], "left").withColumn(
        "in_snapshot", _is_same_incarnation("kept")
    )
    best = first_of_each(joined, ("queue", "job_id", "incarnation"), F.desc("in_snapshot"), F.desc("snapshot_at"))
    known = F.when(F.col("in_redis"), F.col("hash")).when(F.col("in_snapshot"), F.col("kept"))
    is_open = F.col("in_redis") & F.col("hash.finished_at").isNull()
    status = F.when(is_open, "open").when(known["data"].isNotNull(), "ready").otherwise("unknown")
    return best.select(
        *(column for column in rows.columns if column != "name"),
        F.coalesce(known["name"], F.col("name")).alias("name"),
        known["data"].alias("data"),
        known["opts"].alias("opts"),
        status.alias("status"),
    )


def _is_same_incarnation(found: str) -> Column:
    """Return whether the data ``found`` belongs to the same incarnation of the job: one of the times is the same."""
    same = (
        f"coalesce({found}.{time} between {time} - {_TOLERANCE} and {time} + {_TOLERANCE}, false)"
        for time in ("created_at", "finished_at")
    )
    return F.expr(" or ".join(same))


def _look_up(options: WriteOptions, arrays: Iterator[pa.StructArray]) -> Iterator[pa.Array]:
    """Yield the hash of each job, given by ``queue`` and ``job_id``; its fields are null if it does not exist."""
    names = hash_fields(_FIELDS)
    with Connection(options.config) as connection:
        for jobs in arrays:
            rows = jobs.to_pylist()
            calls = [job_fields(options.keys(row["queue"]), row["job_id"], names) for row in rows]
            replies: list[Any] = []
            for start in range(0, len(calls), _JOBS_PER_ROUND_TRIP):
                replies += connection.run_many(calls[start : start + _JOBS_PER_ROUND_TRIP])
            ids = [row["job_id"] for row in rows]
            yield job_record_batch(arrow_schema(_HASH), {}, ids, replies, with_missing=True).to_struct_array()


def _send(config: Config, write: IdempotentWrite, arrays: Iterator[pa.StructArray]) -> Iterator[pa.Array]:
    """Send jobs (``queue``, ``new_id``, ``name``, ``data``, ``opts``), and yield the status of each.

    It is ``added`` or ``duplicate``. Jobs that were sent before an error are not removed; running the replay again adds
    the missing ones.
    """
    with closing(broker_of(config)) as broker:
        for array in arrays:
            jobs = map(_job, array.to_pylist())
            statuses: list[str] = []
            while part := list(islice(jobs, _JOBS_PER_ROUND_TRIP)):
                statuses += [result.status for result in broker.producer.send_once(part, write)]
            yield pa.array(statuses, pa.string())


def _job(row: Mapping[str, Any]) -> NewJob:
    return NewJob(
        row["queue"], row["new_id"], row["name"], row["data"].encode(), replay_options(row["opts"]), has_custom_id=True
    )


class StoredOptions(JobOptions):
    """Options that are stored unchanged: any client may have written them, so they may lack bulltask's defaults."""

    def to_wire(self, now_ms: int) -> dict[str, object]:  # noqa: ARG002 - nothing depends on the time
        """Return the options."""
        return dict(self.more)


def replay_options(opts: str | None) -> StoredOptions:
    """Return the options for sending a job again; stored options that are no JSON object raise ``DecodeError``."""
    stored = codec.decode_object((opts or "{}").encode(), what=f"the stored options {opts!r:.200}")
    kept = {name: value for name, value in stored.items() if name not in _SINGLE_JOB_OPTIONS}
    if isinstance(own := kept.get(BULLTASK_KEY), Mapping):
        # The time by which the job had to start has passed.
        kept[BULLTASK_KEY] = {name: value for name, value in own.items() if name != "expires"}
    priority = kept.get("priority")
    return StoredOptions(priority=priority if isinstance(priority, int) else 0, more=kept)
