"""A worker whose Redis user has no access to the queue of a job's parent."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import redis
from click.testing import CliRunner

from bulltask import App, chain
from bulltask.cli.main import main
from bulltask.errors import BrokerAuthError, TaskRevokedError
from bulltask.queue import FlowJob, FlowProducer
from bulltask.testing.worker import RedisServer, wait_until
from tests.support.manual_worker import ManualWorker
from tests.support.worker_harness import WorkerHarness

pytestmark = pytest.mark.process

TASKS = """
@app.task(name="completes")
def completes():
    return 1

@app.task(name="acompletes")
async def acompletes():
    return 1

@app.task(bind=True, name="awaits")
async def awaits(self):
    record("start", job=self.request.id)
    await asyncio.Event().wait()

@app.task(name="fails")
def fails():
    raise ValueError("no")

@app.task(name="afails")
async def afails():
    raise ValueError("no")

@app.task(name="dies")
def dies():
    os.kill(os.getpid(), signal.SIGKILL)

@app.task(name="late", time_limit=0.2)
def late():
    signal.pause()

@app.task(name="errback")
def errback(job_id):
    record("errback", job=job_id)
"""
REASONS = {
    "completes": "the job's outcome could not be stored, and its parent {parent} still waits for it: ",
    "acompletes": "the job's outcome could not be stored, and its parent {parent} still waits for it: ",
    "fails": "no (its parent {parent} still waits for it: ",
    "afails": "no (its parent {parent} still waits for it: ",
    "dies": "max_crashes=1) (its parent {parent} still waits for it: ",
    "late": "(its parent {parent} still waits for it: ",
}


def limit(server: RedisServer, client: redis.Redis) -> str:
    """Create a user for a worker of the default queue; return the URL with its name."""
    printed = CliRunner().invoke(main, ["acl", "worker", "--queue", "default", "--user", "limited", "-b", server.url])
    client.execute_command(*printed.output.replace(">PASSWORD", ">secret").split())
    return server.url.replace("redis://", "redis://limited:secret@")


@pytest.mark.parametrize("flavor", ["valkey", "redis"])
def test_a_child_job_stays_active_when_its_forbidden_parent_stops_the_script(
    server_factory: Callable[..., RedisServer], flavor: str
) -> None:
    # If the child process dies after the script, the supervisor finds the job.
    server = server_factory(flavor=flavor)
    with FlowProducer(server.url) as flows:
        flow = flows.add(FlowJob("parent", "other", children=[FlowJob("completes", "default")]))
    with (
        redis.Redis.from_url(server.url, decode_responses=True) as client,
        closing(App("limited", limit(server, client))) as app,
        closing(ManualWorker(app._broker, app._broker.keys("default"))) as worker,
    ):
        job = worker.acquire()
        for _ in range(2):
            with pytest.raises(BrokerAuthError, match=r"rejected a command: (ACL failure|The user executing)"):
                worker.finish(job, 1)
            assert client.lrange(worker.keys.active, 0, -1) == [job]
            assert client.get(f"{worker.keys.job(job)}:lock") == worker.token
        client.execute_command("ACL SETUSER limited allkeys")
        worker.finish(job, 1)
        assert client.zrange(worker.keys.completed, 0, -1) == [job]
        assert client.lrange(app._broker.keys("other").wait, 0, -1) == [flow.job.id]


def test_a_child_job_whose_parent_is_forbidden_fails_with_a_reason_and_can_be_retried(
    harness_on: Callable[[str], WorkerHarness], server_factory: Callable[..., RedisServer]
) -> None:
    server = server_factory()
    harness = harness_on(server.url)
    settings = {"broker_url": limit(server, harness.redis), "max_crashes": 1}
    worker = harness.worker("import asyncio, os, signal\n" + TASKS, children=2, settings=settings)
    nodes: dict[str, Any] = {}
    with FlowProducer(server.url) as flows:
        for name in REASONS:
            child = FlowJob(name, "default", options={"attempts": 1, "fail_parent_on_failure": True})
            nodes[name] = flows.add(FlowJob("parent", "other", children=[child]))
    jobs = {name: node.children[0].job.id for name, node in nodes.items()}
    keys, parents = harness.keys, harness.keys_of("other")
    wait_until(lambda: harness.redis.zcard(keys.failed) == len(jobs), 30, "the failure of all jobs")
    assert harness.redis.lrange(keys.active, 0, -1) == []
    assert harness.redis.keys(f"{keys.base}*:lock") == []
    for name, job in jobs.items():
        reason = str(harness.redis.hget(keys.job(job), "failedReason"))
        assert REASONS[name].format(parent=parents.job(nodes[name].job.id)) in reason
        assert "No permissions to access a key" in reason
        assert "; then retry this job" in reason
    assert harness.events.wait_for(len(jobs), event="failed")
    assert worker.logged("Lock lost") == []

    harness.redis.execute_command("ACL SETUSER limited allkeys")
    completed = harness.app.queue("default").get_job(jobs["completes"])
    assert completed is not None
    completed.retry()
    parent = nodes["completes"].job.id
    wait_until(lambda: parent in harness.redis.lrange(parents.wait, 0, -1), 30, "the parent")
    assert worker.stop() == 0


def test_error_callbacks_run_and_a_revoked_job_is_revoked_if_the_parent_is_forbidden(
    harness_on: Callable[[str], WorkerHarness], server_factory: Callable[..., RedisServer]
) -> None:
    server = server_factory()
    harness = harness_on(server.url)
    settings = {"broker_url": limit(server, harness.redis), "max_crashes": 1}
    worker = harness.worker("import asyncio, os, signal\n" + TASKS, children=4, settings=settings)
    jobs = {}
    call = harness.app.signature
    for name in (*REASONS, "hold", "awaits"):
        step = call(name, kwargs={"gate": "gate"} if name == "hold" else {}, max_retries=0).on_error(call("errback"))
        parent = chain(step, call("quick", queue="other", immutable=True)).apply_async()
        jobs[name] = parent.parent.id
    for name in ("hold", "awaits"):
        result = harness.app.AsyncResult(jobs[name])
        harness.wait_for_start(result, timeout=20)
        result.revoke(terminate=True)
        with pytest.raises(TaskRevokedError):
            result.get(timeout=30)
        stack = str(harness.redis.hget(harness.keys.job(result.id), "stacktrace"))
        assert "still waits for it: " in stack
    called = {jobs[name] for name in REASONS}
    entries = harness.journal.wait_for(len(called), what="errback")
    assert {entry["job"] for entry in entries} == called
    wait_until(lambda: harness.redis.zcard(harness.keys.completed) == len(called), 30, "the error callbacks")
    assert harness.redis.lrange(harness.keys.active, 0, -1) == []
    assert worker.stop() == 0
