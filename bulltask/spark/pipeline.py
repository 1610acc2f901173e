"""The data pipeline: a lake of tables, fed by a stream of the events of many queues."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, suppress
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Final, Literal, TypedDict, Unpack, get_args

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as fn
from pyspark.sql.streaming.query import StreamingQuery

from bulltask.clock import Duration, mono_ms, to_ms
from bulltask.config.parsers import choice
from bulltask.config.urls import SecretUrl
from bulltask.lake.atomic_swap import finish_intents
from bulltask.lake.compaction import CompactReport, compact
from bulltask.lake.layout import Layout, check_local
from bulltask.lake.ledger import Ledger
from bulltask.lake.lock import RunLock
from bulltask.lake.slo_config import SLOConfig
from bulltask.lake.status import PipelineStatus
from bulltask.lake.tables import GAPS, REPAIRS
from bulltask.spark.connector.session import register
from bulltask.spark.gold.build import build_gold
from bulltask.spark.source.broker_options import broker_options
from bulltask.spark.source.status import pipeline_status
from bulltask.spark.tables.backfill import BackfillReport, backfill
from bulltask.spark.tables.batches import BatchWriter
from bulltask.spark.tables.lake_tables import read_table
from bulltask.spark.tables.rebuild import build_silver
from bulltask.spark.tables.replay import ReplayReport, ReplaySelection, replay
from bulltask.spark.tables.snapshot import FINISHED, snapshot

__all__ = ["OnLoss", "Pipeline", "PipelineOptions", "stop_after_batch"]

OnLoss = Literal["gap", "fail"]

_BROKER_OPTIONS: Final = ("url", "prefix", "queue", "queueHashTag")

_POLL_S: Final = 0.5

_RUNNING: Final[dict[Path, tuple[StreamingQuery, RunLock]]] = {}
"""The last query of this process for each lake, and its lock."""


class PipelineOptions(TypedDict, total=False):
    """Further arguments of `Pipeline`.

    Attributes:
        url, prefix, queue_hash_tag: Where Redis is, and how queues are named; bulltask's settings if omitted.
        trigger: How often a batch starts, in Spark's syntax; ``10 seconds`` if omitted.
        on_loss: What to do if events were trimmed before they were read: ``gap`` writes a row into ``bronze.gaps`` and
            continues, ``fail`` ends the stream; ``gap`` if omitted.
        max_open: How long a job may have no event until it is written in its last known state; 7 days if omitted.
        max_events_per_trigger: Events of a batch, for all queues together; 200,000 if omitted.
        align: Read no queue beyond the time of the slowest that has more; on if omitted.
        starting: Where to begin with an empty lake: ``earliest`` or ``latest``; ``earliest`` if omitted.
        metrics_port: Serve ``/metrics`` for Prometheus on this port while the stream runs; off if omitted.
        metrics_host: The address for it; ``127.0.0.1`` if omitted.
    """

    url: str | SecretUrl | None
    prefix: str | None
    queue_hash_tag: bool | None
    trigger: str
    on_loss: OnLoss
    max_open: Duration
    max_events_per_trigger: int
    align: bool
    starting: Literal["earliest", "latest"]
    metrics_port: int | None
    metrics_host: str


class Pipeline:
    """One lake: the stream that feeds it, and commands on its tables.

    Args:
        spark: The session, ideally from `bulltask.spark.session`.
        root: Directory of the lake, under a path that the driver and all executors share.
        queues: Whose events: names, or ``*`` for all of the prefix, including those that appear later.
        more: See `PipelineOptions`.

    Raises:
        TypeError: An option is unknown.
        ConfigError: An option is invalid, or the root is a URL.
    """

    def __init__(
        self,
        spark: SparkSession,
        root: str | Path,
        *,
        queues: str | Sequence[str] = "*",
        **more: Unpack[PipelineOptions],
    ) -> None:
        if unknown := sorted(set(more) - set(PipelineOptions.__annotations__)):
            known = ", ".join(PipelineOptions.__annotations__)
            raise TypeError(f"unknown option {unknown[0]!r}; known are queues, {known}")
        check_local(root)
        self.spark, self.layout = spark, Layout(Path(root).absolute())
        self._queues, self._more = queues, more
        self._max_open_ms = to_ms(more.get("max_open", timedelta(days=7)), "max_open")
        self._on_loss = choice(*get_args(OnLoss))(more.get("on_loss", "gap"), "on_loss")
        self._starting = choice("earliest", "latest")(more.get("starting", "earliest"), "starting")

    def run(self, *, available_now: bool = False) -> StreamingQuery:
        """Feed the bronze and silver tables from the queues' events, each event exactly once.

        The stream continues where the last one ended, however it ended.

        Args:
            available_now: End when everything is read that is there now, instead of running until it is stopped.

        Returns:
            The running query; ``awaitTermination()`` waits for its end. Its own ``stop()`` interrupts the batch that is
            being written, which loses nothing; :meth:`stop` waits for the batch.

        Raises:
            LakeInUseError: Another stream feeds this lake.
            ConfigError: An option is invalid, or the metrics cannot be served at this address.
        """
        _release_ended(self.layout.root)
        with ExitStack() as stack:
            held = stack.enter_context(RunLock(self.layout))
            finish_intents(self.layout)
            self._serve_metrics(stack)
            query = self._start(available_now)
            _RUNNING[self.layout.root] = query, held
            until_end = stack.pop_all()
        threading.Thread(target=_close_at_end, args=(query, until_end), name="bulltask-pipeline", daemon=True).start()
        return query

    def stop(self, within: Duration | None = None) -> None:
        """Stop the stream that this process feeds the lake with, after the batch that is being written.

        Args:
            within: How long to wait for the batch (seconds or ``timedelta``), without limit if omitted; after that it
                is interrupted, and the next stream writes it again.

        Raises:
            ConfigError: ``within`` is not a duration.
        """
        ends_ms = None if within is None else mono_ms() + to_ms(within, "within")
        query, _ = _RUNNING.get(self.layout.root, (None, None))
        if query is not None:
            stop_after_batch(query, lambda wait_s: _ended_or_timed_out(query, wait_s, ends_ms))

    def snapshot(self, states: Sequence[str] = FINISHED, *, since: datetime | None = None) -> int:
        """Write the jobs that Redis has now to ``bronze.jobs``: with their data, options and stack traces.

        Args:
            states: Of the jobs.
            since: Only jobs that finished at this time or later.

        Returns:
            How many there were.
        """
        return snapshot(self.spark, self.layout, self._broker_options(), states=states, since=since).rows

    def backfill(self, *, since: datetime, until: datetime, queues: Sequence[str] | None = None) -> BackfillReport:
        """Write to silver what is still known of jobs that ended in gaps: the last attempt of each.

        Repeating it adds nothing.

        Args:
            since: Gaps that touch this time or later.
            until: And before this time.
            queues: Only gaps of these.

        Raises:
            ConfigError: ``until`` is not later than ``since``.
            LakeError: There is no lake.
        """
        where = self._broker_options()
        return backfill(self.spark, self.layout, where, since=since, until=until, queues=queues)

    def build(
        self, layer: Literal["silver", "gold"], *, days: Collection[date], slo_config: SLOConfig | None = None
    ) -> None:
        """Build the tables of a layer for some days again and replace those that exist, also while the stream runs.

        Gold is always built like this. A day may be built any number of times: its rows change until the attempts that
        began in it have ended. Silver is written by the stream; rebuild it if a lake was damaged.

        Args:
            layer: ``"silver"`` or ``"gold"``.
            days: Which, UTC.
            slo_config: For gold: objectives, prices and capacities (`bulltask.lake.slo_config`); none by default.

        Raises:
            ConfigError: There is no such layer.
            LakeError: Events that silver is derived from have expired.
        """
        if choice("silver", "gold")(layer, "layer") == "gold":
            build_gold(self.spark, self.layout, days, slo_config)
        else:
            build_silver(self.spark, self.layout, days, max_open=timedelta(milliseconds=self._max_open_ms))

    def compact(self, table: str, *, before: date, target_mb: float = 128) -> CompactReport:
        """Merge the files of a table's past days into few; in silver without the rows that were superseded.

        Args:
            table: By its full name: ``silver.jobs``.
            before: Days before this one, UTC.
            target_mb: Approximate size of a file in megabytes.

        Raises:
            ConfigError: There is no such table of bronze or silver, or the size is invalid.
        """
        return compact(self.layout, table, before=before, target_mb=target_mb)

    def replay(
        self, where: str, *, queue: str | None = None, dry_run: bool = True, limit: int | None = None
    ) -> ReplayReport:
        """Send finished jobs again, with their names, data and options but new ids, each once.

        Args:
            where: An SQL condition on the columns of ``silver.jobs``.
            queue: Only jobs of this queue.
            dry_run: Only report what would be sent.
            limit: Maximum number of jobs, in order of queue and id.

        Raises:
            ConfigError: The condition is invalid.
            LakeError: There is no lake.
        """
        selection = ReplaySelection(where, queue, limit)
        return replay(self.spark, self.layout, self._broker_options(), selection, dry_run=dry_run)

    def gaps(self) -> DataFrame:
        """Return ``bronze.gaps`` with ``repaired_rows``: how many jobs backfills have found; null without one."""
        key = list(GAPS.key)
        repairs = read_table(self.spark, self.layout, REPAIRS).groupBy(key)
        repaired = repairs.agg(fn.sum("repaired_rows").alias("repaired_rows"))
        return read_table(self.spark, self.layout, GAPS).join(repaired, key, "left")

    def status(self) -> PipelineStatus:
        """Return how far the lake is behind its queues, how long streams keep unread events, and what was lost."""
        return pipeline_status(self.layout, self._broker_options())

    def _serve_metrics(self, until: ExitStack) -> None:
        if (port := self._more.get("metrics_port")) is not None:
            from bulltask.spark.tables.pipeline_metrics import PipelineMetrics, serve  # noqa: PLC0415 - prometheus_client

            host = self._more.get("metrics_host", "127.0.0.1")
            until.callback(serve(PipelineMetrics(Ledger(self.layout), self.status), host, port))

    def _broker_options(self) -> dict[str, str]:
        """Return the options of the source that say where the queues are."""
        return {name: text for name, text in self._source().items() if name in _BROKER_OPTIONS}

    def _start(self, available_now: bool) -> StreamingQuery:
        register(self.spark)
        source = self._source()
        events = self.spark.readStream.format("bulltask").options(**source).load()
        batches = BatchWriter(str(self.layout.root), self._max_open_ms, hash_tag=source["queueHashTag"] == "true")
        stream = events.writeStream.foreachBatch(batches).option("checkpointLocation", str(self.layout.checkpoint))
        if available_now:
            return stream.trigger(availableNow=True).start()
        return stream.trigger(processingTime=self._more.get("trigger", "10 seconds")).start()

    def _source(self) -> dict[str, str]:
        """Return the options of the source."""
        more = self._more
        return {
            **broker_options(more),
            "table": "events",
            "queue": self._queues if isinstance(self._queues, str) else json.dumps(list(self._queues)),
            "skipForeignQueues": "true",
            "maxEventsPerTrigger": str(more.get("max_events_per_trigger", 200_000)),
            "alignQueues": str(more.get("align", True)).lower(),
            "failOnDataLoss": str(self._on_loss == "fail").lower(),
            "gapRows": str(self._on_loss == "gap").lower(),
            "startingOffsets": self._begin(),
        }

    def _begin(self) -> str:
        """Return where a new checkpoint begins: after what is in the lake."""
        head = Ledger(self.layout).head()
        return self._starting if head is None else json.dumps(dict(head.ends))


def stop_after_batch(query: StreamingQuery, is_urgent: Callable[[float], bool]) -> None:
    """Stop a query when it has written its current batch; an interruption loses nothing.

    Args:
        query: May have ended.
        is_urgent: Waits for at most the given seconds and returns whether to stop waiting for the batch.
    """
    last = _number(query)
    # The next batch may have begun by then: one that is not finished leaves nothing in the tables.
    while query.isActive and query.status["isTriggerActive"] and _number(query) == last:
        if is_urgent(_POLL_S):
            break
    query.stop()


def _number(query: StreamingQuery) -> int:
    """Return the number of the last finished batch; -1 before the first."""
    progress = query.lastProgress
    return -1 if progress is None else int(progress["batchId"])


def _ended_or_timed_out(query: StreamingQuery, wait_s: float, ends_ms: int | None) -> bool:
    """Wait, and return whether the query has ended or the time is up."""
    left_s = wait_s if ends_ms is None else min(wait_s, (ends_ms - mono_ms()) / 1000)
    with suppress(PySparkException):  # the caller of run() sees how it ended
        return left_s < 0.001 or bool(query.awaitTermination(left_s))  # type: ignore[arg-type]  # it takes parts of seconds
    return True


def _release_ended(root: Path) -> None:
    """Release the lock of a query that has just ended, before its thread does."""
    query, lock = _RUNNING.get(root, (None, None))
    if query is not None and lock is not None and not query.isActive:
        lock.release()


def _close_at_end(query: StreamingQuery, held: ExitStack) -> None:
    """Release what a query holds when it ends; the caller of ``run()`` sees how it ended."""
    with held, suppress(PySparkException):
        query.awaitTermination()
