"""``bulltask pipeline build``: build silver or gold tables for given days."""

from __future__ import annotations

from datetime import date, timedelta
from pathlib import Path

import click

from bulltask.cli.options import days, lake_option, seconds
from bulltask.cli.pipeline.options import open_session, spark_options
from bulltask.lake.formatting import pluralize

__all__ = ["command"]


@click.command("build", short_help="Build the silver or gold tables of the given days.")
@click.argument("layer", type=click.Choice(["silver", "gold"]))
@lake_option
@click.option(
    "--days", "build_days", type=days, metavar="DAY..DAY", required=True, help="Range of days (UTC), inclusive."
)
@click.option(
    "--slo-config",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="TOML file with objectives (SLOs), prices and capacities (gold only).",
)
@click.option(
    "--open-job-timeout",
    type=seconds,
    metavar="DURATION",
    default="7d",
    show_default=True,
    help="The same value as for 'run' (silver only).",
)
@spark_options
def command(
    *,
    layer: str,
    lake: Path,
    build_days: list[date],
    slo_config: Path | None,
    open_job_timeout: float,
    master: str | None,
    conf: tuple[str, ...],
) -> None:
    """Build the silver or gold tables of the given days, and replace their rows.

    Gold is only built by this command. You can build a day any number of times: its rows change until all its jobs have
    finished. Silver is written by 'run': rebuild it only if it is damaged.
    """
    from bulltask.lake.layout import Layout  # noqa: PLC0415 - slow
    from bulltask.lake.slo_config import read_slo_config  # noqa: PLC0415 - slow

    config, layout = None if slo_config is None else read_slo_config(slo_config), Layout(lake)
    layout.check()  # check before starting a JVM
    spark = open_session(master, conf)
    if layer == "gold":
        from bulltask.spark.gold.build import build_gold  # noqa: PLC0415 - slow

        build_gold(spark, layout, build_days, config)
    else:
        from bulltask.spark.tables.rebuild import build_silver  # noqa: PLC0415 - slow

        build_silver(spark, layout, build_days, open_job_timeout=timedelta(seconds=open_job_timeout))
    click.echo(f"built {layer} for {pluralize(len(build_days), 'day')}, {build_days[0]} to {build_days[-1]}")
