"""Format a report as Markdown, for chats, tickets and wikis."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from bulltask.lake.formatting import Unit, format_value
from bulltask.lake.report.build import Report
from bulltask.lake.report.charts import Chart
from bulltask.lake.report.tables import as_markdown, markdown_text
from bulltask.lake.report.views import notes, queues_shown, recommendation_text, tables

__all__ = ["markdown"]

_BLOCKS: Final = "▁▂▃▄▅▆▇█"
_WIDTH: Final = 60


def markdown(report: Report) -> str:
    """Return the Markdown of a report, in which untrusted text cannot become markup."""
    return "\n".join(_lines(report))


def _lines(report: Report) -> Iterator[str]:
    yield f"# Jobs, {report.data.period.title}\n"
    covered = f" · {report.covered}" if report.covered else ""
    yield f"{markdown_text(queues_shown(report))}{covered} · created {report.created_at:%Y-%m-%d %H:%M} UTC\n"
    for alert in report.alerts:
        yield f"> **{markdown_text(alert.title)}**\n>\n> {markdown_text(alert.text)}\n"
    if report.empty:
        return
    yield "| | | |\n|---|---:|---|"
    for figure in report.figures:
        yield f"| {figure.label} | **{figure.value}** | {figure.detail} |"
    yield ""
    yield from _sections(report)
    yield "---\n"
    yield from (f"* {note}" for note in notes(report))
    yield ""


def _sections(report: Report) -> Iterator[str]:
    report_tables, charts = tables(report), report.charts
    yield "## Throughput\n"
    yield from _sparks(charts["throughput"])
    yield "## Wait and run times\n"
    yield as_markdown(report_tables["tasks"])
    yield "## Failures\n"
    yield as_markdown(report_tables["reasons"]) if report.reasons else "No jobs failed.\n"
    if report.reasons_left[0]:
        reasons, count = report.reasons_left
        yield f"{reasons:,} other reasons: {count:,} failures\n"
    yield "## Requeued and stalled attempts\n"
    yield (
        as_markdown(report_tables["requeues"])
        if report_tables["requeues"].rows
        else "No attempts were requeued or stalled.\n"
    )
    yield "## Capacity\n"
    yield recommendation_text(report.recommendations)
    if "busy" in charts:
        yield from _sparks(charts["busy"])
    yield as_markdown(report_tables["capacity"])
    yield "## Objectives\n"
    yield as_markdown(report_tables["slo"]) if report_tables["slo"].rows else "No objectives are set.\n"
    yield "## Cost\n"
    yield as_markdown(report_tables["cost"]) if report_tables["cost"].rows else "No attempts ran.\n"
    yield "## Completeness\n"
    lost = any(alert.kind == "incomplete" for alert in report.alerts)
    no_gaps = "The gaps are no longer in bronze.gaps.\n" if lost else "No events were lost.\n"
    yield as_markdown(report_tables["gaps"]) if report_tables["gaps"].rows else no_gaps


def _sparks(chart: Chart) -> Iterator[str]:
    """Yield a sparkline for each line of a chart."""
    yield f"{chart.title}, over time:\n"
    yield "| | | |\n|---|---|---|"
    for line in chart.payload["lines"]:
        values = [value or 0 for value in line["values"]]
        highest = format_value(max(values), Unit(chart.payload["unit"]))
        yield f"| {markdown_text(line['label'])} | {_spark(values)} | at most {highest} |"
    yield ""


def _spark(values: Sequence[float]) -> str:
    size = -(-len(values) // _WIDTH)
    means = [sum(part) / len(part) for part in (values[at : at + size] for at in range(0, len(values), size))]
    highest = max(*means, 0.0) or 1.0
    return "".join(_BLOCKS[max(0, round(mean / highest * (len(_BLOCKS) - 1)))] for mean in means)
