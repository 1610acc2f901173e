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
    Offsets,
    Position,
    StreamId,
    same_stream,
    starting,
)
from bulltask.spark.source.way import Reach, Way

__all__ = ["Plan", "Question", "Reach", "Rules", "Streams", "plan", "shares"]


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
