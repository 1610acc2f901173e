"""The plan of a migration, and its report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from bulltask.migrate.detection import QueueInfo, QueueLayout
from bulltask.schedules.repeat import Repeat

__all__ = ["BullRepeatable", "MigrationOutcome", "MigrationPlan", "MigrationReport", "SkipReason"]

_MAX_LISTED = 5


class SkipReason(Enum):
    """Why a job is skipped; the values are printed after the number of jobs."""

    ACTIVE = (
        "active: stop Bull's workers and wait until they have exited. If the workers have died, use recover_active "
        "(--recover-active)"
    )
    LOCKED = "locked by a worker: stop Bull's workers, and run the migration again 30 seconds later"
    MALFORMED = "malformed: no worker could read them"
    NO_HASH = "an id without a job"
    ID_TAKEN = "their id exists in the target queue: use id_prefix (--id-prefix) to change their ids"
    RESERVED = "their id is the name of a BullMQ key: use id_prefix (--id-prefix) to change their ids"
    BULLMQ = "BullMQ's jobs, or already migrated"
    NOT_SELECTED = "in a state that was not selected, or beyond the limit"
    CHANGING = "changed each time they were read: another program is modifying the queue"


@dataclass(slots=True)
class MigrationOutcome:
    """The number of migrated and skipped jobs.

    Attributes:
        moved: The number of migrated jobs by new state: ``waiting``, ``delayed``, ``completed``, ``failed``,
            ``recovered``.
        skipped: The ids of skipped jobs by reason.
        notes: The number of migrated jobs by note, a key of ``convert.NOTES``.
        details: The errors of the first few malformed jobs.
    """

    moved: Counter[str] = field(default_factory=Counter)
    skipped: dict[SkipReason, list[str]] = field(default_factory=dict)
    notes: Counter[str] = field(default_factory=Counter)
    details: list[str] = field(default_factory=list)

    def skip(self, reason: SkipReason, job_id: str, detail: str = "") -> None:
        """Count a skipped job."""
        self.skipped.setdefault(reason, []).append(job_id)
        if detail and len(self.details) < _MAX_LISTED:
            self.details.append(f"job {job_id}: {detail}")

    def skip_all(self, reason: SkipReason, ids: Sequence[str]) -> None:
        """Count several jobs that are skipped for the same reason."""
        if ids:
            self.skipped.setdefault(reason, []).extend(ids)

    def add(self, other: MigrationOutcome) -> None:
        """Add the counts of another outcome."""
        self.moved.update(other.moved)
        self.notes.update(other.notes)
        for reason, ids in other.skipped.items():
            self.skip_all(reason, ids)
        self.details = [*self.details, *other.details][:_MAX_LISTED]

    def reset_skipped(self) -> None:
        """Reset the skipped jobs before another pass, which counts them again."""
        self.skipped.clear()
        self.details.clear()

    @property
    def total_moved(self) -> int:
        """The number of jobs that were migrated, or would be."""
        return self.moved.total()

    @property
    def total_skipped(self) -> int:
        """The number of Bull's jobs that were skipped; BullMQ's jobs do not count."""
        return sum(len(ids) for reason, ids in self.skipped.items() if reason is not SkipReason.BULLMQ)


@dataclass(frozen=True, slots=True, kw_only=True)
class BullRepeatable:
    """A repeatable Bull job, and the job scheduler that replaces it.

    Attributes:
        key: Bull's key.
        scheduler_id: The scheduler's id.
        rule: The schedule of its jobs; ``None`` if it is unknown.
        job_id: The id of its next job; ``""`` if there is none.
        key_suffix: The suffix of the key that contains that job.
        next_ms: The time of its next run, in epoch milliseconds.
        problem: Why it is skipped; ``""`` if it is not.
        manual: The Python call that creates the scheduler, if the job is skipped.
    """

    key: str
    scheduler_id: str
    rule: Repeat | None
    job_id: str
    key_suffix: str
    next_ms: int
    problem: str = ""
    manual: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationPlan:
    """What a migration would do.

    Attributes:
        source, target: The queues' keys with prefix: ``bull:emails``.
        in_place: Whether both have the same keys.
        layout: The detected layout of the source.
        info: What is known about the source without its jobs.
        outcome: Jobs that would be migrated or skipped, without regard to a limit.
        repeatables: The repeatable jobs and their schedulers.
        blockers: The reasons why the queue cannot be migrated, one sentence each; empty if it can.
        warnings: Notes for the user, one sentence each.
        pauses: Whether the target will be paused because the source is.
    """

    source: str
    target: str
    in_place: bool
    layout: QueueLayout
    info: QueueInfo
    outcome: MigrationOutcome
    repeatables: Sequence[BullRepeatable]
    blockers: Sequence[str]
    warnings: Sequence[str]
    pauses: bool

    @property
    def bull_only(self) -> bool:
        """Whether jobs are skipped unless they are certainly Bull's, because the queue also has BullMQ's jobs."""
        return self.in_place or self.layout is QueueLayout.MIXED

    @property
    def total(self) -> int:
        """The number of jobs in the source queue."""
        return sum(self.info.sizes.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationReport:
    """The result of a migration.

    Attributes:
        outcome: The migrated jobs, and the skipped jobs by reason.
        schedulers: The ids of the job schedulers that replace repeatable jobs.
        repeatables_skipped: The repeatable jobs that were skipped.
        before, after: The number of jobs under each key of Bull's queue. In place, these are also the keys of BullMQ's
            queue.
        target_before, target_after: The total number of jobs in the target queue.
    """

    outcome: MigrationOutcome
    schedulers: Sequence[str]
    repeatables_skipped: Sequence[BullRepeatable]
    before: Mapping[str, int]
    after: Mapping[str, int]
    target_before: int
    target_after: int

    @property
    def complete(self) -> bool:
        """Whether no job was skipped."""
        return not self.outcome.total_skipped and not self.repeatables_skipped
