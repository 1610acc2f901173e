"""``rate_limit``: how often the jobs of one task may start, across all workers of a queue."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import redis

from bulltask import App, Context, JobState
from bulltask.events import Bus, JobStarted, JobThrottled
from bulltask.lua import wrappers
from bulltask.queue import Queue
from bulltask.testing import FakeClock, InlineWorker, use_server
from bulltask.testing.worker import RedisServer
from tests.support.flaky_proxy import FlakyProxy
from tests.support.in_process_child import Child
from tests.support.server_clients import client_of

pytestmark = pytest.mark.redis

START = 1_900_000_000_000


@pytest.fixture
def app(broker_url: str) -> Iterator[App]:
    app = App("tested", "redis://unreachable.invalid:1")
    with use_server(app, broker_url):
        yield app


class Starts(list[tuple[float, Any]]):
    """The time in seconds and the value of each call of the task ``limited``."""

    @property
    def times(self) -> list[float]:
        return [at for at, _ in self]

    @property
    def values(self) -> list[Any]:
        return [value for _, value in self]


@pytest.fixture
def worker(app: App, monkeypatch: pytest.MonkeyPatch) -> Iterator[InlineWorker]:
    """A worker whose clock stands still unless the test advances it."""
    monkeypatch.setattr("bulltask.testing.inline.wall_ms", lambda: START)
    with InlineWorker(app) as worker:
        yield worker


@pytest.fixture
def clock(worker: InlineWorker) -> FakeClock:
    return worker.clock


@pytest.fixture
def starts(app: App, worker: InlineWorker) -> Starts:
    starts = Starts()

    def record(value: Any) -> None:
        starts.append(((worker.clock.now_ms() - START) / 1000, value))

    @app.task(name="limited", rate_limit="10/m")
    def limited(value: Any = None) -> None:
        record(value)

    @app.task(name="other")
    def other(value: Any = None) -> None:
        record(value)

    @app.task(name="fails", bind=True, rate_limit="10/m", max_retries=2, default_retry_delay=1)
    def fails(self: Context, value: Any = None) -> None:
        record((value, self.request.retries, self.request.attempts_started))
        raise ConnectionError

    return starts


@pytest.fixture
def server(broker_url: str) -> Iterator[redis.Redis]:
    with client_of(broker_url, decode_responses=True) as server:
        yield server


@pytest.fixture
def queue(broker_url: str) -> Iterator[Queue]:
    with Queue("default", broker_url) as queue:
        yield queue


def send(app: App, count: int, task: str = "limited", **options: Any) -> list[Any]:
    return [app.send_task(task, (number,), **options) for number in range(count)]


def most_in(seconds: float, times: list[float]) -> int:
    """Return the maximum number of starts in any period of this length."""
    return max(sum(start <= at < start + seconds for at in times) for start in times)


def test_starts_are_spread_evenly_and_no_period_has_more_than_the_limit(
    app: App, worker: InlineWorker, starts: Starts
) -> None:
    send(app, 25)
    worker.run_for(170)
    assert starts.values == list(range(25))
    assert most_in(60, starts.times) == 10
    gaps = [later - earlier for earlier, later in zip(starts.times[1:], starts.times[2:], strict=False)]
    assert all(6 <= gap < 6.2 for gap in gaps), gaps


def test_jobs_of_other_tasks_are_not_throttled(app: App, worker: InlineWorker, starts: Starts) -> None:
    for number in range(5):
        send(app, 5)
        app.send_task("other", (f"other {number}",))
    worker.run_jobs()
    assert starts.values == [0, *(f"other {number}" for number in range(5))]


@pytest.mark.every_topology
def test_each_job_is_throttled_once(app: App, worker: InlineWorker, starts: Starts, server: redis.Redis) -> None:
    jobs = send(app, 20)
    events = worker.run_for(200)
    assert len(starts) == 20
    assert sum(isinstance(event, JobThrottled) for event in events) == 1  # the others are throttled in the same call
    entries: Any = server.xrange("bull:{default}:events")
    throttled = Counter(fields["jobId"] for _, fields in entries if fields["event"] == "delayed")
    assert throttled == Counter(job.id for job in jobs[1:])
    assert [server.hget(f"bull:{{default}}:{job.id}", "ats") for job in jobs] == ["1"] * 20


def test_a_throttled_job_has_not_started(app: App, worker: InlineWorker, starts: Starts, server: redis.Redis) -> None:
    started: list[JobStarted] = []
    app.on(JobStarted, started.append)
    first, second = send(app, 2)
    worker.run_jobs()
    assert [event.job_id for event in started] == [first.id]
    assert second.state is JobState.DELAYED
    assert server.hmget(f"bull:{{default}}:{second.id}", "ats", "atm") == ["0", None]


def test_a_retry_goes_before_the_throttled_jobs_and_waits_for_its_turn(
    app: App, worker: InlineWorker, starts: Starts
) -> None:
    send(app, 3, "fails")
    worker.run_for(60, propagate=False)
    assert [at for at, _ in starts] == pytest.approx([0.0, *(5.46 + 6.06 * n for n in range(8))], abs=0.1)
    # (value, retries, attempts started): the retries of a job run before the jobs that have not started.
    assert starts.values == [(value, retry, retry + 1) for value in range(3) for retry in range(3)]


def test_throttled_jobs_start_in_order_of_priority(app: App, worker: InlineWorker, starts: Starts) -> None:
    for priority in (9, 9, 1, 5, None, 1):
        app.send_task("limited", (priority,), priority=priority)
    worker.run_jobs()
    for priority in (1, 9, None):
        app.send_task("limited", (f"later {priority}",), priority=priority)
    worker.run_for(100)
    assert starts.values == [None, "later None", 1, 1, "later 1", 5, 9, 9, "later 9"]
    assert most_in(60, starts.times) <= 10


def test_a_lifo_job_goes_before_the_throttled_jobs(app: App, worker: InlineWorker, starts: Starts) -> None:
    send(app, 3)
    worker.run_jobs()
    app.send_task("limited", ("lifo",), lifo=True)
    worker.run_for(30)
    assert starts.values == [0, "lifo", 1, 2]


def test_jobs_acquired_too_early_are_throttled_again_in_their_order(
    app: App, worker: InlineWorker, clock: FakeClock, starts: Starts
) -> None:
    send(app, 10)
    worker.run_jobs()
    clock.advance(40)  # no worker is running
    events = worker.run_for(80)
    assert starts.values == list(range(10))
    assert starts.times[1] == 40
    assert most_in(60, starts.times) <= 10
    gaps = [later - earlier for earlier, later in zip(starts.times[1:], starts.times[2:], strict=False)]
    assert min(gaps) > 5.4
    assert sum(isinstance(event, JobThrottled) for event in events) <= 9


def test_a_removed_job_leaves_no_gap(app: App, worker: InlineWorker, starts: Starts, queue: Queue) -> None:
    jobs = send(app, 6)
    worker.run_jobs()
    for job in jobs[2:5]:
        queue.remove(job.id)
    worker.run_for(20)
    assert starts.values == [0, 1, 5]
    assert starts.times[2] - starts.times[1] == pytest.approx(6.06, abs=0.1)


def test_promote_does_not_exceed_the_limit(app: App, worker: InlineWorker, starts: Starts, queue: Queue) -> None:
    jobs = send(app, 3)
    worker.run_jobs()
    queue.promote_jobs()
    worker.run_jobs()
    assert starts.values == [0]
    assert jobs[1].state is JobState.DELAYED
    worker.run_for(20)
    assert starts.values == [0, 1, 2]


def test_a_throttled_job_expires(app: App, worker: InlineWorker, starts: Starts) -> None:
    jobs = send(app, 3, expires=8)
    worker.run_for(20, propagate=False)
    assert starts.values == [0, 1]
    assert jobs[2].state is JobState.FAILED


def test_a_throttled_job_can_be_revoked(app: App, worker: InlineWorker, starts: Starts) -> None:
    jobs = send(app, 3)
    worker.run_jobs()
    jobs[1].revoke()
    worker.run_for(20)
    assert starts.values == [0, 2]


def test_throttled_jobs_start_earlier_when_the_limit_is_raised(
    app: App, broker_url: str, worker: InlineWorker, starts: Starts
) -> None:
    task = app.tasks["limited"]
    task._options = replace(task._options, rate_limit="1/h")
    send(app, 4)
    worker.run_jobs()
    task._options = replace(task._options, rate_limit="10/m")
    app.send_task("limited", ("new",))  # a job that starts or is throttled applies the new limit
    worker.run_for(40)
    assert starts.values == [0, 1, 2, 3, "new"]
    assert starts.times[-1] < 35


def test_a_throttled_job_is_promoted_before_the_waiting_jobs(
    app: App, worker: InlineWorker, clock: FakeClock, starts: Starts
) -> None:
    send(app, 2)
    worker.run_jobs()
    clock.advance(10)
    app.send_task("other", ("other",))
    worker.run_jobs()
    assert starts.values == [0, 1, "other"]


def test_waiting_jobs_of_the_task_are_throttled_together(
    app: App, worker: InlineWorker, starts: Starts, server: redis.Redis
) -> None:
    send(app, 1_000)
    app.send_task("other", ("other",))
    events = worker.run_jobs()
    assert starts.values == [0, "other"]
    assert sum(isinstance(event, JobThrottled) for event in events) == 10
    assert server.zcard("bull:{default}:delayed") == server.zcard("bulltask:{default}:throttled:limited") == 999
    assert server.llen("bull:{default}:wait") == server.llen("bull:{default}:active") == 0


@pytest.mark.every_topology
def test_each_queue_of_a_task_has_its_own_limit(app: App, worker: InlineWorker, starts: Starts) -> None:
    for queue in ("a", "b"):
        for _ in range(2):
            app.send_task("limited", (queue,), queue=queue)
    worker.run_jobs()
    assert sorted(starts.values) == ["a", "b"]


@pytest.mark.parametrize(
    ("settings", "options", "expected"),
    [
        ({"task_default_rate_limit": "1/h"}, {}, 1),
        ({"task_default_rate_limit": "1/h"}, {"rate_limit": 0}, 3),
        ({"task_default_rate_limit": "1/h", "worker_disable_rate_limits": True}, {}, 3),
        ({"task_annotations": {"tested.limited": {"rate_limit": "1/h"}}}, {"rate_limit": "10/s"}, 1),
        ({"task_annotations": {"tested.limited": {"rate_limit": None}}}, {"rate_limit": "1/h"}, 3),
        ({"worker_disable_rate_limits": True}, {"rate_limit": "1/h"}, 3),
    ],
)
def test_the_settings_apply_to_tasks(
    broker_url: str, queue: Queue, settings: dict[str, Any], options: dict[str, Any], expected: int
) -> None:
    app = App("tested", "redis://unreachable.invalid:1", **settings)
    task = app.task(name="tested.limited", **options)(lambda: None)
    with use_server(app, broker_url), InlineWorker(app) as worker:
        for _ in range(3):
            task.delay()
        worker.run_jobs()
    assert queue.get_completed_count() == expected


def test_eager_mode_has_no_limit() -> None:
    app = App("tested", task_always_eager=True)
    task = app.task(name="limited", rate_limit="1/h")(lambda: 1)
    assert [task.delay().get() for _ in range(3)] == [1, 1, 1]


def test_async_tasks_have_limits_too(app: App, worker: InlineWorker) -> None:
    ran: list[int] = []

    @app.task(rate_limit="1/m")
    async def alimited() -> None:
        ran.append(1)

    for _ in range(2):
        alimited.delay()
    worker.run_jobs()
    assert len(ran) == 1
    worker.run_for(61)
    assert len(ran) == 2


def test_a_throttled_job_of_a_scheduler_does_not_stop_the_scheduler(
    app: App, worker: InlineWorker, starts: Starts, queue: Queue
) -> None:
    queue.schedulers.upsert("often", every=1, name="limited", data={"value": 1})
    worker.run_for(31)
    assert 5 <= len(starts) <= 6


def test_a_limit_leaves_no_keys_behind(app: App, worker: InlineWorker, starts: Starts, server: redis.Redis) -> None:
    jobs = send(app, 3)
    worker.run_jobs()
    keys = server.keys("bulltask:{*")
    assert sorted(keys) == ["bulltask:{default}:next-start:limited", "bulltask:{default}:throttled:limited"]
    assert all(server.pttl(key) > 0 for key in keys)
    worker.run_for(60)
    assert server.keys("bulltask:*:throttled:*") == []
    assert not any(server.hexists(f"bull:{{default}}:{job.id}", "bulltask:throttled") for job in jobs)


# ---- in a child ------------------------------------------------------------------------------------------------------


@pytest.fixture
def proxy(redis_server: RedisServer, broker_url: str) -> Iterator[FlakyProxy]:
    with FlakyProxy("127.0.0.1", redis_server.port) as proxy:
        yield proxy


@pytest.mark.parametrize(("sent_before", "throttled_by_the_lost_call"), [(0, False), (1, True)])
def test_after_a_lost_reply_a_job_is_throttled_once_or_waits_for_another_start(
    proxy: FlakyProxy, server: redis.Redis, sent_before: int, throttled_by_the_lost_call: bool
) -> None:
    app, ran, bus = App("tested", f"redis://127.0.0.1:{proxy.port}"), list[int](), Bus(on_error=lambda *_: None)
    throttled: list[JobThrottled] = []
    bus.subscribe(JobThrottled, throttled.append)
    task = app.task(name="limited", rate_limit="1/m")(ran.append)
    child = Child(app, ["default"], bus)
    for number in range(sent_before):
        task.delay(number)
    child.run_waiting()
    job = task.delay(9)
    throttling = wrappers.with_wakeup(wrappers.with_delay("startOrThrottle"))
    server.script_load(throttling.source)  # otherwise, the reply that says that it is unknown would be lost
    proxy.drop_replies(1, match=throttling.sha)
    child.run_waiting()
    child.close()
    assert ran == [*range(sent_before)]  # the job does not start, because the reply was lost
    assert server.zcard("bull:{default}:delayed") == server.zcard("bulltask:{default}:throttled:limited") == 1
    assert server.llen("bull:{default}:active") == 0
    assert server.hget(f"bull:{{default}}:{job.id}", "ats") == "0"
    assert len(throttled) == (0 if throttled_by_the_lost_call else 1)


def test_a_task_without_a_limit_needs_no_additional_round_trip(broker_url: str, server: redis.Redis) -> None:
    app = App("tested", broker_url)
    task = app.task(name="free")(lambda: None)
    child = Child(app, ["default"], Bus(on_error=lambda *_: None))
    for _ in range(10):
        task.delay()
    server.config_resetstat()
    assert child.run_waiting() == 10
    child.close()
    calls: Any = server.info("commandstats")
    assert sum(calls[f"cmdstat_{name}"]["calls"] for name in ("evalsha", "eval") if f"cmdstat_{name}" in calls) <= 13


def test_throttled_jobs_do_not_count_toward_the_maximum_number_of_jobs_of_a_child(broker_url: str) -> None:
    app, ran = App("tested", broker_url, worker_max_tasks_per_child=2), list[str]()
    limited = app.task(name="limited", rate_limit="1/m")(ran.append)
    free = app.task(name="free")(ran.append)
    child = Child(app, ["default"], Bus(on_error=lambda *_: None))
    for number in range(4):
        limited.delay(f"limited {number}")
        free.apply_async((f"free {number}",), countdown=0 if number == 3 else 60)
    child.run_waiting()
    child.close()
    assert ran == ["limited 0", "free 3"]
