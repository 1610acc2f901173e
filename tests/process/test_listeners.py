"""Listeners of an app in real children."""

from __future__ import annotations

import os
import signal

import pytest

from tests.support.worker_harness import WorkerHarness

pytestmark = pytest.mark.process

METHODS = pytest.mark.parametrize("method", ["fork", "spawn"])
LISTENS = """
import asyncio
import sys
import threading

from bulltask import TransientError
from bulltask.events import ChildClosing, ChildReady, JobCompleted, JobFailed, JobStarted, JobRetried


def thread():
    return "main" if threading.current_thread() is threading.main_thread() else "loop"


@app.task(name="value")
def value(number):
    return number

@app.task(name="avalue")
async def avalue(number):
    await asyncio.sleep(0)
    return number

@app.task(name="fails", max_retries=1, default_retry_delay=0)
def fails():
    secret = "in the frame"
    raise TransientError("no line")

@app.on(ChildReady)
def ready(event):
    record("ready", index=event.index, event_pid=event.pid)

@app.on(ChildClosing)
def closing(event):
    record("closing", index=event.index, event_pid=event.pid)

@app.on(JobStarted)
def picked_up(event):
    record("picked up", job=event.job_id, task=event.task)

@app.on(JobCompleted)
def completed(event):
    record("completed", job=event.job_id, result=repr(event.result), thread=thread())

@app.on(JobRetried)
def retried(event):
    record("retried", job=event.job_id, raised=repr(event.exception), made=event.attempts_made)

@app.on(JobFailed)
def failed(event):
    frames = event.exception.__traceback__
    while frames.tb_next:
        frames = frames.tb_next
    record("failed", job=event.job_id, raised=repr(event.exception), secret=frames.tb_frame.f_locals["secret"])
"""
BREAKS = """
import sys

from bulltask.events import ChildReady, JobCompleted, JobStarted

@app.on(ChildReady)
def not_ready(event):
    raise LookupError("no database")

@app.on(JobStarted)
def raises(event):
    raise ValueError("no disk")

@app.on(JobCompleted)
def exits(event):
    sys.exit(3)
"""
SENDS = """
from bulltask.events import JobCompleted

@app.on(JobCompleted)
def follow(event):
    if event.task == "hold":
        app.send_task("quick", job_id=f"after-{event.job_id}")
"""
TOO_LATE = """
from bulltask.events import JobCompleted

@app.task(name="listen")
def listen():
    app.on(JobCompleted, print)
"""


@METHODS
def test_listeners_receive_events_in_the_child_that_ran_the_job(harness: WorkerHarness, method: str) -> None:
    worker = harness.worker(LISTENS, children=2, settings={"worker_start_method": method})
    done = harness.app.send_task("value", kwargs={"number": 1})
    adone = harness.app.send_task("avalue", kwargs={"number": 2})
    assert (done.get(timeout=60), adone.get(timeout=60)) == (1, 2)
    entries = {job.id: harness.journal.wait_for(what="completed", job=job.id)[0] for job in (done, adone)}
    assert (entries[done.id]["result"], entries[done.id]["thread"]) == ("1", "main")
    assert (entries[adone.id]["result"], entries[adone.id]["thread"]) == ("2", "loop")
    for job, entry in entries.items():
        assert harness.journal.wait_for(what="picked up", job=job)[0]["pid"] == entry["pid"]
        assert int(entry["pid"]) in worker.children
    assert worker.warnings() == []
    assert worker.stop() == 0


def test_a_listener_gets_the_exception_object_of_each_attempt(harness: WorkerHarness) -> None:
    worker = harness.worker(LISTENS, children=1, settings={"task_retry_backoff": 0.01})
    job = harness.app.send_task("fails", max_retries=1, backoff=0)
    retried = harness.journal.wait_for(what="retried", job=job.id)[0]
    failed = harness.journal.wait_for(what="failed", job=job.id)[0]
    assert (retried["raised"], retried["made"]) == ("TransientError('no line')", "1")
    assert (failed["raised"], failed["secret"]) == ("TransientError('no line')", "in the frame")
    assert harness.field(job, "finishedOn") is not None, "the event is emitted after the outcome is in Redis"
    assert worker.stop() == 0


@METHODS
def test_each_child_and_its_replacement_emit_ready_and_closing(harness: WorkerHarness, method: str) -> None:
    worker = harness.worker(LISTENS, children=2, settings={"worker_start_method": method})
    ready = harness.journal.wait_for(2, what="ready")
    assert {entry["index"] for entry in ready} == {"0", "1"}
    assert all(entry["pid"] == entry["event_pid"] for entry in ready)
    os.kill(int(ready[0]["pid"]), signal.SIGKILL)
    again = harness.journal.wait_for(3, what="ready")[-1]
    assert again["index"] == ready[0]["index"]
    assert worker.stop() == 0
    closed = {entry["pid"] for entry in harness.journal.all(what="closing")}
    assert closed == {ready[1]["pid"], again["pid"]}, "a killed child emits no event"


@METHODS
def test_a_listener_that_raises_or_exits_fails_no_job_and_is_logged_once(harness: WorkerHarness, method: str) -> None:
    worker = harness.worker(BREAKS, children=1, settings={"worker_start_method": method})
    jobs = [harness.app.send_task("quick") for _ in range(20)]
    for job in jobs:
        assert job.get(timeout=60) is None
    assert [harness.start_count(job) for job in jobs] == [1] * 20
    assert worker.stop() == 0
    lines = {line["on"]: line for line in worker.logged("Listener failed")}
    assert len(worker.logged("Listener failed")) == len(lines) == 3
    assert lines["JobStarted"]["listener"] == "tested.raises"
    assert "no disk" in lines["JobStarted"]["exception"]
    assert "SystemExit" in lines["JobCompleted"]["exception"]
    assert "no database" in lines["ChildReady"]["exception"]
    assert worker.logged("Child died") == []


def test_a_listener_may_send_jobs(harness: WorkerHarness) -> None:
    harness.worker(SENDS, children=1)
    job = harness.hold()
    harness.wait_for_start(job)
    harness.open_gate()
    harness.journal.wait_for(what="start", job=f"after-{job.id}")


def test_a_listener_added_by_a_task_is_rejected_as_too_late(harness: WorkerHarness) -> None:
    harness.worker(TOO_LATE, children=1)
    with pytest.raises(ValueError, match="was added too late"):
        harness.app.send_task("listen").get(timeout=60)
