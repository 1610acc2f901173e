"""Searching the jobs of the lake, the newest first, where the latest knowledge of a job wins.

A job that failed and was completed by a later retry has two rows, and only the later one may be found. It may be in
the directory of another day, so a row that fits is a candidate, until all rows of its job have been looked at. Days are
read from the newest to the oldest, and of each only as many candidates are kept as the page still needs: the memory of
a search does not grow with the lake.

The row that counts mostly lies behind the others: a job that is retried by hand ends later. But a backfill may find out
today that a job which was removed a week later had been completed before, in a gap. So the rows of a job are looked for
from the day on which it was added.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, date, datetime, timedelta
from functools import partial
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from bulltask.lake.query import JobQuery, Position
from bulltask.lake.read import TableReader
from bulltask.lake.tables import JOBS

__all__ = ["APART", "UNSEEN", "key_of", "newest_rank", "rank_of", "search", "seen_expression"]

APART: Final = timedelta(days=1)
"""A row of a job is at most so far before its beginning: clocks of workers and senders differ from Redis', by less."""

UNSEEN: Final = timedelta(days=31)
"""A job of which nobody saw the beginning is taken to have lived no longer than this."""

_MORE: Final = 16
"""Candidates that are kept beyond those that are needed, in case some are superseded."""

_DAYS_AT_ONCE: Final = 16

_ORDER: Final = [(name, "descending") for name in ("seen_at", "queue", "job_id", "alive")]

Row = dict[str, Any]


def search(reader: TableReader, query: JobQuery, after: Position | None, most: int) -> list[tuple[Position, Row]]:
    """Return up to ``most`` rows of ``silver.jobs`` that fit and count, in order, each with its place in it.

    Args:
        reader: of the lake.
        query: which jobs.
        after: only those behind this place.
        most: how many.
    """
    found: dict[Position, Row] = {}
    while len(found) < most:
        wanted = most - len(found) + _MORE
        candidates = _candidates(reader, query, after, wanted)
        found.update(_counting(reader, candidates))
        if len(candidates) < wanted:
            break
        after = _position(candidates[-1])
    return list(found.items())[:most]


def seen_expression() -> Any:
    """When a job was done, else last seen: its ``dt`` is the day of it."""
    return pc.coalesce(ds.field("finished_at"), ds.field("as_of"))


def key_of(row: Row) -> tuple[str, str, str | None]:
    """What rows of one life of a job have in common."""
    return row["queue"], row["job_id"], row["life"]


def rank_of(row: Row) -> tuple[Any, ...]:
    """Orders the rows of one life by how late their knowledge is; the rest makes it the same in every read."""
    return row["as_of"], row["finished_at"] or row["as_of"], row["state"] or ""


def newest_rank(rows: Sequence[Row]) -> dict[tuple[str, str, str | None], tuple[Any, ...]]:
    """The rank of the row that counts, for each life."""
    best: dict[tuple[str, str, str | None], tuple[Any, ...]] = {}
    for row in rows:
        key, rank = key_of(row), rank_of(row)
        if key not in best or best[key] < rank:
            best[key] = rank
    return best


def _counting(reader: TableReader, candidates: Sequence[Row]) -> Iterator[tuple[Position, Row]]:
    """Of candidates, those that no other row of their life takes the place of."""
    if not candidates:
        return
    first = min(_began(row) for row in candidates).date() - APART
    ids = sorted({row["job_id"] for row in candidates})
    rows = reader.over(
        JOBS,
        [day for day in reader.days(JOBS) if day >= first],
        lambda batches: [row for batch in batches for row in batch.to_pylist()],
        where=ds.field("job_id").isin(ids),
        columns=["queue", "job_id", "life", "as_of", "finished_at", "state"],
    )
    best = newest_rank(rows)
    for row in candidates:
        # A row that is gone by now was expired or is being written anew: it was there when it was found.
        if rank_of(row) >= best.get(key_of(row), rank_of(row)):
            yield _position(row), row


def _candidates(reader: TableReader, query: JobQuery, after: Position | None, most: int) -> list[Row]:
    """The first rows that fit, in order; some may be superseded."""
    last = None if after is None else (_EPOCH + timedelta(microseconds=after.seen_us)).date()
    days = [day for day in reader.days(JOBS) if query.holds(day) and (last is None or day <= last)]
    where, found = _expression(query, after), list[Row]()
    for some in _growing(days[::-1]):
        first = partial(_first, most=most - len(found))
        found += reader.over(JOBS, some, first, where=where, queue=query.queue)
        if len(found) >= most:
            break
    return found


def _growing(days: Sequence[date]) -> Iterator[Sequence[date]]:
    """Days in portions: one first, as the newest are asked for most, then more at once, which is faster."""
    start, size = 0, 1
    while start < len(days):
        yield days[start : start + size]
        start, size = start + size, min(2 * size, _DAYS_AT_ONCE)


def _first(batches: Iterator[Any], most: int) -> list[Row]:
    """The first ``most`` rows of any number, in the order of searches."""
    kept = None
    for batch in batches:
        rows = pa.Table.from_batches([batch])
        rows = rows.append_column("seen_at", pc.coalesce(rows["finished_at"], rows["as_of"]))
        rows = rows.append_column("alive", pc.fill_null(rows["life"], ""))
        rows = rows if kept is None else pa.concat_tables([kept, rows])
        kept = rows.take(pc.select_k_unstable(rows, most, _ORDER)) if rows.num_rows > most else rows
    if kept is None:
        return []
    found: list[Row] = kept.sort_by(_ORDER).to_pylist()
    return found


def _expression(query: JobQuery, after: Position | None) -> Any:
    """The rows that fit, as Arrow understands it; ``None`` for all."""
    seen, parts = seen_expression(), list[Any]()
    for column, value in (
        ("job_id", query.id), ("name", query.name), ("state", query.state), ("error_key", query.error_key)
    ):  # fmt: skip
        if value is not None:
            parts.append(ds.field(column) == value)
    if query.text is not None:
        parts.append(pc.match_substring(ds.field("final_reason"), query.text, ignore_case=True))
    if query.since is not None:
        parts.append(seen >= _time(query.since))
    if query.until is not None:
        parts.append(seen < _time(query.until))
    if after is not None:
        parts.append(_behind(after))
    whole = None
    for part in parts:
        whole = part if whole is None else whole & part
    return whole


def _behind(after: Position) -> Any:
    """The rows whose place is behind this one."""
    alive = pc.coalesce(ds.field("life"), pc.scalar(""))
    columns = [
        (seen_expression(), _time(_EPOCH + timedelta(microseconds=after.seen_us))),
        (ds.field("queue"), after.queue),
        (ds.field("job_id"), after.job_id),
        (alive, after.life),
    ]
    whole = None
    for column, value in reversed(columns):
        whole = column < value if whole is None else (column < value) | ((column == value) & whole)
    return whole


_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def _seen(row: Row) -> datetime:
    moment: datetime = row["finished_at"] or row["as_of"]
    return moment


def _began(row: Row) -> datetime:
    """The earliest moment at which anything can have happened to its job."""
    seen = _seen(row)
    return min(seen, row["created_at"] or seen - UNSEEN)


def _position(row: Row) -> Position:
    seen_us = (_seen(row) - _EPOCH) // timedelta(microseconds=1)
    return Position(seen_us, row["queue"], row["job_id"], row["life"] or "")


def _time(moment: datetime) -> Any:
    return pa.scalar(moment, pa.timestamp("us", tz="UTC"))
