"""Tests of adding, reading, counting and removing jobs of a queue. Every test runs with both classes."""

from __future__ import annotations

from typing import Any

import pytest
import redis

from bulltask.errors import ConfigError, InvalidNameError, QueueActiveError
from bulltask.jobs.names import JobState
from bulltask.queue import Queue, QueueSummary
from tests.support.manual_worker import ManualWorker

BASE = "bull:{mail}:"


@pytest.mark.every_topology
def test_a_job_is_added_and_read_back(queue: Queue) -> None:
    sent = queue.add("send", {"to": "ann"}, priority=3, keep_logs=5)
    read = queue.get_job(sent.id)
    assert read is not None
    assert (read.name, read.data, read.priority, read.timestamp_ms) == ("send", {"to": "ann"}, 3, sent.timestamp_ms)
    assert (read.opts["kl"], read.attempts) == (5, 3)
    assert sent.opts == read.opts
    assert read.get_state() is JobState.PRIORITIZED
    assert read.key == sent.key == "bull:{mail}:" + sent.id


def test_an_unknown_id_returns_no_job(queue: Queue) -> None:
    assert queue.get_job("missing") is None
    assert queue.get_job_state("missing") is JobState.UNKNOWN


def test_jobs_are_added_in_bulk_and_in_order(queue: Queue) -> None:
    sent = queue.add_bulk([{"name": "n", "data": number} for number in range(2_500)])
    assert len({job.id for job in sent}) == 2_500
    waiting = queue.get_jobs("waiting", 0, 9, asc=True)
    assert [job.data for job in waiting] == list(range(10))
    assert [job.data for job in queue.get_jobs(["waiting"], 0, 2)] == [2_499, 2_498, 2_497]
    assert queue.get_job_ids("waiting", 0, 1, asc=True) == [job.id for job in sent[:2]]


def test_add_bulk_adds_nothing_if_one_job_is_invalid(queue: Queue) -> None:
    with pytest.raises(ConfigError, match="priority"):
        queue.add_bulk([{"name": "a"}, {"name": "b", "options": {"priority": -1}}])
    with pytest.raises(InvalidNameError):
        queue.add("a", job_id="7")
    with pytest.raises(TypeError, match="unknown option 'jobId'"):
        queue.add("a", jobId="x")  # type: ignore[call-arg]
    assert queue.count() == 0


@pytest.mark.parametrize(
    ("job", "message"),
    [
        ({"name": "b", "opts": {"lifo": True}}, "unknown key 'opts'.* use name, data, options"),
        ({"data": 1}, "no 'name'"),
    ],
)
def test_add_bulk_rejects_keys_whose_values_would_be_lost(queue: Queue, job: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        queue.add_bulk([{"name": "a"}, job])
    assert queue.get_job_counts()["waiting"] == 0


@pytest.mark.every_topology
def test_the_same_id_twice_is_one_job(queue: Queue) -> None:
    assert queue.add("a", 1, job_id="once").id == queue.add("a", 2, job_id="once").id == "once"
    assert [job.data for job in queue.get_jobs()] == [1]


def test_a_queues_default_options_apply_to_its_jobs(broker_url: str) -> None:
    with Queue("mail", broker_url, default_job_options={"attempts": 7, "lifo": True}) as queue:
        assert queue.add("a").attempts == 7
        assert queue.add("a", attempts=1).opts["attempts"] == 1
        assert queue.add("a", attempts=1).opts["lifo"] is True
    with pytest.raises(TypeError, match="unknown option"):
        Queue("mail", broker_url, default_job_options={"tries": 7})  # type: ignore[arg-type]


@pytest.mark.every_topology
def test_jobs_are_counted_by_state(queue: Queue, manual_worker: ManualWorker) -> None:
    queue.add_bulk([{"name": "n"}] * 5)
    manual_worker.complete()
    manual_worker.fail()
    manual_worker.acquire()
    queue.add("late", delay=60)
    queue.add("vip", priority=1)
    queue.add("vip", priority=9)
    assert queue.get_job_counts() == {
        "active": 1,
        "completed": 1,
        "delayed": 1,
        "failed": 1,
        "paused": 0,
        "prioritized": 2,
        "waiting": 2,
        "waiting-children": 0,
    }
    assert queue.get_job_counts("waiting", "active") == {"waiting": 2, "active": 1, "paused": 0}
    assert queue.get_summary() == QueueSummary(waiting=4, active=1, completed=1, failed=1, delayed=1)
    assert queue.count() == 5
    assert queue.get_counts_per_priority([0, 1, 9, 9, 4]) == {0: 2, 1: 1, 9: 1, 4: 0}
    assert queue.get_counts_per_priority([]) == {}
    with pytest.raises(ConfigError, match="unknown state 'wating'"):
        queue.get_job_counts("wating")


@pytest.mark.every_topology
def test_jobs_of_several_states_are_read_once_each(queue: Queue, manual_worker: ManualWorker) -> None:
    jobs = queue.add_bulk([{"name": "n", "data": number} for number in range(4)])
    manual_worker.complete({"sum": 3})
    manual_worker.fail("no stamps")
    ended = queue.get_jobs(["completed", "failed"])
    assert [(job.data, job.returnvalue, job.failed_reason) for job in ended] == [
        (0, {"sum": 3}, None),
        (1, None, "no stamps"),
    ]
    assert {job.id for job in queue.get_jobs()} == {job.id for job in jobs}
    assert ended[0].processed_by == "manual"
    assert ended[0].finished_ms is not None


@pytest.mark.every_topology
def test_drain_removes_waiting_jobs(queue: Queue, manual_worker: ManualWorker) -> None:
    queue.add("first")
    manual_worker.complete()
    queue.add("active")
    manual_worker.acquire()
    queue.add("waits")
    queue.add("vip", priority=2)
    queue.add("late", delay=60)
    queue.drain()
    assert [job.name for job in queue.get_jobs(["waiting", "prioritized", "delayed"])] == ["late"]
    queue.drain(delayed=True)
    assert sorted(job.name for job in queue.get_jobs()) == ["active", "first"]


@pytest.mark.every_topology
def test_clean_removes_old_jobs_of_one_state(queue: Queue, manual_worker: ManualWorker) -> None:
    queue.add_bulk([{"name": "n"}] * 6)
    done = [manual_worker.complete() for _ in range(3)]
    failed = [manual_worker.fail() for _ in range(2)]
    assert queue.clean(60) == []
    assert sorted(queue.clean(0, 2)) == sorted(done[:2])
    assert queue.clean(0, state="failed") == failed
    assert len(queue.clean(0, state="waiting")) == 1
    assert queue.get_job_counts("completed", "failed", "waiting") == {
        "completed": 1,
        "failed": 0,
        "waiting": 0,
        "paused": 0,
    }
    with pytest.raises(ConfigError, match="state must be"):
        queue.clean(0, state="gone")


@pytest.mark.slow
def test_clean_stops_exactly_at_its_limit(queue: Queue) -> None:
    queue.add_bulk([{"name": "n", "options": {"delay": 60}}] * 11_000)
    assert len(queue.clean(0, 10_500, "delayed")) == 10_500
    assert queue.get_job_counts("delayed") == {"delayed": 500}


@pytest.mark.every_topology
def test_remove_deletes_a_job_that_is_not_active(queue: Queue, manual_worker: ManualWorker) -> None:
    job = queue.add("a")
    assert queue.remove(job.id)
    assert queue.get_job(job.id) is None
    active = queue.add("b")
    manual_worker.acquire()
    assert not queue.remove(active.id)
    assert queue.get_job(active.id) is not None


@pytest.mark.every_topology
def test_obliterate_removes_all_keys(queue: Queue, manual_worker: ManualWorker, redis_client: redis.Redis) -> None:
    queue.add_bulk([{"name": "n"}] * 5)
    queue.add("late", delay=60)
    manual_worker.complete()
    manual_worker.acquire()
    with pytest.raises(QueueActiveError, match=r"queue \{mail\}"):
        queue.obliterate()
    assert queue.is_paused()
    queue.obliterate(force=True, count=2)
    left = {key for key in redis_client.scan_iter() if not key.endswith(":lock")}
    assert left == set()


@pytest.mark.every_topology
def test_retry_jobs_retries_all_failed_jobs(queue: Queue, manual_worker: ManualWorker) -> None:
    queue.add_bulk([{"name": "n"}] * 5)
    for _ in range(3):
        manual_worker.fail()
    manual_worker.complete()
    queue.retry_jobs(count=2)
    assert queue.get_job_counts("waiting", "failed") == {"waiting": 4, "failed": 0, "paused": 0}
    queue.retry_jobs(state="completed")
    assert queue.get_job_counts("waiting", "completed") == {"waiting": 5, "completed": 0, "paused": 0}
    with pytest.raises(ConfigError, match="state must be"):
        queue.retry_jobs(state="active")


@pytest.mark.every_topology
def test_promote_jobs_promotes_all_delayed_jobs(queue: Queue) -> None:
    queue.add_bulk([{"name": "n", "options": {"delay": 60}}] * 3)
    queue.promote_jobs(count=2)
    assert queue.get_job_counts("waiting", "delayed") == {"waiting": 3, "delayed": 0, "paused": 0}
