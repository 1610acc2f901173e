"""``bulltask pipeline status``: show how far the lake lags behind the queues."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from bulltask.cli.options import lake_option
from bulltask.cli.pipeline.options import source_of, source_options
from bulltask.cli.terminal import as_table, echo, in_one_line
from bulltask.jobs.errors import LakeError
from bulltask.lake.formatting import pluralize
from bulltask.lake.layout import Layout

if TYPE_CHECKING:
    from bulltask.lake.status import PipelineStatus, QueueStatus, SkippedQueue

__all__ = ["command", "skipped_queue_lines"]

_REASON_WIDTH: Final = 1_000


@click.command("status", short_help="Show how far the lake lags behind the queues.")
@lake_option
@source_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def command(ctx: click.Context, /, *, lake: Path, as_json: bool, **connection: Any) -> None:
    """Show how far the lake lags behind the queues, and the time until Redis trims unread events (headroom).

    Does not require Java.
    """
    from bulltask.spark.source.status import pipeline_status  # noqa: PLC0415 - slow

    status = pipeline_status(Layout(lake), source_of(ctx, connection).options)
    if as_json:
        click.echo(json.dumps(asdict(status), indent=2, default=datetime.isoformat))
    else:
        echo("\n".join(_lines(status)))


def _lines(status: PipelineStatus) -> Iterator[str]:
    try:
        Layout(status.root).check()
        yield f"lake          {status.root}"
    except LakeError:
        yield f"lake          {status.root}, does not exist yet: 'bulltask pipeline run' creates it"
    writer = "no process on this machine" if status.writer_pid is None else f"process {status.writer_pid}"
    yield f"written by    {writer}"
    if status.written_at is None:
        yield "batches       none yet"
    else:
        yield f"batches       {status.batches:,}, the last at {status.written_at:%Y-%m-%d %H:%M:%S} UTC"
        yield f"last batch    {pluralize(status.events, 'event')} in {status.batch_s:.1f} s"
        yield f"open jobs     {pluralize(status.open_job_events, 'event')} kept for the next batch"
    yield f"lost events   {status.lost:,}"
    if status.redis_error:
        yield f"Redis         {status.redis_error}"
    if status.queues:
        yield ""
        yield as_table(
            ("queue", "last event", "lag", "lag (s)", "stream", "headroom", "lost"), list(map(_row, status.queues))
        )
    yield from skipped_queue_lines(status.skipped)


def skipped_queue_lines(skipped: Sequence[SkippedQueue]) -> Iterator[str]:
    """Yield the lines that list skipped queues."""
    if skipped:
        yield f"\n{pluralize(len(skipped), 'queue')} skipped and not recorded:"
        yield from (f"  {in_one_line(queue.queue)}: {in_one_line(queue.reason, _REASON_WIDTH)}" for queue in skipped)


def _row(queue: QueueStatus) -> tuple[str, ...]:
    return (
        queue.queue,
        queue.last_id or "-",
        "-" if queue.lag_events is None else f"{queue.lag_events:,}",
        "-" if queue.lag_s is None else f"{queue.lag_s:,.1f}",
        "-" if queue.stream_limit is None else f"{queue.stream_length:,} of {queue.stream_limit:,}",
        "-" if queue.headroom_s is None else f"{queue.headroom_s:,.0f} s",
        f"{queue.lost:,}",
    )
