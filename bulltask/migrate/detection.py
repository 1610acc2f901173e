"""Detect whether a queue is Bull's or BullMQ's; most of their keys have the same names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from bulltask.migrate.bull_job import JobOrigin

__all__ = ["JOB_KEYS", "QueueInfo", "QueueLayout", "detect_layout"]

JOB_KEYS: Final = ("delayed", "paused", "wait", "active", "failed", "completed")
"""Suffixes of the keys that contain Bull's jobs, in the order of migration: the most urgent jobs first."""

_ONLY_BULLMQ: Final[Mapping[str, str]] = {
    "events": "stream",
    "marker": "zset",
    "prioritized": "zset",
    "pc": "string",
    "waiting-children": "zset",
}
"""Keys that only BullMQ has, with their types, because a Bull job's id may be one of these names."""


class QueueLayout(Enum):
    """The detected layout; the values are shown to users."""

    EMPTY = "no jobs"
    BULL = "Bull 3 or 4"
    BULL_1 = "Bull 1 or 2"
    BULLMQ = "BullMQ"
    MIXED = "Bull and BullMQ, mixed"


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueInfo:
    """What is known about a queue without reading its jobs.

    Attributes:
        types: The Redis type of each key by suffix, ``none`` for a missing key.
        sizes: The number of jobs under each of :data:`JOB_KEYS`.
        meta: The hash ``meta``.
        repeats: The keys of Bull's repeatable jobs, with the time of the next run in epoch milliseconds.
        workers: The names of connections that look like workers of the queue; ``None`` if CLIENT LIST is not permitted.
    """

    types: Mapping[str, str]
    sizes: Mapping[str, int]
    meta: Mapping[str, str]
    repeats: Sequence[tuple[str, int]]
    workers: Sequence[str] | None

    @property
    def paused(self) -> bool:
        """Whether Bull has paused the queue; late versions of Bull also set BullMQ's flag."""
        return self.types["meta-paused"] != "none" or "paused" in self.meta

    @property
    def has_sets(self) -> bool:
        """Whether finished jobs are in unordered sets, as before Bull 3."""
        return "set" in {self.types["completed"], self.types["failed"]}


def detect_layout(info: QueueInfo, origins: Counter[JobOrigin]) -> QueueLayout:
    """Return the layout of a queue.

    Args:
        info: The queue's keys.
        origins: The number of its jobs, by origin.
    """
    if not any(info.sizes.values()) and not info.repeats and not _is_bullmq(info):
        return QueueLayout.EMPTY
    bullmq = _is_bullmq(info) or bool(origins[JobOrigin.BULLMQ])
    bull_1 = info.has_sets or bool(origins[JobOrigin.BULL_1])
    bull = bull_1 or bool(origins[JobOrigin.BULL]) or info.types["priority"] == "zset"
    if bullmq:
        return QueueLayout.MIXED if bull else QueueLayout.BULLMQ
    return QueueLayout.BULL_1 if bull_1 else QueueLayout.BULL


def _is_bullmq(info: QueueInfo) -> bool:
    # Late versions of Bull write a single field of meta, `paused`.
    return any(info.types[key] == kind for key, kind in _ONLY_BULLMQ.items()) or bool(info.meta.keys() - {"paused"})
