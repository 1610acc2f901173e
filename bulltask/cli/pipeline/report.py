"""``bulltask pipeline report``: a report as an HTML page, as Markdown, or as a single table."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from bulltask.cli.options import day, days, root_option, seconds
from bulltask.errors import MissingExtraError

if TYPE_CHECKING:
    from bulltask.lake.layout import Layout
    from bulltask.lake.report.build import Report
    from bulltask.lake.report.tables import ReportTable

__all__ = ["command"]

_TOPICS: Final = ("slo", "capacity", "cost", "errors")
_PAGES: Final = ("html", "md")
_TABLES: Final = ("table", "json", "csv", "md")
_BY_ENDING: Final[Mapping[str, str]] = {".html": "html", ".md": "md", ".json": "json", ".csv": "csv", ".txt": "table"}


@click.command("report", short_help="Write a report from the gold tables.")
@click.argument("topic", type=click.Choice(_TOPICS), required=False)
@root_option
@click.option(
    "--day", "one_day", type=day, metavar="DAY", help="Day (UTC) of the report (default: the last one in the lake)."
)
@click.option("--days", "several", type=days, metavar="DAY..DAY", help="Several days, including the last one.")
@click.option("--queues", help="Names of queues, comma-separated (default: all).")
@click.option(
    "--format",
    "kind",
    type=click.Choice(["html", "md", "table", "json", "csv"]),
    help="Output format (default: by the suffix of -o, else html, or table for a TOPIC).",
)
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="File to write, or - for the terminal."
)
@click.option(
    "--within",
    type=seconds,
    metavar="DURATION",
    default="2s",
    show_default=True,
    help="Capacity target: how long attempts may wait for a worker.",
)
@click.option(
    "--share",
    type=float,
    default=0.99,
    show_default=True,
    help="Capacity target: share of attempts, 0 to 1, that start within that time.",
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
    topic: str | None,
    root: Path,
    one_day: date | None,
    several: list[date] | None,
    queues: str | None,
    kind: str | None,
    output: Path | None,
    within: float,
    share: float,
    peak_factor: float,
) -> None:
    """Write a report on one day or several from the gold tables, as one self-contained HTML file.

    With a TOPIC, print its table only. The number of recommended workers follows from the capacity target. Needs the
    extra report (pip install 'bulltask[report]') and no Java.
    """
    kind = _kind(topic, kind, output)
    if one_day is not None and several is not None:
        raise click.UsageError("--day and --days cannot be used together")
    with _name_missing_extra():
        from bulltask.lake.layout import Layout  # noqa: PLC0415 - slow, as the others
        from bulltask.lake.report.build import make_report  # noqa: PLC0415
        from bulltask.lake.report.period import Period  # noqa: PLC0415
        from bulltask.lake.report.recommendations import CapacityTarget  # noqa: PLC0415

        layout = Layout(root)
        asked = several or [one_day or _last_day(layout)]
        names = tuple(name.strip() for name in (queues or "").split(",") if name.strip())
        made = make_report(layout, Period(asked[0], asked[-1], names), CapacityTarget(within, share, peak_factor))
        text = _table(made, topic, kind) if topic else _page(made, kind)
    _show(made, text, output or (Path(f"bulltask-report-{made.data.period}.html") if kind == "html" else None))


@contextmanager
def _name_missing_extra() -> Iterator[None]:
    """Raise :class:`MissingExtraError` where a module of the extra ``report`` is missing."""
    try:
        yield
    except ModuleNotFoundError as exc:
        if exc.name not in {"pyarrow", "jinja2", "markupsafe"}:
            raise
        raise MissingExtraError(
            f"the report needs {exc.name}, which is not installed: pip install 'bulltask[report]'"
        ) from exc


def _kind(topic: str | None, kind: str | None, output: Path | None) -> str:
    """Return the output format.

    Raises:
        click.UsageError: The report or topic does not have this format.
    """
    found = kind or (_BY_ENDING.get(output.suffix.lower()) if output else None) or ("table" if topic else "html")
    if found not in (_TABLES if topic else _PAGES):
        raise click.UsageError(
            f"a topic can be {', '.join(_TABLES)}, not {found}, which is for the whole report"
            if topic
            else f"the whole report can be {' or '.join(_PAGES)}; {found} needs a topic: {', '.join(_TOPICS)}"
        )
    return found


def _last_day(layout: Layout) -> date:
    from bulltask.lake.read import TableReader  # noqa: PLC0415 - slow
    from bulltask.lake.tables import EVENTS, TASK_MINUTE  # noqa: PLC0415

    reader = TableReader(layout)
    found = reader.days(TASK_MINUTE) or reader.days(EVENTS)
    if not found:
        raise click.ClickException(f"{layout.root} has no events yet: read some with 'bulltask pipeline run'")
    return found[-1]


def _page(made: Report, kind: str) -> str:
    if kind == "md":
        from bulltask.lake.report.markdown import markdown  # noqa: PLC0415 - slow

        return markdown(made)
    from bulltask.lake.report.page import html  # noqa: PLC0415 - slow

    return html(made)


def _table(made: Report, topic: str, kind: str) -> str:
    from bulltask.lake.report import sections, tables, views  # noqa: PLC0415 - slow

    short = kind in {"table", "md"}
    found: Mapping[str, ReportTable] = {
        "slo": sections.slo(made.data),
        "capacity": views.capacity_table(made.queues, made.recommendations),
        "cost": sections.cost(sections.costs(made.data)),
        "errors": views.short_errors(made.failures) if short else sections.errors(made.failures),
    }
    text = views.recommendation_text(made.recommendations) if topic == "capacity" and short else ""
    writers = {"table": tables.as_text, "json": tables.as_json, "csv": tables.as_csv, "md": tables.as_markdown}
    return writers[kind](found[topic]) + text


def _show(made: Report, text: str, output: Path | None) -> None:
    for alert in made.alerts:
        click.echo(f"{alert.title}. {alert.text}", err=True)
    if output is None or str(output) == "-":
        click.echo(text, nl=False)
        return
    # Readers find the old file or the whole new one, never a part.
    unfinished = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        unfinished.write_text(text, "utf-8")
        unfinished.replace(output)
    except OSError as exc:
        unfinished.unlink(missing_ok=True)
        raise click.ClickException(f"{output} cannot be written: {exc.strerror}") from exc
    click.echo(f"Report on {made.data.period} written to {output}")
