"""Real workers run jobs with every outcome; the fold of their events agrees with the jobs' hashes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bulltask import AsyncResult
from bulltask.queue import FlowJob
from bulltask.spark.lifecycle.fold import JobRow, LifecycleEvent, lifecycle
from tests.support.worker_harness import WorkerHarness

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]

TASKS = """
from bulltask.errors import WaitJob


@app.task(name="fails", autoretry_for=(ValueError,))
def fails():
    raise ValueError("bad 'x1'")


@app.task(bind=True, name="flaky", autoretry_for=(ValueError,))
def flaky(self):
    if self.request.deliveries == 1:
        raise ValueError("once")


@app.task(bind=True, name="later")
def later(self):
    if self.request.deliveries == 1:
        self.move_to_delayed(0.1)


@app.task(bind=True, name="back")
def back(self):
    if self.request.deliveries < 3:
        raise WaitJob


@app.task(bind=True, name="busy")
def busy(self):
    if self.request.deliveries == 1:
        self.rate_limit(0.2)


@app.task(bind=True, name="parent")
def parent(self, step=1):
    if step == 1:
        self.update_data({"step": 2})
        quick.apply_async(parent=self.request)
        self.move_to_waiting_children()
"""
CLOCKS_MS = 5000  # the hash has the worker's clock, the event Redis': the way between them takes long on a busy machine


@pytest.fixture
def harness(broker_url: str, tmp_path: Path, record_property: Callable[[str, object], None]) -> Iterator[WorkerHarness]:
    """Everything that a test with real workers needs; ended after it."""
    made = WorkerHarness(broker_url, tmp_path, record_property)
    yield made
    made.close()


def events_of(harness: WorkerHarness) -> list[LifecycleEvent]:
    """The queue's stream as the source's table ``events`` has it."""
    read: Any = harness.redis.xrange(harness.keys.events)
    found = []
    for entry_id, fields in read:
        ms, _, seq = entry_id.partition("-")
        if "jobId" in fields:
            more = {"name": fields.get("name"), "prev": fields.get("prev"), "failed_reason": fields.get("failedReason")}
            found.append(
                LifecycleEvent(harness.keys.queue, fields["jobId"], int(ms), int(seq), fields["event"], **more)
            )
    return found


def stalled_job(harness: WorkerHarness) -> AsyncResult[Any]:
    """A job whose worker is killed, and the worker that runs it and all others then."""
    first = harness.worker(TASKS, children=1, settings={"lock_duration": 1, "stalled_interval": 1})
    job = harness.hold()
    harness.wait_for_start(job)
    os.kill(first.pid, signal.SIGKILL)
    harness.worker(TASKS, settings={"stalled_interval": 1})  # its own locks last, however busy the machine is
    harness.wait_for_start(job, 2, timeout=60)
    harness.open_gate("gate", 2)
    job.get(timeout=60)
    return job


def jobs_of_every_fate(harness: WorkerHarness) -> dict[str, AsyncResult[Any]]:
    send = harness.app.send_task
    fates = {"stalled": stalled_job(harness)}
    queue = harness.app.queue("default")
    queue.pause()
    fates["paused"] = send("quick")
    queue.resume()
    fates |= {
        "completed": send("quick"),
        "delayed": send("quick", countdown=0.2),
        "prioritized": send("quick", priority=3),
        "failed at once": send("fails", max_retries=0),
        "failed, no delay": send("fails", max_retries=2, backoff=0),
        "failed, delays": send("fails", max_retries=2, backoff=0.05),
        "completed at second": send("flaky", max_retries=1, backoff=0.05),
        "moved to delayed": send("later"),
        "moved to wait": send("back"),
        "rate limited": send("busy"),
        "waited for children": send("parent"),
    }
    node = harness.app.flows().add(FlowJob("quick", "default", children=[FlowJob("quick", "default")]))
    fates["parent of a flow"] = harness.app.result(node.job.id, "default")
    for job in fates.values():
        try:
            job.get(timeout=60)
        except ValueError:
            assert job.state == "failed"
    return fates


def outcomes(job: JobRow) -> list[str]:
    return [one.outcome for one in job.attempts]


EXPECTED = {
    "stalled": ["stalled", "completed"],
    "paused": ["completed"],
    "completed": ["completed"],
    "delayed": ["completed"],
    "prioritized": ["completed"],
    "failed at once": ["failed"],
    "failed, no delay": ["retry", "retry", "failed"],
    "failed, delays": ["retry", "retry", "failed"],
    "completed at second": ["retry", "completed"],
    "moved to delayed": ["retry", "completed"],
    "moved to wait": ["retry", "retry", "completed"],
    "rate limited": ["retry", "completed"],
    "waited for children": ["waiting-children", "completed"],
    "parent of a flow": ["completed"],
}
# In events a released job looks like a retry, but BullMQ counts no attempt for it.
GIVEN_BACK = {"moved to delayed": 1, "moved to wait": 2, "rate limited": 1}


def test_the_fold_of_real_events_is_what_the_hashes_say(harness: WorkerHarness) -> None:
    fates = jobs_of_every_fate(harness)
    rows = {job.job_id: job for job in lifecycle(events_of(harness))}
    assert {fate: outcomes(rows[job.id]) for fate, job in fates.items()} == EXPECTED
    assert len(rows) == len(fates) + 2, "and the children of the flows"

    names = {job.id: fate for fate, job in fates.items()}
    for job_id, row in rows.items():
        reply: Any = harness.redis.hgetall(harness.keys.job(job_id))
        assert_hash_says(reply, row, GIVEN_BACK.get(names.get(job_id, ""), 0))
    harness.report(jobs=len(rows), attempts=sum(len(row.attempts) for row in rows.values()))


def assert_hash_says(job: dict[str, str], row: JobRow, given_back: int) -> None:
    ended = outcomes(row)
    last = row.attempts[-1]
    assert row.name == job["name"]
    assert len(ended) == int(job["ats"])
    assert sum(ended.count(outcome) for outcome in ("completed", "failed", "retry")) - given_back == int(job["atm"])
    assert row.stalls == int(job.get("stc", 0))
    assert row.state == ("completed" if "returnvalue" in job else "failed")
    # The hash of a completed job keeps the reason of its last retry.
    assert row.final_reason == (job["failedReason"] if row.state == "failed" else None)
    for from_events, field in (
        (row.created_ms, "timestamp"),
        (last.started_ms, "processedOn"),
        (last.ended_ms, "finishedOn"),
        (row.finished_ms, "finishedOn"),
    ):
        assert from_events is not None
        assert abs(from_events - int(job[field])) <= CLOCKS_MS, field
    assert all(one.wait_ms is not None and one.run_ms is not None for one in row.attempts)
