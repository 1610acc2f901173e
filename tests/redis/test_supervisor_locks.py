"""A worker's locks are renewed while a child is busy, and reacquired after they have expired."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest

from bulltask import App
from bulltask.events import (
    Bus,
    Event,
    HeartbeatFailed,
    HeartbeatSucceeded,
    JobRecovered,
    JobReleased,
    JobStalled,
    RedisErrorReply,
    RedisReconnected,
    RedisRecovered,
    RunningJobLostLock,
)
from bulltask.jobs.clock import mono_ms
from bulltask.testing.worker import RedisServer, wait_until
from bulltask.transport.scripts.move import FetchOptions, move_to_active, renew_lock
from bulltask.worker.broker_backoff import ReconnectBackoff
from bulltask.worker.fetch import JobFetcher
from bulltask.worker.locks import Heartbeat, StalledCheck
from bulltask.worker.recovery import JobsOfDeadChild, KilledAttempt, Recovery
from bulltask.worker.slots import CancelReason, Slot, SlotPool, Slots, SlotState, WakeupPipe
from bulltask.worker.supervisor import NamedConnections
from tests.support.server_clients import client_of

pytestmark = pytest.mark.redis

E = TypeVar("E", bound=Event)

LOCK_MS = 30_000
LONG_AGO_MS = LOCK_MS // 2


class Supervised:
    """The services of a supervisor, and two slots of a child that does nothing itself."""

    def __init__(self, url: str) -> None:
        self.app = App("tested", url, max_stalled_count=1)
        self.queues = ["mail", "sms"]
        self.keys = [self.app._broker.keys(queue) for queue in self.queues]
        self.client, self.redis = self.app._broker.client(), client_of(url, decode_responses=True)
        self.emitted: list[Event] = []
        self.bus = Bus()
        self.bus.subscribe(Event, self.emitted.append)
        self.slots = Slots(1, 2)
        self.slots.children[0].reset()
        self.slot, self.other = self.slots.children[0].slots()
        self.backoff = ReconnectBackoff(self.bus, self.app._config)
        broker, config = self.app._broker, self.app._config
        self.heartbeat = Heartbeat(self.keys, self.views, self.client, config, self.bus, self.backoff)
        self.recovery = Recovery(self.keys, self.client, broker.clock, config, self.bus, self.backoff)
        renewed = self.heartbeat.has_renewed
        self.check = StalledCheck(broker, self.keys, renewed, self.client, self.bus, self.backoff)

    def views(self) -> list[Any]:
        return [slot.read() for slot in self.slots.children[0].slots()]

    def acquire(self, slot: Slot, index: int = 0) -> str:
        """Acquire a new job with the slot's token and a lock that expires soon."""
        job_id = self.app.queue(self.queues[index]).add("held").id
        self.client.run(move_to_active(self.keys[index], FetchOptions(slot.token, 5_000, "worker"), self.app._now_ms()))
        return job_id

    def run(self, slot: Slot, index: int = 0) -> str:
        """Acquire a new job and mark its slot as active."""
        job_id = self.acquire(slot, index)
        slot.activate(index, job_id, mono_ms())
        return job_id

    def lock_ttl_ms(self, job_id: str, index: int = 0) -> int:
        ttl_ms: Any = self.redis.pttl(self.keys[index].lock(job_id))
        return int(ttl_ms)

    def expire(self, job_id: str, index: int = 0) -> None:
        """Remove a job's lock, and record that the last stalled check found it without one."""
        self.redis.delete(self.keys[index].lock(job_id))
        self.redis.sadd(self.keys[index].stalled, job_id)

    def events(self, kind: type[E]) -> list[E]:
        return [event for event in self.emitted if isinstance(event, kind)]

    def close(self) -> None:
        self.client.close()
        self.redis.close()
        self.app.close()


@pytest.fixture
def worker(broker_url: str) -> Iterator[Supervised]:
    worker = Supervised(broker_url)
    yield worker
    worker.close()


@pytest.fixture
def on_server(server_factory: Callable[..., RedisServer]) -> Iterator[Callable[..., tuple[Supervised, RedisServer]]]:
    workers: list[Supervised] = []

    def start(**options: Any) -> tuple[Supervised, RedisServer]:
        server = server_factory(**options)
        workers.append(Supervised(server.url))
        return workers[-1], server

    yield start
    for each in workers:
        each.close()


# ---- fetched jobs whose reply the child has not read yet ----


@pytest.mark.every_topology
def test_the_lock_of_a_slowly_fetched_job_is_renewed(worker: Supervised) -> None:
    worker.slot.enter(SlotState.RESERVED, mono_ms() - LONG_AGO_MS)
    job_id = worker.acquire(worker.slot, 1)
    worker.heartbeat.tick(0, 0)
    assert worker.lock_ttl_ms(job_id, 1) > 20_000


def test_the_lock_of_a_job_fetched_while_another_finishes_is_renewed(worker: Supervised) -> None:
    worker.slot.activate(0, "has-ended", mono_ms())
    worker.slot.enter(SlotState.FINISHING, mono_ms() - LONG_AGO_MS)
    job_id = worker.acquire(worker.slot, 1)
    worker.heartbeat.tick(0, 0)
    assert worker.lock_ttl_ms(job_id, 1) > 20_000
    assert worker.events(HeartbeatFailed) == []


def test_a_heartbeat_does_not_search_for_the_job_of_a_recent_fetch(worker: Supervised) -> None:
    worker.slot.enter(SlotState.RESERVED, mono_ms())
    before = worker.redis.info("commandstats").get("cmdstat_evalsha", {"calls": 0})["calls"]
    worker.heartbeat.tick(0, 0)
    assert worker.redis.info("commandstats").get("cmdstat_evalsha", {"calls": 0})["calls"] == before


# ---- outages ----


def test_an_outage_is_reported_once_for_each_queue_and_locks_are_reacquired(
    on_server: Callable[..., tuple[Supervised, RedisServer]],
) -> None:
    worker, server = on_server(appendonly=True)
    jobs = [worker.run(worker.slot, 0), worker.run(worker.other, 0)]
    heartbeat = worker.heartbeat
    heartbeat.tick(0, 0)
    usual_ms = heartbeat.interval_ms
    server.kill()
    for _ in range(3):
        heartbeat.tick(0, 0)  # later ticks leave reconnecting to other services
    assert [(set(event.job_ids), event.attempt) for event in worker.events(HeartbeatFailed)] == [(set(jobs), 1)]
    assert heartbeat.interval_ms < usual_ms
    assert not heartbeat.has_renewed(0)
    assert heartbeat.has_renewed(1), "the worker has no job of that queue"

    server.restart()
    for job_id in jobs:
        worker.expire(job_id)
    worker.check.tick(0, 0)
    worker.backoff.reset()
    worker.check.tick(0, 0)
    assert worker.events(JobStalled) == [], "a check would have made the worker's jobs run twice"
    heartbeat.tick(0, 0)
    assert [worker.lock_ttl_ms(job_id) > 20_000 for job_id in jobs] == [True, True]
    assert heartbeat.interval_ms == usual_ms
    assert heartbeat.has_renewed(0)
    worker.check.tick(0, 0)
    assert worker.events(JobStalled) == []


@pytest.mark.parametrize("condition", ["read-only", "full"])
def test_a_redis_that_is_read_only_or_out_of_memory_is_reported_once(
    on_server: Callable[..., tuple[Supervised, RedisServer]], condition: str
) -> None:
    worker, _ = on_server()
    broker = worker.app._broker
    presence = NamedConnections(broker.client, broker, worker.queues, "worker", worker.backoff)
    job_id = worker.run(worker.slot)
    worker.heartbeat.tick(0, 0)
    if condition == "full":
        worker.redis.config_set("maxmemory", "1")
    else:
        worker.redis.replicaof("127.0.0.1", "1")  # a closed port
    try:
        for _ in range(3):
            for service in (worker.heartbeat, worker.check, presence):
                service.tick(0, 0)
        assert len(worker.events(RedisErrorReply)) == 1
        assert worker.events(RedisRecovered) == []
        if condition == "full":
            worker.redis.config_set("maxmemory", "0")
        else:
            worker.redis.replicaof("NO", "ONE")
        presence.tick(0, 0)
        assert len(worker.events(RedisRecovered)) == 1
        worker.redis.pexpire(worker.keys[0].lock(job_id), 5_000)
        worker.heartbeat.tick(0, 0)
        assert worker.lock_ttl_ms(job_id) > 20_000
    finally:
        presence.close()
    assert not any(client._connection for client in presence._clients)  # type: ignore[attr-defined]


@pytest.mark.parametrize("event", [RedisReconnected(3, LOCK_MS), RedisRecovered("", 3, LOCK_MS)])
def test_after_a_long_outage_the_stalled_check_waits_for_other_workers(worker: Supervised, event: Event) -> None:
    other_job = worker.acquire(worker.slot)
    worker.expire(other_job)
    worker.bus.emit(event)
    worker.check.tick(0, 0)
    assert worker.events(JobStalled) == []


def test_a_short_outage_does_not_postpone_the_stalled_check(worker: Supervised) -> None:
    other_job = worker.acquire(worker.slot)
    worker.expire(other_job)
    worker.bus.emit(RedisReconnected(3, LOCK_MS // 4))
    worker.check.tick(0, 0)
    assert [event.job_id for event in worker.events(JobStalled)] == [other_job]


def test_a_lock_of_another_worker_is_reported_once(worker: Supervised) -> None:
    job_id = worker.run(worker.slot)
    worker.redis.set(worker.keys[0].lock(job_id), "another worker's")
    for _ in range(3):
        worker.heartbeat.tick(0, 0)
    assert worker.events(RunningJobLostLock) == [RunningJobLostLock(job_id, "mail")]
    assert worker.events(HeartbeatFailed) == []
    assert [event.locks for event in worker.events(HeartbeatSucceeded)] == [0, 0, 0]


# ---- stalled jobs ----


def test_job_stalled_has_the_time_when_the_lock_expired(worker: Supervised) -> None:
    seen, unseen, renewed = (worker.acquire(slot) for slot in (worker.slot, worker.other, worker.slot))
    locks = [worker.keys[0].lock(job_id) for job_id in (seen, unseen, renewed)]
    worker.redis.pexpire(locks[0], 200)
    worker.redis.delete(locks[1])
    before_ms = worker.app._now_ms()
    ends_ms = before_ms + worker.redis.pttl(locks[0])
    worker.check.tick(0, 0)
    after_ms = worker.app._now_ms()
    worker.check.tick(0, 0)  # a check that follows another one too soon changes nothing
    wait_until(lambda: not worker.redis.exists(locks[0]), 10, "the expiry of the lock")
    worker.redis.delete(worker.keys[0].stalled_check)
    worker.check.tick(0, 0)
    expired_ms = {event.job_id: event.lock_expired_at_ms for event in worker.events(JobStalled)}
    assert expired_ms.keys() == {seen, unseen}
    assert abs((expired_ms[seen] or 0) - ends_ms) <= after_ms - before_ms + 5
    assert before_ms <= (expired_ms[unseen] or 0) <= after_ms


def test_job_stalled_has_no_time_if_another_worker_has_marked_the_job(worker: Supervised) -> None:
    job_id = worker.acquire(worker.slot)
    worker.expire(job_id)
    worker.check.tick(0, 0)
    assert worker.events(JobStalled) == [JobStalled(job_id, "mail", None)]
    left: Any = worker.redis.pttl(worker.keys[0].lock_expiries)
    assert -2 <= left <= 2 * worker.check.interval_ms, "the recorded times expire"


# ---- expired locks ----


def test_an_expired_lock_is_reacquired_even_if_redis_is_out_of_memory(
    on_server: Callable[..., tuple[Supervised, RedisServer]],
) -> None:
    worker, _ = on_server()
    job_id = worker.run(worker.slot)
    worker.client.run(renew_lock(worker.keys[0], job_id, "not its token", LOCK_MS))  # the server knows the script now
    worker.expire(job_id)
    worker.redis.config_set("maxmemory", "1")
    assert worker.client.run(renew_lock(worker.keys[0], job_id, worker.slot.token, LOCK_MS))
    assert worker.lock_ttl_ms(job_id) > 20_000


@pytest.mark.every_topology
def test_an_expired_lock_is_not_reacquired_if_the_job_was_released(worker: Supervised) -> None:
    job_id = worker.run(worker.slot)
    worker.expire(job_id)
    worker.check.tick(0, 0)
    assert [event.job_id for event in worker.events(JobStalled)] == [job_id]
    assert not worker.client.run(renew_lock(worker.keys[0], job_id, worker.slot.token, LOCK_MS))
    assert worker.lock_ttl_ms(job_id) == -2


@pytest.mark.parametrize("state", [SlotState.WRITTEN, SlotState.RELEASING])
def test_the_lock_of_a_job_is_not_reacquired_after_a_takeover(worker: Supervised, state: SlotState) -> None:
    """The child's next job may take hours. Meanwhile, another worker has acquired the first one and lost its lock."""
    job_id = worker.run(worker.slot)
    worker.slot.enter(state, mono_ms() - LONG_AGO_MS)
    worker.expire(job_id)
    worker.heartbeat.tick(0, 0)
    assert worker.lock_ttl_ms(job_id) == -2
    worker.check.tick(0, 0)
    assert [event.job_id for event in worker.events(JobStalled)] == [job_id]


def test_the_lock_of_a_job_that_may_not_have_been_released_is_renewed(worker: Supervised) -> None:
    job_id = worker.run(worker.slot)
    worker.slot.enter(SlotState.RELEASING, mono_ms() - LONG_AGO_MS)
    worker.heartbeat.tick(0, 0)
    assert worker.lock_ttl_ms(job_id) > 20_000


def test_jobs_of_a_child_that_died_in_an_outage_are_released_immediately(
    worker: Supervised,
) -> None:
    killed, neighbor = worker.run(worker.slot, 0), worker.run(worker.other, 1)
    killed_attempt = KilledAttempt(
        worker.slot.token, 1, killed, CancelReason.HARD_LIMIT, 1_000, will_retry=False, since_ms=mono_ms()
    )
    worker.expire(killed, 0)
    worker.expire(neighbor, 1)
    tokens = (worker.slot.token, worker.other.token)
    jobs = ((0, tokens[0], killed), (1, tokens[1], neighbor))
    worker.recovery.recover(
        JobsOfDeadChild(tokens, frozenset(tokens), mono_ms(), "SIGKILL", False, {tokens[0]: killed_attempt}, jobs)
    )
    assert worker.recovery.pending == 0
    assert [event.job_id for event in worker.events(JobRecovered)] == [neighbor]
    assert worker.app.queue("sms").get_job_state(neighbor) == "waiting"
    assert worker.app.queue("mail").get_job_state(killed) == "failed"


@pytest.mark.parametrize("intentional", [True, False])
def test_a_job_that_a_dead_childs_call_acquires_late_is_released(worker: Supervised, intentional: bool) -> None:
    tokens = (worker.slot.token, worker.other.token)
    worker.recovery.recover(JobsOfDeadChild(tokens, frozenset(tokens), mono_ms(), "SIGKILL", intentional))
    assert worker.recovery.pending == 0
    job_id = worker.acquire(worker.slot, 1)  # the server executes the call after the search

    def released() -> list[str]:
        worker.recovery.tick(0, 0)
        return [event.job_id for event in worker.events(JobReleased)]

    wait_until(lambda: released() == [job_id], 10, "the release of the job")
    job = worker.app.queue("sms").get_job(job_id)
    assert job is not None
    assert (job.get_state(), job.attempts_started) == ("waiting", 0)
    assert worker.redis.zcard(worker.keys[1].marker) == 1


def test_a_child_keeps_a_slowly_fetched_job_unless_another_worker_has_it(worker: Supervised) -> None:
    wakeup_pipe = WakeupPipe()
    pool, control = SlotPool(worker.slots.children[0].slots()), worker.slots.control
    fetcher = JobFetcher(worker.app._broker, worker.queues, worker.bus, "worker", wakeup_pipe, control, pool)
    try:
        for owned in (True, False):
            job_id = worker.app.queue("mail").add("held").id
            fetched = fetcher.client.run(fetcher.fetch_call(0, worker.slot))
            worker.redis.delete(worker.keys[0].lock(job_id))
            if not owned:
                worker.redis.set(worker.keys[0].lock(job_id), "another worker's")
            worker.slot.enter(SlotState.RESERVED, mono_ms() - LONG_AGO_MS - 1_000)
            acquired = fetcher.adopt(0, worker.slot, fetched)
            assert (acquired is not None) == owned
            if acquired is not None:
                assert worker.lock_ttl_ms(job_id) > 20_000
                assert fetcher.renew_lock(acquired)
    finally:
        fetcher.client.close()
        wakeup_pipe.close()
