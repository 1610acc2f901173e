"""The dry run: what is there, what would become of it, and what speaks against it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from bulltask.migrate.bull_job import BullJob, Origin
from bulltask.migrate.convert import Conversion
from bulltask.migrate.judge import Judge, Wishes
from bulltask.migrate.outcome import BullRepeatable, Left, Outcome, Plan
from bulltask.migrate.recognise import Facts, Layout, recognise
from bulltask.migrate.repeatables import plan_repeatables
from bulltask.migrate.survey import all_jobs, count_target, read_facts
from bulltask.queue.link import Link
from bulltask.transport.call import Call, command
from bulltask.transport.client import Client
from bulltask.transport.keys import BullKeys
from bulltask.transport.scripts.bull import JobConversion
from bulltask.transport.scripts.queue import get_meta

__all__ = ["Planner"]


@dataclass(slots=True)
class _Found:
    """What one walk through all jobs has found.

    Attributes:
        origins: how many jobs say of themselves whose they are.
        sure: what would become of those that do.
        unsure: what would become of those that do not, if they are Bull's.
        unsure_ids: their ids.
        repeating: next jobs of repeatable ones.
    """

    origins: Counter[Origin] = field(default_factory=Counter)
    sure: Outcome = field(default_factory=Outcome)
    unsure: Outcome = field(default_factory=Outcome)
    unsure_ids: list[str] = field(default_factory=list)
    repeating: dict[str, BullJob] = field(default_factory=dict)


class Planner:
    """Responsible for reading everything once.

    Args:
        client: the server.
        source: Bull's queue.
        link: the target.
        wishes: what the user asked for.
        in_place: both are the same.
    """

    def __init__(self, client: Client, source: BullKeys, link: Link, wishes: Wishes, *, in_place: bool) -> None:
        self._client, self._source, self._link = client, source, link
        self._wishes, self._in_place = wishes, in_place
        self._target = link.keys

    def plan(self, seen: Callable[[int, int], object]) -> Plan:
        """Read, judge, count."""
        facts = read_facts(self._client, self._source)
        found = self._read(facts, seen)
        layout = recognise(facts, found.origins)
        outcome, repeating = found.sure, found.repeating
        if self._in_place or layout is Layout.MIXED:
            outcome.leave_all(Left.BULLMQ, found.unsure_ids)
        else:
            outcome.add(found.unsure)
        repeatables = self._repeatables(facts, layout, repeating)
        target_jobs = 0 if self._in_place else count_target(self._client, self._target)
        target_paused = "paused" in self._client.run(get_meta(self._target))
        pauses = facts.paused and not self._in_place and not target_paused and not target_jobs
        return Plan(
            source=self._source.base[:-1],
            target=self._target.base[:-1],
            in_place=self._in_place,
            layout=layout,
            facts=facts,
            outcome=outcome,
            repeatables=repeatables,
            refusals=self._refusals(facts, layout, outcome),
            warnings=self._warnings(facts, outcome, joins=facts.paused and bool(target_jobs) and not target_paused),
            pauses=pauses,
        )

    def _read(self, facts: Facts, seen: Callable[[int, int], object]) -> _Found:
        """Judge every job; those that do not say whose they are, apart from the others."""
        found, total = _Found(), sum(facts.sizes.values())
        sides = [
            (unsure, outcome, Judge(self._wishes, only_bulls=not unsure, outcome=outcome))
            for unsure, outcome in ((False, found.sure), (True, found.unsure))
        ]
        for _, jobs in all_jobs(self._client, self._source, facts):
            found.repeating |= {job.id: job for job in jobs if job.repeat and job.origin is not Origin.BULLMQ}
            found.unsure_ids += [job.id for job in jobs if _is_unsure(job)]
            found.origins.update(job.origin for job in jobs)
            for unsure, outcome, judge in sides:
                asked = [job for job in jobs if _is_unsure(job) is unsure]
                self._count([change for job in asked if (change := judge.change(job))], outcome)
            seen(found.origins.total(), total)
        return found

    def _count(self, changes: list[tuple[JobConversion, Conversion]], outcome: Outcome) -> None:
        taken = self._taken([change.new_id for change, _ in changes])
        for (change, made), is_taken in zip(changes, taken, strict=True):
            if is_taken:
                outcome.leave(Left.ID_TAKEN, change.id)
            else:
                outcome.moved[change.state] += 1
                outcome.notes.update(made.notes)

    def _taken(self, ids: list[str]) -> list[bool]:
        if self._in_place:
            return [False] * len(ids)
        calls: list[Call[bool]] = [command("EXISTS", self._target.job(job_id), parse_reply=bool) for job_id in ids]
        return self._client.run_many(calls)

    def _repeatables(self, facts: Facts, layout: Layout, repeating: dict[str, BullJob]) -> list[BullRepeatable]:
        found = plan_repeatables(
            facts.repeats,
            repeating,
            self._link.queue,
            str(self._link.broker.config.timezone),
            asked="delayed" in self._wishes.states,
        )
        # BullMQ before 5.10 kept repeatable jobs under keys of the same form.
        return found if layout is not Layout.MIXED else [one for one in found if one.job_id]

    def _refusals(self, facts: Facts, layout: Layout, outcome: Outcome) -> list[str]:
        source = self._source.base[:-1]
        checks = (
            (
                layout is Layout.BULLMQ,
                f"{source} is a queue of BullMQ and has no job of Bull; it may have been migrated before",
            ),
            (
                facts.has_sets and self._in_place,
                "the sets of Bull 1 and 2 cannot become BullMQ's sorted sets under the same keys: move the jobs to "
                "another queue (--to)",
            ),
            (
                self._in_place and Left.RESERVED in outcome.left,
                f"jobs have ids that are names of BullMQ's keys ({', '.join(outcome.left.get(Left.RESERVED, ()))}): "
                "move them to another queue (--to)",
            ),
            (
                bool(facts.workers) and not self._wishes.force,
                f"workers of {source} seem to be connected ({', '.join(facts.workers or ())}): stop them first, or "
                "say force (--force) if you know better",
            ),
        )
        return [text for applies, text in checks if applies]

    def _warnings(self, facts: Facts, outcome: Outcome, *, joins: bool) -> list[str]:
        jobs = outcome.moved
        checks = (
            (facts.workers is None, "the server does not tell who is connected: make sure that no worker of Bull is"),
            (
                joins,
                "Bull's queue is paused, the target is not and has jobs: what waited for the end of the pause will run",
            ),
            (
                facts.types["priority"] == "zset" and facts.sizes["wait"] + facts.sizes["paused"] > 0,
                "Bull runs jobs without priority last, BullMQ first; among those with one the order stays",
            ),
            (
                bool(jobs["recovered"]),
                "active jobs without a lock run again: make sure that nobody works on them any more",
            ),
        )
        return [text for applies, text in checks if applies]


def _is_unsure(job: BullJob) -> bool:
    """True for a job that there is, and that says nothing of whose it is."""
    return bool(job.fields) and job.origin is Origin.EITHER
