"""How long Redis keeps a queue's events, and how long its event stream should be.

An event stream is bounded: Redis keeps the newest ``maxLen`` entries (10,000 by default). Events that are trimmed
before they have been read are lost. The documentation and ``bulltask pipeline doctor`` use the figures in this module.
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
"""``added``, ``waiting``, ``active``, ``completed``, and more events for the 4% of jobs that are retried; measured."""

BYTES_PER_EVENT: Final = 61
"""The memory of an event in Redis without its return value; measured."""

_STEP: Final = 1_000


@dataclass(frozen=True, slots=True)
class RetentionNeed:
    """How long a stream must keep events.

    Attributes:
        trigger_s: Seconds between two batches.
        batch_s: Seconds that a batch takes.
        outage_s: The longest pause of the pipeline, in seconds, during which no event may be lost.
    """

    trigger_s: float
    batch_s: float
    outage_s: float = 0.0

    @property
    def seconds(self) -> float:
        """The time of two batches (an event can arrive just after a batch, and the next can be slow), or the outage."""
        return max(2 * (self.trigger_s + self.batch_s), self.outage_s)


@dataclass(frozen=True, slots=True)
class StreamRetention:
    """A queue's event stream and its retention.

    Attributes:
        queue: The queue, without BullMQ's braces.
        length: The number of its entries.
        limit: The maximum number of entries: ``opts.maxLenEvents`` of the queue's ``meta``.
        rate: Events per second at the busiest time in the stream; ``None`` if unknown.
    """

    queue: str
    length: int
    limit: int
    rate: float | None

    @property
    def retention_s(self) -> float | None:
        """The number of seconds that the stream keeps events at this rate; ``None`` if the rate is unknown."""
        return self.limit / self.rate if self.rate else None

    def is_enough(self, need: RetentionNeed) -> bool | None:
        """Whether the stream keeps events long enough; ``None`` if the rate is unknown."""
        return None if self.retention_s is None else self.retention_s >= need.seconds

    def recommended_limit(self, need: RetentionNeed) -> int | None:
        """Return the ``maxLen`` that is long enough; ``None`` if the rate is unknown."""
        return None if self.rate is None else recommended_length(self.rate, need)


def recommended_length(rate: float, need: RetentionNeed) -> int:
    """Return the smallest ``maxLen``, in whole thousands, that keeps events at this rate for as long as needed."""
    # Rounded first, as floating point can turn 30,000 into 30,000.00001.
    return max(DEFAULT_LENGTH, math.ceil(round(rate * need.seconds / _STEP, 6)) * _STEP)


def busiest_rate(spans: Iterable[tuple[int, int]]) -> float | None:
    """Return the events per second of the busiest span of time.

    Args:
        spans: The number of events and the milliseconds of each span; a span under a second counts as a second.
    """
    return max((count * 1_000 / max(ms, 1_000) for count, ms in spans if count), default=None)


@dataclass(frozen=True, slots=True)
class RetentionExample:
    """A row of the table of stream lengths.

    Attributes:
        jobs_per_s: Jobs per second.
        events_per_s: Their events per second.
        default_retention_s: The number of seconds that a stream of the default length keeps events.
        half_minute: ``maxLen`` for a trigger of 10 s and batches of 5 s.
        quarter_hour: ``maxLen`` for an outage of 15 minutes.
        quarter_hour_mb: The memory of that stream in Redis, in MB.
    """

    jobs_per_s: int
    events_per_s: float
    default_retention_s: float
    half_minute: int
    quarter_hour: int
    quarter_hour_mb: float


def retention_examples(jobs_per_s: Iterable[int] = (10, 50, 200, 1_000, 5_000)) -> list[RetentionExample]:
    """Return the table of stream lengths, a row for each load in jobs per second."""
    examples: list[RetentionExample] = []
    for jobs in jobs_per_s:
        rate = jobs * EVENTS_PER_JOB
        quarter_hour = recommended_length(rate, RetentionNeed(10, 5, 900))
        half_minute = recommended_length(rate, RetentionNeed(10, 5))
        examples.append(
            RetentionExample(
                jobs, rate, DEFAULT_LENGTH / rate, half_minute, quarter_hour, quarter_hour * BYTES_PER_EVENT / 1e6
            )
        )
    return examples
