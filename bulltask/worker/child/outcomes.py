"""The values that travel through a child: a job in hand, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from bulltask.jobs.failures import bounded_reason
from bulltask.jobs.job import RunningJob
from bulltask.transport.keys import QueueKeys
from bulltask.value_class import value_class
from bulltask.worker.slots import Slot

__all__ = [
    "AcquiredJob",
    "Completed",
    "Failed",
    "Limited",
    "Outcome",
    "Postponed",
    "Released",
    "RequestedOutcome",
    "Rescheduled",
    "Retried",
    "WaitingForChildren",
]


@value_class
class AcquiredJob:
    """A job that this child holds the lock of.

    Attributes:
        slot: the slot whose token locks it.
        queue_index: its queue's place in the worker's list.
        keys: its queue.
        max_concurrent: how many jobs may run in its child at a time, itself included; 0 for any number. A job
            that was in the hands of a child that died may have killed it, and should not do that to many others.
    """

    slot: Slot
    queue_index: int
    keys: QueueKeys
    job: RunningJob
    max_concurrent: int = 0


@value_class
class Completed:
    """The task returned: ``value`` is the return value's JSON."""

    value: bytes
    result: object


@dataclass(frozen=True, slots=True)
class Failed:
    """The job ends here; ``reason`` is raw text, ``trace`` the attempt's traceback.

    ``aside``: BullMQ's own script might stop at the job, or has done so.
    """

    reason: str
    trace: str
    category: str

    exception: BaseException | None = field(default=None, compare=False, repr=False)
    malformed: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", bounded_reason(self.reason))


@dataclass(frozen=True, slots=True)
class Retried:
    """The attempt failed and another one follows in ``delay_ms`` (0: at once)."""

    delay_ms: int
    reason: str
    trace: str
    category: str

    exception: BaseException | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", bounded_reason(self.reason))


@dataclass(frozen=True, slots=True)
class Postponed:
    """The job cannot run now: it goes back, due in ``delay_ms``, and no attempt is counted.

    ``reason`` is why the next iteration of its scheduler could not be added; ``""``: nobody here knows the task.
    """

    delay_ms: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Rescheduled:
    """The task asked to be run again in ``delay_ms``; no attempt is counted."""

    delay_ms: int


@dataclass(frozen=True, slots=True)
class Released:
    """The task gave the job back: it is the next to be taken, and no attempt is counted."""


@dataclass(frozen=True, slots=True)
class Limited:
    """The task gave the job back and wants no jobs of its queue to be taken for ``limit_ms``."""

    limit_ms: int


@dataclass(frozen=True, slots=True)
class WaitingForChildren:
    """The task asked to be run again when the job's children have ended; no attempt is counted."""


RequestedOutcome = Rescheduled | Released | Limited | WaitingForChildren
Outcome = Completed | Failed | Retried | Postponed | RequestedOutcome
