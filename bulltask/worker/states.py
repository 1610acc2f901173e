"""States of a worker's processes and of their slots."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import TypeVar

__all__ = [
    "RUN_MOVES",
    "CancelReason",
    "IllegalTransition",
    "ProcessState",
    "SlotState",
    "advance",
]


class SlotState(IntEnum):
    """What a slot of a child is doing; written by the child, read by the supervisor."""

    FREE = 0
    RESERVED = 1  # a fetch is under way: the token may hold a job that nobody has seen yet
    ACTIVE = 2  # a job runs
    SETTLING = 3  # its outcome is being written, and the token may already hold the next job


class CancelReason(IntEnum):
    """Why the supervisor wants a run ended; one with a larger number replaces one with a smaller."""

    NONE = 0
    SOFT_LIMIT = 1  # the task may clean up, and even go on
    HARD_LIMIT = 2
    REVOKED = 3


class ProcessState(IntEnum):
    """Life of a supervisor or of one child (Celery's RUN / CLOSE / TERMINATE)."""

    INIT = 0
    RUN = 1
    CLOSE = 2  # warm: nothing new is fetched, what runs may finish
    TERMINATE = 3  # cold: children are killed, their jobs go back to wait
    CLOSED = 4


RUN_MOVES: Mapping[ProcessState, frozenset[ProcessState]] = {
    ProcessState.INIT: frozenset({ProcessState.RUN, ProcessState.CLOSE, ProcessState.TERMINATE, ProcessState.CLOSED}),
    ProcessState.RUN: frozenset({ProcessState.CLOSE, ProcessState.TERMINATE}),
    ProcessState.CLOSE: frozenset({ProcessState.TERMINATE, ProcessState.CLOSED}),
    ProcessState.TERMINATE: frozenset({ProcessState.CLOSED}),
    ProcessState.CLOSED: frozenset(),
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
