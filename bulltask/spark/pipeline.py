"""The data pipeline: a streaming query that writes the events of many queues into a lake of tables."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import date, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from typing import Final, Literal, Unpack, get_args

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

from bulltask.config.parsers import choice
from bulltask.jobs.clock import Duration, mono_ms, to_ms
from bulltask.jobs.errors import ConfigError, did_you_mean
from bulltask.lake.ledger import last_record
from bulltask.lake.slo_config import SLOConfig
from bulltask.lake.status import PipelineStatus
from bulltask.lake.storage import Lake, RunLock
from bulltask.lake.tables import BACKFILLS, FINISHED, GAPS, TABLES
from bulltask.spark.batches import BatchWriter, complete, query_of
from bulltask.spark.bronze import events_source
from bulltask.spark.gold import build_gold
from bulltask.spark.lake_tables import read_table
from bulltask.spark.repair import BackfillResult, backfill, build_silver, snapshot
from bulltask.spark.replay import ReplayResult, ReplaySelection, replay
from bulltask.spark.sink import check_option_names
from bulltask.spark.source.options import MAX_EVENTS_PER_TRIGGER, BrokerOptions, broker_options
from bulltask.spark.source.streams import pipeline_status

OnLoss = Literal["gap", "fail"]

_POLL_S: Final = 0.5

_REGISTERING: Final = threading.Lock()

_QUERY_CONF: Final[Mapping[str, str]] = {
    # The default starts 20 processes for each batch (`readlink`, `chmod`); this one also renames finished files.
    "spark.sql.streaming.checkpointFileManagerClass": "org.apache.spark.sql.execution.streaming.checkpointing."
    "FileSystemBasedCheckpointFileManager",
    # Spark has few rows to process: the events themselves are in files, which Python writes.
    "spark.sql.codegen.wholeStage": "false",
}
"""Settings of the query, unless the session has others. They save a quarter of the driver's CPU time."""

_RUNNING_QUERIES: Final[dict[tuple[str, str], tuple[StreamingQuery, RunLock]]] = {}
"""This process's last query for each lake and broker, and the query's lock."""


class PipelineOptions(BrokerOptions, total=False):
    """Further arguments of `Pipeline`.

    Attributes:
        broker: The name of the broker, such as ``eu``, in a lake of several: its queue ``mail`` is ``eu:mail`` in the
            tables. Each broker has its own pipeline, and they can run at the same time; default: no name.
        url, prefix, queue_hash_tag: The location of Redis, and how queues are named; default: bulltask's settings, or
            those of the broker, such as ``BULLTASK_EU_BROKER_URL``.
        trigger: How often a batch starts, in Spark's syntax; default: ``10 seconds``.
        on_loss: What to do if events were trimmed before they were read: ``gap`` writes a row to ``bronze.gaps`` and
            continues, ``fail`` fails the query; default: ``gap``.
        open_job_timeout: The time without events after which an open job times out (or up to 3% later): it is written
            with its last state; default: 7 days.
        max_events_per_trigger: The maximum number of events in a batch, across all queues; default: 1,000,000.
        align: If a batch cannot include all events of a queue, read no other queue past the time at which that queue
            was cut off; default: on.
        starting: Where to begin with an empty lake: ``earliest`` (default) or ``latest``.
        metrics_port: Serve ``/metrics`` for Prometheus on this port while the query runs; default: off.
        metrics_host: The address to bind the metrics port to; default: ``127.0.0.1``.
        checkpoint: The directory for Spark's progress, or of the directories of the brokers that have a name; default:
            ``_pipeline/checkpoint`` in the lake's directory; for a lake in an object store, a directory in
            ``~/.local/state/bulltask``. If it is lost, the next run continues after the lake's last event.
        storage_options: Credentials and endpoint of an object store, by delta-rs' names, such as
            ``AWS_ENDPOINT_URL``; default: those of the environment.
    """

    broker: str
    trigger: str
    on_loss: OnLoss
    open_job_timeout: Duration
    max_events_per_trigger: int
    align: bool
    starting: Literal["earliest", "latest"]
    metrics_port: int | None
    metrics_host: str
    checkpoint: str | Path | None
    storage_options: Mapping[str, str]


class Pipeline:
    """The pipeline of a lake: the streaming query that writes to it, and commands on its tables.

    Args:
        spark: The session, ideally from `bulltask.spark.session`.
        root: The lake: a directory with the same path on the driver and all executors, or a URL (``s3://``,
            ``s3a://``, ``abfss://``, ``gs://``, ``file://``).
        queues: Queue names, or ``*`` for all queues under the prefix, including queues that are created later.
        options: The options of `PipelineOptions`.

    Raises:
        TypeError: An option is unknown.
        ConfigError: An option is invalid, or the URL is of an unsupported kind.
    """

    def __init__(
        self,
        spark: SparkSession,
        root: str | Path | Lake,
        *,
        queues: str | Sequence[str] = "*",
        **options: Unpack[PipelineOptions],
    ) -> None:
        check_option_names(options, PipelineOptions)
        self.spark = spark
        lake = root if isinstance(root, Lake) else Lake(root, options.get("storage_options"))
        self.lake = lake.of_broker(options["broker"]) if options.get("broker") else lake
        self._key = self.lake.root, self.lake.broker
        self.checkpoint = _checkpoint_of(self.lake, options.get("checkpoint"))
        self._queues = queues
        self._options = options
        self._open_job_timeout_ms = to_ms(options.get("open_job_timeout", timedelta(days=7)), "open_job_timeout")
        self._on_loss = choice(*get_args(OnLoss))(options.get("on_loss", "gap"), "on_loss")
        self._starting = choice("earliest", "latest")(options.get("starting", "earliest"), "starting")

    def run(self, *, available_now: bool = False) -> StreamingQuery:
        """Write the queues' events to the bronze and silver tables, each event exactly once.

        The query continues where the previous one left off, even after a crash.

        Args:
            available_now: Read the events that are available now and stop, instead of running until the query is
                stopped.

        Returns:
            The running query; ``awaitTermination()`` waits for it to end. ``query.stop()`` interrupts the batch,
            without losing events; :meth:`stop` waits for the batch.

        Raises:
            LakeInUseError: Another pipeline is writing this broker's events to the lake. In an object store, the query
                fails with this error when another one starts.
            ConfigError: An option is invalid, or the metrics cannot be served at this address.
        """
        _release_ended(self._key)
        with ExitStack() as stack:
            lock = stack.enter_context(RunLock(self.lake))
            complete(lock.lake)
            self.lake.delete_unnamed(self.lake.open_events)
            _remove_partial_offsets(self.checkpoint)
            self._remove_outdated_checkpoint()
            self._serve_metrics(stack)
            query = self._start(lock.lake, available_now)
            _RUNNING_QUERIES[self._key] = query, lock
            at_end = stack.pop_all()
        threading.Thread(target=_close_at_end, args=(query, at_end), name="bulltask-pipeline", daemon=True).start()
        return query

    def stop(self, timeout: Duration | None = None) -> None:
        """Stop this process's query after the current batch.

        Args:
            timeout: How long to wait for the batch (seconds or ``timedelta``); default: no limit. After that the batch
                is interrupted, and the next run writes it again.

        Raises:
            ConfigError: ``timeout`` is not a duration.
        """
        deadline_ms = None if timeout is None else mono_ms() + to_ms(timeout, "timeout")
        query, _ = _RUNNING_QUERIES.get(self._key, (None, None))
        if query is not None:
            stop_after_batch(query, lambda wait_s: _ended_or_timed_out(query, wait_s, deadline_ms))

    def snapshot(self, states: Sequence[str] = FINISHED, *, since: datetime | None = None) -> int:
        """Write jobs that are in Redis to ``bronze.jobs``, with their data, options and stack traces.

        Args:
            states: The states of the jobs; default: finished jobs (``completed`` and ``failed``).
            since: Only jobs that finished at this time or later.

        Returns:
            The number of jobs.
        """
        return snapshot(self.spark, self.lake, self._broker_options(), states=states, since=since)

    def backfill(self, *, since: datetime, until: datetime, queues: Sequence[str] | None = None) -> BackfillResult:
        """Add jobs that finished in gaps to silver, each with its last attempt.

        Running a backfill again adds nothing.

        Args:
            since: Only gaps that end at this time or later.
            until: Only gaps that begin before this time.
            queues: Only gaps of these queues.

        Raises:
            ConfigError: ``until`` is not later than ``since``.
            LakeError: There is no lake.
        """
        source = self._broker_options()
        return backfill(self.spark, self.lake, source, since=since, until=until, queues=queues)

    def build(
        self, layer: Literal["silver", "gold"], *, days: Collection[date], slo_config: SLOConfig | None = None
    ) -> None:
        """Build the tables of a layer for some days and replace existing rows, even while the query is running.

        The query does not write gold. Build a day of gold again after all attempts that began on it have ended. The
        query writes silver; rebuild it only if the lake was damaged.

        Args:
            layer: ``"silver"`` or ``"gold"``.
            days: The days (UTC).
            slo_config: Objectives, prices and capacities for gold (`bulltask.lake.slo_config`); default: none.

        Raises:
            ConfigError: The layer does not exist.
            LakeError: Events that silver is derived from have expired.
        """
        lake = self.lake.of_broker("")  # the tables have the rows of all brokers
        if choice("silver", "gold")(layer, "layer") == "gold":
            build_gold(self.spark, lake, days, slo_config)
        else:
            build_silver(self.spark, lake, days, open_job_timeout=timedelta(milliseconds=self._open_job_timeout_ms))

    def replay(
        self, where: str, *, queue: str | None = None, dry_run: bool = True, limit: int | None = None
    ) -> ReplayResult:
        """Send finished jobs again, each once: with the same name, data and options, but a new id.

        The delay, parent, schedule and ``expires`` of a job are not copied.

        Args:
            where: An SQL condition on the columns of ``silver.jobs``.
            queue: Only jobs of this queue.
            dry_run: Only report what would be sent.
            limit: The maximum number of jobs, in order of queue and id.

        Raises:
            ConfigError: The condition is invalid.
            LakeError: There is no lake.
        """
        selection = ReplaySelection(where, queue, limit)
        return replay(self.spark, self.lake, self._broker_options(), selection, dry_run=dry_run)

    def read(self, name: str, *, days: Collection[date] | None = None) -> DataFrame:
        """Return the rows that a table has now; later commits do not change the DataFrame.

        Of rows of silver with the same key, the one with the latest ``as_of`` is current.

        Args:
            name: The table's full name, such as ``silver.jobs``.
            days: Only rows of these days (UTC, the column ``dt``); default: all.

        Raises:
            ConfigError: There is no such table.
        """
        if name not in TABLES:
            raise ConfigError(f"unknown table {name!r}{did_you_mean(name, TABLES)}")
        return read_table(self.spark, self.lake, TABLES[name], days)

    def gaps(self) -> DataFrame:
        """Return ``bronze.gaps`` with ``backfilled_jobs``: the number of added jobs, or null without a backfill."""
        key = list(GAPS.key)
        backfills = read_table(self.spark, self.lake, BACKFILLS).groupBy(key)
        backfilled = backfills.agg(F.sum("backfilled_jobs").alias("backfilled_jobs"))
        return read_table(self.spark, self.lake, GAPS).join(backfilled, key, "left")

    def status(self) -> PipelineStatus:
        """Return the lag of the lake behind its queues, the retention of event streams, and the lost events."""
        return pipeline_status(self.lake, self._broker_options())

    def _serve_metrics(self, at_end: ExitStack) -> None:
        if (port := self._options.get("metrics_port")) is not None:
            from bulltask.spark.pipeline_metrics import PipelineMetrics, serve  # noqa: PLC0415 - prometheus_client

            host = self._options.get("metrics_host", "127.0.0.1")
            at_end.callback(serve(PipelineMetrics(self.lake, self.status), host, port))

    def _broker_options(self) -> dict[str, str]:
        """Return the source options with the location of the queues."""
        return broker_options({**self._options, "broker": self.lake.broker}, self._queues)

    def _start(self, lake: Lake, available_now: bool) -> StreamingQuery:
        head, options, prefix = last_record(self.lake), self._options, self.lake.queue_prefix
        last_ids = {} if head is None else {name.removeprefix(prefix): last for name, last in head.last_ids.items()}
        source = self._broker_options() | {
            "table": "events",
            "skipUnsupportedQueues": "true",
            "maxEventsPerTrigger": str(options.get("max_events_per_trigger", MAX_EVENTS_PER_TRIGGER)),
            "alignQueues": str(options.get("align", True)).lower(),
            "failOnDataLoss": str(self._on_loss == "fail").lower(),
            "gapRows": "true",  # also if losses fail the query: those before its start do not
            "startingOffsets": self._starting if head is None else json.dumps(last_ids),
        }
        hash_tag = source["queueHashTag"] == "true"
        batches = BatchWriter(lake, self.checkpoint, self._open_job_timeout_ms, hash_tag=hash_tag)
        kind = events_source(self.lake)
        # Another pipeline of this process has a source with the same name; a query keeps the settings of its start.
        with _REGISTERING, _default_conf(self.spark, _QUERY_CONF):
            self.spark.dataSource.register(kind)
            parts = self.spark.readStream.format(kind.name()).options(**source).load()
            writer = parts.writeStream.foreachBatch(batches).option("checkpointLocation", str(self.checkpoint))
            if available_now:
                return writer.trigger(availableNow=True).start()
            return writer.trigger(processingTime=options.get("trigger", "10 seconds")).start()

    def _remove_outdated_checkpoint(self) -> None:
        """Remove a checkpoint with which no batch was written: the lake may have received others since it was made."""
        head, has_query = last_record(self.lake), (self.checkpoint / "metadata").is_file()
        if head is not None and has_query and query_of(self.checkpoint) not in head.queries:
            shutil.rmtree(self.checkpoint)


@contextmanager
def _default_conf(spark: SparkSession, defaults: Mapping[str, str]) -> Iterator[None]:
    """Set the settings that a session does not have, meanwhile."""
    missing = [name for name in defaults if spark.conf.get(name, None) is None]
    try:
        for name in missing:
            spark.conf.set(name, defaults[name])
        yield
    finally:
        for name in missing:
            spark.conf.unset(name)


def _checkpoint_of(lake: Lake, chosen: str | Path | None) -> Path:
    if chosen is not None:
        return Path(chosen, lake.broker).absolute()
    if lake.directory is not None:
        return lake.internal("checkpoint")
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    return state / "bulltask" / "checkpoints" / sha256(lake.root.encode()).hexdigest()[:16] / lake.broker


def _remove_partial_offsets(checkpoint: Path) -> None:
    """Remove partial offsets of the first batch, which remain if the driver died or the query stopped mid-write.

    Spark never starts a query whose checkpoint has files but no batch (STATE_STORE_CHECKPOINT_LOCATION_NOT_EMPTY).
    """
    offsets = checkpoint / "offsets"
    if offsets.is_dir() and not any(path.name.isdigit() for path in offsets.iterdir()):
        shutil.rmtree(offsets)


def stop_after_batch(query: StreamingQuery, is_urgent: Callable[[float], bool]) -> None:
    """Stop a query, which may have ended, after its current batch. An interrupted batch loses no events.

    ``is_urgent`` waits for at most the given number of seconds and returns whether to interrupt the batch.
    """
    last_batch = _last_batch(query)
    # If the next batch has begun by then, it is interrupted: an unfinished batch leaves nothing in the tables.
    while query.isActive and query.status["isTriggerActive"] and _last_batch(query) == last_batch:
        if is_urgent(_POLL_S):
            break
    query.stop()


def _last_batch(query: StreamingQuery) -> int:
    """Return the number of the last finished batch; -1 before the first."""
    progress = query.lastProgress
    return -1 if progress is None else int(progress["batchId"])


def _ended_or_timed_out(query: StreamingQuery, wait_s: float, deadline_ms: int | None) -> bool:
    """Wait, and return whether the query has ended or the time is up."""
    left_s = wait_s if deadline_ms is None else min(wait_s, (deadline_ms - mono_ms()) / 1000)
    with suppress(PySparkException):  # the caller of run() gets the error
        return left_s < 0.001 or bool(query.awaitTermination(left_s))  # type: ignore[arg-type]  # it accepts fractions of seconds
    return True


def _release_ended(key: tuple[str, str]) -> None:
    """Release the lock of a query that has just ended, before its thread releases it."""
    query, lock = _RUNNING_QUERIES.get(key, (None, None))
    if query is not None and lock is not None and not query.isActive:
        lock.release()


def _close_at_end(query: StreamingQuery, resources: ExitStack) -> None:
    """Release the resources of a query when it ends."""
    with resources, suppress(PySparkException):
        query.awaitTermination()
