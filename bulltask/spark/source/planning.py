"""Plan where the next batch of events ends: one budget, shared by all queues, and one time for all of them.

Queues with different traffic must stay close in time. A query that groups by minutes drops events that are older than
its watermark, and the queue that is furthest ahead moves the watermark. So no queue is read beyond the time at which
the slowest queue that still has events was cut off.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

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
    same_stream,
    with_stream_end,
)

__all__ = [
    "BatchLimits",
    "BatchPlan",
    "EventStreams",
    "QueueProgress",
    "ScanRequest",
    "ScanResult",
    "divide_limit",
    "plan_batch",
]


@dataclass(frozen=True, slots=True)
class ScanResult:
    """The answer to a `ScanRequest`, or the first part of it.

    Attributes:
        last: Id of the last entry found; ``None`` if there is none.
        count: How many entries were found.
        state: The stream at the moment of counting (in the same transaction), so that a trim between two calls is
            noticed.
        truncated: The server stopped early so as not to block other clients; the plan asks again for what comes after
            ``last``.
    """

    last: StreamId | None
    count: int
    state: StreamState | None
    truncated: bool = False


@dataclass(slots=True)
class QueueProgress:
    """How far a plan reads one queue: from ``start`` towards ``target_offset``. ``end`` moves while the batch is
    planned.

    Attributes:
        queue: BullMQ's name of the queue.
        start: Where the previous batch ended.
        base: The same, adjusted to the stream as it is now.
        end: Where this batch ends.
        state: The stream when it was last queried.
        target_offset: Where the entries end; ``None`` if this batch reads none of them.
        is_new: The previous batch did not know the queue.
        loss: A loss that cannot be counted and therefore does not show in the offsets.
        seen_count: How many entries were seen after ``start``, by the previous batch or while this one is planned.
    """

    queue: str
    start: QueueOffset
    base: QueueOffset
    end: QueueOffset
    state: StreamState | None
    target_offset: QueueOffset | None
    is_new: bool = False
    loss: EventGap | None = None
    seen_count: int = 0

    @classmethod
    def reading(
        cls, queue: str, start: QueueOffset, state: StreamState | None, target_offset: QueueOffset | None
    ) -> QueueProgress:
        """Start with a queue that is being read."""
        progress = cls(queue, start, start, start, state, target_offset, seen_count=start.pending)
        progress._reconcile(state)
        progress.base = progress.end
        return progress

    @classmethod
    def discovered(cls, queue: str, start: QueueOffset, state: StreamState | None) -> QueueProgress:
        """Start with a new queue; it is read from the next batch on."""
        return cls(queue, start, start, start, state, None, is_new=True)

    @property
    def recreated(self) -> bool:
        """Whether the stream turned out to be another one; that one is read from the next batch on."""
        return self.end.generation != self.start.generation

    @property
    def planned_offset(self) -> QueueOffset:
        """``end`` together with the end of the stream; unchanged, byte for byte, if there is nothing to plan."""
        if self.target_offset is None or self.start.id >= self.target_offset.id:
            return with_stream_end(self.end, self.state) if self.is_new or self.recreated else self.end
        return with_stream_end(self.end, self.state)

    @property
    def pending(self) -> int:
        """How many entries could be read; if they cannot be counted, how many the stream holds."""
        if self.state is None or self.target_offset is None or self.recreated or self.end.id >= self.target_offset.id:
            return 0
        if self.end.ordinal is None or self.target_offset.ordinal is None:
            return self.state.length
        return self.target_offset.ordinal - self.end.ordinal

    @property
    def watermark_ms(self) -> int | None:
        """The time in ms that other queues must not pass, if this queue has entries after it, else ``None``."""
        if self.target_offset is not None and not self.recreated:
            return self.end.id.ms if self.end.id < self.target_offset.id else None
        if not (self.is_new or self.recreated):
            return None
        if self.state is None or self.state.first is None or self.end.id >= self.state.last:
            return None
        return max(self.end.id, self.state.first).ms

    @property
    def gap(self) -> EventGap | None:
        """What was lost between ``start`` and ``end``."""
        lost = self.end.lost - self.start.lost
        if self.loss is not None and not self.loss.exact:
            return replace(self.loss, lost=lost)
        if not lost:
            return None
        first = self.state.first if self.state else None
        return EventGap(self.queue, self.start.id, first, lost, exact=True, reason=LossReason.TRIMMED)

    def advance_to_target(self) -> None:
        """Move to the target offset."""
        if self.target_offset is not None:
            self.end = replace(self.target_offset, lost=self.end.lost, generation=self.end.generation)

    def advance(self, scan: ScanResult) -> None:
        """Move past the entries that were counted."""
        self._reconcile(scan.state)
        if self.recreated or scan.last is None or scan.state is None:
            return
        ordinal = None if self.end.ordinal is None else self.end.ordinal + scan.count
        if scan.last == scan.state.last:
            ordinal = scan.state.added
        self.end = replace(self.end, id=scan.last, ordinal=ordinal)

    def _reconcile(self, state: StreamState | None) -> None:
        """Adjust ``end`` to the stream as it is now, but do not pass the target."""
        self.state = state
        settled, gap = reconcile(self.queue, self.end, state)
        if settled.generation != self.start.generation:
            self.end, self.loss = replace(settled, lost=self.start.lost + self.seen_count), gap
            return
        self.seen_count = max(self.seen_count, with_stream_end(self.start, state).pending)
        if self.target_offset is None or self.start.id >= self.target_offset.id:
            self.end = self.start  # this batch reads nothing of the queue, so nothing is missing yet
        elif settled.id <= self.target_offset.id:
            self.end, self.loss = with_stream_end(settled, state), gap or self.loss
        else:
            self._skip_to_target(self.target_offset)

    def _skip_to_target(self, target_offset: QueueOffset) -> None:
        """Handle a trim that passed the target; what it removed after the target is a loss of later batches."""
        lost = self.start.lost
        if target_offset.ordinal is not None and self.start.ordinal is not None:
            lost += target_offset.ordinal - self.start.ordinal
        self.end = replace(target_offset, lost=lost, generation=self.start.generation)


@dataclass(frozen=True, slots=True)
class ScanRequest:
    """Ask where the next entries of a queue end.

    Attributes:
        queue: BullMQ's name of the queue.
        after: Entries after this id count.
        until: The last id that counts.
        max_entries: How many entries to count at most; ``None`` for no limit.
    """

    queue: str
    after: StreamId
    until: StreamId
    max_entries: int | None = None


class EventStreams(Protocol):
    """What a plan needs to know about streams; all requests of a call may share one pipeline."""

    def states(self, queues: Sequence[str]) -> Mapping[str, StreamState | None]:
        """Return the state of each stream; ``None`` for a stream that does not exist."""
        ...

    def scan(self, questions: Sequence[ScanRequest]) -> Sequence[ScanResult]:
        """Return the results in the order of the requests."""
        ...


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """A planned batch: where it ends, and which losses were found before that."""

    end: Offsets
    gaps: tuple[EventGap, ...]


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """How many entries a batch reads, and from which queues.

    Attributes:
        max_entries: For all queues together; but each queue that has entries contributes at least one. ``None``: no
            limit.
        align: No queue passes the time at which the slowest was cut off.
        count_missed: A queue that is new to the plan appeared while the query ran, so entries that were trimmed from it
            are lost. Otherwise it was only added to the list of queues, and reading begins with its oldest entry.
        target: Where to end at the latest: the state of the streams when the query started (``Trigger.AvailableNow``).
    """

    max_entries: int | None = None
    align: bool = True
    count_missed: bool = True
    target: Mapping[str, StreamState | None] | None = None


def plan_batch(start: Offsets, streams: EventStreams, queues: Sequence[str], rules: BatchLimits) -> BatchPlan:
    """Find the end of the next batch.

    A queue that ``start`` does not contain is only added, and read from the next batch on; so is a stream that turned
    out to be another one. Within one batch all numbers of a queue therefore belong to one stream. Queues of ``start``
    that are not in ``queues`` keep their offsets.

    Args:
        start: The end of the previous batch.
        streams: Answers requests about the streams.
        queues: The queues to read, by BullMQ's names.
        limits: How much the batch reads.

    Returns:
        The end, equal to ``start`` if there is nothing new, and the gaps before it.
    """
    state = streams.states(queues)
    all_progress = []
    for queue in queues:
        now = state.get(queue)
        if queue in start:
            all_progress.append(
                QueueProgress.reading(queue, start[queue], now, _target_offset(queue, now, rules.target))
            )
        elif rules.target is None or queue in rules.target:
            all_progress.append(
                QueueProgress.discovered(queue, START if rules.count_missed else first_offset(now, "earliest"), now)
            )
    _apply_limit(all_progress, streams, rules.max_entries)
    if rules.align:
        _align_queues(all_progress, streams)
    end = {**start, **{progress.queue: progress.planned_offset for progress in all_progress}}
    return BatchPlan(end, tuple(gap for progress in all_progress if (gap := progress.gap)))


def divide_limit(pending: Mapping[str, int], max_entries: int | None) -> dict[str, int]:
    """Return how many entries of each queue a batch reads: all of them, or an equal part of what the others leave.

    Args:
        pending: How many entries each queue has.
        max_entries: The budget for all queues together; ``None`` for no limit. Each queue with entries contributes at
            least one, or it could wait forever.
    """
    if max_entries is None:
        return dict(pending)
    given: dict[str, int] = {}
    left = max_entries
    for count, queue in sorted((count, queue) for queue, count in pending.items()):
        given[queue] = min(count, max(1, left // (len(pending) - len(given))))
        left -= given[queue]
    return given


def _target_offset(
    queue: str, state: StreamState | None, target: Mapping[str, StreamState | None] | None
) -> QueueOffset | None:
    """Return where a queue's batch may end at the latest; ``None`` if nothing of it is to be read."""
    if state is None or target is None:
        return None if state is None else state.end
    then = target.get(queue)
    return then.end if then is not None and same_stream(then.end, state) else None


def _apply_limit(all_progress: Sequence[QueueProgress], streams: EventStreams, max_entries: int | None) -> None:
    """Move every queue to its target, or as far as its part of the budget allows."""
    given = divide_limit(
        {progress.queue: progress.pending for progress in all_progress if progress.pending}, max_entries
    )
    over_budget = []
    for progress in all_progress:
        if progress.target_offset is not None and progress.pending:
            if given[progress.queue] < progress.pending:
                over_budget.append(
                    (
                        progress,
                        ScanRequest(progress.queue, progress.end.id, progress.target_offset.id, given[progress.queue]),
                    )
                )
            else:
                progress.advance_to_target()
    _scan(over_budget, streams)


def _align_queues(all_progress: Sequence[QueueProgress], streams: EventStreams) -> None:
    """Take back queues that passed the time at which the slowest queue with more entries was cut off."""
    times = [time for progress in all_progress if (time := progress.watermark_ms) is not None]
    if not times:
        return
    bound = StreamId(min(times), LAST_SEQ)
    ahead = []
    for progress in all_progress:
        if progress.target_offset is not None and progress.end.id > max(bound, progress.base.id):
            progress.end = progress.base
            if progress.base.id < bound:
                ahead.append((progress, ScanRequest(progress.queue, progress.base.id, bound)))
    _scan(ahead, streams)


def _scan(asked: Sequence[tuple[QueueProgress, ScanRequest]], streams: EventStreams) -> None:
    """Move each queue as far as its request reaches."""
    while asked:
        further = []
        answers = streams.scan([question for _, question in asked])
        for (progress, question), scan in zip(asked, answers, strict=True):
            progress.advance(scan)
            max_entries = None if question.max_entries is None else question.max_entries - scan.count
            if progress.recreated:
                continue
            if scan.truncated and scan.last is not None:
                further.append((progress, replace(question, after=scan.last, max_entries=max_entries)))
            elif max_entries and progress.target_offset is not None and question.until == progress.target_offset.id:
                progress.advance_to_target()  # there were fewer entries than expected
        asked = further
