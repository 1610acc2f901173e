"""What of a planned batch is there to be read, and what is not any more.

Spark plans a batch once and may read it twice: after a crash it asks for the same range again, perhaps an hour later.
So what is lost is worked out from the positions of the range and from the stream as it is now, never remembered.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from bulltask.spark.source.positions import BEGINNING, Facts, Gap, LossReason, Position, StreamId, same_stream, settle

__all__ = ["Due", "Span", "due", "spans_of"]


@dataclass(frozen=True, slots=True)
class Span:
    """A range of one queue's entries that is there to be read.

    Attributes:
        queue: BullMQ's spelling of its name.
        after: the entries come behind this id.
        upto: the last one's id.
        expect: how many there are; ``None`` when that is not known.
    """

    queue: str
    after: StreamId
    upto: StreamId
    expect: int | None

    def missing(self, read: int) -> int:
        """How many entries were trimmed before they were read, if ``read`` of them were."""
        return 0 if self.expect is None else max(0, self.expect - read)

    def gap(self, read: int, first: StreamId | None = None) -> Gap | None:
        """What :meth:`missing` counts, to be reported; ``first`` is an entry that was there when all of it was gone."""
        if not (lost := self.missing(read)):
            return None
        return Gap(self.queue, self.after, first, lost, exact=True, reason=LossReason.AT_READ)


@dataclass(frozen=True, slots=True)
class Due:
    """What there must be of one queue in a batch, by the positions between which it lies, and by nothing else.

    Attributes:
        count: events read and events lost, together; ``None`` where the stream does not count its entries.
        any: there must be a row at least, of an event or of a gap.
    """

    count: int | None
    any: bool = False

    def __add__(self, other: Due) -> Due:
        """What there must be of two queues that are called alike."""
        counts = (self.count, other.count)
        return Due(None if None in counts else sum(filter(None, counts)), any=self.any or other.any)

    def is_met(self, read: int, lost: int, gaps: int) -> bool:
        """Whether so many events read, and so many lost in so many gaps, are what there must be."""
        return self.count in {None, read + lost} and (not self.any or read + gaps > 0)


def due(start: Position | None, end: Position) -> Due:
    """Return what there must be of a queue in a batch.

    Args:
        start: the batch begins behind it; ``None`` when this batch only takes the queue in.
        end: the batch goes up to it.
    """
    if start is None or replace(start, seen=end.seen) == end:
        return Due(0)
    if start.life != end.life:
        return Due(end.lost - start.lost, any=True)
    if start.ordinal is None or end.ordinal is None:
        return Due(None, any=start.id < end.id)
    return Due(end.ordinal - start.ordinal)


def spans_of(queue: str, start: Position | None, end: Position, facts: Facts | None) -> tuple[list[Gap], Span | None]:
    """Divide one queue's part of a batch into what is lost and what is left.

    Args:
        queue: BullMQ's spelling of its name.
        start: the batch begins behind it; ``None`` when this batch only takes the queue in.
        end: the batch goes up to it.
        facts: the stream now; ``None`` when there is none.

    Returns:
        Gaps and a span: every entry of the range that was counted is in one of them.
    """
    if start is None or replace(start, seen=end.seen) == end:
        return [], None
    first = None if facts is None else facts.first
    if start.life != end.life:
        return [_of_another_life(queue, start, end, facts)], None
    if start.ordinal is None or end.ordinal is None:
        return _uncounted(queue, start, end, facts)
    planned = end.lost - start.lost
    gone = end.ordinal
    if facts is not None and same_stream(end, facts):
        # A stream of which entries were deleted one by one counts no more: what is missing shows when it is read.
        gone = 0 if facts.trimmed is None else min(end.ordinal, facts.trimmed)
    lost = {LossReason.TRIMMED: planned, LossReason.AT_READ: max(0, gone - start.ordinal - planned)}
    gaps = [
        Gap(queue, start.id, first, count, exact=True, reason=reason) for reason, count in lost.items() if count > 0
    ]
    left = end.ordinal - start.ordinal - sum(lost.values())
    return gaps, Span(queue, start.id, end.id, left) if left else None


def _of_another_life(queue: str, start: Position, end: Position, facts: Facts | None) -> Gap:
    """The batch in which the stream turned out to be another one: nothing of it is read."""
    reason = LossReason.RECREATED if end.id == BEGINNING else LossReason.ROLLED_BACK
    if facts is None:
        reason = LossReason.GONE
    first = None if facts is None else facts.first
    return Gap(queue, start.id, first, end.lost - start.lost, exact=False, reason=reason)


def _uncounted(queue: str, start: Position, end: Position, facts: Facts | None) -> tuple[list[Gap], Span | None]:
    _, gap = settle(queue, start, facts)
    if gap is None and facts is None and start.id < end.id:  # the plan has seen some
        gap = Gap(queue, start.id, None, 0, exact=False, reason=LossReason.GONE)
    return [] if gap is None else [gap], Span(queue, start.id, end.id, None) if start.id < end.id else None
