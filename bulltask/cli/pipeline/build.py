"""``bulltask pipeline build``: tables made anew from those below them."""

from __future__ import annotations

from datetime import date, timedelta
from pathlib import Path

import click

from bulltask.cli.pipeline.options import days, open_session, root_option, seconds, spark_options
from bulltask.lake.plural import counted

__all__ = ["command"]


@click.command("build")
@click.argument("layer", type=click.Choice(["silver", "gold"]))
@root_option
@click.option(
    "--days", "which", type=days, metavar="DAY..DAY", required=True, help="Days (UTC), the last one included."
)
@click.option(
    "--terms",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A TOML file with objectives, prices and capacities, for gold.",
)
@click.option(
    "--max-open", type=seconds, metavar="LENGTH", default="7d", show_default=True, help="As of `run`, for silver."
)
@spark_options
def command(
    *,
    layer: str,
    root: Path,
    which: list[date],
    terms: Path | None,
    max_open: float,
    master: str | None,
    conf: tuple[str, ...],
) -> None:
    """Build all tables of LAYER for some days anew, in the place of what was there.

    The stream writes silver by itself; to build it anew is for a lake that was damaged. Gold is always built so, and
    today's as often as one likes: it changes while jobs of it have not ended.
    """
    from bulltask.lake.layout import Layout  # noqa: PLC0415 - slow
    from bulltask.lake.terms import read_terms  # noqa: PLC0415 - slow

    wanted, layout = None if terms is None else read_terms(terms), Layout(root)
    layout.check()  # before a JVM is started for nothing, as are the terms
    spark = open_session(master, conf)
    if layer == "gold":
        from bulltask.spark.gold.build import build_gold  # noqa: PLC0415 - slow

        build_gold(spark, layout, which, wanted)
    else:
        from bulltask.spark.tables.rebuild import build_silver  # noqa: PLC0415 - slow

        build_silver(spark, layout, which, max_open=timedelta(seconds=max_open))
    click.echo(f"{layer} was built for {counted(len(which), 'day')}, {which[0]} to {which[-1]}")
