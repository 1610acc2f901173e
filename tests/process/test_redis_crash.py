"""Redis is killed under load and restarts with its append-only file."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import redis

from bulltask import App, AsyncResult, BrokerError
from bulltask.testing.worker import RedisServer
from tests.support.machine_load import scale_to_load
from tests.support.streams import server_ms
from tests.support.worker_harness import WorkerHarness

pytestmark = pytest.mark.process

CHILDREN = 2
PRODUCERS = 4


class Load:
    """Several producers. Failed sends are not counted, as their job may be stored or not."""

    def __init__(self) -> None:
        self.acknowledged: list[AsyncResult[None]] = []
        self.failed = 0
        self.done = threading.Event()
        self._grown = threading.Condition()

    def produce(self, app: App) -> None:
        while not self.done.wait(0.004):
            try:
                job = app.send_task("quick")
            except BrokerError:
                self.failed += 1
                continue
            with self._grown:
                self.acknowledged.append(job)
                self._grown.notify_all()

    def wait_for_more(self, count: int) -> None:
        """Wait until ``count`` more jobs are acknowledged."""
        with self._grown:
            target = len(self.acknowledged) + count
            assert self._grown.wait_for(lambda: len(self.acknowledged) >= target, 20)


@contextmanager
def load_on(harness: WorkerHarness) -> Iterator[Load]:
    load = Load()
    threads = [threading.Thread(target=load.produce, args=(harness.sender(),)) for _ in range(PRODUCERS)]
    for thread in threads:
        thread.start()
    try:
        yield load
    finally:
        load.done.set()
        for thread in threads:
            thread.join()


def test_a_redis_crash_under_load_loses_no_acknowledged_job(
    harness_on: Callable[[str], WorkerHarness], server_factory: Callable[..., RedisServer]
) -> None:
    server = server_factory(appendonly=True)
    harness = harness_on(server.url)
    worker = harness.worker(children=CHILDREN, settings={"lock_duration": 30})
    harness.app.send_task("quick").get(timeout=60)
    first_job_ms = []
    with load_on(harness) as load:
        for outage in (1, 4):  # the supervisor's attempt to reconnect; the fourth is about a second after the first
            load.wait_for_more(200)
            attempts = len(worker.logged("Redis reconnecting", attempt=outage))
            server.kill()
            worker.wait_for_line("Redis reconnecting", count=attempts + 1, attempt=outage)
            server.restart()
            with redis.Redis.from_url(server.url) as client:
                assert client.ping()
                back_ms = server_ms(client)
            first_job_ms.append(_first_completed_after(harness, back_ms) - back_ms)
            load.wait_for_more(50)
    for job in load.acknowledged:
        job.get(timeout=60)

    starts = Counter(entry["job"] for entry in harness.journal.all(what="start"))
    repeated = sum(starts.values()) - len(starts)
    harness.report(
        acknowledged=len(load.acknowledged),
        failed=load.failed,
        first_job_ms=first_job_ms,
        run_twice=repeated,
    )
    assert [job.id for job in load.acknowledged if not starts[job.id]] == []
    assert repeated <= CHILDREN * len(first_job_ms)
    assert max(first_job_ms) <= scale_to_load(2000)
    assert harness.redis.llen(harness.keys.active) == 0
    assert worker.stop() == 0


def _first_completed_after(harness: WorkerHarness, moment_ms: int) -> int:
    """Return when the first job after ``moment_ms`` completed, in server time."""
    found: list[int] = []
    while not found:
        seen = len(harness.events.all(event="completed"))
        harness.events.wait_for(seen + 1, event="completed")
        found = [entry.ms for entry in harness.events.seen if entry.ms >= moment_ms and entry["event"] == "completed"]
    return found[0]


def test_a_job_that_runs_in_an_outage_longer_than_its_lock_is_not_run_twice(
    harness_on: Callable[[str], WorkerHarness], server_factory: Callable[..., RedisServer]
) -> None:
    server = server_factory(appendonly=True)
    harness = harness_on(server.url)
    worker = harness.worker(children=2, settings={"lock_duration": 1, "stalled_interval": 1})
    job = harness.hold()
    harness.wait_for_start(job)
    server.kill()
    worker.wait_for_line("Redis reconnecting", attempt=8)  # after about four seconds
    server.restart()
    worker.wait_for_line("Redis reconnected")
    later = harness.app.send_task("quick", countdown=3)  # several stalled checks
    later.get(timeout=60)
    harness.open_gate("gate", 2)
    assert job.get(timeout=60) == "gate"
    assert harness.start_count(job) == 1
    assert worker.logged("Lock lost") == []
    assert worker.stop() == 0


def test_a_worker_runs_jobs_again_after_redis_has_lost_all_data(
    harness_on: Callable[[str], WorkerHarness], server_factory: Callable[..., RedisServer]
) -> None:
    server = server_factory(appendonly=False)
    harness = harness_on(server.url)
    worker = harness.worker(children=2)
    lost = harness.hold()
    harness.wait_for_start(lost)
    server.kill()
    server.restart()
    back_ms = server_ms(harness.redis)
    assert harness.app.send_task("quick").get(timeout=60) is None
    first_job_ms = harness.stream(harness.url, harness.keys.events).wait_for(event="completed")[0].ms - back_ms
    harness.report(first_job_ms=first_job_ms)
    assert first_job_ms <= scale_to_load(2000)
    harness.open_gate()
    assert worker.wait_for_line("Lock lost")[0]["job_id"] == lost.id
    assert harness.app.send_task("quick").get(timeout=60) is None
    assert worker.logged("Child died") == []
    assert worker.stop() == 0
