"""Runs of plain functions that take longer than they may: told at the soft limit, killed at the hard one."""

from __future__ import annotations

from typing import Any

import pytest

from bulltask import AsyncResult, TaskError, TimeLimitExceeded
from bulltask.transport.scripts.move import CRASHES
from tests.support.worker_harness import WorkerHarness

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]

PATIENCE = 60.0
"""Seconds: a busy machine may take its time, and nothing here is told by its being quick."""

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


@app.task(bind=True, name="second_try", soft_time_limit=0.3, retry_backoff=0.01)
def second_try(self):
    record("start", job=self.request.id)
    if self.request.retries == 0:
        rest(60)
    return self.request.retries


@app.task(bind=True, name="not_again", soft_time_limit=0.3, dont_autoretry_for=(SoftTimeLimitExceeded,))
def not_again(self):
    record("start", job=self.request.id)
    rest(60)


@app.task(bind=True, name="deaf", time_limit=0.5, max_retries=0)
def deaf(self):
    record("start", job=self.request.id)
    ctypes.PyDLL(None).usleep(60_000_000)  # C code that keeps the GIL: no Python runs in this process


@app.task(bind=True, name="stubborn", soft_time_limit=0.2, time_limit=1.5, max_retries=0)
def stubborn(self):
    record("start", job=self.request.id)
    while True:
        try:
            rest(60)
        except BaseException as exc:
            record("swallowed", job=self.request.id, what_was=type(exc).__name__)


def backoff(made, exc):
    record("asked", pid_of_asker=os.getpid())
    return 3600


@app.task(bind=True, name="killed_once", time_limit=0.5, retry_backoff=0.01)
def killed_once(self):
    record("start", job=self.request.id)
    if self.request.retries == 0:
        rest(60)
    return self.request.retries, self.request.deliveries


@app.task(bind=True, name="own_backoff", time_limit=0.5, retry_backoff=backoff)
def own_backoff(self):
    if self.request.retries == 0:
        rest(60)
    return self.request.retries


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
    return str(harness.wait_for_event("failed", job, timeout=PATIENCE)["failedReason"])


def crashes(harness: WorkerHarness, job: AsyncResult[Any]) -> object:
    """What is remembered of dead children."""
    return harness.field(job, CRASHES) or harness.redis.exists(harness.keys.crashes(job.id))


# --- the soft limit ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_at_the_soft_limit_an_exception_ends_the_task_that_except_exception_does_not_swallow(
    harness: WorkerHarness, method: str
) -> None:
    worker = harness.worker(TASKS, children=1, settings={"worker_start_method": method})
    job = harness.app.send_task("rest", max_retries=0)
    pid = harness.wait_for_start(job, timeout=PATIENCE)["pid"]

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
    assert harness.wait_for_start(after, timeout=PATIENCE)["pid"] == pid, "the child lives"
    assert worker.stop(PATIENCE) == 0


def test_a_task_that_catches_it_may_still_return_a_value(harness: WorkerHarness) -> None:
    harness.worker(TASKS, children=1)
    job = harness.app.send_task("tidy")
    assert job.get(timeout=PATIENCE) == "task tidy ran longer than its soft time limit of 0.3 s"


def test_a_job_whose_task_lets_it_pass_is_tried_again_unless_the_task_says_otherwise(harness: WorkerHarness) -> None:
    harness.worker(TASKS, children=1)
    again, not_again = harness.app.send_task("second_try"), harness.app.send_task("not_again")
    assert again.get(timeout=PATIENCE) == 1
    assert "soft time limit" in reason_of(harness, not_again)
    assert (harness.start_count(again), harness.start_count(not_again)) == (2, 1)


# --- the hard limit ---------------------------------------------------------------------------------------------------


def test_at_the_hard_limit_a_task_that_holds_the_gil_is_killed_and_its_job_fails(harness: WorkerHarness) -> None:
    worker = harness.worker(TASKS, children=1)
    job = harness.app.send_task("deaf", max_retries=0)
    pid = int(harness.wait_for_start(job, timeout=PATIENCE)["pid"])

    expected = "task deaf ran longer than its time limit of 0.5 s and its child was killed"
    assert reason_of(harness, job) == expected
    with pytest.raises(TimeLimitExceeded, match="its child was killed"):
        job.get(timeout=5)
    line = worker.wait_for_line("Job failed", job_id=job.id)[0]
    assert (line["error"], line["category"], line["attempts_made"]) == (expected, "transient", 1)
    assert worker.wait_for_line("Child killed", pid=pid, reason="hard_limit", jobs=1)
    assert not worker.logged("Child died")
    assert not crashes(harness, job)
    after = harness.app.send_task("quick")
    assert int(harness.wait_for_start(after, timeout=PATIENCE)["pid"]) != pid
    assert worker.stop(PATIENCE) == 0


def test_a_task_that_swallows_whatever_is_raised_in_it_is_ended_by_the_hard_limit(harness: WorkerHarness) -> None:
    harness.worker(TASKS, children=1)
    job = harness.app.send_task("stubborn", max_retries=0)
    assert "time limit of 1.5 s" in reason_of(harness, job)
    told = [entry["what_was"] for entry in harness.journal.all(what="swallowed", job=job.id)]
    assert told == ["SoftTimeLimitExceeded"], "once, however often the signal comes"


def test_a_killed_run_is_an_attempt_and_the_job_is_tried_again_by_its_own_options(harness: WorkerHarness) -> None:
    worker = harness.worker(TASKS, children=2)
    again, for_good = harness.app.send_task("killed_once"), harness.app.send_task("killed_for_good")
    assert again.get(timeout=PATIENCE) == [1, 2]
    assert "its child was killed" in reason_of(harness, for_good)
    assert harness.start_count(for_good) == 1
    line = worker.wait_for_line("Job retried", job_id=again.id)[0]
    assert (line["category"], line["attempts_made"]) == ("transient", 1)
    assert not crashes(harness, again)
    assert "TimeLimitExceeded" in str(harness.field(again, "stacktrace"))


def test_a_backoff_function_is_not_asked_for_a_killed_run_and_the_stored_one_counts(harness: WorkerHarness) -> None:
    harness.worker(TASKS, children=1)
    assert harness.app.send_task("own_backoff", backoff=0.01).get(timeout=PATIENCE) == 1
    assert not harness.journal.all(what="asked")


def test_what_the_app_says_of_the_error_counts_for_a_killed_run_too(harness: WorkerHarness) -> None:
    harness.worker(TASKS + '\napp.categorizer.register("TimeLimitExceeded", "permanent")\n', children=1)
    job = harness.app.send_task("rule")
    assert "its child was killed" in reason_of(harness, job)


def test_a_worker_that_is_stopping_still_ends_runs_in_time(harness: WorkerHarness) -> None:
    worker = harness.worker(TASKS, children=2, settings={"shutdown_timeout": 60})
    soft, hard = harness.app.send_task("rest", max_retries=0), harness.app.send_task("deaf", max_retries=0)
    longer = [harness.app.send_task("unlimited", soft_time_limit=2), harness.app.send_task("unlimited", time_limit=2)]
    reason_of(harness, soft)
    reason_of(harness, hard)
    for job in longer:
        harness.wait_for_start(job, timeout=PATIENCE)
    assert worker.stop(PATIENCE) == 0
    assert [harness.field(job, "atm") for job in longer] == ["1", "1"]


# --- where limits come from -------------------------------------------------------------------------------------------


def test_what_a_call_says_wins_over_its_task_and_the_task_over_the_worker(harness: WorkerHarness) -> None:
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
    assert worker.stop(PATIENCE) == 0


def test_a_soft_limit_of_the_command_line_that_is_not_shorter_is_refused(harness: WorkerHarness) -> None:
    worker = harness.worker(TASKS, options=["--soft-time-limit", "5", "--time-limit", "5"])
    assert worker.wait(PATIENCE) != 0
    assert "task_soft_time_limit (5 s) of the settings must be shorter than task_time_limit (5 s)" in worker.log
