"""``bulltask pipeline expire``: remove old days."""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

import click

from bulltask.cli.options import day, lake_option
from bulltask.cli.terminal import as_table

if TYPE_CHECKING:
    from bulltask.lake.expiration import ExpiredDay

__all__ = ["command"]


@click.command("expire", short_help="Delete old data from tables.")
@lake_option
@click.option("--before", type=day, metavar="DAY", required=True, help="Delete the data of days (UTC) before this one.")
@click.option(
    "--tables",
    default="bronze.events,bronze.jobs",
    show_default=True,
    help="Names of tables or layers, comma-separated, such as bronze.events or gold.",
)
@click.option("--yes", is_flag=True, help="Delete the data.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(*, lake: Path, before: date, tables: str, yes: bool, as_json: bool) -> None:
    """Delete old data from tables. Without --yes, only list it.

    The checkpoint of 'run' and the events of unfinished jobs are always kept. If a finished job is retried manually
    after its events have expired, its history lacks the earlier attempts. Does not require Java.
    """
    from bulltask.config.parsers import parse_names  # noqa: PLC0415 - with the other imports
    from bulltask.lake.expiration import expire, find_tables  # noqa: PLC0415 - slow
    from bulltask.lake.layout import Layout  # noqa: PLC0415 - slow

    expired = expire(Layout(lake), find_tables(parse_names(tables, "--tables")), before=before, dry_run=not yes)
    if as_json:
        rows = [
            {"table": day_.table, "day": f"{day_.day}", "files": day_.files, "bytes": day_.size} for day_ in expired
        ]
        click.echo(json.dumps({"dry_run": not yes, "expired": rows}, indent=2))
        return
    if expired:
        click.echo(as_table(("table", "days", "from", "to", "files", "MB"), _by_table(expired)))
    if not expired:
        click.echo(f"Nothing to delete: there is no data from before {before}.")
    elif not yes:
        click.echo("\nDry run: nothing was deleted. Run the command again with --yes to delete this data.")


def _by_table(expired: Iterable[ExpiredDay]) -> list[tuple[str, ...]]:
    tables: dict[str, list[ExpiredDay]] = {}
    for day_ in expired:
        tables.setdefault(day_.table, []).append(day_)
    return [
        (
            table,
            f"{len(days):,}",
            f"{days[0].day}",
            f"{days[-1].day}",
            f"{sum(day_.files for day_ in days):,}",
            f"{sum(day_.size for day_ in days) / 1e6:,.1f}",
        )
        for table, days in tables.items()
    ]
