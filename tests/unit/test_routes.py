"""The settings task_routes and task_queues."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from bulltask import App, ConfigError
from bulltask.worker.run import default_queues


class KombuQueue:
    """A stand-in for ``kombu.Queue`` with the only attribute that bulltask reads."""

    def __init__(self, name: str) -> None:
        self.name = name


def route_large_orders(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], options: Mapping[str, Any], task: object = None, **_: Any
) -> dict[str, Any] | None:
    """A router of Celery's form; the docs of the setting describe its arguments."""
    assert (args, task) == ((), None)
    return {"queue": "large", "priority": 3} if kwargs.get("total", 0) > 100 and "countdown" not in options else None


class Router:
    """A router in Celery's older form: an object with a method."""

    def route_for_task(self, task: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
        return "old" if task.startswith("old.") and not (args or kwargs) else None


def queue_of(
    routes: object, task: str = "feed.tasks.read", kwargs: Mapping[str, Any] | None = None, **more: Any
) -> str:
    app = App("shop", task_routes=routes, set_as_current=False)
    return app._build_job(task, (), kwargs or {}, more).queue


@pytest.mark.parametrize(
    "routes",
    [
        {"feed.tasks.read": "feeds"},
        {"feed.tasks.read": {"queue": "feeds", "routing_key": "feed.read"}},
        {"feed.*": {"queue": "feeds"}},
        {re.compile(r"(web|feed)\.tasks\..*"): {"queue": "feeds"}},
        {"feed.*": "others", "feed.tasks.read": "feeds"},
        {"feed.*": KombuQueue("feeds")},
        {"feed.*": {"queue": KombuQueue("feeds")}},
        [("feed.*", "feeds"), ("*", "others")],
        ([("feed.*", "feeds"), ("*", "others")],),
        [{"web.*": "web"}, {"feed.*": "feeds"}],
        [route_large_orders, Router(), {"feed.*": "feeds"}],
    ],
)
def test_a_task_without_a_queue_goes_to_its_route(routes: object) -> None:
    assert queue_of(routes) == "feeds"


@pytest.mark.parametrize("routes", [None, {}, [], {"web.*": "web"}, [{"feed": "f"}, Router()]])
def test_a_task_without_a_route_goes_to_the_default_queue(routes: object) -> None:
    assert queue_of(routes) == "default"


def test_the_queue_of_a_call_or_a_task_takes_precedence_over_its_route() -> None:
    app = App("shop", task_routes={"*": {"queue": "routed", "priority": 7, "keep_logs": 3}}, set_as_current=False)

    @app.task(name="own", queue="own")
    def own() -> None: ...

    @app.task(name="routed", priority=2)
    def routed() -> None: ...

    assert app._build_job("own", (), {}, {}).queue == "own"
    assert app._build_job("routed", (), {}, {"queue": "call"}).queue == "call"
    job = app._build_job("routed", (), {}, {})
    assert (job.queue, job.options.priority, job.options.to_wire(0)["kl"]) == ("routed", 2, 3)
    assert app._build_job("routed", (), {}, {"priority": 5}).options.priority == 5


def test_a_function_sees_the_arguments_by_name_and_the_options() -> None:
    for routes in (route_large_orders, f"{__name__}.route_large_orders", f"{__name__}:route_large_orders"):
        assert queue_of(routes, kwargs={"total": 101}) == "large"
        assert queue_of(routes, kwargs={"total": 99}) == "default"
        assert queue_of(routes, kwargs={"total": 101}, countdown=3) == "default"


@pytest.mark.parametrize(
    ("routes", "message"),
    [
        (3, "task_routes must be a dictionary of routes, a list of pairs or a function, not 3"),
        ({3: "x"}, "task_routes must have task names or patterns as keys, not 3"),
        ({"a": "b:c"}, r"queue in task_routes\['a'\] must be the name of a queue, not 'b:c'"),
        ({"a": {"routing_key": "x"}}, r"task_routes\['a'\] has no queue; Redis has no exchanges or routing keys"),
        ({"feed.*": {"queue": "a", "nothing": 1}}, "task_routes for feed.tasks.read: unknown option 'nothing'"),
        ("no_such_module.route", "task_routes names 'no_such_module.route', which cannot be imported"),
        (lambda *_, **__: 3, "queue in task_routes for feed.tasks.read must be the name of a queue, not 3"),
    ],
)
def test_an_invalid_route_is_rejected_before_anything_is_sent(routes: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        queue_of(routes)


def test_a_worker_processes_the_queues_of_its_tasks_routes_and_task_queues() -> None:
    app = App("shop", task_routes=[{"feed.*": "feeds", "own": "never", "web": "web"}], set_as_current=False)
    app.task(name="feed.read")(lambda: None)
    app.task(name="own", queue="own")(lambda: None)
    assert default_queues(app) == ("default", "own", "feeds")


@pytest.mark.parametrize(
    "queues", [["a", "b"], {"a": {"exchange": "x"}, "b": {}}, (KombuQueue("a"), KombuQueue("b")), "a,b"]
)
def test_task_queues_are_the_queues_of_a_worker_without_q(queues: object) -> None:
    app = App("shop", task_queues=queues, set_as_current=False)
    app.task(name="own", queue="own")(lambda: None)
    assert default_queues(app) == ("a", "b")


def test_task_queues_must_be_names() -> None:
    for queues in (["a:b"], [3], 3):
        with pytest.raises(ConfigError, match="task_queues must be"):
            App("shop", task_queues=queues)
