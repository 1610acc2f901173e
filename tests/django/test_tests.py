"""Tests of Django projects: their jobs never reach the development server, can be checked, and run in the test."""

from __future__ import annotations

import asyncio
import os
import unittest
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from django.core.management import call_command
from django.db import transaction
from django.test import SimpleTestCase, TestCase, TransactionTestCase
from django.test.utils import setup_test_environment, teardown_test_environment

from bulltask import App, BrokerUnavailableError, ResultTimeoutError, chain, group
from bulltask.config.urls import SecretUrl
from bulltask.contrib.django.project import project_app
from bulltask.contrib.django.test import JobsMixin
from bulltask.embedded import is_under_test, resolve_url, server_of_tests
from bulltask.embedded import server as binary
from bulltask.embedded import shared as under_test
from bulltask.outbox.django import Outbox
from bulltask.queue import FlowJob, Queue
from bulltask.queue.aio.queue import AsyncQueue
from bulltask.testing import InlineWorker, RedisServer, use_server
from tests.django import task_functions
from tests.support.flaky_proxy import FlakyProxy

pytestmark = pytest.mark.redis


@pytest.fixture(scope="module", autouse=True)
def server_of_this_process(session_processes: set[int]) -> Iterator[None]:
    """The server of the tests, once for this module."""
    session_processes.add(server_of_tests().pid)
    yield
    server_of_tests().stop()


@pytest.fixture(autouse=True)
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[int]]:
    """Django's test environment, as ``manage.py test`` sets it up, and the ports of the servers that a test starts."""
    monkeypatch.setattr(under_test, "STARTED_HERE", ports := set[int]())
    setup_test_environment()
    yield ports
    teardown_test_environment()
    assert not is_under_test(SecretUrl("redis://localhost"))


@pytest.fixture
def development(broker_url: str) -> str:
    """The URL of a development server, which no test may change."""
    return broker_url


@pytest.fixture
def app(development: str) -> Iterator[App]:
    """An app that was given the development server."""
    app = App("shop", development)

    @app.task(name="double")
    def double(x: int) -> int:
        return 2 * x

    with redis.Redis.from_url(server_of_tests().url) as client:
        client.flushall()
    yield app
    app.close()


async def _aqueue(app: App, url: str) -> None:
    async with AsyncQueue("default", broker_url=url) as queue:
        await queue.add("double", {"x": 1})


def _outbox(app: App, url: str) -> None:
    call_command("migrate", "bulltask_outbox", verbosity=0)
    outbox = Outbox(app)
    outbox.delay(app.tasks["double"], 1)
    outbox.relay()


def _on_commit(app: App, url: str) -> None:
    with transaction.atomic():
        app.tasks["double"].delay_on_commit(1)


DOORS: dict[str, Callable[[App, str], Any]] = {
    "delay": lambda app, url: app.tasks["double"].delay(1),
    "adelay": lambda app, url: asyncio.run(app.tasks["double"].adelay(1)),
    "on commit": _on_commit,
    "send_task": lambda app, url: app.send_task("double", (1,), queue="other"),
    "canvas": lambda app, url: chain(app.tasks["double"].s(1), group(app.tasks["double"].s())).delay(),
    "queue": lambda app, url: app.queue("default").add("double", {"x": 1}),
    "queue without an app": lambda app, url: Queue("default", broker_url=url).add("double", {"x": 1}),
    "async queue without an app": lambda app, url: asyncio.run(_aqueue(app, url)),
    "flow": lambda app, url: app.flows().add(FlowJob("double", "default", {"x": 1})),
    "schedule": lambda app, url: app.queue("default").schedulers.upsert("nightly", every=60, name="double"),
    "outbox": _outbox,
}


@pytest.mark.parametrize("door", DOORS)
def test_no_test_sends_to_the_development_server(app: App, development: str, door: str) -> None:
    DOORS[door](app, development)
    with redis.Redis.from_url(development) as client:
        assert client.dbsize() == 0
    with redis.Redis.from_url(server_of_tests().url) as client:
        assert client.dbsize() > 0
    if door == "outbox":
        app._outboxes.clear()


def test_djangos_own_tasks_do_not_reach_the_development_server(app: App) -> None:
    result = task_functions.add.enqueue(1, 2)
    with redis.Redis.from_url(server_of_tests().url) as client:
        assert client.exists(f"bull:{{default}}:{result.id}")
    project_app()._replace_connections(project_app().conf, None)


async def test_waiting_for_a_job_that_nobody_runs_raises_at_once(app: App) -> None:
    result = app.tasks["double"].delay(1)
    with pytest.raises(ResultTimeoutError, match=r"is waiting, and this test has no worker.*JobsMixin"):
        result.get()
    with pytest.raises(ResultTimeoutError, match="this test has no worker"):
        await result
    app.queue("default").clean(0, 1, "wait")


def test_a_server_that_the_test_has_chosen_is_used(app: App, started: set[int], tmp_path: Any) -> None:
    with RedisServer.start(tmp_path) as server, FlakyProxy("127.0.0.1", server.port) as proxy:
        started.update((server.port, proxy.port))
        for url in (server.url, f"redis://127.0.0.1:{proxy.port}/0", f"redis://localhost:{server.port}/3"):
            other = App("other", url, set_as_current=False)
            other.send_task("double", (1,))
            assert other._broker.endpoint.url == url
            other.close()
        with use_server(app, server.url), InlineWorker(app):
            assert app.tasks["double"].delay(2).get(timeout=5) == 4


def test_a_forked_process_of_the_test_runner_has_its_own_server(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    first = server_of_tests()
    assert server_of_tests() is first
    monkeypatch.setattr(under_test, "_server", (os.getpid() + 1, first))
    second = server_of_tests()
    assert second.port != first.port
    second.stop()


def test_without_a_server_program_a_send_is_refused_and_eager_mode_works(
    app: App, development: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(under_test, "_server", None)
    monkeypatch.setattr(binary, "_candidates", list)
    with pytest.raises(BrokerUnavailableError, match=r"tests send no jobs to redis://.*task_always_eager"):
        app.tasks["double"].delay(1)
    eager = App("eager", development, task_always_eager=True)
    assert eager.task(name="double")(lambda x: 2 * x).delay(2).get() == 4


def run_case(case: type[unittest.TestCase]) -> None:
    """Run the tests of a test case as a test runner does."""
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(case).run(result)
    assert result.testsRun > 0
    assert [trace for _, trace in result.errors + result.failures] == []


@pytest.mark.parametrize("base", [TestCase, TransactionTestCase, SimpleTestCase])
def test_a_test_case_with_the_mixin_checks_and_runs_jobs(
    app: App, development: str, base: type[SimpleTestCase]
) -> None:
    double = app.tasks["double"]

    class DoubleTest(JobsMixin, base):  # type: ignore[misc]
        bulltask_app = app

        def test_a_committed_call(self) -> None:
            if base is TestCase:
                with self.captureOnCommitCallbacks(execute=True):
                    result = double.delay_on_commit(4)
            else:
                result = double.delay(4)
            self.assert_enqueued(double, (4,), count=1)
            with pytest.raises(AssertionError, match="no job is enqueued"):
                self.assert_enqueued(double, (5,))
            self.run_jobs()
            assert result.get() == 8
            self.assert_enqueued(double, count=0)

        def test_each_test_has_an_empty_server(self) -> None:
            self.assert_enqueued(double, count=0)
            double.apply_async((1,), countdown=3_600)
            assert self.run_jobs() == []
            assert len(self.run_for(3_600)) == 1

        async def test_async(self) -> None:
            result = await double.adelay(1)
            await self.arun_jobs()
            assert await result == 2

    run_case(DoubleTest)
    with redis.Redis.from_url(development) as client:
        assert client.dbsize() == 0


def test_the_mixin_tests_the_projects_app_and_another_server_if_given(development: str) -> None:
    class ProjectTest(JobsMixin, SimpleTestCase):  # type: ignore[misc]
        bulltask_url = development

        def test_it(self) -> None:
            result = task_functions.add.enqueue(1, 2)
            assert project_app()._broker.endpoint.url == development
            self.run_jobs()
            result.refresh()
            assert result.return_value == 3

    run_case(ProjectTest)


def test_only_tests_are_isolated(development: str) -> None:
    teardown_test_environment()
    try:
        assert resolve_url(development) == development
    finally:
        setup_test_environment()
