"""``bulltask pipeline expire``: days that are not kept any longer."""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

import click

from bulltask.cli.pipeline.options import day, root_option
from bulltask.cli.pipeline.tables import as_table

if TYPE_CHECKING:
    from bulltask.lake.expiring import Expired

__all__ = ["command"]


@click.command("expire")
@root_option
@click.option("--before", type=day, metavar="DAY", required=True, help="Days (UTC) before this one go.")
@click.option(
    "--tables",
    default="bronze.events,bronze.jobs",
    show_default=True,
    help="Tables, or layers for all of theirs, comma-separated.",
)
@click.option("--yes", is_flag=True, help="Do it. Without this nothing is taken away.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(*, root: Path, before: date, tables: str, yes: bool, as_json: bool) -> None:
    """Take away the days of tables before a day; a dry run unless --yes is said.

    What the stream itself needs always stays: its checkpoint, and the events of jobs that are not done. A finished job
    that is tried again by hand, after its events have expired, is told without its earlier attempts. It needs no Java.
    """
    from bulltask.config.parsers import names_of  # noqa: PLC0415 - beside the others
    from bulltask.lake.expiring import expire, tables_named  # noqa: PLC0415 - slow
    from bulltask.lake.layout import Layout  # noqa: PLC0415 - slow

    found = expire(Layout(root), tables_named(names_of(tables, "--tables")), before=before, dry_run=not yes)
    if as_json:
        rows = [{"table": one.table, "day": f"{one.day}", "files": one.files, "bytes": one.size} for one in found]
        click.echo(json.dumps({"done": yes, "expired": rows}, indent=2))
        return
    if found:
        click.echo(as_table(("table", "days", "from", "to", "files", "MB"), _by_table(found)))
    if not found:
        click.echo(f"No day before {before} is there.")
    elif not yes:
        click.echo("\nThis was a dry run: nothing was taken away. To do it, say it again with --yes.")


def _by_table(found: Iterable[Expired]) -> list[tuple[str, ...]]:
    tables: dict[str, list[Expired]] = {}
    for one in found:
        tables.setdefault(one.table, []).append(one)
    return [
        (
            table,
            f"{len(days):,}",
            f"{days[0].day}",
            f"{days[-1].day}",
            f"{sum(one.files for one in days):,}",
            f"{sum(one.size for one in days) / 1e6:,.1f}",
        )
        for table, days in tables.items()
    ]
