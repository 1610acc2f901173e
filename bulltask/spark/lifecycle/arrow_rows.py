"""Rows of ``silver.attempts`` and ``silver.jobs`` as Arrow tables, from derived arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bulltask.lake.arrow import arrow_schema
from bulltask.lake.tables import ATTEMPTS, JOBS, Table
from bulltask.spark.lifecycle.arrays import (
    KINDS,
    OUTCOMES,
    Bools,
    DerivedColumns,
    Ints,
    derive,
    in_order,
    is_one_of,
    job_numbers,
    lifecycle_events,
)
from bulltask.spark.lifecycle.error_fingerprints import error_fingerprint, plain_reason
from bulltask.spark.lifecycle.fold import FINISHED, MAX_TIME_MS, STATE_AFTER

__all__ = ["attempts", "attempts_of", "jobs", "jobs_of"]

_STATES: Final = tuple(STATE_AFTER[kind] for kind in KINDS)
_MAX_SEQ: Final = 999  # the greatest sequence number that `as_of` distinguishes


def attempts(events: pa.Table) -> pa.Table:
    """Derive all jobs' attempts from their events.

    Args:
        events: Rows of ``bronze.events`` without duplicates, in any order, with the columns `LIFECYCLE_COLUMNS`.

    Returns:
        ``silver.attempts`` with its partition ``queue``: a row for each attempt, including attempts that have not
        ended.
    """
    derived = _derive(events)
    return attempts_of(derived, derived.has_attempt)


def jobs(events: pa.Table) -> pa.Table:
    """Derive the jobs from their events.

    Args:
        events: The events, as for `attempts`.

    Returns:
        ``silver.jobs`` with its partition ``queue``: a row for each incarnation of each job, including unfinished ones.
    """
    derived = _derive(events)
    return jobs_of(derived, derived.is_last)


def attempts_of(derived: DerivedColumns, chosen: Bools) -> pa.Table:
    """Return the rows of ``silver.attempts`` for attempts that begin with the chosen events."""
    rows = _Rows(derived, np.flatnonzero(chosen))
    at = rows.at
    outcome = derived.outcome[at]
    failed_reason, fingerprint = rows.failed_reasons(np.where(outcome == OUTCOMES.index("failed"), derived.end[at], -1))
    columns = {
        "attempt": pa.array(derived.attempt_count[at], pa.int32()),
        "queued_at": _times(derived.queued_ms[at]),
        "started_at": _times(derived.started_ms[at]),
        "ended_at": _times(derived.ended_ms[at]),
        "wait_ms": _between(derived.queued_ms[at], derived.started_ms[at]),
        "run_ms": _between(derived.started_ms[at], derived.ended_ms[at]),
        "outcome": _take_strings(OUTCOMES, outcome),
        "failed_reason": failed_reason,
        "error_fingerprint": fingerprint,
        "as_of": rows.as_of(derived.as_of_event[at]),
    }
    return rows.table(ATTEMPTS, columns)


def jobs_of(derived: DerivedColumns, chosen: Bools) -> pa.Table:
    """Return the rows of ``silver.jobs`` for incarnations whose last events are chosen."""
    rows = _Rows(derived, np.flatnonzero(chosen))
    at, lifecycles = rows.at, derived.lifecycles
    kept, added_ms = derived.kept[at], lifecycles.ms[derived.added[at]]
    # A finished job stays finished when it is removed.
    decisive = np.where(is_one_of(lifecycles.kind[kept], FINISHED), kept, at)
    state = lifecycles.kind[decisive]
    finished_ms = np.where(is_one_of(state, FINISHED), lifecycles.ms[decisive], -1)
    failed_reason, fingerprint = rows.failed_reasons(np.where(is_one_of(state, ("failed",)), decisive, -1))
    columns = {
        "created_at": _times(added_ms),
        "first_started_at": _times(derived.first_started_ms[at]),
        "finished_at": _times(finished_ms),
        "state": _take_strings(_STATES, state),
        "attempt_count": pa.array(derived.attempt_count[at], pa.int32()),
        "stalls": pa.array(derived.stalls[at], pa.int32()),
        "wait_ms": _known(derived.wait_ms[at]),
        "run_ms": _known(derived.run_ms[at]),
        "total_ms": _between(added_ms, finished_ms),
        "failed_reason": failed_reason,
        "error_fingerprint": fingerprint,
        "as_of": rows.as_of(decisive),
    }
    return rows.table(JOBS, columns)


class _Rows:
    """The common columns of the rows of both tables.

    Args:
        derived: The events.
        at: The index of the event from which each row is derived.
    """

    def __init__(self, derived: DerivedColumns, at: Ints) -> None:
        self._lifecycles = derived.lifecycles
        self._added = derived.added[at]
        self.at = at

    def as_of(self, decisive: Ints) -> pa.Array:
        """Return the value of `bulltask.spark.lifecycle.fold.LifecycleEvent.as_of_us` for events."""
        us = np.minimum(self._lifecycles.ms[decisive], MAX_TIME_MS) * 1000 + np.minimum(
            self._lifecycles.seq[decisive], _MAX_SEQ
        )
        return pa.array(us).cast(pa.timestamp("us", "UTC"))

    def failed_reasons(self, decisive: Ints) -> tuple[pa.Array, pa.Array]:
        """Return the failure reasons as plain text, and their fingerprints, computed once per reason."""
        encoded = self._texts("failed_reason", decisive).dictionary_encode()
        plain = [plain_reason(reason) for reason in encoded.dictionary.to_pylist()]
        reasons = pa.array(plain, pa.string()), pa.array([error_fingerprint(reason) for reason in plain], pa.string())
        return tuple(column.take(encoded.indices) for column in reasons)

    def table(self, table: Table, columns: dict[str, pa.Array]) -> pa.Table:
        """Return the table with these columns; columns that cannot be derived from events are null."""
        makers: dict[str, Callable[[], pa.Array]] = {
            "queue": lambda: self._texts("queue", self.at),
            "job_id": lambda: self._texts("job_id", self.at),
            "name": lambda: self._texts("name", self._added),
            "incarnation": self._incarnation,
            "source": lambda: pa.repeat(pa.scalar("events"), len(self.at)),
        }
        schema = pa.schema([field for field in arrow_schema(table) if field.name not in {"dt", "ingest_id"}])
        arrays = [
            columns[field.name]
            if field.name in columns
            else makers[field.name]()
            if field.name in makers
            else pa.nulls(len(self.at), field.type)
            for field in schema
        ]
        return pa.Table.from_arrays(arrays, schema=schema)

    def _incarnation(self) -> pa.Array:
        """Return the id of the added event."""
        ms, seq = (_known(part[self._added]).cast(pa.string()) for part in (self._lifecycles.ms, self._lifecycles.seq))
        return pc.binary_join_element_wise(ms, seq, "-")

    def _texts(self, column: str, at: Ints) -> pa.Array:
        """Return a string column of events; null where there is no event."""
        indexes = np.append(self._lifecycles.order, 0)[at]
        texts = self._lifecycles.table[column].take(pa.array(indexes, mask=at < 0))
        return texts.combine_chunks() if isinstance(texts, pa.ChunkedArray) else texts


def _derive(events: pa.Table) -> DerivedColumns:
    derived = lifecycle_events(events)
    return derive(in_order(derived, job_numbers(derived), np.ones(derived.num_rows, bool)))


def _known(numbers: Ints) -> pa.Array:
    return pa.array(numbers, mask=numbers < 0)


def _between(first_ms: Ints, last_ms: Ints) -> pa.Array:
    return pa.array(last_ms - first_ms, mask=(first_ms < 0) | (last_ms < 0))


def _times(ms: Ints) -> pa.Array:
    return pa.array(np.minimum(ms, MAX_TIME_MS) * 1000, mask=ms < 0).cast(pa.timestamp("us", "UTC"))


def _take_strings(strings: tuple[str, ...], numbers: Ints) -> pa.Array:
    return pa.array(strings, pa.string()).take(pa.array(numbers))
