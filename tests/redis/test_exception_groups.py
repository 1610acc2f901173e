"""Exception groups: their interrupts and retries, and what ``get()`` raises."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from bulltask import App, Context, PermanentError
from bulltask.errors import ConfigError, Ignore, TaskError
from bulltask.testing import InlineWorker, use_server

pytestmark = pytest.mark.redis


@pytest.fixture
def app(broker_url: str) -> Iterator[App]:
    app = App("groups", "redis://unreachable.invalid:1")
    with use_server(app, broker_url):
        yield app


class FlakyError(Exception):
    """Only the task's options say that it is transient."""


async def fail(exc: BaseException) -> None:
    raise exc


async def in_group(*errors: BaseException) -> None:
    async with asyncio.TaskGroup() as group:
        for error in errors:
            group.create_task(fail(error))


def test_a_retry_in_a_task_group_retries_the_job(app: App, worker: InlineWorker) -> None:
    @app.task(bind=True, max_retries=2)
    async def fetch(self: Context) -> int:
        async def part() -> None:
            if self.request.retries < 2:
                self.retry(countdown=0)

        async with asyncio.TaskGroup() as outer:
            outer.create_task(asyncio.sleep(60) if self.request.retries < 2 else asyncio.sleep(0))
            outer.create_task(part())
        return self.request.retries

    assert fetch.delay().get(timeout=5) == 2


def test_an_ignore_in_a_nested_group_ends_the_job(app: App, worker: InlineWorker) -> None:
    @app.task
    async def stop() -> None:
        raise BaseExceptionGroup("outer", [ValueError(), BaseExceptionGroup("inner", [Ignore()])])

    assert stop.delay().get(timeout=5) is None


@pytest.mark.parametrize(
    ("errors", "runs"),
    [
        ([FlakyError()], 3),
        ([FlakyError(), FlakyError()], 3),
        ([FlakyError(), ConnectionError()], 3),
        ([FlakyError(), ValueError()], 1),
        ([FlakyError(), PermanentError("never")], 1),
        ([FlakyError(), KeyError("not this one")], 1),
        ([ExceptionGroup("inner", [FlakyError()])], 3),
    ],
    ids=str,
)
def test_a_group_is_retried_if_each_of_its_exceptions_is(
    app: App, worker: InlineWorker, errors: list[Exception], runs: int
) -> None:
    started: list[int] = []

    @app.task(autoretry_for=(FlakyError,), dont_autoretry_for=(KeyError,), max_retries=2, default_retry_delay=1)
    async def work() -> None:
        started.append(1)
        await in_group(*errors)

    result = work.delay()
    worker.run_for(60, propagate=False)
    assert result.state == "failed"
    assert len(started) == runs


def test_get_raises_the_group_with_its_exceptions(app: App, worker: InlineWorker) -> None:
    class LocalError(Exception):
        pass

    @app.task
    async def work() -> None:
        inner = ExceptionGroup("inner", [KeyError("key"), PermanentError("never")])
        await in_group(ValueError("wrong"), OSError(2, "missing"), LocalError("unknown"), inner)

    seen: dict[str, Any] = {}
    result = work.delay()
    worker.run_jobs(propagate=False)
    try:
        result.get(timeout=5)
    except* ValueError as group:
        seen["value"] = [str(each) for each in group.exceptions]
    except* OSError as group:
        seen["os"] = [each.args for each in group.exceptions]
    except* KeyError as group:
        (inner,) = group.exceptions
        assert isinstance(inner, ExceptionGroup)
        seen[inner.message] = [each.args for each in inner.exceptions]
    except* TaskError as group:
        seen["unknown"] = [str(each) for each in group.exceptions]
    except* PermanentError as group:
        seen["never"] = len(group.exceptions)
    assert seen.pop("unknown")[0].endswith("unknown")
    assert seen == {"value": ["wrong"], "os": [(2, "missing")], "inner": [("key",)], "never": 1}


def test_a_group_that_is_too_large_to_be_stored_is_a_task_error(app: App, worker: InlineWorker) -> None:
    @app.task
    async def work() -> None:
        await in_group(*(ValueError("x" * 1_000) for _ in range(50)))

    result = work.delay()
    worker.run_jobs(propagate=False)
    with pytest.raises(TaskError, match="50 sub-exceptions"):
        result.get(timeout=5)


def test_generator_functions_are_refused_as_tasks(app: App) -> None:
    async def stream() -> Any:
        yield 1

    def rows() -> Any:
        yield 1

    for function in (stream, rows):
        with pytest.raises(ConfigError, match="is a generator function"):
            app.task(function)
