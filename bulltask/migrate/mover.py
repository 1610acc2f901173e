"""Carrying a migration out, page by page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from bulltask.migrate.bull_job import BullJob
from bulltask.migrate.convert import Conversion
from bulltask.migrate.judge import Judge
from bulltask.migrate.outcome import Left, Outcome
from bulltask.migrate.recognise import PLACES, Facts
from bulltask.migrate.survey import AT_ONCE, kind_of, read_jobs
from bulltask.transport.call import Call
from bulltask.transport.client import Client
from bulltask.transport.keys import BullKeys, QueueKeys
from bulltask.transport.scripts.bull import (
    JobConversion,
    MoveResult,
    ScoredIds,
    convert_bull_job,
    move_bull_job,
    page_of,
)

__all__ = ["Mover"]

_LEFT = {
    MoveResult.NO_HASH: Left.NO_HASH,
    MoveResult.LOCKED: Left.LOCKED,
    MoveResult.ID_TAKEN: Left.ID_TAKEN,
    MoveResult.CHANGED: Left.CHANGING,
}
_TRIES = 3


class Mover:
    """Responsible for moving jobs, one script call each, a page of calls in a round trip.

    Args:
        client: the server.
        source: Bull's queue.
        target: BullMQ's.
        judge: says what becomes of a job, and counts those that stay.
        outcome: counts the moved ones.
        in_place: both queues are the same.
    """

    def __init__(
        self,
        client: Client,
        source: BullKeys,
        target: QueueKeys,
        judge: Judge,
        outcome: Outcome,
        *,
        in_place: bool,
    ) -> None:
        self._client, self._source, self._target = client, source, target
        self._judge, self._outcome, self._in_place = judge, outcome, in_place
        self._end: int | None = None

    def run(self, facts: Facts, limit: int | None, seen: Callable[[int], object]) -> int:
        """Go through all places once, until ``limit`` jobs were moved; the result is how many were."""
        began = self._outcome.total_moved
        self._end = None if limit is None else began + limit
        for place in PLACES:
            first, kind = 0, kind_of(facts, place)
            while not self._enough():
                page = self._client.run(page_of(self._source.base + place, kind, first, AT_ONCE))
                if not page:
                    break
                # What stays is next in turn the next time as well, so the page after it begins behind it.
                first += self._page(place, page, first, seen)
                if kind == "set":  # all of it was one page
                    break
        return self._outcome.total_moved - began

    def _enough(self) -> bool:
        return self._end is not None and self._outcome.total_moved >= self._end

    def _page(self, place: str, page: ScoredIds, first: int, seen: Callable[[int], object]) -> int:
        """Move the jobs of a page; the result is how many of them are still in their place."""
        stay = 0
        for start in range(0, len(page), AT_ONCE):
            jobs = read_jobs(self._client, self._source, place, page[start : start + AT_ONCE])
            stay += self._jobs(jobs, first + stay)
            seen(self._outcome.total_moved)
        return stay

    def _jobs(self, jobs: Sequence[BullJob], first: int, tries: int = _TRIES) -> int:
        wanted, rank = list[tuple[JobConversion, Conversion]](), first
        for job in jobs:
            found = self._judge.change(job)
            if found:
                wanted.append((replace(found[0], rank=rank), found[1]))
            rank += found is None or not self._leaves(found[0])
        if self._end is not None:
            wanted = wanted[: self._end - self._outcome.total_moved]
        answers: list[MoveResult] = self._client.run_many([self._call(change) for change, _ in wanted])
        stay, again = len(jobs) - len(wanted), set[str]()
        for (change, made), answer in zip(wanted, answers, strict=True):
            if answer is MoveResult.CHANGED and tries > 1:
                again.add(change.id)
            else:
                stay += self._count(change, made, answer)
        if again:
            page = [(job.id, job.score) for job in jobs if job.id in again]
            jobs = read_jobs(self._client, self._source, jobs[0].place, page)
            stay += self._jobs(jobs, first + stay, tries - 1)
        return stay

    def _leaves(self, change: JobConversion) -> bool:
        """True when its place has it no longer afterwards."""
        prioritized = change.state == "waiting" and change.priority > 0
        return not self._in_place or prioritized or change.state == "recovered"

    def _call(self, change: JobConversion) -> Call[MoveResult]:
        if self._in_place:
            return convert_bull_job(self._source, change)
        return move_bull_job(self._source, self._target, change)

    def _count(self, change: JobConversion, made: Conversion, answer: MoveResult) -> bool:
        """Count one; true when it is still in its place."""
        if answer is MoveResult.DONE:
            self._outcome.moved[change.state] += 1
            self._outcome.notes.update(made.notes)
            return not self._leaves(change)
        if answer in _LEFT:
            self._outcome.leave(_LEFT[answer], change.id)
        return answer is not MoveResult.GONE
