"""A report of a lake, from its files to what it says."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from bulltask.lake.layout import Layout
from bulltask.lake.queue_names import check_queues, known_queues, spelled
from bulltask.lake.read import TableReader
from bulltask.lake.report.advice import Wish, advise
from bulltask.lake.report.data import busiest_day, read
from bulltask.lake.report.numbers import Report, report
from bulltask.lake.report.period import Period
from bulltask.lake.tables import CAPACITY_MINUTE, TASK_MINUTE

__all__ = ["make_report"]


def make_report(layout: Layout, period: Period, wish: Wish | None = None, *, made_at: datetime | None = None) -> Report:
    """Return what there is to say of some days. :func:`~bulltask.lake.report.page.html` and others make it readable.

    Args:
        layout: where the lake is.
        period: the days, and the queues, in the lake's spelling or BullMQ's.
        wish: what the recommended workers should be able to do; 99 % of the attempts begin within 2 s by default.
        made_at: now.

    Raises:
        LakeError: there is no lake, or it cannot be read.
        ConfigError: the wish is out of range, or the lake has nothing of a queue.
    """
    if period.queues:
        period = _spelled(layout, period)
    data = read(layout, period)
    advice = advise(*busiest_day(layout, data), wish or Wish())
    build = f"bulltask pipeline build gold --root {shlex.quote(str(layout.root))} --days {period}"
    return report(data, advice, made_at or datetime.now(UTC), build=build)


def _spelled(layout: Layout, period: Period) -> Period:
    """The period with its queues as the lake calls them."""
    reader = TableReader(layout)
    known = known_queues(reader)
    if not known.issuperset(spelled(queue, known) for queue in period.queues):  # gold may be kept for longest
        for table in (TASK_MINUTE, CAPACITY_MINUTE):
            known |= reader.over(table, reader.days(table), _queues_in, columns=["queue"])
    names = tuple(spelled(queue, known) for queue in period.queues)
    check_queues(layout.root, names, known)
    return replace(period, queues=names)


def _queues_in(batches: Iterator[Any]) -> set[str]:
    return {queue for batch in batches for queue in batch["queue"].unique().to_pylist()}
