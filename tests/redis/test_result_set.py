"""``ResultSet``: results of jobs that belong to no group."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from typing import Any, cast

import pytest

from bulltask import App, GroupResult, ResultSet, ResultTimeoutError, group
from bulltask.testing import InlineWorker, use_server
from bulltask.testing.worker import wait_until

pytestmark = pytest.mark.redis


@pytest.fixture
def app(broker_url: str) -> Iterator[App]:
    app = App("sets", "redis://unreachable.invalid:1")

    @app.task(name="double")
    def double(x: int) -> int:
        return 2 * x

    @app.task(name="fails", queue="other")
    def fails() -> None:
        raise ValueError("no")

    with use_server(app, broker_url):
        yield app


@pytest.mark.every_topology
def test_a_result_set_waits_for_all_of_its_members(app: App, worker: InlineWorker) -> None:
    double = app.tasks["double"]
    results = ResultSet([double.delay(1), double.delay(2)])
    assert (results.waiting(), results.ready(), results.completed_count()) == (True, False, 0)
    assert results.get(timeout=5) == results.join(timeout=5, interval=0.1) == [2, 4]
    assert (results.waiting(), results.ready(), results.completed_count()) == (False, True, 2)
    assert (results.successful(), results.failed()) == (True, False)
    results.add(app.tasks["fails"].delay())
    assert [type(value) for value in results.get(timeout=5, propagate=False)] == [int, int, ValueError]
    with pytest.raises(ValueError, match="no"):
        results.get(timeout=5)
    assert (results.successful(), results.failed(), results.ready()) == (False, True, True)


async def test_a_result_set_can_be_awaited(app: App, worker: InlineWorker) -> None:
    results = ResultSet([await app.tasks["double"].adelay(x) for x in range(3)])
    assert await results == [0, 2, 4]
    assert sorted([value async for value in results]) == [0, 2, 4]
    await results.aforget()
    handles: list[Any] = results.results
    assert {(await handle.asnapshot()).state.value for handle in handles} == {"unknown"}


async def test_a_member_that_was_not_awaited_is_refused(app: App) -> None:
    coroutine = app.tasks["double"].adelay(1)
    future = asyncio.ensure_future(asyncio.sleep(0))
    for wrong in (coroutine, future):
        members: Any = [wrong]
        for make in cast(Any, (ResultSet, partial(GroupResult, "group"), ResultSet().update)):
            with pytest.raises(TypeError, match=r"await .* first"):
                make(members)
    coroutine.close()
    await future


def test_members_are_added_once_and_removed_by_handle_or_id(app: App) -> None:
    first, second, third = (app.tasks["double"].delay(x) for x in range(3))
    results: ResultSet[Any] = ResultSet()
    assert (len(results), results.get(), results.ready(), results.successful()) == (0, [], True, True)
    results.update([first, second, first])
    results.add(app.result(first.id))
    assert results.results == [first, second]
    results.remove(first)
    results.update(handle for handle in (first, third))
    results.remove(third.id)
    results.discard("unknown")
    results.discard(third)
    assert list(results) == results[:] == [second, first]
    assert results == ResultSet([second, first])
    with pytest.raises(KeyError):
        results.remove(third)
    results.clear()
    assert len(results) == 0


def test_a_result_set_may_contain_groups_and_results_of_several_apps(
    app: App, worker: InlineWorker, broker_url: str
) -> None:
    other = App("other", broker_url, prefix="elsewhere", set_as_current=False)
    double, named = app.tasks["double"], other.task(name="double")(lambda x: 3 * x)
    handle = double.delay(1)
    foreign = named.apply_async((1,), job_id=handle.id)  # the same address, under another prefix
    results: ResultSet[Any] = ResultSet([handle, group(double.s(2), double.s(3)).delay()])
    assert results.get(timeout=5) == [2, [4, 6]]
    assert results.completed_count() == 3
    both = ResultSet([handle, foreign])
    assert (both.completed_count(), both.waiting()) == (1, True)


def test_iterate_yields_values_as_the_members_complete_and_times_out(app: App, worker: InlineWorker) -> None:
    double = app.tasks["double"]
    results = ResultSet([double.apply_async((1,), countdown=3_600), double.delay(2)])
    values = results.iterate(timeout=1)
    worker.run_jobs()
    assert next(values) == 4
    with pytest.raises(ResultTimeoutError):
        next(values)
    assert results.completed_count() == 1


def test_a_result_set_revokes_and_forgets_its_members(app: App, worker: InlineWorker) -> None:
    double = app.tasks["double"]
    results = ResultSet([double.delay(1), double.apply_async((2,), countdown=60)])
    worker.run_jobs()
    assert results.revoke() == ["finished", "revoked"]
    wait_until(results.ready, 10, "both to finish")
    assert (results.successful(), results.failed()) == (False, False)
    results.forget()
    handles: list[Any] = results.results
    assert [handle.state.value for handle in handles] == ["unknown"] * 2
