"""Spark in a child process sets job groups, reports progress, and cancels the Spark jobs that a task left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
from py4j.protocol import Py4JJavaError
from pyspark import InheritableThread, SparkContext
from pyspark.sql import SparkSession

from bulltask import App, PermanentError
from bulltask.errors import Interrupt, ReleaseJob
from bulltask.jobs.job import RunningJob
from bulltask.spark import current_session
from bulltask.spark.tasks import SparkInChild
from bulltask.testing.worker import wait_until
from bulltask.worker.spark_tasks import SparkAttempt, SparkTaskRunner

pytestmark = [pytest.mark.spark, pytest.mark.redis, pytest.mark.timeout(240)]

LONG_S = 600


class Job:
    """A running job that records its progress in ``reports``."""

    def __init__(self, job_id: str) -> None:
        self.reports: list[Any] = []
        self.has_lock, self.has_reported = True, False
        self.run = SparkAttempt(job_id, "mail", self.reports.append, lambda: self.has_reported, lambda: self.has_lock)


class Interrupted(BaseException):
    pass


@pytest.fixture
def context(spark: SparkSession) -> SparkContext:
    return spark.sparkContext


@pytest.fixture
def child(spark: SparkSession) -> Iterator[SparkInChild]:
    handler = signal.getsignal(signal.SIGINT)
    yield SparkInChild("tests", None, {}, lambda: pytest.fail("the JVM is running"))
    signal.signal(signal.SIGINT, handler)


def no_job_client(_: RunningJob) -> Any:
    return None


def work_long(context: SparkContext) -> int:
    """Run an action of ten minutes with two concurrent tasks."""

    def wait(part: Iterable[int]) -> Iterable[int]:
        threading.Event().wait(LONG_S)
        yield from part

    return context.parallelize(range(2), 2).mapPartitions(wait).count()


def active_jobs(context: SparkContext) -> list[int]:
    return context.statusTracker().getActiveJobsIds()


def wait_until_idle(context: SparkContext) -> None:
    wait_until(lambda: not active_jobs(context), 60.0, "the end of Spark's jobs")


def test_a_tasks_job_group_is_its_job_id_until_the_task_ends(context: SparkContext, child: SparkInChild) -> None:
    names = ("spark.jobGroup.id", "spark.job.description", "spark.job.interruptOnCancel")
    with child.run(Job("named").run):
        inside = [context.getLocalProperty(name) for name in names]
    assert inside == ["named", "mail", "true"]
    assert [context.getLocalProperty(name) for name in names[:2]] == [None, None]


def test_current_session_outside_a_job_is_the_session_of_the_process(spark: SparkSession) -> None:
    assert current_session() is spark


def test_the_last_progress_counts_all_stages_and_tasks_except_skipped_ones(
    context: SparkContext, child: SparkInChild
) -> None:
    job = Job("counted")
    with child.run(job.run):
        shuffled = context.parallelize(range(100), 4).map(lambda x: (x % 3, x)).reduceByKey(max, 2)
        assert shuffled.count() == 3
        assert shuffled.count() == 3  # its first stage is not run again
    assert job.reports[-1] == {"progress": 100.0, "stages": 3, "stages_done": 3, "tasks": 8, "tasks_done": 8}


def test_the_progress_of_a_job_that_runs_again_starts_at_zero(context: SparkContext, child: SparkInChild) -> None:
    job = Job("again")
    for tasks in (3, 2):
        with child.run(job.run):
            context.parallelize(range(6), tasks).count()
    assert [report["tasks"] for report in job.reports if report["progress"] == 100.0] == [3, 2]


def test_progress_is_reported_only_when_it_has_changed(context: SparkContext, child: SparkInChild) -> None:
    job = Job("changing")

    def wait(part: Iterable[int]) -> Iterable[int]:
        threading.Event().wait(1.5)
        yield from part

    with child.run(job.run):
        context.parallelize(range(6), 6).mapPartitions(wait).count()
    assert job.reports[-1]["tasks_done"] == 6
    assert len(job.reports) > 1
    assert all(report != following for report, following in zip(job.reports, job.reports[1:], strict=False))


def test_progress_reported_by_the_task_is_not_overwritten(context: SparkContext, child: SparkInChild) -> None:
    job = Job("reporting")
    with child.run(job.run):
        job.has_reported = True
        context.parallelize(range(2), 2).count()
    assert job.reports == []


def test_an_interrupt_ends_an_action_and_the_thread_can_still_use_spark(
    context: SparkContext, child: SparkInChild
) -> None:
    def interrupt(*_: object) -> None:
        child.interrupt()
        raise Interrupted

    before = signal.signal(signal.SIGUSR2, interrupt)
    main, job = os.getpid(), Job("interrupted")

    def interrupt_running_job() -> None:
        wait_until(lambda: active_jobs(context), 60.0, "a Spark job")
        os.kill(main, signal.SIGUSR2)

    sender = threading.Thread(target=interrupt_running_job)
    try:
        with child.run(job.run):
            sender.start()
            with pytest.raises(Interrupted):
                work_long(context)
            wait_until_idle(context)
            assert context.parallelize(range(5), 1).sum() == 10
            assert context.getLocalProperty("spark.jobGroup.id") == "interrupted"
    finally:
        sender.join()
        signal.signal(signal.SIGUSR2, before)


@pytest.mark.parametrize("interruption", [None, ReleaseJob()], ids=["returned", "released"])
def test_spark_jobs_left_by_a_tasks_threads_are_cancelled_when_it_ends(
    context: SparkContext, child: SparkInChild, interruption: Interrupt | None
) -> None:
    failures: list[Py4JJavaError] = []

    def leave_running() -> None:
        try:
            work_long(context)
        except Py4JJavaError as exc:
            failures.append(exc)

    with suppress(ReleaseJob), child.run(Job("left").run):
        thread = InheritableThread(target=leave_running)
        thread.start()
        wait_until(lambda: active_jobs(context), 60.0, "a Spark job")
        if interruption is not None:
            raise interruption
    wait_until_idle(context)
    thread.join()
    assert "cancelled" in str(failures[0])


def test_a_lost_lock_cancels_the_spark_jobs_of_the_job(context: SparkContext, child: SparkInChild) -> None:
    job = Job("lost")
    job.has_lock = False
    with pytest.raises(Py4JJavaError, match="cancelled"), child.run(job.run):
        work_long(context)
    wait_until_idle(context)
    assert job.reports == [] or job.reports[-1]["tasks_done"] == 0


def test_a_session_created_before_the_fork_is_rejected_with_advice(spark: SparkSession, broker_url: str) -> None:
    app = App("tested", broker_url)
    tasks = SparkTaskRunner(app, no_job_client, lambda *_: True, lambda: None)
    with pytest.raises(PermanentError, match=r"get a session in the task, with bulltask\.spark\.current_session"):
        tasks.wrap(RunningJob.placeholder("mail", "1", ""), "token", lambda: None, None)()


def test_a_job_is_released_and_its_child_exits_if_the_jvm_died_while_idle() -> None:
    exits: list[bool] = []
    child = SparkInChild("tests", None, {}, lambda: exits.append(True))
    with subprocess.Popen(["true"]) as jvm:
        child._gateway = SimpleNamespace(proc=jvm)
    with pytest.raises(ReleaseJob), child.run(Job("late").run):
        pytest.fail("the job must not run")
    assert exits == [True]


def test_cancelling_the_spark_jobs_of_a_job_does_not_affect_others(context: SparkContext, child: SparkInChild) -> None:
    counts: list[int] = []
    gate = threading.Event()

    def other() -> None:
        context.setJobGroup("other", "other")

        def wait(part: Iterable[int]) -> Iterable[int]:
            threading.Event().wait(5)
            yield from part

        gate.set()
        counts.append(context.parallelize(range(7), 1).mapPartitions(wait).count())

    thread = threading.Thread(target=other)
    thread.start()
    gate.wait(60)
    job = Job("cancelled")
    job.has_lock = False
    with pytest.raises(Py4JJavaError, match="cancelled"), child.run(job.run):
        work_long(context)
    thread.join()
    assert counts == [7]
