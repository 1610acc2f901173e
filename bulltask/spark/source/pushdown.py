"""Spark filters that Redis can apply: ``=`` and ``IN`` on state and queue, and bounds on ``finished_at``.

They are off by default. Spark up to 4.3 keeps a ``DataFrame``'s plan of a filtered read and does not plan it again: a
second query, or the other side of a union, silently gets the rows of the first. Filters are therefore safe only if each
``load()`` is used for one query with one filter. The options ``state`` and ``queue`` are always safe.
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
    """The filters that were pushed down to Redis.

    Attributes:
        queues: Only these queues; ``None`` for all.
        states: Only these states; ``None`` for all.
        low_ms: Only jobs that finished at this time or later.
        high_ms: Only jobs that finished at this time or earlier.
    """

    queues: frozenset[str] | None = None
    states: frozenset[str] | None = None
    low_ms: int | None = None
    high_ms: int | None = None

    def allows_queue(self, name: str) -> bool:
        """Return whether a queue may have rows that match."""
        return self.queues is None or name in self.queues

    def allows_state(self, name: str) -> bool:
        """Return whether a state may have rows that match."""
        return self.states is None or name in self.states

    def time_bounds(self) -> tuple[str, str]:
        """Return the bounds on the time at which jobs finished, in Redis' syntax."""
        low = "-inf" if self.low_ms is None else str(self.low_ms)
        return low, "+inf" if self.high_ms is None else str(self.high_ms)

    def push(self, filter_: Filter) -> bool:
        """Apply a filter if Redis can.

        Returns:
            True if only rows that match will be read. Time bounds are whole milliseconds and apply only to finished
            jobs, so Spark applies them again.
        """
        match filter_:
            case EqualTo(attribute=("state",), value=value):
                self.states = _both(self.states, [value])
            case In(attribute=("state",), value=values):
                self.states = _both(self.states, values)
            case EqualTo(attribute=("queue",), value=value):
                self.queues = _both(self.queues, [value])
            case In(attribute=("queue",), value=values):
                self.queues = _both(self.queues, values)
            case _:
                self._push_time(filter_)
                return False
        return True

    def push_queue(self, filter_: Filter) -> bool:
        """Like :meth:`push`, for tables in which Redis can only filter by queue."""
        is_queue = getattr(filter_, "attribute", None) == ("queue",)
        return is_queue and self.push(filter_)

    def _push_time(self, filter_: Filter) -> None:
        if getattr(filter_, "attribute", None) != ("finished_at",):
            return
        value = getattr(filter_, "value", None)
        if not isinstance(value, datetime) or value.tzinfo is None:
            return
        if isinstance(filter_, EqualTo | GreaterThan | GreaterThanOrEqual):
            low_ms = (value - _EPOCH) // _MS
            self.low_ms = low_ms if self.low_ms is None else max(self.low_ms, low_ms)
        if isinstance(filter_, EqualTo | LessThan | LessThanOrEqual):
            high_ms = -((_EPOCH - value) // _MS)
            self.high_ms = high_ms if self.high_ms is None else min(self.high_ms, high_ms)


def _both(known: frozenset[str] | None, wanted: Collection[Any]) -> frozenset[str]:
    values = frozenset(wanted)
    return values if known is None else known & values
