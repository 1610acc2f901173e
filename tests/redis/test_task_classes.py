"""Task classes: attributes, handlers, options, and `self`, as in Celery."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from bulltask import App, BatchJob, Context, Task, shared_task
from bulltask.errors import ConfigError, Ignore
from bulltask.testing import InlineWorker, use_server

pytestmark = pytest.mark.redis

Calls = list[tuple[Any, ...]]


@pytest.fixture
def app(broker_url: str) -> Iterator[App]:
    app = App("classes", "redis://unreachable.invalid:1")
    with use_server(app, broker_url):
        yield app


@pytest.fixture
def worker(app: App) -> Iterator[InlineWorker]:
    with InlineWorker(app) as worker:
        yield worker


@pytest.fixture
def calls() -> Calls:
    Recording.calls = []
    return Recording.calls


class Recording(Task):
    max_retries = 1
    retry_backoff = 0.001
    autoretry_for = (KeyError,)
    calls: ClassVar[Calls] = []
    _connection: object = None

    @property
    def connection(self) -> object:
        if self._connection is None:
            self._connection = object()
        return self._connection

    def before_start(self, task_id: str, args: Any, kwargs: Any) -> Any:
        self.calls.append(("before_start", task_id == self.request.id, kwargs))

    def on_success(self, retval: Any, task_id: str, args: Any, kwargs: Any) -> Any:
        self.calls.append(("on_success", retval))

    def on_failure(self, exc: BaseException, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        self.calls.append(("on_failure", repr(exc), "KeyError" in str(einfo)))

    def on_retry(self, exc: BaseException, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        self.calls.append(("on_retry", repr(exc)))
        raise RuntimeError("a handler that fails")

    def after_return(self, status: str, retval: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        self.calls.append(("after_return", status))


class Awaiting(Recording):
    async def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
        self.calls.append(("before_start", task_id == self.request.id, kwargs))

    async def on_success(self, retval: Any, task_id: str, args: Any, kwargs: Any) -> None:
        self.calls.append(("on_success", retval, self.request.id == task_id))


def test_self_is_the_task_and_keeps_its_attributes_between_jobs(app: App, worker: InlineWorker) -> None:
    @app.task(base=Recording, bind=True, name="bound")
    def bound(self: Recording, x: int) -> list[Any]:
        self.update_state(state="HALF", meta=x)
        return [id(self.connection), self.request.called_directly, self.max_retries, self.name, self is bound]

    first, second = bound.delay(1), bound.delay(2)
    assert first.get(timeout=5) == second.get(timeout=5)
    assert first.get(timeout=5)[1:] == [False, 1, "bound", True]
    assert bound(3)[1:] == [True, 1, "bound", True]
    assert first.progress == {"state": "HALF", "meta": 1}


def test_handlers_follow_the_outcome_that_redis_has_stored(app: App, worker: InlineWorker, calls: Calls) -> None:
    @app.task(base=Recording, name="work")
    def work(mode: str) -> str:
        if mode == "ignored":
            raise Ignore
        if mode == "fails":
            raise KeyError(mode)
        return mode

    work.delay("works").get(timeout=5)
    started = ("before_start", True, {"mode": "works"})
    assert calls == [started, ("on_success", "works"), ("after_return", "SUCCESS")]
    calls.clear()
    with pytest.raises(KeyError):
        work.delay("fails").get(timeout=5)
    assert [call[0] for call in calls] == ["before_start", "on_retry", "before_start", "on_failure", "after_return"]
    assert calls[3:] == [("on_failure", "KeyError('fails')", True), ("after_return", "FAILURE")]
    calls.clear()
    assert work.delay("ignored").get(timeout=5) is None
    assert [call[0] for call in calls] == ["before_start"]


async def test_handlers_of_async_tasks_may_be_coroutines(app: App, worker: InlineWorker, calls: Calls) -> None:
    @app.task(base=Awaiting, bind=True, name="async")
    async def work(self: Awaiting) -> str:
        return self.request.task

    assert await (await work.adelay()) == "async"
    assert calls == [("before_start", True, {}), ("on_success", "async", True), ("after_return", "SUCCESS")]
    assert await work() == "async"


def test_handlers_are_called_in_eager_mode(calls: Calls) -> None:
    app = App("eager", "redis://unreachable.invalid:1", task_always_eager=True, task_cls=Awaiting)

    @app.task
    async def work() -> int:
        return 1

    assert work.delay().get() == 1
    assert [call[0] for call in calls] == ["before_start", "on_success", "after_return"]
    assert app.Task is Awaiting


def test_an_exception_before_the_start_fails_the_attempt(app: App, worker: InlineWorker) -> None:
    class Broken(Task):
        def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
            raise LookupError("no connection")

    @app.task(base=Broken, name="broken")
    def broken() -> None:
        pytest.fail("called")

    with pytest.raises(LookupError, match="no connection"):
        broken.delay().get(timeout=5)


def test_call_can_be_overridden_for_example_to_enter_a_context(app: App, worker: InlineWorker) -> None:
    entered: list[str] = []

    class InContext(Task):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            with contextlib.ExitStack() as stack:
                entered.append(self.request.id)
                stack.callback(entered.append, "left")
                return super().__call__(*args, **kwargs) if self._bind else self.run(*args, **kwargs)

    @app.task(base=InContext, name="plain")
    def plain(x: int) -> int:
        return x

    @app.task(base=InContext, bind=True, name="bound")
    def bound(self: InContext, x: int) -> list[Any]:
        return [x, self.request.id]

    result, of_bound = plain.delay(1), bound.delay(2)
    assert result.get(timeout=5) == 1
    assert of_bound.get(timeout=5) == [2, of_bound.id]
    assert plain(3) == 3
    assert entered == [result.id, "left", of_bound.id, "left", None, "left"]

    async def function() -> None: ...

    with pytest.raises(ConfigError, match=r"InContext\.__call__ must also be an async def"):
        app.task(base=InContext, name="async")(function)
    with pytest.raises(ConfigError, match=r"Awaiting\.before_start is an async def, but the task 'sync' is not"):
        app.task(base=Awaiting, name="sync")(lambda: None)


def test_the_class_of_a_batch_task_may_have_options_but_no_handlers(app: App, worker: InlineWorker) -> None:
    class Slow(Task):
        queue = "slow"

    @app.task(base=Slow, batch=10, name="many")
    def many(jobs: list[BatchJob[int]]) -> list[int]:
        return [job.data for job in jobs]

    results = [many.delay(number) for number in range(2)]
    assert [result.queue for result in results] == ["slow"] * 2
    assert [result.get(timeout=5) for result in results] == [0, 1]
    assert many(3) == 3
    with pytest.raises(
        ConfigError, match=r"Recording\.before_start would be called for one job, but .* batch task 'no'"
    ):
        app.task(base=Recording, batch=10, name="no")(lambda jobs: None)


def test_a_class_with_run_and_an_init_can_be_registered(app: App, worker: InlineWorker) -> None:
    class Counting(Task):
        name = "counting"
        queue = "counted"

        def __init__(self) -> None:
            super().__init__()
            self.count = 0

        def run(self, step: int) -> int:
            self.count += step
            return self.count

    task = app.register_task(Counting)
    assert [task.delay(2).get(timeout=5), task.delay(step=3).get(timeout=5)] == [2, 5]
    assert (task._options.queue, app.tasks["counting"]) == ("counted", task)
    assert task(1) == 6
    with pytest.raises(ConfigError, match=r"a subclass of bulltask\.Task with a method run"):
        app.register_task(Recording())
    with pytest.raises(AttributeError, match="register the task first"):
        Counting().delay(1)


def test_options_of_the_decorator_override_those_of_the_class(app: App) -> None:
    class Mail(Task):
        queue = "mail"
        acks_late = True
        abstract = True

    @app.task(base=Mail, name="mail", priority=3)
    def mail() -> None: ...

    @app.task(base=Mail, queue="other", bind=True, name="other")
    def other(self: Mail) -> str | None:
        return self.queue

    assert (mail._options.queue, mail._options.priority, mail.queue) == ("mail", 3, "mail")
    assert (other._options.queue, other()) == ("other", "other")
    with pytest.raises(ConfigError, match="rate_limit"):
        app.task(base=type("Limited", (Task,), {"rate_limit": "often"}), name="limited")(lambda: None)
    with pytest.raises(ConfigError, match=r"Named\._options would replace an attribute that bulltask uses"):
        type("Named", (Task,), {"_options": 5})
    with pytest.raises(ConfigError, match=r"must be a subclass of bulltask\.Task"):
        app.task(base=Context, name="wrong")(lambda: None)  # type: ignore[arg-type]


def test_an_overridden_apply_async_also_sends_for_delay(app: App, worker: InlineWorker) -> None:
    class Tagged(Task):
        def apply_async(self, args: Any = (), kwargs: Any = None, **options: Any) -> Any:
            return super().apply_async(args, kwargs, **{"headers": {"tag": 1}, **options})

    @shared_task(base=Tagged, bind=True, name="tagged")
    def tagged(self: Tagged) -> Any:
        return dict(self.request.headers)

    assert tagged.delay().get(timeout=5) == {"tag": 1}


# ---- the class of an app ---------------------------------------------------------------------------------------------


class OfApp(Task):
    priority = 5
    greeting = "hello"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return [self.greeting, self.run(*args, **kwargs)]

    def on_success(self, retval: Any, task_id: str, args: Any, kwargs: Any) -> Any:
        Recording.calls.append(("on_success", retval))


class AppWithClass(App):
    task_cls = OfApp


@pytest.mark.parametrize("defined", ["before", "after"])
@pytest.mark.parametrize("way", ["task_cls", "name", "app.Task", "subclass", "set_current"])
@pytest.mark.parametrize("shared", [True, False])
def test_the_class_of_an_app_reaches_all_tasks_without_a_base(
    broker_url: str, calls: Calls, way: str, defined: str, shared: bool
) -> None:
    previous: Any = App("previous", "redis://unreachable.invalid:1")

    def define(app: Any) -> tuple[Any, Any]:
        decorator = shared_task if shared else app.task
        plain = decorator(name="plain", bind=True)(lambda self, x: [x, type(self).__name__])
        return plain, decorator(name="own", base=Recording)(lambda x: x)

    early = define(previous) if shared and defined == "before" else None
    match way:
        case "task_cls":
            app: Any = App("classes", "redis://unreachable.invalid:1", task_cls=OfApp)
        case "name":
            app = App("classes", "redis://unreachable.invalid:1", task_cls=f"{__name__}:OfApp")
        case "subclass":
            app = AppWithClass("classes", "redis://unreachable.invalid:1")
        case "set_current":
            app = App("classes", "redis://unreachable.invalid:1", task_cls=OfApp, set_as_current=False)
            app.set_default()
        case _:
            app = App("classes", "redis://unreachable.invalid:1")
            early = early or (define(app) if defined == "before" else None)
            app.Task = OfApp
    plain, own = early or define(app)
    with use_server(app, broker_url), InlineWorker(app):
        result = plain.delay(1)
        assert result.get(timeout=5) == ["hello", [1, "OfApp"]]
        assert app.queue("default").get_job(result.id).priority == 5
        assert calls == [("on_success", ["hello", [1, "OfApp"]])]
        assert plain(2) == ["hello", [2, "OfApp"]]
        assert type(own) is Recording
    App("next", "redis://unreachable.invalid:1")
    assert type(plain) is (Task if shared else OfApp)  # a shared task belongs to the current app
    del previous


@pytest.mark.parametrize("name", ["nowhere:Class", "bulltask.app:Missing", "Class"])
def test_the_name_of_a_class_is_imported_when_a_task_needs_it(name: str) -> None:
    app = App("classes", "redis://unreachable.invalid:1", task_cls=name)
    with pytest.raises(ConfigError, match=f"cannot import task_cls, '{name}'"):
        app.task(print)


def test_the_class_of_an_app_keeps_annotations_and_async_tasks(broker_url: str) -> None:
    app = App("annotated", broker_url, task_annotations={"work": {"queue": "mail"}})

    @app.task(name="work")
    async def work() -> None: ...

    app.conf.freeze()
    app.Task = Recording
    assert (type(work).__name__, isinstance(work, Recording), work._is_async) == ("Recording", True, True)
    assert (work._options.queue, work._options.max_retries) == ("mail", 1)
    app.Task = Task
    assert (type(work).__name__, work._options.queue, work._options.max_retries) == ("AsyncTask", "mail", None)
    with pytest.raises(ConfigError, match=r"task 'work' is an async def, so OfApp\.__call__ must also"):
        app.Task = OfApp


def test_flasks_documented_pattern_works(broker_url: str) -> None:
    flask = pytest.importorskip("flask")

    @shared_task(ignore_result=False, name="add_together")
    def add_together(a: int, b: int) -> str:
        return f"{flask.current_app.name}: {a + b}"

    def celery_init_app(app: Any) -> App:
        class FlaskTask(Task):
            def __call__(self, *args: object, **kwargs: object) -> object:
                with app.app_context():
                    return self.run(*args, **kwargs)

        celery_app = App(app.name, task_cls=FlaskTask)
        celery_app.config_from_object(app.config["CELERY"])
        celery_app.set_default()
        app.extensions["celery"] = celery_app
        return celery_app

    app = flask.Flask("shop")
    app.config.from_mapping(CELERY={"broker_url": broker_url, "result_backend": broker_url, "task_ignore_result": True})
    with pytest.warns(UserWarning, match="task_ignore_result"):
        celery_app = celery_init_app(app)
    with use_server(celery_app, broker_url), InlineWorker(celery_app):
        assert add_together.delay(1, b=2).get(timeout=5) == "shop: 3"


def test_the_decorator_sets_attributes_that_the_class_declares(app: App, worker: InlineWorker) -> None:
    class Tenant(Task):
        tenant_mode = False
        _limits: ClassVar[dict[str, int]] = {}

        def describe(self) -> Any:
            return self.tenant_mode

    @app.task(base=Tenant, bind=True, name="one", tenant_mode="strict", queue="default")  # type: ignore[call-overload]
    def one(self: Tenant) -> Any:
        return [self.tenant_mode, self.describe()]

    @app.task(base=Tenant, name="other")
    def other() -> None: ...

    assert one.delay().get(timeout=5) == ["strict", "strict"]
    assert (one.tenant_mode, other.tenant_mode, Tenant.tenant_mode) == ("strict", False, False)  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match="unknown task option 'tenantmode'"):
        app.task(base=Tenant, name="wrong", tenantmode=True)(lambda: None)  # type: ignore[call-overload]
