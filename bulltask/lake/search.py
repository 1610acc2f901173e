"""Search the jobs of the lake, newest first, by the latest row of each job.

A job that failed and was completed by a later retry has two rows, and only the later row may match. The later row can
be in the directory of another day, so a matching row is a candidate until all rows of its job have been read. Days are
read from newest to oldest, with only as many candidates as the page still needs: memory does not grow with the lake.

The latest row usually has the latest end time, too, as after a manual retry. A backfill is the exception: a row that it
adds today can contain a completion that is earlier than a removal recorded last week. Therefore, a job's rows are
read from the day on which it was added onward.
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

__all__ = ["CLOCK_DIFFERENCE", "MAX_UNKNOWN_AGE", "latest_ranks", "row_key", "search", "seen_expression", "sort_rank"]

CLOCK_DIFFERENCE: Final = timedelta(days=1)
"""How much earlier a row's date can be than the time when the job was added, because clocks differ."""

MAX_UNKNOWN_AGE: Final = timedelta(days=31)
"""The assumed maximum lifetime of a job whose added event is missing."""

_EXTRA_CANDIDATES: Final = 16
"""Extra candidates, in case some are superseded."""

_MAX_DAYS_PER_READ: Final = 16

_ORDER: Final = [(name, "descending") for name in ("seen_at", "queue", "job_id", "incarnation_or_empty")]

Row = dict[str, Any]


def search(
    reader: TableReader, query: JobQuery, after: SearchPosition | None, max_rows: int
) -> list[tuple[SearchPosition, Row]]:
    """Return up to ``max_rows`` rows of ``silver.jobs`` that match, in order, with their positions.

    Args:
        reader: The lake.
        query: The filters.
        after: Only rows after this position.
        max_rows: The maximum number of rows.
    """
    rows: dict[SearchPosition, Row] = {}
    while len(rows) < max_rows:
        max_candidates = max_rows - len(rows) + _EXTRA_CANDIDATES
        candidates = _candidates(reader, query, after, max_candidates)
        rows.update(_latest(reader, candidates))
        if len(candidates) < max_candidates:
            break
        after = _position(candidates[-1])
    return list(rows.items())[:max_rows]


def seen_expression() -> Any:
    """Return an expression for the time of a job's end, or else of its last event; ``dt`` is the day of that time."""
    return pc.coalesce(ds.field("finished_at"), ds.field("as_of"))


def row_key(row: Row) -> tuple[str, str, str | None]:
    """Return the key of a row, which all rows of one incarnation of a job share."""
    return row["queue"], row["job_id"], row["incarnation"]


def sort_rank(row: Row) -> tuple[Any, ...]:
    """Return the sort key for rows with one key: ``as_of``, then values that make the order deterministic."""
    return row["as_of"], row["finished_at"] or row["as_of"], row["state"] or ""


def latest_ranks(rows: Sequence[Row]) -> dict[tuple[str, str, str | None], tuple[Any, ...]]:
    """Return the rank of the latest row for each key."""
    ranks: dict[tuple[str, str, str | None], tuple[Any, ...]] = {}
    for row in rows:
        key, rank = row_key(row), sort_rank(row)
        if key not in ranks or ranks[key] < rank:
            ranks[key] = rank
    return ranks


def _latest(reader: TableReader, candidates: Sequence[Row]) -> Iterator[tuple[SearchPosition, Row]]:
    """Yield the candidates that no later row supersedes."""
    if not candidates:
        return
    first = min(_earliest_time(row) for row in candidates).date() - CLOCK_DIFFERENCE
    ids = sorted({row["job_id"] for row in candidates})
    rows = reader.scan(
        JOBS,
        [day for day in reader.days(JOBS) if day >= first],
        lambda batches: [row for batch in batches for row in batch.to_pylist()],
        where=ds.field("job_id").isin(ids),
        columns=["queue", "job_id", "incarnation", "as_of", "finished_at", "state"],
    )
    ranks = latest_ranks(rows)
    for row in candidates:
        # A candidate that is no longer there has expired or is being rewritten: it still counts.
        if sort_rank(row) >= ranks.get(row_key(row), sort_rank(row)):
            yield _position(row), row


def _candidates(reader: TableReader, query: JobQuery, after: SearchPosition | None, max_rows: int) -> list[Row]:
    """Return the first matching rows in order; some may be superseded."""
    last_day = None if after is None else (_EPOCH + timedelta(microseconds=after.seen_us)).date()
    days = [day for day in reader.days(JOBS) if query.includes(day) and (last_day is None or day <= last_day)]
    where, rows = _expression(query, after), list[Row]()
    for portion in _day_portions(days[::-1]):
        read_first = partial(_first_rows, max_rows=max_rows - len(rows))
        rows += reader.scan(JOBS, portion, read_first, where=where, queue=query.queue)
        if len(rows) >= max_rows:
            break
    return rows


def _day_portions(days: Sequence[date]) -> Iterator[Sequence[date]]:
    """Yield the days in portions: first a single day, because most searches end there, then more, which is faster."""
    start, size = 0, 1
    while start < len(days):
        yield days[start : start + size]
        start, size = start + size, min(2 * size, _MAX_DAYS_PER_READ)


def _first_rows(batches: Iterator[Any], max_rows: int) -> list[Row]:
    """Return the first ``max_rows`` rows in search order."""
    kept = None
    for batch in batches:
        rows = pa.Table.from_batches([batch])
        rows = rows.append_column("seen_at", pc.coalesce(rows["finished_at"], rows["as_of"]))
        rows = rows.append_column("incarnation_or_empty", pc.fill_null(rows["incarnation"], ""))
        rows = rows if kept is None else pa.concat_tables([kept, rows])
        kept = rows.take(pc.select_k_unstable(rows, max_rows, _ORDER)) if rows.num_rows > max_rows else rows
    if kept is None:
        return []
    first_rows: list[Row] = kept.sort_by(_ORDER).to_pylist()
    return first_rows


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
        parts.append(pc.match_substring(ds.field("failed_reason"), query.text, ignore_case=True))
    if query.since is not None:
        parts.append(seen >= _time(query.since))
    if query.until is not None:
        parts.append(seen < _time(query.until))
    if after is not None:
        parts.append(_after(after))
    expression = None
    for part in parts:
        expression = part if expression is None else expression & part
    return expression


def _after(after: SearchPosition) -> Any:
    """Return an expression for the rows after a position."""
    incarnation = pc.coalesce(ds.field("incarnation"), pc.scalar(""))
    columns = [
        (seen_expression(), _time(_EPOCH + timedelta(microseconds=after.seen_us))),
        (ds.field("queue"), after.queue),
        (ds.field("job_id"), after.job_id),
        (incarnation, after.incarnation),
    ]
    expression = None
    for column, value in reversed(columns):
        expression = column < value if expression is None else (column < value) | ((column == value) & expression)
    return expression


_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def _seen_at(row: Row) -> datetime:
    moment: datetime = row["finished_at"] or row["as_of"]
    return moment


def _earliest_time(row: Row) -> datetime:
    """Return the earliest time at which the job can have existed."""
    seen = _seen_at(row)
    return min(seen, row["created_at"] or seen - MAX_UNKNOWN_AGE)


def _position(row: Row) -> SearchPosition:
    seen_us = (_seen_at(row) - _EPOCH) // timedelta(microseconds=1)
    return SearchPosition(seen_us, row["queue"], row["job_id"], row["incarnation"] or "")


def _time(moment: datetime) -> Any:
    return pa.scalar(moment, pa.timestamp("us", tz="UTC"))
