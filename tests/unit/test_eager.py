"""Eager mode: jobs run in the process that sends them, without Redis, and as they would run in a worker."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import dataclass
from datetime import date
from typing import Any

import pytest

from bulltask import App, Context, JobState, PermanentError, chain, chord, group
from bulltask.errors import BulltaskError, EncodeError, InvalidJobError, JobNotFoundError, TaskError
from bulltask.events import JobCompleted, JobFailed, JobRetried
from bulltask.registry.results import GroupResult

NOWHERE = "redis://nowhere.invalid:1"


@pytest.fixture
def app() -> App:
    return App("tested", NOWHERE, task_always_eager=True)


@pytest.fixture
def normal_app() -> App:
    """An app that is not in eager mode."""
    return App("tested", NOWHERE)


# ---- apply() ---------------------------------------------------------------------------------------------------------


def test_apply_runs_a_task_in_this_process_without_a_server(normal_app: App) -> None:
    @normal_app.task
    def where(x: int, *, y: int = 0) -> list[Any]:
        return [x, y, threading.current_thread().name]

    result = where.apply((1,), {"y": 2})
    assert result.get() == [1, 2, "MainThread"]
    assert (result.state, result.successful(), result.ready()) == (JobState.COMPLETED, True, True)
    assert len(result.id) == 36


def test_apply_retries_without_waiting_and_counts_the_attempts(normal_app: App) -> None:
    seen = []

    @normal_app.task(bind=True, max_retries=3, default_retry_delay=3600)
    def flaky(self: Context) -> int:
        seen.append(self.request.retries)
        if self.request.retries < 2:
            raise ConnectionError("refused")
        if self.request.retries == 2:
            self.retry(countdown=86_400)
        return self.request.attempts_started

    began = time.monotonic()
    result = flaky.apply()
    assert (result.get(), seen) == (4, [0, 1, 2, 3])
    assert time.monotonic() - began < 5
    assert result.snapshot().attempts_made == 4


def test_apply_stores_the_exception_of_the_last_attempt(normal_app: App) -> None:
    @normal_app.task(max_retries=1)
    def fail() -> None:
        raise ConnectionError("refused")

    result = fail.apply()
    assert (result.state, result.failed()) == (JobState.FAILED, True)
    assert "ConnectionError: refused" in (result.traceback or "")
    assert len(result.snapshot().stacktrace) == 2
    with pytest.raises(ConnectionError, match="refused"):
        result.get()


def test_apply_raises_the_exception_itself_if_throw_is_true(normal_app: App) -> None:
    error = PermanentError("no such order")

    @normal_app.task
    def fail() -> None:
        raise error

    with pytest.raises(PermanentError) as raised:
        fail.apply(throw=True)
    assert raised.value is error


def test_arguments_and_results_are_json_as_in_redis(normal_app: App) -> None:
    received: list[Any] = []

    @normal_app.task
    def echo(value: Any) -> Any:
        received.append(value)
        return (value, value)

    assert echo.apply(((1, 2),)).get() == [[1, 2], [1, 2]]
    assert received == [[1, 2]]
    with pytest.raises(EncodeError):
        echo.apply((object(),))
    with pytest.raises(TypeError, match=r"echo\(\) missing a required argument"):
        echo.apply()


def test_a_result_that_is_not_json_fails_the_job(normal_app: App) -> None:
    @normal_app.task
    def wrong() -> Any:
        return object()

    with pytest.raises(TaskError, match="return value of task"):
        wrong.apply().get()


@dataclass
class Point:
    x: int
    on: date


def test_type_hints_convert_arguments_and_results(normal_app: App) -> None:
    @normal_app.task
    def move(point: Point) -> Point:
        return Point(point.x + 1, point.on)

    assert move.apply((Point(1, date(2026, 1, 2)),)).get() == Point(2, date(2026, 1, 2))


def test_a_bound_task_sees_its_request_and_stores_its_progress(normal_app: App) -> None:
    @normal_app.task(bind=True, name="report")
    def report(self: Context, x: int) -> Any:
        self.update_progress({"x": x})
        self.log("a line")
        request = self.request
        return [request.task, request.queue, request.kwargs, request.headers, request.called_directly]

    result = report.apply((1,), headers={"who": "ann"}, queue="mail", job_id="mine")
    assert result.get() == ["report", "mail", {"x": 1}, {"who": "ann"}, False]
    assert (result.progress, result.id) == ({"x": 1}, "mine")


def test_an_attempt_can_be_rescheduled_released_and_continued_with_other_data(normal_app: App) -> None:
    @normal_app.task(bind=True)
    def step(self: Context, number: int) -> int:
        if number < 3:
            self.update_data({"number": number + 1})
            if number == 1:
                self.move_to_delayed(3600)
            self.move_to_wait()
        return number

    assert step.apply((1,)).get() == 3


def test_a_task_that_never_finishes_is_reported(normal_app: App) -> None:
    @normal_app.task(bind=True)
    def poll(self: Context) -> None:
        self.move_to_delayed(10)

    with pytest.raises(BulltaskError, match="has not finished after 1,000 attempts; eager mode does not wait"):
        poll.apply()


async def test_an_async_task_runs_in_sync_and_async_code(normal_app: App) -> None:
    @normal_app.task
    async def where() -> bool:
        await asyncio.sleep(0)
        return asyncio.get_running_loop() is loop

    loop = asyncio.get_running_loop()
    assert where.apply().get() is False  # it cannot run on a loop that is waiting for it
    assert await asyncio.to_thread(lambda: where.apply().get()) is False


def test_listeners_receive_the_events(normal_app: App) -> None:
    received: list[Any] = []
    for kind in (JobCompleted, JobRetried, JobFailed):
        normal_app.on(kind, received.append)

    @normal_app.task(max_retries=1)
    def fail() -> None:
        raise ConnectionError("refused")

    fail.apply()
    assert [type(event) for event in received] == [JobRetried, JobFailed]


# ---- task_always_eager -----------------------------------------------------------------------------------------------


def test_every_way_of_sending_runs_the_job(app: App) -> None:
    @app.task(name="double")
    def double(x: int) -> int:
        return 2 * x

    assert double.delay(1).get() == 2
    assert double.apply_async((2,), countdown=3600).get(timeout=1) == 4
    assert [result.get() for result in double.delay_many([(3,), (4,)])] == [6, 8]
    assert [result.get() for result in app.send_many([double.s(5)])] == [10]
    sent = app.send_task("double", (6,))
    assert app.result(sent.id, sent.queue).get() == 12


async def test_async_sending_runs_async_tasks_on_the_same_loop(app: App) -> None:
    @app.task
    async def where() -> bool:
        return asyncio.get_running_loop() is loop

    loop = asyncio.get_running_loop()
    assert await (await where.adelay()) is True
    assert (await where.aapply_async()).state is JobState.COMPLETED


def test_a_failed_job_raises_only_with_the_setting(app: App) -> None:
    def fail() -> None:
        raise LookupError("no such order")

    assert app.task(name="fail")(fail).delay().failed()
    strict = App("strict", NOWHERE, task_always_eager=True, task_eager_propagates=True)
    task = strict.task(name="fail")(fail)
    with pytest.raises(LookupError, match="no such order"):
        task.delay()
    assert task.apply(throw=False).failed()


def test_jobs_that_a_task_sends_run_before_it_continues(app: App) -> None:
    order = []

    @app.task
    def inner() -> str:
        order.append("inner")
        return "done"

    @app.task
    def outer() -> str:
        result = inner.delay()
        order.append("outer")
        return result.get()

    assert outer.delay().get() == "done"
    assert order == ["inner", "outer"]


def test_a_job_id_runs_once(app: App) -> None:
    ran = []

    @app.task
    def note() -> int:
        ran.append(1)
        return len(ran)

    assert [note.apply_async(job_id="once").get() for _ in range(2)] == [1, 1]


def test_a_task_that_is_not_registered_fails(app: App) -> None:
    with pytest.raises(InvalidJobError, match="'unknown' is not registered in app 'tested'"):
        app.send_task("unknown").get()


def test_a_result_of_another_process_is_not_found(app: App) -> None:
    assert app.result("other").state is JobState.UNKNOWN
    with pytest.raises(JobNotFoundError, match="has not run in this process"):
        app.result("other").get()


def test_the_environment_can_switch_eager_mode_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BULLTASK_TASK_ALWAYS_EAGER", "true")
    app = App("tested", NOWHERE)
    assert app.task(name="one")(lambda: 1).delay().get() == 1


# ---- canvas ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def calls() -> list[Any]:
    return []


@pytest.fixture
def tasks(app: App, calls: list[Any]) -> Any:
    class Tasks:
        @staticmethod
        @app.task(name="add")
        def add(x: int, y: int) -> int:
            return x + y

        @staticmethod
        @app.task(name="total")
        def total(values: list[int]) -> int:
            return sum(values)

        @staticmethod
        @app.task(name="fail")
        def fail(*_: Any) -> None:
            raise LookupError("no such order")

        @staticmethod
        @app.task(name="note")
        def note(*args: Any) -> None:
            calls.append(args)

    return Tasks


def test_chains_groups_and_chords_run_eagerly(tasks: Any) -> None:
    add, total = tasks.add, tasks.total
    assert chain(add.s(1, 2), add.s(3), add.s(4)).delay().get() == 10
    assert group(add.s(1, 2), add.s(3, 4)).delay().get() == [3, 7]
    assert chord([add.s(n, n) for n in range(10)], total.s()).delay().get() == 90
    assert (add.s(1, 2) | group(add.s(10), add.s(20)) | total.s()).delay().get() == 36


async def test_a_canvas_runs_eagerly_in_async_code(tasks: Any) -> None:
    assert await (await (tasks.add.s(1, 2) | tasks.add.s(3)).adelay()) == 6


def test_the_steps_after_a_failed_one_fail_without_running(tasks: Any, calls: list[Any]) -> None:
    result = (tasks.fail.s() | tasks.note.s()).delay()
    with pytest.raises(LookupError, match="no such order"):
        result.get()
    assert calls == []


def test_a_task_can_replace_itself_with_a_canvas(app: App, tasks: Any) -> None:
    @app.task(bind=True)
    def sum_of_squares(self: Context, n: int) -> int:
        self.replace(chord([tasks.add.s(i * i, 0) for i in range(n)], tasks.total.s()))

    @app.task(bind=True)
    async def afail(self: Context) -> None:
        await self.areplace(tasks.fail.s())

    assert (sum_of_squares.s(4) | tasks.add.s(100)).delay().get() == 114
    with pytest.raises(LookupError, match="no such order"):
        afail.delay().get()


def test_a_group_can_be_saved_and_restored(app: App, tasks: Any) -> None:
    results = group(tasks.add.s(n, n) for n in range(3)).delay()
    results.save()
    restored = GroupResult.restore(results.id, app)
    assert restored is not None
    assert restored.get() == [0, 2, 4]
    restored.delete()
    assert GroupResult.restore(results.id, app) is None


def test_a_handle_knows_the_call_and_the_end_of_its_job(tasks: Any) -> None:
    handle = tasks.add.delay(1, 2)
    assert (handle.name, handle.args, handle.kwargs) == (tasks.add.name, [], {"x": 1, "y": 2})
    assert handle.date_done is not None


def test_callbacks_run_eagerly(tasks: Any, calls: list[Any]) -> None:
    tasks.add.apply_async((1, 2), link=tasks.note.s("sum"))
    assert calls == [(3, "sum")]
    failed = tasks.fail.apply_async((), link_error=tasks.note.s())
    [(request, reason, _trace)] = calls[1:]
    assert (request["id"], reason) == (failed.id, "no such order")


def test_every_canvas_can_be_applied_without_eager_mode(normal_app: App) -> None:
    @normal_app.task
    def add(x: int, y: int) -> int:
        return x + y

    assert add.s(1).apply((2,)).get() == 3
    assert (add.s(1, 2) | add.s(3)).apply().get() == 6
    assert group(add.s(n, n) for n in range(3)).apply().get() == [0, 2, 4]
    with pytest.raises(TypeError, match="missing a required argument"):
        normal_app.signature(add.name, (1,)).apply()


# ---- switched on and off ---------------------------------------------------------------------------------------------


def test_eager_mode_can_be_switched_on_and_off_after_the_app_was_used(normal_app: App) -> None:
    @normal_app.task
    def fail() -> None:
        raise ValueError("no")

    assert normal_app._broker.eager is None  # used
    normal_app.conf.task_always_eager = True
    assert fail.delay().failed()
    normal_app.conf.update(task_eager_propagates=True)
    with pytest.raises(ValueError, match="no"):
        fail.delay()
    normal_app.conf.task_always_eager = False
    assert normal_app._broker.eager is None


def test_the_option_throw_of_a_call_is_accepted_as_in_celery(app: App) -> None:
    @app.task
    def fail() -> None:
        raise ValueError("no")

    with pytest.warns(UserWarning, match="task_eager_propagates raises the errors"):
        assert fail.apply_async(throw=True).failed()  # type: ignore[call-arg] # not in new code
    assert fail.apply_async(throw=False).failed()  # type: ignore[call-arg] # not in new code


def test_a_result_equals_its_id_as_in_celery(app: App) -> None:
    @app.task
    def work() -> None: ...

    result, other = work.delay(), work.delay()
    assert result == result.id
    assert result.id == result
    assert other.id != result
    assert result != other
