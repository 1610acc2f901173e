"""A report of a lake, and what its charts show."""

from __future__ import annotations

from datetime import UTC, datetime

from bulltask.lake.report.build import Report, make_report
from bulltask.lake.report.period import Period
from tests.support.lake import LakeBuilder

__all__ = ["DAY", "reported", "values"]

DAY = Period.parse("2026-11-22")


def reported(lake: LakeBuilder, period: Period = DAY) -> Report:
    return make_report(lake.layout, period, made_at=datetime(2026, 11, 23, tzinfo=UTC))


def values(report: Report, chart: str) -> dict[str, list[float | None]]:
    return {line["label"]: line["values"] for line in report.charts[chart].payload["lines"]}
