"""The status of a pipeline, from its last batch and from Redis; and the recommended lengths of event streams."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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


class RetentionExample(NamedTuple):
    """A row of the table of stream lengths: how long the default length lasts, and the length for longer times.

    ``half_minute`` is ``maxLen`` for a trigger of 10 s and batches of 5 s, ``quarter_hour`` that for an outage of 15
    minutes, of which ``quarter_hour_mb`` is the memory in Redis, in MB.
    """

    jobs_per_s: int
    events_per_s: float
    default_retention_s: float
    half_minute: int
    quarter_hour: int
    quarter_hour_mb: float


def retention_examples(jobs_per_s: Iterable[int] = (10, 50, 200, 1_000, 5_000)) -> list[RetentionExample]:
    """Return the table of stream lengths, a row for each load in jobs per second."""
    examples: list[RetentionExample] = []
    for jobs in jobs_per_s:
        rate = jobs * EVENTS_PER_JOB
        half_minute = recommended_length(rate, RetentionNeed(10, 5))
        quarter_hour = recommended_length(rate, RetentionNeed(10, 5, 900))
        size_mb = quarter_hour * BYTES_PER_EVENT / 1e6
        examples.append(RetentionExample(jobs, rate, DEFAULT_LENGTH / rate, half_minute, quarter_hour, size_mb))
    return examples


@dataclass(frozen=True, slots=True)
class SkippedQueue:
    """A queue that the pipeline cannot record and skips, so that the other queues are recorded.

    Attributes:
        queue: BullMQ's name for the queue, with unprintable characters escaped.
        reason: Why the queue is skipped, and what to do.
    """

    queue: str
    reason: str


@dataclass(frozen=True, slots=True)
class Lag:
    """How far the lake is behind a queue in Redis.

    Attributes:
        stream: The queue's event stream.
        events: The number of events in the stream that are not in the lake.
        seconds: The time between the lake's last event and the last event in Redis, by Redis' clock.
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
        writer_pid: Id of the process on this machine whose pipeline is writing to the lake; ``None`` if there is none.
        batches: The number of batches.
        written_at: When the last batch was written.
        batch_s: The duration of the last batch in seconds.
        events: The number of events that the last batch read.
        open_job_events: The number of events of open jobs that are kept for the next batch.
        lost: The number of events ever lost, as far as it is known.
        queues: The queues, by name.
        redis_error: Why Redis could not be read; ``None`` if there was no error.
        skipped: The skipped queues.
        gaps: As in `QueueStatus`, of all queues.
        broker: The name of the pipeline's broker; ``""`` without a name.
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
    gaps: int = 0
    broker: str = ""


def describe_losses(lost: int, gaps: int) -> str:
    """Return ``12 events lost in 2 gaps``, for the lost events whose number is known and the number of gaps."""
    number = f"{pluralize(lost, 'event')} lost" if lost else "an unknown number of events lost"
    return f"{number} in {pluralize(gaps, 'gap')}" if gaps else f"{pluralize(lost, 'event')} lost"


def status_of(
    root: str,
    head: BatchRecord | None,
    lags: Mapping[str, Lag],
    *,
    writer_pid: int | None = None,
    redis_error: str | None = None,
    skipped: Sequence[SkippedQueue] = (),
) -> PipelineStatus:
    """Combine data from the last batch and from Redis; ``lags`` has the queues' names in the lake."""
    last = head or BatchRecord()
    names = sorted({*last.last_ids, *last.lost, *last.gaps, *lags})
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
        gaps=sum(last.gaps.values()),
    )


def _queue(name: str, last: BatchRecord, lag: Lag | None) -> QueueStatus:
    status = QueueStatus(name, last.last_ids.get(name), last.lost.get(name, 0), gaps=last.gaps.get(name, 0))
    if lag is None:
        return status
    stream = lag.stream
    headroom_s = max(0.0, (stream.limit - lag.events) / stream.rate) if stream.rate else None
    return replace(
        status, lag_events=lag.events, lag_s=lag.seconds, stream_length=stream.length, stream_limit=stream.limit,
        headroom_s=headroom_s,
    )  # fmt: skip
