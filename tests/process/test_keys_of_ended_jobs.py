"""Jobs that have ended and were removed leave no keys, however they ended."""

from __future__ import annotations

from functools import partial

import pytest

from bulltask.testing.worker import wait_until
from tests.support.worker_harness import WorkerHarness

pytestmark = pytest.mark.process

TASKS = """
import os, signal, threading

@app.task(bind=True, name="ends")
def ends(self, how):
    started = self.request.attempts_started
    if how == "fails":
        raise ValueError(how)
    if how == "fails after a retry":
        raise ConnectionError(how)
    if how == "kills its child" or (how == "kills a child, then completes" and started == 1):
        os.kill(os.getpid(), signal.SIGKILL)
    if how in {"exceeds its time limit", "is revoked while it runs"}:
        record("start", job=self.request.id)
        threading.Event().wait()
    self.update_state(meta={"progress": 1})
    self.log("a line")

@app.task(bind=True, name="iterates", checkpoint=True, checkpoint_interval=0)
def iterates(self):
    for number in self.iterate(range(3)):
        if number == 2 and self.request.attempts_started == 1:
            os.kill(os.getpid(), signal.SIGKILL)

@app.task(name="limited", rate_limit="10/s")
def limited():
    pass
"""
WAYS = (
    "completes",
    "fails",
    "fails after a retry",
    "kills its child",
    "kills a child, then completes",
    "exceeds its time limit",
    "is revoked while it runs",
    "is revoked before it runs",
    "expires",
    "is malformed",
    "stalls too often",
)


def keys_of_queue(harness: WorkerHarness, *, expiring: bool = False) -> set[str]:
    """Return the queue's keys, without those that expire unless ``expiring`` is true."""
    keys = harness.redis.scan_iter("bull*:{default}:*")
    return {key for key in keys if expiring or harness.redis.ttl(key) < 0}


def has_ended(harness: WorkerHarness, job_id: str) -> bool:
    return any(harness.events.all(jobId=job_id, event=event) for event in ("completed", "failed"))


def test_jobs_leave_no_keys_however_they_end(harness: WorkerHarness) -> None:
    send = harness.app.send_task
    jobs = {
        how: send(
            "ends",
            (how,),
            job_id=f"it {how}",
            max_retries=1 if how == "fails after a retry" else 0,
            time_limit=0.3 if how == "exceeds its time limit" else None,
            expires=0.01 if how == "expires" else None,
            deduplication={"id": how, "ttl": 1},
            remove_on_complete=True,
            remove_on_fail=True,
        )
        for how in WAYS
    }
    jobs["is revoked before it runs"].revoke()
    stalled, keys = jobs["stalls too often"].id, harness.keys
    harness.redis.lmove(keys.wait, keys.active, "LEFT", "LEFT")
    assert harness.redis.lrange(keys.active, 0, -1) == [stalled]
    harness.redis.hset(keys.job(stalled), "stc", "1")
    harness.redis.hset(keys.job(jobs["is malformed"].id), "opts", "{")
    limited = [send("limited", remove_on_complete=True) for _ in range(3)]
    more = [send("iterates", remove_on_complete=True), *limited]
    settings = {"max_crashes": 2, "remove_on_fail": True, "stalled_interval": 1, "broker_reconnect_delay": 0.01}
    worker = harness.worker(TASKS, children=2, settings=settings)
    revoked = jobs["is revoked while it runs"]
    harness.wait_for_start(revoked)
    revoked.revoke(terminate=True)
    ids = {job.id for job in (*jobs.values(), *more)} - {jobs["is revoked before it runs"].id}
    for job_id in ids:
        wait_until(partial(has_ended, harness, job_id), 60, f"the end of {job_id}")
    reasons = {entry["jobId"]: entry["failedReason"] for entry in harness.events.all(event="failed")}
    assert reasons[stalled] == "job stalled more than allowable limit"
    assert "malformed" in reasons[jobs["is malformed"].id]
    wait_until(lambda: not harness.redis.exists(harness.keys.revoked), 60, "the end of the revocation request")
    assert worker.stop() == 0
    queue_keys = {harness.keys.base + name for name in ("meta", "events", "id", "marker", "stalled-check", "pc")}
    assert keys_of_queue(harness) <= queue_keys
    assert [key for key in keys_of_queue(harness, expiring=True) if any(job_id in key for job_id in ids)] == []


def test_a_job_with_the_id_of_one_that_has_crashed_has_no_crashes(harness: WorkerHarness) -> None:
    harness.worker(TASKS, children=1, settings={"max_crashes": 2})
    for _ in range(3):
        job = harness.app.send_task("ends", ("kills a child, then completes",), job_id="again")
        assert job.get(timeout=60) is None
        assert harness.field(job, "bulltask:crashes") == "1"
        job.forget()


def test_obliterate_leaves_only_keys_that_expire(harness: WorkerHarness) -> None:
    jobs = [harness.app.send_task("quick") for _ in range(3)]
    harness.redis.zadd(harness.keys.revoked, {job.id: 1 for job in jobs})
    harness.redis.hset(harness.keys.lock_expiries, jobs[0].id, 1)
    with harness.app.queue("default") as queue:
        queue.obliterate(force=True)
    assert keys_of_queue(harness) == set()
