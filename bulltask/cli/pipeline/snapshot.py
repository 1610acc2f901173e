"""``bulltask pipeline snapshot``: copy jobs that are in Redis to the lake."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import click

from bulltask.cli.options import lake_option, moment
from bulltask.cli.pipeline.options import open_session, source_of, source_options, spark_options
from bulltask.lake.formatting import pluralize

__all__ = ["command"]


@click.command("snapshot", short_help="Copy finished jobs that are in Redis to the lake.")
@lake_option
@source_options
@click.option("--states", default="completed,failed", show_default=True, help="States of the jobs, comma-separated.")
@click.option("--since", type=moment, metavar="TIME", help="Only jobs that finished at this time (UTC) or later.")
@spark_options
@click.pass_context
def command(
    ctx: click.Context,
    /,
    *,
    lake: Path,
    states: str,
    since: datetime | None,
    master: str | None,
    conf: tuple[str, ...],
    **connection: Any,
) -> None:
    """Copy finished jobs that are in Redis to bronze.jobs, with their data, options and stack traces. --states selects
    jobs in other states.

    'replay' and 'backfill' use these copies for jobs that Redis has since removed.
    """
    from bulltask.config.parsers import parse_names  # noqa: PLC0415 - with the other imports
    from bulltask.lake.layout import Layout  # noqa: PLC0415 - slow

    source = source_of(ctx, connection)
    spark = open_session(master, conf)
    from bulltask.spark.tables.snapshot import snapshot  # noqa: PLC0415 - slow

    result = snapshot(spark, Layout(lake), source.options, states=parse_names(states, "--states"), since=since)
    click.echo(f"{pluralize(result.rows, 'job')} written to bronze.jobs; ingest_id of this write: {result.ingest_id}")
