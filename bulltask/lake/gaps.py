"""Gaps: lost events, and the jobs that backfills have added. Does not require a JVM."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Any, Final

from bulltask.lake.layout import Layout
from bulltask.lake.read import TableReader
from bulltask.lake.tables import BACKFILLS, GAPS, Table

__all__ = ["CLOCK_TOLERANCE", "GapRow", "days_in_gaps", "find_gaps"]

CLOCK_TOLERANCE: Final = timedelta(seconds=10)
"""How much the clock of the worker that writes ``finishedOn`` to the job's hash may differ from Redis' clock."""

Key = tuple[str, str, datetime]

_BEGINNING: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class GapRow:
    """Lost events of one queue, with the columns of ``bronze.gaps``.

    Attributes:
        backfilled_jobs: The number of jobs that backfills have added; ``None`` if there was no backfill.
    """

    queue: str
    last_id_before: str
    first_id_after: str | None
    lost: int
    exact: bool
    loss_reason: str
    last_at_before: datetime | None
    first_at_after: datetime | None
    detected_at: datetime
    backfilled_jobs: int | None

    def overlaps(self, since: datetime | None, until: datetime | None) -> bool:
        """Whether lost events can be from this period."""
        until_at = self.first_at_after or self.detected_at
        late = until is not None and self.last_at_before is not None and self.last_at_before >= until
        return not late and (since is None or until_at >= since)

    @property
    def finish_period(self) -> tuple[datetime, datetime]:
        """The period, by workers' clocks, in which jobs without their *completed* or *failed* event finished."""
        begin = _BEGINNING if self.last_at_before is None else self.last_at_before - CLOCK_TOLERANCE
        return begin, (self.first_at_after or self.detected_at) + CLOCK_TOLERANCE


def find_gaps(
    layout: Layout,
    *,
    since: datetime | None = None,
    until: datetime | None = None,
    queues: Collection[str] | None = None,
) -> list[GapRow]:
    """Return the gaps of a period, in the order in which they were detected.

    Args:
        layout: The lake.
        since: Only gaps that end at this time or later.
        until: Only gaps that begin before this time.
        queues: Only gaps of these queues.

    Raises:
        LakeError: There is no lake.
    """
    reader, backfilled = TableReader(layout), dict[Key, int]()
    for row in _read_rows(reader, BACKFILLS):
        backfilled[_gap_key(row)] = backfilled.get(_gap_key(row), 0) + row["backfilled_jobs"]
    gaps = (_gap_row(row, backfilled.get(_gap_key(row))) for row in _read_rows(reader, GAPS))
    matching = (gap for gap in gaps if gap.overlaps(since, until) and (queues is None or gap.queue in queues))
    return sorted(matching, key=lambda gap: (gap.detected_at, gap.queue))


def days_in_gaps(layout: Layout, days: Iterable[date]) -> list[date]:
    """Return the days on which jobs without their *completed* or *failed* event may have finished.

    A backfill writes rows to these days only.

    Raises:
        LakeError: There is no lake.
    """
    periods = [gap.finish_period for gap in find_gaps(layout)]
    return [day for day in days if any(begin.date() <= day <= end.date() for begin, end in periods)]


def _gap_key(row: dict[str, Any]) -> Key:
    """Return the key of a gap. It includes the time, because every new stream of a queue begins at ``0-0``."""
    return row["queue"], row["last_id_before"], row["detected_at"]


def _gap_row(row: dict[str, Any], backfilled_jobs: int | None) -> GapRow:
    known = {name: row[name] for name in GapRow.__dataclass_fields__ if name in row}
    return GapRow(**known, backfilled_jobs=backfilled_jobs)


def _read_rows(reader: TableReader, table: Table) -> list[dict[str, Any]]:
    def read(batches: Iterator[Any]) -> list[dict[str, Any]]:
        return [row for batch in batches for row in batch.to_pylist()]

    return reader.scan(table, reader.days(table), read)
