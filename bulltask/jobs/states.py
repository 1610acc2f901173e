"""States of a job, under BullMQ's names: they are stored in Redis, and only scripts change them.

"Paused" is a queue's flag, and "stalled" an event; neither is a job state.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

__all__ = ["REVOKED", "JobState", "Revocation"]

REVOKED: Final = "revoked"
"""``failedReason`` of a revoked job, and the error category of that failure."""


_CELERY: Final[Mapping[str, frozenset[object]]] = {
    "waiting": frozenset({"PENDING"}),
    "prioritized": frozenset({"PENDING"}),
    "delayed": frozenset({"PENDING", "RETRY"}),
    "waiting-children": frozenset({"PENDING"}),
    "active": frozenset({"STARTED"}),
    "completed": frozenset({"SUCCESS"}),
    "failed": frozenset({"FAILURE"}),
    "unknown": frozenset({"PENDING"}),
}
"""Celery's names for each state."""


class JobState(StrEnum):
    """State of a job, as BullMQ's ``getState`` returns it.

    A state also equals Celery's name for it: ``COMPLETED == "SUCCESS"``, ``FAILED == "FAILURE"``, ``ACTIVE ==
    "STARTED"``. ``DELAYED`` equals both ``"RETRY"`` and ``"PENDING"``; all other states equal ``"PENDING"``. The hash
    is that of BullMQ's name, so compare with tuples, not sets, of Celery's names.
    """

    WAITING = "waiting"
    PRIORITIZED = "prioritized"
    DELAYED = "delayed"
    WAITING_CHILDREN = "waiting-children"
    ACTIVE = "active"
    COMPLETED = "completed"
    FAILED = "failed"
    UNKNOWN = "unknown"

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) is True or (isinstance(other, str) and other in _CELERY[self.value])

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__

    @property
    def finished(self) -> bool:
        """True for ``COMPLETED`` and ``FAILED``."""
        return self in {JobState.COMPLETED, JobState.FAILED}


class Revocation(StrEnum):
    """Result of revoking a job."""

    REVOKED = "revoked"  # the job was not running; it has now failed
    RUNNING = "running"  # a worker has acquired the job, which continues, because terminate was not set
    TERMINATING = "terminating"  # the job is running, and its worker is stopping it
    FINISHED = "finished"  # the job had already completed or failed
    UNKNOWN = "unknown"  # the job does not exist
