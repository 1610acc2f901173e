"""Format a report as one self-contained HTML file.

Names of tasks and failure reasons are untrusted: Jinja2 escapes them, and the page's Content Security Policy allows no
script but its own.
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
from bulltask.lake.report.views import ROWS, notes, queues_shown, steps, tables

__all__ = ["html"]

_LONGEST: Final = 4_000
"""Characters of a failure's example; some contain whole documents."""

_SECTIONS: Final = (
    ("throughput", "Throughput"),
    ("durations", "Wait and run"),
    ("failures", "Failures"),
    ("retries", "Retries"),
    ("capacity", "Workers"),
    ("slo", "Objectives"),
    ("cost", "Cost"),
    ("completeness", "Completeness"),
)


def html(report: Report) -> str:
    """Return the page of a report."""
    found, script = tables(report), _resource("report.js")
    slo = sections.slo(report.data).first(ROWS, "")
    return (
        _environment()
        .get_template("report.html")
        .render(
            report=report,
            tables=found,
            objectives=[dict(zip((column.name for column in slo.columns), row, strict=True)) for row in slo.rows],
            many_queues=len(report.queues) > 1,
            queues=one_line(queues_shown(report)),
            priced=any(cost.cost is not None for cost in report.costs),
            incomplete=any(incomplete_minutes(report.data).values()),
            sections=_SECTIONS,
            notes=notes(report),
            point=_point(report),
            seen=partial(_seen, short=len(report.data.period.days) == 1),
            expected=_expected(report),
            # Files of this package, not text from a lake.
            style=Markup(_resource("report.css")),  # noqa: S704
            script=Markup(script),  # noqa: S704
            script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        )
    )


def _point(report: Report) -> str:
    """Return what a point of a chart covers, if that is more than a minute."""
    step = report.data.axis.step if report.data.axis else 1
    return "" if step == 1 else f"mean of {steps(step)}"


def _seen(one: Reason, *, short: bool) -> str:
    """Return the first and last time, without dates in the report of a single day."""
    times = (time for time in (one.first_seen, one.last_seen) if time is not None)
    texts = dict.fromkeys(f"{time:%H:%M}" if short else f"{time:%Y-%m-%d %H:%M}" for time in times)
    return " to ".join(texts)


def _expected(report: Report) -> int | None:
    """Return the index of the recommended choice."""
    found = report.recommendations.overall
    return None if found is None else [choice.workers for choice in found.choices].index(found.workers)


def _resource(name: str) -> str:
    return files("bulltask.lake.report").joinpath("templates", name).read_text("utf-8")


@cache
def _environment() -> Environment:
    made = Environment(
        loader=PackageLoader("bulltask.lake.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    units: dict[str, Unit] = {unit.name.lower(): unit for unit in Unit}
    filters: dict[str, Callable[[Any], str]] = {name: partial(_written, unit=unit) for name, unit in units.items()}
    made.filters.update(filters, line=one_line, lines=_lines)
    return made


def _written(value: Any, unit: Unit) -> str:
    return format_value(value, unit)


def _lines(text: str) -> str:
    """Return a text of several lines without control characters."""
    cut = text if len(text) <= _LONGEST else text[:_LONGEST] + " …"
    return "\n".join(one_line(line.replace("\t", "    ")) for line in cut.splitlines())
