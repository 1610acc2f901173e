"""How a pipeline is doing: what its ledger says, beside what Redis has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from bulltask.lake.ledger import BatchRecord
from bulltask.lake.stream_retention import StreamRetention

__all__ = ["Lag", "PipelineStatus", "QueueStatus", "SkippedQueue", "status_of"]


@dataclass(frozen=True, slots=True)
class SkippedQueue:
    """A queue whose events are not recorded, so that it does not keep those of others from being recorded.

    Attributes:
        queue: BullMQ's spelling of its name, with escapes for what cannot be printed.
        reason: why, and what to do.
    """

    queue: str
    reason: str


@dataclass(frozen=True, slots=True)
class Lag:
    """What Redis says of one queue.

    Attributes:
        ring: its stream.
        events: how many it has that are not in the lake.
        seconds: how much older the lake's last event is than the stream's last, by Redis' clock.
    """

    ring: StreamRetention
    events: int
    seconds: float


@dataclass(frozen=True, slots=True)
class QueueStatus:
    """One queue.

    Attributes:
        queue: as the user spells it.
        last_id: the last event that is in the lake; ``None`` for none.
        lost: events that were lost, in all.
        lag_events, lag_s: how far the lake is behind; ``None`` where Redis was not asked.
        ring_length, ring_limit: events in the queue's stream, and the most that there can be.
        headroom_s: seconds until the stream drops what is not read, at its busiest rate; ``None`` where that is not
            known, 0 where it is dropping.
    """

    queue: str
    last_id: str | None
    lost: int
    lag_events: int | None = None
    lag_s: float | None = None
    ring_length: int | None = None
    ring_limit: int | None = None
    headroom_s: float | None = None


@dataclass(frozen=True, slots=True)
class PipelineStatus:
    """A pipeline.

    Attributes:
        root: directory of the lake.
        feeder: process id of the stream that feeds it, on this machine; ``None`` when none does.
        batches: how many were written.
        written_at: when the last one was.
        batch_s: how many seconds that one took.
        events: how many events it read.
        carried: how many events of jobs that are not done wait for the next batch.
        lost: events that were lost, in all.
        queues: each queue, by name.
        redis_error: why Redis could not be asked; ``None`` when it was.
        set_aside: queues that are not recorded.
    """

    root: str
    feeder: int | None
    batches: int
    written_at: datetime | None
    batch_s: float | None
    events: int
    carried: int
    lost: int
    queues: Sequence[QueueStatus]
    redis_error: str | None = None
    set_aside: Sequence[SkippedQueue] = ()


def status_of(
    root: str,
    head: BatchRecord | None,
    lags: Mapping[str, Lag],
    *,
    feeder: int | None = None,
    redis_error: str | None = None,
    set_aside: Sequence[SkippedQueue] = (),
) -> PipelineStatus:
    """Put the two halves together.

    Args:
        root: directory of the lake.
        head: the last batch that is done; ``None`` before the first.
        lags: what Redis says of each queue, by the user's spelling.
        feeder: the process that feeds the lake.
        redis_error: why there are no lags.
        set_aside: queues that are not recorded.
    """
    last = head or BatchRecord("", number=0)
    names = sorted({*last.ends, *last.lost, *lags})
    return PipelineStatus(
        root=root,
        feeder=feeder,
        batches=last.number,
        written_at=datetime.fromtimestamp(last.written_ms / 1000, UTC) if head else None,
        batch_s=sum(last.steps_ms.values()) / 1000 if head else None,
        events=sum(queue.events for queue in last.queues.values()),
        carried=last.carried,
        lost=sum(last.lost.values()),
        queues=[_queue(name, last, lags.get(name)) for name in names],
        redis_error=redis_error,
        set_aside=set_aside,
    )


def _queue(name: str, last: BatchRecord, lag: Lag | None) -> QueueStatus:
    known = QueueStatus(name, last.ends.get(name), last.lost.get(name, 0))
    if lag is None:
        return known
    ring = lag.ring
    left_s = max(0.0, (ring.limit - lag.events) / ring.rate) if ring.rate else None
    return QueueStatus(known.queue, known.last_id, known.lost, lag.events, lag.seconds, ring.length, ring.limit, left_s)
