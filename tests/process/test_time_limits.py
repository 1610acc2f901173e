"""Runs of plain functions that take longer than they may: told at the soft limit, killed at the hard one."""

from __future__ import annotations

from typing import Any

import pytest

from bulltask import AsyncResult, TaskError, TimeLimitExceeded
from bulltask.transport.scripts.move import CRASHES
from tests.support.stage import Stage

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
    tell("start", job=self.request.id)
    try:
        rest(seconds)
    except Exception as exc:
        tell("swallowed", job=self.request.id, what_was=repr(exc))
    finally:
        tell("cleaned", job=self.request.id)


@app.task(bind=True, name="tidy", soft_time_limit=0.3)
def tidy(self):
    try:
        rest(60)
    except SoftTimeLimitExceeded as exc:
        return str(exc)


@app.task(bind=True, name="second_try", soft_time_limit=0.3, retry_backoff=0.01)
def second_try(self):
    tell("start", job=self.request.id)
    if self.request.retries == 0:
        rest(60)
    return self.request.retries


@app.task(bind=True, name="not_again", soft_time_limit=0.3, dont_autoretry_for=(SoftTimeLimitExceeded,))
def not_again(self):
    tell("start", job=self.request.id)
    rest(60)


@app.task(bind=True, name="deaf", time_limit=0.5, max_retries=0)
def deaf(self):
    tell("start", job=self.request.id)
    ctypes.PyDLL(None).usleep(60_000_000)  # C code that keeps the GIL: no Python runs in this process


@app.task(bind=True, name="stubborn", soft_time_limit=0.2, time_limit=1.5, max_retries=0)
def stubborn(self):
    tell("start", job=self.request.id)
    while True:
        try:
            rest(60)
        except BaseException as exc:
            tell("swallowed", job=self.request.id, what_was=type(exc).__name__)


def backoff(made, exc):
    tell("asked", pid_of_asker=os.getpid())
    return 3600


@app.task(bind=True, name="killed_once", time_limit=0.5, retry_backoff=0.01)
def killed_once(self):
    tell("start", job=self.request.id)
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
    tell("start", job=self.request.id)
    rest(60)


@app.task(bind=True, name="rule", time_limit=0.5)
def rule(self):
    rest(60)


@app.task(bind=True, name="unlimited")
def unlimited(self, seconds=60):
    tell("start", job=self.request.id)
    rest(seconds)
    return seconds
"""


def reason_of(stage: Stage, job: AsyncResult[Any]) -> str:
    return str(stage.became("failed", job, timeout=PATIENCE)["failedReason"])


def crashes(stage: Stage, job: AsyncResult[Any]) -> object:
    """What is remembered of dead children."""
    return stage.field(job, CRASHES) or stage.redis.exists(stage.keys.crashes(job.id))


# --- the soft limit ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_at_the_soft_limit_an_exception_ends_the_task_that_except_exception_does_not_swallow(
    stage: Stage, method: str
) -> None:
    worker = stage.worker(TASKS, children=1, settings={"worker_start_method": method})
    job = stage.app.send_task("rest", max_retries=0)
    pid = stage.started(job, timeout=PATIENCE)["pid"]

    assert reason_of(stage, job) == "task rest ran longer than its soft time limit of 0.3 s"
    assert stage.journal.wait_for(1, what="cleaned", job=job.id)
    assert not stage.journal.all(what="swallowed")
    line = worker.wait_for_line("Job failed", job_id=job.id)[0]
    assert (line["category"], line["attempts_made"]) == ("transient", 1)
    assert "in rest_" in line["traceback"]
    assert worker.logged("Cancel requested", job_id=job.id, reason="soft_limit")
    with pytest.raises(TaskError, match="soft time limit"):
        job.get(timeout=5)
    after = stage.app.send_task("quick")
    assert stage.started(after, timeout=PATIENCE)["pid"] == pid, "the child lives"
    assert worker.stop(PATIENCE) == 0


def test_a_task_that_catches_it_may_still_return_a_value(stage: Stage) -> None:
    stage.worker(TASKS, children=1)
    job = stage.app.send_task("tidy")
    assert job.get(timeout=PATIENCE) == "task tidy ran longer than its soft time limit of 0.3 s"


def test_a_job_whose_task_lets_it_pass_is_tried_again_unless_the_task_says_otherwise(stage: Stage) -> None:
    stage.worker(TASKS, children=1)
    again, not_again = stage.app.send_task("second_try"), stage.app.send_task("not_again")
    assert again.get(timeout=PATIENCE) == 1
    assert "soft time limit" in reason_of(stage, not_again)
    assert (stage.starts(again), stage.starts(not_again)) == (2, 1)


# --- the hard limit ---------------------------------------------------------------------------------------------------


def test_at_the_hard_limit_a_task_that_holds_the_gil_is_killed_and_its_job_fails(stage: Stage) -> None:
    worker = stage.worker(TASKS, children=1)
    job = stage.app.send_task("deaf", max_retries=0)
    pid = int(stage.started(job, timeout=PATIENCE)["pid"])

    expected = "task deaf ran longer than its time limit of 0.5 s and its child was killed"
    assert reason_of(stage, job) == expected
    with pytest.raises(TimeLimitExceeded, match="its child was killed"):
        job.get(timeout=5)
    line = worker.wait_for_line("Job failed", job_id=job.id)[0]
    assert (line["error"], line["category"], line["attempts_made"]) == (expected, "transient", 1)
    assert worker.wait_for_line("Child killed", pid=pid, reason="hard_limit", jobs=1)
    assert not worker.logged("Child died")
    assert not crashes(stage, job)
    after = stage.app.send_task("quick")
    assert int(stage.started(after, timeout=PATIENCE)["pid"]) != pid
    assert worker.stop(PATIENCE) == 0


def test_a_task_that_swallows_whatever_is_raised_in_it_is_ended_by_the_hard_limit(stage: Stage) -> None:
    stage.worker(TASKS, children=1)
    job = stage.app.send_task("stubborn", max_retries=0)
    assert "time limit of 1.5 s" in reason_of(stage, job)
    told = [entry["what_was"] for entry in stage.journal.all(what="swallowed", job=job.id)]
    assert told == ["SoftTimeLimitExceeded"], "once, however often the signal comes"


def test_a_killed_run_is_an_attempt_and_the_job_is_tried_again_by_its_own_options(stage: Stage) -> None:
    worker = stage.worker(TASKS, children=2)
    again, for_good = stage.app.send_task("killed_once"), stage.app.send_task("killed_for_good")
    assert again.get(timeout=PATIENCE) == [1, 2]
    assert "its child was killed" in reason_of(stage, for_good)
    assert stage.starts(for_good) == 1
    line = worker.wait_for_line("Job retried", job_id=again.id)[0]
    assert (line["category"], line["attempts_made"]) == ("transient", 1)
    assert not crashes(stage, again)
    assert "TimeLimitExceeded" in str(stage.field(again, "stacktrace"))


def test_a_backoff_function_is_not_asked_for_a_killed_run_and_the_stored_one_counts(stage: Stage) -> None:
    stage.worker(TASKS, children=1)
    assert stage.app.send_task("own_backoff", backoff=0.01).get(timeout=PATIENCE) == 1
    assert not stage.journal.all(what="asked")


def test_what_the_app_says_of_the_error_counts_for_a_killed_run_too(stage: Stage) -> None:
    stage.worker(TASKS + '\napp.categorizer.register("TimeLimitExceeded", "permanent")\n', children=1)
    job = stage.app.send_task("rule")
    assert "its child was killed" in reason_of(stage, job)


def test_a_worker_that_is_stopping_still_ends_runs_in_time(stage: Stage) -> None:
    worker = stage.worker(TASKS, children=2, settings={"shutdown_timeout": 60})
    soft, hard = stage.app.send_task("rest", max_retries=0), stage.app.send_task("deaf", max_retries=0)
    longer = [stage.app.send_task("unlimited", soft_time_limit=2), stage.app.send_task("unlimited", time_limit=2)]
    reason_of(stage, soft)
    reason_of(stage, hard)
    for job in longer:
        stage.started(job, timeout=PATIENCE)
    assert worker.stop(PATIENCE) == 0
    assert [stage.field(job, "atm") for job in longer] == ["1", "1"]


# --- where limits come from -------------------------------------------------------------------------------------------


def test_what_a_call_says_wins_over_its_task_and_the_task_over_the_worker(stage: Stage) -> None:
    options = ["--soft-time-limit", "0.7", "--time-limit", "600"]
    worker = stage.worker(TASKS, children=3, options=options)
    by_worker = stage.app.send_task("unlimited", max_retries=0)
    by_task = stage.app.send_task("rest", max_retries=0)
    by_call = stage.app.send_task("rest", max_retries=0, soft_time_limit=0.5, time_limit=500)
    killed = stage.app.send_task("unlimited", max_retries=0, time_limit=0.4)
    reasons = [reason_of(stage, job).partition("longer than its ")[2] for job in (by_worker, by_task, by_call, killed)]
    assert reasons == [
        "soft time limit of 0.7 s",
        "soft time limit of 0.3 s",
        "soft time limit of 0.5 s",
        "time limit of 0.4 s and its child was killed",
    ]
    assert worker.stop(PATIENCE) == 0


def test_a_soft_limit_of_the_command_line_that_is_not_shorter_is_refused(stage: Stage) -> None:
    worker = stage.worker(TASKS, options=["--soft-time-limit", "5", "--time-limit", "5"])
    assert worker.wait(PATIENCE) != 0
    assert "task_soft_time_limit (5 s) of the settings must be shorter than task_time_limit (5 s)" in worker.log
