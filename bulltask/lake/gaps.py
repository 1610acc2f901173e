"""What is known to be missing: the gaps, and what backfills have found of them; needs no JVM."""

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
"""By so much the clock of a worker, which says in a job's hash when it ended, may differ from Redis'."""

Key = tuple[str, str, datetime]

_BEGINNING: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class GapRow:
    """Lost events of one queue; the names are those of ``bronze.gaps``.

    Attributes:
        repaired_rows: jobs that backfills have found of it; ``None`` where none was made.
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
        """Whether events of this time may be among the lost ones."""
        ended_at = self.first_at or self.detected_at
        late = until is not None and self.after_at is not None and self.after_at >= until
        return not late and (since is None or ended_at >= since)

    @property
    def ends(self) -> tuple[datetime, datetime]:
        """From when and until when a job ended, by its worker's clock, whose end may be among the lost events."""
        begin = _BEGINNING if self.after_at is None else self.after_at - CLOCKS
        return begin, (self.first_at or self.detected_at) + CLOCKS


def find_gaps(
    layout: Layout,
    *,
    since: datetime | None = None,
    until: datetime | None = None,
    queues: Collection[str] | None = None,
) -> list[GapRow]:
    """Return the gaps that touch a time, in the order in which they were found.

    Args:
        layout: the lake.
        since: this time and later.
        until: before this time.
        queues: only of these.

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
    """Return those of some days on which jobs may have ended whose ends are among lost events.

    A backfill writes its rows to these days, and to no others.

    Raises:
        LakeError: there is no lake.
    """
    ends = [gap.ends for gap in find_gaps(layout)]
    return [day for day in days if any(begin.date() <= day <= end.date() for begin, end in ends)]


def _key(row: dict[str, Any]) -> Key:
    """Names a gap: a stream that is deleted and made anew begins at ``0-0`` each time."""
    return row["queue"], row["after_id"], row["detected_at"]


def _gap(row: dict[str, Any], repaired_rows: int | None) -> GapRow:
    known = {name: row[name] for name in GapRow.__dataclass_fields__ if name in row}
    return GapRow(**known, repaired_rows=repaired_rows)


def _rows(reader: TableReader, table: Table) -> list[dict[str, Any]]:
    def listed(batches: Iterator[Any]) -> list[dict[str, Any]]:
        return [row for batch in batches for row in batch.to_pylist()]

    return reader.over(table, reader.days(table), listed)
