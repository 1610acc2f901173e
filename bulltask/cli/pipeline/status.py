"""``bulltask pipeline status``: show how far the lake is behind the queues."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bulltask.cli.options import root_option
from bulltask.cli.pipeline.options import source_of, source_options
from bulltask.cli.terminal import as_table
from bulltask.errors import LakeError
from bulltask.lake.formatting import pluralize
from bulltask.lake.layout import Layout

if TYPE_CHECKING:
    from bulltask.lake.status import PipelineStatus, QueueStatus, SkippedQueue

__all__ = ["command", "skipped_queue_lines"]


@click.command("status", short_help="Show how far the lake is behind the queues.")
@root_option
@source_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def command(ctx: click.Context, /, *, root: Path, as_json: bool, **where: Any) -> None:
    """Show how far the lake is behind the queues, and how long Redis will keep the events that were not read.

    Needs no Java.
    """
    from bulltask.spark.source.status import pipeline_status  # noqa: PLC0415 - slow

    found = pipeline_status(Layout(root), source_of(ctx, where).texts)
    if as_json:
        click.echo(json.dumps(asdict(found), indent=2, default=datetime.isoformat))
    else:
        click.echo("\n".join(_lines(found)))


def _lines(found: PipelineStatus) -> Iterator[str]:
    try:
        Layout(found.root).check()
        yield f"lake          {found.root}"
    except LakeError:
        yield f"lake          {found.root}, does not exist yet: 'bulltask pipeline run' creates it"
    yield f"written by    {'no process on this machine' if found.writer_pid is None else f'process {found.writer_pid}'}"
    if found.written_at is None:
        yield "batches       none yet"
    else:
        yield f"batches       {found.batches:,}, the last at {found.written_at:%Y-%m-%d %H:%M:%S} UTC"
        yield f"last batch    {pluralize(found.events, 'event')} in {found.batch_s:.1f} s"
        yield f"open jobs     {pluralize(found.open_job_events, 'event')} of them kept for the next batch"
    yield f"lost events   {found.lost:,}"
    if found.redis_error:
        yield f"Redis         {found.redis_error}"
    if found.queues:
        yield ""
        yield as_table(
            ("queue", "last event", "lag", "lag (s)", "stream", "headroom", "lost"), list(map(_row, found.queues))
        )
    yield from skipped_queue_lines(found.skipped)


def skipped_queue_lines(skipped: Sequence[SkippedQueue]) -> Iterator[str]:
    """Yield the lines that name queues which are not recorded."""
    if skipped:
        yield f"\n{pluralize(len(skipped), 'queue')} skipped, nothing of which is recorded:"
        yield from (f"  {one.queue}: {one.reason}" for one in skipped)


def _row(one: QueueStatus) -> tuple[str, ...]:
    return (
        one.queue,
        one.last_id or "-",
        "-" if one.lag_events is None else f"{one.lag_events:,}",
        "-" if one.lag_s is None else f"{one.lag_s:,.1f}",
        "-" if one.stream_limit is None else f"{one.stream_length:,} of {one.stream_limit:,}",
        "-" if one.headroom_s is None else f"{one.headroom_s:,.0f} s",
        f"{one.lost:,}",
    )
