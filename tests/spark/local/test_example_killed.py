"""The example of the pipeline, of which driver and Redis are killed: every job is in the tables as it must be.

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
from tests.spark.conftest import need_java
from tests.support.example_history import check_lake, count_finished_jobs, count_sent_jobs, run_example, run_worker
from tests.support.pipeline_kills import interrupted_step, is_running
from tests.support.processes import SESSION_VARIABLE, parent_of

KILLS = int(os.environ.get("BULLTASK_KILLS", "1"))
COUNT = int(os.environ.get("BULLTASK_JOBS", "10000"))

pytestmark = [
    pytest.mark.spark, pytest.mark.process, pytest.mark.timeout(900 + 200 * KILLS)
]  # fmt: skip

FOLLOWS = "3. The stream follows"

log = logging.getLogger(__name__)


@pytest.fixture
def server(server_factory: ServerFactory) -> RedisServer:
    """A server that has written down whatever it has acknowledged, so that a kill -9 takes nothing."""
    return server_factory(appendonly=True, extra=["--appendfsync", "always"])


@pytest.fixture
def client(server: RedisServer) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(server.url, decode_responses=True) as made:
        yield made


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The lake; Spark's processes end with its JVM, a moment later: do not count them as left over."""
    need_java()
    monkeypatch.delenv(SESSION_VARIABLE)
    return tmp_path / "lake"


def kill(run: subprocess.Popen[str]) -> None:
    """Kill a driver, and wait until its JVM has noticed."""
    pids = (int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit())
    jvms = [pid for pid in pids if parent_of(pid) == run.pid]
    run.send_signal(signal.SIGKILL)
    run.wait()
    wait_until(lambda: not any(map(is_running, jvms)), 100.0, "the end of the JVM")


def until(run: subprocess.Popen[str], condition: Callable[[], bool], what: str, root: Path) -> None:
    """Wait for something while a driver runs; fail if the driver ends first."""

    def look() -> bool:
        code = run.poll()
        assert code is None, f"the example ended with {code} before {what}: {said(root)}"
        return condition()

    wait_until(look, 400.0, what)


def said(root: Path) -> str:
    return root.with_suffix(".log").read_text()


def ends(run: subprocess.Popen[str], root: Path, seconds: float) -> bool:
    """Whether a driver comes to its end in some time; else it is killed."""
    with suppress(subprocess.TimeoutExpired):
        assert run.wait(seconds) == 0, said(root)
        return True
    kill(run)
    return False


def batches(root: Path) -> int:
    head = Ledger(Layout(root)).head()
    return 0 if head is None else head.number


def test_every_job_of_the_example_is_in_the_tables_as_it_must_be_whatever_is_killed(
    server: RedisServer, client: redis.Redis, root: Path, rng: random.Random
) -> None:
    with ExitStack() as stack:
        # The first one is killed while it sends; its stream has begun before.
        with run_example(server.url, root, "--jobs", str(COUNT)) as run:
            part = rng.uniform(0.05, 0.8) * COUNT
            until(run, lambda: count_sent_jobs(client) > part, "a part of the jobs was sent", root)
            kill(run)
        sent = count_sent_jobs(client)
        log.warning("The driver was killed when %d of %d jobs were sent", sent, COUNT)
        with run_example(server.url, root, "--resume") as run:
            until(run, lambda: FOLLOWS in said(root), "all jobs were sent", root)
            working = stack.enter_context(run_worker(server.url))
            some = rng.uniform(0.03, 0.4) * COUNT
            until(run, lambda: count_finished_jobs(client) > some, "a part of the jobs was done", root)
            server.kill()
            threading.Event().wait(rng.uniform(0, 3))
            server.restart()
            done = count_finished_jobs(client)
            log.warning("Redis was killed when %d of %d jobs were done, behind batch %d", done, COUNT, batches(root))
            assert done < COUNT, "all had been done"
            ended = ends(run, root, 600 if KILLS == 1 else rng.uniform(0, 20))
        for number in range(2, KILLS + 1):
            if not ended:
                log.warning("kill %d of the driver: %s", number, ": ".join(interrupted_step(Layout(root))))
                with run_example(server.url, root, "--resume") as run:
                    ended = ends(run, root, 600 if number == KILLS else rng.uniform(15, 60))
        assert ended, said(root)
        assert working.poll() is None
    assert "✓ The tables say of every job what became of it" in said(root)
    check_lake(root, client, COUNT)
