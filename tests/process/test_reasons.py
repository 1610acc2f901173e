"""``explain()`` names what real workers do: their jobs, limits, batches and pauses, and that they are gone."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable

import pytest
from click.testing import CliRunner

from bulltask import AsyncResult
from bulltask.cli.main import main
from bulltask.queue.reasons import Reason
from bulltask.testing.worker import wait_until
from tests.support.command_output import json_of
from tests.support.worker_harness import WorkerHarness

pytestmark = pytest.mark.process

SOURCE = """
import asyncio

from bulltask.worker import child_pool, fleet

child_pool._NOTE_MS = 0
child_pool.IdleCheck.interval_ms = 100
fleet._WRITE_MS, fleet._STATE_TTL_MS = 200, 1_000
fleet.StateReport.interval_ms = 50

@app.task(name="rated", rate_limit="1/h")
def rated():
    pass

@app.task(name="typed")
def typed(x: int):
    pass

@app.task(name="parked")
async def parked():
    await asyncio.sleep(60)

@app.task(name="batched", batch=2, batch_wait=30)
def batched(jobs):
    return [None] * len(jobs)
"""


def wait_for(harness: WorkerHarness, job: AsyncResult[object], code: str, words: str = "") -> Reason:
    """Wait until the first reason of a job has this code, and its sentence these words."""
    found: list[Reason] = []

    def first_is_expected() -> bool:
        found[:] = harness.app.queue("default").explain(job.id).reasons
        return found[0].code == code and words in found[0].sentence

    try:
        wait_until(first_is_expected, 15.0, code)
    except TimeoutError:
        pytest.fail(f"{code}: {found}")
    return found[0]


def test_the_reasons_of_a_real_worker(harness: WorkerHarness) -> None:
    worker = harness.worker(SOURCE, children=1, options=["-Q", "default,other"])
    send: Callable[..., AsyncResult[object]] = harness.app.send_task

    send("rated")
    throttled = send("rated")
    reason = wait_for(harness, throttled, "task-rate-limit")
    assert "task rated (1/h) delays the job: it is number 1 of 1 in its line" in reason.sentence
    assert reason.expected_s == pytest.approx(3600, abs=60)

    wait_until(lambda: not sicknesses(harness), 15.0, "a healthy system")

    of_queue = next(it for it in harness.app.queue("default").explain().reasons if it.code == "task-rate-limit")
    assert re.search(r"rated \(1/h\) throttles 1 job; the next one starts in [56][0-9.]+ min$", of_queue.sentence)
    assert of_queue.command == "bulltask control rate-limit rated RATE"

    unknown = send("nope")
    reason = wait_for(harness, unknown, "unknown-task", "is not registered")  # as the worker says that acquired it
    assert "task 'nope' is not registered in app 'tested'" in reason.sentence
    assert f"1 job waits for a worker that can run it: job {unknown.id}: " in str(
        harness.app.queue("default").explain()
    )
    wait_for(harness, send("nope"), "unknown-task")
    wait_until(
        lambda: re.search(
            r"2 jobs wait for a worker that can run them, such as \S+: .*'nope' is not registered",
            str(harness.app.queue("default").explain()),
        ),
        15.0,
        "both jobs are held back; while one is tried again, one is",
    )
    assert "typed" in wait_for(harness, send("typed", kwargs={"y": 1}), "incompatible").sentence

    alone = send("batched", kwargs={})
    assert "it has 1 of 2 jobs" in wait_for(harness, alone, "batch-filling").sentence
    send("batched", kwargs={})

    parked, queue = send("parked"), harness.app.queue("default")
    wait_for(harness, parked, "running", f"running in child {worker.children[0]}")
    queue.pause()
    assert queue.explain(send("quick").id).codes == ("paused",), "its only child runs an async job, and has free slots"
    queue.resume()

    held = harness.hold()
    harness.wait_for_start(held)
    wait_for(harness, held, "running", f"running in child {worker.children[0]}")
    waiting = send("quick")
    sentence = wait_for(harness, waiting, "workers-busy").sentence
    assert "has its only child busy: " in sentence
    assert f"{held.id} of queue default for " in sentence
    [child] = worker.children
    os.kill(child, signal.SIGSTOP)
    for job in (held, waiting):
        assert wait_for(harness, job, "child-stopped").command == f"kill -CONT {child}"
    os.kill(child, signal.SIGCONT)
    wait_for(harness, waiting, "workers-busy")
    harness.app.control.cancel_consumer("default")
    wait_for(harness, waiting, "queue-cancelled")
    worker.send(signal.SIGTSTP)
    wait_for(harness, waiting, "workers-paused")
    worker.send(signal.SIGSTOP)
    wait_for(harness, waiting, "worker-silent")
    worker.send(signal.SIGKILL)
    worker.wait()
    wait_for(harness, waiting, "no-worker")
    reason = wait_for(harness, held, "worker-gone", "after a worker of the queue has started and found it")
    assert reason.expected_s is None
    assert sicknesses(harness) == {"worker-gone", "no-worker", "unknown-task", "incompatible"}


def sicknesses(harness: WorkerHarness) -> set[str]:
    """Return what the doctor finds in the queues."""
    result = CliRunner().invoke(main, ["-b", harness.url, "doctor", "--json"])
    return {finding["code"] for finding in json_of(result, "doctor")["findings"] if finding["queue"]}
