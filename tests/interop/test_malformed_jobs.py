"""Malformed jobs in the workers of Node and bulltask: docs/explanation/guarantees.md has the table."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from bulltask.testing.worker import wait_until
from tests.interop.interop_queue import InteropQueue

pytestmark = [pytest.mark.interop, pytest.mark.process]

LOST_BY_NODE = ["counter", "deduplication", "text", "nan", "behind"]
"""Jobs of :func:`add_malformed_jobs` that are in no list after Node's worker has acquired them."""


def add_malformed_jobs(side: InteropQueue) -> None:
    """Add a malformed job of each class and two valid ones: one due after a malformed job, one the last in ``wait``."""
    redis, keys = side.redis, side.keys
    plain: dict[str, Any] = {
        "name": "echo",
        "data": '{"value":1}',
        "opts": "{}",
        "timestamp": 1,
        "delay": 0,
        "priority": 0,
    }
    malformed: dict[str, dict[str, Any]] = {
        "counter": {"atm": "many"},
        "deduplication": {"deid": "x"},
        "attempts": {"ats": "many"},
        "parent": {"parent": "{", "parentKey": "bull:{none}:1"},
        "nan": {"priority": "nan"},
        "behind": {},
        "good": {},
    }
    for job, fields in malformed.items():
        redis.hset(keys.job(job), mapping=plain | fields)
    redis.sadd(keys.deduplication("x"), "not a job id")
    redis.set(keys.job("text"), "not a hash")
    redis.lpush(keys.wait, "counter", "deduplication", "attempts", "parent", "text", "good")
    redis.zadd(keys.delayed, {"nan": 4096, "behind": 8192})


def states_of(side: InteropQueue, job: str) -> set[str]:
    """Return the lists and sets that hold a job."""
    keys, pipe = side.keys, side.redis.pipeline()
    lists, sets = ("wait", "active"), ("delayed", "prioritized", "completed", "failed")
    for name in lists:
        pipe.lpos(getattr(keys, name), job)
    for name in sets:
        pipe.zscore(getattr(keys, name), job)
    return {name for name, position in zip((*lists, *sets), pipe.execute(), strict=True) if position is not None}


def is_in(side: InteropQueue, job: str, state: str) -> bool:
    """Whether a job is in that state, and in no other."""
    return states_of(side, job) == {state}


def test_bulltask_finishes_malformed_jobs_that_a_node_worker_loses(mail: InteropQueue) -> None:
    add_malformed_jobs(mail)
    worker = mail.node_worker(lockDuration=1_000, stalledInterval=1_000, runRetryDelay=20)
    wait_until(
        lambda: not any(states_of(mail, job) for job in LOST_BY_NODE), 30, "the loss of these jobs in Node's worker"
    )
    assert states_of(mail, "good") == {"completed"}
    for job in ("attempts", "parent"):
        assert not states_of(mail, job) & {"completed", "failed"}
    mail.node.call("worker.close", worker=worker, force=True)

    mail.redis.flushall()
    add_malformed_jobs(mail)
    mail.worker()
    expected = {"completed": ["good", "nan", "behind"], "failed": ["counter", "deduplication", "attempts", "parent"]}
    for state, jobs in expected.items():
        for job in jobs:
            wait_until(partial(is_in, mail, job, state), 20, f"job {job} in state {state}")
    assert mail.stream.wait_for(event="failed", jobId="text")[0]["failedReason"].startswith("malformed job: ")


def test_huge_numbers_from_node_crash_no_child(mail: InteropQueue) -> None:
    data: dict[str, object] = {"value": 1}
    large: list[dict[str, object]] = [
        {"attempts": 1.7976931348623157e308},  # Number.MAX_VALUE
        {"removeOnFail": {"age": 2**64}},
        {"removeOnComplete": {"age": 2**70, "count": 2**64}},
    ]
    jobs = [mail.add("echo", data, **options) for options in large]
    worker = mail.worker()
    assert [mail.result(job).get(timeout=30) for job in jobs] == [1, 1, 1]
    assert worker.logged("Child died") == []
