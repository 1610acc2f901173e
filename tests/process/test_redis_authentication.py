"""A worker that cannot authenticate with Redis logs one error and exits."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import pytest
from click.testing import CliRunner
from redis.cluster import RedisCluster

from bulltask.cli.main import main
from bulltask.errors import TaskRevokedError
from bulltask.testing.worker import RedisServer
from bulltask.transport.permissions import role_grants
from bulltask.worker.slots import ExitCode
from tests.support.machine_load import scale_to_load
from tests.support.worker import Worker
from tests.support.worker_harness import WorkerHarness

pytestmark = pytest.mark.process

SECRET = "s3cr3t/with:odd@characters"
TASKS = """
@app.task(name="fails", max_retries=1, retry_backoff=0.01, autoretry_for=(OSError,))
def fails():
    raise OSError("no")

@app.task(name="waits")
async def waits():
    return 1

@app.task(name="limited", rate_limit="50/s")
def limited():
    pass
"""
SOURCE = f"""{TASKS}
app.conf.beat_schedule = {{"tick": {{"task": "quick", "schedule": 0.1}}}}

@app.task(bind=True, name="iterates", checkpoint=True, checkpoint_interval=0)
def iterates(self):
    self.update_state(meta={{"progress": 1}})
    self.log("a line")
    for number in self.iterate(range(3)):
        pass
"""


@pytest.fixture
def locked_server(server_factory: Callable[..., RedisServer]) -> RedisServer:
    return server_factory(password="the-right-password")


def wait_for_rejection(worker: Worker) -> str:
    """Wait until the worker exits, check its exit code and output, and return its error line."""
    code = worker.wait()
    assert code == int(ExitCode.BROKER_UNUSABLE) == 4
    for secret in (SECRET, quote(SECRET, safe=""), "the-right-password", "Traceback"):
        assert secret not in worker.log
    errors = [line for line in worker.text if '"level": "info"' not in line]
    assert len(errors) == 1, worker.log
    assert worker.warnings()[0]["level"] == "error"
    return errors[0]


def test_a_worker_with_a_wrong_password_exits_and_names_user_and_host(
    harness: WorkerHarness, locked_server: RedisServer
) -> None:
    url = f"redis://default:{quote(SECRET, safe='')}@127.0.0.1:{locked_server.port}/0"
    line = wait_for_rejection(harness.worker(settings={"broker_url": url}))
    assert f"//default:***@127.0.0.1:{locked_server.port}" in line


def test_a_worker_with_an_unknown_user_exits_and_names_the_user(
    harness: WorkerHarness, locked_server: RedisServer
) -> None:
    url = f"redis://mallory:{quote(SECRET, safe='')}@127.0.0.1:{locked_server.port}/0"
    line = wait_for_rejection(harness.worker(settings={"broker_url": url}))
    assert f"//mallory:***@127.0.0.1:{locked_server.port}" in line


def test_a_worker_without_a_password_exits_and_names_the_host(
    harness: WorkerHarness, locked_server: RedisServer
) -> None:
    line = wait_for_rejection(harness.worker(settings={"broker_url": f"redis://127.0.0.1:{locked_server.port}/0"}))
    assert f"127.0.0.1:{locked_server.port}" in line


def test_a_worker_reconnects_when_a_changed_password_is_restored(
    harness_on: Callable[[str], WorkerHarness], locked_server: RedisServer
) -> None:
    harness = harness_on(locked_server.url)
    worker = harness.worker(children=1)
    harness.wait_until_idle(1)
    harness.redis.config_set("requirepass", "the-next-password")
    started = time.monotonic()
    harness.redis.client_kill_filter(_type="normal", skipme=True)
    worker.wait_for_line("Redis error reply", count=2)  # the supervisor and the child
    assert time.monotonic() - started <= scale_to_load(2)
    assert all("authentication with Redis at" in line["error"] for line in worker.logged("Redis error reply"))
    harness.redis.config_set("requirepass", "the-right-password")
    assert harness.app.send_task("quick").get(timeout=60) is None
    assert worker.wait_for_line("Redis reconnected", count=2)
    assert "the-right-password" not in worker.log
    assert worker.stop() == 0


def test_a_user_with_the_documented_permissions_can_run_a_worker(
    harness_on: Callable[[str], WorkerHarness], server_factory: Callable[..., RedisServer]
) -> None:
    server = server_factory()
    harness = harness_on(server.url)
    harness.redis.execute_command("ACL SETUSER", "worker", "on", ">secret", *role_grants(["worker"]).rules())
    url = f"redis://worker:secret@127.0.0.1:{server.port}/0"
    settings = {"broker_url": url, "stalled_interval": 1, "lock_duration": 1, "result_expires": 60}
    worker = harness.worker(TASKS, children=1, settings=settings)
    harness.wait_until_idle(1)
    held, late = harness.hold(), harness.app.send_task("quick", countdown=0.5)
    harness.wait_for_start(held)
    harness.open_gate()
    results = [held, late, *(harness.app.send_task(name) for name in ("waits", *["limited"] * 3))]
    for result in results:
        result.get(timeout=60)
    with pytest.raises(OSError, match="no"):
        harness.app.send_task("fails").get(timeout=60)
    worker.wait_for_line("Job failed")  # the result is available before the line is logged
    assert {line["event"] for line in worker.warnings()} == {"Job retried", "Job failed"}
    assert [entry["object"] for entry in harness.redis.acl_log() if entry["username"] == "worker"] == []
    assert worker.stop() == 0


@pytest.mark.every_topology
def test_a_worker_of_one_queue_runs_with_the_permissions_that_acl_prints_for_it(harness: WorkerHarness) -> None:
    name = f"worker-{secrets.token_hex(4)}"
    printed = CliRunner().invoke(main, ["acl", "worker", "--queue", "default", "--user", name, "-b", harness.url])
    command = printed.stdout.replace(">PASSWORD", ">secret").split()
    nodes: Any = {"target_nodes": RedisCluster.ALL_NODES} if isinstance(harness.redis, RedisCluster) else {}
    harness.redis.execute_command(*command, **nodes)
    settings = {"broker_url": harness.url.replace("://", f"://{name}:secret@"), "stalled_interval": 1}
    worker = harness.worker(SOURCE, options=["-Q", "default"], settings=settings)
    worker.wait_for_line("Worker started")
    names = ["quick", "waits", "limited", "limited", "iterates"]
    jobs = [harness.app.send_task(name) for name in names] + [harness.app.send_task("quick", countdown=0.5)]
    for job in jobs:
        job.get(timeout=60)
    with pytest.raises(OSError, match="no"):
        harness.app.send_task("fails").get(timeout=60)
    held = harness.hold()
    harness.wait_for_start(held)
    held.revoke(terminate=True)
    with pytest.raises(TaskRevokedError):
        held.get(timeout=60)
    harness.journal.wait_for(4, what="start")  # two of them from the schedule
    assert worker.stop() == 0
    logs = harness.redis.execute_command("ACL LOG", **nodes)
    log = [entry for node in (logs.values() if nodes else [logs]) for entry in node]
    harness.redis.execute_command("ACL DELUSER", name, **nodes)
    denied = {entry["object"] for entry in log if entry["username"] == name}
    # The worker looks for jobs that were sent without the hash tag, if it may.
    assert {key for key in denied if not key.startswith("bull:default:")} == set()
    assert {line["event"] for line in worker.warnings()} <= {"Job retried", "Job failed", "Job revoked"}
