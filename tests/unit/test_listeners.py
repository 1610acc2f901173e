"""Listeners that an app adds for the events of its children."""

from __future__ import annotations

import functools
import sys
from typing import Any

import pytest

from bulltask import App
from bulltask.errors import ConfigError
from bulltask.events import (
    Bus,
    ChildEvent,
    CrashLimitReached,
    Event,
    JobCompleted,
    JobFailed,
    JobStarted,
    WorkerStarted,
)
from bulltask.observe.bus import Listeners

STARTED = JobStarted("1", "mail", "mail.send", attempt=1)
DONE = JobCompleted("1", "mail", "mail.send", 1.0, None)


def emit(app: App, *events: Event) -> list[tuple[str, Event, str]]:
    """Emit the events as a child would, and return the reported errors of listeners."""
    reports: list[tuple[str, Event, str]] = []
    bus = Bus(on_error=lambda name, event, exc: reports.append((name, event, str(exc))))
    app._listeners.attach(bus)
    for event in events:
        bus.emit(event)
    return reports


def test_a_listener_receives_its_events_and_remains_callable() -> None:
    app, received = App("shop"), list[Event]()

    @app.on(JobCompleted)
    def note(event: JobCompleted) -> None:
        received.append(event)

    app.on(JobStarted, received.append)
    assert emit(app, STARTED, DONE) == []
    assert received == [STARTED, DONE]
    note(DONE)
    assert received == [STARTED, DONE, DONE]


@pytest.mark.parametrize("kind", [ChildEvent, Event])
def test_one_listener_can_receive_all_events_of_children(kind: type[Event]) -> None:
    app, received = App("shop"), list[Event]()
    app.on(kind, received.append)
    assert emit(app, STARTED, DONE) == []
    assert received == [STARTED, DONE]


@pytest.mark.parametrize("kind", [WorkerStarted, CrashLimitReached])
def test_a_listener_for_an_event_of_the_supervisor_is_rejected_with_advice(kind: type[Event]) -> None:
    with pytest.raises(
        ConfigError, match=rf"{kind.__name__} is emitted by a worker's supervisor.*app\.events\(queue\)"
    ):
        App("shop").on(kind, print)


@pytest.mark.parametrize("kind", ["failed", None, int, JobFailed("1", "mail", "t", 1.0, "", "", 1, "")])
def test_a_listener_without_an_event_class_is_rejected(kind: Any) -> None:
    with pytest.raises(ConfigError, match=r"bulltask\.events such as JobFailed"):
        App("shop").on(kind, print)


def test_a_coroutine_function_is_rejected_as_a_listener() -> None:
    async def notify(_: JobFailed) -> None: ...

    with pytest.raises(ConfigError, match="notify must be a plain function"):
        App("shop").on(JobFailed, notify)


def test_a_listener_that_is_not_callable_is_rejected() -> None:
    wrong: Any = "notify"
    with pytest.raises(ConfigError, match="must be a function, not 'notify'"):
        App("shop").on(JobFailed, wrong)


def test_a_listener_added_after_the_child_has_started_is_rejected() -> None:
    listeners = Listeners()
    listeners.attach(Bus())
    with pytest.raises(ConfigError, match="print was added too late"):
        listeners.add(JobFailed, print)


def exit_process(_: Event) -> None:
    sys.exit(3)


def test_a_listener_that_raises_or_exits_is_reported_by_name() -> None:
    app, received = App("shop"), list[Event]()

    def broken(_: JobCompleted) -> None:
        raise ValueError("no disk")

    app.on(JobCompleted, broken)
    app.on(JobCompleted, exit_process)
    app.on(JobCompleted, functools.partial(exit_process))
    app.on(JobCompleted, received.append)
    (first, _, error), (second, _, exit_error), (third, _, _) = emit(app, DONE)
    assert received == [DONE]
    assert first.endswith("broken")
    assert error == "no disk"
    assert second == f"{__name__}.exit_process"
    assert exit_error == "the listener raised SystemExit: 3"
    assert "partial" in third


def test_an_app_without_listeners_wants_no_events() -> None:
    bus = Bus()
    App("shop")._listeners.attach(bus)
    assert not bus.listeners[JobCompleted]
