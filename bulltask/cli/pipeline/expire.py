"""``bulltask pipeline expire``: remove old days."""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

import click

from bulltask.cli.options import day, root_option
from bulltask.cli.terminal import as_table

if TYPE_CHECKING:
    from bulltask.lake.expiration import ExpiredDay

__all__ = ["command"]


@click.command("expire", short_help="Remove old days from tables.")
@root_option
@click.option("--before", type=day, metavar="DAY", required=True, help="Remove days (UTC) before this one.")
@click.option(
    "--tables",
    default="bronze.events,bronze.jobs",
    show_default=True,
    help="Tables or whole layers, comma-separated.",
)
@click.option("--yes", is_flag=True, help="Remove the days; without it, nothing is removed.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(*, root: Path, before: date, tables: str, yes: bool, as_json: bool) -> None:
    """Remove old days from tables; a dry run without --yes.

    What 'run' itself needs is always kept: its checkpoint, and the events of jobs that have not ended. If a finished
    job is retried manually after its events have expired, its earlier attempts are missing from its history. Needs no
    Java.
    """
    from bulltask.config.parsers import names_of  # noqa: PLC0415 - beside the others
    from bulltask.lake.expiration import expire, tables_named  # noqa: PLC0415 - slow
    from bulltask.lake.layout import Layout  # noqa: PLC0415 - slow

    found = expire(Layout(root), tables_named(names_of(tables, "--tables")), before=before, dry_run=not yes)
    if as_json:
        rows = [{"table": one.table, "day": f"{one.day}", "files": one.files, "bytes": one.size} for one in found]
        click.echo(json.dumps({"dry_run": not yes, "expired": rows}, indent=2))
        return
    if found:
        click.echo(as_table(("table", "days", "from", "to", "files", "MB"), _by_table(found)))
    if not found:
        click.echo(f"Nothing to remove: there are no days before {before}.")
    elif not yes:
        click.echo("\nDry run: nothing was removed. Repeat the command with --yes to remove these days.")


def _by_table(found: Iterable[ExpiredDay]) -> list[tuple[str, ...]]:
    tables: dict[str, list[ExpiredDay]] = {}
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
