"""Spark filters that Redis can apply: equality and membership of state and queue, bounds of ``finished_at``.

They are off by default. Spark up to 4.3 keeps what a filtered read has planned for the ``DataFrame`` that it came from
and does not plan again: a second query, or the other half of a union, silently gets the rows of the first. So filters
are safe only if each ``load()`` serves one query with one filter. The options ``state`` and ``queue`` are always safe.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
)

__all__ = ["PushedFilters"]

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MS = timedelta(milliseconds=1)


@dataclass
class PushedFilters:
    """What remains to be read after the filters that were pushed down; at first, everything.

    Attributes:
        queues: Only these, ``None`` for all.
        states: Only these, ``None`` for all.
        low_ms: Only jobs that ended then or later.
        high_ms: Only jobs that ended then or earlier.
    """

    queues: frozenset[str] | None = None
    states: frozenset[str] | None = None
    low_ms: int | None = None
    high_ms: int | None = None

    def allows_queue(self, name: str) -> bool:
        """Return whether a queue may have rows that pass."""
        return self.queues is None or name in self.queues

    def allows_state(self, name: str) -> bool:
        """Return whether a state may have rows that pass."""
        return self.states is None or name in self.states

    def time_bounds(self) -> tuple[str, str]:
        """Return the bounds of the time at which jobs ended, as Redis writes them."""
        low = "-inf" if self.low_ms is None else str(self.low_ms)
        return low, "+inf" if self.high_ms is None else str(self.high_ms)

    def push(self, one: Filter) -> bool:
        """Apply a filter if Redis can.

        Returns:
            True if only rows that pass will be read. Time bounds are whole milliseconds and apply only to jobs that
            have ended, so Spark applies them again.
        """
        match one:
            case EqualTo(attribute=("state",), value=value):
                self.states = _both(self.states, [value])
            case In(attribute=("state",), value=values):
                self.states = _both(self.states, values)
            case EqualTo(attribute=("queue",), value=value):
                self.queues = _both(self.queues, [value])
            case In(attribute=("queue",), value=values):
                self.queues = _both(self.queues, values)
            case _:
                self._push_time(one)
                return False
        return True

    def push_queue(self, one: Filter) -> bool:
        """Like :meth:`push`, for tables in which Redis can only filter by queue."""
        named = getattr(one, "attribute", None) == ("queue",)
        return named and self.push(one)

    def _push_time(self, one: Filter) -> None:
        if getattr(one, "attribute", None) != ("finished_at",):
            return
        found = getattr(one, "value", None)
        if not isinstance(found, datetime) or found.tzinfo is None:
            return
        if isinstance(one, EqualTo | GreaterThan | GreaterThanOrEqual):
            low_ms = (found - _EPOCH) // _MS
            self.low_ms = low_ms if self.low_ms is None else max(self.low_ms, low_ms)
        if isinstance(one, EqualTo | LessThan | LessThanOrEqual):
            high_ms = -((_EPOCH - found) // _MS)
            self.high_ms = high_ms if self.high_ms is None else min(self.high_ms, high_ms)


def _both(known: frozenset[str] | None, wanted: Collection[Any]) -> frozenset[str]:
    found = frozenset(wanted)
    return found if known is None else known & found
