"""The rings of queues as Redis has them; needs no Spark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from bulltask.errors import BulltaskError
from bulltask.lake.rings import DEFAULT_LENGTH, Ring, busiest_rate
from bulltask.lake.status import SetAside
from bulltask.spark.source.connection import Connection
from bulltask.spark.source.options import ReadOptions
from bulltask.spark.source.positions import Facts, StreamId
from bulltask.spark.source.queues import look_for_queues, no_stream, set_aside
from bulltask.spark.source.streams import end_of, facts_of
from bulltask.transport.call import command
from bulltask.transport.faults import is_wrong_type
from bulltask.transport.keys import QueueKeys

__all__ = ["Look", "limits_of", "look_at_rings", "redis_version"]

_RECENT_MS: Final = 10_000
_MOST: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class Look:
    """What queues look like to a pipeline.

    Attributes:
        rings: each queue with its ring and what its stream says of itself.
        aside: queues that are not recorded.
    """

    rings: Sequence[tuple[QueueKeys, Ring, Facts | None]]
    aside: Sequence[SetAside]


def look_at_rings(connection: Connection, options: ReadOptions) -> Look:
    """Look at all queues that a pipeline with these options reads.

    The rate is the greater one of two: over the whole ring, and over the last ten seconds in which there were events.
    """
    found, foreign = look_for_queues(connection, options), list[QueueKeys]()
    every = facts_of(connection, found.queues, foreign)
    rings = []
    for keys, limit, facts in zip(found.queues, limits_of(connection, found.queues), every, strict=True):
        if keys not in foreign:
            rate = None if facts is None else _rate(connection, keys, facts)
            rings.append((keys, Ring(keys.queue, facts.length if facts else 0, limit, rate), facts))
    return Look(rings, set_aside({**found.aside, **{keys.name: no_stream(keys) for keys in foreign}}))


def limits_of(connection: Connection, queues: Sequence[QueueKeys]) -> list[int]:
    """Return how many events the ring of each queue keeps at the most."""
    said = connection.try_many([command("HGET", keys.meta, "opts.maxLenEvents") for keys in queues])
    return list(map(_limit, said))


def redis_version(connection: Connection) -> str | None:
    """Return the version of the server, which may be Redis or Valkey; ``None`` if it does not say."""
    return ".".join(map(str, connection.said().version)) or None


def _rate(connection: Connection, keys: QueueKeys, facts: Facts) -> float | None:
    if facts.first is None:
        return None
    spans = [(facts.length, facts.last.ms - facts.first.ms)]
    since = StreamId(max(facts.last.ms - _RECENT_MS, 0), 0)
    if since > facts.first:
        spans.append((end_of(connection, keys, since, facts.last, _MOST)[1], _RECENT_MS))
    return busiest_rate(spans)


def _limit(stored: bytes | BulltaskError | None) -> int:
    if isinstance(stored, BulltaskError):
        if not is_wrong_type(stored):
            raise stored
        return DEFAULT_LENGTH
    # Without it BullMQ's scripts keep the default, as they do with what is no number.
    return int(stored) if stored is not None and stored.isdigit() else DEFAULT_LENGTH
