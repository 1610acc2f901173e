"""Which part of a job's path each injection point belongs to: the rows of ``results.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tests.chaos.cell import Point

__all__ = ["PHASES", "phase_of"]

CONNECTING: Final = {"connect", "HELLO", "TIME", "CLUSTER"}

PHASES: Final[Mapping[str, Mapping[str, set[str]]]] = {
    "child": {
        "connects": CONNECTING,
        "waits for a job and acquires it": {
            "reserve the slot",
            "BZPOPMIN",
            "PING",  # ends a wait on time
            "EXISTS",  # the same in a cluster
            "HGET",  # the queue's global concurrency
            "ZADD",
            "moveToActive",
            "fetchNow:moveToActive",
            "fetchAhead:moveToActive",
            "collectBatch:moveToActive",
            "releaseUnstarted:moveJobFromActiveToWait",
            "findByToken",
            "moveJobFromActiveToWait",
            "renewLocks",  # the reply arrived late
            "write the job into the slot",
            "HGETALL",  # the results of a parent's child jobs
        },
        "adds a scheduler's next iteration": {"updateJobScheduler"},
        "runs the task": {"run the task"},
        "writes the outcome": {
            "mark the slot as finishing",
            "store the outcome in the slot",
            "moveToFinished",
            "wakeNext:moveToFinished",
            "moveToDelayed",
            "wakeNext:moveToDelayed",
            "delayIncompatible:moveToDelayed",
            "wakeNext:delayIncompatible:moveToDelayed",
            "HMGET",  # was an outcome stored whose reply was lost?
        },
        "frees its slot": {"free the slot"},
    },
    "supervisor": {
        "connects and starts": {*CONNECTING, "INFO", "MULTI", "DISCARD", "HSETNX", "HGET", "LLEN", "ZCARD", "SMEMBERS"}
        | {
            "SET",
            "promoteIncompatible",
            "ZSCAN",
            "scheduleVersion",
            "HSET",
            "HGETALL",
            "PEXPIRE",
            "HDEL",
        }  # checks the schedules, once a minute, and leaves
        | {"ZREMRANGEBYSCORE", "DEL", "ZREM"},  # writes its state, and removes it
        "renews locks": {"renewLocks", "findByToken"},
        "recovers the jobs of a dead child": {
            "countCrash",
            "ZSCORE",  # was a job revoked while it was running?
            "moveJobFromActiveToWait",
            "releaseUnstarted:moveJobFromActiveToWait",
            "an outcome from a slot",
            "ZADD",
            "HMGET",  # which attempts had ended?
            "addLog",  # a line in the log of each job
        },
        "looks for stalled and revoked jobs": {
            "moveStalledJobsToWait",
            "lockExpiries",
            "revocationRequests",
            "PING",
            "EXISTS",
        },
    },
    "relay": {"connects": CONNECTING, "sends rows": {"HSETNX", "addOnce:addStandardJob"}},
    "sender": {
        "connects": CONNECTING,
        "sends": {"HSETNX", "ZADD", "MULTI", "EXEC", "addStandardJob", "addParentJob"},
    },
}


def phase_of(point: Point) -> str:
    """Return the phase of a point.

    Raises:
        KeyError: No phase contains the point's step.
    """
    for phase, steps in PHASES[point.role].items():
        if point.step in steps:
            return phase
    raise KeyError(f"add the step {point.step!r} of the {point.role} to tests/chaos/phases.py")
