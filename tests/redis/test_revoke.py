"""Tests of revoking waiting and running jobs, and of the callers that wait for their results."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from bulltask import App, AsyncResult, TaskError, TaskRevokedError
from bulltask.config.settings import Settings
from bulltask.errors import LockMismatchError, SchedulerJobError
from bulltask.jobs.job import RunningJob
from bulltask.jobs.names import JobState, Revocation
from bulltask.lua import loader, wrappers
from bulltask.queue import FlowJob, FlowProducer, Queue
from bulltask.transport.call import QueueKeys
from bulltask.transport.client import Client
from bulltask.transport.scripts.job import RevocationRequests, finish_revoked, revocation_requests, revoke
from bulltask.transport.scripts.move import FetchOptions, FinishOptions, move_to_finished
from tests.support.manual_worker import ManualWorker
from tests.support.streams import server_ms

pytestmark = pytest.mark.redis

KEYS = QueueKeys("bull", "{mail}", "mail")
HOUR_MS = 3_600_000


def events(client: Any, job_id: str) -> list[dict[str, str]]:
    """Return the events of a job, without its id."""
    entries = [fields for _, fields in client.xrange(KEYS.events) if fields.get("jobId") == job_id]
    return [{name: value for name, value in fields.items() if name != "jobId"} for fields in entries]


def lists_with(client: Any, job_id: str) -> list[str]:
    """Return the names of the queue's lists and sets that hold an id."""
    lists = [key for key in ("wait", "paused", "active") if job_id in client.lrange(KEYS.base + key, 0, -1)]
    zsets = ("prioritized", "delayed", "waiting-children", "completed", "failed")
    return lists + [key for key in zsets if client.zscore(KEYS.base + key, job_id) is not None]


def add_waiting_job(queue: Queue) -> str:
    return queue.add("n", {"size": 1}).id


def add_prioritized_job(queue: Queue) -> str:
    return queue.add("n", priority=3).id


def add_delayed_job(queue: Queue) -> str:
    return queue.add("n", delay=3600).id


def add_paused_job(queue: Queue) -> str:
    queue.pause()
    return queue.add("n").id


def add_waiting_parent(queue: Queue) -> str:
    with FlowProducer(broker=lambda: queue.context.broker) as flows:
        return flows.add(FlowJob("parent", "mail", {}, {}, [FlowJob("child", "other{mail}")])).job.id


@pytest.mark.parametrize(
    "make", [add_waiting_job, add_prioritized_job, add_delayed_job, add_paused_job, add_waiting_parent]
)
@pytest.mark.parametrize("terminate", [False, True])
def test_revoking_a_job_that_is_not_active_fails_it_immediately(
    queue: Queue, redis_client: Any, make: Callable[[Queue], str], terminate: bool
) -> None:
    job_id, other = make(queue), queue.add("n", delay=10).id
    assert queue.revoke(job_id, terminate=terminate) == "revoked"
    assert lists_with(redis_client, job_id) == ["failed"]
    assert redis_client.hget(KEYS.job(job_id), "failedReason") == "revoked"
    last = events(redis_client, job_id)[-1]
    assert last == {"event": "failed", "failedReason": "revoked", "prev": "active"}
    assert queue.get_job_state(other) is JobState.DELAYED
    assert not redis_client.exists(KEYS.revoked, KEYS.lock(job_id))
    assert queue.revoke(job_id, terminate=terminate) is Revocation.FINISHED


@pytest.mark.every_topology
def test_a_revoked_job_is_not_retried(queue: Queue, redis_client: Any) -> None:
    job = queue.add("n", attempts=5, backoff=1)
    assert queue.revoke(job.id) is Revocation.REVOKED
    assert lists_with(redis_client, job.id) == ["failed"]
    assert [event["event"] for event in events(redis_client, job.id)] == ["added", "waiting", "failed"]


@pytest.mark.every_topology
def test_a_revoked_job_that_was_moved_emits_the_same_events_as_any_other(queue: Queue, redis_client: Any) -> None:
    job, moved = queue.add("n", attempts=1), queue.add("n")
    opts = {"attempts": 2, "bulltask": {"v": 1, "retries": 1}}
    redis_client.hset(KEYS.job(moved.id), "opts", json.dumps(opts))
    for each in (job, moved):
        assert queue.revoke(each.id) is Revocation.REVOKED
    assert events(redis_client, moved.id) == events(redis_client, job.id)


def test_get_and_aget_raise_task_revoked_error(app: App) -> None:
    job = app.send_task("n", queue="mail")
    other = app.send_task("n", queue="mail")
    assert job.revoke() == "revoked"
    with pytest.raises(TaskRevokedError, match=f"job {job.id}: revoked") as caught:
        job.get(timeout=20)
    assert isinstance(caught.value, TaskError)
    assert isinstance(job.info, TaskRevokedError)

    async def use() -> None:
        assert await other.arevoke() is Revocation.REVOKED
        with pytest.raises(TaskRevokedError):
            await other.aget(timeout=20)
        await app.aclose()

    asyncio.run(use())


@pytest.mark.every_topology
def test_revoke_notifies_a_caller_that_is_already_waiting(app: App) -> None:
    job = app.send_task("n", queue="mail")

    async def use() -> None:
        waiter = asyncio.create_task(job.aget(timeout=20))
        await asyncio.sleep(0)
        await job.arevoke()
        with pytest.raises(TaskRevokedError):
            await waiter
        await app.aclose()

    asyncio.run(use())


def test_a_failure_with_the_reason_revoked_is_not_a_revocation(app: App, redis_client: Any) -> None:
    job: AsyncResult[Any] = app.send_task("n", queue="mail")
    trace = 'Traceback (most recent call last):\n  File "x.py", line 1, in f\nValueError: revoked\n'
    redis_client.lrem(KEYS.wait, 1, job.id)
    redis_client.zadd(KEYS.failed, {job.id: 1})
    redis_client.hset(KEYS.job(job.id), mapping={"failedReason": "revoked", "stacktrace": json.dumps([trace])})
    with pytest.raises(ValueError, match="revoked"):
        job.get(timeout=20)


def test_a_running_job_continues_unless_terminate_is_set(
    queue: Queue, manual_worker: ManualWorker, redis_client: Any
) -> None:
    job = queue.add("n")
    manual_worker.acquire()
    assert queue.revoke(job.id) == "running"
    assert not redis_client.exists(KEYS.revoked)
    assert queue.revoke(job.id, terminate=True) == "terminating"
    assert redis_client.zrange(KEYS.revoked, 0, -1) == [job.id]
    assert lists_with(redis_client, job.id) == ["active"]
    manual_worker.finish(job.id, "done")
    assert job.get_state() is JobState.COMPLETED


def test_revoking_an_unknown_job_stores_no_revocation_request(queue: Queue, redis_client: Any) -> None:
    redis_client.zadd(KEYS.revoked, {"gone": 1})
    assert queue.revoke("gone", terminate=True) == "unknown"
    assert not redis_client.exists(KEYS.revoked)


def test_a_job_that_is_in_no_list_is_not_changed(queue: Queue, redis_client: Any) -> None:
    redis_client.hset(KEYS.job("lost"), mapping={"name": "n", "opts": "{}"})
    assert queue.revoke("lost") == "unknown"
    assert lists_with(redis_client, "lost") == []


def test_a_job_that_cannot_be_read_can_be_revoked(queue: Queue, redis_client: Any) -> None:
    redis_client.hset(KEYS.job("broken"), mapping={"name": "n", "opts": "{no JSON"})
    redis_client.lpush(KEYS.wait, "broken")
    assert queue.revoke("broken") == "revoked"
    assert lists_with(redis_client, "broken") == ["failed"]


def test_revoking_the_next_job_of_a_scheduler_raises_an_error(queue: Queue, redis_client: Any) -> None:
    queue.schedulers.upsert("hourly", name="tick", every=3600)
    (job,) = queue.get_jobs(["waiting", "delayed"])
    before = lists_with(redis_client, job.id)
    with pytest.raises(SchedulerJobError):
        queue.revoke(job.id)
    assert lists_with(redis_client, job.id) == before != []


def test_a_postponed_job_of_a_scheduler_can_be_revoked(queue: Queue) -> None:
    queue.schedulers.upsert("hourly", name="tick", every=3600)
    job = queue.get_next_job("t")  # adds the next job
    assert job is not None
    job.move_to_delayed(60)
    assert queue.revoke(job.id) == "revoked"
    assert queue.get_delayed_count() == 1


def test_a_revoked_job_with_remove_on_fail_is_removed_after_its_event(queue: Queue, redis_client: Any) -> None:
    job = queue.add("n", remove_on_fail=True)
    assert queue.revoke(job.id) == "revoked"
    assert not redis_client.exists(KEYS.job(job.id))
    assert events(redis_client, job.id)[-1]["failedReason"] == "revoked"
    assert queue.revoke(job.id) == "unknown"


def test_revoke_frees_the_deduplication_id(queue: Queue) -> None:
    job = queue.add("n", deduplication="d", delay=3600)
    assert queue.get_deduplication_job_id("d") == job.id
    queue.revoke(job.id)
    assert queue.get_deduplication_job_id("d") is None


@pytest.mark.every_topology
def test_a_revoked_job_can_be_retried_manually(queue: Queue) -> None:
    job = queue.add("n")
    queue.revoke(job.id, terminate=True)
    job.retry()
    assert job.get_state() is JobState.WAITING
    queue.revoke(job.id)
    queue.retry_jobs(revoked=True)
    assert job.get_state() is JobState.WAITING


@pytest.mark.parametrize("count", [1, 2, 3, 1000])
def test_retry_jobs_leaves_revoked_jobs_failed(
    queue: Queue, redis_client: Any, manual_worker: ManualWorker, count: int
) -> None:
    jobs, now_ms = queue.add_bulk([{"name": "n"}] * 7), server_ms(redis_client)
    for number, job in enumerate(jobs):
        if number % 2:
            manual_worker.fail()
        else:
            queue.revoke(job.id)
        redis_client.zadd(KEYS.failed, {job.id: now_ms - 10 + number})
    queue.retry_jobs(count=count)
    assert redis_client.lrange(KEYS.wait, 0, -1) == [jobs[number].id for number in (5, 3, 1)]
    assert [job.failed_reason for job in queue.get_failed()] == ["revoked"] * 4
    assert [job.failed_reason for job in queue.get_waiting()] == [None] * 3
    assert not redis_client.exists(KEYS.temporary[0])


def test_retry_jobs_retries_only_jobs_that_failed_before_the_given_time(
    queue: Queue, redis_client: Any, manual_worker: ManualWorker
) -> None:
    early, revoked, late = queue.add_bulk([{"name": "n"}] * 3)
    manual_worker.fail()
    queue.revoke(revoked.id)
    manual_worker.fail()
    redis_client.zadd(KEYS.failed, {early.id: 1, revoked.id: 2, late.id: 3})
    queue.retry_jobs(before_ms=2)
    assert [job.id for job in queue.get_waiting()] == [early.id]
    assert {job.id for job in queue.get_failed()} == {revoked.id, late.id}


@pytest.mark.parametrize("state", ["failed", "completed"])
def test_retry_jobs_includes_jobs_whose_worker_has_a_clock_that_is_ahead(
    queue: Queue, redis_client: Any, manual_worker: ManualWorker, state: str
) -> None:
    job = queue.add("n")
    manual_worker.fail() if state == "failed" else manual_worker.complete()
    key = KEYS.failed if state == "failed" else KEYS.completed
    redis_client.zincrby(key, 5_000, job.id)
    queue.retry_jobs(state=state)
    assert [waiting.id for waiting in queue.get_waiting()] == [job.id]


# ---- flows ---------------------------------------------------------------------------------------------------------


def add_family(app: App, **options: Any) -> tuple[str, str]:
    """Add a parent in the queue ``mail`` that waits for a child in ``other``; return their ids."""
    with app.flows() as flows:
        leaf = FlowJob("child", "other{mail}", {}, options)  # type: ignore[arg-type]
        node = flows.add(FlowJob("parent", "mail", {}, {}, [leaf]))
    return node.job.id, node.children[0].job.id


@pytest.mark.parametrize(
    ("flag", "state"),
    [
        ("fail_parent_on_failure", JobState.WAITING),
        ("continue_parent_on_failure", JobState.WAITING),
        ("ignore_dependency_on_failure", JobState.WAITING),
        ("remove_dependency_on_failure", JobState.WAITING),
        ("attempts", JobState.WAITING_CHILDREN),
    ],
)
def test_a_revoked_child_affects_its_parent_like_a_failed_child(
    app: App, redis_client: Any, flag: str, state: JobState
) -> None:
    parent, child = add_family(app, **{flag: True if flag != "attempts" else 3})
    assert app.queue("other{mail}").revoke(child) == "revoked"
    assert app.queue("mail").get_job_state(parent) is state
    deferred = redis_client.hget(KEYS.job(parent), "defa")
    assert deferred == (f"child bull:other{{mail}}:{child} failed" if flag == "fail_parent_on_failure" else None)
    if flag.startswith(("continue", "ignore")):
        assert list(redis_client.hgetall(KEYS.ignored(parent)).values()) == ["revoked"]


@pytest.mark.every_topology
def test_a_child_of_a_revoked_parent_completes_and_the_parent_stays_failed(app: App, redis_client: Any) -> None:
    parent, _ = add_family(app)
    assert app.queue("mail").revoke(parent) == "revoked"
    other = ManualWorker(app._broker, app._broker.keys("other{mail}"))
    other.complete("done")
    other.close()
    assert lists_with(redis_client, parent) == ["failed"]


# ---- revocation requests ---------------------------------------------------------------------------------------------


@pytest.fixture
def client(app: App) -> Any:
    client = app._broker.client()
    client.connect()
    yield client
    client.close()


def test_revocation_requests_are_kept_only_for_active_and_waiting_jobs(
    queue: Queue, manual_worker: ManualWorker, client: Client, redis_client: Any
) -> None:
    running, done, waiting = (queue.add("n").id for _ in range(3))
    manual_worker.acquire()
    manual_worker.acquire()
    redis_client.zadd(KEYS.revoked, {"gone": 5_000, running: 5_001, done: 5_002, waiting: 5_003, "old": 10})
    manual_worker.finish(done)
    day = 24 * HOUR_MS
    assert client.run(revocation_requests(KEYS, day + 5_000)) == RevocationRequests([running], [waiting])
    assert redis_client.zrange(KEYS.revoked, 0, -1) == [running, waiting]
    assert client.run(revocation_requests(KEYS, day + 5_002)) == RevocationRequests(
        [], [waiting]
    )  # the older request has expired after a day


def test_only_the_newest_ten_thousand_revocation_requests_are_kept(
    queue: Queue, manual_worker: ManualWorker, client: Client, redis_client: Any
) -> None:
    job = queue.add("n")
    manual_worker.acquire()
    redis_client.zadd(KEYS.revoked, {f"j{n}": n + 1 for n in range(10_005)})
    queue.revoke(job.id, terminate=True)
    assert redis_client.zcard(KEYS.revoked) == 10_000
    assert redis_client.zscore(KEYS.revoked, "j5") is None
    assert redis_client.zscore(KEYS.revoked, job.id) is not None
    redis_client.zadd(KEYS.revoked, {f"k{n}": 0 for n in range(10)})
    redis_client.eval("for n = 0, 10004 do redis.call('HSET', KEYS[1] .. n, 'name', 'n') end", 1, KEYS.job("j"))
    seen, skipped = list[str](), 0
    for page in range(10):
        requests = client.run(revocation_requests(KEYS, 0, skipped))
        assert requests is not None
        assert len(requests.locked + requests.unlocked) == 1_000
        seen += requests.locked + requests.unlocked
        skipped = requests.next_skipped
        if page == 3:
            redis_client.zadd(KEYS.failed, {seen[0]: 1})
    assert len(set(seen)) == 10_000
    assert skipped == 10_000
    assert client.run(revocation_requests(KEYS, 0, skipped)) == RevocationRequests([], [], 0)
    again = client.run(revocation_requests(KEYS, 0, 0))
    assert again is not None
    assert (again.next_skipped, len(again.unlocked)) == (999, 999), "one request was removed"


def test_writing_the_outcome_of_a_revoked_attempt_also_removes_its_request(
    queue: Queue, manual_worker: ManualWorker, client: Client, redis_client: Any
) -> None:
    job = queue.add("n", attempts=5)
    manual_worker.acquire()
    queue.revoke(job.id, terminate=True)

    def ending(token: str) -> Any:
        failed = FinishOptions(False, b"revoked", {"count": -1}, 5)
        claim = FetchOptions(token, 30_000, "manual")
        return finish_revoked(KEYS, move_to_finished(KEYS, job.id, claim, failed, fetch_next=False, now_ms=7))

    with pytest.raises(LockMismatchError):
        client.run(ending("foreign"))
    assert redis_client.zrange(KEYS.revoked, 0, -1) == [job.id]
    client.run(ending(manual_worker.token))
    assert not redis_client.exists(KEYS.revoked)
    assert lists_with(redis_client, job.id) == ["failed"]


def test_all_keys_of_a_call_are_in_one_slot_of_a_cluster() -> None:
    finish = move_to_finished(
        KEYS, "7", FetchOptions("t", 1, ""), FinishOptions(False, b"", {}, 1), fetch_next=False, now_ms=7
    )
    job = RunningJob.placeholder("mail", "7", "")
    for call in (
        revoke(KEYS, job, Settings({}).freeze(), 7, terminate=True),
        finish_revoked(KEYS, finish),
        revocation_requests(KEYS, 7),
    ):
        assert call.script is not None
        keys = call.args[1 : call.script.key_count + 1]
        assert len(keys) == call.script.key_count
        assert {str(key).partition("{")[2].partition("}")[0] for key in keys} == {"mail"}


def test_both_revocation_scripts_contain_bullmqs_script_unchanged() -> None:
    official = loader.official_script("moveToFinished").source
    guarded = wrappers.with_guard("moveToFinished", "retentionGuard").source
    assert b"local function official(KEYS, ARGV)\n" + official + b"\nend\n" in guarded
    for name in ("revoke", "finishRevoked"):
        script = wrappers.with_finish(name)
        assert (
            script.source
            == b"local function finish(KEYS, ARGV)\n" + guarded + b"\nend\n" + loader.bulltask_script(name).source
        )
        assert script.key_count == 14 + loader.bulltask_script(name).key_count


@pytest.mark.one_server
def test_without_revocation_requests_a_check_is_one_exists_command(
    app: App, client: Client, redis_client: Any, record_property: Callable[[str, object], None]
) -> None:
    app.queue("mail").add_bulk([{"name": "n"}] * 2_000)
    assert client.run(revocation_requests(KEYS, 0)) is None
    redis_client.config_resetstat()
    for _ in range(200):
        client.run(revocation_requests(KEYS, 0))
    stats = redis_client.info("commandstats")
    assert {name: stats[f"cmdstat_{name}"]["calls"] for name in ("evalsha", "exists")} == {
        "evalsha": 200,
        "exists": 200,
    }
    others = "config config|resetstat info time".split()  # Redis 6.2 does not count subcommands
    assert set(stats) <= {f"cmdstat_{name}" for name in ("evalsha", "exists", *others)}
    record_property("microseconds", stats["cmdstat_evalsha"]["usec_per_call"])


@pytest.mark.every_topology
def test_celerys_control_revokes_jobs_of_any_queue_by_their_ids(app: App) -> None:
    @app.task(name="mail", queue="mail")
    def mail() -> None: ...

    one, two, three = mail.delay(), mail.delay(), app.send_task("other")
    assert app.control.revoke(one.id) is Revocation.REVOKED
    assert app.control.revoke([two.id, three.id, "missing"], terminate=True) == [
        Revocation.REVOKED,
        Revocation.REVOKED,
        Revocation.UNKNOWN,
    ]
    assert {one.status, two.status, three.status} == {"REVOKED"}
    with pytest.warns(UserWarning, match="the argument signal has no effect"):
        assert app.control.revoke(one.id, terminate=True, signal="SIGKILL") is Revocation.FINISHED
