"""``bulltask pipeline report``: a report as an HTML page, as Markdown, or as a single table."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from bulltask.cli.options import day, days, lake_option, seconds
from bulltask.cli.terminal import echo
from bulltask.jobs.errors import MissingExtraError

if TYPE_CHECKING:
    from bulltask.lake.layout import Layout
    from bulltask.lake.report.build import Report
    from bulltask.lake.report.tables import ReportTable

__all__ = ["command"]

_SECTIONS: Final = ("slo", "capacity", "cost", "errors")
_REPORT_FORMATS: Final = ("html", "md")
_TABLE_FORMATS: Final = ("table", "json", "csv", "md")
_BY_SUFFIX: Final[Mapping[str, str]] = {".html": "html", ".md": "md", ".json": "json", ".csv": "csv", ".txt": "table"}


@click.command("report", short_help="Write a report from the gold tables.")
@click.argument("section", type=click.Choice(_SECTIONS), required=False)
@lake_option
@click.option(
    "--day",
    "one_day",
    type=day,
    metavar="DAY",
    help="Day (UTC) of the report (default: the last day that has gold tables).",
)
@click.option("--days", "day_range", type=days, metavar="DAY..DAY", help="Range of days (UTC), inclusive.")
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
@click.option(
    "--max-wait",
    type=seconds,
    metavar="DURATION",
    default="2s",
    show_default=True,
    help="Capacity target: how long an attempt may wait for a worker.",
)
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
def command(
    *,
    section: str | None,
    lake: Path,
    one_day: date | None,
    day_range: list[date] | None,
    queues: str | None,
    output_format: str | None,
    output: Path | None,
    max_wait: float,
    target: float,
    peak_factor: float,
) -> None:
    """Write a report on one or more days from the gold tables, as one self-contained HTML file.

    With a section (slo, capacity, cost or errors), print only its table. The report recommends a concurrency that meets
    the capacity target. Requires the report extra (pip install 'bulltask[report]'), but no Java.
    """
    output_format = _output_format(section, output_format, output)
    if one_day is not None and day_range is not None:
        raise click.UsageError("--day and --days cannot be used together")
    with _report_missing_extra():
        from bulltask.lake.layout import Layout  # noqa: PLC0415 - slow, like the others
        from bulltask.lake.report.build import make_report  # noqa: PLC0415
        from bulltask.lake.report.period import Period  # noqa: PLC0415
        from bulltask.lake.report.recommendations import CapacityTarget  # noqa: PLC0415

        layout = Layout(lake)
        report_days = day_range or [one_day or _last_day(layout)]
        names = tuple(name.strip() for name in (queues or "").split(",") if name.strip())
        report = make_report(
            layout, Period(report_days[0], report_days[-1], names), CapacityTarget(max_wait, target, peak_factor)
        )
        text = _table(report, section, output_format) if section else _page(report, output_format)
    _show(
        report,
        text,
        output or (Path(f"bulltask-report-{report.data.period}.html") if output_format == "html" else None),
    )


@contextmanager
def _report_missing_extra() -> Iterator[None]:
    """Raise :class:`MissingExtraError` if a module of the extra ``report`` is missing."""
    try:
        yield
    except ModuleNotFoundError as exc:
        if exc.name not in {"pyarrow", "jinja2", "markupsafe"}:
            raise
        raise MissingExtraError(
            f"the report needs {exc.name}, which is not installed: pip install 'bulltask[report]'"
        ) from exc


def _output_format(section: str | None, wanted: str | None, output: Path | None) -> str:
    """Return the output format.

    Raises:
        click.UsageError: The report or section does not have this format.
    """
    output_format = (
        wanted or (_BY_SUFFIX.get(output.suffix.lower()) if output else None) or ("table" if section else "html")
    )
    if output_format not in (_TABLE_FORMATS if section else _REPORT_FORMATS):
        raise click.UsageError(
            f"--format for a section must be {', '.join(_TABLE_FORMATS)}, not {output_format}"
            if section
            else f"--format for the whole report must be {' or '.join(_REPORT_FORMATS)}; "
            f"{output_format} needs a section: {', '.join(_SECTIONS)}"
        )
    return output_format


def _last_day(layout: Layout) -> date:
    from bulltask.lake.read import TableReader  # noqa: PLC0415 - slow
    from bulltask.lake.tables import EVENTS, TASK_MINUTE  # noqa: PLC0415

    reader = TableReader(layout)
    days = reader.days(TASK_MINUTE) or reader.days(EVENTS)
    if not days:
        raise click.ClickException(f"{layout.root} has no events yet: record events with 'bulltask pipeline run'")
    return days[-1]


def _page(report: Report, output_format: str) -> str:
    if output_format == "md":
        from bulltask.lake.report.markdown import markdown  # noqa: PLC0415 - slow

        return markdown(report)
    from bulltask.lake.report.page import html  # noqa: PLC0415 - slow

    return html(report)


def _table(report: Report, section: str, output_format: str) -> str:
    from bulltask.lake.report import sections, tables, views  # noqa: PLC0415 - slow

    short = output_format in {"table", "md"}
    report_tables: Mapping[str, ReportTable] = {
        "slo": sections.slo(report.data),
        "capacity": views.capacity_table(report.queues, report.recommendations),
        "cost": sections.cost(sections.costs(report.data)),
        "errors": views.short_errors(report.failures) if short else sections.errors(report.failures),
    }
    text = views.recommendation_text(report.recommendations) if section == "capacity" and short else ""
    formatters = {"table": tables.as_text, "json": tables.as_json, "csv": tables.as_csv, "md": tables.as_markdown}
    return formatters[output_format](report_tables[section]) + text


def _show(report: Report, text: str, output: Path | None) -> None:
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
