"""Gaps: lost events, and the jobs that backfills have found for them; needs no JVM."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Any, Final

from bulltask.lake.layout import Layout
from bulltask.lake.read import TableReader
from bulltask.lake.tables import GAPS, REPAIRS, Table

__all__ = ["CLOCKS", "GapRow", "days_in_gaps", "find_gaps"]

CLOCKS: Final = timedelta(seconds=10)
"""How much the clock of a worker, whose time of a job's end is in the job's hash, can differ from Redis' clock."""

Key = tuple[str, str, datetime]

_BEGINNING: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class GapRow:
    """Lost events of one queue, with the columns of ``bronze.gaps``.

    Attributes:
        repaired_rows: jobs that backfills have found for it; ``None`` if there was no backfill.
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
        """Whether lost events can be from this time."""
        ended_at = self.first_at or self.detected_at
        late = until is not None and self.after_at is not None and self.after_at >= until
        return not late and (since is None or ended_at >= since)

    @property
    def ends(self) -> tuple[datetime, datetime]:
        """The time, by workers' clocks, in which a job ended if its end is among the lost events."""
        begin = _BEGINNING if self.after_at is None else self.after_at - CLOCKS
        return begin, (self.first_at or self.detected_at) + CLOCKS


def find_gaps(
    layout: Layout,
    *,
    since: datetime | None = None,
    until: datetime | None = None,
    queues: Collection[str] | None = None,
) -> list[GapRow]:
    """Return the gaps of a time, in the order in which they were detected.

    Args:
        layout: the lake.
        since: gaps that reach this time or later.
        until: gaps that begin before this time.
        queues: only gaps of these queues.

    Raises:
        LakeError: there is no lake.
    """
    reader, repaired = TableReader(layout), dict[Key, int]()
    for row in _rows(reader, REPAIRS):
        repaired[_key(row)] = repaired.get(_key(row), 0) + row["repaired_rows"]
    found = (_gap(row, repaired.get(_key(row))) for row in _rows(reader, GAPS))
    wanted = (one for one in found if one.touches(since, until) and (queues is None or one.queue in queues))
    return sorted(wanted, key=lambda one: (one.detected_at, one.queue))


def days_in_gaps(layout: Layout, days: Iterable[date]) -> list[date]:
    """Return the days on which jobs can have ended whose ends are among lost events.

    A backfill writes rows to these days only.

    Raises:
        LakeError: there is no lake.
    """
    ends = [gap.ends for gap in find_gaps(layout)]
    return [day for day in days if any(begin.date() <= day <= end.date() for begin, end in ends)]


def _key(row: dict[str, Any]) -> Key:
    """Return the key of a gap; it has the time, as every new stream of a queue begins at ``0-0``."""
    return row["queue"], row["after_id"], row["detected_at"]


def _gap(row: dict[str, Any], repaired_rows: int | None) -> GapRow:
    known = {name: row[name] for name in GapRow.__dataclass_fields__ if name in row}
    return GapRow(**known, repaired_rows=repaired_rows)


def _rows(reader: TableReader, table: Table) -> list[dict[str, Any]]:
    def listed(batches: Iterator[Any]) -> list[dict[str, Any]]:
        return [row for batch in batches for row in batch.to_pylist()]

    return reader.over(table, reader.days(table), listed)
