"""Bound tasks: how often ``self.retry()`` may retry a job and until when, and what the request says about its job."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from bulltask import App, Context, Request, chord, group
from bulltask.errors import JobExpiredError
from bulltask.testing import InlineWorker, use_server

pytestmark = pytest.mark.redis


@pytest.fixture
def app(broker_url: str) -> Iterator[App]:
    app = App("bound", "redis://unreachable.invalid:1")
    with use_server(app, broker_url):
        yield app


@pytest.mark.parametrize(
    ("settings", "call", "attempts"),
    [
        ({"task_max_retries": 0}, {}, 4),  # Celery's default
        ({"task_max_retries": 0, "task_max_self_retries": 1}, {}, 2),
        ({"task_max_self_retries": 5}, {}, 6),
        ({"task_max_self_retries": 0}, {}, 1),
        ({}, {}, 3),
        ({"task_max_retries": 0}, {"max_retries": 0}, 1),
    ],
)
def test_retries_that_a_task_requests_have_their_own_limit(
    broker_url: str, settings: dict[str, Any], call: dict[str, Any], attempts: int
) -> None:
    app, runs = App("own-limit", broker_url, **settings), list[int]()

    @app.task(name="asks", bind=True)
    def asks(self: Context) -> None:
        runs.append(self.request.retries)
        self.retry(countdown=0)

    @app.task(name="fails")
    def fails() -> None:
        runs.append(-1)
        raise ConnectionError

    with use_server(app, broker_url), InlineWorker(app) as worker:
        asks.apply_async(**call)
        worker.drain(propagate=False)
        assert runs == list(range(attempts))
        runs.clear()
        fails.delay()
        worker.drain(propagate=False)
        worker.clock.advance(10)
        worker.drain(propagate=False)
        assert (runs == [-1]) == (settings.get("task_max_retries") == 0)  # nothing is retried without a request


def test_a_call_of_retry_may_permit_more_retries_than_the_task(app: App, worker: InlineWorker) -> None:
    runs: list[int] = []

    @app.task(name="asks_often", bind=True, max_retries=1)
    def asks_often(self: Context) -> None:
        runs.append(self.request.retries)
        self.retry(countdown=0, max_retries=4)

    asks_often.delay()
    worker.drain(propagate=False)
    assert runs == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("expires", [5, timedelta(seconds=5)])
def test_a_retry_may_expire(app: App, worker: InlineWorker, expires: Any) -> None:
    @app.task(name="expires", bind=True)
    def expires_soon(self: Context) -> None:
        self.retry(countdown=10, expires=expires)

    handle = expires_soon.delay()
    worker.drain()
    worker.clock.advance(10)
    worker.drain(propagate=False)
    with pytest.raises(JobExpiredError):
        handle.get()


def test_a_retry_may_have_an_eta(app: App, worker: InlineWorker) -> None:
    runs: list[int] = []

    @app.task(name="later", bind=True)
    def later(self: Context) -> None:
        runs.append(self.request.retries)
        if not self.request.retries:
            self.retry(eta=datetime.fromtimestamp(app.now_ms() / 1000 + 60, UTC))

    later.delay()
    worker.drain()
    worker.clock.advance(59)
    worker.drain()
    assert runs == [0]
    worker.clock.advance(2)
    worker.drain()
    assert runs == [0, 1]


def test_the_request_has_celerys_fields(app: App, worker: InlineWorker) -> None:
    requests: dict[str, Request] = {}

    @app.task(name="look", bind=True, soft_time_limit=20, time_limit=30)
    def look(self: Context, who: Any, result: Any = None) -> str:
        requests[who] = self.request
        if who == "sender":
            look.delay("sent")
        if who == "sent":
            look.delay("sent by sent")
        return "value"

    look.apply_async(("sender",), priority=7)
    worker.drain()
    sender, sent, last = (requests[name] for name in ("sender", "sent", "sent by sent"))
    assert (sender.root_id, sender.parent_id) == (sender.id, None)
    assert (sent.root_id, sent.parent_id) == (sender.id, sender.id)
    assert (last.root_id, last.parent_id) == (sender.id, sent.id)
    assert (sender.timelimit, sender.soft_time_limit, sender.app_id) == ((30, 20), 20, "bound")
    assert sender.hostname == "in-process"
    assert (sender.argsrepr, sender.kwargsrepr) == ("()", "{'who': 'sender'}")
    info = {"exchange": "", "routing_key": "default", "priority": 7, "redelivered": False}
    assert sender.delivery_info == info


def test_the_request_names_the_step_before_and_the_chord(app: App, worker: InlineWorker) -> None:
    requests: dict[str, Request] = {}

    @app.task(name="step", bind=True)
    def step(self: Context, value: Any, name: str) -> str:
        requests[name] = self.request
        return name

    (step.s(0, "first") | step.s("second")).delay()
    chord(group(step.s(0, "member"), step.s(0, "other")), step.s("body")).delay()
    worker.drain()
    assert (requests["second"].parent_id, requests["second"].root_id) == (requests["first"].id,) * 2
    assert requests["member"].group == requests["member"].chord == requests["body"].id
    assert (requests["first"].group, requests["body"].group) == (None, None)


def test_every_job_of_a_canvas_knows_its_root_and_its_parent(app: App, worker: InlineWorker) -> None:
    requests: dict[str, Request] = {}

    @app.task(name="node", bind=True, max_retries=0)
    def node(self: Context, name: str) -> None:
        requests[name] = self.request
        if name == "sender":
            (node.si("a") | group(node.si("b"), node.si("c")) | node.si("d")).delay()
        if name == "replaced":
            self.replace(node.si("r") | node.si("s"))
        if name == "fails":
            raise ValueError

    def relatives(name: str) -> tuple[str | None, str | None]:
        return requests[name].root_id, requests[name].parent_id

    (node.si("1") | group() | node.si("2") | group(node.si("3"), node.si("4")) | node.si("5") | node.si("6")).delay()
    node.si("linked").apply_async(link=[node.si("callback"), node.si("another")])
    node.delay("sender")
    node.delay("replaced")
    chord([node.si("m"), node.si("n")], node.si("body")).delay()
    (node.si("before") | node.si("fails").on_error(node.si("errback"))).delay()
    worker.drain(propagate=False)
    ids = {name: request.id for name, request in requests.items()}
    first = ids["1"]
    assert [relatives(name) for name in "123456"] == [
        (first, None),
        (first, first),
        (first, ids["2"]),
        (first, ids["2"]),
        (first, ids["4"]),
        (first, ids["5"]),
    ]
    assert relatives("callback") == relatives("another") == (ids["linked"],) * 2
    sender = ids["sender"]
    assert [relatives(name) for name in "abcd"] == [
        (sender, sender),
        (sender, ids["a"]),
        (sender, ids["a"]),
        (sender, ids["c"]),
    ]
    assert (relatives("r"), relatives("s")) == ((ids["replaced"],) * 2, (ids["replaced"], ids["r"]))
    assert (relatives("m"), relatives("n")) == ((ids["m"], None), (ids["n"], None))
    assert relatives("body") == (ids["n"], ids["n"])
    assert relatives("errback") == (ids["before"], ids["fails"])
