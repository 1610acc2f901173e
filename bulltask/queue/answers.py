"""What questions about queues and jobs are answered with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = [
    "ChildFailures",
    "ClientInfo",
    "Dependencies",
    "DependencyPage",
    "JobCounts",
    "JobLogs",
    "Metrics",
    "RateLimit",
]


@dataclass(frozen=True, slots=True)
class JobCounts:
    """How many jobs a queue has, by what they wait for (seed 003 section 10).

    Attributes:
        waiting: ready to run: in ``wait``, ``paused`` or ``prioritized``.
        active: being worked on.
        completed: ended well and still kept.
        failed: ended badly and still kept.
        delayed: due later.
    """

    waiting: int
    active: int
    completed: int
    failed: int
    delayed: int


@dataclass(frozen=True, slots=True)
class RateLimit:
    """A queue's global rate limit: at most ``max`` jobs are taken in ``duration`` seconds."""

    max: int
    duration: float


@dataclass(frozen=True, slots=True)
class Metrics:
    """How many jobs ended, minute by minute; workers write it when their ``metrics`` are on.

    Attributes:
        count: jobs counted so far (BullMQ: without those of the running minute).
        previous_ms: when a job was counted last, epoch milliseconds.
        previous_count: the count at the last full minute.
        data: jobs per minute, newest first.
        points: how many minutes are stored.
    """

    count: int
    previous_ms: int
    previous_count: int
    data: tuple[int, ...]
    points: int


@dataclass(frozen=True, slots=True)
class ClientInfo:
    """A connection of a worker or an event listener.

    Attributes:
        name: the worker's own name, ``""`` for one that has none.
        raw_name: the connection's name in ``CLIENT LIST``.
        address: ``host:port`` of the connection.
        age: seconds since it was made.
        idle: seconds since it said something.
        fields: every column of ``CLIENT LIST``, by its Redis name.
    """

    name: str
    raw_name: str
    address: str
    age: int
    idle: int
    fields: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class JobLogs:
    """Lines of a job's log; ``count`` is how many there are in all."""

    lines: tuple[str, ...]
    count: int


@dataclass(frozen=True, slots=True)
class Dependencies:
    """A job's children by what became of them; each is named by the full key of its hash (``bull:{mail}:7``).

    Attributes:
        processed: completed ones with their return values.
        unprocessed: those that have not ended.
        ignored: failed ones whose failure is ignored, with the reasons.
        failed: failed ones whose failure fails the job.
    """

    processed: Mapping[str, Any]
    unprocessed: tuple[str, ...]
    ignored: Mapping[str, str]
    failed: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DependencyPage:
    """A part of a job's children.

    Attributes:
        items: full keys of the children, each with its return value, or why it failed; ``None`` where there is none.
        total: how many there are.
    """

    items: Mapping[str, Any]
    total: int


@dataclass(frozen=True, slots=True)
class ChildFailures:
    """A job's failed children, by full key.

    Attributes:
        ignored: reasons of those whose failure is ignored.
        failed: those whose failure fails the job.
    """

    ignored: Mapping[str, str]
    failed: tuple[str, ...]
