"""Filters of Spark that Redis can apply: equality and membership of state and queue, bounds of ``finished_at``.

Off unless asked for. Spark up to 4.3 keeps what a filtered read has planned for the whole ``DataFrame`` that it came
from, and plans no other read of it: a second query, or the other half of a union, silently gets the rows of the first.
So filters are safe only where each ``load()`` is for one query with one filter; the options ``state`` and ``queue``
always are.
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
    """What is left to read after the filters that were taken; nothing is taken at first.

    Attributes:
        queues: only these, ``None`` for all.
        states: only these, ``None`` for all.
        low_ms: only jobs that ended then or later.
        high_ms: only jobs that ended then or before.
    """

    queues: frozenset[str] | None = None
    states: frozenset[str] | None = None
    low_ms: int | None = None
    high_ms: int | None = None

    def allows_queue(self, name: str) -> bool:
        """True when a queue may have rows that pass."""
        return self.queues is None or name in self.queues

    def allows_state(self, name: str) -> bool:
        """True when a state may have rows that pass."""
        return self.states is None or name in self.states

    def time_bounds(self) -> tuple[str, str]:
        """Bounds of the times of ended jobs, in Redis' spelling."""
        low = "-inf" if self.low_ms is None else str(self.low_ms)
        return low, "+inf" if self.high_ms is None else str(self.high_ms)

    def push(self, one: Filter) -> bool:
        """Take a filter if it is of use.

        Returns:
            True when no other row than those that pass will be read. Bounds of times are whole milliseconds and are
            only kept for jobs that have ended, so Spark applies them once more.
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
        """:meth:`push` for tables in which Redis can apply filters of the queue only."""
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
