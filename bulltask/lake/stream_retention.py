"""How long a queue's stream of events holds what nobody has read yet, and how long it should be.

A stream of events is a ring: Redis keeps the newest ``maxLen`` entries (10,000 unless the queue says otherwise). What
a reader has not read before the ring has gone round once is lost. The figures here are those of the documentation and
of ``bulltask pipeline doctor``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

__all__ = [
    "BYTES_PER_EVENT",
    "DEFAULT_LENGTH",
    "EVENTS_PER_JOB",
    "RetentionExample",
    "RetentionNeed",
    "StreamRetention",
    "busiest_rate",
    "recommended_length",
    "retention_examples",
]

DEFAULT_LENGTH: Final = 10_000
"""BullMQ's ``streams.events.maxLen``."""

EVENTS_PER_JOB: Final = 4.15
"""``added``, ``waiting``, ``active``, ``completed``, and what 4 of 100 jobs tell that are tried again; measured."""

BYTES_PER_EVENT: Final = 61
"""What an event takes in Redis, without its return value; measured."""

_STEP: Final = 1_000


@dataclass(frozen=True, slots=True)
class RetentionNeed:
    """How long a ring must hold what was written.

    Attributes:
        trigger_s: seconds between two batches.
        batch_s: seconds that a batch takes.
        outage_s: seconds for which nobody may read, without a loss.
    """

    trigger_s: float
    batch_s: float
    outage_s: float = 0.0

    @property
    def seconds(self) -> float:
        """Two rounds, as an event may come just behind a batch and the next one may be slow; or the outage."""
        return max(2 * (self.trigger_s + self.batch_s), self.outage_s)


@dataclass(frozen=True, slots=True)
class StreamRetention:
    """One queue's ring.

    Attributes:
        queue: as the user spells it.
        length: entries that are there.
        limit: the most that Redis keeps: ``opts.maxLenEvents`` of the queue's ``meta``.
        rate: events a second, at the busiest that the ring shows; ``None`` where it does not show any time.
    """

    queue: str
    length: int
    limit: int
    rate: float | None

    @property
    def headroom_s(self) -> float | None:
        """For how many seconds the ring holds what is written at this rate; ``None`` where the rate is not known."""
        return self.limit / self.rate if self.rate else None

    def is_enough(self, need: RetentionNeed) -> bool | None:
        """Whether that is long enough; ``None`` where the rate is not known."""
        return None if self.headroom_s is None else self.headroom_s >= need.seconds

    def advice(self, need: RetentionNeed) -> int | None:
        """The ``maxLen`` that would be enough; ``None`` where the rate is not known."""
        return None if self.rate is None else recommended_length(self.rate, need)


def recommended_length(rate: float, need: RetentionNeed) -> int:
    """Return the least ``maxLen``, in thousands, that holds events of this many a second for as long as needed."""
    # A ring of 29,999.99999 by floating point is one of 30,000.
    return max(DEFAULT_LENGTH, math.ceil(round(rate * need.seconds / _STEP, 6)) * _STEP)


def busiest_rate(spans: Iterable[tuple[int, int]]) -> float | None:
    """Return events a second of the busiest of some spans of time.

    Args:
        spans: how many events, in how many ms; one under a second counts as a second.
    """
    return max((count * 1_000 / max(ms, 1_000) for count, ms in spans if count), default=None)


@dataclass(frozen=True, slots=True)
class RetentionExample:
    """A line of the table of retention_examples.

    Attributes:
        jobs_per_s: jobs a second.
        events_per_s: the events that these make.
        default_holds_s: seconds that the default ring holds them.
        near_live: ``maxLen`` for batches of 10 s that take 5 s.
        quarter_hour: ``maxLen`` to survive 15 minutes without a reader.
        quarter_hour_mb: what that takes in Redis.
    """

    jobs_per_s: int
    events_per_s: float
    default_holds_s: float
    near_live: int
    quarter_hour: int
    quarter_hour_mb: float


def retention_examples(jobs_per_s: Iterable[int] = (10, 50, 200, 1_000, 5_000)) -> list[RetentionExample]:
    """Return the table of retention_examples, a line for each number of jobs a second."""
    found: list[RetentionExample] = []
    for jobs in jobs_per_s:
        rate = jobs * EVENTS_PER_JOB
        long = recommended_length(rate, RetentionNeed(10, 5, 900))
        near = recommended_length(rate, RetentionNeed(10, 5))
        found.append(RetentionExample(jobs, rate, DEFAULT_LENGTH / rate, near, long, long * BYTES_PER_EVENT / 1e6))
    return found
