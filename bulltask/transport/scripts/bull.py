"""Calls that read Bull queues (Bull is BullMQ's predecessor), and bulltask's two scripts that migrate a job.

docs/how-to/migrating-from-bull.md describes Bull's layout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from redis.crc import key_slot

from bulltask.lua import loader
from bulltask.transport.call import Arg, Call, command, script_call
from bulltask.transport.keys import BullKeys, QueueKeys
from bulltask.transport.replies import text

__all__ = [
    "JobConversion",
    "MoveResult",
    "ScoredIds",
    "convert_bull_job",
    "in_same_slot",
    "key_type",
    "move_bull_job",
    "page_of",
    "read_hash",
    "size_of",
]

ScoredIds = list[tuple[str, str]]
"""Ids with their scores (``""`` in lists and sets); the job that runs next comes first."""


class MoveResult(Enum):
    """The result of a script that migrates a job; the values are the script's replies."""

    DONE = 1
    GONE = 0
    NO_HASH = -1
    LOCKED = -2
    CHANGED = -3
    ID_TAKEN = -4


@dataclass(frozen=True, slots=True, kw_only=True)
class JobConversion:
    """How to convert a job.

    Attributes:
        id: Bull's id.
        new_id: The new id; the same as ``id`` unless another one was chosen.
        source: Suffix of the key that contains the job: ``wait``, ``delayed`` …
        state: ``waiting``, ``delayed``, ``completed``, ``failed`` or ``recovered``.
        read: The fields as they were read.
        fields: Fields that are changed or added for BullMQ.
        dropped: Names of fields that BullMQ's hash does not have.
        priority: BullMQ's priority.
        score: When the job finished, for sets without scores.
        rank: Expected position in a list, counted from the job that runs next.
        debounce_id: Bull's ``deid``.
    """

    id: str
    new_id: str
    source: str
    state: str
    read: Mapping[str, bytes]
    fields: Mapping[str, bytes]
    dropped: Sequence[str]
    priority: int
    score: str = ""
    rank: int = 0
    debounce_id: str | None = None


def key_type(key: str) -> Call[str]:
    """Read the type of a key: ``list``, ``zset``, ``set``, ``hash``, ``string``, ``stream``, or ``none``."""
    return command("TYPE", key, parse_reply=text)


def size_of(key: str, kind: str) -> Call[int]:
    """Count the members of a list, sorted set or set."""
    return command({"list": "LLEN", "set": "SCARD"}.get(kind, "ZCARD"), key, parse_reply=int)


def page_of(key: str, kind: str, first: int, size: int) -> Call[ScoredIds]:
    """Read members ``first`` to ``first + size - 1``, counted from the job that runs next.

    A set has no order, so its first page contains all members.
    """
    if kind == "list":
        return command("LRANGE", key, -(first + size), -(first + 1), parse_reply=_from_right)
    if kind == "set":
        return command("SMEMBERS", key, parse_reply=lambda reply: [] if first else _by_number(reply))
    return command("ZRANGE", key, first, first + size - 1, "WITHSCORES", parse_reply=_scored)


def read_hash(key: str) -> Call[dict[str, bytes]]:
    """Read all fields of a hash."""

    def parse_reply(reply: Any) -> dict[str, bytes]:
        return {text(name): value for name, value in zip(reply[::2], reply[1::2], strict=True)}

    return command("HGETALL", key, parse_reply=parse_reply)


def move_bull_job(source: BullKeys, target: QueueKeys, change: JobConversion) -> Call[MoveResult]:
    """bulltask's ``moveBullJob``: move a job from Bull's queue to another one, in one step."""
    job, new_job = source.job(change.id), target.job(change.new_id)
    dedup = change.debounce_id
    script_keys = (
        source.base + change.source,
        job,
        source.logs(change.id),
        source.lock(change.id),
        source.priority,
        job if dedup is None else source.deduplication(dedup),
        source.id,
        target.wait,
        target.paused,
        target.prioritized,
        target.delayed,
        target.completed,
        target.failed,
        target.active,
        target.pc,
        target.meta,
        target.id,
        target.marker,
        target.events,
        new_job,
        target.logs(change.new_id),
        new_job if dedup is None else target.deduplication(dedup),
    )
    args = (change.id, change.new_id, change.state, *_expected_fields(change), change.priority, change.score)
    return script_call(
        loader.bulltask_script("moveBullJob"), script_keys, (*args, change.rank, *_fields(change)), MoveResult
    )


def convert_bull_job(keys: BullKeys, change: JobConversion) -> Call[MoveResult]:
    """bulltask's ``convertBullJob``: convert a job to BullMQ's layout in its queue."""
    script_keys = (
        keys.base + change.source,
        keys.job(change.id),
        keys.lock(change.id),
        keys.priority,
        keys.prioritized,
        keys.pc,
        keys.active,
        keys.meta,
        keys.marker,
        keys.id,
        keys.wait,
        keys.paused,
    )
    args = (change.id, change.state, *_expected_fields(change), change.priority, change.rank, *_fields(change))
    return script_call(loader.bulltask_script("convertBullJob"), script_keys, args, MoveResult)


def in_same_slot(source: QueueKeys, target: QueueKeys) -> bool:
    """Return True if all keys of both queues are in one slot of a Redis Cluster."""
    keys = (source.wait, source.meta, target.wait, target.meta)
    return len({key_slot(key.encode("utf-8", "surrogateescape")) for key in keys}) == 1


def _expected_fields(change: JobConversion) -> tuple[Arg, Arg]:
    return change.read.get("opts", b""), change.read.get("attemptsMade", b"")


def _fields(change: JobConversion) -> list[Arg]:
    pairs: list[Arg] = [word for pair in change.fields.items() for word in pair]
    return [len(change.dropped), *change.dropped, *pairs]


def _from_right(reply: Any) -> ScoredIds:
    return [(text(member), "") for member in reversed(reply)]


def _scored(reply: Any) -> ScoredIds:
    return [(text(member), text(score)) for member, score in zip(reply[::2], reply[1::2], strict=True)]


def _by_number(reply: Any) -> ScoredIds:
    """Sort numeric ids by number, then the others."""
    ids = sorted(map(text, reply), key=lambda job_id: (not job_id.isdecimal(), len(job_id), job_id))
    return [(job_id, "") for job_id in ids]
