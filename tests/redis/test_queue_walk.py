"""Walking through many jobs while others go on using the queue. Every test runs with both classes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import redis

from bulltask.errors import ConfigError
from bulltask.queue import Job, Queue
from tests.support.hand import Hand

WAIT, COMPLETED, DELAYED = (f"bull:{{mail}}:{name}" for name in ("wait", "completed", "delayed"))


def fill(queue: Queue, count: int, **options: Any) -> list[str]:
    jobs = [{"name": "n", "data": number, "options": options} for number in range(count)]
    return [job.id for job in queue.add_bulk(jobs)]  # type: ignore[arg-type]


def ids_of(jobs: Iterator[Job]) -> list[str]:
    return [job.id for job in jobs]


@pytest.mark.parametrize("size", [1, 7, 100])
def test_every_job_of_all_states_is_met_once(queue: Queue, hand: Hand, size: int) -> None:
    fill(queue, 30)
    for _ in range(8):
        hand.complete()
        hand.fail()
    hand.take()
    fill(queue, 20, delay=60)
    fill(queue, 10, priority=3)
    met = ids_of(queue.iter_jobs(page_size=size))
    assert len(met) == len(set(met)) == 60
    assert set(met) == {job.id for job in queue.get_jobs()}


@pytest.mark.parametrize("asc", [True, False])
@pytest.mark.parametrize("options", [{}, {"delay": 60}, {"priority": 5}])
def test_the_order_is_that_of_a_states_jobs(queue: Queue, asc: bool, options: dict[str, Any]) -> None:
    sent = fill(queue, 25, **options)
    met = ids_of(queue.iter_jobs(["waiting", "delayed", "prioritized"], asc=asc, page_size=4))
    assert met == (sent if asc else sent[::-1])


@pytest.mark.parametrize("asc", [True, False])
def test_jobs_that_stay_are_met_once_while_others_come_and_go(queue: Queue, hand: Hand, asc: bool) -> None:
    sent = fill(queue, 100)
    walk = queue.iter_jobs("waiting", asc=asc, page_size=10)
    met = ids_of(islice(walk, 35))
    gone = [hand.complete() for _ in range(20)]
    fill(queue, 30)
    met += ids_of(islice(walk, 20))
    gone += [hand.complete() for _ in range(10)]
    queue.remove(sent[70])
    met += ids_of(walk)
    assert len(met) == len(set(met))
    assert set(sent) - set(gone) - {sent[70]} <= set(met)


def test_a_whole_page_may_go_and_nothing_is_missed(queue: Queue, hand: Hand) -> None:
    sent = fill(queue, 60)
    walk = queue.iter_jobs("waiting", page_size=10)
    met = ids_of(islice(walk, 10))
    for _ in range(25):
        hand.complete()
    met += ids_of(walk)
    assert met == sent[:10] + sent[25:]


def test_finished_jobs_that_end_or_go_meanwhile_do_not_disturb(queue: Queue, hand: Hand) -> None:
    fill(queue, 80)
    done = [hand.complete() for _ in range(50)]
    for asc in (True, False):
        walk = queue.iter_jobs("completed", asc=asc, page_size=10)
        met = ids_of(islice(walk, 20))
        removed = met[3:20:4]
        for job_id in removed:
            queue.remove(job_id)
        done = [job_id for job_id in done if job_id not in removed]
        later = [hand.complete() for _ in range(10)]
        met += ids_of(walk)
        assert len(met) == len(set(met))
        assert set(done) <= set(met)
        done += later


def test_many_jobs_of_one_score_are_met_once(queue: Queue, redis_client: redis.Redis) -> None:
    sent = fill(queue, 50, delay=60)
    redis_client.zadd(DELAYED, dict.fromkeys(sent, 7))
    walk = queue.iter_jobs("delayed", page_size=8)
    met = ids_of(islice(walk, 16))
    redis_client.zrem(DELAYED, met[15], met[14], met[3])
    met += ids_of(walk)
    assert met == sorted(sent)
    assert (
        ids_of(queue.iter_jobs("delayed", page_size=8, asc=False))
        == sorted(set(sent) - set(met[14:16]) - {met[3]})[::-1]
    )


def test_a_queue_that_grows_faster_than_the_walk_does_not_keep_it(queue: Queue) -> None:
    fill(queue, 20)
    met = 0
    for _ in queue.iter_jobs("waiting", page_size=5):
        met += 1
        fill(queue, 2)
        assert met < 1_000
    assert met >= 20


def test_a_job_that_moved_to_the_front_does_not_mislead_the_walk(queue: Queue, redis_client: redis.Redis) -> None:
    sent = fill(queue, 40)
    walk = queue.iter_jobs("waiting", page_size=10)
    met = ids_of(islice(walk, 10))
    redis_client.lrem(WAIT, 1, sent[9])
    redis_client.rpush(WAIT, sent[9])
    met += ids_of(walk)
    assert met == sent


def test_wrong_questions_are_refused(queue: Queue) -> None:
    with pytest.raises(ConfigError, match="page_size"):
        list(queue.iter_jobs(page_size=0))
    with pytest.raises(ConfigError, match="no state"):
        list(queue.iter_jobs("gone"))
    assert list(queue.iter_jobs()) == []
