from __future__ import annotations

import dataclasses
import threading

import pytest

from bulltask.events import Bus, ChildEvent, Event, JobCompleted, JobStarted, RedisReconnecting
from bulltask.observe import events

STARTED = JobStarted("1", "mail", "mail.send", attempt=1)
RECONNECTING = RedisReconnecting(attempt=2)

FIELDS = {
    "JobStarted": "job_id queue task attempt",
    "JobCompleted": "job_id queue task duration_ms result",
    "JobFailed": "job_id queue task duration_ms error category attempts_made traceback exception expected",
    "JobRetried": "job_id queue task duration_ms error category attempts_made delay_ms exception",
    "JobThrottled": "job_id queue task delay_ms",
    "JobReleased": "job_id queue task reason",
    "JobRescheduled": "job_id queue task delay_ms",
    "JobWaitsForChildren": "job_id queue task",
    "JobIncompatible": "job_id queue task reason delay_ms",
    "MalformedJobFailed": "job_id queue reason",
    "LockLost": "job_id queue task",
    "SchedulingFailed": "job_id queue scheduler error delay_ms",
    "JobStalled": "job_id queue lock_expired_at_ms",
    "JobRecovered": "job_id queue crashes waited_ms",
    "CrashLimitReached": "job_id queue crashes failed_reason",
    "CancelRequested": "job_id index reason",
    "JobRevoked": "job_id queue",
    "HeartbeatSucceeded": "queue locks duration_ms",
    "HeartbeatFailed": "queue job_ids error attempt",
    "RunningJobLostLock": "job_id queue",
    "StalledCheckSkipped": "queue checks",
    "ServiceFailed": "service failures exception",
    "ChildReady": "index pid",
    "ChildClosing": "index pid",
    "ChildLimitReached": "index pid limit jobs running memory_kib",
    "EventLoopMisused": "job_id queue task problem where",
    "EventLoopStopped": "pid jobs error",
    "ChildStarted": "index pid",
    "ChildStopped": "index pid jobs",
    "ChildDied": "index pid exit_reason jobs job_ids oom_counted",
    "ChildKilled": "index pid reason jobs job_ids",
    "ChildExited": "index pid reason",
    "RedisDisconnected": "error",
    "RedisReconnecting": "attempt",
    "RedisReconnected": "attempt duration_ms",
    "RedisErrorReply": "queue error",
    "RedisRecovered": "queue attempt duration_ms",
    "WorkerStarted": "worker_id app queues concurrency broker versions",
    "WorkerStopping": "mode running",
    "WorkerStopped": "exit_code uptime_ms",
    "WorkerRestarting": "command",
    "WorkerPaused": "running",
    "WorkerResumed": "paused_ms",
    "ConcurrencyChanged": "children reason",
    "OrderExecuted": "order arguments sender app result",
    "OrderRejected": "order sender app error",
    "StacksDumped": "index pid stacks",
    "SignalIgnored": "signal reason",
}


def kinds() -> list[type[Event]]:
    return [
        kind
        for name in events.__all__
        if isinstance(kind := getattr(events, name), type) and kind not in {Event, ChildEvent, Bus}
    ]


def test_event_classes_have_the_expected_fields_in_order() -> None:
    fields = {
        kind.__name__: " ".join(field.name for field in dataclasses.fields(kind))  # type: ignore[arg-type]
        for kind in kinds()
    }
    assert fields == FIELDS


@pytest.mark.parametrize("name", FIELDS)
def test_an_event_cannot_be_changed_or_extended(name: str) -> None:
    kind = getattr(events, name)
    event = kind(*range(len(FIELDS[name].split())))
    assert issubclass(kind, Event)
    assert not hasattr(event, "__dict__")
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(event, FIELDS[name].split()[0], "other")


def test_a_listener_receives_only_events_of_its_class() -> None:
    bus = Bus()
    received: list[object] = []
    bus.subscribe(JobStarted, received.append)
    bus.emit(RECONNECTING)
    bus.emit(STARTED)
    assert received == [STARTED]


def test_a_listener_for_the_base_class_receives_all_events() -> None:
    bus = Bus()
    received: list[object] = []
    bus.subscribe(Event, received.append)
    bus.emit(RECONNECTING)
    bus.emit(STARTED)
    assert received == [RECONNECTING, STARTED]


def test_listeners_are_called_in_the_order_of_their_subscriptions() -> None:
    bus = Bus()
    received: list[object] = []
    bus.subscribe(JobStarted, lambda _: received.append("first"))
    bus.subscribe(Event, lambda _: received.append("second"))
    bus.subscribe(JobStarted, lambda _: received.append("third"))
    bus.emit(STARTED)
    assert received == ["first", "second", "third"]


def test_an_event_bus_wants_only_events_that_have_a_listener() -> None:
    bus = Bus()
    assert not bus.listeners[JobStarted]
    bus.subscribe(JobStarted, lambda _: None)
    assert bus.listeners[JobStarted]
    assert not bus.listeners[JobCompleted]
    bus.subscribe(Event, lambda _: None)
    assert bus.listeners[JobCompleted]


def test_a_new_listener_receives_only_later_events() -> None:
    bus = Bus()
    received: list[object] = []
    bus.emit(STARTED)
    bus.subscribe(JobStarted, received.append)
    bus.emit(STARTED)
    assert received == [STARTED]


def broken(_: Event) -> None:
    raise ValueError("no disk")


def test_a_listener_that_raises_does_not_affect_the_caller_or_other_listeners() -> None:
    bus = Bus()
    received: list[object] = []
    bus.subscribe(JobStarted, broken)
    bus.subscribe(JobStarted, received.append)
    bus.emit(STARTED)
    assert received == [STARTED]


def test_a_listener_that_raises_is_reported_once_for_each_class_of_event() -> None:
    reports = []
    bus = Bus(on_error=lambda name, event, exc: reports.append((name, event, str(exc))))
    bus.subscribe(Event, broken)
    for event in (STARTED, STARTED, RECONNECTING, RECONNECTING):
        bus.emit(event)
    name = f"{broken.__module__}.broken"
    assert reports == [(name, STARTED, "no disk"), (name, RECONNECTING, "no disk")]


def test_an_error_handler_that_raises_does_not_break_the_caller() -> None:
    def fail_too(name: str, event: Event, exc: Exception) -> None:
        raise RuntimeError(name) from exc

    bus = Bus(on_error=fail_too)
    bus.subscribe(JobStarted, broken)
    bus.emit(STARTED)


def test_system_exit_in_a_listener_is_raised() -> None:
    def exit_process(_: Event) -> None:
        raise SystemExit(3)

    bus = Bus()
    bus.subscribe(JobStarted, exit_process)
    with pytest.raises(SystemExit):
        bus.emit(STARTED)


def test_concurrent_emits_and_subscriptions_lose_no_listener() -> None:
    bus, started, stop = Bus(), threading.Event(), threading.Event()
    received: list[object] = []

    def emit() -> None:
        while not stop.is_set():
            bus.emit(STARTED)
            started.set()

    threads = [threading.Thread(target=emit) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert started.wait(10)
    for _ in range(200):
        bus.subscribe(JobStarted, lambda _: None)
    bus.subscribe(JobCompleted, received.append)
    stop.set()
    for thread in threads:
        thread.join()
    done = JobCompleted("1", "mail", "mail.send", 1.0, None)
    bus.emit(done)
    assert received == [done]
    assert len(bus.listeners[JobStarted]) == 200
