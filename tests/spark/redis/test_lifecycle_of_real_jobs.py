"""Real workers run jobs with every outcome; the lifecycle derived from events matches the jobs' hashes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bulltask import AsyncResult
from bulltask.queue import FlowJob
from tests.support.lifecycle_oracle import JobRow, LifecycleEvent, lifecycle
from tests.support.worker_harness import WorkerHarness

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]

TASKS = """
from bulltask.errors import ReleaseJob


@app.task(name="fails", autoretry_for=(ValueError,))
def fails():
    raise ValueError("bad 'x1'")


@app.task(bind=True, name="flaky", autoretry_for=(ValueError,))
def flaky(self):
    if self.request.attempts_started == 1:
        raise ValueError("once")


@app.task(bind=True, name="later")
def later(self):
    if self.request.attempts_started == 1:
        self.move_to_delayed(0.1)


@app.task(bind=True, name="back")
def back(self):
    if self.request.attempts_started < 3:
        raise ReleaseJob


@app.task(bind=True, name="busy")
def busy(self):
    if self.request.attempts_started == 1:
        self.rate_limit(0.2)


@app.task(bind=True, name="parent")
def parent(self, step=1):
    if step == 1:
        self.update_data({"step": 2})
        quick.apply_async(parent=self.request)
        self.move_to_waiting_children()
"""
CLOCK_DIFFERENCE_MS = 5000  # the event has Redis' time, which is much later than the worker's on a busy machine


@pytest.fixture
def harness(broker_url: str, tmp_path: Path, record_property: Callable[[str, object], None]) -> Iterator[WorkerHarness]:
    """A harness for real workers, which are stopped after the test."""
    started = WorkerHarness(broker_url, tmp_path, record_property)
    yield started
    started.close()


def events_of(harness: WorkerHarness) -> list[LifecycleEvent]:
    """Return the queue's events, as in the data source's table ``events``."""
    entries: Any = harness.redis.xrange(harness.keys.events)
    events = []
    for entry_id, fields in entries:
        ms, _, seq = entry_id.partition("-")
        if "jobId" in fields:
            optional = {
                "name": fields.get("name"),
                "prev": fields.get("prev"),
                "failed_reason": fields.get("failedReason"),
            }
            events.append(
                LifecycleEvent(harness.keys.queue, fields["jobId"], int(ms), int(seq), fields["event"], **optional)
            )
    return events


def run_stalled_job(harness: WorkerHarness) -> AsyncResult[Any]:
    """Run a job whose worker is killed; start the worker that runs it again and all other jobs."""
    first = harness.worker(TASKS, children=1, settings={"lock_duration": 1, "stalled_interval": 1})
    job = harness.hold()
    harness.wait_for_start(job)
    os.kill(first.pid, signal.SIGKILL)
    harness.worker(TASKS, settings={"stalled_interval": 1})  # with the default lock duration, for busy machines
    harness.wait_for_start(job, 2, timeout=60)
    harness.open_gate("gate", 2)
    job.get(timeout=60)
    return job


def run_jobs(harness: WorkerHarness) -> dict[str, AsyncResult[Any]]:
    send = harness.app.send_task
    jobs = {"stalled": run_stalled_job(harness)}
    queue = harness.app.queue("default")
    queue.pause()
    jobs["paused"] = send("quick")
    queue.resume()
    jobs |= {
        "completed": send("quick"),
        "delayed": send("quick", countdown=0.2),
        "prioritized": send("quick", priority=3),
        "failed, no retry": send("fails", max_retries=0),
        "failed, no delay": send("fails", max_retries=2, backoff=0),
        "failed, delays": send("fails", max_retries=2, backoff=0.05),
        "completed, second attempt": send("flaky", max_retries=1, backoff=0.05),
        "moved to delayed": send("later"),
        "moved to wait": send("back"),
        "rate limited": send("busy"),
        "waited for children": send("parent"),
    }
    node = harness.app.flows().add(FlowJob("quick", "default", children=[FlowJob("quick", "default")]))
    jobs["parent of a flow"] = harness.app.result(node.job.id, "default")
    for job in jobs.values():
        try:
            job.get(timeout=60)
        except ValueError:
            assert job.state == "failed"
    return jobs


def outcomes(job: JobRow) -> list[str]:
    return [attempt.outcome for attempt in job.attempts if attempt.outcome != "released"]


EXPECTED = {
    "stalled": ["stalled", "completed"],
    "paused": ["completed"],
    "completed": ["completed"],
    "delayed": ["completed"],
    "prioritized": ["completed"],
    "failed, no retry": ["failed"],
    "failed, no delay": ["requeued", "requeued", "failed"],
    "failed, delays": ["requeued", "requeued", "failed"],
    "completed, second attempt": ["requeued", "completed"],
    "moved to delayed": ["requeued", "completed"],
    "moved to wait": ["requeued", "requeued", "completed"],
    "rate limited": ["requeued", "completed"],
    "waited for children": ["waiting-children", "completed"],
    "parent of a flow": ["completed"],
}
# In events, a job that is given back after its start looks like a retry, but BullMQ counts no attempt for it.
RELEASES = {"moved to delayed": 1, "moved to wait": 2, "rate limited": 1}


def test_the_lifecycle_from_events_matches_the_hashes_of_real_jobs(harness: WorkerHarness) -> None:
    jobs = run_jobs(harness)
    rows = {job.job_id: job for job in lifecycle(events_of(harness))}
    assert {kind: outcomes(rows[job.id]) for kind, job in jobs.items()} == EXPECTED
    assert len(rows) == len(jobs) + 2, "the child jobs of two flows are missing or unexpected"

    names = {job.id: kind for kind, job in jobs.items()}
    for job_id, row in rows.items():
        reply: Any = harness.redis.hgetall(harness.keys.job(job_id))
        assert_matches_hash(reply, row, RELEASES.get(names.get(job_id, ""), 0))
    harness.report(jobs=len(rows), attempts=sum(row.attempt_count for row in rows.values()))


def assert_matches_hash(job: dict[str, str], row: JobRow, releases: int) -> None:
    ended = outcomes(row)
    last = row.attempts[-1]
    assert row.name == job["name"]
    assert len(ended) == row.attempt_count == int(job["ats"])
    assert sum(ended.count(outcome) for outcome in ("completed", "failed", "requeued")) - releases == int(job["atm"])
    assert row.stalls == int(job.get("stc", 0))
    assert row.state == ("completed" if "returnvalue" in job else "failed")
    # A completed job's hash keeps the reason for its last retry.
    assert row.failed_reason == (job["failedReason"] if row.state == "failed" else None)
    for from_events, field in (
        (row.created_ms, "timestamp"),
        (last.started_ms, "processedOn"),
        (last.ended_ms, "finishedOn"),
        (row.finished_ms, "finishedOn"),
    ):
        assert from_events is not None
        assert abs(from_events - int(job[field])) <= CLOCK_DIFFERENCE_MS, field
    started = [attempt for attempt in row.attempts if attempt.outcome != "released"]
    assert all(attempt.wait_ms is not None and attempt.run_ms is not None for attempt in started)
