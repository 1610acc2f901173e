"""A worker closes the database connections of its tasks as Django closes those of its requests."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.core.cache import caches
from django.db import connection, connections, transaction
from django.test import override_settings

from bulltask import App, Middleware
from bulltask.observe.hooks import DjangoConnections
from bulltask.registry.task import close_connections
from bulltask.testing import InlineWorker

pytestmark = pytest.mark.redis


@pytest.fixture(autouse=True)
def in_worker(app: App) -> None:
    """What a worker does if the environment names Django's settings."""
    app._middleware.add_outermost(DjangoConnections())


def lose(opened: Any) -> None:
    """Do what happens if a statement fails because the connection is lost."""
    opened.close()
    connection.errors_occurred = True


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Django's other databases report of a lost connection; that of a file is always usable."""
    monkeypatch.setattr(type(connections["default"]), "is_usable", lambda self: False)


def query() -> Any:
    """Open the thread's connection, and return it."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1")
    return connection.connection


def test_a_connection_is_closed_after_the_task(app: App, worker: InlineWorker) -> None:
    seen = list[Any]()
    app.task(name="query")(lambda: seen.append(query()))
    app.send_task("query")
    worker.run_jobs()
    assert (len(seen), connection.connection) == (1, None)


def test_a_broken_connection_is_replaced_before_the_next_task(
    app: App, worker: InlineWorker, broken: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(connection.settings_dict, "CONN_MAX_AGE", None)
    first = query()
    lose(first)
    seen = list[Any]()
    app.task(name="query")(lambda: seen.append(query()))
    app.send_task("query")
    worker.run_jobs()
    assert seen != [first]
    assert connection.connection is seen[0], "kept, because CONN_MAX_AGE is unlimited"


def test_a_connection_in_a_transaction_of_a_test_is_not_closed(app: App, worker: InlineWorker) -> None:
    app.task(name="query")(lambda: id(query()))
    with transaction.atomic():
        opened = query()
        result = app.send_task("query")
        worker.run_jobs()
        assert (result.get(), connection.connection) == (id(opened), opened)


def test_async_tasks_share_a_connection_which_is_closed_when_no_other_runs(app: App, worker: InlineWorker) -> None:
    seen = list[Any]()

    @app.task(name="query")
    async def task() -> None:
        seen.append(await sync_to_async(query)())

    @app.task(name="ask")
    async def ask() -> bool:
        return await sync_to_async(lambda: connection.connection is None)()

    app.send_task("query")
    result = app.send_task("ask")
    worker.run_jobs()
    assert (len(seen), result.get()) == (1, True)


async def test_only_broken_connections_are_closed_while_other_async_tasks_run(broken: None) -> None:
    hooks, request = DjangoConnections(), None
    await hooks.abefore_run(request)  # type: ignore[arg-type]
    opened = await sync_to_async(query)()
    await hooks.abefore_run(request)  # type: ignore[arg-type]
    assert await sync_to_async(lambda: connection.connection)() is opened
    await sync_to_async(lose)(opened)
    await hooks.aafter_run(request, None, None)  # type: ignore[arg-type]
    assert await sync_to_async(lambda: connection.connection)() is None
    opened = await sync_to_async(query)()
    await hooks.aafter_run(request, None, None)  # type: ignore[arg-type]
    assert await sync_to_async(lambda: connection.connection)() is None


def test_queries_that_debug_records_do_not_pile_up(app: App, worker: InlineWorker) -> None:
    app.task(name="query")(lambda: (query(), len(connection.queries))[1])
    with override_settings(DEBUG=True):
        results = [app.send_task("query"), app.send_task("query")]
        worker.run_jobs()
    assert [result.get() for result in results] == [1, 1]


def test_caches_are_closed(app: App, worker: InlineWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = list[str]()
    monkeypatch.setattr(type(caches["default"]), "close", lambda self: closed.append("closed"))
    app.task(name="read")(lambda: caches["default"].get("key"))
    app.send_task("read")
    worker.run_jobs()
    assert closed == ["closed"]


def test_other_middleware_may_use_the_connection(app: App, worker: InlineWorker) -> None:
    opened = list[bool]()

    class Audit(Middleware):
        def after_run(self, request: Any, result: Any, exception: BaseException | None) -> None:
            query()
            opened.append(connection.connection is not None)

    app.add_middleware(Audit())
    app._middleware.add_outermost(DjangoConnections())  # has no effect: there is one
    app.task(name="nothing")(lambda: None)
    app.send_task("nothing")
    worker.run_jobs()
    assert (opened, connection.connection) == ([True], None)


def test_connections_are_closed_before_a_fork() -> None:
    query()
    close_connections()
    assert connection.connection is None


async def test_concurrent_async_tasks_are_counted() -> None:
    hooks: Any = DjangoConnections()

    async def run() -> None:
        await hooks.abefore_run(None)
        await sync_to_async(query)()
        await hooks.aafter_run(None, None, None)

    await asyncio.gather(*[run() for _ in range(20)])
    assert await sync_to_async(lambda: connection.connection)() is None
