"""``bulltask pipeline backfill``: what is still known of the jobs that gaps hide."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import click

from bulltask.cli.pipeline.options import moment, open_session, root_option, source_of, source_options, spark_options
from bulltask.lake.plural import counted

__all__ = ["command"]


@click.command("backfill")
@root_option
@source_options
@click.option("--since", type=moment, metavar="TIME", required=True, help="Gaps that touch this time (UTC) or later.")
@click.option("--until", type=moment, metavar="TIME", required=True, help="And before this time.")
@spark_options
@click.pass_context
def command(
    ctx: click.Context,
    /,
    *,
    root: Path,
    since: datetime,
    until: datetime,
    master: str | None,
    conf: tuple[str, ...],
    **where: Any,
) -> None:
    """Write to silver what is still known of the jobs that ended in gaps, from their hashes and from snapshots.

    Only the last attempt of each is known. What Redis has removed, and no snapshot has, stays unknown. To do it again
    adds nothing.
    """
    from bulltask.config.parsers import names_of  # noqa: PLC0415 - beside the others
    from bulltask.lake.layout import Layout  # noqa: PLC0415 - slow

    source = source_of(ctx, where)
    if until <= since:
        raise click.UsageError("--until must be later than --since")
    layout = Layout(root)
    layout.check()  # before a JVM is started for nothing
    spark = open_session(master, conf)
    from bulltask.spark.tables.backfill import backfill  # noqa: PLC0415 - slow

    queues = None if source.queues == "*" else names_of(source.queues, "--queues")
    report = backfill(spark, layout, source.texts, since=since, until=until, queues=queues)
    click.echo(f"{counted(report.gaps, 'gap')}, in which at least {counted(report.lost, 'event')} went lost")
    if report.gaps:
        click.echo(
            f"{counted(report.looked_at, 'finished job')} looked at, {report.jobs:,} added to silver.jobs from what is "
            f"still known; something was found of {counted(report.repaired, 'gap')}"
        )
