"""Tasks that fork: the forked copy of a child must not run as a second child."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from bulltask.testing.worker import wait_until
from tests.support.worker import wait_until_exited
from tests.support.worker_harness import WorkerHarness

pytestmark = pytest.mark.process

FORKING = """
import asyncio, multiprocessing, os, sys, threading

from bulltask.events import JobCompleted

def fork():
    if pid := os.fork():
        record("copy", copy=pid, within=os.getpid())
    return pid

@app.task(name="returns")
def returns():
    fork()

@app.task(name="raises")
def raises():
    if not fork():
        raise ValueError("only the copy")

@app.task(name="leaves")
def leaves():
    if not fork():
        sys.exit(7)

@app.task(name="returns_async")
async def returns_async():
    fork()

@app.task(name="raises_async")
async def raises_async():
    if not fork():
        await asyncio.sleep(1)

@app.task(name="awaits")
async def awaits():
    if not fork():
        while True:
            await asyncio.sleep(0)

@app.task(name="in_a_thread")
def in_a_thread():
    thread = threading.Thread(target=fork)
    thread.start()
    thread.join()

@app.task(name="listened_to")
def listened_to():
    pass

@app.on(JobCompleted)
def on_completed(event):
    if event.task == "listened_to":
        fork()

def backoff(retries, exc):
    fork()
    return 0

@app.task(name="backs_off", max_retries=1, autoretry_for=(ValueError,), retry_backoff=backoff)
def backs_off():
    raise ValueError
"""

OWN_PROCESSES = """
import multiprocessing, signal

processes = []

@app.task(name="keep")
async def keep():
    process = multiprocessing.get_context("fork").Process(target=signal.pause)
    process.start()
    processes.append(process)
    record("copy", copy=process.pid)
    return os.getpid()

@app.task(name="terminate")
def terminate():
    process = multiprocessing.get_context("fork").Process(target=signal.pause)
    process.start()
    record("copy", copy=process.pid)
    process.terminate()
    process.join(10)
    return process.exitcode
"""


@pytest.fixture
def copies(harness: WorkerHarness) -> Iterator[Callable[[int], list[int]]]:
    """Return a function that waits for ``count`` forked copies and returns their ids; kill them after the test."""

    def wait(count: int) -> list[int]:
        return [int(entry["copy"]) for entry in harness.journal.wait_for(count, what="copy")]

    yield wait
    for entry in harness.journal.all(what="copy"):
        with suppress(ProcessLookupError):
            os.kill(int(entry["copy"]), signal.SIGKILL)


FORKING_TASKS = (
    "returns",
    "raises",
    "leaves",
    "returns_async",
    "raises_async",
    "awaits",
    "in_a_thread",
    "listened_to",
    "backs_off",
)


def test_a_forked_copy_of_a_child_exits_when_the_task_or_callback_returns(
    harness: WorkerHarness, copies: Callable[[int], list[int]]
) -> None:
    worker = harness.worker(FORKING, children=1)
    for count, task in enumerate(FORKING_TASKS, 1):
        job = harness.app.send_task(task)
        wait_until_exited(copies(count)[-1])
        with suppress(ValueError):  # from the task that is retried
            job.get(timeout=60)
    (child,) = worker.children
    assert {int(entry["within"]) for entry in harness.journal.all(what="copy")} == {child}
    assert worker.stop() == 0  # it logs an outcome after the result can be read
    ended = [line for line in worker.lines if line["event"] in {"Job completed", "Job failed"}]
    assert len(ended) == len(FORKING_TASKS), "only the child reports the outcome"


def test_a_multiprocessing_process_that_a_task_terminates_exits(
    harness: WorkerHarness, copies: Callable[[int], list[int]]
) -> None:
    harness.worker(OWN_PROCESSES, children=1)
    job = harness.app.send_task("terminate")
    (pid,) = copies(1)
    wait_until_exited(pid)
    assert job.get(timeout=60) == -signal.SIGTERM


def test_a_process_of_a_dead_child_ends_and_does_not_keep_the_childs_connection(
    harness: WorkerHarness, copies: Callable[[int], list[int]]
) -> None:
    harness.worker(OWN_PROCESSES, children=1, settings={"drain_delay": 60})
    harness.wait_until_idle(1)
    child = harness.app.send_task("keep").get(timeout=60)
    harness.wait_until_idle(1)
    before = harness.idle_connections()
    os.kill(child, signal.SIGKILL)
    wait_until(lambda: not before & harness.idle_connections(), 10.0, "the end of the dead child's connection")
    wait_until_exited(copies(1)[0])
