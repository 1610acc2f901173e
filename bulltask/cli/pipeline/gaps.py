"""``bulltask pipeline gaps``: list lost events."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from bulltask.cli.options import lake_option, moment
from bulltask.cli.pipeline.options import EXIT_LOST
from bulltask.cli.terminal import as_table
from bulltask.lake.formatting import pluralize

if TYPE_CHECKING:
    from bulltask.lake.gaps import GapRow

__all__ = ["command"]


@click.command("gaps", short_help="List lost events.")
@lake_option
@click.option("--queues", default="*", show_default=True, help="Names of queues, comma-separated, or * for all.")
@click.option("--since", type=moment, metavar="TIME", help="Only gaps that end at this time (UTC) or later.")
@click.option("--until", type=moment, metavar="TIME", help="Only gaps that begin before this time.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def command(
    ctx: click.Context,
    /,
    *,
    lake: Path,
    queues: str,
    since: datetime | None,
    until: datetime | None,
    as_json: bool,
) -> None:
    """List gaps (ranges of lost events), and the number of jobs that 'backfill' has added for each.

    If there are no gaps, the lake contains every event from the pipeline's start to its last batch. Does not
    require Java.

    Exit codes: 0 (no gaps in that period), 3 (there are gaps).
    """
    from bulltask.config.parsers import parse_names  # noqa: PLC0415
    from bulltask.lake.gaps import find_gaps  # noqa: PLC0415 - slow
    from bulltask.lake.layout import Layout  # noqa: PLC0415 - slow
    from bulltask.lake.read import (  # noqa: PLC0415
        TableReader,
        check_queues,
        known_queues,
        normalize_queue,
    )
    from bulltask.lake.tables import EVENTS, GAPS  # noqa: PLC0415

    layout, names = Layout(lake), None
    if queues.strip() != "*":
        known = known_queues(TableReader(layout))
        names = [normalize_queue(queue, known) for queue in parse_names(queues, "--queues")]
        check_queues(lake, names, known)
    gap_rows = find_gaps(layout, since=since, until=until, queues=names)
    if as_json:
        click.echo(json.dumps([asdict(gap) for gap in gap_rows], indent=2, default=datetime.isoformat))
    elif not gap_rows:
        has_events = any(layout.days(table) for table in (EVENTS, GAPS))
        click.echo(
            "No gaps: every event up to the last batch was read."
            if has_events
            else "No gaps, and no events: no batch has been written yet."
        )
    else:
        click.echo(_table(gap_rows))
    ctx.exit(EXIT_LOST if gap_rows else 0)


def _table(gaps: list[GapRow]) -> str:
    rows = [
        (
            gap.queue,
            f"{'' if gap.exact else '>= '}{gap.lost:,}",
            gap.loss_reason,
            _time(gap.last_at_before),
            _time(gap.first_at_after),
            "-" if gap.backfilled_jobs is None else f"{gap.backfilled_jobs:,}",
        )
        for gap in gaps
    ]
    table = as_table(
        ("queue", "lost events", "reason", "last event before", "first event after", "jobs backfilled"), rows
    )
    return f"{table}\n\n{pluralize(len(gaps), 'gap')}, {pluralize(sum(gap.lost for gap in gaps), 'event')} lost"


def _time(at: datetime | None) -> str:
    return "-" if at is None else f"{at:%Y-%m-%d %H:%M:%S}"
