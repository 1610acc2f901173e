"""Search the jobs of the lake, newest first, by the latest row of each job.

A job that failed and was completed by a later retry has two rows, and only the later one may match. That one can be in
the directory of another day, so a matching row is a candidate until all rows of its job were read. Days are read from
newest to oldest, with only as many candidates as the page still needs: memory does not grow with the lake.

The latest row usually ends last, as with a manual retry. But a backfill can add today that a job which was removed a
week ago had been completed before that, in a gap. So the rows of a job are read from the day on which it was added.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, date, datetime, timedelta
from functools import partial
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from bulltask.lake.query import JobQuery, SearchPosition
from bulltask.lake.read import TableReader
from bulltask.lake.tables import JOBS

__all__ = ["APART", "UNSEEN", "key_of", "newest_rank", "rank_of", "search", "seen_expression"]

APART: Final = timedelta(days=1)
"""How far a row of a job can be before the job was added: the clocks of workers and senders differ from Redis'."""

UNSEEN: Final = timedelta(days=31)
"""The assumed maximum lifetime of a job whose added event is missing."""

_MORE: Final = 16
"""Extra candidates, in case some are superseded."""

_DAYS_AT_ONCE: Final = 16

_ORDER: Final = [(name, "descending") for name in ("seen_at", "queue", "job_id", "incarnation_or_empty")]

Row = dict[str, Any]


def search(
    reader: TableReader, query: JobQuery, after: SearchPosition | None, most: int
) -> list[tuple[SearchPosition, Row]]:
    """Return up to ``most`` rows of ``silver.jobs`` that match, in order, with their positions.

    Args:
        reader: the lake.
        query: the filters.
        after: only rows after this position.
        most: maximum number of rows.
    """
    found: dict[SearchPosition, Row] = {}
    while len(found) < most:
        wanted = most - len(found) + _MORE
        candidates = _candidates(reader, query, after, wanted)
        found.update(_latest(reader, candidates))
        if len(candidates) < wanted:
            break
        after = _position(candidates[-1])
    return list(found.items())[:most]


def seen_expression() -> Any:
    """Return when a job ended, else its last event; its ``dt`` is that day."""
    return pc.coalesce(ds.field("finished_at"), ds.field("as_of"))


def key_of(row: Row) -> tuple[str, str, str | None]:
    """Return the key of a row, which all rows of one incarnation of a job share."""
    return row["queue"], row["job_id"], row["incarnation"]


def rank_of(row: Row) -> tuple[Any, ...]:
    """Return the sort key for rows with one key: ``as_of``, then values that make the order deterministic."""
    return row["as_of"], row["finished_at"] or row["as_of"], row["state"] or ""


def newest_rank(rows: Sequence[Row]) -> dict[tuple[str, str, str | None], tuple[Any, ...]]:
    """Return the rank of the latest row for each key."""
    best: dict[tuple[str, str, str | None], tuple[Any, ...]] = {}
    for row in rows:
        key, rank = key_of(row), rank_of(row)
        if key not in best or best[key] < rank:
            best[key] = rank
    return best


def _latest(reader: TableReader, candidates: Sequence[Row]) -> Iterator[tuple[SearchPosition, Row]]:
    """Yield the candidates that no later row supersedes."""
    if not candidates:
        return
    first = min(_began(row) for row in candidates).date() - APART
    ids = sorted({row["job_id"] for row in candidates})
    rows = reader.over(
        JOBS,
        [day for day in reader.days(JOBS) if day >= first],
        lambda batches: [row for batch in batches for row in batch.to_pylist()],
        where=ds.field("job_id").isin(ids),
        columns=["queue", "job_id", "incarnation", "as_of", "finished_at", "state"],
    )
    best = newest_rank(rows)
    for row in candidates:
        # A candidate that has vanished since was expired or is being rewritten: it still counts.
        if rank_of(row) >= best.get(key_of(row), rank_of(row)):
            yield _position(row), row


def _candidates(reader: TableReader, query: JobQuery, after: SearchPosition | None, most: int) -> list[Row]:
    """Return the first matching rows in order; some may be superseded."""
    last = None if after is None else (_EPOCH + timedelta(microseconds=after.seen_us)).date()
    days = [day for day in reader.days(JOBS) if query.includes(day) and (last is None or day <= last)]
    where, found = _expression(query, after), list[Row]()
    for some in _growing(days[::-1]):
        first = partial(_first, most=most - len(found))
        found += reader.over(JOBS, some, first, where=where, queue=query.queue)
        if len(found) >= most:
            break
    return found


def _growing(days: Sequence[date]) -> Iterator[Sequence[date]]:
    """Yield the days in portions: first one, as most searches end there, then larger ones, which are faster."""
    start, size = 0, 1
    while start < len(days):
        yield days[start : start + size]
        start, size = start + size, min(2 * size, _DAYS_AT_ONCE)


def _first(batches: Iterator[Any], most: int) -> list[Row]:
    """Return the first ``most`` rows in search order."""
    kept = None
    for batch in batches:
        rows = pa.Table.from_batches([batch])
        rows = rows.append_column("seen_at", pc.coalesce(rows["finished_at"], rows["as_of"]))
        rows = rows.append_column("incarnation_or_empty", pc.fill_null(rows["incarnation"], ""))
        rows = rows if kept is None else pa.concat_tables([kept, rows])
        kept = rows.take(pc.select_k_unstable(rows, most, _ORDER)) if rows.num_rows > most else rows
    if kept is None:
        return []
    found: list[Row] = kept.sort_by(_ORDER).to_pylist()
    return found


def _expression(query: JobQuery, after: SearchPosition | None) -> Any:
    """Return the filters as an Arrow expression; ``None`` for all rows."""
    seen, parts = seen_expression(), list[Any]()
    for column, value in (
        ("job_id", query.id),
        ("name", query.name),
        ("state", query.state),
        ("error_fingerprint", query.error_fingerprint),
    ):
        if value is not None:
            parts.append(ds.field(column) == value)
    if query.text is not None:
        parts.append(pc.match_substring(ds.field("final_reason"), query.text, ignore_case=True))
    if query.since is not None:
        parts.append(seen >= _time(query.since))
    if query.until is not None:
        parts.append(seen < _time(query.until))
    if after is not None:
        parts.append(_after(after))
    whole = None
    for part in parts:
        whole = part if whole is None else whole & part
    return whole


def _after(after: SearchPosition) -> Any:
    """Return an expression for the rows after a position."""
    incarnation = pc.coalesce(ds.field("incarnation"), pc.scalar(""))
    columns = [
        (seen_expression(), _time(_EPOCH + timedelta(microseconds=after.seen_us))),
        (ds.field("queue"), after.queue),
        (ds.field("job_id"), after.job_id),
        (incarnation, after.incarnation),
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
    """Return the earliest time at which the job can have existed."""
    seen = _seen(row)
    return min(seen, row["created_at"] or seen - UNSEEN)


def _position(row: Row) -> SearchPosition:
    seen_us = (_seen(row) - _EPOCH) // timedelta(microseconds=1)
    return SearchPosition(seen_us, row["queue"], row["job_id"], row["incarnation"] or "")


def _time(moment: datetime) -> Any:
    return pa.scalar(moment, pa.timestamp("us", tz="UTC"))
