"""Crash quarantine: isolates the job that crashes its child (a poison pill) from the jobs that run beside it.

Up to a hundred async jobs and a sync one share a child. When the child crashes, the job that caused it is unknown. If
the crash counted against all of them, one poison pill would fail a hundred other jobs. So the jobs are quarantined:
they run again beside few others, and after a second crash alone. Only a crash that a job had alone in its child can
fail it.

The number of crashes is stored in the job's hash (``bulltask:crashes``), because another worker may acquire it next.
Reading it costs nothing: a fetch returns all fields of a job, and a job that was in no crash has no such field.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from bulltask.jobs.numbers import counter
from bulltask.transport.scripts.move import CRASHES

__all__ = ["ALONE", "SMALL_GROUP", "UNSEEN_CRASHES", "max_concurrent", "should_fail"]

SMALL_GROUP: Final = 10
"""A job that was in one crash runs with at most this many jobs, including itself. A single crash is mostly caused by an
operator or the kernel, and twenty innocent jobs should not have to run one after the other."""

ALONE: Final = 1

UNSEEN_CRASHES: Final = 3
"""How many more crashes than ``max_crashes`` a job may have had while it was being acquired or settled.

A job that kills its child in these steps (so large that reading it uses up all memory) does so before the child could
wait for the other jobs. It would never be alone, and never fail. That many crashes at the same step are no accident.
"""

_FIELD: Final = CRASHES.encode()


def max_concurrent(fields: Sequence[bytes], max_crashes: int) -> int:
    """Return how many jobs a child may run while it runs a job with these fields, itself included; 0: any number.

    Args:
        fields: The fields of the job's hash as Redis sends them: name, value, name, value …
        max_crashes: The setting.
    """
    if _FIELD not in fields:  # nearly every job
        return 0
    crashes = dict(zip(fields[::2], fields[1::2], strict=False)).get(_FIELD)
    if crashes is None:  # a value that looks like the name
        return 0
    try:
        return ALONE if counter(crashes) >= min(2, max_crashes) else SMALL_GROUP
    except ValueError:  # not a number
        return ALONE


def should_fail(crashes: int, max_crashes: int, *, concurrent: int, running: bool) -> bool:
    """Return whether a job fails after a crash.

    Args:
        crashes: How many children crashed while they had the job, this time included.
        max_crashes: The setting.
        concurrent: How many jobs the child had this time, this one included.
        running: False if the child was just acquiring or settling the job.
    """
    if concurrent == ALONE:
        return crashes >= max_crashes
    return not running and crashes >= max_crashes + UNSEEN_CRASHES
