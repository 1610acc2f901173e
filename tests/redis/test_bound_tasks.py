"""Bound tasks: how often ``self.retry()`` may retry a job and until when, and what the request says about its job."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from bulltask import App, Context, Request, Task, chord, current_app, current_task, group
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
        ({"task_max_retries": 0, "task_max_explicit_retries": 1}, {}, 2),
        ({"task_max_explicit_retries": 5}, {}, 6),
        ({"task_max_explicit_retries": 0}, {}, 1),
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
        worker.run_jobs(propagate=False)
        assert runs == list(range(attempts))
        runs.clear()
        fails.delay()
        worker.run_jobs(propagate=False)
        worker.clock.advance(10)
        worker.run_jobs(propagate=False)
        assert (runs == [-1]) == (settings.get("task_max_retries") == 0)  # nothing is retried without a request


@pytest.mark.parametrize(
    ("settings", "options", "attempts"),
    [
        ({"task_max_retries": 0}, {}, 4),  # Celery's default
        ({"task_max_retries": 0, "task_max_explicit_retries": 1}, {}, 2),
        ({"task_max_retries": 0, "task_max_explicit_retries": 0}, {}, 1),
        ({"task_max_retries": 0}, {"max_retries": 0}, 1),
        ({"task_max_retries": 0}, {"max_retries": 1}, 2),
        ({"task_max_explicit_retries": 0}, {}, 3),  # at least as often as after a transient error
        ({}, {}, 3),
    ],
)
def test_autoretry_for_asks_for_retries_like_self_retry(
    broker_url: str, settings: dict[str, Any], options: dict[str, Any], attempts: int
) -> None:
    app, runs = App("autoretry", broker_url, **settings), list[type[Exception]]()

    @app.task(name="raises", autoretry_for=(KeyError,), default_retry_delay=0, **options)
    def raises(transient: bool) -> None:
        runs.append(ConnectionError if transient else KeyError)
        raise runs[-1]

    with use_server(app, broker_url), InlineWorker(app) as worker:
        raises.delay(transient=False)
        worker.run_jobs(propagate=False)
        assert runs == [KeyError] * attempts
        runs.clear()
        if settings.get("task_max_retries") == 0 and not options:
            raises.delay(transient=True)
            worker.run_jobs(propagate=False)
            assert runs == [ConnectionError]  # not in autoretry_for, so nothing has asked for a retry


def test_a_call_of_retry_may_permit_more_retries_than_the_task(app: App, worker: InlineWorker) -> None:
    runs: list[int] = []

    @app.task(name="asks_often", bind=True, max_retries=1)
    def asks_often(self: Context) -> None:
        runs.append(self.request.retries)
        self.retry(countdown=0, max_retries=4)

    asks_often.delay()
    worker.run_jobs(propagate=False)
    assert runs == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("expires", [5, timedelta(seconds=5)])
def test_a_retry_may_expire(app: App, worker: InlineWorker, expires: Any) -> None:
    @app.task(name="expires", bind=True)
    def expires_soon(self: Context) -> None:
        self.retry(countdown=10, expires=expires)

    handle = expires_soon.delay()
    worker.run_jobs()
    worker.clock.advance(10)
    worker.run_jobs(propagate=False)
    with pytest.raises(JobExpiredError):
        handle.get()


def test_a_retry_may_have_an_eta(app: App, worker: InlineWorker) -> None:
    runs: list[int] = []

    @app.task(name="later", bind=True)
    def later(self: Context) -> None:
        runs.append(self.request.retries)
        if not self.request.retries:
            self.retry(eta=datetime.fromtimestamp(app._now_ms() / 1000 + 60, UTC))

    later.delay()
    worker.run_jobs()
    worker.clock.advance(59)
    worker.run_jobs()
    assert runs == [0]
    worker.clock.advance(2)
    worker.run_jobs()
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
    worker.run_jobs()
    sender, sent, last = (requests[name] for name in ("sender", "sent", "sent by sent"))
    assert (sender.root_id, sender.parent_id) == (sender.id, None)
    assert (sent.root_id, sent.parent_id) == (sender.id, sender.id)
    assert (last.root_id, last.parent_id) == (sender.id, sent.id)
    assert (sender.timelimit, sender.soft_time_limit, sender.app_id) == ((30, 20), 20, "bound")
    assert sender.hostname == "in-process"
    assert (sender.argsrepr, sender.kwargsrepr) == ("()", "{'who': 'sender'}")
    info = {"exchange": "", "routing_key": "default", "priority": 7, "redelivered": False}
    assert sender.delivery_info == info


def test_the_request_counts_the_tasks_that_replaced_themselves(app: App, worker: InlineWorker) -> None:
    nesting: list[int] = []

    @app.task(name="again", bind=True)
    def again(self: Context, times: int) -> str:
        nesting.append(self.request.replaced_task_nesting)
        if times:
            self.replace(again.s(times - 1))
        plain.delay()
        return "value"

    @app.task(name="plain", bind=True)
    def plain(self: Context) -> None:
        nesting.append(self.request.replaced_task_nesting)

    again.delay(2)
    worker.run_jobs()
    assert nesting == [0, 1, 2, 0]


def test_the_request_names_the_previous_step_and_the_chord(app: App, worker: InlineWorker) -> None:
    requests: dict[str, Request] = {}

    @app.task(name="step", bind=True)
    def step(self: Context, value: Any, name: str) -> str:
        requests[name] = self.request
        return name

    (step.s(0, "first") | step.s("second")).delay()
    chord(group(step.s(0, "member"), step.s(0, "other")), step.s("body")).delay()
    worker.run_jobs()
    assert (requests["second"].parent_id, requests["second"].root_id) == (requests["first"].id,) * 2
    assert requests["member"].group == requests["member"].chord == requests["body"].id
    assert (requests["first"].group, requests["body"].group) == (None, None)


def test_the_request_of_a_groups_member_has_the_id_of_the_group(app: App, worker: InlineWorker) -> None:
    groups: dict[str, str | None] = {}

    @app.task(name="step", bind=True)
    def step(self: Context, name: str) -> None:
        groups[name] = self.request.group
        assert self.request.chord is None

    members = [step.si("member"), step.si("first") | step.si("last"), step.si("named").set(job_id="order.1")]
    flat = group(members).delay()
    after = (step.si("before") | group(step.si("after"), step.si("other"))).delay()
    nested = group(step.si("a"), step.si("b") | group(step.si("inner"), step.si("c"))).delay()
    step.si("alone").delay()
    worker.run_jobs()
    assert {name: groups[name] for name in ("member", "last", "after", "a", "inner")} == {
        "member": flat.id,
        "last": flat.id,
        "after": after.id,
        "a": nested.id,
        "inner": nested[1].id,
    }
    assert {groups[name] for name in ("first", "named", "before", "alone")} == {None}


def test_the_request_has_the_eta_and_the_expiry_of_the_call(app: App, worker: InlineWorker) -> None:
    requests: list[Request] = []

    @app.task(name="look", bind=True)
    def look(self: Context) -> None:
        requests.append(self.request)

    eta = worker.clock.now().replace(microsecond=0) + timedelta(hours=1)
    look.apply_async(eta=eta)
    worker.clock.advance(3_600)
    worker.run_jobs()
    look.apply_async(expires=datetime(2090, 1, 1, tzinfo=UTC))
    worker.run_jobs()
    look.apply()
    assert [(one.eta, one.expires, one.is_eager) for one in requests] == [
        (eta.isoformat(), None, False),
        (None, "2090-01-01T00:00:00+00:00", False),
        (None, None, True),
    ]


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

    def ancestry(name: str) -> tuple[str | None, str | None]:
        return requests[name].root_id, requests[name].parent_id

    (node.si("1") | group() | node.si("2") | group(node.si("3"), node.si("4")) | node.si("5") | node.si("6")).delay()
    node.si("linked").apply_async(link=[node.si("callback"), node.si("another")])
    node.delay("sender")
    node.delay("replaced")
    chord([node.si("m"), node.si("n")], node.si("body")).delay()
    (node.si("before") | node.si("fails").on_error(node.si("errback"))).delay()
    worker.run_jobs(propagate=False)
    ids = {name: request.id for name, request in requests.items()}
    first = ids["1"]
    assert [ancestry(name) for name in "123456"] == [
        (first, None),
        (first, first),
        (first, ids["2"]),
        (first, ids["2"]),
        (first, ids["4"]),
        (first, ids["5"]),
    ]
    assert ancestry("callback") == ancestry("another") == (ids["linked"],) * 2
    sender = ids["sender"]
    assert [ancestry(name) for name in "abcd"] == [
        (sender, sender),
        (sender, ids["a"]),
        (sender, ids["a"]),
        (sender, ids["c"]),
    ]
    assert (ancestry("r"), ancestry("s")) == ((ids["replaced"],) * 2, (ids["replaced"], ids["r"]))
    assert (ancestry("m"), ancestry("n")) == ((ids["m"], None), (ids["n"], None))
    assert ancestry("body") == (ids["n"], ids["n"])
    assert ancestry("errback") == (ids["before"], ids["fails"])


def test_self_has_celerys_attributes_of_the_task(app: App, worker: InlineWorker) -> None:
    seen: dict[str, Any] = {}

    @app.task(name="attributes", bind=True, default_retry_delay=90)
    def attributes(self: Context, who: str) -> str:
        if who == "first":
            seen["ids"] = [self.delay("second").id, self.apply_async(("third",), countdown=0).id]
            seen["same"] = self.AsyncResult(self.request.id).id == self.request.id
            seen["calls"] = [
                self.s("x").task,
                self.si("x").task,
                self.signature(("x",)).task,
                self.subtask(("x",)).task,
            ]
            seen["task"] = (self.name, self.app.main, self.max_retries, self.default_retry_delay)
        return who

    handle = attributes.delay("first")
    worker.run_jobs()
    assert handle.get() == "first"
    assert [app.result(job_id).get() for job_id in seen["ids"]] == ["second", "third"]
    assert seen["same"]
    assert seen["calls"] == [attributes] * 4
    assert seen["task"] == ("attributes", "bound", 2, 90.0)


@pytest.mark.parametrize(
    ("options", "call", "expected"),
    [
        ({}, {}, 2),
        ({"max_retries": 5}, {}, 5),
        ({"max_retries": 5}, {"max_retries": 1}, 1),
        ({"max_retries": None}, {}, None),
        ({"max_retries": 0}, {}, 0),
    ],
)
@pytest.mark.parametrize("base", [None, Task])
def test_max_retries_of_self_is_the_limit_of_the_running_job(
    app: App, worker: InlineWorker, base: Any, options: dict[str, Any], call: dict[str, Any], expected: int | None
) -> None:
    base = base and type("Base", (Task,), {})

    @app.task(name="limit", bind=True, base=base, **options)
    def limit(self: Any) -> list[Any]:
        return [self.max_retries, self.default_retry_delay]

    handle = limit.apply_async(**call)
    worker.run_jobs()
    assert handle.get() == [expected, 1.0]


def test_a_task_that_retries_itself_can_compare_its_retries_with_max_retries(broker_url: str) -> None:
    app, runs = App("self", broker_url, task_max_retries=0), list[tuple[int, int | None]]()

    @app.task(name="compares", bind=True)
    def compares(self: Context) -> str:
        runs.append((self.request.retries, self.max_retries))
        if self.request.retries == self.max_retries:
            return "gave up"
        raise self.retry(countdown=0)

    with use_server(app, broker_url), InlineWorker(app) as worker:
        handle = compares.delay()
        worker.run_jobs()
        assert handle.get() == "gave up"
    assert runs == [(0, 3), (1, 3), (2, 3), (3, 3)]  # 3 is Celery's default


def test_current_task_is_self_of_the_running_task_and_none_outside(app: App, worker: InlineWorker) -> None:
    def helper() -> list[Any]:
        current_task.update_state(state="PROGRESS", meta={"done": 1})
        assert current_task
        assert current_task is not None
        assert app.current_task.request == current_task.request == current_app.current_task.request
        return [current_task.name, current_task.request.id, dict(current_task.request.kwargs), current_task.max_retries]

    @app.task(name="unbound")
    def unbound(x: int) -> list[Any]:
        return helper()

    @app.task(name="awaited")
    async def awaited(x: int) -> list[Any]:
        return helper()

    @app.task(name="bound", bind=True)
    def bound(self: Context, x: int) -> list[Any]:
        assert app.current_task is self
        return helper()

    @app.task(name="based", base=type("Base", (Task,), {}))
    def based(x: int) -> list[Any]:
        assert app.current_task is app.tasks["based"]
        return helper()

    for task in (unbound, awaited, bound, based):
        handle = task.delay(7)
        worker.run_jobs()
        assert handle.get() == [task.name, handle.id, {"x": 7}, 2]
        assert handle.progress == {"state": "PROGRESS", "meta": {"done": 1}}
        assert task.apply((7,)).get()[0] == task.name
    assert not current_task
    assert current_task == None  # noqa: E711 - as a proxy, it is not the object
    assert app.current_task is None
    with pytest.raises(AttributeError, match="no attribute 'request', because no task is running"):
        current_task.request  # noqa: B018
