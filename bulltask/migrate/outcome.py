"""What a migration would do, and what it has done."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from bulltask.migrate.recognise import Facts, Layout
from bulltask.schedule.repeat import Repeat

__all__ = ["BullRepeatable", "Left", "Outcome", "Plan", "Report"]

_SHOWN = 5


class Left(Enum):
    """Why a job stays where it is; the values are what a user reads after the number of jobs."""

    ACTIVE = (
        "being worked on: stop Bull's workers and wait until they have ended. If their workers have died, say "
        "recover_active (--recover-active)"
    )
    LOCKED = "locked by a worker: stop Bull's workers, and begin again 30 seconds later"
    BROKEN = "broken: no worker could read them"
    NO_HASH = "only an id, there is no job of that id"
    ID_TAKEN = "their id is taken in the target queue: say id_prefix (--id-prefix) to give them others"
    RESERVED = "their id is the name of one of BullMQ's keys: say id_prefix (--id-prefix) to give them others"
    BULLMQ = "not Bull's, but BullMQ's own jobs, or were migrated before"
    NOT_ASKED = "in a state that you left out, or beyond the limit"
    CHANGING = "changed again and again while they were read: something works on the queue"


@dataclass(slots=True)
class Outcome:
    """Responsible for counting.

    Attributes:
        moved: how many jobs, by what they become: ``waiting``, ``delayed``, ``completed``, ``failed``, ``recovered``.
        left: the ids of those that stay, by the reason.
        notes: how many of the moved jobs have something to be told, by the key of ``convert.NOTES``.
        details: what is broken about which job, for the first ones.
    """

    moved: Counter[str] = field(default_factory=Counter)
    left: dict[Left, list[str]] = field(default_factory=dict)
    notes: Counter[str] = field(default_factory=Counter)
    details: list[str] = field(default_factory=list)

    def leave(self, reason: Left, job_id: str, detail: str = "") -> None:
        """Count a job that stays."""
        self.left.setdefault(reason, []).append(job_id)
        if detail and len(self.details) < _SHOWN:
            self.details.append(f"job {job_id}: {detail}")

    def leave_all(self, reason: Left, ids: Sequence[str]) -> None:
        """Count several that stay for the same reason."""
        if ids:
            self.left.setdefault(reason, []).extend(ids)

    def add(self, other: Outcome) -> None:
        """Count what another one has counted."""
        self.moved.update(other.moved)
        self.notes.update(other.notes)
        for reason, ids in other.left.items():
            self.leave_all(reason, ids)
        self.details = [*self.details, *other.details][:_SHOWN]

    def forget_left(self) -> None:
        """Begin anew with those that stay: they are all met again."""
        self.left.clear()
        self.details.clear()

    @property
    def total_moved(self) -> int:
        """How many jobs were moved, or would be."""
        return self.moved.total()

    @property
    def total_left(self) -> int:
        """How many jobs stay that one might want to move; BullMQ's own are not among them."""
        return sum(len(ids) for reason, ids in self.left.items() if reason is not Left.BULLMQ)


@dataclass(frozen=True, slots=True, kw_only=True)
class BullRepeatable:
    """A repeatable job of Bull, and the job scheduler that it becomes.

    Attributes:
        key: Bull's key of it.
        scheduler_id: the scheduler's id.
        rule: when its jobs run; ``None`` where it cannot be told.
        job_id: its next job, ``""`` if that is not there.
        place: where that job is.
        next_ms: when it runs next.
        problem: why it stays, ``""`` if it does not.
        by_hand: the call that makes the scheduler.
    """

    key: str
    scheduler_id: str
    rule: Repeat | None
    job_id: str
    place: str
    next_ms: int
    problem: str = ""
    by_hand: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a migration would do now.

    Attributes:
        source, target: the queues as Bull and BullMQ call them, with their prefix: ``bull:emails``.
        in_place: both are the same.
        layout: what was recognised.
        facts: what was found.
        outcome: what would become of the jobs, of all of them if there is a limit.
        repeatables: what would become of the repeatable ones.
        refusals: why nothing will be done, one sentence each; none: it can be done.
        warnings: what to know before.
        pauses: the target will be paused, because the source is.
    """

    source: str
    target: str
    in_place: bool
    layout: Layout
    facts: Facts
    outcome: Outcome
    repeatables: Sequence[BullRepeatable]
    refusals: Sequence[str]
    warnings: Sequence[str]
    pauses: bool

    @property
    def only_bulls(self) -> bool:
        """Jobs that do not show themselves to be Bull's are left: there are BullMQ's among them."""
        return self.in_place or self.layout is Layout.MIXED

    @property
    def total(self) -> int:
        """How many jobs the source has."""
        return sum(self.facts.sizes.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What was done.

    Attributes:
        outcome: how many jobs were moved, and which ones stay and why.
        schedulers: ids of the job schedulers that were made of repeatable jobs.
        repeatables_left: those that stay.
        before, after: how many jobs Bull's queue had in each place. In place that is BullMQ's queue too.
        target_before, target_after: how many jobs the target had in all.
    """

    outcome: Outcome
    schedulers: Sequence[str]
    repeatables_left: Sequence[BullRepeatable]
    before: Mapping[str, int]
    after: Mapping[str, int]
    target_before: int
    target_after: int

    @property
    def complete(self) -> bool:
        """True when nothing is left that could be migrated."""
        return not self.outcome.total_left and not self.repeatables_left
