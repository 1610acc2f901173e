"""The events of a worker, and the bus that passes them to listeners.

A worker emits events; its log, its metrics and an app's listeners subscribe to them. The children emit the events of
:mod:`~bulltask.events.children`, the supervisor those of :mod:`~bulltask.events.supervisor`. In all of them ``queue``
is the queue's name in the app, durations end in ``_ms``, and ``attempt`` and ``attempts_made`` are BullMQ's
``ats`` and ``atm``.

A bus belongs to one process. A child creates its bus after the fork, so it has only the events of that child. Listeners
of an app (``app.on(…)``) run in the children, and receive subclasses of :class:`ChildEvent`.
"""

from __future__ import annotations

from bulltask.events.bus import Bus, Event, Listener, OnError
from bulltask.events.children import (
    ChildClosing,
    ChildEvent,
    ChildReady,
    EventLoopStopped,
    JobCompleted,
    JobFailed,
    JobReleased,
    JobRetried,
    JobStarted,
    LockLost,
    MalformedJobFailed,
    RedisDisconnected,
    RedisErrorReply,
    RedisReconnected,
    RedisReconnecting,
    RedisRecovered,
    SchedulingFailed,
    StacksDumped,
    TaskNotRegistered,
)
from bulltask.events.supervisor import (
    CancelRequested,
    ChildDied,
    ChildExited,
    ChildKilled,
    ChildStarted,
    ConcurrencyChanged,
    CrashLimitExceeded,
    HeartbeatFailed,
    HeartbeatSucceeded,
    JobRecovered,
    JobRevoked,
    JobStalled,
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
    "ChildReady",
    "ChildStarted",
    "ConcurrencyChanged",
    "CrashLimitExceeded",
    "Event",
    "EventLoopStopped",
    "HeartbeatFailed",
    "HeartbeatSucceeded",
    "JobCompleted",
    "JobFailed",
    "JobRecovered",
    "JobReleased",
    "JobRetried",
    "JobRevoked",
    "JobStalled",
    "JobStarted",
    "Listener",
    "LockLost",
    "MalformedJobFailed",
    "OnError",
    "RedisDisconnected",
    "RedisErrorReply",
    "RedisReconnected",
    "RedisReconnecting",
    "RedisRecovered",
    "SchedulingFailed",
    "ServiceFailed",
    "SignalIgnored",
    "StacksDumped",
    "StalledCheckSkipped",
    "TaskNotRegistered",
    "WorkerPaused",
    "WorkerRestarting",
    "WorkerResumed",
    "WorkerStarted",
    "WorkerStopped",
    "WorkerStopping",
]
