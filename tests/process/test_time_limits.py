"""Time limits of sync tasks: an exception at the soft limit, a kill at the hard limit."""

from __future__ import annotations

from typing import Any

import pytest

from bulltask import AsyncResult, TaskError, TimeLimitExceeded
from bulltask.transport.scripts.move import CRASHES
from tests.support.machine_load import scale_to_load
from tests.support.worker_harness import WorkerHarness

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]

TIMEOUT = 60.0
"""A long timeout in seconds for busy machines."""

TASKS = """
import ctypes
import select

from bulltask import SoftTimeLimitExceeded, TimeLimitExceeded


def rest(seconds):
    select.select([], [], [], seconds)


@app.task(bind=True, name="rest", soft_time_limit=0.3, max_retries=0)
def rest_(self, seconds=60):
    record("start", job=self.request.id)
    try:
        rest(seconds)
    except Exception as exc:
        record("swallowed", job=self.request.id, what_was=repr(exc))
    finally:
        record("cleaned", job=self.request.id)


@app.task(bind=True, name="tidy", soft_time_limit=0.3)
def tidy(self):
    try:
        rest(60)
    except SoftTimeLimitExceeded as exc:
        return str(exc)


@app.task(bind=True, name="second_attempt", soft_time_limit=0.3, retry_backoff=0.01)
def second_attempt(self):
    record("start", job=self.request.id)
    if self.request.retries == 0:
        rest(60)
    return self.request.retries


@app.task(bind=True, name="not_again", soft_time_limit=0.3, dont_autoretry_for=(SoftTimeLimitExceeded,))
def not_again(self):
    record("start", job=self.request.id)
    rest(60)


@app.task(bind=True, name="holds_gil", time_limit=0.5, max_retries=0)
def holds_gil(self):
    record("start", job=self.request.id)
    ctypes.PyDLL(None).usleep(60_000_000)  # C code that holds the GIL, so no Python code runs in this process


@app.task(bind=True, name="stubborn", soft_time_limit=0.2, time_limit=1.5, max_retries=0)
def stubborn(self):
    record("start", job=self.request.id)
    while True:
        try:
            rest(60)
        except BaseException as exc:
            record("swallowed", job=self.request.id, what_was=type(exc).__name__)


def backoff(retries, exc):
    record("backoff")
    return 3600


@app.task(bind=True, name="killed_once", time_limit=0.5, retry_backoff=0.01)
def killed_once(self):
    record("start", job=self.request.id)
    if self.request.retries == 0:
        rest(60)
    return self.request.retries, self.request.attempts_started


@app.task(bind=True, name="own_backoff", time_limit=0.5, retry_backoff=backoff)
def own_backoff(self):
    if self.request.retries == 0:
        rest(60)
    return self.request.retries


@app.task(bind=True, name="killed_again", time_limit=0.3, retry_backoff=0.01, autoretry_for=(TimeLimitExceeded,))
def killed_again(self):
    record("start", job=self.request.id)
    rest(60)


@app.task(bind=True, name="killed_elsewhere", time_limit=1, autoretry_for=(TimeLimitExceeded,))
def killed_elsewhere(self, to):
    if self.request.retries == 0:
        raise self.retry(queue=to, countdown=0)
    rest(60)


@app.task(bind=True, name="killed_for_good", time_limit=0.5, dont_autoretry_for=(TimeLimitExceeded,))
def killed_for_good(self):
    record("start", job=self.request.id)
    rest(60)


@app.task(bind=True, name="rule", time_limit=0.5)
def rule(self):
    rest(60)


@app.task(bind=True, name="unlimited")
def unlimited(self, seconds=60):
    record("start", job=self.request.id)
    rest(seconds)
    return seconds
"""


def reason_of(harness: WorkerHarness, job: AsyncResult[Any]) -> str:
    return str(harness.wait_for_event("failed", job, timeout=TIMEOUT)["failedReason"])


def crashes(harness: WorkerHarness, job: AsyncResult[Any]) -> object:
    """Return how many crashes are counted for the job, if any."""
    return harness.field(job, CRASHES)


# --- the soft limit ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_the_soft_limit_raises_an_exception_that_except_exception_does_not_catch(
    harness: WorkerHarness, method: str
) -> None:
    worker = harness.worker(TASKS, children=1, settings={"worker_start_method": method})
    job = harness.app.send_task("rest", max_retries=0)
    pid = harness.wait_for_start(job, timeout=TIMEOUT)["pid"]

    assert reason_of(harness, job) == "task rest ran longer than its soft time limit of 0.3 s"
    assert harness.journal.wait_for(1, what="cleaned", job=job.id)
    assert not harness.journal.all(what="swallowed")
    line = worker.wait_for_line("Job failed", job_id=job.id)[0]
    assert (line["category"], line["attempts_made"]) == ("transient", 1)
    assert "in rest_" in line["traceback"]
    assert worker.logged("Cancel requested", job_id=job.id, reason="soft_limit")
    with pytest.raises(TaskError, match="soft time limit"):
        job.get(timeout=5)
    after = harness.app.send_task("quick")
    assert harness.wait_for_start(after, timeout=TIMEOUT)["pid"] == pid, "the child is still running"
    assert worker.stop(TIMEOUT) == 0


def test_the_first_short_limit_is_enforced_in_time_although_the_supervisor_of_an_idle_worker_sleeps(
    harness: WorkerHarness,
) -> None:
    harness.worker(TASKS, children=1)
    harness.wait_until_idle(1)
    job = harness.app.send_task("rest", soft_time_limit=0.02)
    started = harness.wait_for_start(job, timeout=TIMEOUT)
    (cleaned,) = harness.journal.wait_for(1, what="cleaned", job=job.id)
    harness.report(ms=cleaned.ms - started.ms)
    assert cleaned.ms - started.ms <= scale_to_load(150)


def test_a_task_that_catches_the_soft_limit_can_return_a_value(harness: WorkerHarness) -> None:
    harness.worker(TASKS, children=1)
    job = harness.app.send_task("tidy")
    assert job.get(timeout=TIMEOUT) == "task tidy ran longer than its soft time limit of 0.3 s"


def test_a_job_that_reached_the_soft_limit_is_retried_unless_the_task_forbids_it(harness: WorkerHarness) -> None:
    harness.worker(TASKS, children=1)
    again, not_again = harness.app.send_task("second_attempt"), harness.app.send_task("not_again")
    assert again.get(timeout=TIMEOUT) == 1
    assert "soft time limit" in reason_of(harness, not_again)
    assert (harness.start_count(again), harness.start_count(not_again)) == (2, 1)


# --- the hard limit ---------------------------------------------------------------------------------------------------


def test_a_task_that_holds_the_gil_is_killed_at_the_hard_limit(harness: WorkerHarness) -> None:
    worker = harness.worker(TASKS, children=1)
    job = harness.app.send_task("holds_gil", max_retries=0)
    pid = int(harness.wait_for_start(job, timeout=TIMEOUT)["pid"])

    expected = "task holds_gil ran longer than its time limit of 0.5 s and its child was killed"
    assert reason_of(harness, job) == expected
    with pytest.raises(TimeLimitExceeded, match="its child was killed"):
        job.get(timeout=5)
    line = worker.wait_for_line("Job failed", job_id=job.id)[0]
    assert (line["error"], line["category"], line["attempts_made"]) == (expected, "transient", 1)
    assert worker.wait_for_line("Child killed", pid=pid, reason="hard_limit", jobs=1)
    assert not worker.logged("Child died")
    assert not crashes(harness, job)
    after = harness.app.send_task("quick")
    assert int(harness.wait_for_start(after, timeout=TIMEOUT)["pid"]) != pid
    assert worker.stop(TIMEOUT) == 0


def test_a_task_that_catches_every_exception_is_killed_at_the_hard_limit(harness: WorkerHarness) -> None:
    harness.worker(TASKS, children=1)
    job = harness.app.send_task("stubborn", max_retries=0)
    assert "time limit of 1.5 s" in reason_of(harness, job)
    caught = [entry["what_was"] for entry in harness.journal.all(what="swallowed", job=job.id)]
    assert caught == ["SoftTimeLimitExceeded"], "raised once, however often the signal is sent"


def test_a_killed_attempt_counts_and_the_job_is_retried(harness: WorkerHarness) -> None:
    worker = harness.worker(TASKS, children=2)
    again, for_good = harness.app.send_task("killed_once"), harness.app.send_task("killed_for_good")
    assert again.get(timeout=TIMEOUT) == [1, 2]
    assert "its child was killed" in reason_of(harness, for_good)
    assert harness.start_count(for_good) == 1
    line = worker.wait_for_line("Job retried", job_id=again.id)[0]
    assert (line["category"], line["attempts_made"]) == ("transient", 1)
    assert not crashes(harness, again)
    assert "TimeLimitExceeded" in str(harness.field(again, "stacktrace"))


def test_a_killed_attempt_is_retried_as_often_as_autoretry_for_permits(harness: WorkerHarness) -> None:
    worker = harness.worker(TASKS, children=1)
    job = harness.sender(task_max_retries=0, task_max_explicit_retries=1).send_task("killed_again")
    assert "its child was killed" in reason_of(harness, job)
    assert harness.start_count(job) == 2
    assert worker.wait_for_line("Job failed", job_id=job.id)[0]["attempts_made"] == 2


def test_the_last_attempt_in_another_queue_is_reported_as_such_if_it_is_killed(harness: WorkerHarness) -> None:
    events = harness.stream(harness.url, harness.keys_of("other").events)
    harness.worker(TASKS, children=1, options=["-Q", "default,other"])
    job = harness.app.send_task("killed_elsewhere", kwargs={"to": "other"}, max_retries=1)
    assert "its child was killed" in str(events.wait_for(1, TIMEOUT, event="failed", jobId=job.id)[0]["failedReason"])
    assert events.wait_for(1, 5, event="retries-exhausted", jobId=job.id)[0]["attemptsMade"] == "1"


def test_a_killed_attempt_uses_the_stored_backoff_instead_of_the_backoff_function(harness: WorkerHarness) -> None:
    harness.worker(TASKS, children=1)
    assert harness.app.send_task("own_backoff", backoff=0.01).get(timeout=TIMEOUT) == 1
    assert not harness.journal.all(what="backoff")


def test_the_apps_error_categories_apply_to_a_killed_attempt(harness: WorkerHarness) -> None:
    harness.worker(TASKS + '\napp.categorizer.register("TimeLimitExceeded", "permanent")\n', children=1)
    job = harness.app.send_task("rule")
    assert "its child was killed" in reason_of(harness, job)


def test_time_limits_apply_during_a_shutdown(harness: WorkerHarness) -> None:
    worker = harness.worker(TASKS, children=2, settings={"shutdown_timeout": 60})
    soft, hard = harness.app.send_task("rest", max_retries=0), harness.app.send_task("holds_gil", max_retries=0)
    longer = [harness.app.send_task("unlimited", soft_time_limit=2), harness.app.send_task("unlimited", time_limit=2)]
    reason_of(harness, soft)
    reason_of(harness, hard)
    for job in longer:
        harness.wait_for_start(job, timeout=TIMEOUT)
    assert worker.stop(TIMEOUT) == 0
    assert [harness.field(job, "atm") for job in longer] == ["1", "1"]


# --- precedence of limits ---------------------------------------------------------------------------------------------


def test_a_calls_time_limits_override_the_tasks_and_the_workers(harness: WorkerHarness) -> None:
    options = ["--soft-time-limit", "0.7", "--time-limit", "600"]
    worker = harness.worker(TASKS, children=3, options=options)
    by_worker = harness.app.send_task("unlimited", max_retries=0)
    by_task = harness.app.send_task("rest", max_retries=0)
    by_call = harness.app.send_task("rest", max_retries=0, soft_time_limit=0.5, time_limit=500)
    killed = harness.app.send_task("unlimited", max_retries=0, time_limit=0.4)
    reasons = [
        reason_of(harness, job).partition("longer than its ")[2] for job in (by_worker, by_task, by_call, killed)
    ]
    assert reasons == [
        "soft time limit of 0.7 s",
        "soft time limit of 0.3 s",
        "soft time limit of 0.5 s",
        "time limit of 0.4 s and its child was killed",
    ]
    assert worker.stop(TIMEOUT) == 0


def test_a_soft_limit_option_that_is_not_shorter_than_the_hard_limit_is_rejected(harness: WorkerHarness) -> None:
    worker = harness.worker(TASKS, options=["--soft-time-limit", "5", "--time-limit", "5"])
    assert worker.wait(TIMEOUT) != 0
    assert "task_soft_time_limit (5 s) of the settings must be shorter than task_time_limit (5 s)" in worker.log
