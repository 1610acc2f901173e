"""Reports on a lake, and the values in their charts."""

from __future__ import annotations

from datetime import UTC, date, datetime

from bulltask.lake.report.data import Period
from bulltask.lake.report.page import Report, make_report
from tests.support.lake import LakeBuilder

__all__ = ["DAY", "build_report", "period", "values"]


def period(text: str) -> Period:
    """Parse ``2026-11-22`` or ``2026-11-20..2026-11-22``."""
    days = [date.fromisoformat(day) for day in text.split("..")]
    return Period(days[0], days[-1])


DAY = period("2026-11-22")


def build_report(lake: LakeBuilder, days: Period = DAY) -> Report:
    return make_report(lake.lake, days, created_at=datetime(2026, 11, 23, tzinfo=UTC))


def values(report: Report, chart: str) -> dict[str, list[float | None]]:
    return {line["label"]: line["values"] for line in report.charts[chart].payload["lines"]}
