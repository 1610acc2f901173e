"""A report of a lake, from its files to what it says."""

from __future__ import annotations

import shlex
from datetime import UTC, datetime

from bulltask.lake.layout import Layout
from bulltask.lake.report.advice import Wish, advise
from bulltask.lake.report.data import busiest_day, read
from bulltask.lake.report.numbers import Report, report
from bulltask.lake.report.period import Period

__all__ = ["make_report"]


def make_report(layout: Layout, period: Period, wish: Wish | None = None, *, made_at: datetime | None = None) -> Report:
    """Return what there is to say of some days. :func:`~bulltask.lake.report.page.html` and others make it readable.

    Args:
        layout: where the lake is.
        period: the days, and the queues.
        wish: what the recommended workers should be able to do; 99 % of the attempts begin within 2 s by default.
        made_at: now.

    Raises:
        LakeError: there is no lake, or it cannot be read.
        ConfigError: the wish is out of range.
    """
    data = read(layout, period)
    advice = advise(*busiest_day(layout, data), wish or Wish())
    build = f"bulltask pipeline build gold --root {shlex.quote(str(layout.root))} --days {period}"
    return report(data, advice, made_at or datetime.now(UTC), build=build)
