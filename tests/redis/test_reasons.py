"""``job.explain()`` and ``queue.explain()`` find each reason why a job does not run, and all of several reasons."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import click
import pytest
import redis
from click.testing import CliRunner, Result

from bulltask import App
from bulltask.cli.main import main
from bulltask.queue import AsyncQueue, FlowJob, Job, Queue
from bulltask.queue.reasons import REASONS, Explanation, Reason
from bulltask.transport.call import QueueKeys, command
from bulltask.transport.permissions import role_grants
from bulltask.transport.workers import WorkerChild, WorkerJob, WorkerState, write_state
from tests.conftest import ServerFactory
from tests.support.command_output import json_of
from tests.support.manual_worker import ManualWorker

pytestmark = pytest.mark.redis

WORKER = "host-7-a1b2c3"


@dataclass
class World:
    """A queue that a case prepares; ``worker`` acquires its jobs, and its name is that of a connected worker."""

    app: App
    redis: Any
    worker: ManualWorker
    url: str
    stack: ExitStack = field(default_factory=ExitStack)

    @property
    def queue(self) -> Queue:
        return self.app.queue("mail")

    @property
    def keys(self) -> QueueKeys:
        return self.queue.context.keys

    def add(self, job_id: str = "j", **options: Any) -> str:
        return self.queue.add("send", {}, job_id=job_id, **options).id

    def acquire(self) -> str:
        return self.worker.acquire()

    def die(self) -> str:
        """Acquire a job, and lose its lock, as when the worker is killed and its lock expires."""
        job_id = self.acquire()
        self.redis.delete(self.keys.lock(job_id))
        return job_id

    def connect(self, queue: str = "{mail}", worker: str = "one") -> None:
        """Connect a client with the name of a worker, by default one of Node.js."""
        name = f"bull:{b64encode(queue.encode()).decode()}:w:{worker}"
        client = redis.Redis.from_url(self.url, client_name=name)
        self.stack.enter_context(closing(client))
        client.ping()

    def register(
        self, *, worker_id: str = WORKER, connected: bool = True, jobs: tuple[WorkerJob, ...] = (), **more: Any
    ) -> None:
        """Store the state of a worker with one child, as its supervisor would."""
        now_ms = self.app._now_ms()
        state = WorkerState(
            **{
                "id": worker_id,
                "at_ms": now_ms,
                "ttl_ms": 15_000,
                "queues": ("mail",),
                "home": "{mail}",
                "state": "run",
                "slots": 1,
                "busy": len(jobs),
                "tasks": ("send",),
                "children": (WorkerChild(pid=42, state="run", jobs=jobs),),
                "stalled_interval_ms": 30_000,
                **more,
            }
        )
        with self.app._broker.pool.client() as client:
            client.run_many(write_state(self.keys, state))
        if connected:
            self.connect(worker=worker_id)

    def explain(self, job_id: str | None) -> Explanation:
        return self.queue.explain(job_id)


@pytest.fixture
def world(app: App, redis_client: Any, broker_url: str) -> Iterator[World]:
    worker = ManualWorker(app._broker, app._broker.keys("mail"))
    with ExitStack() as stack:
        stack.callback(worker.close)
        yield World(app, redis_client, worker, broker_url, stack)


Case = Callable[[World], str | None]
CASES: list[tuple[str, str, Case]] = []


def case(code: str, words: str = "") -> Callable[[Case], Case]:
    """Register a case: its reason comes first, and its sentence matches ``words``."""

    def register(function: Case) -> Case:
        CASES.append((code, words, function))
        return function

    return register


@case("paused", r"Queue mail is paused since \d{4}-.* UTC by .+: no worker")
def paused(world: World) -> str:
    world.connect()
    world.queue.pause()
    return world.add()


@case("paused", r"Queue mail is paused since \d{4}-.* UTC: no worker")
def paused_by_another_client(world: World) -> str:
    world.queue.pause()
    world.redis.delete(world.keys.pause_note)
    return world.add()


@case("paused", "is paused: ")
def paused_by_a_flag_of_zero(world: World) -> str:
    world.add()
    world.redis.hset(world.keys.meta, "paused", 0)
    return "j"


@case("paused-apart", "1 job of queue mail is in the list of a pause by BullMQ 5, .*by bulltask or BullMQ 6 merges")
def resumed_by_bullmq_6_after_a_pause_by_bullmq_5(world: World) -> str:
    job_id = world.add()
    world.queue.pause()
    world.redis.hdel(world.keys.meta, "paused")
    return job_id


@case("paused-apart", "pause by BullMQ 5, .* and 1 in `wait`: do not pause or resume the queue with BullMQ 5")
def paused_by_bullmq_5_and_6(world: World) -> None:
    world.connect()
    resumed_by_bullmq_6_after_a_pause_by_bullmq_5(world)
    world.add("other")


@case("paused", "")
def the_paused_queue_itself(world: World) -> None:
    world.add()
    world.queue.pause()


@case("queue-rate-limit", "used up its rate limit of 1 job; it is free in ")
def rate_limited_queue(world: World) -> str:
    world.connect()
    world.queue.set_global_rate_limit(1, 60)
    world.add("first")
    world.acquire()
    return world.add()


@case("queue-rate-limit", r"rate_limit\(\) has stopped queue mail")
def queue_stopped_by_rate_limit(world: World) -> str:
    world.connect()
    world.queue.rate_limit(60)
    return world.add()


@case("queue-rate-limit", "whose maximum is not in Redis")
def queue_with_a_limiter_of_its_workers(world: World) -> str:
    world.connect()
    world.redis.set(world.keys.limiter, 3, px=60_000)
    return world.add()


@case("global-concurrency", r"may have 1 active job \(its global concurrency\), and has 1: job first for ")
def maxed_queue(world: World) -> str:
    world.connect()
    world.queue.set_global_concurrency(1)
    world.add("first")
    world.acquire()
    return world.add()


@case("global-concurrency", r"first \(lock expired\); 1 of them without a worker")
def maxed_by_a_dead_entry(world: World) -> str:
    world.connect()
    world.queue.set_global_concurrency(1)
    world.add("first")
    world.die()
    return world.add()


@case("delayed", "countdown or eta: it is due at .* in 2 min")
def delayed(world: World) -> str:
    return world.add(delay=120.5)


@case("retry", "Attempt 1 of 3 failed: no server. The next one is due at ")
def waiting_for_a_retry(world: World) -> str:
    world.add(attempts=3, backoff=60)
    job = world.queue.get_next_job("token")
    assert job is not None
    job.move_to_failed("no server")
    return job.id


@case("schedule", "next job of the job scheduler hourly")
def next_job_of_a_scheduler(world: World) -> str:
    world.queue.schedulers.upsert("hourly", cron="0 0 1 1 *", name="send")
    return world.queue.get_delayed()[0].id


@case("due", "has been due for ")
def due_but_still_delayed(world: World) -> str:
    world.connect()
    world.add(delay=60)
    world.redis.zadd(world.keys.delayed, {"j": 4096 * 1_600_000_000_000})
    return "j"


@case("waiting-children", r"waits for 2 child jobs: .*\((waiting|delayed)\), ")
def waiting_for_children(world: World) -> str:
    children = [
        FlowJob("part", "files", {}, {"job_id": "a"}),
        FlowJob("part", "files", {}, {"job_id": "b", "delay": 60}),
    ]
    return world.app.flows().add(FlowJob("send", "mail", {}, {"job_id": "j"}, children)).job.id


@case("child-failed", "The child job a in queue .* has failed, and the job waits for it forever: no")
def waiting_for_a_failed_child(world: World) -> str:
    waiting_for_children(world)
    worker = ManualWorker(world.app._broker, world.app._broker.keys("files"))
    world.stack.callback(worker.close)
    worker.fail()
    return "j"


@case("child-failed", "^Job j: The child job a in queue .* has failed, and the job waits for it forever: no")
def queue_of_a_job_that_waits_for_a_failed_child(world: World) -> None:
    waiting_for_a_failed_child(world)
    world.connect()
    assert world.explain(None).reasons[-1].sentence == "1 job is waiting for child jobs in queue mail, such as j"


@case("child-gone", "1 child job the job waits for was removed, such as bull:{files}:a")
def waiting_for_a_removed_child(world: World) -> str:
    waiting_for_children(world)
    world.redis.delete("bull:{files}:a")
    return "j"


@case("prioritized", "3 jobs come first: 1 without a priority, and 2 with a better priority")
def behind_better_priorities(world: World) -> str:
    world.connect()
    world.add("plain")
    world.add("a", priority=1)
    world.add("b", priority=5)
    return world.add(priority=5)


@case("behind", "2 jobs of queue mail come first")
def behind_other_jobs(world: World) -> str:
    world.connect()
    world.add("a")
    world.add("b")
    return world.add()


@case("behind", "More than 1,000 jobs of queue mail come first")
def far_behind(world: World) -> str:
    world.connect()
    world.redis.rpush(world.keys.wait, *(f"{number}" for number in range(1500)))
    world.add()
    world.redis.lpush(world.keys.wait, *(f"more-{number}" for number in range(1500)))
    return "j"


@case("running", r"is running on worker manual since .* UTC \(")
def running(world: World) -> str:
    world.add()
    return world.acquire()


@case("global-concurrency", "has 1: job first for 20 min$")
def maxed_by_a_job_that_may_be_stuck(world: World) -> str:
    maxed_queue(world)
    world.redis.hset(world.keys.job("first"), "processedOn", world.app._now_ms() - 1_200_000)
    (reason,) = (it for it in world.explain("j").reasons if it.code == "global-concurrency")
    assert reason.command == "bulltask job revoke first --queue mail --terminate"
    return "j"


@case("lock-expired", "expired: worker manual, which was running it .* after a stalled check, in 60.0 s or less")
def worker_that_died(world: World) -> str:
    world.connect()
    world.add()
    return world.die()


@case("lock-expired", "Queue mail has 1 active job without a lock, whose worker .*: j$")
def queue_whose_worker_died(world: World) -> None:
    world.connect()
    world.add()
    world.die()


@case("quarantined", "in 1 process that crashed: it runs with at most 9 other jobs")
def job_that_crashed_its_process(world: World) -> str:
    world.connect()
    world.add()
    world.redis.hset(world.keys.job("j"), "bulltask:crashes", 1)
    return "j"


@case("quarantined", "in 2 processes that crashed: it runs alone")
def job_that_crashed_twice(world: World) -> str:
    world.connect()
    world.add()
    world.redis.hset(world.keys.job("j"), "bulltask:crashes", 2)
    return "j"


@case("will-fail", "as soon as a worker acquires it: child bull:{files}:a failed")
def job_that_will_fail(world: World) -> str:
    world.connect()
    world.add()
    world.redis.hset(world.keys.job("j"), "defa", "child bull:{files}:a failed")
    return "j"


@case("expired", "The job expired at .*: the worker that acquires it will fail it")
def expired(world: World) -> str:
    world.connect()
    return world.add(expires=datetime.now(UTC) - timedelta(seconds=5))


@case("revoked", "was revoked at .*: it has failed, and stays in Redis until it is removed")
def revoked(world: World) -> str:
    world.add()
    world.queue.revoke("j")
    return "j"


@case("revoked", "its worker was told to cancel it")
def revoked_while_running(world: World) -> str:
    world.add()
    job_id = world.acquire()
    world.queue.revoke(job_id, terminate=True)
    return job_id


@case("failed", "after 1 of 1 attempts, and will not be retried: no")
def failed(world: World) -> str:
    world.add(attempts=1)
    return world.worker.fail()


@case("completed", "The job completed at ")
def completed(world: World) -> str:
    world.add()
    return world.worker.complete()


@case("hash-gone", "its hash does not exist: it was deleted, or Redis evicted it")
def job_whose_hash_is_gone(world: World) -> str:
    world.connect()
    world.add()
    world.redis.delete(world.keys.job("j"))
    return "j"


@case("foreign", "is not the hash of a job of BullMQ: it has no field 'name'")
def hash_without_a_name(world: World) -> str:
    world.connect()
    world.add()
    world.redis.delete(world.keys.job("j"))
    world.redis.hset(world.keys.job("j"), "payload", "x")
    return "j"


@case("foreign", "is not the hash of a job of BullMQ: .*WRONGTYPE")
def key_of_another_type(world: World) -> str:
    world.connect()
    world.add()
    world.redis.delete(world.keys.job("j"))
    world.redis.set(world.keys.job("j"), "x")
    return "j"


@case("lost", r"the job is in no state.*meta\.version is bullmq:")
def job_in_no_list(world: World) -> str:
    world.add()
    world.redis.lrem(world.keys.wait, 1, "j")
    return "j"


@case(
    "lost",
    "^Job j: The job's hash exists, but the job is in no state: .* resume by BullMQ 5 after a pause",
)
def queue_whose_jobs_are_in_no_list(world: World) -> None:
    job_in_no_list(world)


@case(
    "deduplicated", "The deduplication id once belongs to job j; new jobs with it are not added until it has finished"
)
def owner_of_a_deduplication_id(world: World) -> str:
    world.connect()
    return world.add(deduplication="once")


@case("deduplicated", r"^Job second was dropped at \d{4}.* UTC: job j has its deduplication id once$")
def a_job_that_was_not_added_because_of_its_deduplication_id(world: World) -> str:
    world.add(deduplication="once")
    world.add("second", deduplication="once")
    return "second"


@case("no-worker", "")
def owner_of_a_deduplication_id_without_a_worker(world: World) -> str:
    world.add(deduplication="once")
    assert world.explain("j").codes == ("no-worker", "deduplicated"), "the id holds other jobs"
    return "j"


@case("deduplicated", "belongs to job j; ")
def a_deduplication_id_instead_of_a_job(world: World) -> str:
    world.add(deduplication="once")
    return "once"


@case("deduplicated", "belongs to job j, whose hash is gone")
def a_deduplication_id_whose_owner_is_gone(world: World) -> str:
    world.add(deduplication="once")
    world.redis.delete(world.keys.job("j"))
    return "once"


@case("wrong-hash-tag", "The job is in the queue mail, not in {mail}")
def job_under_the_other_spelling(world: World) -> str:
    with closing(App("node", world.url, queue_hash_tag=False)) as app:
        return app.queue("mail").add("send", {}, job_id="j").id


@case("wrong-hash-tag", "The workers are connected to the queue mail, which is another queue than {mail}")
def workers_under_the_other_spelling(world: World) -> str:
    world.connect("mail")
    return world.add()


@case("wrong-hash-tag", "Redis has no queue {mail}, but a queue mail, with 1 waiting job: ")
def queue_under_the_other_spelling(world: World) -> None:
    world.connect()
    job_under_the_other_spelling(world)


@case("wrong-hash-tag", "The queue mail, which is another queue than {mail}, has 1 waiting job and no workers: ")
def queue_with_workers_whose_other_spelling_has_the_jobs(world: World) -> None:
    job_under_the_other_spelling(world)
    world.connect()
    world.add("here")


@case("deduplicated", "once belongs to job j, which has finished; new jobs with it are not added until [0-9-]{10} ")
def finished_owner_of_a_deduplication_id(world: World) -> str:
    world.add(deduplication={"id": "once", "ttl": 60}, remove_on_complete=False)
    world.worker.complete()
    assert world.explain("j").codes == ("completed", "deduplicated")
    return "once"


@case("deduplicated", "which has finished; new jobs with it are not added until the id is removed")
def deduplication_id_of_a_finished_job(world: World) -> str:
    finished_owner_of_a_deduplication_id(world)
    world.redis.persist(world.keys.deduplication("once"))
    return "once"


def bull_4_adds_a_job(world: World) -> None:
    """Write what npm's bull 4 writes with ``new Queue("mail").add("send", {}, {jobId: "j"})``."""
    world.redis.set("bull:mail:id", 1)
    opts = '{"jobId":"j","attempts":1,"delay":0,"timestamp":1764444444444}'
    fields = {"name": "send", "data": "{}", "opts": opts, "timestamp": 1764444444444, "delay": 0, "priority": 0}
    world.redis.hset("bull:mail:j", mapping=fields)
    world.redis.lpush("bull:mail:wait", "j")


@case("bull-queue", r"^Queue mail is one of Bull \(npm's bull\), which is not BullMQ")
def queue_of_bull_in_place_of_the_own(world: World) -> None:
    bull_4_adds_a_job(world)
    assert world.explain(None).codes == ("bull-queue", "no-worker", "empty")
    with closing(App("node", world.url, queue_hash_tag=False)) as app:
        for explanation in (app.queue("mail").explain(), app.queue("mail").explain("j")):
            assert explanation.codes == ("bull-queue",), "no worker of BullMQ is proposed"
            assert explanation.reasons[0].command == "bulltask migrate-bull mail"


@case("bull-queue", "^Queue mail is one of Bull")
def job_of_bull(world: World) -> str:
    bull_4_adds_a_job(world)
    shown = bulltask(world, "why", "j").output
    assert shown.startswith("Job j, queue mail: unknown\n\nQueue mail is one of Bull"), "all queues are searched"
    return "j"


@case("bull-queue", "^Queue mail is one of Bull")
def queue_of_bull_beside_the_own_with_a_worker(world: World) -> None:
    bull_4_adds_a_job(world)
    world.connect()
    world.add("other")


@case("no-worker", "No worker of queue mail is connected to redis://")
def without_a_worker(world: World) -> str:
    world.connect("{other}")
    return world.add()


@case("no-worker", "")
def queue_without_a_worker(world: World) -> None:
    world.add()


@case("no-worker", "is connected to redis://.*, only to files, other$")
def workers_of_other_queues_only(world: World) -> str:
    world.connect("{other}")
    world.connect("{files}")
    return world.add()


@case("workers-paused", "1 of 1 worker of queue mail is paused, though the queue is not: host-7-a1b2c3")
def paused_worker(world: World) -> str:
    world.register(state="paused")
    return world.add()


@case("workers-closing", "1 of 2 workers of queue mail is shutting down: host-7-a1b2c3")
def one_worker_stops_and_one_is_paused(world: World) -> str:
    world.register(state="closing")
    world.register(worker_id="host-8-a1b2c3", state="paused")
    return world.add()


@case("queue-cancelled", "1 of 1 worker of queue mail is told to fetch no jobs from it: host-7-a1b2c3")
def worker_that_was_told_to_cancel_the_queue(world: World) -> str:
    world.register(cancelled=("mail",))
    return world.add()


@case("no-permits", "is at the number of jobs that --max-jobs allows")
def worker_without_permits(world: World) -> str:
    world.register(permits=0)
    return world.add()


@case("no-children", "is without a child process that acquires jobs")
def worker_whose_children_start(world: World) -> str:
    world.register(children=(WorkerChild(pid=42, state="starting"),))
    return world.add()


@case("child-stopped", "Stopped by a signal: child 42 of worker host-7-a1b2c3; jobs there keep their locks")
def worker_whose_only_child_was_stopped(world: World) -> str:
    world.register(children=(WorkerChild(pid=42, state="stopped", jobs=(long_job(world),)),))
    return world.add()


def long_job(world: World) -> WorkerJob:
    return WorkerJob(id="other", queue="files", since_ms=world.app._now_ms() - 120_500, state="active")


@case("workers-busy", "1 worker of queue mail has its only slot busy: other of queue files for 2 min")
def worker_whose_slots_are_busy(world: World) -> str:
    world.register(jobs=(long_job(world),))
    return world.add()


@case("workers-busy", "1 worker of queue mail has its only child busy: other of queue files for 2 min")
def worker_whose_child_runs_a_sync_job_and_has_free_slots(world: World) -> str:
    world.register(jobs=(long_job(world),), slots=100)
    return world.add()


@case("next", "")
def worker_whose_child_runs_an_async_job_beside_others(world: World) -> str:
    world.register(children=(WorkerChild(pid=42, state="run", jobs=(long_job(world),), free=99),), slots=100, busy=1)
    return world.add()


@case("unknown-task", r"has the task send \(did you mean sent\?\); the worker host-7-a1b2c3 has other, sent$")
def task_with_a_typo(world: World) -> str:
    world.register(tasks=("other", "sent"))
    return world.add()


@case("empty", "Queue mail has no jobs that wait")
def queue_whose_incompatible_and_throttled_jobs_were_removed(world: World) -> None:
    world.connect()
    world.redis.hset(world.keys.task_rates, "send", "1800 host")
    for job_id in ("incompatible", "throttled"):
        world.add(job_id, delay=60)
    world.redis.zadd(world.keys.incompatible, {"incompatible": 1})
    world.redis.zadd(world.keys.throttled("send"), {"throttled": 1})
    assert world.explain(None).codes == ("task-rate-limit", "delayed")
    for job_id in ("incompatible", "throttled"):
        world.queue.remove(job_id)
    assert world.explain(None).codes == ("empty",)


@case("task-rate-limit", "^The rate limit of task send was removed, but has delayed the job, which starts .* in 2 min$")
def job_that_a_removed_rate_limit_has_throttled(world: World) -> str:
    world.connect()
    world.add(delay=120.5)
    world.redis.hset(world.keys.task_rates, "send", "none host")
    world.redis.hset(world.keys.job("j"), "bulltask:throttled", 1)
    world.redis.zadd(world.keys.throttled("send"), {"j": 1})
    of_queue = world.explain(None).reasons[0]
    assert "The rate limit of task send was removed, but has delayed 1 job; " in of_queue.sentence
    mend = "bulltask jobs mail --task send --state delayed --promote"
    assert {of_queue.command, world.explain("j").reasons[0].command} == {mend}
    return "j"


@case("delayed", "1 job is delayed in queue mail, and none waits; ")
def queue_without_waiting_jobs_whose_worker_is_busy(world: World) -> None:
    world.register(jobs=(long_job(world),))
    world.add(delay=60)


@case("delayed", "")
def delayed_job_whose_worker_is_busy(world: World) -> str:
    queue_without_waiting_jobs_whose_worker_is_busy(world)
    assert world.explain("j").codes == ("delayed",)
    return "j"


@case("workers-busy", "has its only slot busy")
def queue_with_due_jobs_whose_worker_is_busy(world: World) -> None:
    queue_without_waiting_jobs_whose_worker_is_busy(world)
    world.redis.zadd(world.keys.delayed, {"j": 4096 * 1_600_000_000_000})
    world.add("plain")
    assert world.explain(None).codes == ("workers-busy", "due")


@case("due", "1 delayed job of queue mail is due, the first for .*: a worker moves it when it next asks for a job")
def queue_with_due_jobs(world: World) -> None:
    due_but_still_delayed(world)
    world.add("plain")
    working = world.explain(None).reasons[1]
    assert (working.code, working.evidence["waiting"]) == ("working", 2)


@case("unknown-task", "No worker of queue mail has the task send; the worker host-7-a1b2c3 has call")
def task_that_no_worker_has(world: World) -> str:
    world.register(tasks=("call",))
    return world.add()


@case("unknown-task", "Only 1 of 2 workers of queue mail has the task send; .*host-7")
def task_that_only_a_busy_worker_has(world: World) -> str:
    world.register(tasks=("call",))
    world.register(worker_id="host-8-a1b2c3", busy=1)
    return world.add()


@case("worker-silent", "The supervisor of host-7-a1b2c3 has not written its state for some time")
def worker_that_is_stopped(world: World) -> str:
    world.connect(worker=WORKER)
    return world.add()


@case("worker-silent", "The supervisor of host-7-a1b2c3")
def worker_whose_state_is_old(world: World) -> str:
    world.register(at_ms=world.app._now_ms() - 12_000)
    return world.add()


@case("no-worker", "")
def worker_that_was_killed_a_moment_ago(world: World) -> str:
    world.register(at_ms=world.app._now_ms() - 12_000, connected=False)
    return world.add()


@case("no-worker", f"{WORKER} was until a moment ago, and was killed, or reconnects")
def busy_worker_that_has_just_been_killed(world: World) -> str:
    world.register(jobs=(long_job(world),), connected=False)
    return world.add()


@case("worker-gone", "the job runs again after a worker of the queue has started")
def job_whose_worker_has_just_been_killed(world: World) -> str:
    world.add()
    job = WorkerJob(id="j", queue="mail", since_ms=1, state="active")
    world.register(jobs=(job,), connected=False)
    world.redis.hset(world.keys.job(world.acquire()), "pb", WORKER)
    return "j"


@case("queue-rate-limit", "used up its rate limit of 3 jobs; it is free in ")
def limiter_of_the_workers_as_they_store_it(world: World) -> str:
    world.register(limiter={"mail": {"max": 3, "duration_ms": 60_000}})
    world.redis.set(world.keys.limiter, 3, px=60_000)
    return world.add()


@case("next", "")
def key_of_a_limiter_that_no_worker_has(world: World) -> str:
    world.register()
    world.redis.set(world.keys.limiter, 3, px=60_000)
    return world.add()


@case("global-concurrency", r"first \(its worker is gone\)")
def maxed_by_a_job_whose_worker_is_gone(world: World) -> str:
    world.register()
    world.queue.set_global_concurrency(1)
    world.add("first")
    world.redis.hset(world.keys.job(world.acquire()), "pb", "host-9-a1b2c3")
    return world.add()


@case("worker-gone", "is gone. Its lock expires in .*, and the job runs again after a stalled check, in ")
def job_whose_worker_is_gone(world: World) -> str:
    world.register()
    world.add()
    world.redis.hset(world.keys.job(world.acquire()), "pb", "host-9-a1b2c3")
    return "j"


@case("worker-gone", "Queue mail has 1 active job whose worker is gone, .*: j$")
def queue_with_a_job_whose_worker_is_gone(world: World) -> None:
    job_whose_worker_is_gone(world)


@case("no-stalled-check", r"No worker of the queue looks for stalled jobs \(skip_stalled_check\)")
def stalled_job_that_nobody_looks_for(world: World) -> str:
    world.register(stalled_interval_ms=None)
    world.add()
    return world.die()


@case("lock-expired", "after a stalled check, in 2.0 s or less")
def stalled_job_with_the_workers_interval(world: World) -> str:
    world.register(stalled_interval_ms=1_000)
    world.add()
    return world.die()


@case("prefetched", "Child 42 of worker host-7-a1b2c3 has acquired the job in advance; it runs other")
def prefetched_job(world: World) -> str:
    world.add()
    jobs = [
        WorkerJob(id=job_id, queue="mail", state=state) for job_id, state in (("other", "active"), ("j", "prefetched"))
    ]
    world.register(jobs=tuple(jobs))
    return world.acquire()


@case("running", r"The job is running in child 42 on worker manual since ")
def job_in_a_known_child(world: World) -> str:
    world.add()
    world.register(jobs=(WorkerJob(id="j", queue="mail", since_ms=1, state="active"),))
    return world.acquire()


@case("batch-filling", r"waits for others of its batch, for \d+\.\d s or less; it has 1 of 9 jobs")
def job_in_a_batch(world: World) -> str:
    world.add()
    job = WorkerJob(id="j", queue="mail", since_ms=world.app._now_ms(), state="active")
    world.register(jobs=(job,), batches={"send": {"size": 9, "wait_ms": 60_000}})
    return world.acquire()


@case("clocks-apart", "timestamp is 2 h ahead of Redis' clock: the clock of its sender is wrong")
def job_of_a_sender_whose_clock_is_ahead(world: World) -> str:
    world.register()
    return world.add(timestamp=datetime.now(UTC) + timedelta(hours=2, seconds=1))


@case("clocks-apart", "^The job's timestamp is 2 h ahead of Redis' clock")
def delayed_job_of_a_sender_whose_clock_is_ahead(world: World) -> str:
    world.register()
    world.add(timestamp=datetime.now(UTC) + timedelta(hours=2, seconds=-1), delay=2)
    assert world.explain("j").codes == ("clocks-apart", "delayed")
    return "j"


@case("clocks-apart", "^The timestamp of job j is 2 h ahead of Redis' clock: ")
def queue_of_a_sender_whose_clock_is_ahead(world: World) -> None:
    delayed_job_of_a_sender_whose_clock_is_ahead(world)


@case("schedule-late", "The next job of the job scheduler hourly was due .* ago$")
def schedule_that_is_late(world: World) -> None:
    world.connect()
    next_job_of_a_scheduler(world)
    move_schedule(world, keep_job=True)


@case("schedule-late", "ago, and this job is missing")
def schedule_whose_job_is_missing(world: World) -> None:
    world.connect()
    next_job_of_a_scheduler(world)
    move_schedule(world, keep_job=False)


def move_schedule(world: World, *, keep_job: bool) -> None:
    ms = 1_600_000_000_000
    if keep_job:
        world.redis.hset(world.keys.job(f"repeat:hourly:{ms}"), "name", "send")
    world.redis.zadd(world.keys.repeat, {"hourly": ms})


@case("marker-lost", "Workers are idle and were not woken up")
def lost_marker(world: World) -> str:
    world.connect()
    world.add()
    world.redis.delete(world.keys.marker)
    return "j"


@case("not-acquired", "no job is active, but the next job has been waiting for 30.0 s: the children .* hang")
def job_that_idle_workers_leave_alone(world: World) -> str:
    world.register()
    world.add(timestamp=datetime.now(UTC) - timedelta(seconds=30.02))
    return "j"


@case("not-acquired", "no job is active, but the next job has been waiting for 30.0 s")
def queue_that_idle_workers_leave_alone(world: World) -> None:
    job_that_idle_workers_leave_alone(world)


@case("lock-expired", "It runs again after a worker of the queue has started and found it")
def stalled_job_without_any_worker(world: World) -> str:
    world.add()
    return world.die()


@case("worker-gone", "the job runs again after a worker of the queue has started and found it$")
def job_whose_worker_was_the_only_one(world: World) -> str:
    world.add()
    world.redis.hset(world.keys.job(world.acquire()), "pb", "host-9-a1b2c3")
    return "j"


@case("lock-expired", "after a worker of the queue has started and found it$")
def stalled_job_whose_only_worker_is_stopped(world: World) -> str:
    world.connect(worker=WORKER)
    world.add()
    return world.die()


@case("next", "Nothing holds the job: it runs next in queue mail")
def next_job(world: World) -> str:
    world.connect()
    return world.add()


@case("next", "Nothing holds the job: it runs next in queue mail; 1 job is active: first")
def next_job_behind_one_of_node(world: World) -> str:
    world.connect()
    world.add("first")
    world.acquire()
    return world.add()


@case("working", "Nothing holds queue mail: 1 job active, 1 waiting")
def queue_that_works(world: World) -> None:
    world.connect()
    world.add("a")
    world.acquire()
    world.add()


@case("empty", "Queue mail has no jobs that wait; 0 jobs are active")
def empty_queue(world: World) -> None:
    world.connect()
    world.queue.set_meta({"version": "bullmq:5.62.0"})


@case("delayed", "1 job is delayed in queue mail, and none waits; the first is due in 2 min")
def queue_of_delayed_jobs(world: World) -> None:
    world.connect()
    world.add(delay=120.5)


@case("unknown-queue", "has no queue {mail}: nobody has sent a job to it")
def unknown_queue(world: World) -> None:
    pass


@case("released", "Workers that stopped have released the job 2 times; it continues from its checkpoint")
def job_with_a_checkpoint_of_a_worker_that_stopped(world: World) -> str:
    world.register()
    world.add()
    world.redis.hset(world.keys.job("j"), mapping={"bulltask:releases": 2, "bulltask:checkpoint": "{}"})
    return "j"


@case("running", "its worker is shutting down, and releases it if it does not end in time, with its checkpoint$")
def checkpointed_job_of_a_worker_that_stops(world: World) -> str:
    world.add()
    world.redis.hset(world.keys.job("j"), "bulltask:checkpoint", "{}")
    world.register(state="closing", jobs=(WorkerJob(id="j", queue="mail", since_ms=1, state="active"),))
    return world.acquire()


@case("unknown-job", "has no job missing: it was removed, or never added")
def unknown_job(world: World) -> str:
    return "missing"


@pytest.mark.parametrize(("code", "words", "prepare"), [pytest.param(*it, id=it[2].__name__) for it in CASES])
def test_the_reason_is_found_and_comes_first(world: World, code: str, words: str, prepare: Case) -> None:
    explanation = world.explain(prepare(world))
    reason = explanation.reasons[0]
    assert (reason.code, explanation.queue) == (code, "mail"), str(explanation)
    assert re.search(words, reason.sentence), reason.sentence
    assert reason.evidence
    check_command(reason, world)
    json.dumps(explanation.to_json())


def check_command(reason: Reason, world: World) -> None:
    """Check that the command of a reason exists: bulltask's, of redis-cli, or a method of a queue or job."""
    if reason.command is None:
        return
    if reason.command.startswith("app.queue("):
        methods = re.findall(r"\.(\w+)\(", reason.command)[1:]
        assert methods, reason.command
        owner: Any = world.queue
        for method in methods:
            assert hasattr(owner, method), reason.command
            owner = Job if method == "get_job" else owner
        return
    program, *words = shlex.split(reason.command.removeprefix("BULLTASK_QUEUE_HASH_TAG=true "))
    if program == "kill":
        return
    if program == "redis-cli":
        assert world.redis.execute_command("COMMAND", "INFO", words[0]), reason.command
        return
    assert program == "bulltask", reason.command
    context = click.Context(main)
    found: click.Command = main
    while isinstance(found, click.Group) and words and not words[0].startswith("-"):
        child_command = found.get_command(context, words.pop(0))
        assert child_command is not None, reason.command
        found = child_command
    options = {
        name for parameter in (*found.params, *main.params) for name in (*parameter.opts, *parameter.secondary_opts)
    }
    assert {word for word in words if word.startswith("-")} <= options, reason.command


def test_a_queue_names_how_many_deduplication_ids_keep_new_jobs_out(world: World) -> None:
    world.add("timed", deduplication={"id": "timed", "ttl": 60})
    world.worker.complete()
    assert [(it.code, it.sentence) for it in world.explain(None).reasons][-1] == (
        "deduplicated",
        "1 deduplication id keeps new jobs out, such as timed, which belongs to job timed",
    )
    world.add("later", delay=60, deduplication="once")
    world.add("free", deduplication="removed")
    world.queue.remove_deduplication_key("removed")
    (reason,) = (it for it in world.explain(None).reasons if it.code == "deduplicated")
    assert reason.sentence == "2 deduplication ids keep new jobs out, such as once, which belongs to job later"
    assert reason.evidence["jobs read"] == 3


def test_every_reason_has_a_case() -> None:
    elsewhere = {"redis-unreachable", "redis-loading", "redis-full", "redis-read-only", "cannot-see"}
    assert {code for code, _, _ in CASES} | elsewhere | {"incompatible"} == set(REASONS)


def test_the_reference_lists_every_reason() -> None:
    page = Path("docs/reference/reasons.md").read_text().partition("\n## ")[0]
    rows = dict(re.findall(r"^\| `([a-z-]+)` \| (.*) \|$", page, re.MULTILINE))
    assert rows == REASONS


def test_several_reasons_are_all_named_in_their_order(world: World) -> None:
    world.queue.set_global_rate_limit(1, 60)
    world.queue.set_global_concurrency(1)
    world.add("dead")
    world.die()
    world.queue.pause()
    world.add(delay=60, deduplication="once")
    assert world.explain("j").codes == (
        "delayed",
        "paused",
        "no-worker",
        "queue-rate-limit",
        "global-concurrency",
        "deduplicated",
    )
    (limited,) = (reason for reason in world.explain("j").reasons if reason.code == "queue-rate-limit")
    assert limited.command == "bulltask queue limit mail RATE"


def test_the_asyncio_queue_and_the_job_itself_explain_the_same(world: World) -> None:
    world.queue.pause()
    job = world.queue.add("send", {})
    expected = job.explain()
    assert expected.codes == ("paused", "no-worker")
    assert expected.reasons[0].to_json()["certainty"] == "proved"

    async def explain() -> list[Explanation]:
        async with AsyncQueue("mail", world.url) as queue:
            found = await queue.get_job(job.id)
            assert found is not None
            return [await found.explain(), await queue.explain(job.id), await queue.explain()]

    first, second, whole = asyncio.run(explain())
    assert first.codes == second.codes == expected.codes
    assert whole.codes == expected.codes
    assert (first.state, whole.state) == ("waiting", None)


def test_the_times_of_a_reason_are_those_of_the_server(world: World) -> None:
    world.add(delay=100)
    reason = world.explain("j").reasons[0]
    assert reason.expected_s == pytest.approx(100, abs=5)
    assert reason.expected_at is not None
    assert abs(reason.expected_at - datetime.now(UTC)) < timedelta(seconds=105)


@pytest.mark.every_topology
def test_an_explanation_reads_each_node_of_a_cluster(app: App) -> None:
    queue, children = app.queue("mail{s}"), [FlowJob("part", f"files{{s}}{number}") for number in range(3)]
    queue.set_global_concurrency(1)
    flow = app.flows().add(FlowJob("send", queue.name, children=children))
    queue.add("send", {})
    assert queue.get_next_job("token") is not None
    waiting = queue.add("send", {})
    queue.pause()
    assert flow.job.explain().codes == ("waiting-children", "paused", "no-worker")
    assert waiting.explain().codes == ("paused", "no-worker", "global-concurrency")
    assert queue.explain().codes == ("paused", "no-worker", "global-concurrency")


@pytest.mark.every_topology
def test_the_doctor_looks_at_each_node_of_a_cluster(app: App) -> None:
    for name in ("mail", "files"):
        app.queue(name).add("send", {}, job_id="j")
    files = app.queue("files").context
    files.run(command("LREM", files.keys.wait, 0, "j"))
    result = CliRunner().invoke(main, ["-b", str(app.conf.broker_url), "doctor", "--json"])
    codes = {(it["code"], it["queue"]) for it in json_of(result, "doctor")["findings"]}
    assert {("no-persistence", None), ("no-worker", "mail"), ("lost", "files")} <= codes


@pytest.mark.every_topology
def test_the_doctor_mends_each_node_of_a_cluster(app: App) -> None:
    for name in ("mail", "files", "parts"):
        context = app.queue(name).context
        app.queue(name).add("send", {}, job_id="j")
        context.run(command("HSET", context.keys.job("gone"), "bulltask:crashes", 1))
    policy = "maxmemory-policy"
    with app._broker.pool.client() as client:
        client.run_on_all_nodes(command("CONFIG", "SET", policy, "allkeys-lru"))
        try:
            result = CliRunner().invoke(main, ["-b", str(app.conf.broker_url), "doctor", "--json", "--fix", "--yes"])
            set_to = client.run_on_all_nodes(command("CONFIG", "GET", policy, parse_reply=lambda reply: reply[1]))
        finally:
            client.run_on_all_nodes(command("CONFIG", "SET", policy, "noeviction"))
    assert set(set_to) == {b"noeviction"}
    fixed = json_of(result, "doctor")["fixed"]
    records = {f"1 crash record of queue {name} removed" for name in ("mail", "files", "parts")}
    assert records < set(fixed)
    assert len(fixed) == 4


@pytest.mark.parametrize("field", ["timestamp", "opts", "atm", "processedOn", "pb", "bulltask:crashes", "defa", "deid"])
def test_a_malformed_field_prevents_no_explanation(world: World, field: str) -> None:
    world.register()
    world.add(delay=60)
    for value in ("1e999", "-", "[]", "\xff", ""):
        world.redis.hset(world.keys.job("j"), field, value)
        world.redis.hset(world.keys.meta, mapping={"max": value, "concurrency": value})
        assert "delayed" in world.explain("j").codes
    world.redis.zadd(world.keys.delayed, {"j": "inf"})
    json.dumps(world.explain("j").to_json(), allow_nan=False)


# Redis itself, and users who may not read everything.


def test_a_full_server_is_named(world: World) -> None:
    job_id = world.add()
    world.redis.config_set("maxmemory", "1mb")
    try:
        reason = world.explain(job_id).reasons[0]
    finally:
        world.redis.config_set("maxmemory", 0)
    assert reason.code == "redis-full"
    assert re.search(r"is full: it uses [\d,]+ of 1,048,576 bytes", reason.sentence)
    assert reason.evidence["maxmemory_policy"] == "noeviction"


def test_a_server_that_cannot_be_reached_is_a_reason(world: World) -> None:
    with closing(App("lost", "redis://127.0.0.1:1")) as app:
        explanation = app.queue("mail").explain("j")
        assert (explanation.state, explanation.codes) == (None, ("redis-unreachable",))
        assert app.queue("mail").explain().codes == ("redis-unreachable",)
        check_command(explanation.reasons[0], world)


@pytest.mark.one_server
def test_a_replica_is_named(server_factory: ServerFactory) -> None:
    server = server_factory()
    with closing(App("shop", server.url)) as app, redis.Redis.from_url(server.url) as plain:
        job = app.queue("mail").add("send", {})
        plain.replicaof("127.0.0.1", 1)
        assert "redis-read-only" in job.explain().codes


@pytest.mark.one_server
def test_a_reader_may_read_all_that_an_explanation_needs(world: World) -> None:
    world.connect()
    world.queue.pause()
    world.queue.set_global_concurrency(1)
    waiting_for_children(world)
    url = restricted(world, role_grants(["reader"]).rules())
    with closing(App("reader", url)) as app:
        assert app.queue("mail").explain("j").codes == ("waiting-children", "paused")
        assert app.queue("mail").explain().codes == ("paused", "waiting-children")


@pytest.mark.one_server
def test_what_may_not_be_read_is_said_and_is_not_taken_for_nothing(world: World) -> None:
    world.connect()
    world.queue.set_global_concurrency(1)
    world.add("first")
    world.acquire()
    world.add()
    url = restricted(world, ["~*", "+@all", "-info", "-client|list", "-hmget", "-lpos"])
    with closing(App("narrow", url)) as app:
        explanation = app.queue("mail").explain("j")
    assert explanation.codes == ("cannot-see",)
    reason = explanation.reasons[0]
    assert reason.certainty == "cannot see"
    assert {"info", "clients", "meta"} <= set(reason.evidence["refused"])
    assert "ACL SETUSER narrow +hmget" in reason.sentence
    check_command(reason, world)
    restricted(world, ["~*", "+@all", "-zcard", "-llen"])
    with closing(App("narrow", url)) as app:
        assert app.queue("mail").explain().codes == ("cannot-see",), "a count that was refused is not 0"


def restricted(world: World, rules: list[str]) -> str:
    world.redis.execute_command("ACL", "SETUSER", "narrow", "reset", "on", ">secret", *rules)
    world.stack.callback(world.redis.acl_deluser, "narrow")
    return world.url.replace("redis://", "redis://narrow:secret@")


# The command.


def bulltask(world: World, *args: str) -> Result:
    return CliRunner().invoke(main, [*args, "-b", world.url])


def test_the_command_explains_a_job_that_it_finds_in_any_queue(world: World) -> None:
    world.queue.pause()
    world.add()
    shown = bulltask(world, "why", "j")
    assert shown.exit_code == 0, shown.output
    assert shown.output.startswith("Job j, queue mail: waiting\n\nQueue mail is paused since ")
    assert "\n  paused: meta.version=bullmq:" in shown.output
    assert "No worker of queue mail is connected" in shown.output
    assert f"\n  $ bulltask -b {world.url} worker -A APP -Q mail\n" in shown.output


def test_the_command_explains_a_queue_and_prints_json(world: World) -> None:
    assert bulltask(world, "why", "-Q", "mail").exit_code == 4
    world.queue.pause()
    shown = bulltask(world, "why", "-Q", "mail", "--json")
    document = json_of(shown, "why")
    assert shown.exit_code == 0
    assert [reason["code"] for reason in document["reasons"]] == ["paused", "no-worker", "empty"]
    assert document["job_id"] is None


def test_printed_commands_are_for_the_same_app_and_server(world: World, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "shop_why.py").write_text(f"import bulltask\napp = bulltask.App('shop', {world.url!r})\n")
    world.queue.pause()
    world.add(timestamp=datetime.now(UTC) + timedelta(hours=2))
    server = redis.Redis.from_url(world.url).connection_pool.connection_kwargs
    cli = f"redis-cli -h {server['host']} -p {server['port']} TIME"
    shown = CliRunner().invoke(main, ["-A", "shop_why", "why", "j", "--queue-hash-tag"]).output
    assert "\n  $ bulltask -A shop_why queue resume mail --queue-hash-tag\n" in shown, shown
    assert "\n  $ BULLTASK_QUEUE_HASH_TAG=true bulltask -A shop_why worker -Q mail\n" in shown, shown
    assert f"\n  $ {cli}" in shown, shown
    document = json_of(bulltask(world, "job", "show", "j", "--json"), "job show")
    commands = [reason["command"] for reason in document["redis"]["why"]]
    assert commands == [
        f"bulltask -b {world.url} queue resume mail",
        f"bulltask -b {world.url} worker -A APP -Q mail",
        cli,
    ]


def test_a_proposed_worker_has_the_prefix_and_the_hash_tag_of_the_command(world: World) -> None:
    with closing(App("node", world.url, queue_hash_tag=False, prefix="prod")) as app:
        app.queue("mail").add("send", {}, job_id="j")
    shown = bulltask(world, "why", "j", "--prefix", "prod", "--no-queue-hash-tag")
    start = "BULLTASK_QUEUE_HASH_TAG=false BULLTASK_PREFIX=prod bulltask"
    assert f"\n  $ {start} -b {world.url} worker -A APP -Q mail\n" in shown.output
    shown = bulltask(world, "why", "j", "--prefix", "prod")
    assert shown.exit_code == 0
    assert "The job is in the queue mail, not in {mail}: " in shown.output
    left_out = bulltask(world, "jobs", "--oldest", "--prefix", "prod").stderr
    assert left_out.startswith("without mail (--no-queue-hash-tag)\nthe oldest 0 jobs of 0 queues; "), left_out
    why = "why j --queue mail --no-queue-hash-tag --prefix prod"
    assert f"\n  $ bulltask -b {world.url} {why}\n" in shown.output, "without -Q, other spellings are searched, too"


def test_sentences_and_evidence_fit_the_terminal_and_commands_stay_in_one_line(world: World, monkeypatch: Any) -> None:
    world.queue.pause()
    world.add()
    monkeypatch.setenv("COLUMNS", "80")
    lines = bulltask(world, "why", "j").output.splitlines()
    assert max(len(line) for line in lines if not line.startswith("  $ ")) <= 80
    assert f"  $ bulltask -b {world.url} queue resume mail" in lines


def test_the_command_finds_the_queue_of_a_deduplication_id_and_of_a_job_without_a_hash(world: World) -> None:
    world.app.queue("files").add("send", {}, job_id="owner", deduplication="once")
    assert "The deduplication id once belongs to job owner" in bulltask(world, "why", "once").output
    world.app.queue("files").add("send", {}, job_id="second", deduplication="once")
    dropped = bulltask(world, "why", "second")
    assert (dropped.exit_code, "Job second was dropped at " in dropped.output) == (0, True)
    assert f"\n  $ bulltask -b {world.url} why owner --queue files\n" in dropped.output
    world.add()
    world.redis.delete(world.keys.job("j"))
    shown = bulltask(world, "why", "j")
    assert (shown.exit_code, "Job j, queue mail: waiting" in shown.output) == (0, True)


@pytest.mark.parametrize(
    "command", ["why j -Q mail", "job show j --queue mail", "job revoke j -Q mail", "result j -Q mail"]
)
def test_a_job_of_another_queue_is_not_said_to_be_missing(world: World, command: str) -> None:
    world.app.queue("files").add("send", {}, job_id="j")
    shown = bulltask(world, *command.split())
    assert shown.exit_code == 4
    assert "job 'j' is not in queue mail, but in files: use --queue" in shown.stderr


def test_the_exit_codes_of_the_command(world: World) -> None:
    missing = bulltask(world, "why", "missing")
    assert missing.exit_code == 4
    assert "No queue at redis://" in missing.stderr
    document = json_of(bulltask(world, "why", "missing", "--json"), "why")
    assert (document["queue"], document["reasons"][0]["code"]) == ("", "unknown-job")
    assert document["reasons"][0]["sentence"].startswith("No queue at redis://")
    assert "--queue" not in document["reasons"][0]["command"]
    assert bulltask(world, "why", "missing", "-Q", "mail").exit_code == 4
    assert bulltask(world, "why").exit_code == 2
    world.add()
    misspelt = bulltask(world, "why", "-Q", "mial")
    assert (misspelt.exit_code, misspelt.stderr) == (4, "Did you mean queue mail?\n")
    lost = CliRunner().invoke(main, ["why", "j", "-Q", "mail", "-b", "redis://127.0.0.1:1"])
    assert (lost.exit_code, "redis-unreachable" in lost.output) == (1, True)
    assert CliRunner().invoke(main, ["why", "-Q", "mail", "-b", "redis://127.0.0.1:1"]).exit_code == 1


def test_job_show_says_why_an_unfinished_job_does_not_run(world: World) -> None:
    world.queue.pause()
    world.add()
    shown = bulltask(world, "job", "show", "j")
    assert re.search(r"\nWhy it does not run\n  Queue mail is paused since ", shown.output), shown.output
    document = json_of(bulltask(world, "job", "show", "j", "--json"), "job show")
    assert [reason["code"] for reason in document["redis"]["why"]] == ["paused", "no-worker"]


def test_a_wrong_clock_of_this_machine_is_named(world: World, time_machine: Any) -> None:
    world.register()
    world.add()
    world.explain("j")  # connects
    time_machine.move_to(datetime.now(UTC) + timedelta(seconds=7201))
    reason = world.explain("j").reasons[0]
    assert (reason.code, reason.certainty) == ("clocks-apart", "likely")
    assert "This machine's clock is 2 h ahead of Redis' clock" in reason.sentence
