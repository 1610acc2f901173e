"""The commands of ``bulltask pipeline`` that connect to Redis.

``run`` records the events of queues in the lake; ``status`` and ``doctor`` watch over it; ``snapshot`` and ``backfill``
copy jobs to the lake; ``replay``, ``enqueue`` and ``gather`` add jobs to queues and read their results.
"""

from __future__ import annotations

import re
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from os import environ
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from bulltask.cli.app_loader import load_app_or_broker
from bulltask.cli.options import duration_option, json_option, lake_option, moment, redis_options
from bulltask.cli.pipeline import (
    EXIT_LOST,
    EXIT_LOST_FAIL,
    QUICK_DRIVER,
    QueueSource,
    brokers_option,
    open_session,
    source_of,
    source_options,
    sources_of,
    spark_options,
)
from bulltask.cli.terminal import as_table, echo, in_one_line, print_json
from bulltask.config.parsers import parse_names
from bulltask.jobs.clock import mono_ms
from bulltask.jobs.errors import BulltaskError, LakeError, did_you_mean
from bulltask.lake.formatting import pluralize
from bulltask.lake.ledger import BatchRecord, last_record, records_after
from bulltask.lake.records import to_json
from bulltask.lake.status import SIZE_COLUMNS, describe_losses, stream_sizes
from bulltask.spark.source.options import MAX_EVENTS_PER_TRIGGER
from bulltask.transport.streams import RetentionNeed, StreamRetention

if TYPE_CHECKING:
    from bulltask.lake.status import PipelineStatus, QueueStatus, SkippedQueue
    from bulltask.lake.storage import Lake
    from bulltask.queue.doctor import Diagnosis, Finding
    from bulltask.spark import Pipeline
    from bulltask.spark.replay import ReplayResult

_POLL_S: Final = 0.25

_RESTART_MS: Final = 10_000
"""When a broker's query that has failed starts again, while those of other brokers go on."""

_EXCEPTION: Final = re.compile(r"^.*Traceback \(most recent call last\):\n(?:(?:[ \t].*)?\n)*(.+)", re.MULTILINE)
"""A traceback, and its exception: the first line that is not indented."""


@click.command("run", short_help="Record the events of queues in the bronze and silver tables.")
@lake_option(extra="spark")
@source_options
@click.option("--once", is_flag=True, help="Record the currently available events, and exit.")
@click.option(
    "--on-loss",
    type=click.Choice(["gap", "fail"]),
    default="gap",
    show_default=True,
    help="If events were trimmed before they were read: record a gap and continue, or fail.",
)
@duration_option("--trigger", default="10s", text="Interval between batches.")
@click.option(
    "--starting",
    type=click.Choice(["earliest", "latest"]),
    default="earliest",
    show_default=True,
    help="Where to begin if the lake is empty: at the oldest event in Redis, or at the next new event.",
)
@duration_option(
    "--open-job-timeout",
    default="7d",
    text="Time without events after which an unfinished job is written with its last state.",
)
@click.option(
    "--max-events-per-trigger",
    type=click.IntRange(1),
    default=MAX_EVENTS_PER_TRIGGER,
    show_default=True,
    help="Maximum number of events in a batch, across all queues.",
)
@click.option(
    "--checkpoint",
    type=click.Path(file_okay=False, path_type=Path),
    help="Directory for Spark's progress (default: in the lake's directory; for a URL, in ~/.local/state/bulltask).",
)
@click.option(
    "--metrics-port", type=click.IntRange(1, 65535), help="Port for Prometheus metrics (default: no metrics)."
)
@click.option("--metrics-host", default="127.0.0.1", show_default=True, help="Address to bind the metrics port to.")
@brokers_option
@spark_options
@click.pass_context
def run_command(ctx: click.Context, /, *, lake: Lake, once: bool, **options: Any) -> None:
    """Record the events of queues in the bronze and silver tables of the lake, each event exactly once.

    With --brokers, each broker has its own batches. If one is down, the others go on, and its events are recorded
    when it is back.

    TERM and INT stop the pipeline after the current batch; a second signal stops it immediately. The next run always
    continues from the last committed batch.

    Exit codes: 0 (no events were lost), 1 (an error), 3 (events were lost, and the gaps are recorded in bronze.gaps), 4
    (events were lost, and --on-loss is fail).
    """
    sources = sources_of(options)
    spark = open_session(options, QUICK_DRIVER)
    # After the session has been opened, as Spark installs its own handler for INT.
    with _stop_signals() as stop:
        runs: list[_Run] = []
        try:
            for number, source in enumerate(sources):
                pipeline = _pipeline(spark, lake, source, options, number)
                runs.append(_Run(pipeline, stop, once=once, restarts=len(sources) > 1 and not once))
                queues = "all queues" if source.queues == "*" else source.queues
                click.echo(f"{runs[-1].label}recording events of {queues} in {lake.root}", err=True)
            while sum(run.goes_on() for run in runs) and not stop.acquire(timeout=_POLL_S):
                pass
        finally:
            for run in runs:
                run.end()
    ctx.exit(min(filter(None, [run.exit_code() for run in runs]), default=0))


def _pipeline(spark: Any, lake: Lake, source: QueueSource, options: Mapping[str, Any], number: int) -> Any:
    from bulltask.spark import Pipeline  # noqa: PLC0415 - slow

    same = ("on_loss", "open_job_timeout", "max_events_per_trigger", "checkpoint", "starting", "metrics_host")
    port = options["metrics_port"]
    return Pipeline(
        spark,
        lake.of_broker(source.broker),
        queues=source.queues,
        **source.keywords,
        trigger=f"{round(options['trigger'] * 1000)} milliseconds",
        metrics_port=None if port is None else port + number,
        **{name: options[name] for name in same},
    )


@contextmanager
def _stop_signals() -> Iterator[threading.Semaphore]:
    """Yield a semaphore that every TERM or INT releases."""
    stop = threading.Semaphore(0)

    def release(*_: object) -> None:
        stop.release()

    before = {number: signal.signal(number, release) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Run:
    """The run of one broker's pipeline: ``once``, or until ``stop`` is released, which stops the runs of all brokers.

    With ``restarts``, a query that has failed starts again.
    """

    def __init__(self, pipeline: Pipeline, stop: threading.Semaphore, *, once: bool, restarts: bool) -> None:
        self.label = f"{pipeline.lake.broker}: " if pipeline.lake.broker else ""
        self._pipeline = pipeline
        self._stop = stop
        self._restarts = restarts
        self._before = self._head()
        self._shown = self._before.number
        self._restart_ms: int | None = None
        self._query = pipeline.run(available_now=once)

    def goes_on(self) -> bool:
        """Print a line for each new batch; start a query that failed again. Return whether the run goes on."""
        self._print_new()
        if self._query.isActive or not self._restarts or self._query.exception() is None:
            return self._query.isActive
        if self._restart_ms is None:
            if self._print_failure() == EXIT_LOST_FAIL:
                self._stop.release()
            self._restart_ms = mono_ms() + _RESTART_MS
        elif mono_ms() >= self._restart_ms:
            self._restart_ms = None
            with suppress(BulltaskError):  # the failure is printed again
                self._query = self._pipeline.run()
        return True

    def end(self) -> None:
        """Stop an active query after its batch, or immediately on a further signal. No events are lost."""
        from bulltask.spark.pipeline import stop_after_batch  # noqa: PLC0415 - slow

        if self._query.isActive:
            click.echo(f"{self.label}stopping after this batch", err=True)
            stop_after_batch(self._query, lambda wait_s: self._stop.acquire(timeout=wait_s))
        self._print_new()

    def exit_code(self) -> int:
        """Print the query's error, if it has failed, or the losses of this run, and return the exit code."""
        if self._query.exception() is not None:
            return self._print_failure()
        head, before = self._head(), self._before
        if gaps := sum(head.gaps.values()) - sum(before.gaps.values()):
            losses = describe_losses(sum(head.lost.values()) - sum(before.lost.values()), gaps)
            click.echo(f"{self.label}{losses}: 'bulltask pipeline gaps' lists them", err=True)
            return EXIT_LOST
        return 0

    def _head(self) -> BatchRecord:
        return last_record(self._pipeline.lake) or BatchRecord()

    def _print_new(self) -> None:
        for record in records_after(self._pipeline.lake, self._shown):
            self._shown = record.number
            click.echo(f"{self.label}{_batch_line(record)}", err=True)

    def _print_failure(self) -> int:
        text = str(self._query.exception())
        echo(f"Error: {self.label}{_first_line(text)}", err=True)
        return EXIT_LOST_FAIL if "[BULLTASK_EVENTS_LOST]" in text else 1


def _batch_line(record: BatchRecord) -> str:
    lost, gaps, events = (
        sum(getattr(queue, name) for queue in record.queues.values()) for name in ("lost", "gaps", "events")
    )
    took = sum(record.steps_ms.values()) / 1000
    losses = f", {lost:,} LOST" if lost else ", an unknown number LOST" if gaps else ""
    return f"batch {record.number:,}: {pluralize(events, 'event')} in {took:.1f} s{losses}"


def _first_line(text: str) -> str:
    """Return the most informative line: bulltask's error with its code, or else the exception of a traceback."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line[line.index("[BULLTASK_") :] for line in lines if "[BULLTASK_" in line]
    exceptions = [line.removeprefix("bulltask.errors.") for line in _EXCEPTION.findall(text)]
    return (errors or exceptions[-1:] or lines or ["the pipeline has failed"])[0]


@click.command("status", short_help="Show how far the lake lags behind the queues.")
@lake_option(extra="spark")
@source_options
@brokers_option
@json_option
def status_command(*, lake: Lake, as_json: bool, **options: Any) -> None:
    """Show how far the lake lags behind the queues, and the time until Redis trims unread events (headroom).

    Does not require Java.
    """
    from bulltask.spark.source.streams import pipeline_status  # noqa: PLC0415 - slow

    sources = sources_of(options)
    statuses = [pipeline_status(lake.of_broker(source.broker), source.options) for source in sources]
    if as_json:
        values = to_json(statuses)
        print_json(values if options["brokers"] else values[0])
    else:
        echo("\n\n".join("\n".join(_status_lines(lake, status)) for status in statuses))


def _status_lines(lake: Lake, status: PipelineStatus) -> Iterator[str]:
    try:
        lake.check()
        yield f"lake          {status.root}"
    except LakeError:
        yield f"lake          {status.root}, does not exist yet: 'bulltask pipeline run' creates it"
    if status.broker:
        yield f"broker        {status.broker}"
    elif others := ",".join(one.broker for one in lake.of_all_brokers()[1:]):
        yield f"others        --brokers {others} shows the status of these brokers"
    writer = "no process on this machine" if status.writer_pid is None else f"process {status.writer_pid}"
    yield f"written by    {writer}"
    if status.written_at is None:
        yield "batches       none yet"
    else:
        yield f"batches       {status.batches:,}, the last at {status.written_at:%Y-%m-%d %H:%M:%S} UTC"
        yield f"last batch    {pluralize(status.events, 'event')} in {status.batch_s:.1f} s"
        yield f"open jobs     {pluralize(status.open_job_events, 'event')} kept for the next batch"
    in_gaps = f" in {pluralize(status.gaps, 'gap')}" if status.gaps else ""
    yield f"lost events   {f'{status.lost:,}' if status.lost or not status.gaps else 'an unknown number'}{in_gaps}"
    if status.redis_error:
        yield f"Redis         {status.redis_error}"
    if status.queues:
        yield ""
        yield as_table(
            ("queue", "last event", "lag", "lag (s)", "stream", "headroom", "lost"),
            list(map(_status_row, status.queues)),
        )
    yield from _skipped_queue_lines(status.skipped)


def _skipped_queue_lines(skipped: Sequence[SkippedQueue]) -> Iterator[str]:
    """Yield the lines that list skipped queues."""
    if skipped:
        yield f"\n{pluralize(len(skipped), 'queue')} skipped and not recorded:"
        yield from (f"  {in_one_line(queue.queue)}: {in_one_line(queue.reason, 1_000)}" for queue in skipped)


def _status_row(queue: QueueStatus) -> tuple[str, ...]:
    return (
        queue.queue,
        queue.last_id or "-",
        "-" if queue.lag_events is None else f"{queue.lag_events:,}",
        "-" if queue.lag_s is None else f"{queue.lag_s:,.1f}",
        "-" if queue.stream_limit is None else f"{queue.stream_length:,} of {queue.stream_limit:,}",
        "-" if queue.headroom_s is None else f"{queue.headroom_s:,.0f} s",
        f"{queue.lost:,}" if queue.lost or not queue.gaps else "unknown",
    )


_MIN_VERSIONS: Final = {
    "java": (17,),
    "pyspark": (4, 2, 1),
    "pyarrow": (18,),
    "numpy": (1, 26),
    "hiredis": (3,),
    "redis": (7,),
}


@dataclass(frozen=True, slots=True)
class Requirement:
    """A required program or package: its version, ``None`` if missing, and how to fix it, ``None`` if it is fine."""

    name: str
    version: str | None
    advice: str | None


@click.command("doctor", short_help="Check the installation, Redis, and the retention of event streams.")
@source_options
@duration_option("--trigger", default="10s", text="Interval between batches.")
@duration_option("--batch-duration", default="5s", text="Duration of a batch.")
@duration_option("--outage", default="0s", text="Longest pipeline downtime that must not cause a loss of events.")
@click.option(
    "--sizes", "show_sizes", is_flag=True, help="Print the recommended stream lengths for typical loads, and exit."
)
@json_option
@click.pass_context
def doctor_command(
    ctx: click.Context,
    /,
    *,
    trigger: float,
    batch_duration: float,
    outage: float,
    show_sizes: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Check that the required software is installed, that Redis is healthy (as 'bulltask doctor' does), and that the
    queues' event streams are long enough.

    BullMQ keeps only the newest events of a queue (streams.events.maxLen). Events that are trimmed before the pipeline
    has read them are lost. Therefore, a stream should keep the events of two batches (twice the sum of trigger interval
    and batch duration) or of the longest downtime (--outage), whichever is longer.

    Exit codes: 0 (all checks passed), 1 (a requirement is missing, something is broken or a warning, such as a
    stream that is too short, or a queue cannot be recorded).
    """
    if show_sizes:
        click.echo(as_table(SIZE_COLUMNS, list(stream_sizes())))
        return
    need = RetentionNeed(trigger, batch_duration, outage)
    source = source_of(options)
    requirements = [_java(), *map(_package, ("pyspark", "pyarrow", "numpy", "hiredis"))]
    redis, streams, skipped = _check_redis(source)
    requirements.append(redis)
    diagnosis, findings = _diagnosis(ctx, options, streams, need)
    is_healthy = diagnosis.worst in {None, "notice"}
    ok = is_healthy and not skipped and all(not requirement.advice for requirement in requirements)
    document = {
        "ok": ok,
        "required_s": need.seconds,
        "requirements": to_json(requirements),
        "queues": [
            {
                "queue": stream.queue,
                "length": stream.length,
                "max_length": stream.limit,
                "events_per_s": stream.rate,
                "retention_s": stream.retention_s,
                "enough": stream.is_enough(need),
                "recommended_max_length": stream.recommended_limit(need),
            }
            for stream in streams
        ],
        "findings": [it.to_json() for it in findings],
        "not_examined": list(diagnosis.not_examined),
        "skipped": to_json(skipped),
    }
    if as_json:
        print_json(document)
    else:
        from bulltask.cli.doctor import finding_lines  # noqa: PLC0415 - slow

        lines = _doctor_lines(document), finding_lines(diagnosis, findings), _skipped_queue_lines(skipped)
        echo("\n".join(chain(*lines)))
    ctx.exit(0 if ok else 1)


def _diagnosis(
    ctx: click.Context, options: dict[str, Any], streams: Sequence[StreamRetention], need: RetentionNeed
) -> tuple[Diagnosis, list[Finding]]:
    """Return what ``bulltask doctor`` finds in the server and in these streams."""
    from bulltask.cli.doctor import with_this_server  # noqa: PLC0415 - slow
    from bulltask.queue.doctor import examine_streams  # noqa: PLC0415 - slow

    with closing(load_app_or_broker(ctx, options)) as app:
        diagnosis = examine_streams(app._broker, streams, need, lambda name: app.queue(name).context)
        return diagnosis, [with_this_server(finding, ctx, options, app) for finding in diagnosis.findings]


def _java() -> Requirement:
    home = environ.get("JAVA_HOME")
    program = str(Path(home, "bin", "java")) if home else "java"
    try:
        output = subprocess.run([program, "-version"], capture_output=True, text=True, check=True, timeout=60).stderr  # noqa: S603 - the user's Java
        found = output.split('"')[1] if '"' in output else output.strip()
    except (OSError, subprocess.SubprocessError):
        found = None
    return _check_version("java", found, "install a JRE, 17 or newer, or set JAVA_HOME to one")


def _package(name: str) -> Requirement:
    found = None
    with suppress(PackageNotFoundError):
        found = version(name)
    return _check_version(name, found, "pip install 'bulltask[spark]'")


def _check_version(name: str, installed: str | None, advice: str) -> Requirement:
    numbers = (installed or "").split("+", maxsplit=1)[0].split(".")
    is_enough = tuple(int(number) for number in numbers if number.isdecimal()) >= _MIN_VERSIONS[name]
    return Requirement(name, installed, None if is_enough else advice)


def _check_redis(source: QueueSource) -> tuple[Requirement, list[StreamRetention], Sequence[SkippedQueue]]:
    """Return the server, the event streams of its queues, and the queues that cannot be recorded."""
    from bulltask.spark.source.connection import Connection  # noqa: PLC0415 - slow
    from bulltask.spark.source.options import EventsOptions, read_options  # noqa: PLC0415 - slow
    from bulltask.spark.source.streams import observe_streams  # noqa: PLC0415 - slow

    options = read_options(EventsOptions, {"table": "events", **source.options, "skipUnsupportedQueues": "true"})
    try:
        with Connection(options.config) as connection:
            server_version = ".".join(map(str, connection.server_info().version)) or "unknown"
            observed = observe_streams(connection, options)
    except BulltaskError as exc:
        return Requirement("redis", None, f"{options.config.broker_url}: {exc}"), [], []
    advice = "before Redis 7.0, losses are detected but cannot be counted: use Redis 7 or Valkey"
    counted = all(state is None or state.added is not None for _, _, state in observed.streams)
    if server_version == "unknown":
        redis = Requirement("redis", server_version, None if counted else advice)
    else:
        redis = _check_version("redis", server_version, advice)
    return redis, [stream for _, stream, _ in observed.streams], observed.skipped


def _doctor_lines(document: Mapping[str, Any]) -> Iterator[str]:
    needed = {name: f">= {'.'.join(map(str, numbers))}" for name, numbers in _MIN_VERSIONS.items()}
    requirements, queues = document["requirements"], document["queues"]
    rows = [(it["name"], it["version"] or "missing", needed[it["name"]], it["advice"] or "") for it in requirements]
    yield as_table(("", "found", "needed", ""), rows)
    formula = "max(2 x (trigger + batch duration), outage)"
    yield f"\nAn event stream should keep events for {document['required_s']:,.0f} s: {formula}."
    if queues:
        yield as_table(
            ("queue", "events now", "maxLen", "events/s", "retention", "verdict"), list(map(_stream_row, queues))
        )
    elif requirements[-1]["version"] is not None:  # Redis is available
        yield "No queues found."


def _stream_row(stream: Mapping[str, Any]) -> tuple[str, ...]:
    rate, retention_s, enough = (stream[name] for name in ("events_per_s", "retention_s", "enough"))
    short = f"too short: set streams.events.maxLen to {stream['recommended_max_length'] or 0:,}"
    return (
        stream["queue"],
        f"{stream['length']:,}",
        f"{stream['max_length']:,}",
        "-" if rate is None else f"{rate:,.1f}",
        "-" if retention_s is None else f"{retention_s:,.0f} s",
        "no events yet" if enough is None else "long enough" if enough else short,
    )


@click.command("snapshot", short_help="Copy finished jobs that are in Redis to the lake.")
@lake_option(extra="spark")
@source_options
@click.option("--states", default="completed,failed", show_default=True, help="States of the jobs, comma-separated.")
@click.option("--since", type=moment, metavar="TIME", help="Only jobs that finished at this time (UTC) or later.")
@brokers_option
@spark_options
def snapshot_command(*, lake: Lake, states: str, since: datetime | None, **options: Any) -> None:
    """Copy finished jobs that are in Redis to bronze.jobs, with their data, options and stack traces. --states selects
    jobs in other states.

    'replay' and 'backfill' use these copies for jobs that Redis has since removed.
    """
    sources = sources_of(options)
    spark = open_session(options)
    from bulltask.spark.repair import snapshot  # noqa: PLC0415 - slow

    names = parse_names(states, "--states")
    jobs = sum(snapshot(spark, lake, source.options, states=names, since=since) for source in sources)
    click.echo(f"{pluralize(jobs, 'job')} written to bronze.jobs")


@click.command("backfill", short_help="Add jobs whose events were lost, from Redis and snapshots.")
@lake_option(extra="spark")
@source_options
@click.option(
    "--since", type=moment, metavar="TIME", required=True, help="Only gaps that end at this time (UTC) or later."
)
@click.option("--until", type=moment, metavar="TIME", required=True, help="Only gaps that begin before this time.")
@brokers_option
@spark_options
def backfill_command(*, lake: Lake, since: datetime, until: datetime, **options: Any) -> None:
    """Fill gaps in the silver tables with jobs from Redis and from snapshots.

    A gap is a range of lost events; 'gaps' lists them. Jobs that finished in a gap are added with their last attempt
    only. Jobs that are neither in Redis nor in a snapshot cannot be added. Running the command again never adds
    a job twice.
    """
    sources = sources_of(options)
    if until <= since:
        raise click.UsageError("--until must be later than --since")
    lake.check()  # check before starting a JVM
    spark = open_session(options)
    from bulltask.spark.repair import backfill  # noqa: PLC0415 - slow

    for source in sources:
        queues = None if source.queues == "*" else parse_names(source.queues, "--queues")
        one = lake.of_broker(source.broker)
        result = backfill(spark, one, source.options, since=since, until=until, queues=queues)
        label = f"{source.broker}: " if source.broker else ""
        click.echo(f"{label}{pluralize(result.gaps, 'gap')} with at least {pluralize(result.lost, 'lost event')}")
        if result.gaps:
            click.echo(
                f"{pluralize(result.examined, 'finished job')} examined, {result.jobs:,} added to silver.jobs; "
                f"jobs were added for {pluralize(result.backfilled_gaps, 'gap')}"
            )


@click.command("replay", short_help="Send finished jobs again.")
@lake_option(extra="spark")
@redis_options
@click.option("--where", "condition", required=True, metavar="SQL", help="SQL condition on the columns of silver.jobs.")
@click.option("--queue", help="Only jobs in this queue (default: all queues).")
@click.option("--limit", type=click.IntRange(1), help="Maximum number of jobs (default: all).")
@click.option("--yes", is_flag=True, help="Send the jobs.")
@brokers_option
@spark_options
def replay_command(
    *, lake: Lake, condition: str, queue: str | None, limit: int | None, yes: bool, **options: Any
) -> None:
    """Send finished jobs again, with the same name, data and options but new ids. Without --yes, only list them.

    A job's delay, parent, schedule and expiry are not copied. Running the command again never adds a job
    twice. Jobs whose data is neither in Redis nor in a snapshot cannot be sent; the command lists them.

    Example: --where "name = 'charge' and state = 'failed' and finished_at >= '2026-11-21 14:00'"
    """
    sources = sources_of(options)
    lake.check()  # check before starting a JVM
    spark = open_session(options)
    from bulltask.spark.replay import ReplaySelection, replay  # noqa: PLC0415 - slow

    selection = ReplaySelection(condition, queue, limit)
    for source in sources:
        if source.broker:
            click.echo(f"{source.broker}:")
        _show_replay(replay(spark, lake.of_broker(source.broker), source.options, selection, dry_run=not yes))


def _show_replay(result: ReplayResult) -> None:
    click.echo(f"{pluralize(result.selected, 'finished job')} selected, {result.ready:,} can be sent")
    if result.open_again:
        click.echo(f"Skipped, because they were retried and have not finished: {result.open_again:,}")
    if result.unknown:
        more = ["..."] if result.unknown > len(result.unknown_ids) else []
        named = ", ".join([*map(in_one_line, result.unknown_ids), *more])
        click.echo(f"Skipped, because neither Redis nor a snapshot has their data: {result.unknown:,}, {named}")
    if result.sample:
        heads = ("queue", "job_id", "name", "state", "failed_reason", "data")
        rows = [[in_one_line(str(row[name] or ""), 60) for name in heads] for row in result.sample]
        click.echo("\n" + as_table(heads, rows))
    if result.dry_run:
        click.echo("\nDry run: nothing was sent. Run the command again with --yes to send these jobs.")
    else:
        click.echo(
            f"\n{pluralize(result.added, 'job')} added, {result.duplicates:,} duplicates; write id {result.write_id}"
        )


@click.command("enqueue", short_help="Add a job for each distinct row of a Parquet file.")
@click.argument("file", metavar="FILE.parquet")
@redis_options
@click.option("--queue", required=True, help="Queue to add the jobs to.")
@click.option("--name", help="Task name of all jobs.")
@click.option("--name-col", help="Column with the task name of each job.")
@click.option("--data-cols", required=True, help="Columns that become the job's data, comma-separated.")
@click.option("--id-col", help="Column with the job ids (default: derived from the row).")
@click.option(
    "--write-id", help="Id of the write: rows that were already added with this id are skipped (default: a new id)."
)
@click.option(
    "--on-nan", type=click.Choice(["error", "null"]), default="error", show_default=True, help="For NaN and Infinity."
)
@click.option(
    "--rejected",
    metavar="DIR",
    help="Add the jobs of all valid rows, and Parquet files with the others to this directory (default: an invalid row "
    "is an error).",
)
@spark_options
def enqueue_command(
    *,
    file: str,
    queue: str,
    name: str | None,
    name_col: str | None,
    data_cols: str,
    id_col: str | None,
    rejected: str | None,
    **options: Any,
) -> None:
    """Add one job to a queue for each distinct row of a Parquet file or a directory of them.

    However often Spark retries a task, each job is added once. Rows with the same name and data become one
    job; with --id-col, rows with the same id do.

    The command prints the id of the write. Pass it to 'gather' to read the results of the jobs, or as --write-id to
    run the command again after an error.
    """
    if (name is None) == (name_col is None):
        raise click.UsageError("pass either --name or --name-col")
    source, write_id = source_of(options), options["write_id"]
    spark = open_session(options)
    from bulltask.spark import enqueue  # noqa: PLC0415 - slow

    rows, data = spark.read.parquet(file), parse_names(data_cols, "--data-cols")
    for column in filter(None, (*data, name_col, id_col)):
        if column not in rows.columns:
            hint = did_you_mean(column, rows.columns)
            raise click.ClickException(f"{file} has no column {column!r}{hint}; it has {', '.join(rows.columns)}")
    given: Any = {"on_nan": options["on_nan"], "on_invalid_rows": "error" if rejected is None else "collect"}
    given |= {} if write_id is None else {"write_id": write_id}
    names = str(name) if name_col is None else rows[name_col]
    ids = None if id_col is None else rows[id_col].cast("string")
    result = enqueue(rows, queue, name=names, data=data, job_id=ids, **source.keywords, **given)
    if rejected is not None and result.rejected_rows is not None and result.rejected:
        result.rejected_rows.write.mode("append").parquet(rejected)
        click.echo(f"{pluralize(result.rejected, 'invalid row')} in {rejected}; see the column rejected_reason")
    click.echo(
        f"{pluralize(result.rows, 'row')}: {pluralize(result.added, 'job')} added, {result.duplicates:,} duplicates"
    )
    click.echo(f"write id {result.write_id}")


@click.command("gather", short_help="Write the results of the jobs added by 'enqueue' to Parquet.")
@click.argument("write_id")
@redis_options
@click.option("--queue", required=True, help="Queue of the jobs.")
@click.option("--out", required=True, metavar="DIR", help="Directory for the Parquet files; must not exist.")
@duration_option(
    "--wait", default="0", show_default=False, text="How long to wait for unfinished jobs (default: do not wait)."
)
@spark_options
def gather_command(*, write_id: str, queue: str, out: str, wait: float, **options: Any) -> None:
    """Write the results of an 'enqueue' to Parquet. WRITE_ID is the id that 'enqueue' printed.

    There is a row for each job, with id, state, return_value, failed_reason and finished_at. The state is completed,
    failed, unfinished, or missing if Redis no longer has the job.
    """
    source = source_of(options)
    spark = open_session(options)
    from bulltask.spark import EnqueueResult, gather  # noqa: PLC0415 - slow

    write = EnqueueResult(write_id, queue, rows=1, added=0, duplicates=0, seconds=0.0, partitions=0)
    gather(write, queue, wait=wait, **source.keywords).write.parquet(out)
    counts = spark.read.parquet(out).groupBy("state").count().orderBy("state").collect()
    click.echo(as_table(("state", "jobs"), [(row["state"], f"{row['count']:,}") for row in counts]))
