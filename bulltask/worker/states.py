"""States of slots and of a worker's processes."""

from __future__ import annotations

from enum import IntEnum
from typing import Final

__all__ = ["HAS_JOB", "CancelReason", "ProcessState", "RetireReason", "SlotState"]


class SlotState(IntEnum):
    """State of a child's slot. The child writes it; in a takeover, the supervisor does, too."""

    FREE = 0
    RESERVED = 1  # a fetch has been sent, so the token may lock a job that the child has not received yet
    ACTIVE = 2  # a job is running
    SETTLING = 3  # its outcome is being written, and the token may already lock the next job
    PREFETCHED = 4  # a prefetched job, whose attempt has not started
    ENDED = 5  # the attempt has ended; the slot contains the call that writes its outcome
    WRITTEN = 6  # the supervisor has written the outcome, because the child's next job takes too long
    UNCERTAIN = 7  # the supervisor has received no reply to that call
    RELEASING = 8  # the supervisor is releasing the job that the token locks, or has received no reply to that call
    RELEASED = (
        9  # the child has sent the outcome; the supervisor has released the job that the call had fetched, if any
    )


HAS_JOB: Final = frozenset(SlotState) - {
    SlotState.FREE,
    SlotState.RESERVED,
    SlotState.WRITTEN,
    SlotState.RELEASING,
    SlotState.RELEASED,
}
"""The states of a slot that has a job. After a takeover, another worker may have acquired the job."""


class CancelReason(IntEnum):
    """Why the supervisor cancels an attempt; a larger number replaces a smaller one."""

    NONE = 0
    SOFT_LIMIT = 1  # the task can clean up, and may even continue
    SHUTDOWN = 2  # the worker is about to kill its children
    HARD_LIMIT = 3
    REVOKED = 4


class RetireReason(IntEnum):
    """Why a child acquires no more jobs and is replaced; the child writes it, the supervisor reads it."""

    NONE = 0
    MAX_TASKS_PER_CHILD = 1
    MAX_MEMORY_PER_CHILD = 2


class ProcessState(IntEnum):
    """State of a supervisor or child (Celery's RUN, CLOSE, TERMINATE). It never decreases."""

    INIT = 0
    RUN = 1
    CLOSE = 2  # warm shutdown: no new jobs, running jobs may finish
    TERMINATE = 3  # cold shutdown: children are killed, their jobs are released
    CLOSED = 4
