"""The official Python Queue and ours as operators use them, on one queue."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from bulltask.queue import Queue
from tests.interop.node_bridge import NodeError
from tests.interop.official.versions import FIXED
from tests.interop.side_by_side import SideBySide

pytestmark = [pytest.mark.interop, pytest.mark.redis]

STATES = ["waiting", "active", "delayed", "prioritized", "completed", "failed", "paused", "waiting-children"]


@pytest.fixture
def queue(mail: SideBySide) -> Any:
    """Our queue."""
    with mail.app.queue("mail") as made:
        yield made


def counts(mail: SideBySide) -> dict[str, int]:
    """What the official client counts in all states, without the zeros."""
    found = mail.node.call("queue.getJobCounts", queue=mail.name, states=STATES)
    return {state: count for state, count in found.items() if count}


def failed(mail: SideBySide, queue: Queue, count: int) -> list[str]:
    """Have so many jobs fail in an official worker."""
    jobs = [queue.add("echo", {"n": n}, attempts=1).id for n in range(count)]
    mail.node_worker("fail")
    for job in jobs:
        mail.stream.wait_for(event="failed", jobId=job)
    mail.node.call("reset")
    return jobs


def test_both_queues_count_and_list_the_same_jobs(mail: SideBySide, queue: Queue) -> None:
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


def test_both_queues_pause_and_resume_without_losing_jobs(mail: SideBySide, queue: Queue) -> None:
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


def test_both_queues_retry_failed_jobs(mail: SideBySide, queue: Queue) -> None:
    jobs = failed(mail, queue, 4)
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


def test_both_queues_promote_remove_clean_and_obliterate(mail: SideBySide, queue: Queue) -> None:
    ours, theirs = (queue.add("echo", delay=60).id for _ in range(2))
    mail.job_call(ours, "promote")
    queue.promote_jobs()
    assert counts(mail) == {"waiting": 2}
    mail.call("remove", ours)
    assert queue.get_job(ours) is None
    queue.remove(theirs)
    assert mail.gone(theirs)

    jobs = failed(mail, queue, 4)
    assert len(mail.call("clean", 0, 2, "failed")) == 2
    assert len(queue.clean(0, state="failed")) == 2
    assert all(mail.gone(job) for job in jobs)

    mail.add("echo")
    queue.add("echo", priority=1)
    mail.call("obliterate")
    assert mail.redis.keys("bull:*") == []


def test_both_clients_update_data_progress_and_logs_of_a_job(mail: SideBySide, queue: Queue) -> None:
    job = queue.add("echo", {"n": 1})
    mail.job_call(job.id, "updateData", {"n": 2})
    mail.job_call(job.id, "updateProgress", {"at": "half"})
    mail.job_call(job.id, "log", "a line of theirs")
    job.log("a line of ours")
    found = queue.get_job(job.id)
    assert found is not None
    assert (found.data, found.progress) == ({"n": 2}, {"at": "half"})
    assert list(found.get_logs().lines) == mail.seen(job.id)["logs"] == ["a line of theirs", "a line of ours"]
    found.update_data({"n": 3})
    found.update_progress(99)
    assert (mail.seen(job.id)["data"], mail.seen(job.id)["progress"]) == ({"n": 3}, 99)


# ---- what does not work there ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["getWaiting", "getActive"])
@FIXED
def test_the_official_lists_of_waiting_and_active_jobs_raise(mail: SideBySide, queue: Queue, method: str) -> None:
    queue.add("echo")
    with pytest.raises(NodeError, match="'NoneType' object is not iterable"):
        mail.call(method)


@FIXED
def test_the_official_list_of_failed_jobs_has_the_completed_jobs(mail: SideBySide, queue: Queue) -> None:
    [job] = failed(mail, queue, 1)
    mail.node_worker("echo")
    done = queue.add("echo")
    mail.result(done.id).get(timeout=60)
    assert [found["id"] for found in mail.call("getFailed")] == [done.id]
    assert [found.id for found in queue.get_jobs(["failed"])] == [job]


@FIXED
def test_an_empty_list_of_jobs_raises_in_the_official_queue(mail: SideBySide, queue: Queue) -> None:
    with pytest.raises(NodeError, match="empty"):
        mail.call("getCompleted")
    assert queue.get_jobs(["completed"]) == []


@FIXED
def test_the_official_counts_omit_prioritized_jobs_by_default(mail: SideBySide, queue: Queue) -> None:
    queue.add("echo", priority=1)
    assert mail.call("getJobCounts") == dict.fromkeys(
        ["active", "completed", "delayed", "failed", "paused", "waiting", "waiting-children"], 0
    )
    assert queue.get_job_counts()["prioritized"] == 1


@FIXED
def test_the_official_change_of_a_priority_does_not_find_the_job(mail: SideBySide, queue: Queue) -> None:
    job = queue.add("echo", priority=3)
    with pytest.raises(NodeError, match="Missing key for job"):
        mail.job_call(job.id, "changePriority", {"priority": 1})
    job.change_priority(1)
    assert mail.call("getCountsPerPriority", [1, 3]) == {"1": 1, "3": 0}


@FIXED
def test_the_official_obliterate_with_force_raises(mail: SideBySide, queue: Queue) -> None:
    queue.add("echo")
    with pytest.raises(NodeError, match="bool"):
        mail.call("obliterate", True)
    queue.obliterate(force=True)
    assert mail.redis.keys("bull:*") == []


@FIXED
def test_the_official_resume_loses_jobs_that_bullmq_6_left_in_wait(mail: SideBySide, queue: Queue) -> None:
    """BullMQ 6 pauses with the flag alone and leaves the jobs in ``wait``; tests/hazard uses that client."""

    def left_after(resume: Callable[[], object]) -> int:
        before = {queue.add("echo").id for _ in range(3)}
        mail.redis.hset(mail.keys.meta, "paused", 1)
        mail.redis.lpush(mail.keys.paused, "of BullMQ 5")
        resume()
        return len(before & set(mail.redis.lrange(mail.keys.wait, 0, -1)))

    assert left_after(queue.resume) == 3
    queue.obliterate(force=True)
    assert left_after(lambda: mail.call("resume")) == 0
