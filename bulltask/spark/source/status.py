"""How far a lake is behind its queues, asked of Redis; needs no Spark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from bulltask.errors import BulltaskError
from bulltask.lake.layout import Layout
from bulltask.lake.ledger import Ledger
from bulltask.lake.lock import feeder_of
from bulltask.lake.rings import DEFAULT_LENGTH, Ring, busiest_rate
from bulltask.lake.status import Lag, PipelineStatus, SetAside, status_of
from bulltask.spark.source.connection import Connection
from bulltask.spark.source.options import EventsOptions, ReadOptions, read_options
from bulltask.spark.source.positions import BEGINNING, Facts, StreamId
from bulltask.spark.source.queues import look_for_queues, no_stream, set_aside
from bulltask.spark.source.streams import end_of, facts_of
from bulltask.transport.call import command
from bulltask.transport.faults import is_wrong_type
from bulltask.transport.keys import QueueKeys

__all__ = ["Look", "limits_of", "look_at_rings", "pipeline_status", "redis_version"]

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


def pipeline_status(layout: Layout, source: Mapping[str, str]) -> PipelineStatus:
    """Return how a pipeline is doing.

    Args:
        layout: the lake.
        source: where its queues are, as options of ``format("bulltask")``.

    Raises:
        ConfigError: an option of the source is wrong.
    """
    options = read_options(EventsOptions, {**source, "table": "events", "skipForeignQueues": "true"})
    head = Ledger(layout).head()
    lags: Mapping[str, Lag] = {}
    aside: Sequence[SetAside] = ()
    error: str | None = None
    try:
        with Connection(options.config) as connection:
            look = look_at_rings(connection, options)
            lags, aside = _lags(connection, look, {} if head is None else head.ends), look.aside
    except BulltaskError as exc:
        error = str(exc)
    return status_of(str(layout.root), head, lags, feeder=feeder_of(layout), redis_error=error, set_aside=aside)


def _lags(connection: Connection, look: Look, ends: Mapping[str, str]) -> dict[str, Lag]:
    found: dict[str, Lag] = {}
    for keys, ring, facts in look.rings:
        last = StreamId.parse(ends[keys.queue]) if keys.queue in ends else BEGINNING
        if facts is None or last >= facts.last:
            found[keys.queue] = Lag(ring, 0, 0.0)
            continue
        behind = facts.length if last == BEGINNING else end_of(connection, keys, last, facts.last, _MOST)[1]
        since_ms = last.ms if last != BEGINNING else (facts.first or facts.last).ms
        found[keys.queue] = Lag(ring, behind, (facts.last.ms - since_ms) / 1000)
    return found
