"""``InlineWorker`` runs jobs from a real server in the test's thread, on a clock that the test advances."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import redis

from bulltask import App, Context, JobState, PermanentError, group
from bulltask.errors import BulltaskError, Ignore, Reject, ResultTimeoutError, TaskError
from bulltask.events import JobCompleted, JobFailed, JobRetried, JobStarted
from bulltask.jobs.job import JobRef
from bulltask.queue import FlowJob
from bulltask.testing import FakeClock, InlineWorker, assert_enqueued, inline, use_server

pytestmark = pytest.mark.redis


@pytest.fixture
def app(broker_url: str) -> Iterator[App]:
    app = App("tested", "redis://unreachable.invalid:1")
    with use_server(app, broker_url):
        yield app


@pytest.fixture
def clock(worker: InlineWorker) -> FakeClock:
    return worker.clock


@pytest.fixture
def ran(app: App) -> list[Any]:
    """The calls of the tasks ``note`` (sync) and ``anote`` (async)."""
    calls: list[Any] = []

    @app.task(name="note")
    def note(value: Any) -> Any:
        calls.append(value)
        return value

    @app.task(name="anote")
    async def anote(value: Any) -> Any:
        await asyncio.sleep(0)
        calls.append(value)
        return value

    return calls


def send(app: App, value: Any = 1, task: str = "note", **options: Any) -> Any:
    return app.send_task(task, (value,), **options)


# ---- run_jobs --------------------------------------------------------------------------------------------------------


@pytest.mark.every_topology
def test_run_jobs_runs_the_waiting_jobs_of_all_queues_in_the_calling_thread(app: App, worker: InlineWorker) -> None:
    threads = []

    @app.task
    def where() -> None:
        threads.append(threading.current_thread())

    for queue in ("default", "mail", "reports"):
        where.apply_async(queue=queue)
    assert [type(event) for event in worker.run_jobs()] == [JobCompleted] * 3
    assert threads == [threading.current_thread()] * 3
    assert worker.run_jobs() == []


@pytest.mark.every_topology
def test_run_jobs_runs_the_jobs_that_tasks_send_even_to_a_new_queue(
    app: App, worker: InlineWorker, ran: list[Any]
) -> None:
    @app.task
    def first() -> None:
        send(app, "second", queue="new")

    first.delay()
    assert len(worker.run_jobs()) == 2
    assert ran == ["second"]


def test_arguments_and_results_are_json_in_redis_as_in_production(
    app: App, worker: InlineWorker, ran: list[Any], redis_client: redis.Redis
) -> None:
    result = send(app, (1, 2))
    worker.run_jobs()
    assert ran == [[1, 2]]
    stored: Any = redis_client.hgetall(f"bull:{{default}}:{result.id}")
    assert (json.loads(stored["data"]), json.loads(stored["returnvalue"])) == ({"value": [1, 2]}, [1, 2])


def test_run_jobs_raises_the_exception_of_a_task_and_leaves_the_jobs_after_it(
    app: App, worker: InlineWorker, ran: list[Any]
) -> None:
    @app.task
    def fail() -> None:
        raise LookupError("no such order")

    failed = fail.delay()
    send(app)
    with pytest.raises(LookupError, match="no such order"):
        worker.run_jobs()
    assert (failed.state, ran) == (JobState.FAILED, [])
    worker.run_jobs()
    assert ran == [1]


def test_run_jobs_without_propagate_only_stores_the_exception(app: App, worker: InlineWorker) -> None:
    @app.task
    def fail() -> None:
        raise SystemExit("no such order")

    failed = fail.delay()
    [event] = worker.run_jobs(propagate=False)
    assert isinstance(event, JobFailed)
    assert failed.snapshot().failed_reason == "no such order"


def test_a_job_with_arguments_that_do_not_match_its_task_fails_the_drain(
    app: App, worker: InlineWorker, ran: list[Any]
) -> None:
    app.queue("default").add("note", {"text": 1})
    with pytest.raises(PermanentError, match="does not match note"):
        worker.run_jobs()


def test_a_queue_with_jobs_for_other_workers_is_left_alone(app: App, worker: InlineWorker, ran: list[Any]) -> None:
    resize = app.queue("images").add("image.resize", {"width": 100})
    send(app)
    assert len(worker.run_jobs()) == 1
    assert [job.id for job in assert_enqueued(app, "image.resize", kwargs={"width": 100})] == [resize.id]
    with pytest.raises(
        ResultTimeoutError, match=r"still waiting, and no job is due; task 'image\.resize', which is next"
    ):
        app.result(resize.id, "images").get()


def test_a_job_of_an_unknown_task_fails_if_the_app_says_so(broker_url: str, app: App) -> None:
    with use_server(app, broker_url, incompatible_timeout=0), InlineWorker(app) as strict:
        app.send_task("unknown")
        with pytest.raises(PermanentError, match="'unknown' is not registered"):
            strict.run_jobs()


def test_a_task_that_sends_itself_again_and_again_is_reported(
    app: App, worker: InlineWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inline, "MAX_ATTEMPTS", 5)

    @app.task
    def again() -> None:
        again.delay()

    again.delay()
    with pytest.raises(BulltaskError, match="does a task send itself again"):
        worker.run_jobs()


def test_patches_of_the_test_apply_to_the_tasks(
    app: App, worker: InlineWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json, "dumps", lambda _value: "patched")

    @app.task
    def dump() -> str:
        return json.dumps(1)

    assert dump.delay().get() == "patched"


def test_bound_tasks_report_progress_and_log_lines_to_redis(app: App, worker: InlineWorker) -> None:
    @app.task(bind=True)
    def report(self: Context) -> None:
        self.update_progress(40)
        self.log("half done")
        self.update_progress({"retries": self.request.retries})

    result = report.delay()
    worker.run_jobs()
    job = app.queue("default").get_job(result.id)
    assert job is not None
    assert (result.progress, job.get_logs().lines) == ({"retries": 0}, ("half done",))


def test_listeners_of_the_app_receive_the_events(app: App, worker: InlineWorker, ran: list[Any]) -> None:
    received: list[Any] = []
    app.on(JobStarted, received.append)
    app.on(JobCompleted, received.append)
    send(app)
    worker.run_jobs()
    assert [type(event) for event in received] == [JobStarted, JobCompleted]


def test_the_exception_of_a_listener_is_a_warning(app: App, worker: InlineWorker, ran: list[Any]) -> None:
    @app.on(JobCompleted)
    def broken(_event: JobCompleted) -> None:
        raise ValueError("no")

    send(app)
    with pytest.warns(RuntimeWarning, match="broken raised ValueError"):
        worker.run_jobs()


@pytest.mark.every_topology
def test_parents_of_a_flow_run_after_their_children(app: App, worker: InlineWorker, ran: list[Any]) -> None:
    children = [FlowJob("note", "parts{default}", {"value": part}) for part in ("a", "b")]
    app.flows().add(FlowJob("note", "default", {"value": "whole"}, children=children))
    worker.run_jobs()
    assert ran == ["a", "b", "whole"]


def test_the_memory_limit_of_children_does_not_apply_to_the_test(broker_url: str, app: App) -> None:
    @app.task
    def add() -> int:
        return 1

    with use_server(app, broker_url, worker_max_memory_per_child="16M"), InlineWorker(app):
        assert add.delay().get() == 1


@pytest.mark.every_topology
def test_results_flow_through_a_canvas(app: App, worker: InlineWorker) -> None:
    @app.task
    def add(x: int, y: int) -> int:
        return x + y

    @app.task
    def total(values: list[int]) -> int:
        return sum(values)

    assert (add.s(1, 2) | group(add.s(10), add.s(20)) | total.s()).delay().get() == 36
    results = group(add.s(n, n) for n in range(3)).delay()
    assert results.completed_count() == 0
    assert results.get() == [0, 2, 4]


# ---- async -----------------------------------------------------------------------------------------------------------


@pytest.mark.every_topology
def test_async_tasks_share_one_event_loop_in_sync_tests(app: App, worker: InlineWorker) -> None:
    loops = []

    @app.task
    async def where() -> None:
        loops.append(asyncio.get_running_loop())

    where.delay()
    worker.run_jobs()
    where.delay().get()
    assert loops[0] is loops[1]


async def test_async_tasks_run_on_the_event_loop_of_an_async_test(app: App, worker: InlineWorker) -> None:
    @app.task(bind=True)
    async def where(self: Context) -> bool:
        await self.aupdate_progress(1)
        return asyncio.get_running_loop() is loop

    loop = asyncio.get_running_loop()
    assert await (await where.adelay())
    await where.adelay()
    [event] = await worker.arun_jobs()
    assert isinstance(event, JobCompleted)
    assert event.result is True
    await app.aclose()


async def test_a_sync_drain_in_an_async_test_runs_async_tasks_on_another_thread(
    app: App, worker: InlineWorker, ran: list[Any]
) -> None:
    send(app, task="anote")
    worker.run_jobs()
    assert ran == [1]
    worker.close()


async def test_several_results_can_be_awaited_at_the_same_time(app: App, worker: InlineWorker, ran: list[Any]) -> None:
    results = [send(app, value, "anote") for value in range(5)]
    assert await asyncio.gather(*results) == [0, 1, 2, 3, 4]
    assert sorted(ran) == [0, 1, 2, 3, 4]
    await app.aclose()


async def test_time_can_pass_in_an_async_test(app: App, worker: InlineWorker, ran: list[Any]) -> None:
    send(app, task="anote", countdown=30)
    assert await worker.arun_for(29) == []
    assert len(await worker.arun_for(2)) == 1
    assert ran == [1]


# ---- the clock -------------------------------------------------------------------------------------------------------


def test_a_delayed_job_runs_when_the_clock_shows_its_time(
    app: App, worker: InlineWorker, clock: FakeClock, ran: list[Any]
) -> None:
    send(app, countdown=3600)
    send(app, 2, eta=clock.now() + timedelta(hours=2))
    clock.advance(3599)
    assert worker.run_jobs() == []
    clock.advance(timedelta(seconds=1.5))
    worker.run_jobs()
    assert ran == [1]
    clock.advance(3600)
    worker.run_jobs()
    assert ran == [1, 2]


def test_run_for_runs_each_job_at_its_time(app: App, worker: InlineWorker, clock: FakeClock) -> None:
    times: list[float] = []
    start = clock.now_ms()

    @app.task
    def note() -> None:
        times.append((clock.now_ms() - start) / 1000)

    for countdown in (50, 10, 30, 90):
        note.apply_async(countdown=countdown)
    began = time.monotonic()
    worker.run_for(60)
    assert time.monotonic() - began < 5
    assert times == pytest.approx([10, 30, 50], abs=1)
    assert (clock.now_ms() - start) / 1000 == pytest.approx(60, abs=1)


@pytest.mark.every_topology
def test_run_for_runs_the_retries_with_their_backoff(app: App, worker: InlineWorker) -> None:
    @app.task(bind=True, max_retries=3, retry_jitter=False)
    def flaky(self: Context) -> int:
        if self.request.retries < 3:
            raise ConnectionError("refused")
        return self.request.retries

    result = flaky.delay()
    events = worker.run_for(60)
    assert [event.delay_ms for event in events if isinstance(event, JobRetried)] == [1000, 2000, 4000]
    assert result.get() == 3


def test_a_job_expires_when_the_clock_is_advanced(
    app: App, worker: InlineWorker, clock: FakeClock, ran: list[Any]
) -> None:
    result = send(app, expires=60)
    clock.advance(61)
    worker.run_jobs(propagate=False)
    assert (result.state, ran) == (JobState.FAILED, [])


@pytest.mark.every_topology
def test_run_for_runs_the_beat_schedule(broker_url: str, app: App) -> None:
    @app.task(name="tick")
    def tick() -> None:
        """Do nothing."""

    with use_server(app, broker_url, beat_schedule={"tick": {"task": "tick", "schedule": 600}}), InlineWorker(app) as w:
        assert len(w.run_for(3600)) == 6


@pytest.mark.every_topology
def test_deduplication_and_rate_limits_follow_the_clock(
    app: App, worker: InlineWorker, clock: FakeClock, ran: list[Any]
) -> None:
    throttled: dict[str, Any] = {"deduplication": {"id": "once", "ttl": 60}}
    assert send(app, 1, **throttled) == send(app, 2, **throttled)
    clock.advance(61)
    send(app, 3, **throttled)
    worker.run_jobs()
    assert ran == [1, 3]

    @app.task(bind=True)
    def polite(self: Context) -> None:
        if not ran[2:]:
            ran.append("limited")
            self.rate_limit(30)

    polite.delay()
    worker.run_for(31)
    assert ran == [1, 3, "limited"]


def test_the_clock_follows_a_library_that_replaces_pythons_clock(
    app: App, worker: InlineWorker, ran: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    send(app, countdown=3600)
    real = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: real() + 3_601 * 10**9)
    worker.run_jobs()
    assert ran == [1]


# ---- results ---------------------------------------------------------------------------------------------------------


@pytest.mark.every_topology
def test_get_runs_the_job_and_returns_its_result(app: App, worker: InlineWorker, ran: list[Any]) -> None:
    send(app, "before")
    assert send(app, "this").get(timeout=10) == "this"
    assert ran == ["before", "this"]


def test_get_advances_the_clock_instead_of_waiting(app: App, worker: InlineWorker, ran: list[Any]) -> None:
    began = time.monotonic()
    assert send(app, countdown=3600).get() == 1
    assert time.monotonic() - began < 5


def test_get_raises_the_tasks_exception(app: App, worker: InlineWorker) -> None:
    @app.task
    def fail() -> None:
        raise LookupError("no such order")

    with pytest.raises(LookupError, match="no such order"):
        fail.delay().get()


def test_get_raises_immediately_if_the_job_is_not_due_within_the_timeout(
    app: App, worker: InlineWorker, ran: list[Any]
) -> None:
    began = time.monotonic()
    with pytest.raises(ResultTimeoutError, match="still delayed, and no job is due within 60 s"):
        send(app, countdown=3600).get(timeout=60)
    app.queue("default").pause()
    with pytest.raises(ResultTimeoutError, match="still waiting, and no job is due"):
        send(app).get()
    assert time.monotonic() - began < 5


def test_a_task_may_wait_for_another_job_but_not_for_itself(app: App, worker: InlineWorker, ran: list[Any]) -> None:
    @app.task(bind=True)
    def outer(self: Context, own: bool) -> Any:
        return app.result(self.request.id).get() if own else send(app, "inner").get()

    assert outer.delay(False).get() == "inner"
    with pytest.raises(Exception, match="waits for its own result"):
        outer.delay(True).get()


async def test_an_async_task_that_sync_code_runs_in_a_loop_may_not_wait_for_itself(
    app: App, worker: InlineWorker
) -> None:
    @app.task(bind=True)
    async def outer(self: Context) -> Any:
        return app.result(self.request.id).get(timeout=5)

    with pytest.raises(Exception, match="waits for its own result"):
        outer.delay().get()  # the worker runs the task on another thread, because this one has a loop


def test_get_returns_the_result_of_a_job_that_is_removed_when_it_ends(
    app: App, worker: InlineWorker, clock: FakeClock, ran: list[Any]
) -> None:
    clock.advance(86_400)
    assert send(app, remove_on_complete=True).get() == 1


def test_get_in_several_threads_returns_the_results(app: App, worker: InlineWorker, ran: list[Any]) -> None:
    values: list[Any] = []
    threads = [threading.Thread(target=lambda: values.append(send(app).get())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert values == [1, 1, 1]


def test_get_waits_for_a_job_that_another_thread_is_running(app: App, worker: InlineWorker) -> None:
    running, end = threading.Event(), threading.Event()

    @app.task
    def hold() -> str:
        running.set()
        assert end.wait(60)
        return "ended"

    job = hold.delay()
    other = threading.Thread(target=job.get)
    other.start()
    assert running.wait(60)
    threading.Timer(0.05, end.set).start()
    assert job.get() == "ended"
    other.join()


# ---- use_server ------------------------------------------------------------------------------------------------------


def test_the_app_has_its_own_connections_and_settings_again_afterwards(broker_url: str) -> None:
    app = App("tested", "redis://unreachable.invalid:1", max_payload=1_000)
    before = app.conf, app._broker
    with use_server(app, broker_url, max_payload=100):
        assert (app._config.max_payload, app._config.broker_url.get_secret_value()) == (100, broker_url)
        with InlineWorker(app):
            pass
    assert (app.conf, app._broker) == before
    assert app._config.max_payload == 1_000


def test_the_server_is_empty_at_the_start(broker_url: str, redis_client: redis.Redis, app: App) -> None:
    redis_client.set("left", 1)
    with use_server(app, broker_url):
        assert redis_client.keys() == []


def test_a_worker_needs_a_server_of_its_own(broker_url: str) -> None:
    app = App("tested", broker_url)
    with pytest.raises(BulltaskError, match="inside use_server"):
        InlineWorker(app)


def test_an_app_has_one_worker(app: App, worker: InlineWorker) -> None:
    with pytest.raises(BulltaskError, match="already has an InlineWorker"):
        InlineWorker(app)


def test_an_app_in_eager_mode_needs_no_worker(broker_url: str, app: App, ran: list[Any]) -> None:
    with use_server(app, broker_url, task_always_eager=True):
        assert send(app).get() == 1
        with pytest.raises(BulltaskError, match="is in eager mode"):
            InlineWorker(app)


def test_a_closed_worker_no_longer_runs_jobs_for_get(app: App, ran: list[Any]) -> None:
    with InlineWorker(app) as worker:
        assert not worker.is_running(JobRef("default", "x"))
    with pytest.raises(ResultTimeoutError, match=r"did not finish within 0\.1 s"):
        send(app).get(timeout=0.1)


def test_ignore_completes_a_job_without_a_result_and_reject_fails_or_releases_it(
    app: App, worker: InlineWorker
) -> None:
    runs: list[str] = []

    @app.task(name="ends", max_retries=2, autoretry_for=(BaseException,))
    def ends(how: str) -> str:
        runs.append(how)
        if how == "ignore":
            raise Ignore
        if how == "requeue" and runs.count("requeue") == 1:
            raise Reject("later", requeue=True)
        if how == "reject":
            raise Reject("no such customer")
        return how

    ignored, rejected, requeued = (ends.delay(how) for how in ("ignore", "reject", "requeue"))
    outcomes: list[str | None] = [ignored.get(), requeued.get()]
    assert outcomes == [None, "requeue"]
    with pytest.raises(TaskError, match="no such customer"):
        rejected.get()
    assert sorted(runs) == ["ignore", "reject", "requeue", "requeue"]


def test_a_job_that_fails_with_an_exception_in_throws_is_an_expected_failure(app: App, worker: InlineWorker) -> None:
    @app.task(name="expecting", throws=(LookupError,))
    def expecting(key: str) -> Any:
        return {"": 1}[key] if key == "key" else int(key)

    for key in ("key", "number"):
        expecting.delay(key)
    failures = [event for event in worker.run_jobs(propagate=False) if isinstance(event, JobFailed)]
    assert [(type(event.exception), event.expected) for event in failures] == [(KeyError, True), (ValueError, False)]


def test_an_ignored_result_is_stored_only_for_a_job_that_receives_it(app: App, worker: InlineWorker) -> None:
    @app.task(name="unstored", ignore_result=True)
    def unstored(value: Any) -> Any:
        return object() if value == "object" else value

    @app.task(name="plus_one")
    def plus_one(value: int) -> int:
        return value + 1

    assert [unstored.delay(1).get(), unstored.delay("object").get()] == [None, None]
    assert unstored.apply_async((1,), ignore_result=False).get() == 1
    assert plus_one.apply_async((1,), ignore_result=True).get() is None
    assert (unstored.s(1) | plus_one.s()).apply_async().get() == 2
