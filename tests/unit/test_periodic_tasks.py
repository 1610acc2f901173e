"""``add_periodic_task`` and the signals whose receivers call it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from bulltask import App, ConfigError, chain, crontab
from bulltask.worker.beat import read_entries


@pytest.fixture
def app() -> App:
    app = App("shop", set_as_current=False)

    @app.task(name="hello", queue="night")
    def hello(name: str, *, loud: bool = False) -> None: ...

    return app


def schedule_of(app: App) -> dict[str, Any]:
    return {entry.name: (entry.rule.every_ms, entry.rule.pattern) for entry in read_entries(app) or ()}


def test_a_receiver_of_on_after_configure_adds_entries(app: App) -> None:
    @app.on_after_configure.connect
    def setup_periodic_tasks(sender: App, **kwargs: Any) -> None:
        hello = sender.tasks["hello"]
        sender.add_periodic_task(10.0, hello.s("hello"), name="every 10")
        sender.add_periodic_task(timedelta(minutes=1), hello.s("world"))
        sender.add_periodic_task(crontab(hour=7, minute=30, day_of_week=1), hello.s("Monday"), name="Mondays")
        sender.add_periodic_task("@daily", hello.s("day"), name="days")

    assert schedule_of(app) == {
        "every 10": (10_000, None),
        "hello('world')": (60_000, None),
        "Mondays": (None, "30 7 * * 1"),
        "days": (None, "@daily"),
    }


def test_the_receivers_are_called_once_when_the_tasks_are_imported_and_can_change_settings(app: App) -> None:
    calls: list[str] = []

    @app.on_after_finalize.connect
    def finalized(sender: App, **kwargs: Any) -> None:
        calls.append("finalized")

    @app.on_after_configure.connect
    def configured(sender: App, source: Any, **kwargs: Any) -> None:
        source.timezone = "Europe/Berlin"
        calls.append("configured")

    assert calls == []
    for _ in range(2):
        app._load_tasks()
        read_entries(app)
    assert calls == ["configured", "finalized"]
    assert app._config.timezone == "Europe/Berlin"


def test_an_exception_in_a_receiver_prevents_the_worker_from_starting(app: App) -> None:
    @app.on_after_configure.connect
    def setup_periodic_tasks(sender: App, **kwargs: Any) -> None:
        raise ValueError("no schedule")

    for _ in range(2):
        with pytest.raises(ValueError, match="no schedule"):
            app._load_tasks()


def test_periodic_tasks_are_added_to_beat_schedule_even_after_the_settings_are_frozen(app: App) -> None:
    app.conf.beat_schedule = {name: {"task": "hello", "schedule": 1, "args": ["x"]} for name in ("a", "b")}
    assert app._config.beat_schedule is not None
    app.add_periodic_task(2, app.tasks["hello"].s("y"), name="b")
    app.add_periodic_task(3, app.tasks["hello"].s("y"), name="c")
    assert schedule_of(app) == {"a": (1_000, None), "b": (2_000, None), "c": (3_000, None)}


def test_the_call_may_be_a_task_with_arguments_and_options(app: App) -> None:
    hello = app.tasks["hello"]
    assert app.add_periodic_task(1, hello, ["x"], {"loud": True}) == "hello('x', loud=True)"
    assert app.add_periodic_task(1, hello.s(loud=True).set(priority=3), ("y",), name="y", expires=5, queue="day") == "y"
    entries = read_entries(app)
    assert entries is not None
    first, second = entries
    assert (first.job.queue, first.job.data) == ("night", b'{"name":"x","loud":true}')
    assert (second.job.queue, second.job.data) == ("day", b'{"name":"y","loud":true}')
    template: Any = second.job.options.to_template()
    assert (template["priority"], template["bulltask"]["ttl"]) == (3, 5_000)


def test_a_second_entry_with_the_same_call_and_no_name_replaces_the_first_with_a_warning(app: App) -> None:
    app.add_periodic_task(1, app.tasks["hello"].s("x"))
    app.add_periodic_task(1, app.tasks["hello"].s("x"))
    with pytest.warns(UserWarning, match="pass a name= to keep both"):
        app.add_periodic_task(2, app.tasks["hello"].s("x"))
    assert schedule_of(app) == {"hello('x')": (2_000, None)}


def test_only_a_single_call_that_matches_its_task_can_be_periodic(app: App) -> None:
    hello: Any = app.tasks["hello"]
    calls: list[tuple[Any, str]] = [
        (chain(hello.s("x"), hello.si("y")), "schedule a task that sends it"),
        ("hello", "a periodic task is a call"),
        (hello.s("x").set(link=hello.si("y")), "has callbacks"),
    ]
    for call, message in calls:
        with pytest.raises(TypeError, match=message):
            app.add_periodic_task(1, call)
    with pytest.raises(TypeError):
        app.add_periodic_task(1, hello, ["x", "y", "z"])
    with pytest.raises(ConfigError, match=r"more than three ':'.*pass a name="):
        app.add_periodic_task(1, hello.s("a:b:c:d:e"))


def test_solar_schedules_are_rejected_with_the_reason(app: App) -> None:
    with pytest.raises(ImportError, match="solar schedules are not available"):
        exec("from bulltask.schedules import solar", {})
    unknown: Any = object()
    app.add_periodic_task(unknown, app.tasks["hello"].s("x"), name="sunset")
    with pytest.raises(ConfigError, match=r"beat_schedule\['sunset'\]: schedule must be crontab"):
        read_entries(app)
