"""``bulltask pipeline compact``: merge the small files of past days."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import date
from pathlib import Path

import click

from bulltask.cli.options import day, lake_option
from bulltask.cli.terminal import as_table

__all__ = ["command"]


@click.command("compact", short_help="Merge the small files of past days.")
@lake_option
@click.option("--before", type=day, metavar="DAY", required=True, help="Only days (UTC) before this one.")
@click.option(
    "--table",
    "tables",
    multiple=True,
    help="A table, such as silver.jobs; may be repeated (default: all tables of bronze and silver).",
)
@click.option("--target-mb", type=float, default=128, show_default=True, help="Target size of a file in megabytes.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(*, lake: Path, before: date, tables: tuple[str, ...], target_mb: float, as_json: bool) -> None:
    """Merge the small files of past days into larger ones, and remove outdated rows from silver.

    The command can run at the same time as 'run'. It can be killed at any moment and rerun. Does not require Java.
    """
    from bulltask.lake.compaction import COMPACTED, compact  # noqa: PLC0415 - slow
    from bulltask.lake.layout import Layout  # noqa: PLC0415 - slow

    layout = Layout(lake)
    results = [compact(layout, table, before=before, target_mb=target_mb) for table in tables or COMPACTED]
    if as_json:
        click.echo(json.dumps([asdict(result) for result in results], indent=2))
        return
    click.echo(
        as_table(
            ("table", "partitions", "files", "rows", "MB"),
            [
                (
                    result.table,
                    f"{result.partitions:,}",
                    f"{result.files_before:,} -> {result.files_after:,}",
                    f"{result.rows_before:,} -> {result.rows_after:,}",
                    f"{result.bytes_before / 1e6:,.1f} -> {result.bytes_after / 1e6:,.1f}",
                )
                for result in results
            ],
        )
    )
