"""What a child's Spark does around a task: groups, progress, and an end to all that the task has begun."""

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
from bulltask.spark.tasks.in_child import SparkInChild
from bulltask.testing.wait import wait_until
from bulltask.worker.child.spark_tasks import SparkRun, SparkTasks

pytestmark = [pytest.mark.spark, pytest.mark.redis, pytest.mark.timeout(240)]

LONG_S = 600


class Job:
    """A running job, and what it reports."""

    def __init__(self, job_id: str) -> None:
        self.told: list[Any] = []
        self.sent_by_bulltask, self.has_reported = True, False
        self.run = SparkRun(job_id, "mail", self.told.append, lambda: self.has_reported, lambda: self.sent_by_bulltask)


class Interrupted(BaseException):
    pass


@pytest.fixture
def context(spark: SparkSession) -> SparkContext:
    return spark.sparkContext


@pytest.fixture
def child(spark: SparkSession) -> Iterator[SparkInChild]:
    handler = signal.getsignal(signal.SIGINT)
    yield SparkInChild("tests", None, {}, lambda: pytest.fail("the JVM lives"))
    signal.signal(signal.SIGINT, handler)


def no_reporter(_: RunningJob) -> Any:
    return None


def work_long(context: SparkContext) -> int:
    """An action of ten minutes, two tasks at a time."""

    def wait(part: Iterable[int]) -> Iterable[int]:
        threading.Event().wait(LONG_S)
        yield from part

    return context.parallelize(range(2), 2).mapPartitions(wait).count()


def running(context: SparkContext) -> list[int]:
    return context.statusTracker().getActiveJobsIds()


def wait_until_nothing_runs(context: SparkContext) -> None:
    wait_until(lambda: not running(context), 60.0, "the end of Spark's jobs")


def test_the_job_group_is_the_jobs_id_with_the_tasks_name_and_none_afterwards(
    context: SparkContext, child: SparkInChild
) -> None:
    names = ("spark.jobGroup.id", "spark.job.description", "spark.job.interruptOnCancel")
    with child.run(Job("named").run):
        inside = [context.getLocalProperty(name) for name in names]
    assert inside == ["named", "mail", "true"]
    assert [context.getLocalProperty(name) for name in names[:2]] == [None, None]


def test_a_task_that_is_called_directly_has_the_session_of_its_process(spark: SparkSession) -> None:
    assert current_session() is spark


def test_the_last_progress_says_that_all_stages_and_tasks_are_done_and_leaves_out_skipped_ones(
    context: SparkContext, child: SparkInChild
) -> None:
    job = Job("counted")
    with child.run(job.run):
        shuffled = context.parallelize(range(100), 4).map(lambda x: (x % 3, x)).reduceByKey(max, 2)
        assert shuffled.count() == 3
        assert shuffled.count() == 3  # its first stage is not run again
    assert job.told[-1] == {"progress": 100.0, "stages": 3, "stages_done": 3, "tasks": 8, "tasks_done": 8}


def test_a_job_that_is_run_again_counts_from_zero(context: SparkContext, child: SparkInChild) -> None:
    job = Job("again")
    for tasks in (3, 2):
        with child.run(job.run):
            context.parallelize(range(6), tasks).count()
    assert [told["tasks"] for told in job.told if told["progress"] == 100.0] == [3, 2]


def test_progress_is_reported_while_the_task_runs_and_only_when_it_has_changed(
    context: SparkContext, child: SparkInChild
) -> None:
    job = Job("told")

    def wait(part: Iterable[int]) -> Iterable[int]:
        threading.Event().wait(1.5)
        yield from part

    with child.run(job.run):
        context.parallelize(range(6), 6).mapPartitions(wait).count()
    assert job.told[-1]["tasks_done"] == 6
    assert len(job.told) > 1
    assert all(told != following for told, following in zip(job.told, job.told[1:], strict=False))


def test_progress_that_the_task_itself_reports_is_not_overwritten(context: SparkContext, child: SparkInChild) -> None:
    job = Job("spoken")
    with child.run(job.run):
        job.has_reported = True
        context.parallelize(range(2), 2).count()
    assert job.told == []


def test_an_interrupt_ends_a_wait_for_spark_at_once_and_the_thread_may_go_on_with_spark(
    context: SparkContext, child: SparkInChild
) -> None:
    def interrupt(*_: object) -> None:
        child.interrupt()
        raise Interrupted

    before = signal.signal(signal.SIGUSR2, interrupt)
    main, job = os.getpid(), Job("interrupted")

    def when_it_runs() -> None:
        wait_until(lambda: running(context), 60.0, "a job of Spark's")
        os.kill(main, signal.SIGUSR2)

    sender = threading.Thread(target=when_it_runs)
    try:
        with child.run(job.run):
            sender.start()
            with pytest.raises(Interrupted):
                work_long(context)
            wait_until_nothing_runs(context)
            assert context.parallelize(range(5), 1).sum() == 10
            assert context.getLocalProperty("spark.jobGroup.id") == "interrupted"
    finally:
        sender.join()
        signal.signal(signal.SIGUSR2, before)


@pytest.mark.parametrize("how", [None, ReleaseJob()], ids=["it returned", "it gave its job back"])
def test_what_the_threads_of_a_task_have_left_running_is_cancelled_when_it_ends(
    context: SparkContext, child: SparkInChild, how: Interrupt | None
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
        wait_until(lambda: running(context), 60.0, "a job of Spark's")
        if how is not None:
            raise how
    wait_until_nothing_runs(context)
    thread.join()
    assert "cancelled" in str(failures[0])


def test_a_lost_lock_cancels_what_the_job_does_on_spark(context: SparkContext, child: SparkInChild) -> None:
    job = Job("lost")
    job.sent_by_bulltask = False
    with pytest.raises(Py4JJavaError, match="cancelled"), child.run(job.run):
        work_long(context)
    wait_until_nothing_runs(context)
    assert job.told == [] or job.told[-1]["tasks_done"] == 0


def test_a_session_that_was_made_before_the_fork_is_refused_with_advice(spark: SparkSession, broker_url: str) -> None:
    app = App("tested", broker_url)
    tasks = SparkTasks(app, no_reporter, lambda *_: True, lambda: None)
    with pytest.raises(PermanentError, match=r"get it inside the task, with bulltask\.spark\.current_session"):
        tasks.inside(RunningJob.placeholder("mail", "1", ""), "token", lambda: None, None)()


def test_a_job_is_released_and_its_child_leaves_if_the_jvm_died_while_idle() -> None:
    left: list[bool] = []
    child = SparkInChild("tests", None, {}, lambda: left.append(True))
    with subprocess.Popen(["true"]) as jvm:
        child._gateway = SimpleNamespace(proc=jvm)
    with pytest.raises(ReleaseJob), child.run(Job("late").run):
        pytest.fail("it is not run")
    assert left == [True]


def test_other_jobs_go_on_when_one_is_cancelled(context: SparkContext, child: SparkInChild) -> None:
    found: list[int] = []
    gate = threading.Event()

    def other() -> None:
        context.setJobGroup("other", "other")

        def wait(part: Iterable[int]) -> Iterable[int]:
            threading.Event().wait(5)
            yield from part

        gate.set()
        found.append(context.parallelize(range(7), 1).mapPartitions(wait).count())

    thread = threading.Thread(target=other)
    thread.start()
    gate.wait(60)
    job = Job("one")
    job.sent_by_bulltask = False
    with pytest.raises(Py4JJavaError, match="cancelled"), child.run(job.run):
        work_long(context)
    thread.join()
    assert found == [7]
