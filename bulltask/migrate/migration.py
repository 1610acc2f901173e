"""``BullMigration``: plan and run a migration. It can be stopped and resumed, because each job moves atomically."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

from bulltask.errors import ConfigError, DecodeError, MigrationError
from bulltask.migrate.check import JobCheck, MigrationOptions
from bulltask.migrate.convert import convert
from bulltask.migrate.inspection import across_slots, count_target, inspect_queue, iter_jobs, read_jobs
from bulltask.migrate.mover import Mover
from bulltask.migrate.outcome import BullRepeatable, MigrationOutcome, MigrationPlan, MigrationReport, SkipReason
from bulltask.migrate.planner import Planner
from bulltask.migrate.repeatables import BullRepeatables
from bulltask.queue.bulk import set_paused
from bulltask.queue.sync.queue import Queue
from bulltask.transport.call import Call, command
from bulltask.transport.client_types import SyncClient
from bulltask.transport.keys import BullKeys
from bulltask.transport.produce import PROTOCOL_VERSION
from bulltask.transport.scripts.add import write_queue_meta

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
        options: The options of :class:`bulltask.migrate.check.MigrationOptions`: ``states``, ``limit``, ``id_prefix``,
            ``default_name``, ``recover_active``, ``force``.

    Raises:
        ConfigError, InvalidNameError: An option is invalid.
        TypeError: An option does not exist.
    """

    def __init__(
        self, queue: Queue, source: str | None = None, *, source_prefix: str | None = None, **options: Any
    ) -> None:
        self._context, self._options = queue.context, MigrationOptions(**options)
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
        mover = Mover(client, self.source, self.target, check, outcome, in_place=self.in_place)
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
