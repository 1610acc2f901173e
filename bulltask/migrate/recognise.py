"""Whose layout a queue has: Bull's or BullMQ's. Most of their keys have the same names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from bulltask.migrate.bull_job import Origin

__all__ = ["PLACES", "Facts", "Layout", "recognise"]

PLACES: Final = ("delayed", "paused", "wait", "active", "failed", "completed")
"""Suffixes of the keys in which Bull has jobs, in the order in which they are moved: what is to run first."""

_ONLY_BULLMQ: Final[Mapping[str, str]] = {
    "events": "stream",
    "marker": "zset",
    "prioritized": "zset",
    "pc": "string",
    "waiting-children": "zset",
}
"""With their types: a job of Bull may have any of these names as its id."""


class Layout(Enum):
    """What was found; the values are what a user reads."""

    EMPTY = "no jobs"
    BULL = "Bull 3 or 4"
    BULL_1 = "Bull 1 or 2"
    BULLMQ = "BullMQ"
    MIXED = "Bull and BullMQ, mixed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What can be seen of a queue without its jobs.

    Attributes:
        types: the Redis type of each key by its suffix, ``none`` for a missing one.
        sizes: how many jobs each of :data:`PLACES` has.
        meta: the hash ``meta``.
        repeats: Bull's repeatable jobs: their keys, with the epoch milliseconds of the next run.
        workers: names of connections that look like workers of the queue; ``None``: the server does not tell.
    """

    types: Mapping[str, str]
    sizes: Mapping[str, int]
    meta: Mapping[str, str]
    repeats: Sequence[tuple[str, int]]
    workers: Sequence[str] | None

    @property
    def paused(self) -> bool:
        """Bull's pause; late versions note it where BullMQ looks too."""
        return self.types["meta-paused"] != "none" or "paused" in self.meta

    @property
    def has_sets(self) -> bool:
        """Before Bull 3 ended jobs were in sets without order."""
        return "set" in {self.types["completed"], self.types["failed"]}


def recognise(facts: Facts, origins: Counter[Origin]) -> Layout:
    """Judge a queue.

    Args:
        facts: its keys.
        origins: how many jobs say of themselves whose they are.
    """
    if not any(facts.sizes.values()) and not facts.repeats and not _is_bullmq(facts):
        return Layout.EMPTY
    bullmq = _is_bullmq(facts) or bool(origins[Origin.BULLMQ])
    bull_1 = facts.has_sets or bool(origins[Origin.BULL_1])
    bull = bull_1 or bool(origins[Origin.BULL]) or facts.types["priority"] == "zset"
    if bullmq:
        return Layout.MIXED if bull else Layout.BULLMQ
    return Layout.BULL_1 if bull_1 else Layout.BULL


def _is_bullmq(facts: Facts) -> bool:
    # Late versions of Bull write one field of meta, `paused`.
    return any(facts.types[key] == kind for key, kind in _ONLY_BULLMQ.items()) or bool(facts.meta.keys() - {"paused"})
