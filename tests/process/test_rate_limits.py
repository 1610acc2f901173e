"""The worker's ``limiter``, and tasks that rate-limit their queue."""

from __future__ import annotations

import itertools
import signal

import pytest

from bulltask.errors import TaskError
from tests.support.rate_windows import max_starts_per_window
from tests.support.worker_harness import WorkerHarness

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]

TASKS = """
from bulltask.errors import RateLimitQueue


@app.task(bind=True, name="busy")
def busy(self, times=1, duration=0.5):
    record("start", job=self.request.id)
    if self.request.attempts_started <= times:
        self.rate_limit(duration)
    return self.request.attempts_started, self.request.retries


@app.task(bind=True, name="abusy")
async def abusy(self, times=1, duration=0.5):
    record("start", job=self.request.id)
    if self.request.attempts_started <= times:
        raise RateLimitQueue(duration)
    return self.request.attempts_started, self.request.retries


@app.task(name="aquick", bind=True)
async def aquick(self):
    record("start", job=self.request.id)


@app.task(name="wrong")
def wrong(duration):
    raise RateLimitQueue(duration)
"""
BUSY = pytest.mark.parametrize("task", ["busy", "abusy"])


def acquired_ms(harness: WorkerHarness, queue: str = "default") -> list[int]:
    """Return the times at which jobs of the queue were acquired."""
    return [entry.ms for entry in harness.stream(harness.url, harness.keys_of(queue).events).all(event="active")]


# ---- limiter --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("task", "method"), [("quick", "fork"), ("aquick", "fork"), ("aquick", "spawn")])
def test_all_children_share_the_rate_limit(harness: WorkerHarness, method: str, task: str) -> None:
    settings = {"worker_start_method": method, "worker_async_concurrency": 5}
    worker = harness.worker(TASKS, options=["--limiter", "3/400ms"], settings=settings)
    jobs = [harness.app.send_task(task) for _ in range(10)]
    for job in jobs:
        job.get(timeout=60)
    starts = acquired_ms(harness)
    harness.report(max_in_a_window=max_starts_per_window(starts, 400), in_all_ms=starts[-1] - starts[0])
    assert len(starts) == 10
    assert max_starts_per_window(starts, 400) == 3
    assert worker.stop() == 0
    assert worker.warnings() == []


def test_two_workers_with_the_same_limiter_share_the_limit(harness: WorkerHarness) -> None:
    for _ in range(2):
        harness.worker(settings={"limiter": "2/300ms"}, children=1)
    harness.wait_until_idle(2)
    jobs = [harness.app.send_task("quick") for _ in range(8)]
    for job in jobs:
        job.get(timeout=60)
    assert max_starts_per_window(acquired_ms(harness), 300) == 2


def test_a_limiter_sets_a_separate_limit_for_each_queue(harness: WorkerHarness) -> None:
    worker = harness.worker(options=["-Q", "slow,fast,free"], settings={"limiter": "slow=1/300ms, free=none, 5/300ms"})
    names = ["slow"] * 4 + ["fast"] * 12 + ["free"] * 12
    jobs = [harness.app.send_task("quick", queue=queue) for queue in names]
    for job in jobs:
        job.get(timeout=60)
    assert max_starts_per_window(acquired_ms(harness, "slow"), 300) == 1
    assert max_starts_per_window(acquired_ms(harness, "fast"), 300) == 5
    assert max_starts_per_window(acquired_ms(harness, "free"), 300) > 5
    assert harness.redis.exists(harness.keys_of("free").limiter) == 0
    assert worker.warnings() == []


def test_the_global_rate_limit_overrides_the_workers_max(harness: WorkerHarness) -> None:
    # As after setGlobalRateLimit(1, 60000): BullMQ uses its max and the worker's duration.
    harness.redis.hset(harness.keys.meta, mapping={"max": 1, "duration": 60_000})
    harness.worker(settings={"limiter": "5/300ms"})
    jobs = [harness.app.send_task("quick") for _ in range(4)]
    for job in jobs:
        job.get(timeout=60)
    assert max_starts_per_window(acquired_ms(harness), 300) == 1


def test_a_worker_warns_about_a_limiter_for_an_unknown_queue(harness: WorkerHarness) -> None:
    worker = harness.worker(options=["-Q", "default"], settings={"limiter": "defualt=1/s, 5/s"})
    line = worker.wait_for_line("A queue in limiter is used neither by this worker nor by a task of this app")[0]
    assert (line["level"], line["queue"]) == ("warning", "defualt")


# ---- tasks that rate-limit their queue ------------------------------------------------------------------------------


@BUSY
def test_a_task_that_limits_its_queue_runs_again_and_the_attempt_does_not_count(
    harness: WorkerHarness, task: str
) -> None:
    worker = harness.worker(TASKS, settings={"limiter": "1000/s"})
    job = harness.app.send_task(task, max_retries=0)
    harness.events.wait_for(timeout=60, event="waiting", jobId=job.id, prev="active")
    later = harness.app.send_task("quick")
    assert job.get(timeout=60) == [2, 0]
    later.get(timeout=60)
    first, second = harness.wait_for_event("active", job).ms, harness.wait_for_event("active", job, 2).ms
    assert second - first >= 500
    assert harness.wait_for_event("active", later).ms >= second, "the released job runs first"
    assert (harness.field(job, "ats"), harness.field(job, "atm")) == ("2", "1")
    assert harness.field(job, "failedReason") is None
    line = worker.wait_for_line("Job released", job_id=job.id)[0]
    assert line["reason"] == "its task rate-limited the queue for 0.5 s"
    assert worker.warnings() == []


@pytest.mark.parametrize("queues", ["default", "default,other"])
def test_a_task_that_limits_its_queue_is_delayed_even_without_a_limiter(harness: WorkerHarness, queues: str) -> None:
    harness.worker(TASKS, children=1, options=["-Q", queues])
    job = harness.app.send_task("busy", kwargs={"times": 2, "duration": 0.4}, max_retries=0)
    assert job.get(timeout=60) == [3, 0]
    starts = [harness.wait_for_start(job, count).ms for count in (1, 2, 3)]
    pauses = [later - earlier for earlier, later in itertools.pairwise(starts)]
    harness.report(pauses_ms=pauses)
    assert min(pauses) >= 395


def test_an_async_child_does_not_spin_on_a_job_that_limits_its_queue(
    harness: WorkerHarness,
) -> None:
    harness.worker(TASKS, children=1)
    job = harness.app.send_task("abusy", kwargs={"times": 20, "duration": 0.1}, max_retries=0)
    assert job.get(timeout=60) == [21, 0]
    took_ms = harness.wait_for_start(job, 21).ms - harness.wait_for_start(job).ms
    harness.report(took_ms=took_ms)
    # Sometimes the main thread has just fetched a job, which Redis allows without a max.
    assert took_ms >= 1_000


def test_a_limited_queue_does_not_delay_other_queues(harness: WorkerHarness) -> None:
    harness.worker(TASKS, children=1, options=["-Q", "default,other"], settings={"limiter": "1000/s"})
    job = harness.app.send_task("busy", kwargs={"duration": 2})
    harness.wait_for_start(job, timeout=60)
    for _ in range(3):
        harness.app.send_task("quick", queue="other").get(timeout=60)
    assert harness.start_count(job) == 1
    assert job.get(timeout=60) == [2, 0]


@pytest.mark.parametrize(
    ("duration", "why"),
    [("soon", "RateLimitQueue's duration must be a number of seconds or a timedelta"), (0, "must be at least 0.001 s")],
)
def test_an_invalid_rate_limit_duration_fails_the_job(harness: WorkerHarness, duration: object, why: str) -> None:
    harness.worker(TASKS)
    with pytest.raises(TaskError, match=why):
        harness.app.send_task("wrong", kwargs={"duration": duration}).get(timeout=60)


def test_a_job_released_by_a_cold_shutdown_runs_in_the_next_worker_with_a_limiter(
    harness: WorkerHarness,
) -> None:
    settings = {"limiter": "2/300ms"}
    worker = harness.worker(children=1, settings=settings)
    job = harness.hold()
    harness.wait_for_start(job, timeout=60)
    worker.send(signal.SIGQUIT)
    worker.wait()
    harness.worker(children=1, settings=settings)
    harness.wait_for_start(job, 2)
    harness.open_gate("gate", 2)
    assert job.get(timeout=60) == "gate"
    assert (harness.field(job, "ats"), harness.field(job, "atm")) == ("2", "1")
