"""The pipeline example's tables are correct even if its driver, its executors and Redis are killed.

Only ``python -m tools spark-kills``, a part of ``chaos``, runs this test. ``BULLTASK_KILLS=10`` kills the driver more
often.
"""

from __future__ import annotations

import logging
import os
import random
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import pytest
import redis

from bulltask.lake.ledger import last_record
from bulltask.lake.storage import Lake
from bulltask.testing.worker import RedisServer, wait_until
from tests.conftest import ServerFactory
from tests.support.example_history import check_lake, count_finished_jobs, count_sent_jobs, run_example, run_worker
from tests.support.pipeline_kills import executors, interrupted_step, is_running, kill_executors, kill_redis
from tests.support.processes import SESSION_VARIABLE, parent_of
from tests.support.spark_cluster import SparkCluster
from tests.support.spark_jvm import conf_options, java_options

KILLS = int(os.environ.get("BULLTASK_KILLS", "1"))
COUNT = 20_000

pytestmark = [
    pytest.mark.spark,
    pytest.mark.process,
    pytest.mark.timeout(900 + 200 * KILLS),
    pytest.mark.skipif("BULLTASK_KILLS" not in os.environ, reason="takes both cores: python -m tools spark-kills"),
]

PIPELINE_STEP = "3. The worker runs the jobs"

log = logging.getLogger(__name__)


@pytest.fixture
def server(server_factory: ServerFactory) -> RedisServer:
    """A server that syncs every write before its reply, so that SIGKILL loses nothing."""
    return server_factory(appendonly=True)


@pytest.fixture
def client(server: RedisServer) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(server.url, decode_responses=True) as connected:
        yield connected


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The lake's directory. Spark's processes exit shortly after its JVM: do not count them as left over."""
    monkeypatch.delenv(SESSION_VARIABLE)
    return tmp_path / "lake"


def kill(run: subprocess.Popen[str]) -> None:
    """Kill a driver, and wait until its JVM has exited."""
    pids = (int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit())
    jvms = [pid for pid in pids if parent_of(pid) == run.pid]
    run.send_signal(signal.SIGKILL)
    run.wait()
    wait_until(lambda: not any(map(is_running, jvms)), 100.0, "the end of the JVM")


def options(cluster: SparkCluster, scratch: Path) -> list[str]:
    """Return the example's options for a cluster."""
    conf = {
        "spark.driver.host": "127.0.0.1",
        "spark.driver.memory": "512m",
        "spark.executor.memory": "512m",
        "spark.executor.extraJavaOptions": java_options(scratch),
    }
    return ["--master", cluster.url, *conf_options(conf)]


def wait_while_running(run: subprocess.Popen[str], condition: Callable[[], bool], description: str, root: Path) -> None:
    """Wait for a condition while a driver runs; fail if the driver exits first."""

    def check() -> bool:
        code = run.poll()
        assert code is None, f"the example exited with {code} before {description}: {log_of(root)}"
        return condition()

    wait_until(check, 400.0, description)


def wait_until_sent(run: subprocess.Popen[str], client: redis.Redis, root: Path, count: float) -> int:
    """Wait until more than ``count`` jobs were sent; return the number of sent jobs."""
    wait_while_running(run, lambda: count_sent_jobs(client) > count, f"{count:.0f} jobs were sent", root)
    sent = count_sent_jobs(client)
    log.warning("%d of %d jobs were sent", sent, COUNT)
    return sent


def log_of(root: Path) -> str:
    return root.with_suffix(".log").read_text()


def completes(run: subprocess.Popen[str], root: Path, seconds: float) -> bool:
    """Wait until a driver exits and return True; if it takes longer, kill it and return False."""
    with suppress(subprocess.TimeoutExpired):
        assert run.wait(seconds) == 0, log_of(root)
        return True
    kill(run)
    return False


def last_batch(root: Path) -> int:
    head = last_record(Lake(root))
    return 0 if head is None else head.number


def test_the_examples_tables_are_correct_after_kills(
    server: RedisServer,
    client: redis.Redis,
    cluster: SparkCluster,
    forked_python: Path,
    root: Path,
    rng: random.Random,
) -> None:
    start = partial(run_example, server.url, root, forked_python, *options(cluster, root.parent))
    with ExitStack() as stack:
        # The first driver is killed while it sends jobs; its pipeline has already started.
        with start("--jobs", str(COUNT)) as run:
            wait_until_sent(run, client, root, rng.uniform(0.05, 0.4) * COUNT)
            kill(run)
        wait_until(lambda: not executors(cluster.directory), 60.0, "the end of the first executors")
        with start("--resume") as run:
            assert wait_until_sent(run, client, root, count_sent_jobs(client) + 0.05 * COUNT) < COUNT
            kill_executors(cluster.directory)
            wait_while_running(run, lambda: PIPELINE_STEP in log_of(root), "all jobs were sent", root)
            running_worker = stack.enter_context(run_worker(server.url))
            to_finish = rng.uniform(0.03, 0.4) * COUNT
            wait_while_running(
                run, lambda: count_finished_jobs(client) > to_finish, "some of the jobs had finished", root
            )
            kill_redis(server, rng.uniform(0, 3))
            finished, batch = count_finished_jobs(client), last_batch(root)
            log.warning("Redis was killed when %d of %d jobs had finished, after batch %d", finished, COUNT, batch)
            assert finished < COUNT, "Redis was killed after all jobs had finished"
            completed = completes(run, root, 600 if KILLS == 1 else rng.uniform(0, 20))
        for number in range(2, KILLS + 1):
            if not completed:
                log.warning(
                    "kill %d of the driver: %s",
                    number,
                    ": ".join(interrupted_step(Lake(root), root / "_pipeline" / "checkpoint")),
                )
                with start("--resume") as run:
                    completed = completes(run, root, 600 if number == KILLS else rng.uniform(15, 60))
        assert completed, log_of(root)
        assert running_worker.poll() is None
    assert "were already sent" in log_of(root), "no job was sent again"
    assert "✓ The tables have the outcome of every job" in log_of(root)
    check_lake(root, client, COUNT)
