"""States of a job, under BullMQ's names: they are stored in Redis, and only scripts change them.

"Paused" is a queue's flag, and "stalled" an event; neither is a job state.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

__all__ = ["REVOKED", "JobState", "Revocation"]

REVOKED: Final = "revoked"
"""``failedReason`` of a revoked job, and the error category of that failure."""


class JobState(StrEnum):
    """State of a job, as BullMQ's ``getState`` returns it."""

    WAITING = "waiting"
    PRIORITIZED = "prioritized"
    DELAYED = "delayed"
    WAITING_CHILDREN = "waiting-children"
    ACTIVE = "active"
    COMPLETED = "completed"
    FAILED = "failed"
    UNKNOWN = "unknown"

    @property
    def finished(self) -> bool:
        """True for ``COMPLETED`` and ``FAILED``."""
        return self in {JobState.COMPLETED, JobState.FAILED}


class Revocation(StrEnum):
    """Result of revoking a job."""

    REVOKED = "revoked"  # the job was not running; it has now failed
    RUNNING = "running"  # the job is running and continues, because terminate was not set
    TERMINATING = "terminating"  # the job is running, and its worker is stopping it
    FINISHED = "finished"  # the job had already completed or failed
    UNKNOWN = "unknown"  # the job does not exist
