"""Users of a Redis Cluster need exactly the permissions that ``bulltask acl`` prints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bulltask import App
from bulltask.cli.main import main
from bulltask.queue import FlowJob, FlowProducer, Queue
from bulltask.transport.permissions import CLUSTER
from bulltask.worker.slots import ExitCode
from tests.support.redis_cluster import Cluster
from tests.support.worker import Worker

pytestmark = [pytest.mark.process, pytest.mark.slow]

SOURCE = """
@app.task(name="fails", max_retries=1, retry_backoff=0.01, autoretry_for=(OSError,))
def fails():
    raise OSError("no")

@app.task(name="waits")
async def waits():
    return 1

@app.task(name="limited", rate_limit="50/s")
def limited():
    pass

@app.task(name="sums")
def sums(numbers=()):
    return 3
"""


@pytest.fixture
def user(cluster: Cluster) -> Iterator[Callable[..., str]]:
    """Create users with the permissions that ``bulltask acl`` prints, on all nodes; return URLs with their names.

    At the end, no call of theirs may have been rejected, except of users whose name begins with ``limited``.
    """
    names = set[str]()

    def make(name: str, *args: str) -> str:
        done = CliRunner().invoke(main, ["acl", *args, "--user", name, "-b", cluster.broker_url])
        assert done.exit_code == 0, done.output
        for node in cluster.clients:
            node.execute_command(*done.output.replace(">PASSWORD", ">secret").split())
        names.add(name)
        return cluster.broker_url.replace("//", f"//{name}:secret@")

    for node in cluster.clients:
        node.acl_log_reset()
        node.config_resetstat()
    yield make
    log: list[Any] = [entry for node in cluster.clients for entry in node.acl_log()]
    for node in cluster.clients:
        node.acl_deluser(*names)
    allowed = {name for name in names if not name.startswith("limited")}
    assert [entry for entry in log if entry["username"] in allowed] == []


@pytest.fixture
def start(tmp_path: Path, single_url: str) -> Iterator[Callable[..., Worker]]:
    """Start a worker of some queues."""
    workers: list[Worker] = []

    def run(url: str, queues: list[str]) -> Worker:
        settings = {"broker_url": url, "worker_concurrency": 2, "stalled_interval": 1, "lock_duration": 1}
        environ, options = {"JOURNAL_URL": single_url}, ["-Q", ",".join(queues)]
        workers.append(Worker(tmp_path / "worker", SOURCE, options=options, settings=settings, environ=environ))
        return workers[-1]

    yield run
    for worker in workers:
        worker.close()


def called(cluster: Cluster) -> set[str]:
    """Return the commands that the nodes have executed."""
    stats: list[Any] = [node.info("commandstats") for node in cluster.clients]
    return {name.removeprefix("cmdstat_") for of_node in stats for name in of_node}


def test_users_with_the_printed_permissions_run_send_and_read_jobs_on_all_nodes(
    cluster: Cluster, user: Callable[..., str], start: Callable[..., Worker]
) -> None:
    queues = cluster.queues()
    worker = start(user("worker", "worker"), queues)
    worker.wait_for_line("Worker started")
    sender, reader = App("sender", user("sender", "sender")), App("reader", user("reader", "reader"))
    for queue in queues:
        names = ("quick", "waits", "limited", "limited")
        results = [sender.send_task("quick", queue=queue, countdown=0.5)]
        results += [sender.send_task(name, queue=queue) for name in names]
        for result in results:
            result.get(timeout=60)
        with pytest.raises(OSError, match="no"):
            sender.send_task("fails", queue=queue).get(timeout=60)
        with FlowProducer(user("flows", "sender")) as flows:
            flows.add(FlowJob("sums", queue, children=[FlowJob("waits", queue), FlowJob("waits", queue)]))
        assert reader.queue(queue).get_job(results[0].id) is not None
        assert sum(reader.queue(queue).get_job_counts().values()) >= 9
        assert reader.queue(queue).get_workers()
    worker.wait_for_line("Job failed", count=len(queues))
    sender.close()
    reader.close()
    assert {line["event"] for line in worker.warnings()} == {"Job retried", "Job failed"}
    assert worker.stop() == 0
    assert called(cluster) >= set(CLUSTER) - {"asking"}


def test_a_reader_follows_a_key_that_moves(cluster: Cluster, user: Callable[..., str]) -> None:
    queue = cluster.queues()[0]
    slot = cluster.slot(queue)
    home = cluster.owner(slot)
    to = (home + 1) % 3
    app = App("reader", user("reader", "reader"))
    with Queue(queue, cluster.broker_url) as writer:
        job = writer.add("quick")
    cluster.begin_move(slot, to)
    try:
        cluster.move_keys(slot, to)
        assert app.queue(queue).get_job(job.id) is not None
    finally:
        cluster.end_move(slot, to)
        cluster.begin_move(slot, home)
        cluster.move_keys(slot, home)
        cluster.end_move(slot, home)
        app.close()
    assert "asking" in called(cluster)


def test_a_user_that_one_node_lacks_is_reported(
    cluster: Cluster, user: Callable[..., str], start: Callable[..., Worker]
) -> None:
    url = user("limited", "worker")
    cluster.clients[2].acl_deluser("limited")
    worker = start(url, cluster.queues())
    assert worker.wait() == ExitCode.BROKER_UNUSABLE
    (error,) = worker.warnings()
    assert f":{cluster.servers[2].port}" in error["error"]


def test_permissions_that_one_node_lacks_are_reported(
    cluster: Cluster, user: Callable[..., str], start: Callable[..., Worker]
) -> None:
    url = user("limited", "worker")
    forbidden = [f"-{name}" for name in CLUSTER if name != "cluster|slots"]
    cluster.clients[2].execute_command("ACL SETUSER", "limited", *forbidden)
    worker = start(url, cluster.queues())
    assert worker.wait() == ExitCode.BROKER_UNUSABLE
    (error,) = worker.warnings()
    advice = "ACL SETUSER limited +asking +client|id +client|unblock, on every node of the cluster"
    assert error["error"].endswith(f"Grant them: {advice}")
