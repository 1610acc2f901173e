"""The three state machines of bulltask and the one function that moves them.

*Job* states are BullMQ's words (they live in Redis and only scripts change them), *attempt* and *process* states
are Celery's. A queue being paused is a flag and a stall is an event; neither is a state.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum, StrEnum
from typing import Final, TypeVar

__all__ = [
    "REVOKED",
    "RUN_MOVES",
    "Cause",
    "IllegalTransition",
    "JobState",
    "Revocation",
    "RunState",
    "SlotState",
    "advance",
]


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


class SlotState(IntEnum):
    """What a slot of a child is doing; written by the child, read by the supervisor."""

    FREE = 0
    RESERVED = 1  # a fetch is under way: the token may hold a job that nobody has seen yet
    ACTIVE = 2  # a job runs
    SETTLING = 3  # its outcome is being written, and the token may already hold the next job


class Cause(IntEnum):
    """Why the supervisor wants a run ended; one with a larger number replaces one with a smaller."""

    NONE = 0
    SOFT_LIMIT = 1  # the task may clean up, and even go on
    HARD_LIMIT = 2
    REVOKED = 3


REVOKED: Final = "revoked"
"""Why a job that was revoked has failed, and the category of that failure."""


class RunState(IntEnum):
    """Life of a supervisor or of one child (Celery's RUN / CLOSE / TERMINATE)."""

    INIT = 0
    RUN = 1
    CLOSE = 2  # warm: nothing new is fetched, what runs may finish
    TERMINATE = 3  # cold: children are killed, their jobs go back to wait
    CLOSED = 4


RUN_MOVES: Mapping[RunState, frozenset[RunState]] = {
    RunState.INIT: frozenset({RunState.RUN, RunState.CLOSE, RunState.TERMINATE, RunState.CLOSED}),
    RunState.RUN: frozenset({RunState.CLOSE, RunState.TERMINATE}),
    RunState.CLOSE: frozenset({RunState.TERMINATE, RunState.CLOSED}),
    RunState.TERMINATE: frozenset({RunState.CLOSED}),
    RunState.CLOSED: frozenset(),
}


class IllegalTransition(RuntimeError):
    """A state machine was asked for a move that its table does not have."""


State = TypeVar("State", bound=IntEnum)


def advance(current: State, wanted: State, moves: Mapping[State, frozenset[State]]) -> State:
    """Return ``wanted`` if ``moves`` allows it from ``current``; staying where one is is always allowed.

    Raises:
        IllegalTransition: the table has no such move.
    """
    if wanted is current or wanted in moves[current]:
        return wanted
    raise IllegalTransition(f"{type(current).__name__}: {current.name} -> {wanted.name}")
