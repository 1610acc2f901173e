"""``BullMigration``: plan and run a migration. It can be stopped and resumed, because each job moves atomically.

The plan is made by :mod:`bulltask.migrate.plan`, from what :mod:`bulltask.migrate.inspection` reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

from bulltask.jobs.errors import ConfigError, DecodeError, MigrationError
from bulltask.migrate.inspection import (
    JOB_KEYS,
    PAGE_SIZE,
    BullJob,
    BullRepeatable,
    MigrationOutcome,
    MigrationPlan,
    MigrationReport,
    QueueInfo,
    SkipReason,
    across_slots,
    count_target,
    inspect_queue,
    iter_jobs,
    key_type_of,
    read_jobs,
)
from bulltask.migrate.plan import BullRepeatables, Conversion, JobCheck, MigrationOptions, Planner, convert
from bulltask.queue.fields import set_paused
from bulltask.queue.sync.queue import Queue
from bulltask.transport.call import BullKeys, Call, QueueKeys, SyncClient, command
from bulltask.transport.produce import PROTOCOL_VERSION
from bulltask.transport.scripts.add import write_queue_meta
from bulltask.transport.scripts.queue import (
    JobConversion,
    MoveResult,
    ScoredIds,
    convert_bull_job,
    move_bull_job,
    page_of,
)

__all__ = ["BullMigration"]

_PASSES: Final = 5

OnProgress = Callable[[int, int], object]
"""Called repeatedly with the number of processed jobs and the total number."""


def _ignore(_done: int, _total: int) -> None:
    """Report no progress."""


class BullMigration:
    """The migration of one Bull queue to BullMQ.

    Args:
        queue: The target queue.
        source: The source queue's name in Bull; default: the name of ``queue``.
        source_prefix: Bull's key prefix; default: the prefix of ``queue``.
        options: The options of :class:`bulltask.migrate.plan.MigrationOptions`: ``states``, ``limit``, ``id_prefix``,
            ``default_name``, ``recover_active``, ``force``.

    Raises:
        ConfigError, InvalidNameError: An option is invalid.
        TypeError: An option does not exist.
    """

    def __init__(
        self, queue: Queue, source: str | None = None, *, source_prefix: str | None = None, **options: Any
    ) -> None:
        self._context = queue.context
        self._options = MigrationOptions(**options)
        self.target = queue.context.keys
        self.source = BullKeys(self.target.prefix if source_prefix is None else source_prefix, source or queue.name)
        self.in_place = self.source.base == self.target.base
        if self.in_place and self._options.id_prefix:
            raise ConfigError(
                "id_prefix requires a different target queue, because jobs that are converted in place keep their ids"
            )

    def plan(self, on_progress: OnProgress = _ignore) -> MigrationPlan:
        """Read all jobs and return the plan of a migration, without changing anything.

        Args:
            on_progress: Called repeatedly with the number of jobs read so far and the total number.

        Raises:
            MigrationError: The client routes calls in a Redis Cluster, and the queues are in different slots. (Other
                clients raise ``BrokerConfigError`` when they connect.)
            BrokerError: The server cannot be reached or rejects a command.
        """
        with self._client() as client:
            if across_slots(client, self.source, self.target):
                raise MigrationError(
                    f"on Redis Cluster, a job can move in one step only within a slot, and {self.source.base[:-1]} and "
                    f"{self.target.base[:-1]} are in different slots: give both names the same hash tag, {{…}}"
                )
            planner = Planner(client, self.source, self._context, self._options, in_place=self.in_place)
            return planner.plan(on_progress)

    def run(self, plan: MigrationPlan | None = None, on_progress: OnProgress = _ignore) -> MigrationReport:
        """Migrate the jobs.

        If the migration is interrupted (by an error, Ctrl-C or ``kill -9``), every job is in either Bull's or BullMQ's
        layout. Run the migration again to continue.

        Args:
            plan: The result of :meth:`plan`, which is called if this argument is omitted.
            on_progress: Called repeatedly with the number of migrated jobs and the total number.

        Raises:
            MigrationError: The plan has blockers; nothing was changed.
            BrokerError: The server cannot be reached or rejects a command.
        """
        plan = plan or self.plan()
        if plan.blockers:
            raise MigrationError(f"{plan.source} was not migrated: {'; '.join(plan.blockers)}")
        with self._client() as client:
            before = count_target(client, self.target)
            self._prepare(client, plan)
            outcome = MigrationOutcome()
            scheduler_ids, skipped = self._schedulers(client, plan, outcome)
            self._move(client, plan, outcome, on_progress)
            self._clean_up(client, outcome)
            after = inspect_queue(client, self.source).sizes
            return MigrationReport(
                outcome=outcome,
                schedulers=scheduler_ids,
                repeatables_skipped=skipped,
                before=plan.info.sizes,
                after=after,
                target_before=before,
                target_after=count_target(client, self.target),
            )

    @contextmanager
    def _client(self) -> Iterator[SyncClient]:
        with self._context.broker.pool.client() as client:
            client.connect()  # connecting sets the clock
            yield client

    def _prepare(self, client: SyncClient, plan: MigrationPlan) -> None:
        client.run_many(write_queue_meta(self.target, PROTOCOL_VERSION, self._context.broker.config.max_events))
        if plan.in_place and plan.info.paused:
            # Bull before 3.10 stores the pause only under a separate key.
            client.run(command("HSET", self.target.meta, "paused", 1))
        elif plan.pauses:
            self._context.run(set_paused(self._context, paused=True))

    def _schedulers(
        self, client: SyncClient, plan: MigrationPlan, outcome: MigrationOutcome
    ) -> tuple[list[str], list[BullRepeatable]]:
        """Convert the repeatable jobs; return the ids of the schedulers, and the skipped jobs."""
        scheduler_ids, skipped = list[str](), list[BullRepeatable]()
        converter = BullRepeatables(client, self.source, self.target, self._context.broker.endpoint.safe_url)
        for planned in plan.repeatables:
            if planned.problem:
                skipped.append(planned)
                continue
            [job] = read_jobs(client, self.source, planned.key_suffix, [(planned.job_id, str(planned.next_ms * 4096))])
            if self._limit_reached(outcome) or not job.fields:
                skipped.append(
                    replace(planned, problem="the limit was reached, or the job has changed: run the migration again")
                )
                continue
            try:
                conversion = convert(job, "delayed", self._options.default_name)
            except DecodeError as exc:
                skipped.append(replace(planned, problem=f"its next iteration is malformed: {exc}"))
                continue
            if converter.convert(planned, job, conversion, self._context.now_ms()):
                scheduler_ids.append(planned.scheduler_id)
            if planned.key_suffix == "delayed":
                outcome.moved["delayed"] += 1
        return scheduler_ids, skipped

    def _move(
        self, client: SyncClient, plan: MigrationPlan, outcome: MigrationOutcome, on_progress: OnProgress
    ) -> None:
        check = JobCheck(self._options, bull_only=plan.bull_only, outcome=outcome)
        mover = _Mover(client, self.source, self.target, check, outcome, in_place=self.in_place)
        info = plan.info
        for _ in range(_PASSES):
            # The next pass finds jobs that were added during this one, and jobs that this one missed because others
            # were removed between two pages.
            outcome.reset_skipped()
            if not mover.run(info, self._remaining(outcome), lambda done: on_progress(done, plan.total)):
                break
            info = inspect_queue(client, self.source)
        if self._limit_reached(outcome):
            self._count_skipped(client, check, outcome)

    def _count_skipped(self, client: SyncClient, check: JobCheck, outcome: MigrationOutcome) -> None:
        """Count the jobs that the mover did not reach because of the limit."""
        outcome.reset_skipped()
        for _, jobs in iter_jobs(client, self.source, inspect_queue(client, self.source)):
            for job in jobs:
                if check.change(job):
                    outcome.skip(SkipReason.NOT_SELECTED, job.id)

    def _remaining(self, outcome: MigrationOutcome) -> int | None:
        return None if self._options.limit is None else self._options.limit - outcome.total_moved

    def _limit_reached(self, outcome: MigrationOutcome) -> bool:
        remaining = self._remaining(outcome)
        return remaining is not None and remaining <= 0

    def _clean_up(self, client: SyncClient, outcome: MigrationOutcome) -> None:
        """Remove keys that only Bull uses, unless it still has jobs that need them.

        The id counter stays. After a move to another queue, Bull's pause stays, too: if a forgotten sender still adds
        jobs, they wait for another migration.
        """
        if outcome.total_skipped:
            return
        keys, obsolete = self.source, [self.source.priority, self.source.limiter_index]
        obsolete += [keys.meta_paused] if self.in_place else [keys.limiter, keys.stalled, keys.stalled_check]
        calls: list[Call[Any]] = [command("DEL", key) for key in obsolete]
        client.run_many(calls)


_SKIPPED = {
    MoveResult.NO_HASH: SkipReason.NO_HASH,
    MoveResult.LOCKED: SkipReason.LOCKED,
    MoveResult.ID_TAKEN: SkipReason.ID_TAKEN,
    MoveResult.CHANGED: SkipReason.CHANGING,
}
_MAX_ATTEMPTS = 3


class _Mover:
    """Migrates jobs with one script call each, a page of calls per round trip."""

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
        self._client = client
        self._source = source
        self._target = target
        self._check = check
        self._outcome = outcome
        self._in_place = in_place
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
