"""The status of a pipeline, from its ledger and from Redis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from bulltask.lake.ledger import BatchRecord
from bulltask.lake.stream_retention import StreamRetention

__all__ = ["Lag", "PipelineStatus", "QueueStatus", "SkippedQueue", "status_of"]


@dataclass(frozen=True, slots=True)
class SkippedQueue:
    """A queue that cannot be recorded and is skipped, so that the others are recorded.

    Attributes:
        queue: BullMQ's spelling of its name, with unprintable characters escaped.
        reason: why, and what to do.
    """

    queue: str
    reason: str


@dataclass(frozen=True, slots=True)
class Lag:
    """How far the lake is behind a queue in Redis.

    Attributes:
        stream: the queue's event stream.
        events: events in the stream that are not in the lake.
        seconds: how much older the lake's last event is than the stream's last, by Redis' clock.
    """

    stream: StreamRetention
    events: int
    seconds: float


@dataclass(frozen=True, slots=True)
class QueueStatus:
    """The status of one queue.

    Attributes:
        queue: the queue, without BullMQ's braces.
        last_id: the last event in the lake; ``None`` if there is none.
        lost: events ever lost.
        lag_events, lag_s: how far the lake is behind; ``None`` if Redis was not read.
        stream_length, stream_limit: the number of events in the stream, and its maximum.
        headroom_s: seconds until the stream trims events that were not read, at its busiest rate; ``None`` if that is
            unknown, 0 if it is already trimming them.
    """

    queue: str
    last_id: str | None
    lost: int
    lag_events: int | None = None
    lag_s: float | None = None
    stream_length: int | None = None
    stream_limit: int | None = None
    headroom_s: float | None = None


@dataclass(frozen=True, slots=True)
class PipelineStatus:
    """The status of a pipeline.

    Attributes:
        root: directory of the lake.
        writer_pid: id of the process on this machine whose stream writes to it; ``None`` if there is none.
        batches: the number of batches.
        written_at: when the last one was written.
        batch_s: how many seconds it took.
        events: how many events it read.
        open_job_events: events of open jobs that are kept for the next batch.
        lost: events ever lost.
        queues: the queues, by name.
        redis_error: why Redis could not be read; ``None`` if it was.
        skipped: queues that are skipped.
    """

    root: str
    writer_pid: int | None
    batches: int
    written_at: datetime | None
    batch_s: float | None
    events: int
    open_job_events: int
    lost: int
    queues: Sequence[QueueStatus]
    redis_error: str | None = None
    skipped: Sequence[SkippedQueue] = ()


def status_of(
    root: str,
    head: BatchRecord | None,
    lags: Mapping[str, Lag],
    *,
    writer_pid: int | None = None,
    redis_error: str | None = None,
    skipped: Sequence[SkippedQueue] = (),
) -> PipelineStatus:
    """Combine the ledger's data and that of Redis.

    Args:
        root: directory of the lake.
        head: the last committed batch; ``None`` before the first.
        lags: how far the lake is behind each queue, by names without BullMQ's braces.
        writer_pid: id of the process whose stream writes to the lake.
        redis_error: why there are no lags.
        skipped: queues that are skipped.
    """
    last = head or BatchRecord("", number=0)
    names = sorted({*last.ends, *last.lost, *lags})
    return PipelineStatus(
        root=root,
        writer_pid=writer_pid,
        batches=last.number,
        written_at=datetime.fromtimestamp(last.written_ms / 1000, UTC) if head else None,
        batch_s=sum(last.steps_ms.values()) / 1000 if head else None,
        events=sum(queue.events for queue in last.queues.values()),
        open_job_events=last.open_job_events,
        lost=sum(last.lost.values()),
        queues=[_queue(name, last, lags.get(name)) for name in names],
        redis_error=redis_error,
        skipped=skipped,
    )


def _queue(name: str, last: BatchRecord, lag: Lag | None) -> QueueStatus:
    known = QueueStatus(name, last.ends.get(name), last.lost.get(name, 0))
    if lag is None:
        return known
    stream = lag.stream
    left_s = max(0.0, (stream.limit - lag.events) / stream.rate) if stream.rate else None
    return QueueStatus(
        known.queue, known.last_id, known.lost, lag.events, lag.seconds, stream.length, stream.limit, left_s
    )
