"""The status of a pipeline, from its last batch and from Redis; and the recommended lengths of event streams."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Final, NamedTuple

from bulltask.lake.formatting import pluralize
from bulltask.lake.ledger import BatchRecord
from bulltask.transport.streams import DEFAULT_LENGTH, RetentionNeed, StreamRetention, recommended_length

EVENTS_PER_JOB: Final = 4.15
"""``added``, ``waiting``, ``active``, ``completed``, and more events for the 4% of jobs that are retried; measured."""

BYTES_PER_EVENT: Final = 61
"""The memory of an event in Redis without its return value; measured."""


SIZE_COLUMNS: Final = (
    "jobs/s", "events/s", "10,000 events cover", "maxLen for 30 s", "maxLen for 15 min", "memory",
)  # fmt: skip
"""The columns of :func:`stream_sizes`: 30 s are a trigger of 10 s and batches of 5 s, 15 minutes are an outage."""


def stream_sizes(jobs_per_s: Iterable[int] = (10, 50, 200, 1_000, 5_000)) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the table of stream lengths, one for each load in jobs per second."""
    for jobs in jobs_per_s:
        rate = jobs * EVENTS_PER_JOB
        short, long = (recommended_length(rate, RetentionNeed(10, 5, outage)) for outage in (0, 900))
        covered, size_mb = f"{DEFAULT_LENGTH / rate:,.1f} s", f"{long * BYTES_PER_EVENT / 1e6:,.0f} MB"
        yield f"{jobs:,}", f"{rate:,.0f}", covered, f"{short:,}", f"{long:,}", size_mb


@dataclass(frozen=True, slots=True)
class SkippedQueue:
    """A queue that the pipeline cannot record and skips, so that the other queues are recorded.

    Attributes:
        queue: BullMQ's name for the queue, with unprintable characters escaped.
        reason: Why the queue is skipped, and what to do.
    """

    queue: str
    reason: str


class Lag(NamedTuple):
    """How far the lake is behind a queue in Redis.

    ``events`` of the stream are not in the lake; ``seconds`` are between the lake's last event and that of Redis, by
    Redis' clock.
    """

    stream: StreamRetention
    events: int
    seconds: float


@dataclass(frozen=True, slots=True)
class QueueStatus:
    """The status of one queue.

    Attributes:
        queue: The queue, without BullMQ's braces.
        last_id: Id of the last event in the lake; ``None`` if the lake has no events from the queue.
        lost: The number of events ever lost, as far as it is known.
        lag_events, lag_s: How far the lake is behind; ``None`` if Redis was not read.
        stream_length, stream_limit: The number of events in the stream, and its maximum.
        headroom_s: Seconds until the stream trims unread events, at the highest observed rate; ``None`` if unknown, 0
            if it already trims them.
        gaps: The number of gaps; how many events were lost in one of them may be unknown.
    """

    queue: str
    last_id: str | None
    lost: int
    lag_events: int | None = None
    lag_s: float | None = None
    stream_length: int | None = None
    stream_limit: int | None = None
    headroom_s: float | None = None
    gaps: int = 0


@dataclass(frozen=True, slots=True)
class PipelineStatus:
    """The status of a pipeline.

    Attributes:
        root: The directory of the lake.
        batches: The number of batches.
        written_at: When the last batch was written.
        batch_s: The duration of the last batch in seconds.
        events: The number of events that the last batch read.
        open_job_events: The number of events of open jobs that are kept for the next batch.
        lost: The number of events ever lost, as far as it is known.
        queues: The queues, by name.
        writer_pid: Id of the process on this machine whose pipeline is writing to the lake; ``None`` if there is none.
        redis_error: Why Redis could not be read; ``None`` if there was no error.
        skipped: The skipped queues.
        gaps: As in `QueueStatus`, of all queues.
        broker: The name of the pipeline's broker; ``""`` without a name.
    """

    root: str
    batches: int
    written_at: datetime | None
    batch_s: float | None
    events: int
    open_job_events: int
    lost: int
    queues: Sequence[QueueStatus]
    writer_pid: int | None = None
    redis_error: str | None = None
    skipped: Sequence[SkippedQueue] = ()
    gaps: int = 0
    broker: str = ""


def describe_losses(lost: int, gaps: int) -> str:
    """Return ``12 events lost in 2 gaps``, for the lost events whose number is known and the number of gaps."""
    number = f"{pluralize(lost, 'event')} lost" if lost else "an unknown number of events lost"
    return f"{number} in {pluralize(gaps, 'gap')}" if gaps else f"{pluralize(lost, 'event')} lost"


def status_of(root: str, head: BatchRecord | None, lags: Mapping[str, Lag]) -> PipelineStatus:
    """Combine data from the last batch and from Redis; ``lags`` has the queues' names in the lake."""
    last = head or BatchRecord()
    names = sorted({*last.last_ids, *last.lost, *last.gaps, *lags})
    return PipelineStatus(
        root=root,
        batches=last.number,
        written_at=datetime.fromtimestamp(last.written_ms / 1000, UTC) if head else None,
        batch_s=sum(last.steps_ms.values()) / 1000 if head else None,
        events=sum(queue.events for queue in last.queues.values()),
        open_job_events=last.open_job_events,
        lost=sum(last.lost.values()),
        queues=[_queue(name, last, lags.get(name)) for name in names],
        gaps=sum(last.gaps.values()),
    )


def _queue(name: str, last: BatchRecord, lag: Lag | None) -> QueueStatus:
    status = QueueStatus(name, last.last_ids.get(name), last.lost.get(name, 0), gaps=last.gaps.get(name, 0))
    if lag is None:
        return status
    stream, events, lag_s = lag
    headroom_s = max(0.0, (stream.limit - events) / stream.rate) if stream.rate else None
    return replace(
        status, lag_events=events, lag_s=lag_s, stream_length=stream.length, stream_limit=stream.limit,
        headroom_s=headroom_s,
    )  # fmt: skip
