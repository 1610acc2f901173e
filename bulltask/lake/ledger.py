"""The records of a pipeline's batches.

A record is the metadata of the commit with which its batch is complete: that of ``_pipeline/open_jobs``. It is the last
of the batch's commits, so a batch that has a record is in all tables. Each broker's pipeline has its own records.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Final, Self

from bulltask.jobs.errors import DecodeError

if TYPE_CHECKING:  # it imports Arrow
    from bulltask.lake.storage import Lake

VERSION: Final = 2


@dataclass(frozen=True, slots=True)
class QueueRecord:
    """The result of a batch for one queue.

    Attributes:
        events: The number of rows added to ``bronze.events``.
        first: Id of the first of these events; ``None`` if there are no events.
        last: Id of the last of these events.
        lost: The number of lost events.
        gaps: The number of rows added to ``bronze.gaps``.
    """

    events: int = 0
    first: str | None = None
    last: str | None = None
    lost: int = 0
    gaps: int = 0


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """A batch that is in all tables.

    Attributes:
        number: The number of the batch, from 1, across checkpoints; 0 stands for no batch.
        written_ms: When it was complete, by this machine's clock.
        newest_event_ms: Time of the newest event ever read; 0 before the first.
        queues: The result for each queue, by name without the hash tag.
        last_ids: Id of the last event ever read from each queue.
        lost: The number of events ever lost in each queue, as far as it is known.
        gaps: The number of rows ever added to ``bronze.gaps`` for each queue.
        attempts: The number of rows added to ``silver.attempts``.
        jobs: The number of rows added to ``silver.jobs``.
        open_job_events: The number of events of open jobs, which are kept for later batches.
        idle_since_ms: No open job's last event is older; 0 if no jobs are open.
        steps_ms: How long each step took.
        query: The beginning of the id of the Spark query that read the batch.
        queries: The last batch number of each Spark query that has written to the lake, by the beginning of its id.
    """

    number: int = 0
    written_ms: int = 0
    newest_event_ms: int = 0
    queues: Mapping[str, QueueRecord] = field(default_factory=dict)
    last_ids: Mapping[str, str] = field(default_factory=dict)
    lost: Mapping[str, int] = field(default_factory=dict)
    gaps: Mapping[str, int] = field(default_factory=dict)
    attempts: int = 0
    jobs: int = 0
    open_job_events: int = 0
    idle_since_ms: int = 0
    steps_ms: Mapping[str, int] = field(default_factory=dict)
    query: str = ""
    queries: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Self:
        """Decode the result of :meth:`to_json`; raise ``DecodeError`` if it has another version."""
        if stored.get("version") != VERSION:
            raise DecodeError(
                f"the record of a batch has version {stored.get('version')!r}, but this bulltask reads "
                f"version {VERSION}: the lake was written by another version of bulltask; use that "
                "version or a newer one"
            )
        fields = {name: stored[name] for name in cls.__dataclass_fields__ if name in stored}
        fields["queues"] = {queue: QueueRecord(**record) for queue, record in fields["queues"].items()}
        return cls(**fields)

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON values."""
        return {"version": VERSION, **asdict(self)}


def last_record(lake: Lake) -> BatchRecord | None:
    """Return the record of the last batch; ``None`` before the first."""
    return next(records(lake), None)


def records(lake: Lake) -> Iterator[BatchRecord]:
    """Yield the records of batches, newest first, as far back as they are kept: a few hours."""
    snapshot = lake.open(lake.open_events)
    if snapshot is not None:
        yield from map(BatchRecord.from_json, snapshot.metadata())


def records_after(lake: Lake, number: int) -> list[BatchRecord]:
    """Return the records of the batches after the one with a number, oldest first, as far back as they are kept."""
    return list(takewhile(lambda record: record.number > number, records(lake)))[::-1]
