"""The rings of queues as Redis has them; needs no Spark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from bulltask.lake.rings import DEFAULT_LENGTH, Ring, busiest_rate
from bulltask.spark.source.connection import Connection
from bulltask.spark.source.positions import Facts, StreamId
from bulltask.spark.source.streams import end_of, facts_of
from bulltask.transport.call import command
from bulltask.transport.keys import QueueKeys

__all__ = ["look_at_rings", "redis_version"]

_RECENT_MS: Final = 10_000
_MOST: Final = 1_000_000


def look_at_rings(connection: Connection, queues: Sequence[QueueKeys]) -> Mapping[str, tuple[Ring, Facts | None]]:
    """Return each queue's ring and what its stream says of itself, by the user's spelling of its name.

    The rate is the greater one of two: over the whole ring, and over the last ten seconds in which there were events.
    """
    limits = connection.run_many([command("HGET", keys.meta, "opts.maxLenEvents") for keys in queues]) if queues else ()
    found: dict[str, tuple[Ring, Facts | None]] = {}
    for keys, limit, facts in zip(queues, limits, facts_of(connection, queues), strict=True):
        rate = None if facts is None else _rate(connection, keys, facts)
        found[keys.queue] = Ring(keys.queue, facts.length if facts else 0, _limit(limit), rate), facts
    return found


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


def _limit(stored: bytes | None) -> int:
    # Without it BullMQ's scripts keep the default, as they do with what is no number.
    return int(stored) if stored is not None and stored.isdigit() else DEFAULT_LENGTH
