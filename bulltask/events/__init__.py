"""What happens in a worker, as values, and the bus that hands them to whoever listens.

Events are the only side channel of the core: it emits, and logs, metrics and users' own listeners subscribe. The
classes here are the documentation of everything that can be heard: :mod:`~bulltask.events.children` has what a child
tells, :mod:`~bulltask.events.supervisor` what the supervisor does. In all of them ``queue`` is the user's spelling
of the queue, durations end in ``_ms`` and ``attempt`` or ``attempts_made`` are BullMQ's ``ats`` and ``atm``.

A bus belongs to one process. A child makes its own after the fork, so a listener of the supervisor hears what the
supervisor does and a listener of a child hears the jobs of that child. Listeners of an app (``app.on(…)``) are in the
children; what these tell is a :class:`ChildEvent`.
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
    JobPickedUp,
    JobReleased,
    JobRetried,
    LockLost,
    MalformedJobFailed,
    RedisDisconnected,
    RedisReconnected,
    RedisReconnecting,
    RedisRecovered,
    RedisRefused,
    SchedulingFailed,
    StacksDumped,
    UnknownTaskSeen,
)
from bulltask.events.supervisor import (
    CancelRequested,
    ChildDied,
    ChildExited,
    ChildKilled,
    ChildStarted,
    ConcurrencyChanged,
    HeartbeatFailed,
    HeartbeatSucceeded,
    JobCrashed,
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
    "Event",
    "EventLoopStopped",
    "HeartbeatFailed",
    "HeartbeatSucceeded",
    "JobCompleted",
    "JobCrashed",
    "JobFailed",
    "JobPickedUp",
    "JobRecovered",
    "JobReleased",
    "JobRetried",
    "JobRevoked",
    "JobStalled",
    "Listener",
    "LockLost",
    "MalformedJobFailed",
    "OnError",
    "RedisDisconnected",
    "RedisReconnected",
    "RedisReconnecting",
    "RedisRecovered",
    "RedisRefused",
    "SchedulingFailed",
    "ServiceFailed",
    "SignalIgnored",
    "StacksDumped",
    "StalledCheckSkipped",
    "UnknownTaskSeen",
    "WorkerPaused",
    "WorkerRestarting",
    "WorkerResumed",
    "WorkerStarted",
    "WorkerStopped",
    "WorkerStopping",
]
