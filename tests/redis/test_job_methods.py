"""Tests of a job's methods outside its worker. Every test runs with both classes."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest
import redis

from bulltask import App
from bulltask.errors import (
    ConfigError,
    EncodeError,
    JobNotFoundError,
    JobStateError,
    LockMismatchError,
    ParentNotFoundError,
    PayloadTooLargeError,
    ResultTimeoutError,
    TaskError,
)
from bulltask.jobs.job import RunningJob
from bulltask.jobs.names import JobState
from bulltask.queue import BulkJob, FlowJob, FlowProducer, Job, Queue
from bulltask.worker.attempt import RedisJobClient
from tests.support.manual_worker import ManualWorker


def test_update_data_replaces_the_data(queue: Queue) -> None:
    job = queue.add("n", {"step": 1})
    job.update_data({"step": 2, "to": ("a", "b")})
    assert job.data == {"step": 2, "to": ["a", "b"]}
    job.refresh()
    assert job.data == {"step": 2, "to": ["a", "b"]}
    with pytest.raises(EncodeError):
        job.update_data({"x": float("nan")})


def test_progress_is_stored_and_emitted(queue: Queue, redis_client: redis.Redis) -> None:
    job = queue.add("n")
    job.update_progress(40)
    job.update_progress({"rows": 7})
    assert job.progress == {"rows": 7}
    entries: Any = redis_client.xrange("bull:{mail}:events")
    emitted = [fields["data"] for _, fields in entries if fields["event"] == "progress"]
    assert emitted == ["40", '{"rows":7}']


def test_log_lines_are_added_read_and_cleared(queue: Queue) -> None:
    job = queue.add("n")
    assert [job.log(f"line {number}") for number in range(5)] == [1, 2, 3, 4, 5]
    assert job.get_logs(1, 2).lines == ("line 1", "line 2")
    assert job.get_logs(0, 1, asc=False).lines == ("line 4", "line 3")
    assert job.get_logs().count == 5
    job.clear_logs(2)
    assert job.get_logs().lines == ("line 3", "line 4")
    job.clear_logs()
    assert job.get_logs().count == 0
    with pytest.raises(ConfigError, match="keep"):
        job.clear_logs(-1)
    short = queue.add("n", keep_logs=2)
    assert [short.log("x") for _ in range(3)] == [1, 2, 2]


def test_a_log_keeps_a_thousand_lines_by_default(queue: Queue, broker_url: str, redis_client: Any) -> None:
    def lines_of(job: Job) -> int:
        redis_client.rpush(f"bull:{{mail}}:{job.id}:logs", *map(str, range(1_500)))
        shown = job.log("last")
        logs = job.get_logs()
        assert (shown, logs.lines[-1]) == (logs.count, "last")
        return shown

    assert lines_of(queue.add("n")) == 1_000
    assert lines_of(queue.add("n", keep_logs=0)) == 1_501
    assert lines_of(queue.add("n", keep_logs=2**53 - 1)) == 1_501
    with Queue("mail", broker_url, max_logs=20) as strict, Queue("mail", broker_url, max_logs=None) as lenient:
        assert lines_of(strict.add("n")) == 20
        assert lines_of(lenient.add("n")) == 1_501
        job = queue.add("n")
        assert [queue.add_job_log(job.id, "x", keep_logs=0) for _ in range(30)][-1] == 30
        assert strict.add_job_log(job.id, "x") == 20


def test_max_logs_limits_the_log_of_a_running_job(broker_url: str) -> None:
    app = App("logging", broker_url, max_logs=3)
    job = app.queue("mail").add("n")
    running = RunningJob.from_hash("mail", job.id, [b"opts", b"{}"])
    job_client = RedisJobClient(running, app._broker, app._broker.shared_async_client)
    for number in range(5):
        job_client.send("log", f"line {number}")
    assert job.get_logs().lines == ("line 2", "line 3", "line 4")
    app.close()


def test_data_and_options_together_must_not_exceed_max_payload(broker_url: str) -> None:
    app = App("writing", broker_url, max_payload=1_000)
    job = app.queue("mail").add("n")
    options = json.dumps({"tm": 600 * "x"}).encode()
    running = RunningJob.from_hash("mail", job.id, [b"opts", options])
    job_client = RedisJobClient(running, app._broker, app._broker.shared_async_client)
    with pytest.raises(PayloadTooLargeError, match="together exceed the limit of 1,000"):
        job_client.send("data", 600 * b"1")
    job_client.send("data", 300 * b"1")
    app.close()


def test_each_state_has_a_predicate(queue: Queue, manual_worker: ManualWorker) -> None:
    def states(job: Job) -> tuple[JobState, set[str]]:
        names = "completed failed delayed active waiting prioritized waiting_children".split()
        return job.get_state(), {name for name in names if getattr(job, f"is_{name}")()}

    job = queue.add("n")
    assert states(job) == (JobState.WAITING, {"waiting"})
    queue.pause()
    assert states(job) == (JobState.WAITING, {"waiting"})
    queue.resume()
    manual_worker.acquire()
    assert states(job) == (JobState.ACTIVE, {"active"})
    manual_worker.finish(job.id)
    assert states(job) == (JobState.COMPLETED, {"completed"})
    assert states(queue.add("n", delay=60)) == (JobState.DELAYED, {"delayed"})
    assert states(queue.add("n", priority=1)) == (JobState.PRIORITIZED, {"prioritized"})
    failed = queue.add("n")
    manual_worker.fail()
    assert states(failed) == (JobState.FAILED, {"failed"})
    failed.remove()
    assert states(failed) == (JobState.UNKNOWN, set())


@pytest.mark.every_topology
def test_a_failed_job_is_retried(queue: Queue, manual_worker: ManualWorker) -> None:
    job = queue.add("n")
    manual_worker.fail("no stamps")
    job.refresh()
    assert (job.failed_reason, job.attempts_made) == ("no stamps", 1)
    job.retry()
    assert (job.failed_reason, job.finished_ms) == (None, None)
    assert job.is_waiting()
    assert manual_worker.complete("sent") == job.id
    with pytest.raises(JobStateError, match=rf"job {job.id} in queue \{{mail\}}"):
        job.retry()
    job.retry("completed")
    assert job.is_waiting()
    with pytest.raises(ConfigError, match="state must be"):
        job.retry("active")


@pytest.mark.parametrize("parent", [False, True])
def test_a_retry_can_reset_the_attempts(
    queue: Queue, manual_worker: ManualWorker, broker_url: str, parent: bool
) -> None:
    if parent:
        with FlowProducer(broker_url) as flows:
            flows.add(
                FlowJob(
                    "parent",
                    "mail",
                    {},
                    {},
                    [FlowJob("child", "mail", {}, {"attempts": 1, "fail_parent_on_failure": True})],
                )
            )
        [job] = queue.get_jobs("waiting")
    else:
        job = queue.add("a", attempts=1)
    manual_worker.fail()
    job.refresh()
    assert (job.attempts_made, job.attempts_started) == (1, 1)
    job.retry(reset_attempts_made=True)
    assert job.attempts_made == 0
    job.refresh()
    assert (job.attempts_made, job.attempts_started) == (0, 1)


def test_a_retry_can_reset_the_starts(queue: Queue, manual_worker: ManualWorker) -> None:
    job = queue.add("a", attempts=1)
    manual_worker.fail()
    job.retry(reset_attempts_started=True)
    job.refresh()
    assert (job.attempts_made, job.attempts_started) == (1, 0)


def test_a_retried_lifo_job_is_the_next_one(queue: Queue, manual_worker: ManualWorker) -> None:
    job = queue.add("n", lifo=True)
    manual_worker.fail()
    queue.add("n")
    job.retry()
    assert manual_worker.acquire() == job.id


def test_all_methods_of_a_removed_job_raise(queue: Queue, manual_worker: ManualWorker) -> None:
    job = queue.add("n")
    manual_worker.acquire()
    with pytest.raises(LockMismatchError, match="cannot be removed"):
        job.remove()
    manual_worker.finish(job.id)
    job.remove()
    for method, arguments in (
        ("refresh", ()),
        ("update_data", (1,)),
        ("update_progress", (1,)),
        ("log", ("x",)),
        ("retry", ()),
        ("change_delay", (1,)),
        ("change_priority", (1,)),
        ("wait_until_finished", (0.1,)),
    ):
        if method == "wait_until_finished":
            assert job.wait_until_finished(5) is None, "the events still know how it ended"
            continue
        with pytest.raises(JobNotFoundError, match=job.id):
            getattr(job, method)(*arguments)
    with pytest.raises(JobStateError):
        job.promote()


def test_a_delayed_job_is_promoted(queue: Queue, manual_worker: ManualWorker) -> None:
    job = queue.add("n", delay=60)
    assert job.delay_ms == 60_000
    job.promote()
    assert job.delay_ms == 0
    assert manual_worker.acquire() == job.id


def test_a_delay_is_changed(queue: Queue, redis_client: redis.Redis) -> None:
    job = queue.add("n", delay=60)
    job.change_delay(timedelta(hours=1))
    assert job.delay_ms == 3_600_000
    score: Any = redis_client.zscore("bull:{mail}:delayed", job.id)
    assert score // 4096 == pytest.approx(queue.context.now_ms() + 3_600_000, abs=10_000)
    with pytest.raises(JobStateError):
        queue.add("n").change_delay(1)


def test_a_priority_is_changed(queue: Queue, manual_worker: ManualWorker) -> None:
    one, two, three = (queue.add("n", priority=5) for _ in range(3))
    three.change_priority(5, lifo=True)
    one.change_priority(9)
    assert one.priority == 9
    assert [manual_worker.acquire() for _ in range(3)] == [three.id, two.id, one.id]
    plain = queue.add("n")
    plain.change_priority(1)
    assert plain.is_prioritized()
    plain.change_priority(0)
    assert plain.is_waiting()
    with pytest.raises(ConfigError, match="priority"):
        plain.change_priority(2**21)


def test_a_lock_is_extended_by_its_holder(queue: Queue, manual_worker: ManualWorker, redis_client: redis.Redis) -> None:
    job = queue.add("n")
    assert not job.extend_lock("manual-worker", 60)
    manual_worker.acquire()
    assert job.extend_lock("manual-worker", 60)
    left: Any = redis_client.pttl(f"bull:{{mail}}:{job.id}:lock")
    assert 50_000 < left <= 60_000
    assert not job.extend_lock("foreign", 60)
    with pytest.raises(ConfigError, match="duration"):
        job.extend_lock("manual-worker", 0)


@pytest.mark.every_topology
def test_wait_until_finished_returns_the_result_or_raises(queue: Queue, manual_worker: ManualWorker) -> None:
    good, bad = queue.add("n"), queue.add("n")
    with pytest.raises(ResultTimeoutError):
        good.wait_until_finished(timeout=0.05)
    manual_worker.complete({"sum": 3})
    manual_worker.fail("no stamps")
    assert good.wait_until_finished(5) == {"sum": 3}
    with pytest.raises(TaskError, match="no stamps"):
        bad.wait_until_finished(5)


class Family:
    """An active parent job, and child jobs that are added to it."""

    def __init__(self, queue: Queue, manual_worker: ManualWorker) -> None:
        self.queue, self.manual_worker = queue, manual_worker
        self.parent = queue.add("parent")
        manual_worker.acquire()

    def child(self, **options: Any) -> Job:
        return self.queue.add("child", parent=self.parent, **options)


@pytest.mark.every_topology
def test_children_are_read_by_outcome(queue: Queue, manual_worker: ManualWorker) -> None:
    family = Family(queue, manual_worker)
    done, ignored, fatal, pending = (
        family.child(),
        family.child(ignore_dependency_on_failure=True),
        family.child(fail_parent_on_failure=True),
        family.child(),
    )
    manual_worker.complete({"n": 1})
    manual_worker.fail("broke")
    manual_worker.fail("failed")
    parent = family.parent
    assert parent.get_children_values() == {done.key: {"n": 1}}
    dependencies = parent.get_dependencies()
    assert (dependencies.processed, dependencies.unprocessed) == ({done.key: {"n": 1}}, (pending.key,))
    assert (dependencies.ignored, dependencies.failed) == ({ignored.key: "broke"}, (fatal.key,))
    failures = parent.get_failed_children()
    assert (failures.ignored, failures.failed) == ({ignored.key: "broke"}, (fatal.key,))
    assert parent.get_dependencies_count() == {"processed": 1, "unprocessed": 1, "ignored": 1, "failed": 1}
    assert parent.get_dependencies_count("failed") == {"failed": 1}
    with pytest.raises(ConfigError, match="kind"):
        parent.get_dependencies_count("dead")
    read = queue.get_job(fatal.id)
    assert read is not None
    assert read.parent == {"id": parent.id, "queueKey": "bull:{mail}", "fpof": True}
    assert read.opts["parent"] == {"id": parent.id, "queue": "bull:{mail}"}
    assert read.parent_key == parent.key


@pytest.mark.parametrize(
    "flag", ["fail_parent_on_failure", "ignore_dependency_on_failure", "continue_parent_on_failure", None]
)
def test_a_failed_child_is_retried_and_its_parent_waits_for_it(
    queue: Queue, manual_worker: ManualWorker, redis_client: redis.Redis, flag: str | None
) -> None:
    family = Family(queue, manual_worker)
    family.child(ignore_dependency_on_failure=True)
    manual_worker.fail("so that the parent has ignored failures")
    child = family.child(**({} if flag is None else {flag: True}))
    assert manual_worker.fail("broke") == child.id
    child.retry()
    assert child.is_waiting()
    dependencies = family.parent.get_dependencies()
    assert child.key in dependencies.unprocessed
    assert child.key not in {*dependencies.ignored, *dependencies.failed}
    entries: Any = redis_client.xrevrange("bull:{mail}:events", count=1)
    assert entries[0][1] == {"event": "waiting", "jobId": child.id, "prev": "failed"}
    with pytest.raises(JobStateError):
        child.retry()
    assert manual_worker.complete() == child.id
    assert child.key in family.parent.get_children_values()


def test_retrying_a_child_in_a_paused_queue_or_at_the_global_concurrency_adds_no_marker(
    queue: Queue, manual_worker: ManualWorker, redis_client: redis.Redis
) -> None:
    family = Family(queue, manual_worker)
    for limit, unlimit in (
        (queue.pause, queue.resume),
        (lambda: queue.set_global_concurrency(1), queue.remove_global_concurrency),
    ):
        child = family.child(lifo=True)
        manual_worker.fail()
        limit()
        redis_client.delete("bull:{mail}:marker")
        child.retry()
        assert not redis_client.exists("bull:{mail}:marker")
        unlimit()
        child.remove()
        with pytest.raises(JobNotFoundError):
            child.retry()


def test_children_are_read_in_pages(queue: Queue, manual_worker: ManualWorker) -> None:
    family = Family(queue, manual_worker)
    child: BulkJob = {"name": "child", "options": {"parent": family.parent}}
    children = {job.key for job in queue.add_bulk([child] * 700)}
    page = queue.get_dependencies(family.parent.id, "pending", 0, 9)
    assert (len(page.items), page.total) == (10, 700)
    assert set(queue.get_dependencies(family.parent.id, "pending").items) == children
    values = {manual_worker.complete(number): number for number in range(3)}
    done = queue.get_dependencies(family.parent.id, "processed")
    assert done.items == {f"bull:{{mail}}:{job_id}": number for job_id, number in values.items()}
    assert queue.get_dependencies("missing", "pending").items == {}
    with pytest.raises(ConfigError, match="kind"):
        queue.get_dependencies(family.parent.id, "dead")


@pytest.mark.parametrize(
    ("kind", "flag", "value"),
    [("ignored", "ignore_dependency_on_failure", "7"), ("failed", "fail_parent_on_failure", None)],
)
def test_failed_children_are_read_in_pages(
    queue: Queue, manual_worker: ManualWorker, kind: str, flag: str, value: str | None
) -> None:
    family = Family(queue, manual_worker)
    for _ in range(4):
        family.child(**{flag: True})
        manual_worker.fail("7")
    pages = [queue.get_dependencies(family.parent.id, kind, start, start + 1) for start in (0, 2, 4)]
    assert [(set(page.items.values()), page.total) for page in pages] == [({value}, 4), ({value}, 4), (set(), 4)]
    all_children = queue.get_dependencies(family.parent.id, kind)
    assert all_children.items.keys() == pages[0].items.keys() | pages[1].items.keys()
    assert len(all_children.items) == 4


def test_remove_child_dependency_detaches_a_child(queue: Queue, manual_worker: ManualWorker) -> None:
    family = Family(queue, manual_worker)
    child = family.child()
    assert child.remove_child_dependency()
    assert child.parent_key is None
    assert not child.remove_child_dependency()
    assert family.parent.get_dependencies_count("unprocessed") == {"unprocessed": 0}


def test_remove_unprocessed_children_keeps_active_and_completed_children(
    queue: Queue, manual_worker: ManualWorker
) -> None:
    family = Family(queue, manual_worker)
    done, active, waiting = family.child(), family.child(), family.child()
    manual_worker.complete()
    manual_worker.acquire()
    family.parent.remove_unprocessed_children()
    assert waiting.get_state() is JobState.UNKNOWN
    assert active.is_active()
    assert done.is_completed()


@pytest.mark.every_topology
def test_a_job_is_removed_with_or_without_its_children(
    queue: Queue, manual_worker: ManualWorker, redis_client: redis.Redis
) -> None:
    family = Family(queue, manual_worker)
    child = family.child()
    manual_worker.acquire()
    with pytest.raises(LockMismatchError):
        family.parent.remove()
    manual_worker.finish(child.id)
    other = family.child()
    key = family.parent.key
    assert other.parent_key == key
    assert not queue.remove(family.parent.id)
    redis_client.delete(f"{key}:lock")
    family.parent.remove(children=False)
    assert other.is_waiting()


def test_a_child_of_a_missing_parent_is_rejected(queue: Queue) -> None:
    with pytest.raises(ParentNotFoundError):
        queue.add("child", parent={"id": "missing", "queue": "mail"})


@pytest.mark.one_server
def test_a_parents_queue_may_be_given_with_or_without_the_hash_tag(queue: Queue, broker_url: str) -> None:
    with Queue("orders", broker_url) as orders:
        parent = orders.add("parent")
        for queue_name in ("orders", "{orders}", "bull:{orders}"):
            child = queue.add("child", parent={"id": parent.id, "queue": queue_name})
            assert child.parent_key == parent.key
        assert parent.get_dependencies_count("unprocessed") == {"unprocessed": 3}


def test_a_deduplication_id_is_freed_only_by_its_owner(queue: Queue, redis_client: redis.Redis) -> None:
    first = queue.add("n", deduplication="x")
    assert queue.get_deduplication_job_id("x") == first.id
    assert queue.add("n", deduplication="x").id == first.id
    assert first.remove_deduplication_key()
    assert not first.remove_deduplication_key()
    second = queue.add("n", deduplication="x")
    assert second.id != first.id
    assert not first.remove_deduplication_key(), "the second job owns it now"
    assert queue.remove_deduplication_key("x")
    assert not queue.remove_deduplication_key("x")
    assert queue.get_deduplication_job_id("x") is None
    assert not queue.add("n").remove_deduplication_key()
