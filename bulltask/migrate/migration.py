"""``BullMigration``: plan, and run; each job in one step, so that it may be stopped anywhere and begun again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

from bulltask.errors import ConfigError, DecodeError, MigrationRefusedError
from bulltask.migrate.convert import convert
from bulltask.migrate.judge import Judge, Wishes
from bulltask.migrate.mover import Mover
from bulltask.migrate.outcome import BullRepeatable, Left, Outcome, Plan, Report
from bulltask.migrate.planner import Planner
from bulltask.migrate.repeatables import BullRepeatables
from bulltask.migrate.survey import across_slots, all_jobs, count_target, read_facts, read_jobs
from bulltask.queue.operations import set_paused
from bulltask.queue.queue import Queue
from bulltask.transport.call import Call, command
from bulltask.transport.client import Client
from bulltask.transport.keys import BullKeys
from bulltask.transport.produce import PROTOCOL_VERSION
from bulltask.transport.scripts.add import write_queue_meta

__all__ = ["BullMigration"]

_PASSES: Final = 5

Seen = Callable[[int, int], object]
"""Told now and then how many jobs were looked at or moved, and how many there are."""


def _nobody(_done: int, _total: int) -> None:
    """Nobody wants to know."""


class BullMigration:
    """Responsible for one queue of Bull that becomes one of BullMQ.

    Args:
        queue: where the jobs go.
        source: Bull's name of the queue; that of ``queue`` if left out.
        source_prefix: Bull's prefix; that of ``queue`` if left out.
        wishes: see :class:`bulltask.migrate.judge.Wishes`: ``states``, ``limit``, ``id_prefix``, ``default_name``,
            ``recover_active``, ``force``.

    Raises:
        ConfigError, InvalidNameError: a wish cannot be.
        TypeError: there is no such wish.
    """

    def __init__(
        self, queue: Queue, source: str | None = None, *, source_prefix: str | None = None, **wishes: Any
    ) -> None:
        self._link, self._wishes = queue.link, Wishes(**wishes)
        self.target = queue.link.keys
        self.source = BullKeys(self.target.prefix if source_prefix is None else source_prefix, source or queue.name)
        self.in_place = self.source.base == self.target.base
        if self.in_place and self._wishes.id_prefix:
            raise ConfigError("id_prefix is for moves to another queue; in place every job keeps its id")

    def plan(self, seen: Seen = _nobody) -> Plan:
        """Read all jobs and say what would become of them; nothing is changed.

        Raises:
            MigrationRefusedError: on a Redis Cluster the two queues are in several slots.
            BrokerError: the server cannot be reached, or refuses.
        """
        with self._client() as client:
            if across_slots(client, self.source, self.target):
                raise MigrationRefusedError(
                    f"on Redis Cluster a job moves in one step only within a slot, and {self.source.base[:-1]} and "
                    f"{self.target.base[:-1]} are in several: both names need the same hash tag, {{…}}"
                )
            planner = Planner(client, self.source, self._link, self._wishes, in_place=self.in_place)
            return planner.plan(seen)

    def run(self, plan: Plan | None = None, seen: Seen = _nobody) -> Report:
        """Move the jobs.

        Whenever it ends early (an error, Ctrl-C, ``kill -9``) every job is either Bull's or BullMQ's; run it again.

        Args:
            plan: what :meth:`plan` has said; made anew if left out.
            seen: told of the progress.

        Raises:
            MigrationRefusedError: the plan has refusals; nothing was changed.
            BrokerError: the server cannot be reached, or refuses.
        """
        plan = plan or self.plan()
        if plan.refusals:
            raise MigrationRefusedError(f"{plan.source} was not migrated: {'; '.join(plan.refusals)}")
        with self._client() as client:
            before = count_target(client, self.target)
            self._prepare(client, plan)
            outcome = Outcome()
            made, left = self._schedulers(client, plan, outcome)
            self._move(client, plan, outcome, seen)
            self._clean_up(client, outcome)
            after = read_facts(client, self.source).sizes
            return Report(
                outcome=outcome,
                schedulers=made,
                repeatables_left=left,
                before=plan.facts.sizes,
                after=after,
                target_before=before,
                target_after=count_target(client, self.target),
            )

    @contextmanager
    def _client(self) -> Iterator[Client]:
        with self._link.broker.pool.client() as client:
            client.connect()  # the clock is set when a connection is made
            yield client

    def _prepare(self, client: Client, plan: Plan) -> None:
        client.run_many(write_queue_meta(self.target, PROTOCOL_VERSION, self._link.broker.config.max_events))
        if plan.in_place and plan.facts.paused:
            # Bull before 3.10 notes its pause only under a key of its own.
            client.run(command("HSET", self.target.meta, "paused", 1))
        elif plan.pauses:
            self._link.run(set_paused(self._link, paused=True))

    def _schedulers(self, client: Client, plan: Plan, outcome: Outcome) -> tuple[list[str], list[BullRepeatable]]:
        """Convert the repeatable jobs: ids of the schedulers, and those that stay."""
        made, left = list[str](), list[BullRepeatable]()
        maker = BullRepeatables(client, self.source, self.target, self._link.broker.endpoint.safe_url)
        for planned in plan.repeatables:
            if planned.problem:
                left.append(planned)
                continue
            [job] = read_jobs(client, self.source, planned.place, [(planned.job_id, str(planned.next_ms * 4096))])
            if self._enough(outcome) or not job.fields:
                left.append(replace(planned, problem="it is beyond the limit, or has changed meanwhile: begin again"))
                continue
            try:
                conversion = convert(job, "delayed", self._wishes.default_name)
            except DecodeError as exc:
                left.append(replace(planned, problem=f"its next job is broken: {exc}"))
                continue
            if maker.convert(planned, job, conversion, self._link.now_ms()):
                made.append(planned.scheduler_id)
            if planned.place == "delayed":
                outcome.moved["delayed"] += 1
        return made, left

    def _move(self, client: Client, plan: Plan, outcome: Outcome, seen: Seen) -> None:
        judge = Judge(self._wishes, only_bulls=plan.only_bulls, outcome=outcome)
        mover = Mover(client, self.source, self.target, judge, outcome, in_place=self.in_place)
        facts = plan.facts
        for _ in range(_PASSES):
            # A further pass finds what came meanwhile, and what slipped by because others took jobs in between.
            outcome.forget_left()
            if not mover.run(facts, self._left_to_move(outcome), lambda done: seen(done, plan.total)):
                break
            facts = read_facts(client, self.source)
        if self._enough(outcome):
            self._count_left(client, judge, outcome)

    def _count_left(self, client: Client, judge: Judge, outcome: Outcome) -> None:
        """The limit ended the walk before all jobs were met."""
        outcome.forget_left()
        for _, jobs in all_jobs(client, self.source, read_facts(client, self.source)):
            for job in jobs:
                if judge.change(job):
                    outcome.leave(Left.NOT_ASKED, job.id)

    def _left_to_move(self, outcome: Outcome) -> int | None:
        return None if self._wishes.limit is None else self._wishes.limit - outcome.total_moved

    def _enough(self, outcome: Outcome) -> bool:
        left = self._left_to_move(outcome)
        return left is not None and left <= 0

    def _clean_up(self, client: Client, outcome: Outcome) -> None:
        """Remove what only Bull has, as far as no job of Bull needs it any more.

        The counter of ids stays, and so does Bull's pause after a move: what a forgotten sender still adds waits there
        for another run.
        """
        if outcome.total_left:
            return
        keys, gone = self.source, [self.source.priority, self.source.limiter_index]
        gone += [keys.meta_paused] if self.in_place else [keys.limiter, keys.stalled, keys.stalled_check]
        calls: list[Call[Any]] = [command("DEL", key) for key in gone]
        client.run_many(calls)
