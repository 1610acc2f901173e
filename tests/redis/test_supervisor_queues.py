"""If one queue is broken, the supervisor and its children keep serving the others."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, cast

import pytest

from bulltask import App
from bulltask.errors import BrokerUnavailableError
from bulltask.events import (
    Bus,
    CrashLimitReached,
    Event,
    HeartbeatFailed,
    HeartbeatSucceeded,
    JobRecovered,
    JobRevoked,
    JobStalled,
    RedisErrorReply,
    RedisRecovered,
)
from bulltask.jobs.clock import mono_ms
from bulltask.transport.client import Client
from bulltask.transport.scripts.move import FetchOptions, move_to_active
from bulltask.worker.broker_backoff import ReconnectBackoff
from bulltask.worker.fetch import JobFetcher
from bulltask.worker.limits import RevocationCheck
from bulltask.worker.locks import Heartbeat, StalledCheck
from bulltask.worker.recovery import JobsOfDeadChild, Recovery
from bulltask.worker.slots import SlotPool, Slots, SlotState, SlotView, WakeupPipe

pytestmark = pytest.mark.redis

QUEUES = ["broken", "sound"]


@pytest.fixture
def app(broker_url: str) -> Iterator[App]:
    app = App("tested", broker_url, max_stalled_count=1)
    yield app
    app.close()


@pytest.mark.every_topology
def test_locks_of_one_queue_are_renewed_while_another_queue_is_broken(
    app: App, client: Client, bus: Bus, emitted: list[Event], redis_client: Any
) -> None:
    keys = [app._broker.keys(queue) for queue in QUEUES]
    views = [SlotView(SlotState.ACTIVE, f"token-{index}", index, f"job-{index}", 0) for index in range(2)]
    for index, each in enumerate(keys):
        redis_client.set(each.lock(f"job-{index}"), f"token-{index}", px=5_000)
    redis_client.set(keys[0].stalled, "not a set")
    Heartbeat(keys, lambda: views, client, app._config, bus, ReconnectBackoff(bus, app._config)).tick(0, 0)
    assert redis_client.pttl(keys[1].lock("job-1")) > 20_000
    assert [event.job_ids for event in emitted if isinstance(event, HeartbeatFailed)] == [("job-0",)]
    assert [event.queue for event in emitted if isinstance(event, HeartbeatSucceeded)] == ["sound"]


def test_stalled_jobs_of_one_queue_are_found_while_another_queue_is_broken(
    app: App, client: Client, bus: Bus, emitted: list[Event], redis_client: Any
) -> None:
    keys = [app._broker.keys(queue) for queue in QUEUES]
    redis_client.set(keys[0].stalled, "not a set")
    job = app.queue("sound").add("lost", {})
    redis_client.lmove(keys[1].wait, keys[1].active)
    redis_client.sadd(keys[1].stalled, job.id)
    StalledCheck(app._broker, keys, lambda _index: True, client, bus, ReconnectBackoff(bus, app._config)).tick(0, 0)
    assert [event.job_id for event in emitted if isinstance(event, JobStalled)] == [job.id]
    assert job.get_state() == "waiting"


@pytest.mark.every_topology
def test_jobs_of_a_dead_child_are_recovered_while_another_queue_is_broken(
    app: App, client: Client, bus: Bus, emitted: list[Event], redis_client: Any
) -> None:
    keys = [app._broker.keys(queue) for queue in QUEUES]
    jobs = [app.queue(queue).add("held", {}) for queue in QUEUES]
    for index, each in enumerate(keys):
        client.run(move_to_active(each, FetchOptions(f"token-{index}", 30_000, "dead"), app._now_ms()))
    redis_client.rename(keys[0].active, f"{keys[0].base}aside")
    redis_client.set(keys[0].active, "not a list")
    recovery = Recovery(keys, client, app._broker.clock, app._config, bus, ReconnectBackoff(bus, app._config))
    tokens = ("token-0", "token-1")
    recovery.recover(JobsOfDeadChild(tokens, frozenset(tokens), mono_ms(), "SIGKILL", intentional=False))
    recovery.tick(0, 0)
    assert [event.job_id for event in emitted if isinstance(event, JobRecovered)] == [jobs[1].id]
    assert jobs[1].get_state() == "waiting"
    assert recovery.pending == 1
    assert [event.queue for event in emitted if isinstance(event, RedisErrorReply)] == ["broken"]

    redis_client.rename(f"{keys[0].base}aside", keys[0].active)
    recovery.tick(0, 0)
    assert [event.job_id for event in emitted if isinstance(event, JobRecovered)] == [jobs[1].id, jobs[0].id]
    assert recovery.pending == 0


def test_a_job_does_not_fail_because_of_crashes_while_another_queue_is_broken(
    app: App, client: Client, bus: Bus, emitted: list[Event], redis_client: Any
) -> None:
    keys = [app._broker.keys(queue) for queue in QUEUES]
    job = app.queue("sound").add("held", {})
    redis_client.set(keys[0].active, "not a list")
    recovery = Recovery(keys, client, app._broker.clock, app._config, bus, ReconnectBackoff(bus, app._config))
    for crash in range(app._config.max_crashes + 1):
        tokens = (f"token-{crash}", f"other-{crash}")
        client.run(move_to_active(keys[1], FetchOptions(tokens[0], 30_000, "dead"), app._now_ms()))
        recovery.recover(JobsOfDeadChild(tokens, frozenset(tokens), mono_ms(), "SIGKILL", intentional=False))
    assert job.get_state() == "waiting"
    assert [event for event in emitted if isinstance(event, CrashLimitReached)] == []


def test_jobs_with_expired_locks_are_left_to_the_stalled_check(
    app: App, client: Client, bus: Bus, redis_client: Any
) -> None:
    keys = [app._broker.keys(queue) for queue in QUEUES]
    redis_client.set(keys[0].active, "not a list")
    recovery = Recovery(keys, client, app._broker.clock, app._config, bus, ReconnectBackoff(bus, app._config))
    died_ms = mono_ms() - app._config.lock_ms - 1
    recovery.recover(JobsOfDeadChild(("token-0",), frozenset(), died_ms, "SIGKILL", intentional=False))
    assert recovery.pending == 0


def test_a_broken_queue_is_reported_once(
    app: App, client: Client, bus: Bus, emitted: list[Event], redis_client: Any
) -> None:
    keys = [app._broker.keys(queue) for queue in QUEUES]
    redis_client.set(keys[0].stalled, "not a set")
    check = StalledCheck(app._broker, keys, lambda _index: True, client, bus, ReconnectBackoff(bus, app._config))
    for _ in range(3):
        redis_client.delete(keys[0].stalled_check)
        check.tick(0, 0)
    assert [event.queue for event in emitted if isinstance(event, RedisErrorReply)] == ["broken"]
    redis_client.delete(keys[0].stalled, keys[0].stalled_check)
    check.tick(0, 0)
    assert [event.queue for event in emitted if isinstance(event, RedisRecovered)] == ["broken"]


def test_a_child_releases_the_jobs_of_a_lost_reply_while_a_queue_is_broken(
    app: App, client: Client, bus: Bus, redis_client: Any
) -> None:
    keys, slots, wakeup_pipe = [app._broker.keys(queue) for queue in QUEUES], Slots(1, 1), WakeupPipe()
    slots.children[0].reset()
    (slot,) = slots.children[0].slots()
    job = app.queue("sound").add("held", {})
    client.run(move_to_active(keys[1], FetchOptions(slot.token, 30_000, "worker"), app._now_ms()))
    redis_client.set(keys[0].active, "not a list")
    pool = SlotPool(slots.children[0].slots())
    fetcher = JobFetcher(app._broker, QUEUES, bus, "worker", wakeup_pipe, slots.control, pool)
    try:
        fetcher.record_lost_call(BrokerUnavailableError("the reply was lost"), slot, 1)
        acquired = fetcher.acquire(slot)
    finally:
        fetcher.client.close()
        wakeup_pipe.close()
    assert acquired is not None
    assert acquired.job.id == job.id
    assert acquired.job.attempts_started == 2


@pytest.mark.every_topology
def test_revoked_jobs_of_one_queue_are_ended_while_another_queue_is_broken(
    app: App, client: Client, bus: Bus, emitted: list[Event], redis_client: Any
) -> None:
    keys = [app._broker.keys(queue) for queue in QUEUES]
    redis_client.set(keys[0].revoked, "not a sorted set")
    queue = app.queue("sound")
    owned, expired, waiting, of_other_worker = (queue.add("n", attempts=9).id for _ in range(4))
    for job_id in (owned, expired, of_other_worker):
        redis_client.lrem(keys[1].wait, 1, job_id)
        redis_client.lpush(keys[1].active, job_id)
        if job_id != expired:
            redis_client.set(keys[1].lock(job_id), "other-worker")
    queue.schedulers.upsert("hourly", name="tick", every=3600)
    (next_job_id,) = (job.id for job in queue.get_jobs(["waiting", "delayed"]) if job.id != waiting)
    revoked = (owned, expired, waiting, of_other_worker, next_job_id)
    revoked_ms = app._now_ms() - 5_000
    redis_client.zadd(keys[1].revoked, dict.fromkeys(revoked, revoked_ms))
    requests: list[tuple[int, set[str]]] = []

    def interrupt(index: int, job_ids: Collection[str]) -> set[str]:
        requests.append((index, set(job_ids)))
        return {owned, expired}

    backoff = ReconnectBackoff(bus, app._config)
    service = RevocationCheck(app._broker, keys, interrupt, client, bus, backoff)
    service.tick(0, 0)
    assert requests == [(1, set(revoked))]
    assert [event.job_id for event in emitted if isinstance(event, JobRevoked)] == [waiting]
    assert queue.get_job_state(waiting) == "failed"
    left = dict(redis_client.zrange(keys[1].revoked, 0, -1, withscores=True))
    assert left == dict.fromkeys([owned, expired, of_other_worker], revoked_ms)
    assert [event.queue for event in emitted if isinstance(event, RedisErrorReply)] == ["broken"]
    assert not backoff.is_active
    redis_client.delete(keys[0].revoked)
    service.tick(0, 0)
    assert [event.queue for event in emitted if isinstance(event, RedisRecovered)] == ["broken"]


def test_revocation_requests_are_not_read_while_redis_is_unavailable(app: App, bus: Bus) -> None:
    backoff = ReconnectBackoff(bus, app._config)
    requests: list[int] = []

    class UnavailableClient:
        def try_many(self, _calls: object) -> list[Any]:
            requests.append(1)
            raise BrokerUnavailableError

    service = RevocationCheck(
        app._broker,
        [app._broker.keys("sound")],
        lambda _i, _ids: set(),
        cast(Client, UnavailableClient()),
        bus,
        backoff,
    )
    service.tick(0, 0)
    service.tick(0, 0)
    assert requests == [1]
    backoff.reset()
    service.tick(0, 0)
    assert requests == [1, 1]
