"""What a flow is checked against before it is added, and how a stored one is read; packing only (PROTOCOL 4.9)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from redis.crc import key_slot
from redis.exceptions import ClusterCrossSlotError, MovedError

from bulltask.transport.call import Call, command
from bulltask.transport.keys import QueueKeys
from bulltask.transport.replies import text, texts
from bulltask.transport.scripts.job import paginate

__all__ = [
    "KINDS",
    "Children",
    "Standing",
    "address_of",
    "children",
    "is_cluster",
    "key_exists",
    "slots_of",
    "standing",
]

KINDS: Final = ("processed", "unprocessed", "failed", "ignored")
"""What may have become of a child, in the order in which Node's ``getFlow`` lists them."""

_IN_A_SCRIPT: Final = ("non local key", "hash to the same slot")


@dataclass(frozen=True, slots=True)
class Standing:
    """What is there already of a job whose id the caller chose.

    Attributes:
        exists: there is a job of that id.
        parent_key: full key of the job that waits for it, ``""`` for none.
    """

    exists: bool
    parent_key: str


def standing(keys: QueueKeys, job_id: str) -> list[Call[Any]]:
    """Two calls: the job's :class:`Standing`, and whether it has completed."""

    def judge(reply: Any) -> Standing:
        name, parent_key = reply
        return Standing(name is not None, "" if parent_key is None else text(parent_key))

    return [
        command("HMGET", keys.job(job_id), "name", "parentKey", judge=judge),
        command("ZSCORE", keys.completed, job_id, judge=lambda reply: reply is not None),
    ]


def key_exists(key: str) -> Call[bool]:
    """True when there is such a key."""
    return command("EXISTS", key, judge=bool)


def was_added(keys: QueueKeys, job_id: str, since_ms: int) -> Call[bool]:
    """True when the event stream tells that the job was added at or after ``since_ms``; it may be gone already."""

    def judge(reply: Any) -> bool:
        wanted = job_id.encode("utf-8", "surrogateescape")
        found = (dict(zip(flat[::2], flat[1::2], strict=True)) for _, flat in reply)
        return any(fields.get(b"event") == b"added" and fields.get(b"jobId") == wanted for fields in found)

    return command("XRANGE", keys.events, max(0, since_ms), "+", judge=judge)


def is_cluster() -> Call[bool]:
    """True when the server is a node of a Redis Cluster."""
    return command("INFO", "cluster", judge=lambda reply: b"cluster_enabled:1" in reply)


def is_across_slots(refusal: BaseException) -> bool:
    """True when a cluster refused a transaction because its keys are in several slots, or on several nodes."""
    cause = refusal.__cause__
    return isinstance(cause, ClusterCrossSlotError | MovedError) or any(said in str(cause) for said in _IN_A_SCRIPT)


def slots_of(keys: QueueKeys, job_id: str) -> set[int]:
    """The cluster slots of the keys that adding a job touches; more than one where the queue has no hash tag."""
    return {key_slot(key.encode("utf-8", "surrogateescape")) for key in (keys.wait, keys.meta, keys.job(job_id))}


Children = tuple[tuple[str, int], list[str], int]
"""Cursor to go on with (``"0"``: this was all), full keys of children, and how many there are in all."""


def children(keys: QueueKeys, job_id: str, kind: str, most: int, cursor: tuple[str, int]) -> Call[Children]:
    """Up to ``most`` children of a job, by what became of them: see :data:`KINDS`."""
    if kind == "failed":
        return command(
            "ZRANGE",
            keys.unsuccessful(job_id),
            0,
            most - 1,
            judge=lambda reply: (("0", 0), texts(reply), len(reply)),
        )
    places = {
        "processed": keys.processed(job_id),
        "unprocessed": keys.dependencies(job_id),
        "ignored": keys.ignored(job_id),
    }
    page = paginate(places[kind], 0, most - 1, cursor)

    def judge(reply: Any) -> Children:
        following, items, total = page.judge(reply)
        return following, [text(item[0] if isinstance(item, list) else item) for item in items], total

    return Call(page.args, judge, page.script)


def address_of(key: str, prefix: str) -> tuple[str, str, str]:
    """Return prefix, BullMQ's queue name and id of a job's full key.

    Queue names have no ``:``. Ids may (those of job schedulers do), and so may a prefix; where it is not ``prefix``
    it is taken to end at the first one. (Node 5.62 takes three parts and loses the rest of such an id.)
    """
    head = prefix if key.startswith(f"{prefix}:") else key.partition(":")[0]
    name, _, job_id = key[len(head) + 1 :].partition(":")
    return head, name, job_id
