"""States of a job, in BullMQ's words: they are stored in Redis, and only scripts change them.

That a queue is paused is a flag, and that a job stalled is an event; neither is a state.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

__all__ = ["REVOKED", "JobState", "Revocation"]

REVOKED: Final = "revoked"
"""Why a job that was revoked has failed, and the category of that failure."""


class JobState(StrEnum):
    """Where a job is, as BullMQ's ``getState`` says it."""

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
        """True for the two states that a job does not leave by itself."""
        return self in {JobState.COMPLETED, JobState.FAILED}


class Revocation(StrEnum):
    """What became of the wish to revoke a job."""

    REVOKED = "revoked"  # it did not run, and has now failed
    RUNNING = "running"  # it runs and goes on: terminate was not said
    TERMINATING = "terminating"  # it runs, and its worker ends it
    FINISHED = "finished"  # it had completed or failed before
    UNKNOWN = "unknown"  # there is no such job (any more)
