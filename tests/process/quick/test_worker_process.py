"""``bulltask.testing.worker.WorkerProcess``: a real worker for tests."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest

from bulltask import App
from bulltask.errors import BulltaskError
from bulltask.testing.worker import WorkerProcess, wait_until

pytestmark = [pytest.mark.process, pytest.mark.quick]

SHOP = """
import threading

from bulltask import App

app = App("shop", worker_concurrency=1)


@app.task(name="add")
def add(x, y):
    return x + y


@app.task(name="hold")
def hold():
    threading.Event().wait(60)
"""


@pytest.fixture
def shop(tmp_path: Path, broker_url: str) -> dict[str, Any]:
    """Arguments of `WorkerProcess.start`."""
    (tmp_path / "shop.py").write_text(textwrap.dedent(SHOP))
    return {"directory": tmp_path, "broker_url": broker_url}


def test_a_worker_process_runs_jobs_and_can_be_paused_and_resumed(
    app: App, shop: dict[str, Any], redis_client: Any
) -> None:
    with WorkerProcess.start("shop", **shop) as worker:
        assert (worker.is_running, worker.is_paused) == (True, False)
        assert app.send_task("add", (1, 2)).get(timeout=60) == 3
        for _ in range(2):  # twice, to check that a second pause waits for its own log line
            worker.pause()
            worker.pause()
            assert worker.is_paused
            waiting = app.send_task("add", (3, 4))
            # A child whose wait was ending may fetch the job first; it then releases it.
            wait_until(lambda: redis_client.llen(app._broker.keys("default").wait) == 1, what="the waiting job")
            worker.resume()
            worker.resume()
            assert not worker.is_paused
            assert waiting.get(timeout=60) == 7
        assert worker.stop() == 0
        assert not worker.is_running
        assert worker.stop() == 0


def test_a_worker_process_can_start_paused_and_with_settings_and_options(app: App, shop: dict[str, Any]) -> None:
    settings = {"worker_concurrency": 2, "loglevel": "debug", "log_format": "text"}
    with WorkerProcess.start("shop", "--paused", "-Q", "mail", settings=settings, **shop) as worker:
        assert worker.is_paused
        started = next(line for line in worker.lines if line["event"] == "Worker started")
        assert (started["queues"], started["concurrency"]) == (["mail"], 2)
        worker.resume()
        assert app.send_task("add", (1, 2), queue="mail").get(timeout=60) == 3


def test_a_forced_stop_releases_the_job_and_leaving_the_block_stops_the_worker(app: App, shop: dict[str, Any]) -> None:
    with WorkerProcess.start("shop", **shop) as worker:
        job = app.send_task("hold")
        wait_until(lambda: str(job.state) == "active", 60, "the start of the job")
        assert worker.stop(force=True) == 0
        assert str(job.state) == "waiting"
    with WorkerProcess.start("shop", **shop) as worker:
        pid = worker.pid
    assert not Path(f"/proc/{pid}").exists()


def test_a_worker_process_that_cannot_start_raises_an_error_with_its_output(shop: dict[str, Any]) -> None:
    with pytest.raises(BulltaskError, match=r"exited with code 1:\n(.*\n)*.*no_such_module"):
        WorkerProcess.start("no_such_module", **shop)


def test_a_worker_process_that_does_not_stop_in_time_can_be_killed(app: App, shop: dict[str, Any]) -> None:
    with WorkerProcess.start("shop", **shop) as worker:
        job = app.send_task("hold")
        wait_until(lambda: str(job.state) == "active", 60, "the start of the job")
        with pytest.raises(TimeoutError, match=f"process {worker.pid}"):
            worker.stop(timeout=0.2)
        worker.kill()
        assert not worker.is_running
        with pytest.raises(BulltaskError, match="exited with code -9"):
            worker.pause()
