"""Who pays when a child dies with several jobs in hand.

Up to a hundred async jobs and a sync one share a child. When it dies nobody knows which of them was to blame, and if
the crash counted against all of them, one job that kills its children would take a hundred others with it. So a crash
in company convicts nobody. It makes suspects: jobs that run in smaller company from then on, and in the end alone.
Only a crash in which a job had its child for itself can fail it.

The suspicion is written into the job (``bulltask:crashes``), because the next child that takes it may be another
worker's, on another machine. There it costs nothing: a job comes with all of its fields when it is taken, and one that
never saw a child die has no such field.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from bulltask.jobs.numbers import counter
from bulltask.transport.scripts.move import CRASHES

__all__ = ["ALONE", "SMALL_GROUP", "UNSEEN_CRASHES", "max_concurrent", "should_fail"]

SMALL_GROUP: Final = 10
"""A job that saw one child die runs with at most so many, itself included. One death is mostly a person or the kernel,
and twenty jobs that did nothing should not have to queue up for each other."""

ALONE: Final = 1

UNSEEN_CRASHES: Final = 3
"""Crashes besides ``max_crashes`` that a job is allowed while it was being taken or settled.

A job that kills its child there (so large that reading it takes all memory) kills it before the child could send the
others away; it would never be alone, and never fail. It is at the very same step that many times by no accident.
"""

_FIELD: Final = CRASHES.encode()


def max_concurrent(fields: Sequence[bytes], max_crashes: int) -> int:
    """Return how many jobs may run in one child with a job that has these fields, itself included; 0: any number.

    Args:
        fields: of the job's hash as Redis sends them: name, value, name, value …
        max_crashes: the setting.
    """
    if _FIELD not in fields:  # nearly every job there is
        return 0
    crashes = dict(zip(fields[::2], fields[1::2], strict=False)).get(_FIELD)
    if crashes is None:  # a value that looks like the name
        return 0
    try:
        return ALONE if counter(crashes) >= min(2, max_crashes) else SMALL_GROUP
    except ValueError:  # nobody knows how many
        return ALONE


def should_fail(crashes: int, max_crashes: int, *, concurrent: int, running: bool) -> bool:
    """Return whether a job is failed for the crashes that it has seen.

    Args:
        crashes: how many children died while they had it in hand, this time included.
        max_crashes: the setting.
        concurrent: how many jobs the child had in hand this time, this one included.
        running: False if the child was just taking or settling it.
    """
    if concurrent == ALONE:
        return crashes >= max_crashes
    return not running and crashes >= max_crashes + UNSEEN_CRASHES
