"""What an app wants to hear of its children."""

from __future__ import annotations

import functools
import sys
from typing import Any

import pytest

from bulltask import App
from bulltask.errors import ConfigError
from bulltask.events import Bus, ChildEvent, Event, JobCompleted, JobCrashed, JobFailed, JobPickedUp, WorkerStarted
from bulltask.events.listeners import Listeners

PICKED_UP = JobPickedUp("1", "mail", "mail.send", attempt=1)
DONE = JobCompleted("1", "mail", "mail.send", 1.0, None)


def heard_by(app: App, *events: Event) -> list[tuple[str, Event, str]]:
    """Emit the events as a child would; what was reported of broken listeners."""
    reports: list[tuple[str, Event, str]] = []
    bus = Bus(on_error=lambda name, event, exc: reports.append((name, event, str(exc))))
    app.listeners.attach(bus)
    for event in events:
        bus.emit(event)
    return reports


def test_a_listener_hears_its_events_and_stays_the_function_that_it_is() -> None:
    app, heard = App("shop"), list[Event]()

    @app.on(JobCompleted)
    def note(event: JobCompleted) -> None:
        heard.append(event)

    app.on(JobPickedUp, heard.append)
    assert heard_by(app, PICKED_UP, DONE) == []
    assert heard == [PICKED_UP, DONE]
    note(DONE)
    assert heard == [PICKED_UP, DONE, DONE]


@pytest.mark.parametrize("kind", [ChildEvent, Event])
def test_one_listener_can_hear_all_that_children_tell(kind: type[Event]) -> None:
    app, heard = App("shop"), list[Event]()
    app.on(kind, heard.append)
    assert heard_by(app, PICKED_UP, DONE) == []
    assert heard == [PICKED_UP, DONE]


@pytest.mark.parametrize("kind", [WorkerStarted, JobCrashed])
def test_what_only_the_supervisor_tells_is_refused_with_a_way_out(kind: type[Event]) -> None:
    with pytest.raises(
        ConfigError, match=rf"{kind.__name__} is emitted by a worker's supervisor.*app\.events\(queue\)"
    ):
        App("shop").on(kind, print)


@pytest.mark.parametrize("kind", ["failed", None, int, JobFailed("1", "mail", "t", 1.0, "", "", 1, "")])
def test_what_is_no_class_of_events_is_refused(kind: Any) -> None:
    with pytest.raises(ConfigError, match=r"bulltask\.events such as JobFailed"):
        App("shop").on(kind, print)


def test_a_coroutine_function_is_refused_because_nobody_would_await_it() -> None:
    async def tell(_: JobFailed) -> None: ...

    with pytest.raises(ConfigError, match="tell must be a plain function"):
        App("shop").on(JobFailed, tell)


def test_what_cannot_be_called_is_refused() -> None:
    wrong: Any = "tell"
    with pytest.raises(ConfigError, match="must be a function, not 'tell'"):
        App("shop").on(JobFailed, wrong)


def test_a_listener_that_comes_after_the_child_has_begun_is_refused_and_not_silently_deaf() -> None:
    listeners = Listeners()
    listeners.attach(Bus())
    with pytest.raises(ConfigError, match="print was added too late"):
        listeners.add(JobFailed, print)


def leave(_: Event) -> None:
    sys.exit(3)


def test_a_listener_that_raises_or_wants_to_exit_is_reported_by_its_name_and_the_others_hear_on() -> None:
    app, heard = App("shop"), list[Event]()

    def broken(_: JobCompleted) -> None:
        raise ValueError("no disk")

    app.on(JobCompleted, broken)
    app.on(JobCompleted, leave)
    app.on(JobCompleted, functools.partial(leave))
    app.on(JobCompleted, heard.append)
    (first, _, why), (second, _, exits), (third, _, _) = heard_by(app, DONE)
    assert heard == [DONE]
    assert first.endswith("broken")
    assert why == "no disk"
    assert second == f"{__name__}.leave"
    assert exits == "the listener raised SystemExit: 3"
    assert "partial" in third


def test_an_app_without_listeners_wants_no_events_so_that_none_are_made() -> None:
    bus = Bus()
    App("shop").listeners.attach(bus)
    assert not bus.wants(JobCompleted)
