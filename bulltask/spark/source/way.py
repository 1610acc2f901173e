"""One queue's part of the plan of a batch of events: from where it was read, to where it is read next."""

from __future__ import annotations

from dataclasses import dataclass, replace

from bulltask.spark.source.positions import Facts, Gap, LossReason, Position, StreamId, seeing, settle

__all__ = ["Reach", "Way"]


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
