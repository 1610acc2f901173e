"""Tests of iterating over many jobs while other clients use the queue. Every test runs with both classes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import redis

from bulltask.errors import ConfigError
from bulltask.queue import Job, Queue
from tests.support.manual_worker import ManualWorker

WAIT, COMPLETED, DELAYED = (f"bull:{{mail}}:{name}" for name in ("wait", "completed", "delayed"))


def fill(queue: Queue, count: int, **options: Any) -> list[str]:
    jobs = [{"name": "n", "data": number, "options": options} for number in range(count)]
    return [job.id for job in queue.add_bulk(jobs)]  # type: ignore[arg-type]


def ids_of(jobs: Iterator[Job]) -> list[str]:
    return [job.id for job in jobs]


@pytest.mark.parametrize("size", [1, 7, 100])
def test_every_job_of_all_states_is_returned_once(queue: Queue, manual_worker: ManualWorker, size: int) -> None:
    fill(queue, 30)
    for _ in range(8):
        manual_worker.complete()
        manual_worker.fail()
    manual_worker.acquire()
    fill(queue, 20, delay=60)
    fill(queue, 10, priority=3)
    seen = ids_of(queue.iter_jobs(page_size=size))
    assert len(seen) == len(set(seen)) == 60
    assert set(seen) == {job.id for job in queue.get_jobs()}


@pytest.mark.parametrize("asc", [True, False])
@pytest.mark.parametrize("options", [{}, {"delay": 60}, {"priority": 5}])
def test_jobs_are_returned_in_the_order_of_their_state(queue: Queue, asc: bool, options: dict[str, Any]) -> None:
    sent = fill(queue, 25, **options)
    seen = ids_of(queue.iter_jobs(["waiting", "delayed", "prioritized"], asc=asc, page_size=4))
    assert seen == (sent if asc else sent[::-1])


@pytest.mark.parametrize("asc", [True, False])
def test_jobs_are_returned_once_while_others_are_added_and_removed(
    queue: Queue, manual_worker: ManualWorker, asc: bool
) -> None:
    sent = fill(queue, 100)
    jobs = queue.iter_jobs("waiting", asc=asc, page_size=10)
    seen = ids_of(islice(jobs, 35))
    gone = [manual_worker.complete() for _ in range(20)]
    fill(queue, 30)
    seen += ids_of(islice(jobs, 20))
    gone += [manual_worker.complete() for _ in range(10)]
    queue.remove(sent[70])
    seen += ids_of(jobs)
    assert len(seen) == len(set(seen))
    assert set(sent) - set(gone) - {sent[70]} <= set(seen)


def test_no_job_is_missed_if_a_whole_page_is_removed(queue: Queue, manual_worker: ManualWorker) -> None:
    sent = fill(queue, 60)
    jobs = queue.iter_jobs("waiting", page_size=10)
    seen = ids_of(islice(jobs, 10))
    for _ in range(25):
        manual_worker.complete()
    seen += ids_of(jobs)
    assert seen == sent[:10] + sent[25:]


def test_jobs_that_finish_or_are_removed_meanwhile_cause_no_duplicates(
    queue: Queue, manual_worker: ManualWorker
) -> None:
    fill(queue, 80)
    done = [manual_worker.complete() for _ in range(50)]
    for asc in (True, False):
        jobs = queue.iter_jobs("completed", asc=asc, page_size=10)
        seen = ids_of(islice(jobs, 20))
        removed = seen[3:20:4]
        for job_id in removed:
            queue.remove(job_id)
        done = [job_id for job_id in done if job_id not in removed]
        later = [manual_worker.complete() for _ in range(10)]
        seen += ids_of(jobs)
        assert len(seen) == len(set(seen))
        assert set(done) <= set(seen)
        done += later


def test_many_jobs_with_one_score_are_returned_once(queue: Queue, redis_client: redis.Redis) -> None:
    sent = fill(queue, 50, delay=60)
    redis_client.zadd(DELAYED, dict.fromkeys(sent, 7))
    jobs = queue.iter_jobs("delayed", page_size=8)
    seen = ids_of(islice(jobs, 16))
    redis_client.zrem(DELAYED, seen[15], seen[14], seen[3])
    seen += ids_of(jobs)
    assert seen == sorted(sent)
    assert (
        ids_of(queue.iter_jobs("delayed", page_size=8, asc=False))
        == sorted(set(sent) - set(seen[14:16]) - {seen[3]})[::-1]
    )


def test_the_iteration_ends_even_if_jobs_are_added_faster_than_it_reads(queue: Queue) -> None:
    fill(queue, 20)
    seen = 0
    for _ in queue.iter_jobs("waiting", page_size=5):
        seen += 1
        fill(queue, 2)
        assert seen < 1_000
    assert seen >= 20


def test_a_job_that_moves_to_the_front_does_not_disturb_the_iteration(queue: Queue, redis_client: redis.Redis) -> None:
    sent = fill(queue, 40)
    jobs = queue.iter_jobs("waiting", page_size=10)
    seen = ids_of(islice(jobs, 10))
    redis_client.lrem(WAIT, 1, sent[9])
    redis_client.rpush(WAIT, sent[9])
    seen += ids_of(jobs)
    assert seen == sent


def test_iter_jobs_rejects_invalid_arguments(queue: Queue) -> None:
    with pytest.raises(ConfigError, match="page_size"):
        list(queue.iter_jobs(page_size=0))
    with pytest.raises(ConfigError, match="unknown state"):
        list(queue.iter_jobs("gone"))
    assert list(queue.iter_jobs()) == []
