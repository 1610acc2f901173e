"""How far a lake is behind its queues, asked of Redis; needs no Spark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bulltask.errors import BulltaskError
from bulltask.lake.layout import Layout
from bulltask.lake.ledger import Ledger
from bulltask.lake.lock import feeder_of
from bulltask.lake.status import Lag, PipelineStatus, SetAside, status_of
from bulltask.spark.source.connection import Connection
from bulltask.spark.source.options import EventsOptions, read_options
from bulltask.spark.source.positions import BEGINNING, StreamId
from bulltask.spark.source.rings import Look, look_at_rings
from bulltask.spark.source.streams import end_of

__all__ = ["pipeline_status"]

_MOST = 1_000_000


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
