"""Signals and middleware around the jobs of real workers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bulltask import AsyncResult, PermanentError
from tests.support.worker_harness import WorkerHarness

pytestmark = pytest.mark.process

METHODS = pytest.mark.parametrize("method", ["fork", "spawn"])
TASKS = """
import asyncio
import contextvars
import os
import sys

from bulltask import Middleware, PermanentError, TransientError, signals
from bulltask.errors import RescheduleJob

tenant = contextvars.ContextVar("tenant", default="none")


@app.task(name="value")
def value(number):
    record("run", job=value.request.id, tenant=tenant.get())
    return number

@app.task(name="avalue")
async def avalue(number):
    await asyncio.sleep(0)
    record("run", job=avalue.request.id, tenant=tenant.get())
    return number

@app.task(name="fails")
def fails():
    raise PermanentError("no such user")

@app.task(name="fails-once", default_retry_delay=0)
def fails_once():
    if fails_once.request.retries == 0:
        raise TransientError("no line")

@app.task(name="later", bind=True)
def later(self):
    if self.request.attempts_started == 1:
        raise RescheduleJob(0.01)

@app.task(name="typed")
def typed(number: int):
    return number

@app.task(name="sleeps", soft_time_limit=0.3)
def sleeps():
    journal().blpop("never", 30)

@app.task(name="asleeps")
async def asleeps():
    await asyncio.sleep(60)
"""
SIGNALS = """
def note(name, job, **more):
    record(name, job=job, **{key: repr(value) for key, value in more.items()})

@signals.task_prerun.connect
def prerun(sender, task_id, task, args, kwargs, signal, **_):
    assert sender is task is app.tasks[task.name] and signal is signals.task_prerun
    assert task.request.id == task_id
    note("task_prerun", task_id, args=args, kwargs=kwargs)

@signals.task_postrun.connect
def postrun(sender, task_id, task, args, kwargs, retval, state, **_):
    assert task.request.id == task_id
    note("task_postrun", task_id, retval=retval, state=state)

@signals.task_success.connect
def success(sender, result, **_):
    note("task_success", sender.request.id, result=result)

@signals.task_failure.connect
def failure(sender, task_id, exception, args, kwargs, traceback, einfo, **_):
    assert einfo.exception is exception and einfo.type is type(exception) and einfo.tb is traceback
    note("task_failure", task_id, exception=exception, trace=str(einfo)[-60:], kwargs=kwargs)

@signals.task_retry.connect
def retry(sender, request, reason, einfo, **_):
    note("task_retry", request.id, reason=reason, traceback="no line" in einfo.traceback)

@signals.task_revoked.connect
def revoked(sender, request, terminated, signum, expired, **_):
    note("task_revoked", request.id, terminated=terminated, expired=expired)

@signals.task_success.connect(sender="avalue")
def only_avalue(sender, **_):
    note("only avalue", sender.request.id)

@signals.worker_process_init.connect
def init(**_):
    record("worker_process_init")

@signals.worker_process_shutdown.connect
def shutdown(pid, exitcode, **_):
    record("worker_process_shutdown", exitcode=exitcode)
"""


def entries(harness: WorkerHarness, job: AsyncResult[Any], last: str = "task_postrun", count: int = 1) -> list[str]:
    """Return what was recorded for a job, in order, once ``last`` was recorded ``count`` times."""
    harness.journal.wait_for(count, what=last, job=job.id)
    return [entry["what"] for entry in harness.journal.all(job=job.id)]


@METHODS
def test_signals_have_celerys_order_and_arguments(harness: WorkerHarness, method: str) -> None:
    worker = harness.worker(TASKS + SIGNALS, children=1, settings={"worker_start_method": method})
    done = harness.app.send_task("value", kwargs={"number": 1})
    assert entries(harness, done) == ["task_prerun", "run", "task_success", "task_postrun"]
    (started,) = harness.journal.all(what="task_prerun", job=done.id)
    assert (started["args"], started["kwargs"]) == ("()", "{'number': 1}")
    adone = harness.app.send_task("avalue", kwargs={"number": 2})
    assert entries(harness, adone) == ["task_prerun", "run", "task_success", "only avalue", "task_postrun"]
    failed = harness.app.send_task("fails")
    assert entries(harness, failed) == ["task_prerun", "task_failure", "task_postrun"]
    (failure,) = harness.journal.all(what="task_failure", job=failed.id)
    assert failure["exception"] == "PermanentError('no such user')"
    assert "no such user" in failure["trace"]
    retried = harness.app.send_task("fails-once", max_retries=1, backoff=0)
    attempt = ["task_prerun", "task_retry", "task_postrun", "task_prerun", "task_success", "task_postrun"]
    assert entries(harness, retried, count=2) == attempt
    (reason,) = harness.journal.all(what="task_retry", job=retried.id)
    assert (reason["reason"], reason["traceback"]) == ("TransientError('no line')", "True")
    rescheduled = harness.app.send_task("later")
    assert entries(harness, rescheduled, count=2)[:3] == ["task_prerun", "task_postrun", "task_prerun"]
    states = {
        job.id: [entry["state"] for entry in harness.journal.all(what="task_postrun", job=job.id)]
        for job in (done, failed, retried, rescheduled)
    }
    assert list(states.values()) == [["'SUCCESS'"], ["'FAILURE'"], ["'RETRY'", "'SUCCESS'"], ["'RETRY'", "'SUCCESS'"]]
    assert worker.stop() == 0
    pids = {entry["pid"] for entry in harness.journal.all(what="worker_process_init")}
    assert pids == {entry["pid"] for entry in harness.journal.all(what="worker_process_shutdown")}
    assert worker.logged("Hook failed") == []


def test_revoked_and_expired_jobs_are_task_revoked_and_a_bad_argument_is_task_failure(harness: WorkerHarness) -> None:
    worker = harness.worker(TASKS + SIGNALS, children=1, settings={"incompatible_timeout": 0})
    revoked = harness.app.send_task("asleeps")
    harness.journal.wait_for(what="task_prerun", job=revoked.id)
    revoked.revoke(terminate=True)
    assert entries(harness, revoked) == ["task_prerun", "task_revoked", "task_postrun"]
    expired = harness.app.send_task("value", kwargs={"number": 1}, expires=0.05, countdown=0.2)
    assert entries(harness, expired, "task_revoked") == ["task_revoked"]
    flags = [
        {name: entry[name] for name in ("terminated", "expired")} for entry in harness.journal.all(what="task_revoked")
    ]
    assert flags == [{"terminated": "True", "expired": "False"}, {"terminated": "False", "expired": "True"}]
    wrong = harness.app.send_task("typed", kwargs={"nummer": 1})
    assert entries(harness, wrong, "task_failure") == ["task_failure"]
    assert harness.journal.all(what="task_failure", job=wrong.id)[0]["kwargs"] == "{'nummer': 1}"
    slow = harness.app.send_task("sleeps", max_retries=0)
    assert entries(harness, slow) == ["task_prerun", "task_failure", "task_postrun"]
    assert worker.stop() == 0


CONTEXT = """
@signals.task_prerun.connect
def enter(task_id, **_):
    value.token = tenant.set(f"tenant of {task_id}")

@signals.task_postrun.connect
def leave(task_id, **_):
    record("left", job=task_id, tenant=tenant.get())
    tenant.reset(value.token)
"""


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_context_variables_of_task_prerun_reach_the_task_and_task_postrun(harness: WorkerHarness, pool: str) -> None:
    worker = harness.worker(TASKS + CONTEXT, children=1, settings={"worker_pool": pool})
    for name in ("value", "avalue"):
        job = harness.app.send_task(name, kwargs={"number": 1})
        (left,) = harness.journal.wait_for(what="left", job=job.id)
        (run,) = harness.journal.all(what="run", job=job.id)
        assert run["tenant"] == left["tenant"] == f"tenant of {job.id}"
    assert worker.stop() == 0
    assert worker.logged("Hook failed") == []


MIDDLEWARE = """
class Tracing(Middleware):
    def __init__(self, name):
        self.name = name

    def before_run(self, request):
        record("before", job=request.id, by=self.name, trace=request.headers.get("trace", ""))
        tenant.set(self.name)

    def after_run(self, request, result, exception):
        record("after", job=request.id, by=self.name, result=repr(result), exception=repr(exception),
               finished=str(journal().hget(f"bull:{{default}}:{request.id}", "finishedOn")))


class Awaiting(Middleware):
    async def abefore_run(self, request):
        await asyncio.sleep(0)
        record("abefore", job=request.id)

    async def aafter_run(self, request, result, exception):
        await asyncio.sleep(0)
        record("aafter", job=request.id, exception=repr(exception))


class Postpones(Middleware):
    def before_run(self, request):
        if request.headers.get("postpone") and request.attempts_started == 1:
            raise RescheduleJob(0.01)


app.add_middleware(Tracing("outer"))
app.add_middleware(Tracing("inner"))
app.add_middleware(Awaiting())
app.add_middleware(Postpones())
"""


def test_middleware_runs_around_sync_and_async_tasks_and_exits_in_reverse_order(harness: WorkerHarness) -> None:
    worker = harness.worker(TASKS + MIDDLEWARE, children=1)
    done = harness.app.send_task("value", kwargs={"number": 1}, headers={"trace": "t-1"})
    adone = harness.app.send_task("avalue", kwargs={"number": 2})
    failed = harness.app.send_task("fails")
    for job in (done, adone, failed):
        harness.journal.wait_for(2, what="after", job=job.id)
    assert [(entry["what"], entry.fields.get("by")) for entry in harness.journal.all(job=done.id)] == [
        ("before", "outer"),
        ("before", "inner"),
        ("run", None),
        ("after", "inner"),
        ("after", "outer"),
    ]
    around = ["before", "before", "abefore", "run", "aafter", "after", "after"]
    assert [entry["what"] for entry in harness.journal.all(job=adone.id)] == around
    assert harness.journal.all(what="before", job=done.id)[0]["trace"] == "t-1"
    assert harness.journal.all(what="run", job=done.id)[0]["tenant"] == "inner"
    (after, _) = harness.journal.all(what="after", job=done.id)
    assert (after["result"], after["exception"], after["finished"]) == ("1", "None", "None")
    (raised, _) = harness.journal.all(what="after", job=failed.id)
    assert (raised["result"], raised["exception"]) == ("None", "PermanentError('no such user')")
    assert worker.stop() == 0
    assert worker.logged("Hook failed") == []


def test_before_run_can_reschedule_a_job_as_its_task_can(harness: WorkerHarness) -> None:
    harness.worker(TASKS + MIDDLEWARE, children=1)
    job = harness.app.send_task("value", kwargs={"number": 1}, headers={"postpone": True})
    assert job.get(timeout=60) == 1
    assert [entry["what"] for entry in harness.journal.all(job=job.id)].count("run") == 1
    assert len(harness.journal.all(what="before", job=job.id)) == 4
    assert harness.journal.all(what="after", job=job.id)[0]["exception"].startswith("RescheduleJob")


def test_after_run_is_called_when_a_task_is_revoked_or_exceeds_its_soft_limit(harness: WorkerHarness) -> None:
    harness.worker(TASKS + MIDDLEWARE, children=1)
    slow = harness.app.send_task("sleeps", max_retries=0)
    harness.journal.wait_for(2, what="after", job=slow.id)
    assert "SoftTimeLimitExceeded" in harness.journal.all(what="after", job=slow.id)[0]["exception"]
    revoked = harness.app.send_task("asleeps")
    harness.journal.wait_for(what="abefore", job=revoked.id)
    revoked.revoke(terminate=True)
    harness.journal.wait_for(2, what="after", job=revoked.id)
    assert "CancelledError" in harness.journal.all(what="aafter", job=revoked.id)[0]["exception"]


BREAKS = """
class Broken(Middleware):
    def before_run(self, request):
        raise ValueError("before_run")

    def after_run(self, request, result, exception):
        sys.exit(3)


class Forks(Middleware):
    def before_run(self, request):
        if os.fork() == 0:
            return  # the fork must not run the job
        os.wait()

app.add_middleware(Broken())
app.add_middleware(Forks())

for name in ("task_prerun", "task_postrun", "task_success", "task_failure", "task_retry", "worker_process_init",
             "worker_process_shutdown"):
    def receiver(signal, **_):
        if signal.name == "task_success":
            sys.exit(4)
        if signal.name == "task_postrun":
            raise KeyboardInterrupt
        raise LookupError(signal.name)
    getattr(signals, name).connect(receiver, weak=False)
"""


@METHODS
def test_hooks_that_raise_exit_or_fork_lose_no_job_and_change_no_outcome(harness: WorkerHarness, method: str) -> None:
    worker = harness.worker(TASKS + BREAKS, children=1, settings={"worker_start_method": method})
    jobs = [
        harness.app.send_task(name, kwargs={"number": number}) for number in range(5) for name in ("value", "avalue")
    ]
    assert [job.get(timeout=60) for job in jobs] == [number for number in range(5) for _ in range(2)]
    assert [len(harness.journal.all(what="run", job=job.id)) for job in jobs] == [1] * 10
    failed = harness.app.send_task("fails")
    with pytest.raises(PermanentError, match="no such user"):
        failed.get(timeout=60)
    assert harness.app.send_task("fails-once", max_retries=1, backoff=0).get(timeout=60) is None
    assert worker.stop() == 0
    assert worker.logged("Child died") == []
    lines = worker.logged("Hook failed")
    counts: dict[str, list[int]] = {}
    for line in lines:
        counts.setdefault(line["on"], []).append(line["failures"])
        assert line["job_id"] if line["on"] not in ("worker_process_init", "worker_process_shutdown") else True
    assert set(counts) == {
        "before_run",
        "after_run",
        "abefore_run",
        "aafter_run",
        "task_prerun",
        "task_postrun",
        "task_success",
        "task_failure",
        "task_retry",
        "worker_process_init",
        "worker_process_shutdown",
    }
    assert counts["task_prerun"] == [1, 2, 4, 8]
    assert "LookupError: task_prerun" in next(line for line in lines if line["on"] == "task_prerun")["exception"]


DIES = """
import signal as posix

@signals.task_{name}.connect
def die(**_):
    if journal().incr("deaths") == 1:
        os.kill(os.getpid(), posix.SIGKILL)
"""


@pytest.mark.parametrize(("name", "runs"), [("prerun", 1), ("success", 1), ("postrun", 1)])
def test_a_child_that_is_killed_in_a_hook_loses_no_job(harness: WorkerHarness, name: str, runs: int) -> None:
    worker = harness.worker(TASKS + DIES.format(name=name), children=1)
    jobs = [harness.app.send_task("value", kwargs={"number": number}) for number in range(3)]
    assert [job.get(timeout=60) for job in jobs] == [0, 1, 2]
    worker.wait_for_line("Child died")
    assert [len(harness.journal.all(what="run", job=job.id)) for job in jobs] == [runs] * 3
    assert json.loads(harness.redis.hget(harness.keys.job(jobs[0].id), "returnvalue") or "") == 0


CLASSES = """
import asyncio
from bulltask import PermanentError, Task

class Kept(Task):
    uses = 0

    def seen(self, name, task_id):
        in_loop = asyncio._get_running_loop() is not None
        record(name, job=task_id, requested=self.request.id, as_task=int(in_loop == self._is_async))

    def before_start(self, task_id, args, kwargs):
        self.seen("before_start", task_id)

    def on_success(self, retval, task_id, args, kwargs):
        self.seen("on_success", task_id)

    def on_failure(self, exc, task_id, args, kwargs, einfo):
        self.seen("on_failure", task_id)

    def on_retry(self, exc, task_id, args, kwargs, einfo):
        self.seen("on_retry", task_id)

class AsyncKept(Kept):
    async def on_failure(self, exc, task_id, args, kwargs, einfo):
        await asyncio.sleep(0)
        self.seen("async on_failure", task_id)

    async def after_return(self, status, retval, task_id, args, kwargs, einfo):
        await asyncio.sleep(0)
        self.seen(f"async after_return {status}", task_id)

@app.task(name="kept", base=Kept, bind=True)
def kept(self):
    self.uses += 1
    return self.uses

@app.task(name="fails", base=Kept, default_retry_delay=0, autoretry_for=(KeyError,))
def fails():
    raise KeyError("sync")

@app.task(name="akept", base=Kept)
async def akept():
    return 1

@app.task(name="afails", base=AsyncKept, bind=True)
async def afails(self):
    raise PermanentError(self.request.id)
"""


@pytest.mark.parametrize("options", [[], ["-P", "threads"]])
def test_a_task_class_keeps_its_attributes_in_a_child_and_its_handlers_know_the_job(
    harness: WorkerHarness, options: list[str]
) -> None:
    worker = harness.worker(CLASSES, children=1, options=options, settings={"incompatible_timeout": 0})
    kept = [harness.app.send_task("kept") for _ in range(2)]
    assert sorted(result.get(timeout=20) for result in kept) == [1, 2]
    expected = {
        **{result.id: ["before_start", "on_success"] for result in kept},
        harness.app.send_task("fails", max_retries=1).id: ["before_start", "on_retry", "before_start", "on_failure"],
        harness.app.send_task("akept").id: ["before_start", "on_success"],
        harness.app.send_task("afails").id: ["before_start", "async on_failure", "async after_return FAILURE"],
        # Its task is not called, because the arguments do not match.
        harness.app.send_task("afails", args=[1, 2]).id: ["async on_failure"],
    }
    for job, calls in expected.items():
        harness.journal.wait_for(len(calls), 20, job=job)
    worker.stop()
    for job, calls in expected.items():
        entries = harness.journal.all(job=job)
        assert sorted(entry["what"] for entry in entries) == sorted(calls)
        assert {(entry["requested"], entry["as_task"]) for entry in entries} == {(job, "1")}
