"""Hooks around sends: middleware, before_task_publish and after_task_publish."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from bulltask import App, AsyncResult, Middleware, chain, chord
from bulltask.errors import BrokerUnavailableError, PayloadTooLargeError
from bulltask.hooks import OutgoingJob
from bulltask.jobs.job import RunningJob
from bulltask.signals import (
    Signal,
    after_task_publish,
    before_task_publish,
    task_postrun,
    task_prerun,
    task_success,
)
from bulltask.testing import InlineWorker, use_server
from bulltask.transport.call import QueueKeys
from tests.support.server_clients import client_of

pytestmark = pytest.mark.redis

KEYS = QueueKeys("bull", "{mail}", "mail")


class Recorder(Middleware):
    """Records its calls and adds a header."""

    def __init__(self, name: str, calls: list[tuple[Any, ...]]) -> None:
        self.name, self.calls = name, calls

    def before_send(self, job: OutgoingJob) -> None:
        self.calls.append((f"{self.name} before", job.task, job.queue, job.data))
        job.headers[self.name] = len(job.headers)

    def after_send(self, job: OutgoingJob, exception: BaseException | None) -> None:
        self.calls.append((f"{self.name} after", job.id, job.stored_id, type(exception).__name__))


class AsyncRecorder(Recorder):
    """Also records the calls of its async hooks."""

    async def abefore_send(self, job: OutgoingJob) -> None:
        await asyncio.sleep(0)
        self.calls.append((f"{self.name} abefore", job.task))

    async def aafter_send(self, job: OutgoingJob, exception: BaseException | None) -> None:
        await asyncio.sleep(0)
        self.calls.append((f"{self.name} aafter", type(exception).__name__))


@pytest.fixture
def calls() -> list[tuple[Any, ...]]:
    return []


@pytest.fixture
def app(broker_url: str) -> Iterator[App]:
    app = App("producer", broker_url, task_default_queue="mail", max_payload=10_000)

    @app.task(name="mail.send")
    def send(to: str) -> None: ...

    yield app
    app.close()


def headers(url: str, result: AsyncResult[Any]) -> dict[str, Any]:
    with client_of(url) as client:
        fields: Any = client.hgetall(KEYS.job(result.id))
    return RunningJob.from_hash("mail", result.id, [part for pair in fields.items() for part in pair]).headers


def test_middleware_is_called_around_a_send_and_may_add_headers(
    app: App, broker_url: str, calls: list[tuple[Any, ...]]
) -> None:
    app.add_middleware(Recorder("outer", calls))
    app.add_middleware(Recorder("inner", calls))
    job = app.tasks["mail.send"].apply_async(("ada",), headers={"trace": "t-1"})
    call = ("mail.send", "mail", {"to": "ada"})
    stored = (job.id, job.id, "NoneType")
    assert calls == [
        ("outer before", *call),
        ("inner before", *call),
        ("inner after", *stored),
        ("outer after", *stored),
    ]
    assert headers(broker_url, job) == {"trace": "t-1", "outer": 1, "inner": 2}


def test_async_sends_call_the_async_methods(app: App, calls: list[tuple[Any, ...]]) -> None:
    app.add_middleware(AsyncRecorder("async", calls))
    app.add_middleware(Recorder("plain", calls))

    async def send() -> None:
        await app.tasks["mail.send"].adelay("ada")
        await app.aclose()

    asyncio.run(send())
    assert [call[0] for call in calls] == ["async abefore", "plain before", "plain after", "async aafter"]


def test_each_call_of_a_canvas_has_its_hooks(app: App, broker_url: str, calls: list[tuple[Any, ...]]) -> None:
    app.add_middleware(Recorder("one", calls))
    send = app.tasks["mail.send"]

    async def asend() -> AsyncResult[Any]:
        result = await chain(send.si("ada"), send.si("bob")).aapply_async()
        await app.aclose()
        return result

    for send_chain in (chain(send.si("ada"), send.si("bob")).apply_async, lambda: asyncio.run(asend())):
        result = send_chain()
        names = [call[0] for call in calls]
        assert names == ["one before"] * 2 + ["one after"] * 2
        assert headers(broker_url, result) == {"one": 0}
        calls.clear()
    chord([send.si("ada"), send.si("bob")], send.si("eve")).apply_async()
    assert [call[3]["to"] for call in calls if call[0] == "one before"] == ["eve", "ada", "bob"]


def test_after_send_is_called_for_a_deduplicated_job_and_for_a_failed_send(
    app: App, calls: list[tuple[Any, ...]]
) -> None:
    app.add_middleware(Recorder("one", calls))
    published = list[str]()

    def after(headers: dict[str, Any], **_: Any) -> None:
        published.append(headers["id"])

    after_task_publish.connect(after)
    task = app.tasks["mail.send"]
    first = task.apply_async(("ada",), deduplication={"id": "ada"})
    second = task.apply_async(("ada",), deduplication={"id": "ada"})
    assert second.id == first.id
    assert calls[-1][2] == first.id != calls[-1][1]
    assert len(published) == 2
    nowhere = App("nowhere", "redis://127.0.0.1:1/0", broker_publish_retries=0)
    nowhere.add_middleware(Recorder("nowhere", calls))
    with pytest.raises(BrokerUnavailableError):
        nowhere.send_task("mail.send", ["ada"])
    assert calls[-1][2:] == (None, "BrokerUnavailableError")
    assert len(published) == 2, "only stored jobs are published"


def test_signals_of_sends_have_celerys_arguments_and_may_change_the_headers(app: App, broker_url: str) -> None:
    messages = list[dict[str, Any]]()

    def before(sender: str, headers: dict[str, Any], **message: Any) -> None:
        headers["request_id"] = "r-1"
        messages.append({"sender": sender, "headers": dict(headers), **message})

    def after(sender: str, body: Any, headers: dict[str, Any], **_: Any) -> None:
        messages.append({"sender": sender, "headers": headers, "body": body})

    before_task_publish.connect(before, sender="mail.send")
    after_task_publish.connect(after, sender=app.tasks["mail.send"])
    job = app.tasks["mail.send"].apply_async(("ada",), headers={"trace": "t-1"}, priority=5)
    app.send_task("another task")
    assert len(messages) == 2
    expected = {"id": job.id, "task": "mail.send", "trace": "t-1", "request_id": "r-1"}
    assert [message["headers"] for message in messages] == [expected, expected]
    assert messages[0]["body"] == messages[1]["body"] == ([], {"to": "ada"}, {})
    assert (messages[0]["exchange"], messages[0]["routing_key"]) == ("", "mail")
    assert messages[0]["properties"] == {"correlation_id": job.id, "priority": 5}
    assert set(messages[0]) >= {"declare", "retry_policy", "signal"}
    assert headers(broker_url, job) == {"trace": "t-1", "request_id": "r-1"}


def test_a_hook_that_raises_or_sets_headers_that_cannot_be_stored_does_not_prevent_a_send(
    app: App, broker_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Raises(Middleware):
        def before_send(self, job: OutgoingJob) -> None:
            raise LookupError("before_send")

        def after_send(self, job: OutgoingJob, exception: BaseException | None) -> None:
            raise LookupError("after_send")

    def before(headers: dict[str, Any], **_: Any) -> None:
        headers["unsuitable"] = unsuitable[0]
        raise LookupError("before_task_publish")

    def after(**_: Any) -> None:
        raise LookupError("after_task_publish")

    app.add_middleware(Raises())
    before_task_publish.connect(before)
    after_task_publish.connect(after)
    unsuitable: list[Any] = [object()]
    with caplog.at_level(logging.ERROR, "bulltask.hooks"):
        job = app.tasks["mail.send"].apply_async(("ada",), headers={"trace": "t-1"})
    assert headers(broker_url, job) == {"trace": "t-1"}, "those of the sender"
    failed = [vars(record)["on"] for record in caplog.records]
    assert failed == ["before_send", "before_task_publish", "headers", "after_task_publish", "after_send"]
    unsuitable[0] = "x" * 10_000
    assert headers(broker_url, app.tasks["mail.send"].delay("bob")) == {}
    with pytest.raises(PayloadTooLargeError):
        app.tasks["mail.send"].apply_async(("ada",), headers={"trace": unsuitable[0]})


@pytest.mark.parametrize("task", ["note", "anote"])
def test_hooks_are_called_when_a_test_runs_jobs_in_its_own_thread(broker_url: str, task: str) -> None:
    app, seen = App("tested", broker_url), list[Any]()

    @app.task(name="note")
    def note() -> None:
        seen.append("run")

    @app.task(name="anote")
    async def anote() -> None:
        seen.append("run")

    def receive(sender: Any, signal: Signal, **_: Any) -> None:
        seen.append((signal.name, sender.request.id))

    for signal in (task_prerun, task_success, task_postrun):
        signal.connect(receive, sender=task)
    with use_server(app, broker_url), InlineWorker(app) as worker:
        job = app.send_task(task)
        worker.run_jobs()
    after = [("task_success", job.id), ("task_postrun", job.id)]
    assert seen == [("task_prerun", job.id), "run", *after]
