from __future__ import annotations

import asyncio
import copy
import gc
import importlib
import inspect
import json
import pickle  # noqa: TID251 - a user may pickle a task
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import cloudpickle  # type: ignore[import-untyped]
import pytest

from bulltask import App, AsyncTask, Context, Retry, Task, shared_task
from bulltask.config.config import Config
from bulltask.config.settings import Settings
from bulltask.errors import (
    ConfigError,
    DuplicateTaskError,
    EncodeError,
    InvalidNameError,
    PayloadTooLargeError,
    TaskNotRegisteredError,
)
from bulltask.jobs.errors import nearest
from bulltask.jobs.job import UNLIMITED_ATTEMPTS, NewJob
from bulltask.registry import request as current
from bulltask.registry.call import build_job
from bulltask.registry.canvas_plan import plan_canvas
from bulltask.registry.options import CallOptions, TaskOptions
from bulltask.registry.protocols import ResultReader
from bulltask.registry.request import set_current, source_location, task_name
from bulltask.registry.tasks import SHARED, Tasks
from tests.support.programs import ROOT

CONFIG = Settings({}, {}).freeze()
NOW_MS = 1_800_000_000_000


async def _async_function(*_: object) -> int:
    return 1


class RecordingSender:
    """A sender that records jobs. It has the settings of a new app."""

    def __init__(self) -> None:
        self.jobs: list[NewJob] = []
        self._config: Config = CONFIG
        self._typed: bool | None = None
        self._serializer = "json"
        self._overrides_send_task = False
        self._results = cast(ResultReader, object())

    def _now_ms(self) -> int:
        return NOW_MS

    def _send(self, jobs: Sequence[NewJob]) -> list[str]:
        self.jobs += jobs
        return [job.id for job in jobs]

    async def _asend(self, jobs: Sequence[NewJob]) -> list[str]:
        return self._send(jobs)

    def _send_canvas(self, canvas: Any) -> Any:
        self.jobs += [planned.job for planned in plan_canvas(canvas, self._config, {}).roots]

    async def _asend_canvas(self, canvas: Any) -> Any:
        return self._send_canvas(canvas)

    def _apply_canvas(self, canvas: Any, *, throw: bool | None) -> Any:
        raise NotImplementedError

    @property
    def data(self) -> list[Any]:
        return [json.loads(job.data) for job in self.jobs]


@pytest.fixture
def app() -> App:
    return App("registry")


@pytest.fixture
def recorder() -> RecordingSender:
    return RecordingSender()


@pytest.fixture
def isolated_shared_tasks(monkeypatch: pytest.MonkeyPatch) -> Tasks:
    """Replace the shared tasks in this test."""
    monkeypatch.setattr(SHARED, "_tasks", {})
    monkeypatch.setattr(current, "_current_app", None)
    return SHARED


def add(x: int, y: int = 1) -> int:
    """Add two numbers."""
    return x + y


def task_of(
    function: Callable[..., Any], recorder: RecordingSender, *, bind: bool = False, **options: Any
) -> Task[Any, Any]:
    return Task(function, "t", TaskOptions(**options), lambda: recorder, bind=bind)


# --- names ------------------------------------------------------------------------------------------------------------


def test_a_task_is_named_after_its_module_and_function(app: App) -> None:
    task = app.task(add)
    assert task.name == f"{__name__}.add"
    assert app.tasks[f"{__name__}.add"] is task


def test_a_nested_function_has_a_task_name() -> None:
    def inner() -> None: ...

    assert task_name(inner) == f"{__name__}.test_a_nested_function_has_a_task_name.inner"


def test_a_function_without_a_usable_name_needs_a_task_name(app: App) -> None:
    with pytest.raises(ConfigError, match=r"set one with @app\.task\(name='…'\)"):
        app.task(lambda: None)
    with pytest.raises(ConfigError, match=r"'mail\.send' has no usable name"):
        app.task(cast(Any, "mail.send"))
    assert app.task(name="nothing")(lambda: None).name == "nothing"


SCRIPT = """
from bulltask import App
app = App("script")
@app.task
def work(): ...
if __name__ == "__main__":
    print(work.name)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["shop/jobs.py"], "jobs.work"),
        (["-m", "shop.jobs"], "shop.jobs.work"),
        (["-m", "shop"], "shop.work"),
        (["-c", SCRIPT], "__main__.work"),
    ],
)
def test_a_script_names_its_tasks_like_a_worker_that_imports_it(command: list[str], name: str, tmp_path: Path) -> None:
    (tmp_path / "shop").mkdir()
    for file in ("jobs.py", "__main__.py"):
        (tmp_path / "shop" / file).write_text(SCRIPT)
    run = subprocess.run(
        [sys.executable, *command],
        cwd=tmp_path,
        env={"PYTHONPATH": f"{ROOT}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.strip() == name


def test_a_task_of_a_notebook_warns_when_it_is_sent_because_no_worker_can_import_it(recorder: RecordingSender) -> None:
    task: Any = Task(add, "__main__.add", TaskOptions(), lambda: recorder)
    for send in (lambda: task.delay(1), lambda: task.apply_async((1,), countdown=1)):
        with pytest.warns(UserWarning, match=r"'__main__\.add' is defined in a notebook.*-A tasks") as caught:
            send()
        assert caught[0].filename == __file__
    recorder._config = replace(CONFIG, always_eager=True)
    task.delay(1)


def test_the_location_of_a_task_is_file_and_line() -> None:
    assert re.fullmatch(rf"{re.escape(__file__)}:\d+", source_location(add))
    assert source_location(print) == repr(print)


def test_two_functions_with_the_same_task_name_are_rejected(app: App) -> None:
    @app.task(name="mail.send")
    def first() -> None: ...

    def second() -> None: ...

    with pytest.raises(DuplicateTaskError) as caught:
        app.task(name="mail.send")(second)
    text = str(caught.value)
    assert "two tasks are named 'mail.send'" in text
    assert first._location in text
    assert source_location(second) in text
    assert app.tasks["mail.send"] is first


@pytest.mark.usefixtures("isolated_shared_tasks")
def test_a_reimported_module_replaces_its_tasks(app: App) -> None:
    first, second = app.task(add), app.task(add)
    assert app.tasks[first.name] is second
    assert len(app.tasks) == 1


def test_a_reloaded_module_replaces_tasks_whose_lines_have_moved(
    app: App, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # the bytecode cache misses a second edit within a second
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "edited_tasks.py"
    file.write_text("def work() -> int:\n    return 1\n")
    module = importlib.import_module("edited_tasks")
    try:
        app.task(module.work)
        file.write_text("import os\n\n\ndef work() -> int:\n    return 2\n")
        task: Task[[], int] = app.task(importlib.reload(module).work)
    finally:
        del sys.modules["edited_tasks"]
    assert app.tasks["edited_tasks.work"] is task
    assert task() == 2


def test_functions_with_the_same_name_in_two_modules_are_rejected(app: App) -> None:
    def other() -> None: ...

    app.task(name="work")(add)
    other.__qualname__ = add.__qualname__
    other.__module__ = "another.module"
    with pytest.raises(DuplicateTaskError, match="two tasks are named 'work'"):
        app.task(name="work")(other)


def test_an_unknown_task_gets_a_suggestion(app: App) -> None:
    app.task(name="mail.send")(add)
    with pytest.raises(TaskNotRegisteredError, match=r"task 'mail.sned' is not registered; did you mean 'mail.send'\?"):
        app.tasks["mail.sned"]
    with pytest.raises(LookupError, match=r"^task 'x' is not registered$"):
        app.tasks["x"]
    assert app.tasks.get("x") is None
    assert app.tasks.get("x", 5) == 5


def test_a_task_class_is_a_users_whatever_its_module_is_called(app: App) -> None:
    async def call(self: Any, *args: Any) -> Any:
        return await self.run(*args)

    members = {"__module__": "bulltask.registry.mail", "__call__": call, "queue": "mail"}
    task = app.task(base=type("Mail", (AsyncTask,), members), name="mail")(_async_function)
    assert task._options.queue == "mail"
    assert task._target is task


# --- shared tasks -----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("isolated_shared_tasks")
def test_a_shared_task_belongs_to_earlier_and_later_apps() -> None:
    before = App("before")

    @shared_task
    def work() -> None: ...

    # A new app reads the registry that the fixture has replaced.
    after = App("after")
    assert after.tasks[work.name] is work
    assert before.tasks[work.name] is work
    assert (work.name in after.tasks, len(after.tasks), list(after.tasks)) == (True, 1, [work.name])


@pytest.mark.usefixtures("isolated_shared_tasks")
def test_a_shared_task_is_sent_by_the_app_created_last() -> None:
    work = shared_task(name="work")(add)
    first, second = App("one", task_default_queue="1"), App("two", task_default_queue="2")
    assert work.s(1).job().queue == "2"
    current.set_current(first)
    assert work.s(1).job().queue == "1"
    assert second._config.default_queue == "2"


@pytest.mark.usefixtures("isolated_shared_tasks")
def test_sending_a_shared_task_without_an_app_raises_an_error() -> None:
    work = shared_task(add)
    assert work(1, 2) == 3
    with pytest.raises(ConfigError, match="this process has no App"):
        work.delay(1)
    app = App("short-lived")
    del app
    gc.collect()
    with pytest.raises(ConfigError, match="this process has no App"):
        work.delay(1)


@pytest.mark.usefixtures("isolated_shared_tasks")
def test_a_task_of_the_app_takes_precedence_over_a_shared_task() -> None:
    app = App("a")
    shared_one, app_task = shared_task(add), app.task(add)
    assert app.tasks[app_task.name] is app_task is not shared_one
    assert (len(app.tasks), list(app.tasks)) == (1, [app_task.name])


@pytest.mark.usefixtures("isolated_shared_tasks")
def test_a_task_may_not_have_the_name_of_a_shared_task() -> None:
    app = App("a")
    shared_task(name="work")(add)
    with pytest.raises(DuplicateTaskError):
        app.task(name="work")(source_location)


@pytest.mark.usefixtures("isolated_shared_tasks")
def test_shared_tasks_accept_the_options_of_tasks() -> None:
    @shared_task(bind=True, queue="mail", max_retries=None)
    async def work(self: Context) -> None: ...

    assert isinstance(work, AsyncTask)
    assert (work._bind, work._options.queue, work._options.attempts(CONFIG)) == (True, "mail", UNLIMITED_ATTEMPTS)


# --- direct calls -----------------------------------------------------------------------------------------------------


def test_calling_a_task_runs_it_in_this_process(app: App) -> None:
    task = app.task(add)
    assert task(1, y=2) == 3
    assert (vars(task)["__name__"], task.__doc__, task.__module__) == ("add", "Add two numbers.", __name__)
    assert inspect.signature(task) == inspect.signature(add)
    assert "<Task " in repr(task)


async def test_calling_an_async_task_returns_its_coroutine(app: App) -> None:
    @app.task
    async def work(x: int) -> int:
        await asyncio.sleep(0)
        return x

    assert isinstance(work, AsyncTask)
    assert work._is_async
    assert await work(5) == 5


def test_function_attributes_do_not_replace_task_attributes(recorder: RecordingSender) -> None:
    def work() -> None: ...

    work.__dict__.update(name="other", options="other", _sender=None)
    task = task_of(work, recorder)
    assert task.name == "t"
    task.delay()
    assert recorder.jobs[0].name == "t"


def test_a_bound_task_that_is_called_directly_gets_a_new_context(app: App) -> None:
    @app.task(bind=True, name="bound")
    def bound(self: Context, x: int, *, y: int = 0) -> Any:
        self.update_progress({"done": x})
        self.log("line")
        return self.request

    request = bound(1, y=2)
    assert (request.task, request.args, request.kwargs) == ("bound", (1,), {"y": 2})
    assert (request.id, request.called_directly, request.retries) == (None, True, 0)


async def test_a_bound_async_task_may_report_progress_when_called_directly(app: App) -> None:
    @app.task(bind=True, name="bound")
    async def bound(self: Context) -> str:
        await self.aupdate_progress(50)
        await self.alog("line")
        return repr(self)

    assert await bound() == "<Context of bound job (called directly)>"


def test_a_retry_in_a_direct_call_raises_its_reason(app: App) -> None:
    @app.task(bind=True, name="bound")
    def bound(self: Context, reason: Exception | None) -> None:
        raise self.retry(exc=reason, countdown=timedelta(seconds=2), max_retries=5)

    with pytest.raises(KeyError, match="reason"):
        bound(KeyError("reason"))
    with pytest.raises(Retry) as caught:
        bound(None)
    assert (caught.value.delay_ms, caught.value.max_retries, caught.value.exc) == (2_000, 5, None)


def test_progress_that_is_not_json_is_rejected_in_a_direct_call() -> None:
    with pytest.raises(EncodeError, match="progress of job"):
        Context(cast(Any, type("R", (), {"id": "1", "task": "add"}))).update_progress(float("nan"))


# --- sending ----------------------------------------------------------------------------------------------------------


def test_calls_without_options_use_the_settings_of_the_current_sender(recorder: RecordingSender) -> None:
    task = task_of(add, recorder)
    task.delay(1)
    recorder._config = Settings({"task_default_queue": "other", "task_max_retries": 5}, {}).freeze()
    task.delay(1)
    task.delay_many([(1,)])
    assert [(job.queue, job.options.attempts) for job in recorder.jobs] == [("default", 3), ("other", 6), ("other", 6)]


def test_all_send_methods_build_the_same_job(recorder: RecordingSender) -> None:
    task = task_of(add, recorder, queue="mail")
    handles = [
        task.delay(1, y=2),
        task.apply_async((1, 2)),
        task.apply_async([1], {"y": 2}),
        task.apply_async(kwargs={"x": 1, "y": 2}),
        *task.delay_many([(1, 2)]),
    ]
    assert recorder.data == [{"x": 1, "y": 2}] * 5
    assert {(job.name, job.queue) for job in recorder.jobs} == {("t", "mail")}
    assert [handle.id for handle in handles] == [job.id for job in recorder.jobs]
    assert len({job.id for job in recorder.jobs}) == 5


async def test_all_async_send_methods_build_the_same_job(recorder: RecordingSender) -> None:
    task = task_of(add, recorder)
    handles = [
        await task.adelay(1, y=2),
        await task.aapply_async((1, 2)),
        await task.aapply_async((), {"x": 1, "y": 2}),
    ]
    assert recorder.data == [{"x": 1, "y": 2}] * 3
    assert [handle.id for handle in handles] == [job.id for job in recorder.jobs]


def test_generated_ids_are_ordered_by_time(recorder: RecordingSender) -> None:
    task = task_of(add, recorder)
    task.delay_many([(n,) for n in range(1_000)])
    ids = [job.id for job in recorder.jobs]
    assert ids == sorted(ids)
    assert ids[0][14] == "7"


def test_invalid_calls_are_rejected_before_anything_is_sent(recorder: RecordingSender) -> None:
    task = task_of(add, recorder)
    with pytest.raises(TypeError, match=r"t\(\) missing a required argument: 'x'"):
        task.delay()
    with pytest.raises(EncodeError, match=r"the arguments of task t: \['x'\] is of type builtins.bytes"):
        task.delay(cast(Any, b""))
    with pytest.raises(PayloadTooLargeError, match="the arguments of task t"):
        task.delay(cast(Any, "x" * CONFIG.max_payload))
    with pytest.raises(TypeError, match=r"unknown option 'quueue'; did you mean 'queue'\?"):
        task.apply_async((1,), quueue="mail")  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        task.delay_many([(1,), (1, 2, 3)])
    assert recorder.jobs == []


def test_a_signature_is_a_call_to_be_sent_later(recorder: RecordingSender) -> None:
    call = task_of(add, recorder, priority=3).s(1, y=2)
    later = call.clone().set(countdown=5).set(queue="slow")
    assert recorder.jobs == []
    assert (call.job().options.delay_ms, call.job().queue) == (0, "default")
    assert (later.job().options.delay_ms, later.job().queue, later.job().options.priority) == (5_000, "slow", 3)
    assert later.job().id != later.job().id
    assert later.set(job_id="a").job().id == "a"
    with pytest.raises(TypeError, match="missing"):
        task_of(add, recorder).s().job()
    with pytest.raises(TypeError, match="unknown option"):
        call.set(nothing=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="has callbacks"):
        call.on_error(task_of(add, recorder).s()).job()


def test_a_task_of_another_app_is_sent_by_its_name(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    app.task(name="known")(add)
    recorder = RecordingSender()
    jobs = recorder.jobs
    monkeypatch.setattr(app, "_send", recorder._send)
    app.send_task("remote", ["a", 1], queue="mail", priority=2)
    app.send_task("remote", kwargs={"to": "a"})
    app.send_task("remote")
    app.send_task("known", (1,), {"y": 2})
    assert [json.loads(job.data) for job in jobs] == [["a", 1], {"to": "a"}, {}, {"x": 1, "y": 2}]
    assert (jobs[0].name, jobs[0].queue, jobs[0].options.priority) == ("remote", "mail", 2)
    with pytest.raises(TypeError, match="positional and keyword arguments cannot be combined"):
        app.send_task("remote", (1,), {"y": 2})
    with pytest.raises(TypeError, match="missing a required argument: 'x'"):
        app.send_task("known")
    assert len(jobs) == 4


# --- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"queue": "a:b"}, InvalidNameError, "queue name"),
        ({"queue": 5}, InvalidNameError, "queue name must be a non-empty string"),
        ({"priority": -1}, ConfigError, "priority"),
        ({"priority": 2**21}, ConfigError, "priority"),
        ({"priority": True}, ConfigError, "priority"),
        ({"priority": 1.0}, ConfigError, "priority"),
        ({"max_retries": -1}, ConfigError, "max_retries"),
        ({"max_retries": "3"}, ConfigError, "max_retries"),
        ({"max_retries": True}, ConfigError, "max_retries"),
        ({"expires": "soon"}, ConfigError, "expires"),
        ({"expires": -1}, ConfigError, "expires"),
        ({"retry_backoff": "fast"}, ConfigError, "retry_backoff"),
        ({"retry_backoff": -1}, ConfigError, "retry_backoff"),
        ({"retry_backoff": _async_function}, ConfigError, "retry_backoff must be a plain function"),
        ({"retry_backoff_max": "x"}, ConfigError, "retry_backoff_max"),
        ({"retry_jitter": 2}, ConfigError, "retry_jitter"),
        ({"retry_jitter": "much"}, ConfigError, "retry_jitter"),
        ({"default_retry_delay": -1}, ConfigError, "default_retry_delay"),
        ({"autoretry_for": ["KeyError"]}, ConfigError, "autoretry_for must be a tuple of exception classes"),
        ({"autoretry_for": KeyError}, ConfigError, "autoretry_for must be a tuple of exception classes"),
        ({"dont_autoretry_for": ("KeyError",)}, ConfigError, "dont_autoretry_for must be a tuple"),
        ({"result_expires": "day"}, ConfigError, "result_expires"),
        ({"result_failure_expires": -1}, ConfigError, "result_failure_expires"),
        ({"qeue": "mail"}, TypeError, "qeue"),
    ],
)
def test_an_invalid_option_is_rejected_when_the_task_is_defined(
    app: App, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        app.task(**options)
    assert len(app.tasks) == len(SHARED)


def new_job(task: dict[str, Any] | None = None, **call: Any) -> NewJob:
    return build_job("t", {}, TaskOptions(**(task or {})), CallOptions.of(call), CONFIG)


def test_a_job_has_the_apps_defaults() -> None:
    job = new_job()
    options = job.options
    assert (job.queue, job.name, job.data) == ("default", "t", b"{}")
    assert (options.attempts, options.delay_ms, options.priority, options.lifo) == (3, 0, 0, False)
    assert (options.keep_completed_ms, options.keep_failed_ms) == (86_400_000, None)
    assert (options.expires_in_ms, options.expires_ms, options.headers) == (None, None, "")
    assert options.backoff is not None
    assert options.backoff.to_wire() == {"type": "exponential", "delay": 1_000, "jitter": 0.2, "maxDelay": 3_600_000}


@pytest.mark.parametrize(
    ("options", "backoff"),
    [
        ({"retry_backoff": True}, ("exponential", 1_000, 0.2, 3_600_000)),
        ({"retry_backoff": 2.5}, ("exponential", 2_500, 0.2, 3_600_000)),
        ({"retry_backoff": timedelta(minutes=1)}, ("exponential", 60_000, 0.2, 3_600_000)),
        ({"retry_backoff": False}, ("fixed", 180_000, 0.0, 3_600_000)),
        ({"retry_backoff": False, "default_retry_delay": 5}, ("fixed", 5_000, 0.0, 3_600_000)),
        ({"retry_backoff": lambda attempts_made, exc: 1}, ("exponential", 1_000, 0.2, 3_600_000)),
        ({"retry_jitter": False}, ("exponential", 1_000, 0.0, 3_600_000)),
        ({"retry_jitter": True}, ("exponential", 1_000, 0.2, 3_600_000)),
        ({"retry_jitter": 0.5}, ("exponential", 1_000, 0.5, 3_600_000)),
        ({"retry_backoff_max": 10}, ("exponential", 1_000, 0.2, 10_000)),
    ],
)
def test_the_retry_options_of_a_task_are_stored_in_its_jobs(
    options: dict[str, Any], backoff: tuple[str, int, float, int]
) -> None:
    stored = new_job(options).options.backoff
    assert stored is not None
    assert (stored.type, stored.delay_ms, stored.jitter, stored.max_delay_ms) == backoff


def test_a_backoff_function_is_kept_with_the_task() -> None:
    def slow(attempts_made: int, exc: BaseException) -> float:
        return attempts_made

    assert TaskOptions(retry_backoff=slow).custom_backoff is slow
    assert TaskOptions(retry_backoff=5).custom_backoff is None


@pytest.mark.parametrize(
    ("task", "call", "attempts"),
    [
        ({}, {}, 3),
        ({"max_retries": 0}, {}, 1),
        ({"max_retries": 5}, {"max_retries": 1}, 2),
        ({"unlimited_retries": True}, {}, 2**31 - 1),
    ],
)
def test_retries_do_not_include_the_first_attempt(task: dict[str, Any], call: dict[str, Any], attempts: int) -> None:
    assert new_job(task, **call).options.attempts == attempts


def test_max_retries_none_retries_without_a_limit(app: App) -> None:
    assert app.task(max_retries=None)(add).s(1).job().options.attempts == UNLIMITED_ATTEMPTS


def test_call_options_override_task_options() -> None:
    task = {"queue": "slow", "priority": 5, "expires": 60}
    assert new_job(task).queue == "slow"
    assert new_job(task).options.priority == 5
    assert new_job(task).options.expires_in_ms == 60_000
    job = new_job(task, queue="fast", priority=0, expires=datetime(2027, 1, 1, tzinfo=UTC))
    assert (job.queue, job.options.priority) == ("fast", 0)
    assert (job.options.expires_in_ms, job.options.expires_ms) == (None, 1_798_761_600_000)


@pytest.mark.parametrize(
    ("call", "field", "value"),
    [
        ({"countdown": 1.5}, "delay_ms", 1_500),
        ({"countdown": timedelta(minutes=1)}, "delay_ms", 60_000),
        ({"eta": datetime(2027, 1, 1, tzinfo=UTC)}, "eta_ms", 1_798_761_600_000),
        ({"eta": datetime(2027, 1, 1)}, "eta_ms", 1_798_761_600_000),  # noqa: DTZ001 - naive is UTC, as in Celery
        ({"expires": 5}, "expires_in_ms", 5_000),
        ({"headers": {"trace": [1]}}, "headers", '{"trace":[1]}'),
        ({"headers": {}}, "headers", ""),
        ({"lifo": True}, "lifo", True),
    ],
)
def test_each_call_option_reaches_its_job(call: dict[str, Any], field: str, value: object) -> None:
    assert getattr(new_job(**call).options, field) == value


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        ({"countdown": -1}, ConfigError, "countdown"),
        ({"countdown": "5"}, ConfigError, "countdown"),
        ({"eta": 5}, ConfigError, "eta must be a datetime"),
        ({"expires": []}, ConfigError, "expires"),
        ({"priority": 2**21}, ConfigError, "priority"),
        ({"queue": "a:b"}, InvalidNameError, "queue name"),
        ({"job_id": "17"}, InvalidNameError, "a number"),
        ({"headers": {"x": b""}}, EncodeError, "headers of task t"),
        ({"max_retries": -1}, ConfigError, "max_retries"),
    ],
)
def test_an_invalid_call_option_is_rejected(call: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        new_job(**call)


def test_a_tasks_retention_overrides_the_apps() -> None:
    job = new_job({"result_expires": 0, "result_failure_expires": timedelta(days=1)})
    assert (job.options.keep_completed_ms, job.options.keep_failed_ms) == (0, 86_400_000)


# ---- tasks as Python objects -----------------------------------------------------------------------------------------

pickled_app = App("pickled", "redis://h")


@pickled_app.task(bind=True)
def pickled_task(self: Context, x: int, y: int = 1) -> int:
    return x + y


@pytest.mark.parametrize("module", [pickle, cloudpickle])
def test_unpickling_a_task_returns_the_registered_task(module: Any) -> None:
    set_current(pickled_app)
    assert module.loads(module.dumps(pickled_task)) is pickled_task
    assert copy.deepcopy(pickled_task) is pickled_task


def test_the_signature_of_a_bound_task_has_no_self() -> None:
    assert str(inspect.signature(pickled_task)) == "(x: 'int', y: 'int' = 1) -> 'int'"


def test_other_methods_of_celerys_control_raise_an_error_that_says_what_to_use(app: App) -> None:
    with pytest.raises(AttributeError, match=r"app.control has no 'enable_events': events are always on"):
        app.control.enable_events()  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match=r"app.control has no 'pool_growth': did you mean pool_grow\(\)\?"):
        app.control.pool_growth()  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match=r"inspect\(\) has no 'scheduled': delayed jobs are in Redis, not in"):
        app.inspect().scheduled()  # type: ignore[attr-defined]


def test_worker_main_needs_the_command(app: App) -> None:
    with pytest.raises(ValueError, match=r"argv must contain the command worker: app.worker_main\(\['worker', …\]\)"):
        app.worker_main(["-c", "4"])


def test_a_task_shows_its_rate_limit_outside_of_a_job(app: App) -> None:
    assert app.task(name="limited", rate_limit="10/m")(add).rate_limit == "10/m"
    assert app.task(name="unlimited")(add).rate_limit is None


def test_a_member_cannot_be_added_to_a_chord(app: App) -> None:
    @app.task(bind=True)
    def grow(self: Context) -> None:
        self.add_to_chord(grow.s())

    with pytest.raises(TypeError, match=r"fixed when it is sent; replace this member with a group: self.replace"):
        grow()


@pytest.mark.parametrize(
    ("handler", "alternative"),
    [
        ("before_start", "the signal task_prerun"),
        ("on_success", "link= of a call, or the signal task_success"),
        ("on_failure", "link_error= of a call, or the signal task_failure"),
        ("on_retry", "the signal task_retry"),
        ("after_return", "the signal task_postrun"),
    ],
)
def test_a_handler_as_an_option_leads_to_the_alternatives(handler: str, alternative: str) -> None:
    with pytest.raises(TypeError) as caught:
        TaskOptions.of({handler: print})
    assert str(caught.value) == (
        f"unknown task option {handler!r} (a Celery option): define a method {handler} in a task class and pass "
        f"the class as base=, or use {alternative}"
    )


@pytest.mark.parametrize(
    ("name", "known", "suggested"),
    [
        ("shop.nosuch", "shop.fetch", ""),
        ("shop.fetsh", "shop.fetch", "shop.fetch"),
        ("app.tasks.add", "app.task.add", "app.task.add"),
        ("fetsh", "fetch", "fetch"),
    ],
)
def test_a_name_is_not_suggested_only_because_its_module_is_the_same(name: str, known: str, suggested: str) -> None:
    assert nearest(name, [known]) == suggested
