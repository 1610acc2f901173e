"""The readable and the lost entries of a planned batch.

Spark plans a batch once but may read it twice: after a crash it requests the same range again, perhaps an hour later.
Losses are therefore derived from the offsets of the range and from the current stream, without stored state.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from bulltask.spark.source.offsets import (
    BEGINNING,
    EventGap,
    LossReason,
    QueueOffset,
    StreamId,
    StreamState,
    reconcile,
    same_stream,
)

__all__ = ["EntryRange", "ExpectedRows", "expected_rows", "split_range"]


@dataclass(frozen=True, slots=True)
class EntryRange:
    """A range of one queue's entries that can be read.

    Attributes:
        queue: BullMQ's name for the queue.
        after: The range begins after this id.
        upto: The last entry's id.
        expect: The number of entries; ``None`` if unknown.
    """

    queue: str
    after: StreamId
    upto: StreamId
    expect: int | None

    def missing(self, read: int) -> int:
        """Return the number of entries that were trimmed before they were read, if ``read`` entries were read."""
        return 0 if self.expect is None else max(0, self.expect - read)

    def gap(self, read: int, first: StreamId | None = None) -> EventGap | None:
        """Return the gap that :meth:`missing` counts; ``first`` is a remaining entry after the loss."""
        if not (lost := self.missing(read)):
            return None
        return EventGap(self.queue, self.after, first, lost, exact=True, loss_reason=LossReason.TRIMMED_DURING_READ)


@dataclass(frozen=True, slots=True)
class ExpectedRows:
    """The number of rows that a batch must have for one queue, derived from its start and end offsets.

    Attributes:
        count: The number of events, read or lost; ``None`` if the stream does not count its entries.
        any: Whether there must be at least one row, of an event or of a gap.
    """

    count: int | None
    any: bool = False

    def __add__(self, other: ExpectedRows) -> ExpectedRows:
        """Return the expected rows for two queues that have the same name in bulltask."""
        counts = (self.count, other.count)
        return ExpectedRows(None if None in counts else sum(filter(None, counts)), any=self.any or other.any)

    def is_met(self, read: int, lost: int, gaps: int) -> bool:
        """Return whether ``read`` events, and ``lost`` events in ``gaps`` gaps, meet the expectation."""
        return self.count in {None, read + lost} and (not self.any or read + gaps > 0)


def expected_rows(start: QueueOffset | None, end: QueueOffset) -> ExpectedRows:
    """Return the number of rows that a batch must have for a queue.

    Args:
        start: The batch's start offset; ``None`` if this batch only adds the queue.
        end: The batch's end offset.
    """
    if start is None or replace(start, seen=end.seen) == end:
        return ExpectedRows(0)
    if start.generation != end.generation:
        return ExpectedRows(end.lost - start.lost, any=True)
    if start.ordinal is None or end.ordinal is None:
        return ExpectedRows(None, any=start.id < end.id)
    return ExpectedRows(end.ordinal - start.ordinal)


def split_range(
    queue: str, start: QueueOffset | None, end: QueueOffset, state: StreamState | None
) -> tuple[list[EventGap], EntryRange | None]:
    """Split one queue's part of a batch into gaps and the readable range.

    Args:
        queue: BullMQ's name for the queue.
        start: The batch's start offset; ``None`` if this batch only adds the queue.
        end: The batch's end offset.
        state: The current stream; ``None`` if it does not exist.

    Returns:
        Gaps and a range. Every counted entry is either in a gap or in the range.
    """
    if start is None or replace(start, seen=end.seen) == end:
        return [], None
    first = None if state is None else state.first
    if start.generation != end.generation:
        return [_stream_replaced(queue, start, end, state)], None
    if start.ordinal is None or end.ordinal is None:
        return _uncounted(queue, start, end, state)
    planned = end.lost - start.lost
    removed = end.ordinal
    if state is not None and same_stream(end, state):
        # A stream with manually deleted entries has no reliable count: reading detects missing entries.
        removed = 0 if state.trimmed is None else min(end.ordinal, state.trimmed)
    lost = {LossReason.TRIMMED: planned, LossReason.TRIMMED_DURING_READ: max(0, removed - start.ordinal - planned)}
    gaps = [
        EventGap(queue, start.id, first, count, exact=True, loss_reason=reason)
        for reason, count in lost.items()
        if count > 0
    ]
    remaining = end.ordinal - start.ordinal - sum(lost.values())
    return gaps, EntryRange(queue, start.id, end.id, remaining) if remaining else None


def _stream_replaced(queue: str, start: QueueOffset, end: QueueOffset, state: StreamState | None) -> EventGap:
    """Return the gap of a batch in which the stream was replaced; nothing from the new stream is read yet."""
    reason = LossReason.STREAM_RECREATED if end.id == BEGINNING else LossReason.FAILOVER_ROLLBACK
    if state is None:
        reason = LossReason.STREAM_DELETED
    first = None if state is None else state.first
    return EventGap(queue, start.id, first, end.lost - start.lost, exact=False, loss_reason=reason)


def _uncounted(
    queue: str, start: QueueOffset, end: QueueOffset, state: StreamState | None
) -> tuple[list[EventGap], EntryRange | None]:
    _, gap = reconcile(queue, start, state)
    if gap is None and state is None and start.id < end.id:  # there were entries when the batch was planned
        gap = EventGap(queue, start.id, None, 0, exact=False, loss_reason=LossReason.STREAM_DELETED)
    return [] if gap is None else [gap], EntryRange(queue, start.id, end.id, None) if start.id < end.id else None
