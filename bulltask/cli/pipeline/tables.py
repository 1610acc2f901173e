"""The commands of ``bulltask pipeline`` that need only the lake: build, maintain, forget, migrate-lake, gaps, report.

All but ``build`` run without Java.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import fields
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from bulltask.cli.options import days, duration_option, json_option, lake_option, moment
from bulltask.cli.pipeline import EXIT_LOST, open_session, spark_options
from bulltask.cli.terminal import as_table, echo, print_json
from bulltask.config.parsers import parse_names
from bulltask.lake.formatting import pluralize
from bulltask.lake.records import to_json
from bulltask.lake.tables import EVENTS, GAPS, JOBS, TASK_MINUTE

if TYPE_CHECKING:
    from bulltask.lake.report.page import Report
    from bulltask.lake.report.sections import ReportTable
    from bulltask.lake.storage import Lake


@click.command("build", short_help="Build the silver or gold tables of the given days.")
@click.argument("layer", type=click.Choice(["silver", "gold"]))
@lake_option(extra="spark")
@click.option(
    "--days", "build_days", type=days, metavar="DAY..DAY", required=True, help="Range of days (UTC), inclusive."
)
@click.option(
    "--slo-config",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="TOML file with objectives (SLOs), prices and capacities (gold only).",
)
@duration_option("--open-job-timeout", default="7d", text="The same value as for 'run' (silver only).")
@spark_options
def build_command(
    *, layer: str, lake: Lake, build_days: list[date], slo_config: Path | None, open_job_timeout: float, **options: Any
) -> None:
    """Build the silver or gold tables of the given days, and replace their rows.

    Gold is only built by this command. You can build a day any number of times: its rows change until all its jobs have
    finished. Silver is written by 'run': rebuild it only if it is damaged.
    """
    from bulltask.lake.slo_config import read_slo_config  # noqa: PLC0415 - slow

    config = None if slo_config is None else read_slo_config(slo_config)
    lake.check()  # check before starting a JVM
    spark = open_session(options)
    if layer == "gold":
        from bulltask.spark.gold import build_gold  # noqa: PLC0415 - slow

        build_gold(spark, lake, build_days, config)
    else:
        from bulltask.spark.repair import build_silver  # noqa: PLC0415 - slow

        build_silver(spark, lake, build_days, open_job_timeout=timedelta(seconds=open_job_timeout))
    click.echo(f"built {layer} for {pluralize(len(build_days), 'day')}, {build_days[0]} to {build_days[-1]}")


@click.command("maintain", short_help="Merge small files, remove old days, and delete unneeded files.")
@lake_option()
@click.option(
    "--keep",
    multiple=True,
    metavar="TABLE=DAYS",
    help="Keep only this many days of a table or layer, such as bronze=90 or silver.jobs=400; may be repeated "
    "(default: keep all days).",
)
@click.option("--target-mb", type=float, default=128, show_default=True, help="Target size of a file in megabytes.")
@click.option("--dry-run", is_flag=True, help="Change nothing, only count.")
@json_option
def maintain_command(*, lake: Lake, keep: tuple[str, ...], target_mb: float, dry_run: bool, as_json: bool) -> None:
    """Merge small files of each table, drop superseded rows from past days of silver, remove the days that --keep
    names, and delete files that were replaced a week ago or earlier, or that a killed process left.

    Run it every night. 'run' and readers can run at the same time; readers of an earlier version of a table (time
    travel) have a week. It can be killed at any moment and rerun. The events of unfinished jobs are always kept. If a
    finished job is retried manually after its events have been removed, its history lacks the earlier attempts.
    """
    from bulltask.lake.maintenance import maintain, parse_retention  # noqa: PLC0415 - slow

    results = maintain(lake, keep=parse_retention(keep), target_mb=target_mb, dry_run=dry_run)
    _print_changes(results, as_json, dry_run, "without --dry-run")


@click.command("forget", short_help="Remove jobs from all tables and their old versions.")
@lake_option()
@click.option("--job", "job_ids", multiple=True, metavar="ID", help="Id of a job; may be repeated.")
@click.option("--queue", help="The queue of these jobs; required if several queues have a job with this id.")
@click.option("--where", metavar="SQL", help="Condition on the columns of --table; the jobs of its rows are removed.")
@click.option(
    "--table",
    "table_name",
    default="silver.jobs",
    show_default=True,
    help="The table of --where: silver.jobs, silver.attempts, bronze.jobs or bronze.events.",
)
@click.option("--reason", help="Text for the record, such as the number of a request.")
@click.option("--yes", is_flag=True, help="Remove the jobs.")
@json_option
def forget_command(
    *,
    lake: Lake,
    job_ids: tuple[str, ...],
    queue: str | None,
    where: str | None,
    table_name: str,
    reason: str | None,
    yes: bool,
    as_json: bool,
) -> None:
    """Remove jobs from all tables, as the erasure of a person's data demands. Without --yes, only count their rows.

    Their rows in bronze and silver are removed, also from earlier versions of the tables, which can then no longer be
    read, and from samples in gold.errors_day; sums in gold do not change. What was removed is recorded in the table
    _pipeline/forgotten, without ids. Stop 'run' first, and remove the jobs from Redis: it would record them again.

    Example: --table bronze.jobs --where "data LIKE '%ada@example.com%'"
    """
    from bulltask.lake.maintenance import forget, jobs_where, jobs_with_id  # noqa: PLC0415 - slow
    from bulltask.lake.tables import find_tables  # noqa: PLC0415 - slow

    if bool(job_ids) == bool(where):
        raise click.UsageError("give either --job or --where")
    lake.check()
    if where:
        (table,) = find_tables([table_name])
        jobs = jobs_where(lake, table, where)
    else:
        table, jobs = JOBS, {job for job_id in job_ids for job in jobs_with_id(lake, job_id, queue)}
    results = forget(lake, jobs, last=table, reason=reason, dry_run=not yes) if jobs else []
    if not as_json:
        click.echo(f"{pluralize(len(jobs), 'job')} {'removed' if yes else 'selected'}" if jobs else "No such jobs.")
    _print_changes(results, as_json, not yes, "with --yes", jobs=len(jobs))


@click.command("migrate-lake", short_help="Make Delta tables of a lake of an older version.")
@lake_option()
@click.option("--yes", is_flag=True, help="Convert the lake.")
@json_option
def migrate_command(*, lake: Lake, yes: bool, as_json: bool) -> None:
    """Convert a lake that bulltask wrote before its tables were Delta tables, in place. Without --yes, only count.

    Stop the pipeline first. The old files are deleted at the end, so as much space as they use must be free. If it is
    killed, run it again: it continues. Afterwards, 'run' continues after the last event in the lake.
    """
    from bulltask.lake.legacy import migrate  # noqa: PLC0415 - slow

    results = migrate(lake, dry_run=not yes)
    _print_changes(results, as_json, not yes, "with --yes")


def _print_changes(results: Sequence[Any], as_json: bool, dry_run: bool, how: str, **more: Any) -> None:
    """Print what was done with each table, with ``3 -> 1`` for what was before and after; in a dry run only before."""
    if as_json:
        print_json({"dry_run": dry_run, **more, "tables": to_json(results)})
        return
    if not results:
        return
    columns: defaultdict[str, list[str]] = defaultdict(list)
    for field in fields(results[0]):
        if not (dry_run and field.name.endswith("_after")):
            columns[field.name.removesuffix("_before").removesuffix("_after").replace("_", " ")].append(field.name)

    def text(result: Any, name: str) -> str:
        value = getattr(result, name)
        return (
            value if isinstance(value, str) else f"{value / 1e6:,.1f} MB" if name.startswith("bytes") else f"{value:,}"
        )

    rows = [[" -> ".join(text(result, name) for name in names) for names in columns.values()] for result in results]
    click.echo(as_table(list(columns), rows))
    if dry_run:
        click.echo(f"\nDry run: nothing was changed. Run the command again {how}.")


@click.command("gaps", short_help="List lost events.")
@lake_option()
@click.option("--queues", default="*", show_default=True, help="Names of queues, comma-separated, or * for all.")
@click.option("--since", type=moment, metavar="TIME", help="Only gaps that end at this time (UTC) or later.")
@click.option("--until", type=moment, metavar="TIME", help="Only gaps that begin before this time.")
@json_option
@click.pass_context
def gaps_command(
    ctx: click.Context, /, *, lake: Lake, queues: str, since: datetime | None, until: datetime | None, as_json: bool
) -> None:
    """List gaps (ranges of lost events), and the number of jobs that 'backfill' has added for each.

    If there are no gaps, the lake contains every event from the pipeline's start to its last batch. Does not
    require Java.

    Exit codes: 0 (no gaps in that period), 3 (there are gaps).
    """
    from bulltask.lake import reader  # noqa: PLC0415 - slow
    from bulltask.lake.report.sections import table_of  # noqa: PLC0415 - slow

    table_reader, names = reader.TableReader(lake), None
    if queues.strip() != "*":
        known = reader.known_queues(table_reader)
        names = [reader.normalize_queue(queue, known) for queue in parse_names(queues, "--queues")]
        reader.check_queues(lake.root, names, known)
    gap_rows = reader.find_gaps(lake, since=since, until=until, queues=names)
    if as_json:
        print_json(to_json(gap_rows))
    elif not gap_rows:
        has_events = any(table_reader.days(table) for table in (EVENTS, GAPS))
        click.echo(
            "No gaps: every event up to the last batch was read."
            if has_events
            else "No gaps, and no events: no batch has been written yet."
        )
    else:
        click.echo(_as_text(table_of(reader.GapRow, gap_rows)))
        click.echo(f"\n{pluralize(len(gap_rows), 'gap')}, {pluralize(sum(gap.lost for gap in gap_rows), 'event')} lost")
    ctx.exit(EXIT_LOST if gap_rows else 0)


_SECTIONS: Final = ("slo", "capacity", "cost", "errors")
_REPORT_FORMATS: Final = ("html", "md")
_TABLE_FORMATS: Final = ("table", "json", "csv", "md")
_BY_SUFFIX: Final[Mapping[str, str]] = {".html": "html", ".md": "md", ".json": "json", ".csv": "csv", ".txt": "table"}


@click.command("report", short_help="Write a report from the gold tables.")
@click.argument("section", type=click.Choice(_SECTIONS), required=False)
@lake_option(extra="report")
@click.option(
    "--day",
    "--days",
    "report_days",
    type=days,
    multiple=True,
    metavar="DAY[..DAY]",
    help="Day or range of days (UTC), inclusive (default: the last day that has gold tables).",
)
@click.option("--queues", help="Names of queues, comma-separated (default: all).")
@click.option(
    "--format",
    "output_format",
    type=click.Choice(["html", "md", "table", "json", "csv"]),
    help="Output format (default: from the extension of -o, else html, or table for a section).",
)
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="File to write, or - for standard output."
)
@duration_option("--max-wait", default="2s", text="Capacity target: how long an attempt may wait for a worker.")
@click.option(
    "--target",
    type=float,
    default=0.99,
    show_default=True,
    help="Capacity target: fraction of attempts, 0 to 1, that wait no longer than --max-wait.",
)
@click.option(
    "--peak-factor",
    type=float,
    default=1.2,
    show_default=True,
    help="Capacity target: safety factor on the load of the busiest minute, at least 1.",
)
def report_command(
    *,
    section: str | None,
    lake: Lake,
    report_days: tuple[list[date], ...],
    queues: str | None,
    output_format: str | None,
    output: Path | None,
    **target: Any,
) -> None:
    """Write a report on one or more days from the gold tables, as one self-contained HTML file.

    With a section (slo, capacity, cost or errors), print only its table. The report recommends a concurrency that meets
    the capacity target. Requires the report extra (pip install 'bulltask[report]'), but no Java.
    """
    output_format = _output_format(section, output_format, output)
    if len(report_days) > 1:
        raise click.UsageError("--day and --days cannot be used together, or twice")
    from bulltask.lake.report.data import Period  # noqa: PLC0415 - slow, like the others
    from bulltask.lake.report.page import html, make_report, markdown  # noqa: PLC0415

    chosen = report_days[0] if report_days else [_last_day(lake)]
    names = parse_names(queues or "", "--queues")
    report = make_report(lake, Period(chosen[0], chosen[-1], tuple(names)), **target)
    if section:
        text = _report_table(report, section, output_format)
    else:
        text = markdown(report) if output_format == "md" else html(report)
    if output is None and output_format == "html":
        output = Path(f"bulltask-report-{report.data.period}.html")
    _write_report(report, text, output)


def _output_format(section: str | None, wanted: str | None, output: Path | None) -> str:
    formats = _TABLE_FORMATS if section else _REPORT_FORMATS
    output_format = wanted or (_BY_SUFFIX.get(output.suffix.lower()) if output else None) or formats[0]
    if output_format not in formats:
        raise click.UsageError(
            f"--format for a section must be {', '.join(formats)}, not {output_format}"
            if section
            else f"--format for the whole report must be {' or '.join(formats)}; "
            f"{output_format} needs a section: {', '.join(_SECTIONS)}"
        )
    return output_format


def _last_day(lake: Lake) -> date:
    from bulltask.lake.reader import TableReader  # noqa: PLC0415 - slow

    reader = TableReader(lake)
    days = reader.days(TASK_MINUTE) or reader.days(EVENTS)
    if not days:
        raise click.ClickException(f"{lake.root} has no events yet: record events with 'bulltask pipeline run'")
    return days[-1]


def _report_table(report: Report, section: str, output_format: str) -> str:
    from bulltask.lake.report import page, sections  # noqa: PLC0415 - slow

    short = output_format in {"table", "md"}
    report_tables: Mapping[str, ReportTable] = {
        "slo": sections.table_of(sections.ObjectiveResult, report.objectives),
        "capacity": sections.capacity(report.queues, report.recommendations),
        "cost": sections.table_of(sections.Cost, sections.costs(report.data)),
        "errors": sections.short_errors(report.failures)
        if short
        else sections.table_of(sections.Failure, report.failures),
    }
    table = report_tables[section]
    if not short:
        return (sections.as_json if output_format == "json" else sections.as_csv)(table)
    text = f"{_as_text(table)}\n" if output_format == "table" else sections.as_markdown(table)
    return text + (page.recommendation_text(report.recommendations) if section == "capacity" else "")


def _as_text(table: ReportTable) -> str:
    return as_table([column.heading for column in table.columns], table.cells())


def _write_report(report: Report, text: str, output: Path | None) -> None:
    for alert in report.alerts:
        echo(f"{alert.title}. {alert.text}", err=True)
    if output is None or str(output) == "-":
        click.echo(text, nl=False)
        return
    # Readers see the old file or the complete new file, never a partial one.
    unfinished = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        unfinished.unlink(missing_ok=True)
        # "x" follows no link: in a directory such as /tmp, another user may have created one with this name.
        with unfinished.open("x", encoding="utf-8") as file:
            file.write(text)
        unfinished.replace(output)
    except OSError as exc:
        unfinished.unlink(missing_ok=True)
        raise click.ClickException(f"{output} cannot be written: {exc.strerror}") from exc
    click.echo(f"Report on {report.data.period} written to {output}")
