"""``bulltask pipeline run``: the stream that feeds the tables, until it is told to stop."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from bulltask.cli.pipeline.options import (
    EXIT_LOST,
    EXIT_LOST_FAIL,
    Source,
    open_session,
    root_option,
    seconds,
    source_of,
    source_options,
    spark_options,
)
from bulltask.lake.plural import counted

if TYPE_CHECKING:
    from bulltask.lake.ledger import BatchRecord, Ledger

__all__ = ["command"]

_LOOK_S: Final = 0.25

_RAISED: Final = re.compile(r"Traceback \(most recent call last\):\n(?:[ \t].*\n|\n)*(\S.*)")
"""What was raised: the first line of a traceback that is not indented."""


@click.command("run")
@root_option
@source_options
@click.option("--once", is_flag=True, help="End when all is read that is there now.")
@click.option(
    "--on-loss",
    type=click.Choice(["gap", "fail"]),
    default="gap",
    show_default=True,
    help="When events were lost: record it and go on, or stop.",
)
@click.option(
    "--trigger", type=seconds, metavar="LENGTH", default="10s", show_default=True, help="Time between batches."
)
@click.option(
    "--starting",
    type=click.Choice(["earliest", "latest"]),
    default="earliest",
    show_default=True,
    help="Where a new lake begins.",
)
@click.option(
    "--max-open",
    type=seconds,
    metavar="LENGTH",
    default="7d",
    show_default=True,
    help="Time without an event after which a job is written as it was seen last.",
)
@click.option(
    "--max-events",
    type=click.IntRange(1),
    default=200_000,
    show_default=True,
    help="Events of a batch, of all queues together.",
)
@click.option(
    "--metrics-port", type=click.IntRange(1, 65535), help="TCP port of metrics for Prometheus; off if not given."
)
@click.option("--metrics-host", default="127.0.0.1", show_default=True, help="Address of the metrics.")
@spark_options
@click.pass_context
def command(
    ctx: click.Context,
    /,
    *,
    root: Path,
    once: bool,
    on_loss: str,
    master: str | None,
    conf: tuple[str, ...],
    **more: Any,
) -> None:
    """Feed the tables of bronze and silver in --root from the queues' events, each event exactly once.

    TERM and INT end it behind the batch that is being written, a second one at once. However it ends, the next run goes
    on where it stopped.

    Exit codes: 0 all events were read, 3 some were lost and are recorded in bronze.gaps, 4 some were lost and --on-loss
    is fail, 1 an error.
    """
    from bulltask.lake.layout import Layout  # noqa: PLC0415 - slow
    from bulltask.lake.ledger import Ledger  # noqa: PLC0415 - slow

    source = source_of(ctx, more)
    spark = open_session(master, conf)
    # Behind the session, which sets a handler of its own for INT.
    with _asked_to_end() as asked:
        ledger = Ledger(Layout(root))
        before = _lost(ledger.head())
        pipeline = _pipeline(spark, root, source, on_loss, more)
        teller = _Teller(ledger)
        query = pipeline.run(available_now=once)
        click.echo(f"feeding {root} from queues {source.queues}", err=True)
        while query.isActive and not asked.acquire(timeout=_LOOK_S):
            teller.look()
        _end(query, asked)
        teller.look()
    ctx.exit(_verdict(query, _lost(ledger.head()) - before))


def _pipeline(spark: Any, root: Path, source: Source, on_loss: Any, more: Mapping[str, Any]) -> Any:
    from bulltask.spark import Pipeline  # noqa: PLC0415 - slow

    port = more["metrics_port"]
    metrics: Any = {} if port is None else {"metrics_port": port, "metrics_host": more["metrics_host"]}
    return Pipeline(
        spark,
        root,
        queues=source.queues,
        url=source.url,
        prefix=source.prefix,
        queue_hash_tag=source.hash_tag,
        trigger=f"{round(more['trigger'] * 1000)} milliseconds",
        on_loss=on_loss,
        max_open=more["max_open"],
        max_events_per_trigger=more["max_events"],
        starting=more["starting"],
        **metrics,
    )


@contextmanager
def _asked_to_end() -> Iterator[threading.Semaphore]:
    """A semaphore that is released whenever somebody asks this process to end."""
    asked = threading.Semaphore(0)
    ends = (signal.SIGTERM, signal.SIGINT)

    def ask(*_: object) -> None:
        asked.release()

    kept = {number: signal.signal(number, ask) for number in ends}
    try:
        yield asked
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


class _Teller:
    """Responsible for a line about each batch that is done while somebody looks."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger, self._shown = ledger, ledger.head()

    def look(self) -> None:
        """Tell of the last batch, unless that was done."""
        head = self._ledger.head()
        if head is not None and (self._shown is None or head.ingest != self._shown.ingest):
            self._shown = head
            click.echo(_told(head), err=True)


def _told(head: BatchRecord) -> str:
    lost = sum(queue.lost for queue in head.queues.values())
    events = sum(queue.events for queue in head.queues.values())
    took = sum(head.steps_ms.values()) / 1000
    return f"batch {head.number:,}: {counted(events, 'event')} in {took:.1f} s" + (f", {lost:,} LOST" if lost else "")


def _end(query: Any, asked: threading.Semaphore) -> None:
    """Stop a query that is still active, behind its batch; a second signal stops it at once, which loses nothing."""
    if not query.isActive:
        return
    from bulltask.spark.pipeline import stop_after_batch  # noqa: PLC0415 - slow

    click.echo("stopping behind this batch", err=True)
    stop_after_batch(query, lambda wait_s: asked.acquire(timeout=wait_s))


def _verdict(query: Any, lost: int) -> int:
    """The exit code; an error of the stream is told."""
    failure = query.exception()
    if failure is not None:
        text = str(failure)
        click.echo(f"Error: {_first_line(text)}", err=True)
        return EXIT_LOST_FAIL if "[BULLTASK_EVENTS_LOST]" in text else 1
    if lost:
        click.echo(f"{counted(lost, 'event')} lost: `bulltask pipeline gaps` says which", err=True)
    return EXIT_LOST if lost else 0


def _first_line(text: str) -> str:
    """The line that says most: bulltask's own, with its code, if there is one; else what a traceback ends with."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    own = [line[line.index("[BULLTASK_") :] for line in lines if "[BULLTASK_" in line]
    raised = [line.removeprefix("bulltask.errors.") for line in _RAISED.findall(text)]
    return (own or raised[-1:] or lines or ["the stream has failed"])[0]


def _lost(head: BatchRecord | None) -> int:
    return 0 if head is None else sum(head.lost.values())
