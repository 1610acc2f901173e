"""The commands that read much of a queue at once: pages of its event stream, and jobs of a state by the thousand.

For readers that plan in one process and read in others: a plan is made of ids and scores, which mean the same to
everybody and at any later time; ranks and offsets would not, because workers move jobs all the while.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from bulltask.lua import loader
from bulltask.transport.call import Call, as_is, command, script_call
from bulltask.transport.keys import QueueKeys
from bulltask.transport.replies import text, texts

__all__ = [
    "LISTS",
    "READING",
    "SETS",
    "SPAN",
    "SpanEnd",
    "count_between",
    "count_in",
    "ids_between",
    "ids_in_list",
    "job_fields",
    "page",
    "score_at",
    "served_queues",
    "some_queues",
    "span_end",
]

LISTS: Final = ("wait", "active", "paused")
"""States that are lists of ids."""

SETS: Final = ("completed", "failed", "delayed", "prioritized", "waiting-children")
"""States that are sorted sets of ids."""

SPAN: Final = 10_000
"""Entries that one :func:`span_end` looks at, at the most: a few milliseconds in which Redis does nothing else."""

READING: Final = frozenset({"spanEnd"})
"""Scripts that write nothing."""

_SCANNED = 1_000
_GLOB = re.compile(r"([\\*?\[\]^])")

RawEntry = tuple[bytes, Sequence[bytes]]
"""Id and fields of an entry, as Redis sends them: name, value, name, value …"""


@dataclass(frozen=True, slots=True)
class SpanEnd:
    """Where some entries of a stream end.

    Attributes:
        last: id of the last one; ``""`` when there is none.
        count: how many there are.
    """

    last: str
    count: int


def span_end(keys: QueueKeys, after: str, until: str, most: int) -> Call[SpanEnd]:
    """``spanEnd``: where the next ``most`` entries end; no more than :data:`SPAN` of them are looked at.

    Args:
        keys: the queue.
        after: id behind which they begin; ``0-0`` for the first.
        until: id of the last one that may count; ``+`` for no bound, ``1760010061025`` for a whole millisecond.
        most: how many at the most.
    """

    def judge(reply: Any) -> SpanEnd:
        return SpanEnd(text(reply[0]), int(reply[1]))

    return script_call(loader.own("spanEnd"), (keys.events,), (after, until, min(most, SPAN)), judge)


def page(keys: QueueKeys, after: str, until: str, size: int) -> Call[list[RawEntry]]:
    """Up to ``size`` entries behind ``after``, up to ``until`` and with it; undecoded."""
    return command("XRANGE", keys.events, f"({after}", until, "COUNT", size)


def job_fields(keys: QueueKeys, job_id: str, names: Sequence[str]) -> Call[list[bytes | None]]:
    """Some fields of a job's hash; all ``None`` when there is no such job."""
    return Call(("HMGET", keys.job(job_id), *names), as_is, steady=len(names))


def count_in(keys: QueueKeys, state: str) -> Call[int]:
    """How many jobs are in a state. The official script takes away what BullMQ 4 left in ``wait``, and so may write."""
    return command("LLEN" if state in LISTS else "ZCARD", keys.base + state)


def count_between(keys: QueueKeys, state: str, low: str, high: str) -> Call[int]:
    """How many jobs of a sorted state have a score between ``low`` and ``high``, in Redis' spelling of bounds."""
    return command("ZCOUNT", keys.base + state, low, high)


def score_at(keys: QueueKeys, state: str, rank: int) -> Call[str | None]:
    """The score at a rank of a sorted state, just as Redis writes it; ``None`` when it has fewer jobs."""

    def judge(reply: Any) -> str | None:
        return text(reply[1]) if reply else None

    return command("ZRANGE", keys.base + state, rank, rank, "WITHSCORES", judge=judge)


def ids_between(keys: QueueKeys, state: str, low: str, high: str) -> Call[list[str]]:
    """The ids of a sorted state whose score is between ``low`` and ``high``."""
    return command("ZRANGEBYSCORE", keys.base + state, low, high, judge=texts)


def ids_in_list(keys: QueueKeys, state: str) -> Call[list[str]]:
    """All ids of a listed state at this moment."""
    return command("LRANGE", keys.base + state, 0, -1, judge=texts)


def some_queues(prefix: str, cursor: str) -> Call[tuple[str, list[str]]]:
    """Names of queues under a prefix, as BullMQ spells them: the next cursor, ``0`` at the end, and some names.

    Every queue that was ever used has a ``meta`` hash. The same name may come twice.
    """
    start, end = f"{prefix}:", ":meta"
    pattern = _GLOB.sub(r"\\\1", start) + "*" + end

    def judge(reply: Any) -> tuple[str, list[str]]:
        found = (text(key)[len(start) : -len(end)] for key in reply[1])
        return text(reply[0]), [name for name in found if name and ":" not in name]

    return command("SCAN", cursor, "MATCH", pattern, "COUNT", _SCANNED, judge=judge)


def served_queues(prefix: str) -> Call[set[str]]:
    """Names of the queues that connected workers serve, as BullMQ spells them: their connections are called so."""
    start = f"{prefix}:"

    def judge(reply: Any) -> set[str]:
        words = (word for line in text(reply).splitlines() for word in line.split(" "))
        names = (word.removeprefix("name=") for word in words if word.startswith("name="))
        found = {_decoded(name.removeprefix(start).partition(":")[0]) for name in names if name.startswith(start)}
        return found - {""}

    return command("CLIENT", "LIST", judge=judge)


def _decoded(name: str) -> str:
    """A queue's name from that of a connection; nothing where somebody has called theirs otherwise."""
    try:
        return base64.b64decode(name, validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""
