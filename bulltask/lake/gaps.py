"""Gaps: lost events, and the jobs that backfills have recovered. Needs no JVM."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Any, Final

from bulltask.lake.layout import Layout
from bulltask.lake.read import TableReader
from bulltask.lake.tables import GAPS, REPAIRS, Table

__all__ = ["CLOCK_TOLERANCE", "GapRow", "days_in_gaps", "find_gaps"]

CLOCK_TOLERANCE: Final = timedelta(seconds=10)
"""How much the clock of a worker, which writes a job's end to the job's hash, may differ from Redis' clock."""

Key = tuple[str, str, datetime]

_BEGINNING: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class GapRow:
    """Lost events of one queue, with the columns of ``bronze.gaps``.

    Attributes:
        repaired_rows: The number of jobs that backfills have recovered; ``None`` if there was no backfill.
    """

    queue: str
    after_id: str
    first_id: str | None
    lost: int
    exact: bool
    reason: str
    after_at: datetime | None
    first_at: datetime | None
    detected_at: datetime
    repaired_rows: int | None

    def touches(self, since: datetime | None, until: datetime | None) -> bool:
        """Whether lost events can be from this period."""
        ended_at = self.first_at or self.detected_at
        late = until is not None and self.after_at is not None and self.after_at >= until
        return not late and (since is None or ended_at >= since)

    @property
    def ends(self) -> tuple[datetime, datetime]:
        """The period, by workers' clocks, in which a job ended if its end is among the lost events."""
        begin = _BEGINNING if self.after_at is None else self.after_at - CLOCK_TOLERANCE
        return begin, (self.first_at or self.detected_at) + CLOCK_TOLERANCE


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
    reader, repaired = TableReader(layout), dict[Key, int]()
    for row in _read_rows(reader, REPAIRS):
        repaired[_gap_key(row)] = repaired.get(_gap_key(row), 0) + row["repaired_rows"]
    gaps = (_gap_row(row, repaired.get(_gap_key(row))) for row in _read_rows(reader, GAPS))
    matching = (gap for gap in gaps if gap.touches(since, until) and (queues is None or gap.queue in queues))
    return sorted(matching, key=lambda gap: (gap.detected_at, gap.queue))


def days_in_gaps(layout: Layout, days: Iterable[date]) -> list[date]:
    """Return the days on which jobs may have ended without a recorded end, because the event was lost.

    A backfill writes rows to these days only.

    Raises:
        LakeError: There is no lake.
    """
    ends = [gap.ends for gap in find_gaps(layout)]
    return [day for day in days if any(begin.date() <= day <= end.date() for begin, end in ends)]


def _gap_key(row: dict[str, Any]) -> Key:
    """Return the key of a gap. It includes the time, because every new stream of a queue begins at ``0-0``."""
    return row["queue"], row["after_id"], row["detected_at"]


def _gap_row(row: dict[str, Any], repaired_rows: int | None) -> GapRow:
    known = {name: row[name] for name in GapRow.__dataclass_fields__ if name in row}
    return GapRow(**known, repaired_rows=repaired_rows)


def _read_rows(reader: TableReader, table: Table) -> list[dict[str, Any]]:
    def read(batches: Iterator[Any]) -> list[dict[str, Any]]:
        return [row for batch in batches for row in batch.to_pylist()]

    return reader.over(table, reader.days(table), read)
