"""The official Python Queue and bulltask's Queue manage the same queue."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from bulltask.queue import Queue
from tests.interop.interop_queue import InteropQueue
from tests.interop.node_bridge import NodeError
from tests.interop.official.versions import FIXED_IN_3

pytestmark = [pytest.mark.interop, pytest.mark.redis]

STATES = ["waiting", "active", "delayed", "prioritized", "completed", "failed", "paused", "waiting-children"]


@pytest.fixture
def queue(mail: InteropQueue) -> Any:
    """bulltask's queue ``mail``."""
    with mail.app.queue("mail") as queue:
        yield queue


def counts(mail: InteropQueue) -> dict[str, int]:
    """Return the official client's counts of all states, without the zeros."""
    counts = mail.node.call("queue.getJobCounts", queue=mail.name, states=STATES)
    return {state: count for state, count in counts.items() if count}


def add_failed_jobs(mail: InteropQueue, queue: Queue, count: int) -> list[str]:
    """Add jobs that fail in an official worker; return their ids."""
    jobs = [queue.add("echo", {"n": n}, attempts=1).id for n in range(count)]
    mail.node_worker("fail")
    for job in jobs:
        mail.stream.wait_for(event="failed", jobId=job)
    mail.node.call("reset")
    return jobs


def test_both_queues_count_and_list_the_same_jobs(mail: InteropQueue, queue: Queue) -> None:
    mail.node_worker("echo")
    done = [mail.send("echo", value=n) for n in range(2)]
    for job in done:
        job.get(timeout=60)
    mail.node.call("reset")
    waiting = [queue.add("echo"), queue.add("echo")]
    queue.add("echo", delay=60)
    queue.add("echo", priority=2)
    assert counts(mail) == {"waiting": 2, "delayed": 1, "prioritized": 1, "completed": 2}
    assert {state: count for state, count in queue.get_job_counts().items() if count} == counts(mail)
    assert mail.call("getJobCountByTypes", "waiting", "delayed") == 3
    assert mail.call("getCountsPerPriority", [0, 2]) == {"0": 2, "2": 1}
    assert queue.get_counts_per_priority([0, 2]) == {0: 2, 2: 1}
    for state, ids in (("waiting", [job.id for job in waiting]), ("completed", [job.id for job in done])):
        assert {job["id"] for job in mail.call("getJobs", [state])} == set(ids)
        assert {job.id for job in queue.get_jobs([state])} == set(ids)


def test_both_queues_pause_and_resume_without_losing_jobs(mail: InteropQueue, queue: Queue) -> None:
    ids = [queue.add("echo").id, mail.add("echo")]
    mail.call("pause")
    assert queue.is_paused()
    ids += [queue.add("echo").id, mail.add("echo")]
    assert counts(mail) == {"paused": 4}
    queue.resume()
    assert mail.call("isPaused") is False
    assert counts(mail) == {"waiting": 4}
    queue.pause()
    ids += [queue.add("echo").id, mail.add("echo")]
    mail.call("resume")
    assert not queue.is_paused()
    mail.node_worker("echo")
    for job in ids:
        mail.result(job).get(timeout=60)
    assert mail.counts() == {"completed": 6}


def test_both_queues_retry_failed_jobs(mail: InteropQueue, queue: Queue) -> None:
    jobs = add_failed_jobs(mail, queue, 4)
    mail.job_call(jobs[0], "retry")
    retried = queue.get_job(jobs[1])
    assert retried is not None
    retried.retry()
    assert counts(mail) == {"waiting": 2, "failed": 2}
    mail.call("retryJobs", {"state": "failed"})
    assert counts(mail) == {"waiting": 4}
    mail.node_worker("echo")
    for job in jobs:
        mail.result(job).get(timeout=60)
    queue.retry_jobs(state="completed")
    for job in jobs:
        mail.stream.wait_for(2, event="completed", jobId=job)


def test_both_queues_promote_remove_clean_and_obliterate(mail: InteropQueue, queue: Queue) -> None:
    first, second = (queue.add("echo", delay=60).id for _ in range(2))
    mail.job_call(first, "promote")
    queue.promote_jobs()
    assert counts(mail) == {"waiting": 2}
    mail.call("remove", first)
    assert queue.get_job(first) is None
    queue.remove(second)
    assert mail.is_gone(second)

    jobs = add_failed_jobs(mail, queue, 4)
    assert len(mail.call("clean", 0, 2, "failed")) == 2
    assert len(queue.clean(0, state="failed")) == 2
    assert all(mail.is_gone(job) for job in jobs)

    mail.add("echo")
    queue.add("echo", priority=1)
    mail.call("obliterate")
    assert mail.redis.keys("bull:*") == []


def test_both_clients_update_data_progress_and_logs_of_a_job(mail: InteropQueue, queue: Queue) -> None:
    job = queue.add("echo", {"n": 1})
    mail.job_call(job.id, "updateData", {"n": 2})
    mail.job_call(job.id, "updateProgress", {"at": "half"})
    mail.job_call(job.id, "log", "a line of the official client")
    job.log("a line of bulltask")
    read = queue.get_job(job.id)
    assert read is not None
    assert (read.data, read.progress) == ({"n": 2}, {"at": "half"})
    assert (
        list(read.get_logs().lines)
        == mail.node_job(job.id)["logs"]
        == ["a line of the official client", "a line of bulltask"]
    )
    read.update_data({"n": 3})
    read.update_progress(99)
    assert (mail.node_job(job.id)["data"], mail.node_job(job.id)["progress"]) == ({"n": 3}, 99)


# ---- errors of the official client -----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["getWaiting", "getActive"])
@FIXED_IN_3
def test_the_official_lists_of_waiting_and_active_jobs_raise(mail: InteropQueue, queue: Queue, method: str) -> None:
    queue.add("echo")
    with pytest.raises(NodeError, match="'NoneType' object is not iterable"):
        mail.call(method)


@FIXED_IN_3
def test_the_official_list_of_failed_jobs_returns_completed_jobs(mail: InteropQueue, queue: Queue) -> None:
    [job] = add_failed_jobs(mail, queue, 1)
    mail.node_worker("echo")
    done = queue.add("echo")
    mail.result(done.id).get(timeout=60)
    assert [failed["id"] for failed in mail.call("getFailed")] == [done.id]
    assert [failed.id for failed in queue.get_jobs(["failed"])] == [job]


@FIXED_IN_3
def test_an_empty_list_of_jobs_raises_in_the_official_queue(mail: InteropQueue, queue: Queue) -> None:
    with pytest.raises(NodeError, match="empty"):
        mail.call("getCompleted")
    assert queue.get_jobs(["completed"]) == []


@FIXED_IN_3
def test_the_official_counts_omit_prioritized_jobs_by_default(mail: InteropQueue, queue: Queue) -> None:
    queue.add("echo", priority=1)
    assert mail.call("getJobCounts") == dict.fromkeys(
        ["active", "completed", "delayed", "failed", "paused", "waiting", "waiting-children"], 0
    )
    assert queue.get_job_counts()["prioritized"] == 1


@FIXED_IN_3
def test_changing_a_priority_with_the_official_client_does_not_find_the_job(mail: InteropQueue, queue: Queue) -> None:
    job = queue.add("echo", priority=3)
    with pytest.raises(NodeError, match="Missing key for job"):
        mail.job_call(job.id, "changePriority", {"priority": 1})
    job.change_priority(1)
    assert mail.call("getCountsPerPriority", [1, 3]) == {"1": 1, "3": 0}


@FIXED_IN_3
def test_the_official_obliterate_with_force_raises(mail: InteropQueue, queue: Queue) -> None:
    queue.add("echo")
    with pytest.raises(NodeError, match="bool"):
        mail.call("obliterate", True)
    queue.obliterate(force=True)
    assert mail.redis.keys("bull:*") == []


@FIXED_IN_3
def test_the_official_resume_loses_jobs_that_bullmq_6_left_in_wait(mail: InteropQueue, queue: Queue) -> None:
    """BullMQ 6 pauses with the flag alone and leaves the jobs in ``wait``; tests/mixed_versions uses that client."""

    def left_after(resume: Callable[[], object]) -> int:
        before = {queue.add("echo").id for _ in range(3)}
        mail.redis.hset(mail.keys.meta, "paused", 1)
        mail.redis.lpush(mail.keys.paused, "of BullMQ 5")
        resume()
        return len(before & set(mail.redis.lrange(mail.keys.wait, 0, -1)))

    assert left_after(queue.resume) == 3
    queue.obliterate(force=True)
    assert left_after(lambda: mail.call("resume")) == 0
