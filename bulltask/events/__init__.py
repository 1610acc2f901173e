"""A worker's events, and the bus that passes them to listeners.

A worker emits events; its log, its metrics and an app's listeners subscribe to them. The children emit the events of
:mod:`~bulltask.events.children`, the supervisor those of :mod:`~bulltask.events.supervisor`. The supervisor also emits
some of the children's events: those about Redis and stacks, and ``JobFailed``, ``JobRetried``, ``JobReleased`` and
``MalformedJobFailed`` for the jobs of children that have died or were stopped. In all of them ``queue`` is the queue's
name in the app, and durations end in ``_ms``. In events about a job, ``attempt`` and ``attempts_made`` are BullMQ's
``ats`` and ``atm``; in those about Redis and heartbeats, ``attempt`` counts the attempts to reach Redis.

A bus belongs to one process. A child creates its bus after the fork, so it has only that child's events. An app's
listeners (``app.on(…)``) run in the children, and receive subclasses of :class:`ChildEvent`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

from bulltask.events.bus import Bus, Event, Listener, OnError

if TYPE_CHECKING:
    from bulltask.events.children import (
        ChildClosing,
        ChildEvent,
        ChildLimitReached,
        ChildReady,
        EventLoopMisused,
        EventLoopStopped,
        JobCompleted,
        JobFailed,
        JobIncompatible,
        JobReleased,
        JobRescheduled,
        JobRetried,
        JobStarted,
        JobThrottled,
        JobWaitsForChildren,
        LockLost,
        MalformedJobFailed,
        RedisDisconnected,
        RedisErrorReply,
        RedisReconnected,
        RedisReconnecting,
        RedisRecovered,
        SchedulingFailed,
        StacksDumped,
    )
    from bulltask.events.supervisor import (
        CancelRequested,
        ChildDied,
        ChildExited,
        ChildKilled,
        ChildStarted,
        ConcurrencyChanged,
        CrashLimitReached,
        HeartbeatFailed,
        HeartbeatSucceeded,
        JobRecovered,
        JobRevoked,
        JobStalled,
        RunningJobLostLock,
        ServiceFailed,
        SignalIgnored,
        StalledCheckSkipped,
        WorkerPaused,
        WorkerRestarting,
        WorkerResumed,
        WorkerStarted,
        WorkerStopped,
        WorkerStopping,
    )

__all__ = [
    "Bus",
    "CancelRequested",
    "ChildClosing",
    "ChildDied",
    "ChildEvent",
    "ChildExited",
    "ChildKilled",
    "ChildLimitReached",
    "ChildReady",
    "ChildStarted",
    "ConcurrencyChanged",
    "CrashLimitReached",
    "Event",
    "EventLoopMisused",
    "EventLoopStopped",
    "HeartbeatFailed",
    "HeartbeatSucceeded",
    "JobCompleted",
    "JobFailed",
    "JobIncompatible",
    "JobRecovered",
    "JobReleased",
    "JobRescheduled",
    "JobRetried",
    "JobRevoked",
    "JobStalled",
    "JobStarted",
    "JobThrottled",
    "JobWaitsForChildren",
    "Listener",
    "LockLost",
    "MalformedJobFailed",
    "OnError",
    "RedisDisconnected",
    "RedisErrorReply",
    "RedisReconnected",
    "RedisReconnecting",
    "RedisRecovered",
    "RunningJobLostLock",
    "SchedulingFailed",
    "ServiceFailed",
    "SignalIgnored",
    "StacksDumped",
    "StalledCheckSkipped",
    "WorkerPaused",
    "WorkerRestarting",
    "WorkerResumed",
    "WorkerStarted",
    "WorkerStopped",
    "WorkerStopping",
]

_LAZY: Final = ("bulltask.events.children", "bulltask.events.supervisor")

if not TYPE_CHECKING:  # type checkers would accept any name

    def __getattr__(name: str) -> object:
        """Import the events on first use, because programs that only send jobs do not need them."""
        for module in _LAZY if name in __all__ else ():
            if (value := getattr(importlib.import_module(module), name, None)) is not None:
                globals()[name] = value  # not looked up again
                return value
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
