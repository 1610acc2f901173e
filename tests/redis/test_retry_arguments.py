"""``self.retry()`` with Celery's arguments: other arguments, another queue, ``throw=False``, and its exceptions."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest

from bulltask import App, Context, Task, chain
from bulltask.errors import BrokerError, Ignore, MaxRetriesExceededError, Retry
from bulltask.testing import InlineWorker, use_server

pytestmark = pytest.mark.redis


@pytest.fixture
def app(broker_url: str) -> Iterator[App]:
    app = App("retries", "redis://unreachable.invalid:1", task_max_retries=0)
    with use_server(app, broker_url):
        yield app


@pytest.fixture(params=["context", "task class"])
def base(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Options of a bound task whose ``self`` is a context, or the task."""

    class Base(Task):
        pass

    return {"bind": True} if request.param == "context" else {"bind": True, "base": Base}


def test_the_exceptions_of_self_are_celerys(app: App, worker: InlineWorker, base: dict[str, Any]) -> None:
    @app.task(name="idiom", **base)
    def idiom(self: Any, x: int) -> list[Any]:
        try:
            int("no number")
        except ValueError:
            try:
                self.retry(countdown=0, max_retries=1)
            except self.MaxRetriesExceededError as error:
                return [self.request.retries, error.task_args, error.task_kwargs]
        raise AssertionError

    assert idiom.delay(7).get(timeout=5) == [1, [], {"x": 7}]
    assert idiom.MaxRetriesExceededError is Context.MaxRetriesExceededError is MaxRetriesExceededError
    assert idiom.OperationalError is BrokerError


def test_a_task_can_catch_the_exception_of_a_retry_that_is_not_left(
    app: App, worker: InlineWorker, base: dict[str, Any]
) -> None:
    @app.task(name="catches", **base)
    def catches(self: Any) -> str:
        try:
            self.retry(exc=ConnectionError("gone"), countdown=0, max_retries=1)
        except ConnectionError as error:
            return f"{error} after {self.request.retries}"
        raise AssertionError

    assert catches.delay().get(timeout=5) == "gone after 1"


@pytest.mark.parametrize("given", [ConnectionError("gone"), ConnectionError])
def test_an_exception_of_a_retry_that_is_not_left_is_not_retried_for_another_reason(
    broker_url: str, given: Any
) -> None:
    app, runs = App("three", broker_url), list[int]()  # a ConnectionError is otherwise retried twice

    @app.task(name="gives_up", bind=True)
    def gives_up(self: Context) -> None:
        runs.append(self.request.retries)
        self.retry(exc=given, countdown=0, max_retries=1)

    with use_server(app, broker_url), InlineWorker(app) as worker:
        result = gives_up.delay()
        worker.run_jobs(propagate=False)
        with pytest.raises(ConnectionError):
            result.get()
        assert runs == [0, 1]
        assert "bulltask/registry" not in (result.traceback or "")


@pytest.mark.parametrize(
    ("call", "changed", "expected"),
    [
        (((1, 2), {}), {"args": (5, 6)}, [5, 6, 3]),
        (((1, 2), {}), {"args": [5], "kwargs": {"b": 6, "c": 7}}, [5, 6, 7]),
        (((1,), {"b": 2}), {"args": [5]}, [5, 2, 3]),
        (((1, 2), {}), {"kwargs": {"b": 6}}, [1, 6, 3]),
        (((1, 2), {"c": 9}), {"args": (4,)}, [4, 2, 9]),
        (((1, 2), {}), {"args": (), "kwargs": {"a": 8, "b": 9}}, [8, 9, 3]),
    ],
)
def test_a_retry_may_have_other_arguments(
    app: App, worker: InlineWorker, base: dict[str, Any], call: Any, changed: Any, expected: list[int]
) -> None:
    @app.task(name="changes", **base)
    def changes(self: Any, a: int, b: int, c: int = 3) -> list[Any]:
        if not self.request.retries:
            raise self.retry(countdown=0, **changed)
        return [a, b, c]

    assert changes.apply_async(*call).get(timeout=5) == expected
    assert changes.apply(*call).get() == expected


def test_other_arguments_keep_celerys_positions_and_the_types_of_hints(app: App, worker: InlineWorker) -> None:
    moment = datetime(2026, 11, 29, 2, 30, tzinfo=UTC)

    def work(self: Context, when: datetime, *rest: int, **more: int) -> list[Any]:
        if not self.request.retries:
            self.retry((moment, 1, 2), {"x": 3}, countdown=0)
        return [when == moment, rest, more]

    typed: Any = cast(Any, app.task)(work, name="typed", bind=True)
    assert typed.delay(moment - timedelta(days=1), 9).get(timeout=5) == [True, [1, 2], {"x": 3}]


def test_other_arguments_replace_the_result_of_the_previous_step(app: App, worker: InlineWorker) -> None:
    @app.task(name="one")
    def one() -> int:
        return 1

    @app.task(name="next", bind=True)
    def following(self: Context, previous: int, y: int) -> list[int]:
        if not self.request.retries:
            self.retry(args=(previous + 10, y), countdown=0)
        return [previous, y]

    assert chain(one.s(), following.s(2)).delay().get(timeout=5) == [11, 2]
    assert chain(one.s(), following.s(2)).apply().get() == [11, 2]


def test_arguments_that_do_not_match_fail_the_attempt_with_a_type_error(app: App, worker: InlineWorker) -> None:
    @app.task(name="wrong", bind=True)
    def wrong(self: Context, a: int) -> None:
        self.retry(args=(1, 2, 3), countdown=0)

    with pytest.raises(TypeError, match="too many positional arguments"):
        wrong.delay(1).get(timeout=5)


@pytest.mark.parametrize("ends", ["returns", "raises", "ignores"])
def test_without_throw_the_task_continues_and_is_retried_when_it_ends(
    app: App, worker: InlineWorker, base: dict[str, Any], ends: str
) -> None:
    seen: list[Any] = []

    @app.task(name="continues", **base)
    def continues(self: Any) -> str:
        if self.request.retries:
            return "second"
        seen.append(self.retry(countdown=0, throw=False))
        if ends == "raises":
            raise KeyError
        if ends == "ignores":
            raise Ignore
        return "first"

    assert continues.delay().get(timeout=5) == (None if ends == "ignores" else "second")
    assert [type(one) for one in seen] == [Retry]


def test_an_option_without_effect_causes_a_warning_and_not_an_error_in_the_error_handler(
    app: App, worker: InlineWorker
) -> None:
    @app.task(name="warns", bind=True)
    def warns(self: Any) -> int:
        if not self.request.retries:
            self.retry(countdown=0, serializer="json")
        return int(self.request.retries)

    with pytest.warns(UserWarning, match="serializer"):
        assert warns.delay().get(timeout=5) == 1


# ---- another queue ---------------------------------------------------------------------------------------------------


@pytest.fixture(params=["sync", "async"])
def moves(request: pytest.FixtureRequest, app: App) -> Any:
    """A task that moves its job to the queue ``slow``, and from there to ``fast`` if it is asked to."""

    def work(self: Context, route: list[str], runs: int, *, fails: bool = False) -> list[Any]:
        here = self.request.retries
        if here < len(route):
            self.retry(args=(route, runs + 1), queue=route[here], countdown=0)
        if fails:
            raise KeyError("moved")
        return [self.request.queue, here, runs, self.request.id, self.request.headers]

    async def awork(self: Context, route: list[str], runs: int, *, fails: bool = False) -> list[Any]:
        await asyncio.sleep(0)
        return work(self, route, runs, fails=fails)

    return app.task(name="moves", bind=True)(work if request.param == "sync" else awork)


def test_a_retry_in_another_queue_moves_the_job(app: App, worker: InlineWorker, moves: Any) -> None:
    result = moves.apply_async((["slow"], 0), headers={"a": 1})
    assert result.get(timeout=5) == ["slow", 1, 1, result.id, {"a": 1}]
    assert [app.result(result.id, queue).state for queue in ("default", "slow")] == ["completed", "completed"]


def test_a_moved_job_can_return_to_its_queue_and_its_retries_are_counted(
    app: App, worker: InlineWorker, moves: Any
) -> None:
    result = moves.delay(["slow", "default", "slow"], 0)
    queue, retries, runs, job_id, _ = result.get(timeout=5)
    assert (queue, retries, runs, job_id != result.id) == ("slow", 3, 3, True)
    with pytest.raises(MaxRetriesExceededError, match="attempt 4 of 4"):
        moves.delay(["slow", "default"] * 5, 0).get(timeout=5)


@pytest.mark.parametrize("of_call", [{}, {"expires": timedelta(hours=1)}])
@pytest.mark.parametrize("of_retry", [{}, {"expires": timedelta(hours=2)}])
def test_a_moved_job_expires_at_the_time_of_the_retry_or_else_of_the_call(
    app: App, worker: InlineWorker, of_call: dict[str, Any], of_retry: dict[str, Any]
) -> None:
    @app.task(name="expires", bind=True)
    def expires(self: Context) -> str | None:
        if not self.request.retries:
            self.retry(queue="slow", countdown=0, **of_retry)
        return self.request.expires

    before, expired = datetime.now(UTC), expires.apply_async((), **of_call).get(timeout=5)
    hours = (of_retry or of_call).get("expires")
    if hours is None:
        assert expired is None
    else:
        assert expired is not None
        assert abs(datetime.fromisoformat(expired) - before - hours) < timedelta(minutes=1)


def test_a_moved_job_that_fails_fails_the_job_with_its_exception(app: App, worker: InlineWorker, moves: Any) -> None:
    with pytest.raises(KeyError, match="moved"):
        moves.apply_async((["slow"], 0), {"fails": True}).get(timeout=5)


def test_a_retry_in_another_queue_works_in_eager_mode(app: App, moves: Any) -> None:
    assert moves.apply((["slow"], 0)).get()[:3] == ["slow", 1, 1]
