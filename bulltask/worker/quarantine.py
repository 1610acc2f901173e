"""Crash quarantine: separates a job that crashes children (a poison pill) from the other jobs of those children.

Up to a hundred jobs share a child; at most one of them is sync, except with the thread pool. When the child crashes,
the job that caused the crash is unknown. If the crash counted against every job, one poison pill would fail a hundred
other jobs. Therefore, all these jobs are quarantined: each is retried with only a few others and, after a second
crash, alone. A job fails only after a crash in which it was alone in its child: the second or the third, by default.
A job that is never alone, because the child processes that acquire it crash while they do so, fails after
``EXTRA_CRASHES`` more.

The number of crashes is stored in the job's hash (``bulltask:crashes``), because another worker may acquire the job
next. Reading it needs no additional command, because a fetch returns all fields of a job.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from bulltask.jobs.numbers import counter
from bulltask.transport.scripts.move import CRASHES

__all__ = ["ALONE", "EXTRA_CRASHES", "SMALL_GROUP", "max_concurrent", "should_fail"]

SMALL_GROUP: Final = 10
"""Maximum number of jobs in a child while it is running a job that has crashed once, this job included. Most isolated
crashes are caused by an operator or the kernel, so running every such job alone would be needlessly slow."""

ALONE: Final = 1

EXTRA_CRASHES: Final = 3
"""How many crashes beyond ``max_crashes`` it takes to fail a job that was being acquired or settled.

A job that crashes children in these steps (for example, because reading it exhausts the memory) may do so before the
child can wait for its other jobs. It would then never run alone and never fail, so it fails after this many additional
crashes, which are unlikely to have another cause.
"""

_FIELD: Final = CRASHES.encode()


def max_concurrent(fields: Sequence[bytes], max_crashes: int) -> int:
    """Return how many jobs a child may run in total while it runs a job with these fields; 0: no limit.

    Args:
        fields: The fields of the job's hash as Redis returns them: name, value, name, value …
        max_crashes: The setting.
    """
    if _FIELD not in fields:  # almost every job
        return 0
    crashes = dict(zip(fields[::2], fields[1::2], strict=False)).get(_FIELD)
    if crashes is None:  # the name was found as a value
        return 0
    try:
        return ALONE if counter(crashes) >= min(2, max_crashes) else SMALL_GROUP
    except ValueError:  # not a number
        return ALONE


def should_fail(crashes: int, max_crashes: int, *, concurrent: int, running: bool) -> bool:
    """Return whether a job fails after a crash.

    Args:
        crashes: How many children crashed while they had the job, this crash included.
        max_crashes: The setting.
        concurrent: How many jobs the child had when it crashed, this job included.
        running: False if the child was acquiring or settling the job.
    """
    if concurrent == ALONE:
        return crashes >= max_crashes
    return not running and crashes >= max_crashes + EXTRA_CRASHES
