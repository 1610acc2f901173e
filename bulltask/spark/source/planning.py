"""Up to where the next batch of events goes: a budget, shared by the queues, and one time for all of them.

Queues of unlike traffic must not run apart in time: a query that groups by minutes drops what is older than its
watermark, and the watermark follows the queue that is ahead. So no queue is read beyond the time at which the slowest
of those that have more to give was cut off.
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
    "plan_batch",
    "split_budget",
]


@dataclass(frozen=True, slots=True)
class ScanResult:
    """The answer, or the first part of it.

    Attributes:
        last: the last of the entries; ``None`` when there is none.
        count: how many there are.
        state: the stream at the very moment of counting (the same script), so that a trim between two calls is seen.
        more: the server stopped early, so as not to keep others waiting: the plan asks again behind ``last``.
    """

    last: StreamId | None
    count: int
    state: StreamState | None
    truncated: bool = False


@dataclass(slots=True)
class QueueProgress:
    """A queue in a plan: from ``start`` by way of ``end``, which moves on, towards ``target_offset``.

    Attributes:
        queue: BullMQ's spelling of its name.
        start: where the batch before ended.
        base: the same, brought to the stream as it is now.
        end: where this batch ends.
        state: the stream, when it was last asked.
        goal: where the entries end; ``None`` when none is to be read in this batch.
        new: the batch before did not know it.
        found: what the stream said of a loss that cannot be counted, and so does not show in positions.
        known: how many entries behind ``start`` were seen there, by the batch before or while this one is planned.
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
        """A queue that is being read."""
        progress = cls(queue, start, start, start, state, target_offset, seen_count=start.pending)
        progress._reconcile(state)
        progress.base = progress.end
        return progress

    @classmethod
    def discovered(cls, queue: str, start: QueueOffset, state: StreamState | None) -> QueueProgress:
        """A queue that is new: it is read from the next batch on."""
        return cls(queue, start, start, start, state, None, is_new=True)

    @property
    def recreated(self) -> bool:
        """True when the stream turned out to be another one; that one is read from the next batch on."""
        return self.end.generation != self.start.generation

    @property
    def planned_offset(self) -> QueueOffset:
        """``end`` with how far the stream goes; as it was, to the letter, when there is nothing to plan."""
        if self.target_offset is None or self.start.id >= self.target_offset.id:
            return with_stream_end(self.end, self.state) if self.is_new or self.recreated else self.end
        return with_stream_end(self.end, self.state)

    @property
    def pending(self) -> int:
        """How many entries could be read; where they cannot be counted, how many there are at all."""
        if self.state is None or self.target_offset is None or self.recreated or self.end.id >= self.target_offset.id:
            return 0
        if self.end.ordinal is None or self.target_offset.ordinal is None:
            return self.state.length
        return self.target_offset.ordinal - self.end.ordinal

    @property
    def watermark_ms(self) -> int | None:
        """The time in ms that others must not pass, as this queue has more from then on; ``None`` if it has not."""
        if self.target_offset is not None and not self.recreated:
            return self.end.id.ms if self.end.id < self.target_offset.id else None
        if not (self.is_new or self.recreated):
            return None
        if self.state is None or self.state.first is None or self.end.id >= self.state.last:
            return None
        return max(self.end.id, self.state.first).ms

    @property
    def gap(self) -> EventGap | None:
        """What is lost between ``start`` and ``end``."""
        lost = self.end.lost - self.start.lost
        if self.loss is not None and not self.loss.exact:
            return replace(self.loss, lost=lost)
        if not lost:
            return None
        first = self.state.first if self.state else None
        return EventGap(self.queue, self.start.id, first, lost, exact=True, reason=LossReason.TRIMMED)

    def advance_to_target(self) -> None:
        """Go to the goal."""
        if self.target_offset is not None:
            self.end = replace(self.target_offset, lost=self.end.lost, generation=self.end.generation)

    def advance(self, scan: ScanResult) -> None:
        """Go on by the entries that were counted."""
        self._reconcile(scan.state)
        if self.recreated or scan.last is None or scan.state is None:
            return
        ordinal = None if self.end.ordinal is None else self.end.ordinal + scan.count
        if scan.last == scan.state.last:
            ordinal = scan.state.added
        self.end = replace(self.end, id=scan.last, ordinal=ordinal)

    def _reconcile(self, state: StreamState | None) -> None:
        """Bring ``end`` to the stream as it is now, but not behind the goal."""
        self.state = state
        settled, gap = reconcile(self.queue, self.end, state)
        if settled.generation != self.start.generation:
            self.end, self.loss = replace(settled, lost=self.start.lost + self.seen_count), gap
            return
        self.seen_count = max(self.seen_count, with_stream_end(self.start, state).pending)
        if self.target_offset is None or self.start.id >= self.target_offset.id:
            self.end = self.start  # nothing of it is to be read, so nothing of it is missed yet
        elif settled.id <= self.target_offset.id:
            self.end, self.loss = with_stream_end(settled, state), gap or self.loss
        else:
            self._skip_to_target(self.target_offset)

    def _skip_to_target(self, target_offset: QueueOffset) -> None:
        """A trim has passed the goal; what it took from behind it is a loss of later batches."""
        lost = self.start.lost
        if target_offset.ordinal is not None and self.start.ordinal is not None:
            lost += target_offset.ordinal - self.start.ordinal
        self.end = replace(target_offset, lost=lost, generation=self.start.generation)


@dataclass(frozen=True, slots=True)
class ScanRequest:
    """Where do the next entries of a queue end?

    Attributes:
        queue: BullMQ's spelling of its name.
        after: they come behind this id.
        until: the last id that counts.
        most: how many at the most; ``None`` for no bound.
    """

    queue: str
    after: StreamId
    until: StreamId
    max_entries: int | None = None


class EventStreams(Protocol):
    """What a plan asks; all questions of a call may travel in one pipeline."""

    def states(self, queues: Sequence[str]) -> Mapping[str, StreamState | None]:
        """What each stream says of itself; ``None`` for one that is not there."""
        ...

    def scan(self, questions: Sequence[ScanRequest]) -> Sequence[ScanResult]:
        """The answers, in the order of the questions."""
        ...


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """A planned batch: its end, and what was found to be lost before it."""

    end: Offsets
    gaps: tuple[EventGap, ...]


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """How much a batch takes, and from whom.

    Attributes:
        most: how many entries, of all queues together; but each queue that has some gives at least one. ``None``: all.
        align: no queue passes the time at which the slowest was cut off.
        count_missed: a queue that the batch before did not know came up while the query ran, so what was trimmed of it
            is lost; else it is new to the list, and begins with the oldest entry that is there.
        target: where to end at the latest: the state of the streams when the query began (``Trigger.AvailableNow``).
    """

    max_entries: int | None = None
    align: bool = True
    count_missed: bool = True
    target: Mapping[str, StreamState | None] | None = None


def plan_batch(start: Offsets, streams: EventStreams, queues: Sequence[str], rules: BatchLimits) -> BatchPlan:
    """Find the end of the next batch.

    A queue that ``start`` lacks is only taken in, and read from the next batch on; a stream that turned out to be
    another one likewise. So within one batch a queue's numbers are those of one stream. Queues of ``start`` that are
    not asked for keep their positions.

    Args:
        start: the end of the batch before.
        streams: answers questions about the streams.
        queues: the queues to read, by BullMQ's spelling.
        rules: how much the batch takes.

    Returns:
        The end, equal to ``start`` when there is nothing new, and the gaps before it.
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
    _spend_budget(all_progress, streams, rules.max_entries)
    if rules.align:
        _align_queues(all_progress, streams)
    end = {**start, **{progress.queue: progress.planned_offset for progress in all_progress}}
    return BatchPlan(end, tuple(gap for progress in all_progress if (gap := progress.gap)))


def split_budget(pending: Mapping[str, int], max_entries: int | None) -> dict[str, int]:
    """How many entries each queue may give: what it has, or else an equal part of what the others leave.

    Args:
        waiting: how many each queue has.
        most: how many all may give together; ``None`` for all. Each that has some gives at least one, or it might wait
            for ever.
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
    """Where a queue's batch may end at the latest; ``None`` when nothing of it is to be read."""
    if state is None or target is None:
        return None if state is None else state.end
    then = target.get(queue)
    return then.end if then is not None and same_stream(then.end, state) else None


def _spend_budget(all_progress: Sequence[QueueProgress], streams: EventStreams, max_entries: int | None) -> None:
    """Move every way to its goal, or as far as its share of the budget goes."""
    given = split_budget(
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
    """Take back those that passed the time at which the slowest of those with more to give stands."""
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
    """Move each way as far as its question reaches."""
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
                progress.advance_to_target()  # fewer were there than could be counted beforehand
        asked = further
