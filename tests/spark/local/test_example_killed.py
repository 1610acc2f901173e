"""The tables of the pipeline example are correct, although its driver and Redis are killed.

``BULLTASK_KILLS=10`` for more kills of the driver, ``BULLTASK_JOBS=20000`` for more jobs.
"""

from __future__ import annotations

import logging
import os
import random
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import redis

from bulltask.lake.layout import Layout
from bulltask.lake.ledger import Ledger
from bulltask.testing.server import RedisServer
from bulltask.testing.wait import wait_until
from tests.conftest import ServerFactory
from tests.support.example_history import check_lake, count_finished_jobs, count_sent_jobs, run_example, run_worker
from tests.support.pipeline_kills import interrupted_step, is_running
from tests.support.processes import SESSION_VARIABLE, parent_of

KILLS = int(os.environ.get("BULLTASK_KILLS", "1"))
COUNT = int(os.environ.get("BULLTASK_JOBS", "10000"))

pytestmark = [
    pytest.mark.spark, pytest.mark.process, pytest.mark.timeout(900 + 200 * KILLS)
]  # fmt: skip

PIPELINE_STEP = "3. The worker runs the jobs"

log = logging.getLogger(__name__)


@pytest.fixture
def server(server_factory: ServerFactory) -> RedisServer:
    """A server that syncs every write before its reply, so that SIGKILL loses nothing."""
    return server_factory(appendonly=True, extra=["--appendfsync", "always"])


@pytest.fixture
def client(server: RedisServer) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(server.url, decode_responses=True) as connected:
        yield connected


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The lake's directory. Spark's processes end shortly after its JVM: do not count them as left over."""
    monkeypatch.delenv(SESSION_VARIABLE)
    return tmp_path / "lake"


def kill(run: subprocess.Popen[str]) -> None:
    """Kill a driver, and wait until its JVM has ended."""
    pids = (int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit())
    jvms = [pid for pid in pids if parent_of(pid) == run.pid]
    run.send_signal(signal.SIGKILL)
    run.wait()
    wait_until(lambda: not any(map(is_running, jvms)), 100.0, "the end of the JVM")


def wait_while_running(run: subprocess.Popen[str], condition: Callable[[], bool], description: str, root: Path) -> None:
    """Wait for a condition while a driver runs; fail if the driver ends first."""

    def check() -> bool:
        code = run.poll()
        assert code is None, f"the example ended with {code} before {description}: {log_of(root)}"
        return condition()

    wait_until(check, 400.0, description)


def log_of(root: Path) -> str:
    return root.with_suffix(".log").read_text()


def completes(run: subprocess.Popen[str], root: Path, seconds: float) -> bool:
    """Wait for the end of a driver and return True; kill it and return False if it takes longer."""
    with suppress(subprocess.TimeoutExpired):
        assert run.wait(seconds) == 0, log_of(root)
        return True
    kill(run)
    return False


def last_batch(root: Path) -> int:
    head = Ledger(Layout(root)).head()
    return 0 if head is None else head.number


def test_the_tables_of_the_example_are_correct_after_kills(
    server: RedisServer, client: redis.Redis, root: Path, forked_python: Path, rng: random.Random
) -> None:
    with ExitStack() as stack:
        # The first driver is killed while it sends jobs; its pipeline has started before.
        with run_example(server.url, root, forked_python, "--jobs", str(COUNT)) as run:
            to_send = rng.uniform(0.05, 0.8) * COUNT
            wait_while_running(run, lambda: count_sent_jobs(client) > to_send, "a part of the jobs was sent", root)
            kill(run)
        sent = count_sent_jobs(client)
        log.warning("The driver was killed when %d of %d jobs were sent", sent, COUNT)
        with run_example(server.url, root, forked_python, "--resume") as run:
            wait_while_running(run, lambda: PIPELINE_STEP in log_of(root), "all jobs were sent", root)
            running_worker = stack.enter_context(run_worker(server.url))
            to_finish = rng.uniform(0.03, 0.4) * COUNT
            wait_while_running(
                run, lambda: count_finished_jobs(client) > to_finish, "a part of the jobs was finished", root
            )
            server.kill()
            threading.Event().wait(rng.uniform(0, 3))
            server.restart()
            finished = count_finished_jobs(client)
            log.warning(
                "Redis was killed when %d of %d jobs were finished, after batch %d", finished, COUNT, last_batch(root)
            )
            assert finished < COUNT, "Redis was killed after all jobs had finished"
            completed = completes(run, root, 600 if KILLS == 1 else rng.uniform(0, 20))
        for number in range(2, KILLS + 1):
            if not completed:
                log.warning("kill %d of the driver: %s", number, ": ".join(interrupted_step(Layout(root))))
                with run_example(server.url, root, forked_python, "--resume") as run:
                    completed = completes(run, root, 600 if number == KILLS else rng.uniform(15, 60))
        assert completed, log_of(root)
        assert running_worker.poll() is None
    assert "✓ The tables have the outcome of every job" in log_of(root)
    check_lake(root, client, COUNT)
