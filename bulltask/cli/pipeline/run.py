"""``bulltask pipeline run``: record the events of queues in the lake until a signal stops it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from bulltask.cli.options import lake_option, seconds
from bulltask.cli.pipeline.options import (
    EXIT_LOST,
    EXIT_LOST_FAIL,
    QueueSource,
    open_session,
    source_of,
    source_options,
    spark_options,
)
from bulltask.cli.terminal import echo
from bulltask.lake.formatting import pluralize

if TYPE_CHECKING:
    from bulltask.lake.ledger import BatchRecord, Ledger

__all__ = ["command"]

_POLL_S: Final = 0.25

_TRACEBACK: Final = "Traceback (most recent call last):"


@click.command("run", short_help="Record the events of queues in the bronze and silver tables.")
@lake_option
@source_options
@click.option("--once", is_flag=True, help="Record the currently available events, and exit.")
@click.option(
    "--on-loss",
    type=click.Choice(["gap", "fail"]),
    default="gap",
    show_default=True,
    help="If events were trimmed before they were read: record a gap and continue, or fail.",
)
@click.option(
    "--trigger", type=seconds, metavar="DURATION", default="10s", show_default=True, help="Interval between batches."
)
@click.option(
    "--starting",
    type=click.Choice(["earliest", "latest"]),
    default="earliest",
    show_default=True,
    help="Where to begin if the lake is empty: at the oldest event in Redis, or at the next new event.",
)
@click.option(
    "--open-job-timeout",
    type=seconds,
    metavar="DURATION",
    default="7d",
    show_default=True,
    help="Time without events after which an unfinished job is written with its last state.",
)
@click.option(
    "--max-events-per-trigger",
    type=click.IntRange(1),
    default=200_000,
    show_default=True,
    help="Maximum number of events in a batch, across all queues.",
)
@click.option(
    "--metrics-port", type=click.IntRange(1, 65535), help="Port for Prometheus metrics (default: no metrics)."
)
@click.option("--metrics-host", default="127.0.0.1", show_default=True, help="Address to bind the metrics port to.")
@spark_options
@click.pass_context
def command(
    ctx: click.Context,
    /,
    *,
    lake: Path,
    once: bool,
    on_loss: str,
    master: str | None,
    conf: tuple[str, ...],
    **options: Any,
) -> None:
    """Record the events of queues in the bronze and silver tables of the lake, each event exactly once.

    TERM and INT stop the pipeline after the current batch; a second signal stops it immediately. The next run always
    continues from the last committed batch.

    Exit codes: 0 (no events were lost), 1 (an error), 3 (events were lost, and the gaps are recorded in bronze.gaps), 4
    (events were lost, and --on-loss is fail).
    """
    from bulltask.lake.layout import Layout  # noqa: PLC0415 - slow
    from bulltask.lake.ledger import Ledger  # noqa: PLC0415 - slow

    source = source_of(ctx, options)
    spark = open_session(master, conf)
    # After the session has been opened, as Spark installs its own handler for INT.
    with _stop_signals() as stop:
        ledger = Ledger(Layout(lake))
        before = _lost(ledger.head())
        pipeline = _pipeline(spark, lake, source, on_loss, options)
        progress = _Progress(ledger)
        query = pipeline.run(available_now=once)
        click.echo(f"recording events of {'all queues' if source.queues == '*' else source.queues} in {lake}", err=True)
        while query.isActive and not stop.acquire(timeout=_POLL_S):
            progress.print_new()
        _end(query, stop)
        progress.print_new()
    ctx.exit(_exit_code(query, _lost(ledger.head()) - before))


def _pipeline(spark: Any, lake: Path, source: QueueSource, on_loss: Any, options: Mapping[str, Any]) -> Any:
    from bulltask.spark import Pipeline  # noqa: PLC0415 - slow

    port = options["metrics_port"]
    metrics: Any = {} if port is None else {"metrics_port": port, "metrics_host": options["metrics_host"]}
    return Pipeline(
        spark,
        lake,
        queues=source.queues,
        url=source.url,
        prefix=source.prefix,
        queue_hash_tag=source.hash_tag,
        trigger=f"{round(options['trigger'] * 1000)} milliseconds",
        on_loss=on_loss,
        open_job_timeout=options["open_job_timeout"],
        max_events_per_trigger=options["max_events_per_trigger"],
        starting=options["starting"],
        **metrics,
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


class _Progress:
    """Prints a line for each new batch of the ledger."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._shown = ledger.head()

    def print_new(self) -> None:
        head = self._ledger.head()
        if head is not None and (self._shown is None or head.ingest_id != self._shown.ingest_id):
            self._shown = head
            click.echo(_batch_line(head), err=True)


def _batch_line(head: BatchRecord) -> str:
    lost = sum(queue.lost for queue in head.queues.values())
    events = sum(queue.events for queue in head.queues.values())
    took = sum(head.steps_ms.values()) / 1000
    return f"batch {head.number:,}: {pluralize(events, 'event')} in {took:.1f} s" + (f", {lost:,} LOST" if lost else "")


def _end(query: Any, stop: threading.Semaphore) -> None:
    """Stop an active query after its batch, or immediately on a second signal. No events are lost."""
    if not query.isActive:
        return
    from bulltask.spark.pipeline import stop_after_batch  # noqa: PLC0415 - slow

    click.echo("stopping after this batch", err=True)
    stop_after_batch(query, lambda wait_s: stop.acquire(timeout=wait_s))


def _exit_code(query: Any, lost: int) -> int:
    """Print the query's error, if it has failed, and return the exit code."""
    failure = query.exception()
    if failure is not None:
        text = str(failure)
        echo(f"Error: {_first_line(text)}", err=True)
        return EXIT_LOST_FAIL if "[BULLTASK_EVENTS_LOST]" in text else 1
    if lost:
        click.echo(f"{pluralize(lost, 'event')} lost: 'bulltask pipeline gaps' lists them", err=True)
    return EXIT_LOST if lost else 0


def _first_line(text: str) -> str:
    """Return the most informative line: bulltask's error with its code, or else the exception of a traceback."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line[line.index("[BULLTASK_") :] for line in lines if "[BULLTASK_" in line]
    return (errors or _exceptions(text)[-1:] or lines or ["the pipeline has failed"])[0]


def _exceptions(text: str) -> list[str]:
    """Return the exceptions of all tracebacks: the first line of each that is not indented."""
    exceptions, in_traceback = [], False
    for line in text.split("\n"):
        if line.endswith(_TRACEBACK):
            in_traceback = True
        elif in_traceback and line and line[0] not in " \t":
            exceptions.append(line.removeprefix("bulltask.errors."))
            in_traceback = False
    return exceptions


def _lost(head: BatchRecord | None) -> int:
    return 0 if head is None else sum(head.lost.values())
