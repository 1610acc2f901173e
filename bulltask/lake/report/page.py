"""Format a report as one self-contained HTML file.

Names of tasks and failure reasons are untrusted: Jinja2 escapes them, and the page's Content Security Policy allows
only the page's script.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable
from functools import cache, partial
from importlib.resources import files
from typing import Any, Final

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from bulltask.lake.formatting import Unit, format_value, one_line
from bulltask.lake.report import sections
from bulltask.lake.report.aggregates import incomplete_minutes
from bulltask.lake.report.build import Report
from bulltask.lake.report.sections import Reason
from bulltask.lake.report.views import MAX_ROWS, notes, queues_shown, steps, tables

__all__ = ["html"]

_MAX_EXAMPLE: Final = 4_000
"""The maximum length of an example reason; some reasons contain whole documents."""

_SECTIONS: Final = (
    ("throughput", "Throughput"),
    ("durations", "Wait and run times"),
    ("failures", "Failures"),
    ("requeues", "Requeued, stalled"),
    ("capacity", "Capacity"),
    ("slo", "Objectives"),
    ("cost", "Cost"),
    ("completeness", "Completeness"),
)


def html(report: Report) -> str:
    """Return the page of a report."""
    report_tables, script = tables(report), _resource("report.js")
    slo = sections.slo(report.data).first(MAX_ROWS, "")
    return (
        _environment()
        .get_template("report.html")
        .render(
            report=report,
            tables=report_tables,
            objectives=[dict(zip((column.name for column in slo.columns), row, strict=True)) for row in slo.rows],
            many_queues=len(report.queues) > 1,
            queues=one_line(queues_shown(report)),
            priced=any(cost.cost is not None for cost in report.costs),
            incomplete=any(incomplete_minutes(report.data).values()),
            sections=_SECTIONS,
            notes=notes(report),
            point=_point_text(report),
            seen=partial(_time_range, short=len(report.data.period.days) == 1),
            expected=_recommended_index(report),
            # Files of this package, not text from a lake.
            style=Markup(_resource("report.css")),  # noqa: S704
            script=Markup(script),  # noqa: S704
            script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        )
    )


def _point_text(report: Report) -> str:
    """Return the time that a point in a chart covers, if it is more than a minute."""
    step = report.data.axis.step if report.data.axis else 1
    return "" if step == 1 else f"mean of {steps(step)}"


def _time_range(reason: Reason, *, short: bool) -> str:
    """Return the first and last time, without dates in a report for a single day."""
    times = (time for time in (reason.first_seen, reason.last_seen) if time is not None)
    texts = dict.fromkeys(f"{time:%H:%M}" if short else f"{time:%Y-%m-%d %H:%M}" for time in times)
    return " to ".join(texts)


def _recommended_index(report: Report) -> int | None:
    """Return the index of the recommended concurrency among the estimates."""
    recommendation = report.recommendations.overall
    return (
        None
        if recommendation is None
        else [estimate.concurrency for estimate in recommendation.estimates].index(recommendation.concurrency)
    )


def _resource(name: str) -> str:
    return files("bulltask.lake.report").joinpath("templates", name).read_text("utf-8")


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("bulltask.lake.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    units: dict[str, Unit] = {unit.name.lower(): unit for unit in Unit}
    filters: dict[str, Callable[[Any], str]] = {name: partial(_format, unit=unit) for name, unit in units.items()}
    environment.filters.update(filters, line=one_line, lines=_lines)
    return environment


def _format(value: Any, unit: Unit) -> str:
    return format_value(value, unit)


def _lines(text: str) -> str:
    """Return text of several lines without control characters."""
    shortened = text if len(text) <= _MAX_EXAMPLE else text[:_MAX_EXAMPLE] + " …"
    return "\n".join(one_line(line.replace("\t", "    ")) for line in shortened.splitlines())
