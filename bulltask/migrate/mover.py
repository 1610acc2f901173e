"""Migrate the jobs of a queue, page by page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from bulltask.migrate.bull_job import BullJob
from bulltask.migrate.check import JobCheck
from bulltask.migrate.convert import Conversion
from bulltask.migrate.detection import JOB_KEYS, QueueInfo
from bulltask.migrate.inspection import PAGE_SIZE, key_type_of, read_jobs
from bulltask.migrate.outcome import MigrationOutcome, SkipReason
from bulltask.transport.call import Call
from bulltask.transport.client_types import SyncClient
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

_SKIPPED = {
    MoveResult.NO_HASH: SkipReason.NO_HASH,
    MoveResult.LOCKED: SkipReason.LOCKED,
    MoveResult.ID_TAKEN: SkipReason.ID_TAKEN,
    MoveResult.CHANGED: SkipReason.CHANGING,
}
_MAX_ATTEMPTS = 3


class Mover:
    """Migrates jobs with one script call each, a page of calls per round trip.

    Args:
        client: A connection to the server.
        source: Bull's queue.
        target: BullMQ's queue.
        check: Decides for each job whether it is migrated, and counts skipped jobs.
        outcome: Counts migrated jobs.
        in_place: Whether both queues have the same keys.
    """

    def __init__(
        self,
        client: SyncClient,
        source: BullKeys,
        target: QueueKeys,
        check: JobCheck,
        outcome: MigrationOutcome,
        *,
        in_place: bool,
    ) -> None:
        self._client, self._source, self._target = client, source, target
        self._check, self._outcome, self._in_place = check, outcome, in_place
        self._end: int | None = None

    def run(self, info: QueueInfo, limit: int | None, on_progress: Callable[[int], object]) -> int:
        """Migrate the jobs of all keys once, up to ``limit`` jobs; return how many were migrated."""
        began = self._outcome.total_moved
        self._end = None if limit is None else began + limit
        for suffix in JOB_KEYS:
            first, kind = 0, key_type_of(info, suffix)
            while not self._limit_reached():
                page = self._client.run(page_of(self._source.base + suffix, kind, first, PAGE_SIZE))
                if not page:
                    break
                # Jobs that stay under this key keep their positions, so the next page begins after them.
                first += self._page(suffix, page, first, on_progress)
                if kind == "set":  # a set is read as a single page
                    break
        return self._outcome.total_moved - began

    def _limit_reached(self) -> bool:
        return self._end is not None and self._outcome.total_moved >= self._end

    def _page(self, suffix: str, page: ScoredIds, first: int, on_progress: Callable[[int], object]) -> int:
        """Migrate the jobs of a page; return how many of them are still under the same key."""
        stay = 0
        for start in range(0, len(page), PAGE_SIZE):
            jobs = read_jobs(self._client, self._source, suffix, page[start : start + PAGE_SIZE])
            stay += self._jobs(jobs, first + stay)
            on_progress(self._outcome.total_moved)
        return stay

    def _jobs(self, jobs: Sequence[BullJob], first: int, attempts: int = _MAX_ATTEMPTS) -> int:
        selected, rank = list[tuple[JobConversion, Conversion]](), first
        for job in jobs:
            checked = self._check.change(job)
            if checked:
                selected.append((replace(checked[0], rank=rank), checked[1]))
            rank += checked is None or not self._leaves_key(checked[0])
        if self._end is not None:
            selected = selected[: self._end - self._outcome.total_moved]
        replies: list[MoveResult] = self._client.run_many([self._call(change) for change, _ in selected])
        stay, changed = len(jobs) - len(selected), set[str]()
        for (change, conversion), reply in zip(selected, replies, strict=True):
            if reply is MoveResult.CHANGED and attempts > 1:
                changed.add(change.id)
            else:
                stay += self._count(change, conversion, reply)
        if changed:
            page = [(job.id, job.score) for job in jobs if job.id in changed]
            jobs = read_jobs(self._client, self._source, jobs[0].key_suffix, page)
            stay += self._jobs(jobs, first + stay, attempts - 1)
        return stay

    def _leaves_key(self, change: JobConversion) -> bool:
        """Return whether the migration removes the job from its key."""
        prioritized = change.state == "waiting" and change.priority > 0
        return not self._in_place or prioritized or change.state == "recovered"

    def _call(self, change: JobConversion) -> Call[MoveResult]:
        if self._in_place:
            return convert_bull_job(self._source, change)
        return move_bull_job(self._source, self._target, change)

    def _count(self, change: JobConversion, conversion: Conversion, reply: MoveResult) -> bool:
        """Count a job; return whether it is still under the same key."""
        if reply is MoveResult.DONE:
            self._outcome.moved[change.state] += 1
            self._outcome.notes.update(conversion.notes)
            return not self._leaves_key(change)
        if reply in _SKIPPED:
            self._outcome.skip(_SKIPPED[reply], change.id)
        return reply is not MoveResult.GONE
