"""Up to where the next batch of events goes: a budget, shared by the queues, and one time for all of them.

Queues of unlike traffic must not run apart in time: a query that groups by minutes drops what is older than its
watermark, and the watermark follows the queue that is ahead. So no queue is read beyond the time at which the slowest
of those that have more to give was cut off.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from bulltask.spark.source.positions import (
    LAST_SEQ,
    START,
    Facts,
    Gap,
    LossReason,
    Offsets,
    Position,
    StreamId,
    same_stream,
    seeing,
    settle,
    starting,
)

__all__ = ["Plan", "Question", "Reach", "Rules", "Streams", "Way", "plan", "shares"]


@dataclass(frozen=True, slots=True)
class Reach:
    """The answer, or the first part of it.

    Attributes:
        last: the last of the entries; ``None`` when there is none.
        count: how many there are.
        facts: the stream at the very moment of counting (the same script), so that a trim between two calls is seen.
        more: the server stopped early, so as not to keep others waiting: the plan asks again behind ``last``.
    """

    last: StreamId | None
    count: int
    facts: Facts | None
    more: bool = False


@dataclass(slots=True)
class Way:
    """A queue in a plan: from ``start`` by way of ``end``, which moves on, towards ``goal``.

    Attributes:
        queue: BullMQ's spelling of its name.
        start: where the batch before ended.
        base: the same, brought to the stream as it is now.
        end: where this batch ends.
        facts: the stream, when it was last asked.
        goal: where the entries end; ``None`` when none is to be read in this batch.
        new: the batch before did not know it.
        found: what the stream said of a loss that cannot be counted, and so does not show in positions.
        known: how many entries behind ``start`` were seen there, by the batch before or while this one is planned.
    """

    queue: str
    start: Position
    base: Position
    end: Position
    facts: Facts | None
    goal: Position | None
    new: bool = False
    found: Gap | None = None
    known: int = 0

    @classmethod
    def on(cls, queue: str, start: Position, facts: Facts | None, goal: Position | None) -> Way:
        """A queue that is being read."""
        way = cls(queue, start, start, start, facts, goal, known=start.waiting)
        way._settle(facts)
        way.base = way.end
        return way

    @classmethod
    def taken_in(cls, queue: str, start: Position, facts: Facts | None) -> Way:
        """A queue that is new: it is read from the next batch on."""
        return cls(queue, start, start, start, facts, None, new=True)

    @property
    def reborn(self) -> bool:
        """True when the stream turned out to be another one; that one is read from the next batch on."""
        return self.end.life != self.start.life

    @property
    def planned(self) -> Position:
        """``end`` with how far the stream goes; as it was, to the letter, when there is nothing to plan."""
        if self.goal is None or self.start.id >= self.goal.id:
            return seeing(self.end, self.facts) if self.new or self.reborn else self.end
        return seeing(self.end, self.facts)

    @property
    def waiting(self) -> int:
        """How many entries could be read; where they cannot be counted, how many there are at all."""
        if self.facts is None or self.goal is None or self.reborn or self.end.id >= self.goal.id:
            return 0
        if self.end.ordinal is None or self.goal.ordinal is None:
            return self.facts.length
        return self.goal.ordinal - self.end.ordinal

    @property
    def stands_at(self) -> int | None:
        """The time in ms that others must not pass, as this queue has more from then on; ``None`` if it has not."""
        if self.goal is not None and not self.reborn:
            return self.end.id.ms if self.end.id < self.goal.id else None
        if not (self.new or self.reborn):
            return None
        if self.facts is None or self.facts.first is None or self.end.id >= self.facts.last:
            return None
        return max(self.end.id, self.facts.first).ms

    @property
    def gap(self) -> Gap | None:
        """What is lost between ``start`` and ``end``."""
        lost = self.end.lost - self.start.lost
        if self.found is not None and not self.found.exact:
            return replace(self.found, lost=lost)
        if not lost:
            return None
        first = self.facts.first if self.facts else None
        return Gap(self.queue, self.start.id, first, lost, exact=True, reason=LossReason.TRIMMED)

    def arrive(self) -> None:
        """Go to the goal."""
        if self.goal is not None:
            self.end = replace(self.goal, lost=self.end.lost, life=self.end.life)

    def move(self, reach: Reach) -> None:
        """Go on by the entries that were counted."""
        self._settle(reach.facts)
        if self.reborn or reach.last is None or reach.facts is None:
            return
        ordinal = None if self.end.ordinal is None else self.end.ordinal + reach.count
        if reach.last == reach.facts.last:
            ordinal = reach.facts.added
        self.end = replace(self.end, id=reach.last, ordinal=ordinal)

    def _settle(self, facts: Facts | None) -> None:
        """Bring ``end`` to the stream as it is now, but not behind the goal."""
        self.facts = facts
        settled, gap = settle(self.queue, self.end, facts)
        if settled.life != self.start.life:
            self.end, self.found = replace(settled, lost=self.start.lost + self.known), gap
            return
        self.known = max(self.known, seeing(self.start, facts).waiting)
        if self.goal is None or self.start.id >= self.goal.id:
            self.end = self.start  # nothing of it is to be read, so nothing of it is missed yet
        elif settled.id <= self.goal.id:
            self.end, self.found = seeing(settled, facts), gap or self.found
        else:
            self._lose_all(self.goal)

    def _lose_all(self, goal: Position) -> None:
        """A trim has passed the goal; what it took from behind it is a loss of later batches."""
        lost = self.start.lost
        if goal.ordinal is not None and self.start.ordinal is not None:
            lost += goal.ordinal - self.start.ordinal
        self.end = replace(goal, lost=lost, life=self.start.life)


@dataclass(frozen=True, slots=True)
class Question:
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
    most: int | None = None


class Streams(Protocol):
    """What a plan asks; all questions of a call may travel in one pipeline."""

    def facts(self, queues: Sequence[str]) -> Mapping[str, Facts | None]:
        """What each stream says of itself; ``None`` for one that is not there."""
        ...

    def reach(self, questions: Sequence[Question]) -> Sequence[Reach]:
        """The answers, in the order of the questions."""
        ...


@dataclass(frozen=True, slots=True)
class Plan:
    """A planned batch: its end, and what was found to be lost before it."""

    end: Offsets
    gaps: tuple[Gap, ...]


@dataclass(frozen=True, slots=True)
class Rules:
    """How much a batch takes, and from whom.

    Attributes:
        most: how many entries, of all queues together; but each queue that has some gives at least one. ``None``: all.
        align: no queue passes the time at which the slowest was cut off.
        count_missed: a queue that the batch before did not know came up while the query ran, so what was trimmed of it
            is lost; else it is new to the list, and begins with the oldest entry that is there.
        target: where to end at the latest: the facts of when the query began (``Trigger.AvailableNow``).
    """

    most: int | None = None
    align: bool = True
    count_missed: bool = True
    target: Mapping[str, Facts | None] | None = None


def plan(start: Offsets, streams: Streams, queues: Sequence[str], rules: Rules) -> Plan:
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
    facts = streams.facts(queues)
    ways = []
    for queue in queues:
        now = facts.get(queue)
        if queue in start:
            ways.append(Way.on(queue, start[queue], now, _goal(queue, now, rules.target)))
        elif rules.target is None or queue in rules.target:
            ways.append(Way.taken_in(queue, START if rules.count_missed else starting(now, "earliest"), now))
    _spend(ways, streams, rules.most)
    if rules.align:
        _align(ways, streams)
    end = {**start, **{way.queue: way.planned for way in ways}}
    return Plan(end, tuple(gap for way in ways if (gap := way.gap)))


def shares(waiting: Mapping[str, int], most: int | None) -> dict[str, int]:
    """How many entries each queue may give: what it has, or else an equal part of what the others leave.

    Args:
        waiting: how many each queue has.
        most: how many all may give together; ``None`` for all. Each that has some gives at least one, or it might wait
            for ever.
    """
    if most is None:
        return dict(waiting)
    given: dict[str, int] = {}
    left = most
    for count, queue in sorted((count, queue) for queue, count in waiting.items()):
        given[queue] = min(count, max(1, left // (len(waiting) - len(given))))
        left -= given[queue]
    return given


def _goal(queue: str, facts: Facts | None, target: Mapping[str, Facts | None] | None) -> Position | None:
    """Where a queue's batch may end at the latest; ``None`` when nothing of it is to be read."""
    if facts is None or target is None:
        return None if facts is None else facts.end
    then = target.get(queue)
    return then.end if then is not None and same_stream(then.end, facts) else None


def _spend(ways: Sequence[Way], streams: Streams, most: int | None) -> None:
    """Move every way to its goal, or as far as its share of the budget goes."""
    given = shares({way.queue: way.waiting for way in ways if way.waiting}, most)
    short = []
    for way in ways:
        if way.goal is not None and way.waiting:
            if given[way.queue] < way.waiting:
                short.append((way, Question(way.queue, way.end.id, way.goal.id, given[way.queue])))
            else:
                way.arrive()
    _walk(short, streams)


def _align(ways: Sequence[Way], streams: Streams) -> None:
    """Take back those that passed the time at which the slowest of those with more to give stands."""
    times = [time for way in ways if (time := way.stands_at) is not None]
    if not times:
        return
    bound = StreamId(min(times), LAST_SEQ)
    ahead = []
    for way in ways:
        if way.goal is not None and way.end.id > max(bound, way.base.id):
            way.end = way.base
            if way.base.id < bound:
                ahead.append((way, Question(way.queue, way.base.id, bound)))
    _walk(ahead, streams)


def _walk(asked: Sequence[tuple[Way, Question]], streams: Streams) -> None:
    """Move each way as far as its question reaches."""
    while asked:
        further = []
        answers = streams.reach([question for _, question in asked])
        for (way, question), reach in zip(asked, answers, strict=True):
            way.move(reach)
            most = None if question.most is None else question.most - reach.count
            if way.reborn:
                continue
            if reach.more and reach.last is not None:
                further.append((way, replace(question, after=reach.last, most=most)))
            elif most and way.goal is not None and question.until == way.goal.id:
                way.arrive()  # fewer were there than could be counted beforehand
        asked = further
