"""Plan batches of events: the end of the next batch, and the readable and the lost entries of a planned batch.

Queues with different traffic must advance together in event time. A query that groups by minute drops events that are
older than its watermark, and the queue that is furthest ahead moves the watermark. Therefore no queue is read beyond
the time at which the batch limit cuts off the slowest queue.

Spark plans a batch once but may read it twice: after a crash it requests the same range again, perhaps an hour later.
Losses are therefore derived from the offsets of the range and from the current stream, without stored state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from bulltask.spark.source.offsets import (
    LAST_SEQ,
    START,
    EventGap,
    LossReason,
    Offsets,
    QueueOffset,
    StreamId,
    StreamState,
    first_offset,
    reconcile,
    replacement_gap,
    same_stream,
    with_stream_end,
)

T = TypeVar("T")


def pack(items: Iterable[T], size: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Group items, in their order, so that the sizes in a group add up to at most ``limit``; a larger item is alone."""
    group, total = list[T](), 0
    for item in items:
        if group and total + size(item) > limit:
            yield group
            group, total = [], 0
        group.append(item)
        total += size(item)
    if group:
        yield group


@dataclass(frozen=True, slots=True)
class EntryRange:
    """One queue's readable entries after ``after``, up to and including ``upto``, and their number if it is known."""

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


def is_unchanged(start: QueueOffset | None, end: QueueOffset) -> bool:
    """Return whether a batch reads no events of a queue and records no loss; no ``start``: it only adds the queue."""
    return start is None or replace(start, seen=end.seen) == end


def expected_rows(start: QueueOffset | None, end: QueueOffset) -> ExpectedRows:
    """Return the number of rows that a batch must have for a queue; no ``start``: the batch only adds the queue."""
    if start is None or is_unchanged(start, end):
        return ExpectedRows(0)
    if start.generation != end.generation:
        return ExpectedRows(end.lost - start.lost, any=True)
    if start.ordinal is None or end.ordinal is None:
        return ExpectedRows(None, any=start.id < end.id)
    return ExpectedRows(end.ordinal - start.ordinal)


def split_range(
    queue: str, start: QueueOffset | None, end: QueueOffset, state: StreamState | None
) -> tuple[list[EventGap], EntryRange | None]:
    """Split one queue's part of a batch into gaps and the readable range; every counted entry is in one of them.

    ``start`` is ``None`` if the batch only adds the queue, and ``state`` if the stream no longer exists.
    """
    if start is None or is_unchanged(start, end):
        return [], None
    first = None if state is None else state.first
    if start.generation != end.generation:
        # Nothing from the new stream is read yet.
        return [replacement_gap(queue, start, end, state)], None
    if start.ordinal is None or end.ordinal is None:
        return _uncounted(queue, start, end, state)
    planned = end.lost - start.lost
    removed = end.ordinal
    if state is not None and same_stream(end, state):
        # A stream with manually deleted entries has no reliable count: reading detects missing entries.
        removed = 0 if state.trimmed is None else min(end.ordinal, state.trimmed)
    lost = {
        start.trim_reason(planned): planned,
        LossReason.TRIMMED_DURING_READ: max(0, removed - start.ordinal - planned),
    }
    gaps = [
        EventGap(queue, start.id, first, count, exact=True, loss_reason=reason)
        for reason, count in lost.items()
        if count > 0
    ]
    remaining = end.ordinal - start.ordinal - sum(lost.values())
    return gaps, EntryRange(queue, start.id, end.id, remaining) if remaining else None


def _uncounted(
    queue: str, start: QueueOffset, end: QueueOffset, state: StreamState | None
) -> tuple[list[EventGap], EntryRange | None]:
    _, gap = reconcile(queue, start, state)
    if gap is None and state is None and start.id < end.id:  # there were entries when the batch was planned
        gap = EventGap(queue, start.id, None, 0, exact=False, loss_reason=LossReason.STREAM_DELETED)
    return [] if gap is None else [gap], EntryRange(queue, start.id, end.id, None) if start.id < end.id else None


@dataclass(frozen=True, slots=True)
class ScanResult:
    """The result of a `ScanRequest`, or the first part of it.

    Attributes:
        last: The id of the last entry; ``None`` without entries.
        count: The number of entries.
        state: The stream's state when the entries were counted (in the same transaction), so that a trim between two
            calls is detected.
        truncated: Whether the scan stopped early, so as not to block other clients. The plan continues the scan after
            ``last``.
    """

    last: StreamId | None
    count: int
    state: StreamState | None
    truncated: bool = False


@dataclass(slots=True)
class QueueProgress:
    """One queue's planned progress from ``start`` toward ``target_offset``. Planning moves ``end``.

    Attributes:
        queue: BullMQ's name for the queue.
        start: The end of the previous batch.
        base: ``start``, adjusted to the current stream.
        end: The end of this batch.
        state: The stream when it was last queried.
        target_offset: The offset of the last entry to read; ``start`` or before it if this batch reads no entries.
        is_new: Whether the queue is new in this batch.
        seen_count: The number of entries seen after ``start``, by the previous batch or during planning.
    """

    queue: str
    start: QueueOffset
    base: QueueOffset
    end: QueueOffset
    state: StreamState | None
    target_offset: QueueOffset
    is_new: bool = False
    seen_count: int = 0

    @classmethod
    def reading(
        cls, queue: str, start: QueueOffset, state: StreamState | None, target_offset: QueueOffset
    ) -> QueueProgress:
        """Return the progress of a queue that is being read."""
        progress = cls(queue, start, start, start, state, target_offset, seen_count=start.pending)
        progress._reconcile(state)
        progress.base = progress.end
        return progress

    @classmethod
    def discovered(cls, queue: str, start: QueueOffset, state: StreamState | None) -> QueueProgress:
        """Return the progress of a new queue, which is read from the next batch on."""
        return cls(queue, start, start, start, state, start, is_new=True)

    @property
    def is_replaced(self) -> bool:
        """Whether the stream was replaced; the new one is read from the next batch on."""
        return self.end.generation != self.start.generation

    @property
    def is_idle(self) -> bool:
        """Whether this batch reads no entries of the queue."""
        return self.start.id >= self.target_offset.id

    @property
    def planned_offset(self) -> QueueOffset:
        """``end``, with the end of the stream in ``seen``; ``end`` unchanged if there is nothing to plan."""
        if self.is_idle and not (self.is_new or self.is_replaced):
            return self.end
        return with_stream_end(self.end, self.state)

    @property
    def pending(self) -> int:
        """The number of entries that could be read; if it is unknown, the length of the stream."""
        if self.state is None or self.is_replaced or self.end.id >= self.target_offset.id:
            return 0
        if self.end.ordinal is None or self.target_offset.ordinal is None:
            return self.state.length
        return self.target_offset.ordinal - self.end.ordinal

    @property
    def cutoff_ms(self) -> int | None:
        """The time in ms at which this queue is cut off; no queue may pass it. ``None`` if it has no later entries."""
        if not (self.is_new or self.is_replaced):
            return self.end.id.ms if self.end.id < self.target_offset.id else None
        if self.state is None or self.state.first is None or self.end.id >= self.state.last:
            return None
        return max(self.end.id, self.state.first).ms

    @property
    def gaps(self) -> Sequence[EventGap]:
        """The gaps between ``start`` and ``end``."""
        return split_range(self.queue, self.start, self.end, self.state)[0]

    def advance_to_target(self) -> None:
        """Move to the target offset."""
        self.end = replace(self.target_offset, lost=self.end.lost, generation=self.end.generation)

    def advance(self, result: ScanResult) -> None:
        """Move past the counted entries."""
        self._reconcile(result.state)
        if self.is_replaced or result.last is None or result.state is None:
            return
        ordinal = None if self.end.ordinal is None else self.end.ordinal + result.count
        if result.last == result.state.last:
            ordinal = result.state.added
        self.end = replace(self.end, id=result.last, ordinal=ordinal)

    def _reconcile(self, state: StreamState | None) -> None:
        """Adjust ``end`` to the current stream, but do not pass the target."""
        self.state = state
        reconciled, _ = reconcile(self.queue, self.end, state)
        if reconciled.generation != self.start.generation:
            self.end = replace(reconciled, lost=self.start.lost + self.seen_count)
            return
        self.seen_count = max(self.seen_count, with_stream_end(self.start, state).pending)
        if self.is_idle:
            self.end = self.start  # nothing is missing yet
        elif reconciled.id <= self.target_offset.id:
            self.end = with_stream_end(reconciled, state)
        else:
            # Entries that were trimmed after the target are lost to later batches.
            lost = self.start.lost
            if self.start.ordinal is not None and self.target_offset.ordinal is not None:
                lost += self.target_offset.ordinal - self.start.ordinal
            self.end = replace(self.target_offset, lost=lost, generation=self.start.generation)


@dataclass(frozen=True, slots=True)
class ScanRequest:
    """A request for the last of a queue's up to ``max_entries`` next entries after ``after``, up to ``until``.

    Without ``max_entries``, it is unknown how many entries there may be.
    """

    queue: str
    after: StreamId
    until: StreamId
    max_entries: int | None = None


class EventStreams(Protocol):
    """The streams, in Redis or in a test's memory. All requests in a call may use one Redis pipeline."""

    def states(self, queues: Sequence[str]) -> Mapping[str, StreamState | None]:
        """Return the state of each stream; ``None`` for a stream that does not exist."""
        ...

    def scan(self, requests: Sequence[ScanRequest]) -> Sequence[ScanResult]:
        """Return the results in the order of the requests."""
        ...


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """A planned batch: its end, and the losses before it."""

    end: Offsets
    gaps: tuple[EventGap, ...]


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """The limits of a batch.

    Attributes:
        max_entries: The batch limit across all queues; each queue with entries contributes at least one. ``None``: no
            limit.
        align: Whether no queue may pass the earliest time at which another queue was cut off.
        are_created: Whether a new queue was created while the query ran. Otherwise it was only added to the list of
            queues: that its oldest entries were trimmed is no error.
        target: The latest end: the state of the streams when the query started (``Trigger.AvailableNow``).
    """

    max_entries: int | None = None
    align: bool = True
    are_created: bool = True
    target: Mapping[str, StreamState | None] | None = None


def plan_batch(start: Offsets, streams: EventStreams, queues: Sequence[str], limits: BatchLimits) -> BatchPlan:
    """Plan the end of the next batch; it equals ``start`` if there is nothing new.

    A queue that is not in ``start`` is only added, and is read from the next batch on, like a stream that was replaced.
    Within a batch, all of a queue's numbers therefore belong to one stream. Queues of ``start`` that are not in
    ``queues`` keep their offsets.
    """
    states = streams.states(queues)
    all_progress = []
    for queue in queues:
        state = states.get(queue)
        if queue in start:
            target_offset = _target_offset(queue, state, limits.target) or start[queue]
            all_progress.append(QueueProgress.reading(queue, start[queue], state, target_offset))
        elif limits.target is None or queue in limits.target:
            first = START if limits.are_created else first_offset(state, "earliest")
            all_progress.append(QueueProgress.discovered(queue, first, state))
    _apply_limit(all_progress, streams, limits.max_entries)
    if limits.align:
        _align_queues(all_progress, streams)
    end = {**start, **{progress.queue: progress.planned_offset for progress in all_progress}}
    return BatchPlan(end, tuple(gap for progress in all_progress for gap in progress.gaps))


def divide_limit(pending: Mapping[str, int], max_entries: int | None) -> dict[str, int]:
    """Return the number of entries that a batch reads from each queue: all, or an equal share of the remaining limit.

    Each queue with entries contributes at least one entry; otherwise it could wait forever.
    """
    if max_entries is None:
        return dict(pending)
    parts: dict[str, int] = {}
    remaining = max_entries
    for count, queue in sorted((count, queue) for queue, count in pending.items()):
        parts[queue] = min(count, max(1, remaining // (len(pending) - len(parts))))
        remaining -= parts[queue]
    return parts


def _target_offset(
    queue: str, state: StreamState | None, target: Mapping[str, StreamState | None] | None
) -> QueueOffset | None:
    """Return how far a batch may read a queue; ``None`` if it reads no entries of the queue."""
    if state is None or target is None:
        return None if state is None else state.end
    target_state = target.get(queue)
    return target_state.end if target_state is not None and same_stream(target_state.end, state) else None


def _apply_limit(all_progress: Sequence[QueueProgress], streams: EventStreams, max_entries: int | None) -> None:
    """Move every queue to its target, or as far as its share of the batch limit allows."""
    pending = {progress.queue: progress.pending for progress in all_progress if progress.pending}
    parts = divide_limit(pending, max_entries)
    over_limit = []
    for progress in all_progress:
        if progress.pending and parts[progress.queue] < progress.pending:
            end, target = progress.end.id, progress.target_offset.id
            over_limit.append((progress, ScanRequest(progress.queue, end, target, parts[progress.queue])))
        elif progress.pending:
            progress.advance_to_target()
    _scan(over_limit, streams)


def _align_queues(all_progress: Sequence[QueueProgress], streams: EventStreams) -> None:
    """Move back the queues that passed the earliest time at which a queue was cut off."""
    times = [time for progress in all_progress if (time := progress.cutoff_ms) is not None]
    if not times:
        return
    bound = StreamId(min(times), LAST_SEQ)
    requests = []
    for progress in all_progress:
        if progress.end.id > max(bound, progress.base.id):
            passed = progress.end
            progress.end = progress.base
            if progress.base.id < bound:
                request = ScanRequest(progress.queue, progress.base.id, bound, _count_between(progress.base, passed))
                requests.append((progress, request))
    _scan(requests, streams)


def _count_between(start: QueueOffset, end: QueueOffset) -> int | None:
    """Return the number of entries between two offsets; ``None`` if it is unknown, or there are none."""
    if start.ordinal is None or end.ordinal is None or start.generation != end.generation:
        return None
    return max(0, end.ordinal - start.ordinal) or None


def _scan(requests: Sequence[tuple[QueueProgress, ScanRequest]], streams: EventStreams) -> None:
    """Execute scan requests and advance the queues."""
    while requests:
        next_requests = []
        results = streams.scan([request for _, request in requests])
        for (progress, request), result in zip(requests, results, strict=True):
            progress.advance(result)
            max_entries = None if request.max_entries is None else request.max_entries - result.count
            if progress.is_replaced:
                continue
            if result.truncated and result.last is not None:
                next_requests.append((progress, replace(request, after=result.last, max_entries=max_entries)))
            elif max_entries and request.until == progress.target_offset.id:
                progress.advance_to_target()  # there were fewer entries than expected
        requests = next_requests
