"""The dry run of a migration: its plan, and the reasons why the queue cannot be migrated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from bulltask.migrate.bull_job import BullJob, JobOrigin
from bulltask.migrate.check import JobCheck, MigrationOptions
from bulltask.migrate.convert import Conversion
from bulltask.migrate.detection import QueueInfo, QueueLayout, detect_layout
from bulltask.migrate.inspection import count_target, inspect_queue, iter_jobs
from bulltask.migrate.outcome import BullRepeatable, MigrationOutcome, MigrationPlan, SkipReason
from bulltask.migrate.repeatables import plan_repeatables
from bulltask.queue.context import QueueContext
from bulltask.transport.call import Call, command
from bulltask.transport.client_types import SyncClient
from bulltask.transport.keys import BullKeys
from bulltask.transport.scripts.bull import JobConversion
from bulltask.transport.scripts.queue import get_meta

__all__ = ["Planner"]


@dataclass(slots=True)
class _Scan:
    """The result of reading all jobs.

    Attributes:
        origins: The number of jobs by origin.
        known: The outcome for jobs of known origin.
        unknown: The outcome for jobs of unknown origin, assuming that they are Bull's.
        unknown_ids: The ids of jobs whose origin is unknown.
        repeating: The next job of each repeatable job, by id.
    """

    origins: Counter[JobOrigin] = field(default_factory=Counter)
    known: MigrationOutcome = field(default_factory=MigrationOutcome)
    unknown: MigrationOutcome = field(default_factory=MigrationOutcome)
    unknown_ids: list[str] = field(default_factory=list)
    repeating: dict[str, BullJob] = field(default_factory=dict)


class Planner:
    """Reads a queue once and plans its migration.

    Args:
        client: A connection to the server.
        source: Bull's queue.
        target: The target queue.
        options: The migration's options.
        in_place: Whether both queues have the same keys.
    """

    def __init__(
        self, client: SyncClient, source: BullKeys, target: QueueContext, options: MigrationOptions, *, in_place: bool
    ) -> None:
        self._client, self._source, self._context = client, source, target
        self._options, self._in_place = options, in_place
        self._target = target.keys

    def plan(self, on_progress: Callable[[int, int], object]) -> MigrationPlan:
        """Read all jobs and return the plan."""
        info = inspect_queue(self._client, self._source)
        scan = self._read(info, on_progress)
        layout = detect_layout(info, scan.origins)
        outcome, repeating = scan.known, scan.repeating
        if self._in_place or layout is QueueLayout.MIXED:
            outcome.skip_all(SkipReason.BULLMQ, scan.unknown_ids)
        else:
            outcome.add(scan.unknown)
        repeatables = self._repeatables(info, layout, repeating)
        target_jobs = 0 if self._in_place else count_target(self._client, self._target)
        target_paused = "paused" in self._client.run(get_meta(self._target))
        pauses = info.paused and not self._in_place and not target_paused and not target_jobs
        return MigrationPlan(
            source=self._source.base[:-1],
            target=self._target.base[:-1],
            in_place=self._in_place,
            layout=layout,
            info=info,
            outcome=outcome,
            repeatables=repeatables,
            blockers=self._blockers(info, layout, outcome),
            warnings=self._warnings(info, outcome, joins=info.paused and bool(target_jobs) and not target_paused),
            pauses=pauses,
        )

    def _read(self, info: QueueInfo, on_progress: Callable[[int, int], object]) -> _Scan:
        """Check every job; count jobs of unknown origin separately."""
        scan, total = _Scan(), sum(info.sizes.values())
        groups = [
            (unknown, outcome, JobCheck(self._options, bull_only=not unknown, outcome=outcome))
            for unknown, outcome in ((False, scan.known), (True, scan.unknown))
        ]
        for _, jobs in iter_jobs(self._client, self._source, info):
            scan.repeating |= {job.id: job for job in jobs if job.repeat and job.origin is not JobOrigin.BULLMQ}
            scan.unknown_ids += [job.id for job in jobs if _has_unknown_origin(job)]
            scan.origins.update(job.origin for job in jobs)
            for unknown, outcome, check in groups:
                group = [job for job in jobs if _has_unknown_origin(job) is unknown]
                self._count([change for job in group if (change := check.change(job))], outcome)
            on_progress(scan.origins.total(), total)
        return scan

    def _count(self, changes: list[tuple[JobConversion, Conversion]], outcome: MigrationOutcome) -> None:
        existing = self._exist_in_target([change.new_id for change, _ in changes])
        for (change, conversion), exists in zip(changes, existing, strict=True):
            if exists:
                outcome.skip(SkipReason.ID_TAKEN, change.id)
            else:
                outcome.moved[change.state] += 1
                outcome.notes.update(conversion.notes)

    def _exist_in_target(self, ids: list[str]) -> list[bool]:
        if self._in_place:
            return [False] * len(ids)
        calls: list[Call[bool]] = [command("EXISTS", self._target.job(job_id), parse_reply=bool) for job_id in ids]
        return self._client.run_many(calls)

    def _repeatables(self, info: QueueInfo, layout: QueueLayout, repeating: dict[str, BullJob]) -> list[BullRepeatable]:
        repeatables = plan_repeatables(
            info.repeats,
            repeating,
            self._context.queue,
            str(self._context.broker.config.timezone),
            selected="delayed" in self._options.states,
        )
        # BullMQ before 5.10 kept repeatable jobs under keys of the same form.
        return [repeatable for repeatable in repeatables if repeatable.job_id or layout is not QueueLayout.MIXED]

    def _blockers(self, info: QueueInfo, layout: QueueLayout, outcome: MigrationOutcome) -> list[str]:
        source = self._source.base[:-1]
        checks = (
            (
                layout is QueueLayout.BULLMQ,
                f"{source} is a BullMQ queue without Bull jobs; it may have been migrated before",
            ),
            (
                info.has_sets and self._in_place,
                "the sets of Bull 1 and 2 cannot be converted in place to BullMQ's sorted sets: move the jobs to "
                "another queue (--to)",
            ),
            (
                self._in_place and SkipReason.RESERVED in outcome.skipped,
                "jobs have ids that are names of BullMQ keys ("
                f"{', '.join(outcome.skipped.get(SkipReason.RESERVED, ()))}): move them to another queue (--to)",
            ),
            (
                bool(info.workers) and not self._options.force,
                f"workers of {source} seem to be connected ({', '.join(info.workers or ())}): stop them first, or "
                "use force (--force) if they are not Bull's",
            ),
        )
        return [text for applies, text in checks if applies]

    def _warnings(self, info: QueueInfo, outcome: MigrationOutcome, *, joins: bool) -> list[str]:
        jobs = outcome.moved
        checks = (
            (info.workers is None, "CLIENT LIST is not permitted: make sure that no Bull worker is connected"),
            (
                joins,
                "Bull's queue is paused, but the target has jobs and is not paused, so the migrated jobs will run",
            ),
            (
                info.types["priority"] == "zset" and info.sizes["wait"] + info.sizes["paused"] > 0,
                "Bull runs jobs without priority last, BullMQ first; the order of jobs with a priority does not change",
            ),
            (
                bool(jobs["recovered"]),
                "active jobs without a lock will run again: make sure that no worker is still running them",
            ),
        )
        return [text for applies, text in checks if applies]


def _has_unknown_origin(job: BullJob) -> bool:
    """Return whether a job exists, but does not show which library added it."""
    return bool(job.fields) and job.origin is JobOrigin.EITHER
