"""Return types of queue and job getters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = [
    "ChildFailures",
    "ClientInfo",
    "Dependencies",
    "DependencyPage",
    "JobLogs",
    "Metrics",
    "QueueSummary",
    "RateLimit",
]


@dataclass(frozen=True, slots=True)
class QueueSummary:
    """A queue's job counts in five groups. Jobs that are waiting for child jobs are not counted.

    Attributes:
        waiting: Ready to run: ``waiting``, ``paused`` or ``prioritized``.
        active: Acquired by a worker.
        completed: Completed and still kept.
        failed: Failed and still kept.
        delayed: Due later.
    """

    waiting: int
    active: int
    completed: int
    failed: int
    delayed: int


@dataclass(frozen=True, slots=True)
class RateLimit:
    """A queue's global rate limit: at most ``max`` jobs are acquired per ``duration`` seconds."""

    max: int
    duration: float


@dataclass(frozen=True, slots=True)
class Metrics:
    """Numbers of completed or failed jobs per minute; recorded by workers with ``metrics_max_data_points``.

    Attributes:
        count: Jobs counted so far; BullMQ does not include the current minute.
        previous_ms: When the last job was counted, epoch milliseconds.
        previous_count: The count at the last full minute.
        data: Jobs per minute, newest first.
        points: How many minutes are stored.
    """

    count: int
    previous_ms: int
    previous_count: int
    data: tuple[int, ...]
    points: int


@dataclass(frozen=True, slots=True)
class ClientInfo:
    """A connection of a worker or an event reader.

    Attributes:
        name: The worker id (the name of a Node.js worker), ``""`` if it has none.
        raw_name: The connection's name in ``CLIENT LIST``.
        address: ``host:port`` of the connection.
        age: Seconds since it was opened.
        idle: Seconds since its last command.
        fields: All columns of ``CLIENT LIST``, by their Redis names.
    """

    name: str
    raw_name: str
    address: str
    age: int
    idle: int
    fields: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class JobLogs:
    """Lines of a job's log; ``count`` is the total number of lines."""

    lines: tuple[str, ...]
    count: int


@dataclass(frozen=True, slots=True)
class Dependencies:
    """A job's children by outcome; each is identified by its full key (``bull:{mail}:7``).

    Attributes:
        processed: Completed children, with their return values.
        unprocessed: Children that have not finished.
        ignored: Failed child jobs whose failure is ignored, with the reasons.
        failed: Failed child jobs whose failure fails the job.
    """

    processed: Mapping[str, Any]
    unprocessed: tuple[str, ...]
    ignored: Mapping[str, str]
    failed: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DependencyPage:
    """Some of a job's children.

    Attributes:
        items: Full keys of the children, each with its return value or failure reason, or ``None``.
        total: How many children of this kind there are.
    """

    items: Mapping[str, Any]
    total: int


@dataclass(frozen=True, slots=True)
class ChildFailures:
    """A job's failed child jobs, by full key.

    Attributes:
        ignored: Children whose failure is ignored, with the reasons.
        failed: Children whose failure fails the job.
    """

    ignored: Mapping[str, str]
    failed: tuple[str, ...]
