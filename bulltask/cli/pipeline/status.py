"""``bulltask pipeline status``: how far the tables are behind the queues."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bulltask.cli.pipeline.options import root_option, source_of, source_options
from bulltask.cli.pipeline.tables import as_table, set_aside_lines
from bulltask.errors import LakeError
from bulltask.lake.layout import Layout
from bulltask.lake.plural import counted

if TYPE_CHECKING:
    from bulltask.lake.status import PipelineStatus, QueueStatus

__all__ = ["command"]


@click.command("status")
@root_option
@source_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def command(ctx: click.Context, /, *, root: Path, as_json: bool, **where: Any) -> None:
    """Show how far the tables are behind the queues, and how long the queues' rings hold what is not read.

    It needs no Java.
    """
    from bulltask.spark.source.status import pipeline_status  # noqa: PLC0415 - slow

    found = pipeline_status(Layout(root), source_of(ctx, where).texts)
    if as_json:
        click.echo(json.dumps(asdict(found), indent=2, default=datetime.isoformat))
    else:
        click.echo("\n".join(_shown(found)))


def _shown(found: PipelineStatus) -> Iterator[str]:
    try:
        Layout(found.root).check()
        yield f"lake          {found.root}"
    except LakeError:
        yield f"lake          {found.root}, where there is none yet: 'bulltask pipeline run' makes it"
    yield f"fed by        {'nobody on this machine' if found.feeder is None else f'process {found.feeder}'}"
    if found.written_at is None:
        yield "batches       none yet"
    else:
        yield f"batches       {found.batches:,}, the last at {found.written_at:%Y-%m-%d %H:%M:%S} UTC"
        yield f"last batch    {counted(found.events, 'event')} in {found.batch_s:.1f} s"
        yield f"open jobs     {counted(found.carried, 'event')} of them kept for the next batch"
    yield f"lost events   {found.lost:,}"
    if found.redis_error:
        yield f"Redis         {found.redis_error}"
    if found.queues:
        yield ""
        yield as_table(
            ("queue", "last event", "behind", "seconds", "ring", "holds for", "lost"), list(map(_row, found.queues))
        )
    yield from set_aside_lines(found.set_aside)


def _row(one: QueueStatus) -> tuple[str, ...]:
    return (
        one.queue,
        one.last_id or "-",
        "-" if one.lag_events is None else f"{one.lag_events:,}",
        "-" if one.lag_s is None else f"{one.lag_s:,.1f}",
        "-" if one.ring_limit is None else f"{one.ring_length:,} of {one.ring_limit:,}",
        "-" if one.headroom_s is None else f"{one.headroom_s:,.0f} s",
        f"{one.lost:,}",
    )
