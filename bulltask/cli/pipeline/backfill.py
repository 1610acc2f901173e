"""``bulltask pipeline backfill``: add the jobs whose events were lost."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import click

from bulltask.cli.options import lake_option, moment
from bulltask.cli.pipeline.options import open_session, source_of, source_options, spark_options
from bulltask.lake.formatting import pluralize

__all__ = ["command"]


@click.command("backfill", short_help="Add jobs whose events were lost, from Redis and snapshots.")
@lake_option
@source_options
@click.option(
    "--since", type=moment, metavar="TIME", required=True, help="Only gaps that end at this time (UTC) or later."
)
@click.option("--until", type=moment, metavar="TIME", required=True, help="Only gaps that begin before this time.")
@spark_options
@click.pass_context
def command(
    ctx: click.Context,
    /,
    *,
    lake: Path,
    since: datetime,
    until: datetime,
    master: str | None,
    conf: tuple[str, ...],
    **connection: Any,
) -> None:
    """Fill gaps in the silver tables with jobs from Redis and from snapshots.

    A gap is a range of lost events; 'gaps' lists them. Jobs that finished in a gap are added with their last attempt
    only. Jobs that are neither in Redis nor in a snapshot cannot be added. Running the command again never adds
    a job twice.
    """
    from bulltask.config.parsers import parse_names  # noqa: PLC0415 - with the other imports
    from bulltask.lake.layout import Layout  # noqa: PLC0415 - slow

    source = source_of(ctx, connection)
    if until <= since:
        raise click.UsageError("--until must be later than --since")
    layout = Layout(lake)
    layout.check()  # check before starting a JVM
    spark = open_session(master, conf)
    from bulltask.spark.tables.backfill import backfill  # noqa: PLC0415 - slow

    queues = None if source.queues == "*" else parse_names(source.queues, "--queues")
    result = backfill(spark, layout, source.options, since=since, until=until, queues=queues)
    click.echo(f"{pluralize(result.gaps, 'gap')} with at least {pluralize(result.lost, 'lost event')}")
    if result.gaps:
        click.echo(
            f"{pluralize(result.examined, 'finished job')} examined, {result.jobs:,} added to silver.jobs; "
            f"jobs were added for {pluralize(result.backfilled_gaps, 'gap')}"
        )
