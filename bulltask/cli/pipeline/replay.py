"""``bulltask pipeline replay``: send finished jobs again."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bulltask.cli.options import lake_option, redis_options
from bulltask.cli.pipeline.options import open_session, source_of, spark_options
from bulltask.cli.terminal import as_table, in_one_line
from bulltask.lake.formatting import pluralize

if TYPE_CHECKING:
    from bulltask.spark.tables.replay import ReplayResult

__all__ = ["command"]

_CELL_WIDTH = 60


@click.command("replay", short_help="Send finished jobs again.")
@lake_option
@redis_options
@click.option("--where", "condition", required=True, metavar="SQL", help="SQL condition on the columns of silver.jobs.")
@click.option("--queue", help="Only jobs in this queue (default: all queues).")
@click.option("--limit", type=click.IntRange(1), help="Maximum number of jobs (default: all).")
@click.option("--yes", is_flag=True, help="Send the jobs.")
@spark_options
@click.pass_context
def command(
    ctx: click.Context,
    /,
    *,
    lake: Path,
    condition: str,
    queue: str | None,
    limit: int | None,
    yes: bool,
    master: str | None,
    conf: tuple[str, ...],
    **connection: Any,
) -> None:
    """Send finished jobs again, with the same name, data and options but new ids. Without --yes, only list them.

    A job's delay, parent, schedule and expiry are not copied. Running the command again never adds a job
    twice. Jobs whose data is neither in Redis nor in a snapshot cannot be sent; the command lists them.

    Example: --where "name = 'charge' and state = 'failed' and finished_at >= '2026-11-21 14:00'"
    """
    from bulltask.lake.layout import Layout  # noqa: PLC0415 - slow

    source, layout = source_of(ctx, connection), Layout(lake)
    layout.check()  # check before starting a JVM
    spark = open_session(master, conf)
    from bulltask.spark.tables.replay import ReplaySelection, replay  # noqa: PLC0415 - slow

    selection = ReplaySelection(condition, queue, limit)
    result = replay(spark, layout, source.options, selection, dry_run=not yes)
    _show(result)


def _show(result: ReplayResult) -> None:
    click.echo(f"{pluralize(result.selected, 'finished job')} selected, {result.ready:,} can be sent")
    if result.open_again:
        click.echo(f"Skipped, because they were retried and have not finished: {result.open_again:,}")
    if result.unknown:
        named = ", ".join(map(in_one_line, result.unknown_ids)) + (
            ", ..." if result.unknown > len(result.unknown_ids) else ""
        )
        click.echo(f"Skipped, because neither Redis nor a snapshot has their data: {result.unknown:,}, {named}")
    if result.sample:
        heads = ("queue", "job_id", "name", "state", "failed_reason", "data")
        click.echo("\n" + as_table(heads, [tuple(_cut(row[name]) for name in heads) for row in result.sample]))
    if result.dry_run:
        click.echo("\nDry run: nothing was sent. Run the command again with --yes to send these jobs.")
    else:
        click.echo(
            f"\n{pluralize(result.added, 'job')} added, {result.duplicates:,} duplicates; write id {result.write_id}"
        )


def _cut(value: object) -> str:
    text = "" if value is None else str(value).replace("\n", " ")
    return text if len(text) <= _CELL_WIDTH else text[: _CELL_WIDTH - 3] + "..."
