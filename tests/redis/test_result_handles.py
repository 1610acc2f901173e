"""Handles of jobs with Celery's names: states, ``info``, ``forget``, ``collect``, and an id without a queue."""

from __future__ import annotations

import asyncio
import sys
from base64 import b64encode
from collections.abc import Iterator
from dataclasses import asdict
from datetime import timedelta
from typing import Any
from unittest.mock import Mock

import pytest
import redis

from bulltask import App, AsyncResult, ConfigError, Context, GroupResult, JobState, group
from bulltask.errors import DecodeError, ResultTimeoutError
from bulltask.registry.protocols import allow_join_result
from bulltask.testing import InlineWorker, use_server

pytestmark = pytest.mark.redis


@pytest.fixture
def app(broker_url: str) -> Iterator[App]:
    app = App("handles", "redis://unreachable.invalid:1")
    with use_server(app, broker_url):
        yield app


def test_states_have_celerys_names_too(app: App, worker: InlineWorker) -> None:
    seen: list[Any] = []

    @app.task(name="walk", bind=True, autoretry_for=(KeyError,), default_retry_delay=10, max_retries=1)
    def walk(self: Context, fail: bool = False) -> str:
        seen.append(handle_status())
        self.update_state(state="PROGRESS", meta={"done": 3})
        seen.append(handle_status())
        if fail:
            raise KeyError("gone")
        return "there"

    handles: list[AsyncResult[str]] = []

    def handle_status() -> tuple[str, Any, bool]:
        return handles[-1].status, handles[-1].info, handles[-1].state == "STARTED"

    handles.append(walk.delay())
    assert (handles[-1].status, handles[-1].state in ("PENDING", "FAILURE")) == ("PENDING", True)
    assert handles[-1].get() == "there"
    assert seen == [("STARTED", None, True), ("PROGRESS", {"done": 3}, True)]
    assert (handles[-1].status, handles[-1].result) == ("SUCCESS", "there")

    handles.append(walk.delay(fail=True))
    worker.run_jobs(propagate=False)
    failed = handles[-1]
    assert (failed.status, failed.state == "RETRY", repr(failed.info)) == ("RETRY", True, "KeyError('gone')")
    worker.clock.advance(10)
    worker.run_jobs(propagate=False)
    assert (failed.status, failed.state == "FAILURE", repr(failed.result)) == ("FAILURE", True, "KeyError('gone')")

    handles.append(walk.delay())
    handles[-1].revoke()
    assert handles[-1].status == "REVOKED"


async def test_a_snapshot_has_the_return_value_and_nothing_that_only_bulltask_reads(
    app: App, worker: InlineWorker
) -> None:
    @app.task(name="half", autoretry_for=())
    def half(x: int) -> timedelta:
        return timedelta(seconds=4 // x)

    good, bad, waiting = half.delay(2), half.delay(0), half.apply_async((1,), countdown=60)
    await worker.arun_jobs(propagate=False)
    for snapshots in (
        [result.snapshot() for result in (good, bad, waiting)],
        [await result.asnapshot() for result in (good, bad, waiting)],
    ):
        assert [each.returnvalue for each in snapshots] == [timedelta(seconds=2), None, None]
        assert "by zero" in snapshots[1].failed_reason
        assert asdict(snapshots[1]).keys() == {
            "state",
            "returnvalue",
            "failed_reason",
            "stacktrace",
            "progress",
            "attempts_made",
        }


async def test_a_coroutine_that_blocks_its_event_loop_for_a_result_is_warned(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = app.send_task("never")

    def wait() -> None:
        with pytest.raises(ResultTimeoutError):
            result.get(timeout=0.001)

    with pytest.warns(UserWarning, match=r"get\(\) blocks the event loop .*job .* in queue default.*await result"):
        wait()
    with pytest.raises(ResultTimeoutError):
        await result.aget(timeout=0.001)
    await asyncio.to_thread(wait)
    with allow_join_result():
        wait()
    monkeypatch.setitem(sys.modules, "ipykernel", Mock())
    wait()  # a cell of a notebook


def test_an_async_task_sets_its_state_too(app: App, worker: InlineWorker) -> None:
    seen: list[tuple[str, Any]] = []

    @app.task(name="awalk", bind=True)
    async def awalk(self: Context) -> None:
        await self.aupdate_state(self.request.id, "STARTED", {"done": 1})
        snapshot = await app.result(self.request.id).asnapshot()
        seen.append((snapshot.celery_state, snapshot.reported))

    awalk.delay().get()
    assert seen == [("STARTED", ("STARTED", {"done": 1}))]


def test_a_task_can_set_only_the_state_of_its_own_job(app: App, worker: InlineWorker) -> None:
    @app.task(name="meddle", bind=True)
    def meddle(self: Context) -> None:
        self.update_state(task_id="x", state="PROGRESS")

    job = meddle.delay()
    with pytest.raises(ConfigError, match=f"^job {job.id} cannot set the state of job x"):
        job.get()
    with pytest.raises(ConfigError, match=r"^task meddle, which is not running in a job, cannot .* of job x: "):
        meddle()


def test_a_forgotten_job_no_longer_exists(app: App, worker: InlineWorker) -> None:
    @app.task(name="keep")
    def keep() -> int:
        return 1

    handle = keep.delay()
    assert handle.get() == 1
    handle.forget()
    assert (handle.state, handle.status) == (JobState.UNKNOWN, "PENDING")
    handle.forget()  # again
    assert app.queue("default").get_job(handle.id) is None


def test_a_handle_knows_the_name_the_arguments_and_the_end_of_its_job(app: App, worker: InlineWorker) -> None:
    @app.task(name="plus")
    def plus(value: int, other: int) -> int:
        return value + other

    handle, elsewhere = plus.delay(1, other=2), app.send_task("elsewhere", (3,))
    assert (handle.name, handle.args, handle.kwargs) == ("plus", [], {"value": 1, "other": 2})
    assert (elsewhere.name, elsewhere.args, elsewhere.kwargs) == ("elsewhere", [3], {})
    assert handle.date_done is None
    handle.get()
    job = app.queue("default").get_job(handle.id)
    assert job is not None
    assert handle.date_done is not None
    assert handle.date_done.timestamp() * 1000 == pytest.approx(job.finished_ms)
    handle.forget()
    assert (handle.name, handle.args, handle.kwargs, handle.date_done) == (None, None, None, None)


def test_a_handle_decrypts_the_arguments_of_its_job(broker_url: str) -> None:
    app = App("secret", broker_url, payload_encryption_keys={"*": ["k1:" + b64encode(bytes(32)).decode()]})

    @app.task(name="pay")
    def pay(card: str) -> None: ...

    assert pay.delay("4711").kwargs == {"card": "4711"}


@pytest.mark.every_topology
def test_a_saved_group_is_found_by_its_id_in_the_current_app_until_it_is_deleted(
    app: App, worker: InlineWorker
) -> None:
    @app.task(name="plus")
    def plus(value: int, other: int) -> int:
        return value + other

    app.set_current()
    saved = group(plus.s(1, 1), plus.s(2, 2)).delay()
    saved.save()
    restored = GroupResult.restore(saved.id)
    assert restored is not None
    assert restored.join_native() == [2, 4]
    restored.delete()
    assert GroupResult.restore(saved.id) is None


def test_collect_yields_the_results_of_a_step_and_those_after_it(app: App, worker: InlineWorker) -> None:
    @app.task(name="plus")
    def plus(value: int, other: int) -> int:
        return value + other

    last = (plus.s(1, 1) | plus.s(10) | plus.s(100)).apply_async()
    first = last.parent.parent
    assert [value for _, value in first.collect()] == [2, 12, 112]
    assert [handle.id for handle, _ in first.collect()] == [first.id, last.parent.id, last.id]
    assert first.children == [last.parent]


def test_an_id_without_a_queue_is_found_in_the_queues_of_the_tasks(app: App, worker: InlineWorker) -> None:
    @app.task(name="mail", queue="mail")
    def mail(to: str) -> str:
        return to

    sent = mail.delay("x")
    assert [AsyncResult[Any](sent.id).queue, app.AsyncResult(sent.id).queue] == ["mail", "mail"]
    assert app.AsyncResult(sent.id).get() == "x"
    assert app.AsyncResult("no-such-job").queue == "default"


@pytest.mark.parametrize("progress", ["NaN", "[", '{"state": Infinity}', "[" * 1_000])
def test_malformed_progress_does_not_hide_why_a_job_failed(
    app: App, worker: InlineWorker, redis_client: redis.Redis, progress: str
) -> None:
    @app.task(name="fail", max_retries=0)
    def fail() -> None:
        raise ValueError("a reason")

    result = fail.delay()
    worker.run_jobs(propagate=False)
    redis_client.hset(f"bull:{{default}}:{result.id}", "progress", progress)
    assert result.progress is None
    assert result.status == "FAILURE"
    with pytest.raises(ValueError, match="a reason"):
        result.get(timeout=10)


@pytest.mark.parametrize("finished_on", ["9e15", "9007199254740991", "-9e15", "1e999"])
def test_an_impossible_time_is_no_time(app: App, redis_client: redis.Redis, finished_on: str) -> None:
    result = app.send_task("unknown")
    redis_client.hset(f"bull:{{default}}:{result.id}", "finishedOn", finished_on)
    assert result.date_done is None


@pytest.mark.parametrize("stored", ["[", "1", "{}", '{"id": "a", "members": [1]}', '{"id": "a", "members": [["q"]]}'])
def test_a_stored_group_that_is_malformed_is_an_error_that_names_it(
    app: App, redis_client: redis.Redis, stored: str
) -> None:
    member = app.send_task("unknown")
    saved = GroupResult("a-group", [member])
    saved.save()
    [key] = [key for key in redis_client.keys("*") if "a-group" in str(key)]
    redis_client.set(key, stored)
    with pytest.raises(DecodeError, match="group a-group is malformed"):
        GroupResult.restore("a-group", app)
