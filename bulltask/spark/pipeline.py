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
from bulltask.spark.source.settings import broker_options
from bulltask.spark.source.status import pipeline_status
from bulltask.spark.tables.backfill import BackfillReport, backfill
from bulltask.spark.tables.batches import BatchWriter
from bulltask.spark.tables.lake_tables import read_table
from bulltask.spark.tables.rebuild import build_silver
from bulltask.spark.tables.replay import ReplayReport, ReplaySelection, replay
from bulltask.spark.tables.snapshot import FINISHED, snapshot

__all__ = ["OnLoss", "Pipeline", "PipelineOptions", "stop_after_batch"]

OnLoss = Literal["gap", "fail"]

_WHERE: Final = ("url", "prefix", "queue", "queueHashTag")

_LOOK_S: Final = 0.5

_RUNNING: Final[dict[Path, tuple[StreamingQuery, RunLock]]] = {}
"""The last query of this process for each lake, and its lock."""


class PipelineOptions(TypedDict, total=False):
    """Further arguments of `Pipeline`.

    Attributes:
        url, prefix, queue_hash_tag: where Redis is, and how queues are spelled; bulltask's settings if left out.
        trigger: how often a batch is made, as Spark says it; ``10 seconds`` if left out.
        on_loss: what to do when events were trimmed before they were read: ``gap`` writes a row into ``bronze.gaps``
            and goes on, ``fail`` ends the stream; ``gap`` if left out.
        max_open: how long a job may be without an event until it is written as it was seen last; 7 days if left out.
        max_events_per_trigger: events of a batch, of all queues together; 200,000 if left out.
        align: no queue is read beyond the time of the slowest that has more; on if left out.
        starting: where to begin with an empty lake: ``earliest`` or ``latest``; ``earliest`` if left out.
        metrics_port: while the stream runs, ``/metrics`` is served there for Prometheus; off if left out.
        metrics_host: at this address; ``127.0.0.1`` if left out.
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
    """Responsible for one lake: the stream that feeds it, and what is made of its tables.

    Args:
        spark: the session, best one of `bulltask.spark.session`.
        root: directory of the lake, under a name that the driver and all executors see.
        queues: whose events: names, or ``*`` for all of the prefix, also those that come up later.
        more: see `PipelineOptions`.

    Raises:
        TypeError: there is no such option.
        ConfigError: an option is wrong, or the root is a URL.
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
        """Feed the tables of bronze and silver from the queues' events, each event once.

        The stream goes on where the last one ended, whatever ended it.

        Args:
            available_now: end when everything is read that is there now, in place of going on for ever.

        Returns:
            The running query; ``awaitTermination()`` waits for its end. Its own ``stop()`` interrupts the batch that
            is being written, which loses nothing; :meth:`stop` waits for it.

        Raises:
            LakeInUseError: another stream feeds this lake.
            ConfigError: an option is wrong, or metrics cannot be served where they should be.
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
        """End the stream that this process feeds the lake with, behind the batch that is being written.

        Args:
            within: how long to wait for the batch (seconds or ``timedelta``), as long as it takes if left out; then it
                is interrupted, and the next stream writes it again.

        Raises:
            ConfigError: ``within`` is no length of time.
        """
        ends_ms = None if within is None else mono_ms() + to_ms(within, "within")
        query, _ = _RUNNING.get(self.layout.root, (None, None))
        if query is not None:
            stop_after_batch(query, lambda wait_s: _ended_or_timed_out(query, wait_s, ends_ms))

    def snapshot(self, states: Sequence[str] = FINISHED, *, since: datetime | None = None) -> int:
        """Write the jobs that Redis has now to ``bronze.jobs``: with their data, options and stacktraces.

        Args:
            states: of the jobs.
            since: only jobs that were done at this time or later.

        Returns:
            How many there were.
        """
        return snapshot(self.spark, self.layout, self._broker_options(), states=states, since=since).rows

    def backfill(self, *, since: datetime, until: datetime, queues: Sequence[str] | None = None) -> BackfillReport:
        """Write to silver what is still known of jobs that ended in gaps: the last attempt of each.

        To do it again adds nothing.

        Args:
            since: gaps that touch this time or later.
            until: and before this time.
            queues: only gaps of these.

        Raises:
            ConfigError: ``until`` is not behind ``since``.
            LakeError: there is no lake.
        """
        where = self._broker_options()
        return backfill(self.spark, self.layout, where, since=since, until=until, queues=queues)

    def build(
        self, layer: Literal["silver", "gold"], *, days: Collection[date], terms: SLOConfig | None = None
    ) -> None:
        """Build the tables of a layer for some days anew, in the place of what was there, also while they are fed.

        Gold is always built so. A day may be built as often as one likes: its rows change while attempts that began in
        it have not ended. Silver is written by the stream; to build it anew is for a lake that was damaged.

        Args:
            layer: ``"silver"`` or ``"gold"``.
            days: which, UTC.
            terms: of gold: objectives, prices and capacities (`bulltask.lake.slo_config`); by default there are none.

        Raises:
            ConfigError: there is no such layer.
            LakeError: events that silver is told from have expired.
        """
        if choice("silver", "gold")(layer, "layer") == "gold":
            build_gold(self.spark, self.layout, days, terms)
        else:
            build_silver(self.spark, self.layout, days, max_open=timedelta(milliseconds=self._max_open_ms))

    def compact(self, table: str, *, before: date, target_mb: float = 128) -> CompactReport:
        """Write the days of a table that are over into few files; in silver without the rows that were superseded.

        Args:
            table: by its full name: ``silver.jobs``.
            before: days before this one, UTC.
            target_mb: megabytes of a file, about.

        Raises:
            ConfigError: there is no such table of bronze or silver, or the size is none.
        """
        return compact(self.layout, table, before=before, target_mb=target_mb)

    def replay(
        self, where: str, *, queue: str | None = None, dry_run: bool = True, limit: int | None = None
    ) -> ReplayReport:
        """Send finished jobs anew, with their names, data and options but ids of their own, each once.

        Args:
            where: a condition of SQL over the columns of ``silver.jobs``.
            queue: only jobs of this queue.
            dry_run: only say what would be sent.
            limit: at most so many jobs, in order of queue and id.

        Raises:
            ConfigError: the condition is none.
            LakeError: there is no lake.
        """
        selection = ReplaySelection(where, queue, limit)
        return replay(self.spark, self.layout, self._broker_options(), selection, dry_run=dry_run)

    def gaps(self) -> DataFrame:
        """``bronze.gaps`` and, in ``repaired_rows``, how many jobs backfills have found; null for no backfill."""
        key = list(GAPS.key)
        repairs = read_table(self.spark, self.layout, REPAIRS).groupBy(key)
        repaired = repairs.agg(fn.sum("repaired_rows").alias("repaired_rows"))
        return read_table(self.spark, self.layout, GAPS).join(repaired, key, "left")

    def status(self) -> PipelineStatus:
        """How far the lake is behind its queues, how long their rings hold what is not read, what was lost."""
        return pipeline_status(self.layout, self._broker_options())

    def _serve_metrics(self, until: ExitStack) -> None:
        if (port := self._more.get("metrics_port")) is not None:
            from bulltask.spark.tables.pipeline_metrics import PipelineMetrics, serve  # noqa: PLC0415 - prometheus_client

            host = self._more.get("metrics_host", "127.0.0.1")
            until.callback(serve(PipelineMetrics(Ledger(self.layout), self.status), host, port))

    def _broker_options(self) -> dict[str, str]:
        """Options of the source that say where the queues are."""
        return {name: text for name, text in self._source().items() if name in _WHERE}

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
        """Options of the source."""
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
        """Where a new checkpoint begins: behind what is in the lake."""
        head = Ledger(self.layout).head()
        return self._starting if head is None else json.dumps(dict(head.ends))


def stop_after_batch(query: StreamingQuery, is_urgent: Callable[[float], bool]) -> None:
    """Stop a query when it has written the batch that it is at; whatever interrupts it, nothing is lost.

    Args:
        query: may have ended.
        hurried: waits so many seconds at the most and says whether to wait no longer.
    """
    last = _number(query)
    # A batch behind it may have begun by then: one that is not done leaves nothing in the tables.
    while query.isActive and query.status["isTriggerActive"] and _number(query) == last:
        if is_urgent(_LOOK_S):
            break
    query.stop()


def _number(query: StreamingQuery) -> int:
    """The number of the last batch that is done; -1 before the first."""
    progress = query.lastProgress
    return -1 if progress is None else int(progress["batchId"])


def _ended_or_timed_out(query: StreamingQuery, wait_s: float, ends_ms: int | None) -> bool:
    """Wait so long; whether the query has ended or the time is over."""
    left_s = wait_s if ends_ms is None else min(wait_s, (ends_ms - mono_ms()) / 1000)
    with suppress(PySparkException):  # how it ended is for others to look at
        return left_s < 0.001 or bool(query.awaitTermination(left_s))  # type: ignore[arg-type]  # it takes parts of seconds
    return True


def _release_ended(root: Path) -> None:
    """Give the lock of a query back that has ended just now, before its thread comes to it."""
    query, lock = _RUNNING.get(root, (None, None))
    if query is not None and lock is not None and not query.isActive:
        lock.release()


def _close_at_end(query: StreamingQuery, held: ExitStack) -> None:
    """Give back what is held for a query when that ends; how it ended is for others to look at."""
    with held, suppress(PySparkException):
        query.awaitTermination()
