"""``bulltask pipeline compact``: days that are over become few files."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import date
from pathlib import Path

import click

from bulltask.cli.pipeline.options import day, root_option
from bulltask.cli.pipeline.tables import as_table

__all__ = ["command"]


@click.command("compact")
@root_option
@click.option("--before", type=day, metavar="DAY", required=True, help="Only days (UTC) before this one.")
@click.option(
    "--table", "tables", multiple=True, help="A table like silver.jobs; all of bronze and silver if left out."
)
@click.option("--target-mb", type=float, default=128, show_default=True, help="Megabytes of a file, about.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(*, root: Path, before: date, tables: tuple[str, ...], target_mb: float, as_json: bool) -> None:
    """Write days that are over into few files. In silver, rows that were superseded are left out.

    It may be killed at any moment and started again, and run beside the stream. It needs no Java.
    """
    from bulltask.lake.compacting import COMPACTED, compact  # noqa: PLC0415 - slow
    from bulltask.lake.layout import Layout  # noqa: PLC0415 - slow

    layout = Layout(root)
    reports = [compact(layout, table, before=before, target_mb=target_mb) for table in tables or COMPACTED]
    if as_json:
        click.echo(json.dumps([asdict(one) for one in reports], indent=2))
        return
    click.echo(
        as_table(
            ("table", "partitions", "files", "rows", "MB"),
            [
                (
                    one.table,
                    f"{one.partitions:,}",
                    f"{one.files_before:,} -> {one.files_after:,}",
                    f"{one.rows_before:,} -> {one.rows_after:,}",
                    f"{one.bytes_before / 1e6:,.1f} -> {one.bytes_after / 1e6:,.1f}",
                )
                for one in reports
            ],
        )
    )
