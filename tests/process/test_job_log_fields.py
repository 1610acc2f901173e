"""Lines that tasks log have the id of their job and the name of their task."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.worker_harness import WorkerHarness

pytestmark = pytest.mark.process

LOGS = """
import asyncio
import logging
import warnings

import structlog

from bulltask import get_task_logger

logger = get_task_logger(__name__)


@app.task(name="logs")
def logs():
    logger.info("from get_task_logger")
    logging.getLogger("other.library").warning("from a library")
    structlog.get_logger().info("from structlog", done=0.5)
    warnings.warn("from warnings")


@app.task(name="alogs")
async def alogs(number):
    await asyncio.sleep(0.01)
    logger.info("from async code", extra={"number": number})
    await asyncio.to_thread(logger.info, "from its thread", extra={"number": number})
"""
OWN_HANDLER = """
import logging
import sys

handler = logging.StreamHandler(sys.stderr)
handler.setFormatter(logging.Formatter("OWN %(task_name)s[%(task_id)s] %(job_id)s %(message)s"))
logging.getLogger().addHandler(handler)
logging.getLogger().setLevel("INFO")


@app.task(name="logs")
def logs():
    logging.getLogger(__name__).info("in a job")
    logging.getLogger(__name__).info("with its own", extra={"job_id": "mine", "task_name": "mine"})
"""
OWN_STRUCTLOG = """
import structlog

structlog.configure(
    processors=[structlog.contextvars.merge_contextvars, structlog.processors.JSONRenderer()],
    logger_factory=structlog.PrintLoggerFactory(),
)


@app.task(name="logs")
def logs():
    structlog.get_logger().info("the app's own configuration")


@app.task(name="alogs")
async def alogs():
    structlog.get_logger().info("the app's own configuration")
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_lines_that_a_task_logs_through_any_logger_name_its_job_and_task(harness: WorkerHarness, method: str) -> None:
    worker = harness.worker(LOGS, children=1, settings={"worker_start_method": method})
    job = harness.app.send_task("logs")
    job.get(timeout=60)
    async_jobs = [harness.app.send_task("alogs", kwargs={"number": number}) for number in range(5)]
    for async_job in async_jobs:
        async_job.get(timeout=60)
    assert worker.stop() == 0
    for event in ("from get_task_logger", "from a library", "from structlog"):
        (line,) = worker.logged(event)
        assert (line["job_id"], line["task"]) == (job.id, "logs"), event
    (warned,) = (line for line in worker.lines if "from warnings" in line["event"])
    assert (warned["job_id"], warned["task"]) == (job.id, "logs")
    for event in ("from async code", "from its thread"):
        lines = {line["number"]: line["job_id"] for line in worker.logged(event)}
        assert lines == {number: async_job.id for number, async_job in enumerate(async_jobs)}
    assert all("job_id" not in line for line in worker.logged("Worker stopping"))


def test_handlers_of_the_app_can_use_the_job_in_their_format(harness: WorkerHarness) -> None:
    worker = harness.worker(OWN_HANDLER, children=1)
    job = harness.app.send_task("logs")
    job.get(timeout=60)
    assert worker.stop() == 0
    own = [line for line in worker.text if line.startswith("OWN ")]
    assert f"OWN logs[{job.id}] {job.id} in a job" in "\n".join(own)
    assert f"OWN mine[{job.id}] mine with its own" in "\n".join(own)
    assert "Logging error" not in worker.log


def test_an_apps_own_structlog_configuration_gets_the_job_from_merge_contextvars(harness: WorkerHarness) -> None:
    worker = harness.worker(OWN_STRUCTLOG, children=1)
    jobs = {name: harness.app.send_task(name) for name in ("logs", "alogs")}
    for job in jobs.values():
        job.get(timeout=60)
    assert worker.stop() == 0
    texts = (line for line in worker.text if "own configuration" in line)
    lines: dict[str, Any] = {line["task"]: line for line in map(json.loads, texts)}
    assert {name: line["job_id"] for name, line in lines.items()} == {name: job.id for name, job in jobs.items()}


THREADS = """
import logging
import threading
from concurrent.futures import ThreadPoolExecutor

from bulltask import current_task, get_task_logger

logger = get_task_logger(__name__)
executor = ThreadPoolExecutor(1)


def work(gate):
    wait_at(gate) if gate else None
    logger.info("from a started thread", extra={"current": current_task.request.id if current_task else None})


@app.task(name="starts")
def starts():
    thread = threading.Thread(target=work, args=("",))
    thread.start()
    thread.join()
    executor.submit(work, "").result()


@app.task(name="leaves")
def leaves():
    threading.Thread(target=work, args=("left",)).start()


@app.task(name="sleeps")
async def sleeps():
    import asyncio
    record("start", job=current_task.request.id)
    await asyncio.to_thread(wait_at, "async")
"""


def test_code_in_a_thread_that_a_task_has_started_belongs_to_its_job(harness: WorkerHarness) -> None:
    worker = harness.worker(THREADS, children=1)
    for _ in range(2):  # the executor's thread is the same
        job = harness.app.send_task("starts")
        job.get(timeout=60)
        lines = worker.wait_for_line("from a started thread", count=2, job_id=job.id, task="starts")
        assert [line["current"] for line in lines] == [job.id, job.id]
    harness.app.send_task("leaves").get(timeout=60)
    harness.open_gate("left")
    (line,) = worker.wait_for_line("from a started thread", current=None)
    assert "job_id" not in line, "no task is running"
    beside = harness.app.send_task("sleeps")
    harness.wait_for_start(beside)
    harness.app.send_task("starts").get(timeout=60)
    assert len(worker.wait_for_line("from a started thread", count=3, current=None)) == 3, "two tasks are running"
    harness.open_gate("async")
    assert beside.get(timeout=60) is None


PRINTS = """
import subprocess
import sys
import traceback


@app.task(name="prints")
def prints():
    print("two\\nlines")
    sys.stderr.writelines(["an ", "error\\n"])
    print("no newline", end="")
    sys.stdout.flush()
    subprocess.run(["echo", "from a program"], check=True)
    subprocess.run(["echo", "to the stream"], stdout=sys.stdout, check=True)


@app.task(name="aprints")
async def aprints():
    print("from async code")
"""


@pytest.mark.parametrize("source", ["", OWN_HANDLER])
def test_what_a_task_prints_is_logged_with_its_job_if_it_is_redirected(harness: WorkerHarness, source: str) -> None:
    settings = {"worker_redirect_stdouts": True, "worker_redirect_stdouts_level": "info"}
    worker = harness.worker(f"{source}\n{PRINTS}", children=1, settings=settings)
    job, other = harness.app.send_task("prints"), harness.app.send_task("aprints")
    job.get(timeout=60)
    other.get(timeout=60)
    last = harness.app.send_task("prints")
    last.get(timeout=60)
    if not source:
        for text in ("two", "lines", "an error", "no newline"):
            assert worker.wait_for_line(text, job_id=job.id, task="prints")[0]["level"] == "info"
        worker.wait_for_line("from async code", job_id=other.id, task="aprints")
    worker.stop()
    assert source or worker.logged("no newline", job_id=last.id)
    for text in ("two", "an error", "from async code", "from a program", "to the stream"):
        assert text in worker.log
