"""Celery's names for states: ``from bulltask import states``, as in ``result.state == states.SUCCESS``.

The groups of states are tuples, not sets, because a :class:`bulltask.JobState` has the hash of BullMQ's name.
"""

from __future__ import annotations

from typing import Final

__all__ = [
    "ALL_STATES",
    "EXCEPTION_STATES",
    "FAILURE",
    "PENDING",
    "READY_STATES",
    "RECEIVED",
    "RETRY",
    "REVOKED",
    "STARTED",
    "SUCCESS",
    "UNREADY_STATES",
]

PENDING: Final = "PENDING"
RECEIVED: Final = "RECEIVED"
STARTED: Final = "STARTED"
SUCCESS: Final = "SUCCESS"
FAILURE: Final = "FAILURE"
REVOKED: Final = "REVOKED"
RETRY: Final = "RETRY"

READY_STATES: Final = (SUCCESS, FAILURE, REVOKED)
UNREADY_STATES: Final = (PENDING, RECEIVED, STARTED, RETRY)
EXCEPTION_STATES: Final = (RETRY, FAILURE, REVOKED)
ALL_STATES: Final = (*UNREADY_STATES, *READY_STATES)
