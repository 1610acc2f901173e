"""Malformed jobs under the official client's worker, and under ours: docs/explanation/guarantees.md has the table."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from bulltask.testing.wait import wait_until
from tests.interop.side_by_side import SideBySide

pytestmark = [pytest.mark.interop, pytest.mark.process]

LOST_BY_NODE = ["counter", "deduplication", "text", "nan", "behind"]
"""Of the jobs of :func:`put`, those that are in no list any more when Node's worker has met them."""


def put(side: SideBySide) -> None:
    """Put a malformed job of each class into the queue, and two good ones: behind one that is delayed, and last."""
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
        "taken": {"ats": "many"},
        "parent": {"parent": "{", "parentKey": "bull:{none}:1"},
        "nan": {"priority": "nan"},
        "behind": {},
        "good": {},
    }
    for job, fields in malformed.items():
        redis.hset(keys.job(job), mapping=plain | fields)
    redis.sadd(keys.deduplication("x"), "not a job id")
    redis.set(keys.job("text"), "not a hash")
    redis.lpush(keys.wait, "counter", "deduplication", "taken", "parent", "text", "good")
    redis.zadd(keys.delayed, {"nan": 4096, "behind": 8192})


def places(side: SideBySide, job: str) -> set[str]:
    """Where a job is."""
    keys, pipe = side.keys, side.redis.pipeline()
    lists, sets = ("wait", "active"), ("delayed", "prioritized", "completed", "failed")
    for name in lists:
        pipe.lpos(getattr(keys, name), job)
    for name in sets:
        pipe.zscore(getattr(keys, name), job)
    return {name for name, found in zip((*lists, *sets), pipe.execute(), strict=True) if found is not None}


def is_in(side: SideBySide, job: str, state: str) -> bool:
    """Whether a job is in that state, and in no other."""
    return places(side, job) == {state}


def test_malformed_jobs_that_node_loses_end_in_bulltask(mail: SideBySide) -> None:
    put(mail)
    worker = mail.node_worker(lockDuration=1_000, stalledInterval=1_000, runRetryDelay=20)
    wait_until(lambda: not any(places(mail, job) for job in LOST_BY_NODE), 30, "Node loses these jobs")
    assert places(mail, "good") == {"completed"}
    for job in ("taken", "parent"):
        assert not places(mail, job) & {"completed", "failed"}
    mail.node.call("worker.close", worker=worker, force=True)

    mail.redis.flushall()
    put(mail)
    mail.worker()
    ours = {"completed": ["good", "nan", "behind"], "failed": ["counter", "deduplication", "taken", "parent"]}
    for state, jobs in ours.items():
        for job in jobs:
            wait_until(partial(is_in, mail, job, state), 20, f"{job} is {state}")
    assert mail.stream.wait_for(event="failed", jobId="text")[0]["failedReason"].startswith("the job was quarantined")


def test_huge_numbers_from_node_crash_no_child(mail: SideBySide) -> None:
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
