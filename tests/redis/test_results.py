"""Tests of waiting for results and of reading the outcome of jobs."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import redis

from bulltask import App, AsyncResult, JobState
from bulltask.errors import BrokerUnavailableError, DecodeError, JobNotFoundError, ResultTimeoutError, TaskError
from bulltask.testing.worker import RedisServer, wait_until
from bulltask.transport import results
from bulltask.transport.call import FetchedJob, QueueKeys
from bulltask.transport.scripts.move import FetchOptions, FinishOptions, move_to_active, move_to_finished
from tests.conftest import ServerFactory
from tests.support.flaky_proxy import FlakyProxy
from tests.support.machine_load import scale_to_load

pytestmark = pytest.mark.redis

KEYS = QueueKeys("bull", "{default}", "default")
CLAIM = FetchOptions("token", 30_000, "manual")


class Worker:
    """A fake worker that acquires and finishes jobs of the queue ``default`` when a test calls it."""

    def __init__(self, app: App) -> None:
        self._broker = app._broker
        self._client = app._broker.client()

    def acquire(self) -> str:
        self._client.connect()
        fetched = self._client.run(move_to_active(KEYS, CLAIM, self._broker.clock.now_ms()))
        assert isinstance(fetched, FetchedJob)
        return fetched.job_id

    def finish_call(self, job_id: str, value: object, failure: str | None, keep: int) -> Any:
        text = json.dumps(value) if failure is None else failure
        options = FinishOptions(failure is None, text.encode(), {"count": keep}, 1)
        return move_to_finished(KEYS, job_id, CLAIM, options, fetch_next=False, now_ms=self._broker.clock.now_ms())

    def end(self, value: object = None, *, failure: str | None = None, keep: int = -1) -> str:
        job_id = self.acquire()
        self._client.run(self.finish_call(job_id, value, failure, keep))
        return job_id

    def end_without_event(self, client: redis.Redis, value: object = None, *, keep: int = -1) -> None:
        """Finish a job and trim its events in one step, so that no listener receives them."""
        call = self.finish_call(self.acquire(), value, None, keep)
        with client.pipeline(transaction=True) as step:
            step.execute_command("EVAL", call.script.source, *call.args)
            step.xtrim(KEYS.events, maxlen=0, approximate=False)
            step.execute()

    def close(self) -> None:
        self._client.close()


@pytest.fixture
def worker(app: App) -> Iterator[Worker]:
    worker = Worker(app)
    yield worker
    worker.close()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as threads:
        yield threads


@pytest.fixture
def short_rechecks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiters read the job itself every 300 ms instead of every five seconds."""
    monkeypatch.setattr(results, "RECHECK_MS", 300)


def send(app: App, **options: Any) -> AsyncResult[Any]:
    return app.send_task("work", **options)


def blocked(client: redis.Redis) -> int:
    """Return how many connections wait for the stream."""
    clients: Any = client.client_list()
    return sum(entry["cmd"] == "xread" and "b" in entry["flags"] for entry in clients)


def script_calls(client: redis.Redis) -> int:
    """Return how many scripts the server has run since its statistics were reset; NOSCRIPT replies do not count."""
    stats: Any = client.info("commandstats")
    counts = [stats[name] for name in ("cmdstat_evalsha", "cmdstat_eval") if name in stats]
    return sum(count["calls"] - count["failed_calls"] for count in counts)


def start_waiters(
    threads: ThreadPoolExecutor, client: redis.Redis, *results: AsyncResult[Any], timeout: float | None = 20
) -> list[Future[Any]]:
    """Call ``get()`` in threads; return when all of them wait."""
    before = blocked(client)
    futures = [threads.submit(result.get, timeout) for result in results]
    wait_until(lambda: blocked(client) == before + len(results), what="the waiters")
    return futures


def elapsed(work: Callable[[], object]) -> float:
    started = time.monotonic()
    work()
    return time.monotonic() - started


# --- jobs that have already finished ----------------------------------------------------------------------------------


@pytest.mark.every_topology
def test_get_returns_immediately_if_the_job_has_finished(app: App, worker: Worker) -> None:
    done, failed = send(app), send(app)
    worker.end({"sum": 3})
    worker.end(failure="no such address")
    assert elapsed(lambda: done.get(timeout=60)) < scale_to_load(0.5)
    assert done.get() == {"sum": 3}
    with pytest.raises(TaskError, match="no such address"):
        failed.get()


@pytest.mark.every_topology
async def test_aget_returns_immediately_if_the_job_has_finished(app: App, worker: Worker) -> None:
    done, failed = send(app), send(app)
    worker.end({"sum": 3})
    worker.end(failure="no such address")
    assert await done == await done.aget(timeout=60) == {"sum": 3}
    with pytest.raises(TaskError, match="no such address"):
        await failed
    await app._broker.aclose()


def test_a_result_can_be_created_from_a_job_id(app: App, worker: Worker) -> None:
    send(app, job_id="order-7", queue="default")
    worker.end("shipped")
    assert app.result("order-7").get() == "shipped"
    assert app.result("order-7", "default").get() == "shipped"


@pytest.mark.parametrize("stored", ["null", ""])
def test_an_empty_return_value_is_none(app: App, worker: Worker, redis_client: redis.Redis, stored: str) -> None:
    result = send(app)
    worker.end()
    redis_client.hset(KEYS.job(result.id), "returnvalue", stored)
    assert result.get() is None


def test_an_invalid_return_value_raises_a_decode_error(app: App, worker: Worker, redis_client: redis.Redis) -> None:
    result = send(app)
    worker.end()
    redis_client.hset(KEYS.job(result.id), "returnvalue", "{")
    with pytest.raises(DecodeError, match=f"return value of job {result.id} is not valid JSON"):
        result.get()


# --- jobs that finish while a waiter waits ----------------------------------------------------------------------------


@pytest.mark.every_topology
def test_a_waiter_is_notified_immediately(
    app: App, worker: Worker, threads: ThreadPoolExecutor, redis_client: redis.Redis
) -> None:
    done, failed = send(app), send(app)
    first, second = start_waiters(threads, redis_client, done, failed)
    worker.end([1, 2])
    assert elapsed(lambda: first.result(60)) < scale_to_load(0.5)
    assert first.result() == [1, 2]
    assert not second.done()
    worker.end(failure="no")
    assert isinstance(second.exception(5), TaskError)


@pytest.mark.every_topology
async def test_an_asyncio_waiter_is_notified_immediately(app: App, worker: Worker, redis_client: redis.Redis) -> None:
    done, failed = send(app), send(app)
    first, second = asyncio.create_task(done.aget(20)), asyncio.create_task(failed.aget(20))
    await asyncio.to_thread(wait_until, lambda: blocked(redis_client) == 1)
    worker.end([1, 2])
    assert await asyncio.wait_for(first, scale_to_load(0.5)) == [1, 2]
    worker.end(failure="no")
    with pytest.raises(TaskError):
        await asyncio.wait_for(second, scale_to_load(0.5))
    await app._broker.aclose()


def test_a_waiter_ignores_the_events_of_other_jobs(
    app: App, worker: Worker, threads: ThreadPoolExecutor, redis_client: redis.Redis
) -> None:
    mine = send(app, priority=9)  # acquired after the other jobs
    (future,) = start_waiters(threads, redis_client, mine)
    for number in range(50):
        send(app)
        worker.end(number)
    assert not future.done()
    worker.end("mine")
    assert future.result(60) == "mine"


@pytest.mark.every_topology
def test_each_of_many_waiters_gets_the_result_of_its_job(
    app: App, worker: Worker, threads: ThreadPoolExecutor, redis_client: redis.Redis
) -> None:
    results = [send(app) for _ in range(8)]
    futures = start_waiters(threads, redis_client, *results)
    values = {worker.end(number): number for number in range(8)}
    assert [future.result(60) for future in futures] == [values[result.id] for result in results]


@pytest.mark.every_topology
async def test_many_tasks_share_one_reader(app: App, worker: Worker, redis_client: redis.Redis) -> None:
    results = await app.asend_many([app.task(name="work")(print).s() for _ in range(100)])
    before = len(redis_client.client_list())
    tasks = [asyncio.create_task(result.aget(20)) for result in [*results, *results]]
    await asyncio.to_thread(wait_until, lambda: blocked(redis_client) == 1)
    assert len(redis_client.client_list()) <= before + 1
    ended = {worker.end(number): number for number in range(100)}
    assert await asyncio.gather(*tasks) == [ended[result.id] for result in results] * 2
    await asyncio.to_thread(wait_until, lambda: blocked(redis_client) == 0, what="the end of the reader")
    await app._broker.aclose()


async def test_tasks_that_stop_waiting_at_random_moments_leave_no_reader_behind(
    app: App, worker: Worker, redis_client: redis.Redis
) -> None:
    rng, result = random.Random(7), send(app)
    for _ in range(60):
        tasks = [asyncio.create_task(result.aget(20)) for _ in range(3)]
        for task in tasks:
            for _ in range(rng.randrange(30)):
                await asyncio.sleep(0)
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    await app._broker.aclose()
    await asyncio.to_thread(wait_until, lambda: blocked(redis_client) == 0, what="the end of the readers")
    again = asyncio.create_task(result.aget(20))
    await asyncio.to_thread(wait_until, lambda: blocked(redis_client) == 1)
    worker.end("still works")
    assert await asyncio.wait_for(again, scale_to_load(1)) == "still works"
    await app._broker.aclose()


# --- events that are trimmed before they are read ---------------------------------------------------------------------


@pytest.mark.usefixtures("short_rechecks")
def test_a_waiter_gets_the_result_even_if_its_event_was_trimmed(
    app: App, worker: Worker, threads: ThreadPoolExecutor, redis_client: redis.Redis
) -> None:
    (future,) = start_waiters(threads, redis_client, send(app))
    worker.end_without_event(redis_client, "found")
    assert redis_client.xlen(KEYS.events) == 0
    assert future.result(60) == "found"


@pytest.mark.usefixtures("short_rechecks")
async def test_an_asyncio_waiter_gets_the_result_even_if_its_event_was_trimmed(
    app: App, worker: Worker, redis_client: redis.Redis
) -> None:
    task = asyncio.create_task(send(app).aget(20))
    await asyncio.to_thread(wait_until, lambda: blocked(redis_client) == 1)
    worker.end_without_event(redis_client, "found")
    assert await asyncio.wait_for(task, 60) == "found"
    await app._broker.aclose()


@pytest.mark.usefixtures("short_rechecks")
async def test_an_asyncio_waiter_reads_the_job_again_only_after_a_pause(app: App, redis_client: redis.Redis) -> None:
    result = send(app)
    before = script_calls(redis_client)
    with pytest.raises(ResultTimeoutError):
        await result.aget(0.4)  # after half a second, the error says why, which takes another call
    assert script_calls(redis_client) - before <= 2
    await app._broker.aclose()


@pytest.mark.parametrize("keep", [0, -1])
def test_a_constantly_trimmed_stream_does_not_stop_a_waiter(
    app: App, worker: Worker, threads: ThreadPoolExecutor, redis_client: redis.Redis, keep: int
) -> None:
    (future,) = start_waiters(threads, redis_client, send(app, priority=9))
    for _ in range(20):
        send(app)
        worker.end_without_event(redis_client)
    worker.end("mine", keep=keep)
    assert future.result(60) == "mine"


@pytest.mark.every_topology
def test_get_reads_the_result_of_a_removed_job_from_the_stream(app: App, worker: Worker) -> None:
    done, failed = send(app), send(app)
    worker.end("gone", keep=0)
    worker.end(failure="gone too", keep=0)
    assert done.state is JobState.UNKNOWN
    assert done.get(timeout=60) == "gone"
    with pytest.raises(TaskError, match="gone too"):
        failed.get(timeout=60)


@pytest.mark.every_topology
async def test_aget_reads_the_result_of_a_removed_job_from_the_stream(app: App, worker: Worker) -> None:
    done, failed = send(app), send(app)
    worker.end("gone", keep=0)
    worker.end(failure="gone too", keep=0)
    assert await done.aget(5) == "gone"
    with pytest.raises(TaskError, match="gone too"):
        await failed.aget(5)
    await app._broker.aclose()


def test_waiters_get_the_result_of_a_job_that_is_removed_when_it_ends(
    app: App, worker: Worker, threads: ThreadPoolExecutor, redis_client: redis.Redis
) -> None:
    result = send(app)
    first, second = start_waiters(threads, redis_client, result, app.result(result.id))
    worker.end("gone", keep=0)
    assert (first.result(60), second.result(60)) == ("gone", "gone")


# --- jobs that do not exist, and jobs that do not end -----------------------------------------------------------------


async def test_get_raises_an_error_for_a_job_that_never_existed(app: App, worker: Worker) -> None:
    missing = app.result("missing")
    with pytest.raises(JobNotFoundError, match=r"job missing in queue \{default\}"):
        missing.get(timeout=60)
    with pytest.raises(JobNotFoundError):
        await missing.aget(timeout=60)
    assert (missing.state, missing.ready(), missing.traceback, missing.info) == (JobState.UNKNOWN, False, None, None)
    await app._broker.aclose()


@pytest.mark.usefixtures("short_rechecks")
async def test_a_job_that_finished_and_was_removed_before_the_wait_is_not_found(
    app: App, worker: Worker, threads: ThreadPoolExecutor, redis_client: redis.Redis
) -> None:
    result = send(app)
    (future,) = await asyncio.to_thread(start_waiters, threads, redis_client, result)
    worker.end_without_event(redis_client, keep=0)
    assert isinstance(await asyncio.to_thread(future.exception, 5), JobNotFoundError)
    with pytest.raises(JobNotFoundError):
        await result.aget(5)
    await app._broker.aclose()


@pytest.mark.parametrize("seconds", [0.0, 0.2, 0.6])
async def test_get_and_aget_time_out_on_time(app: App, worker: Worker, seconds: float) -> None:
    result = send(app)
    for attempt in (lambda: result.get(seconds), lambda: asyncio.run(result.aget(seconds))):
        started = time.monotonic()
        with pytest.raises(
            ResultTimeoutError, match=f"{result.id} in queue default did not finish within {seconds:g} s"
        ):
            await asyncio.to_thread(attempt)
        assert seconds <= time.monotonic() - started < seconds + 0.3
    worker.end("later")
    assert result.get(timeout=0) == "later"
    assert await result.aget(timeout=0) == "later"
    await app._broker.aclose()


# --- outages ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def persistent_server(server_factory: ServerFactory) -> RedisServer:
    """A server for one test that keeps its data across a crash."""
    return server_factory(appendonly=True)


def test_get_fails_immediately_if_no_server_listens() -> None:
    app = App("results", "redis://127.0.0.1:1/0")
    started = time.monotonic()
    with pytest.raises(BrokerUnavailableError, match="cannot connect to Redis"):
        app.result("x").get()
    assert time.monotonic() - started < scale_to_load(1)


def test_a_waiter_survives_a_restart_of_the_server(persistent_server: RedisServer, threads: ThreadPoolExecutor) -> None:
    app = App("results", persistent_server.url)
    worker, result = Worker(app), send(app)
    with redis.Redis.from_url(persistent_server.url, decode_responses=True) as client:
        (future,) = start_waiters(threads, client, result)
    worker.close()
    persistent_server.kill()
    persistent_server.restart()
    worker.end("survived")
    assert future.result(60) == "survived"
    worker.close()
    app.close()


async def test_asyncio_waiters_survive_a_restart_of_the_server(persistent_server: RedisServer) -> None:
    app = App("results", persistent_server.url)
    worker, results = Worker(app), [send(app) for _ in range(5)]
    with redis.Redis.from_url(persistent_server.url, decode_responses=True) as client:
        client.config_resetstat()
        tasks = [asyncio.create_task(result.aget(20)) for result in results]
        await asyncio.to_thread(wait_until, lambda: script_calls(client) >= 5, what="the first read of each waiter")
    worker.close()
    await asyncio.to_thread(persistent_server.kill)
    await asyncio.to_thread(persistent_server.restart)
    ended = {await asyncio.to_thread(worker.end, number): number for number in range(5)}
    assert await asyncio.gather(*tasks) == [ended[result.id] for result in results]
    worker.close()
    await app._broker.aclose()
    app.close()


@pytest.mark.usefixtures("short_rechecks")
async def test_a_long_outage_fails_every_wait(persistent_server: RedisServer, threads: ThreadPoolExecutor) -> None:
    app = App("results", persistent_server.url)
    result = send(app)
    with redis.Redis.from_url(persistent_server.url, decode_responses=True) as client:
        client.config_resetstat()
        task = asyncio.create_task(result.aget(30))
        await asyncio.to_thread(wait_until, lambda: script_calls(client) >= 1, what="the first read of the waiter")
        (future,) = await asyncio.to_thread(start_waiters, threads, client, result)
    persistent_server.kill()
    with pytest.raises(BrokerUnavailableError):
        await asyncio.wait_for(task, 60)
    assert isinstance(await asyncio.to_thread(future.exception, 10), BrokerUnavailableError)
    app.close()


def test_a_connection_that_breaks_during_the_wait_is_replaced(
    app: App, worker: Worker, threads: ThreadPoolExecutor, redis_client: redis.Redis
) -> None:
    (future,) = start_waiters(threads, redis_client, send(app))
    clients: Any = redis_client.client_list()
    for entry in clients:
        if entry["cmd"] == "xread":
            redis_client.client_kill_filter(_id=entry["id"])
    wait_until(lambda: blocked(redis_client) == 1, what="the waiter on a new connection")
    worker.end("again")
    assert future.result(60) == "again"


def test_a_waiter_pauses_after_each_lost_connection(
    app: App, worker: Worker, redis_client: redis.Redis, redis_server: RedisServer, threads: ThreadPoolExecutor
) -> None:
    job = send(app)
    with FlakyProxy("127.0.0.1", redis_server.port) as proxy:
        behind = App("results", f"redis://127.0.0.1:{proxy.port}/0")
        proxy.drop_replies(4, match="XREAD")
        started = time.monotonic()
        future = threads.submit(behind.result(job.id).get, 60)
        for lost in range(1, 5):  # the event wakes the waiter, and its reply is lost
            wait_until(lambda: blocked(redis_client) == 1, what="the waiter")
            redis_client.xadd(KEYS.events, {"event": "progress", "jobId": "other"})
            proxy.wait_for(lambda at: at.dropped == lost)  # noqa: B023 - used in this iteration only
        worker.end("done")
        assert future.result(60) == "done"
        assert time.monotonic() - started >= 4 * 0.2
        behind.close()


# --- snapshots of jobs ------------------------------------------------------------------------------------------------


async def test_a_snapshot_has_the_progress_of_a_job(app: App, worker: Worker, redis_client: redis.Redis) -> None:
    result = send(app)
    assert (result.state, result.ready(), result.successful(), result.failed()) == (
        JobState.WAITING,
        False,
        False,
        False,
    )
    worker.acquire()
    redis_client.hset(KEYS.job(result.id), "progress", '{"done":5}')
    redis_client.hset(KEYS.job(result.id), "atm", "2")
    assert (result.state, result.progress, result.info) == (JobState.ACTIVE, {"done": 5}, {"done": 5})
    assert (await result.asnapshot()) == result.snapshot()
    assert result.snapshot().attempts_made == 2
    await app._broker.aclose()


def test_a_completed_job_is_ready_and_successful(app: App, worker: Worker) -> None:
    result = send(app)
    worker.end([1])
    assert (result.state, result.ready(), result.successful(), result.failed()) == (
        JobState.COMPLETED,
        True,
        True,
        False,
    )
    assert (result.info, result.traceback, result.progress) == ([1], None, None)


def test_a_failed_job_is_ready_and_has_its_traceback(app: App, worker: Worker, redis_client: redis.Redis) -> None:
    result = send(app)
    worker.end(failure="no")
    redis_client.hset(KEYS.job(result.id), "stacktrace", '["first","last"]')
    assert (result.state, result.ready(), result.successful(), result.failed()) == (JobState.FAILED, True, False, True)
    assert (str(result.info), result.traceback) == (f"job {result.id}: no\n\nlast", "last")
    redis_client.hset(KEYS.job(result.id), "stacktrace", "no json")
    assert result.traceback is None


@pytest.mark.parametrize(
    ("options", "state"),
    [({"countdown": 60}, JobState.DELAYED), ({"priority": 5}, JobState.PRIORITIZED), ({}, JobState.WAITING)],
)
def test_a_result_has_the_state_of_its_job(app: App, worker: Worker, options: dict[str, Any], state: JobState) -> None:
    assert send(app, **options).state is state


@pytest.mark.every_topology
def test_waiters_in_threads_and_in_an_event_loop_work_at_the_same_time(
    app: App, worker: Worker, threads: ThreadPoolExecutor, redis_client: redis.Redis
) -> None:
    one, two = send(app), send(app)
    (future,) = start_waiters(threads, redis_client, one)
    values: list[object] = []
    loop = threading.Thread(target=lambda: values.append(asyncio.run(two.aget(20))))
    loop.start()
    wait_until(lambda: blocked(redis_client) == 2, what="both")
    worker.end(1)
    worker.end(2)
    loop.join(5)
    assert (future.result(60), values) == (1, [2])
