"""Connections break again and again under load, and every job runs exactly once."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from bulltask import AsyncResult
from bulltask.testing.flaky import FlakyProxy
from tests.support.stage import Stage
from tests.support.worker import Worker

pytestmark = pytest.mark.process

TASKS = """
import asyncio

@app.task(bind=True, name="short")
def short(self, number):
    tell("start", job=self.request.id)
    return sum(range(number))

@app.task(bind=True, name="short_async")
async def short_async(self, number):
    tell("start", job=self.request.id)
    await asyncio.sleep(number / 1_000_000)
    return number
"""
SETTINGS = {"lock_duration": 30, "broker_reconnect_delay": 0.01, "drain_delay": 1}


def start_worker(stage: Stage, proxy: FlakyProxy) -> Worker:
    worker = stage.worker(TASKS, via=proxy, children=2, options=["-Q", "default,other"], settings=SETTINGS)
    stage.app.send_task("quick").get(timeout=60)
    return worker


def send_some(stage: Stage, chance: random.Random, count: int) -> list[AsyncResult[int]]:
    return [
        stage.app.send_task(
            chance.choice(["short", "short_async"]),
            kwargs={"number": chance.randrange(5_000)},
            queue=chance.choice(["default", "other"]),
        )
        for _ in range(count)
    ]


def assert_each_ran_once(stage: Stage, worker: Worker, jobs: list[AsyncResult[int]]) -> None:
    for job in jobs:
        job.get(timeout=60)
    starts = Counter(entry["job"] for entry in stage.journal.all(what="start"))
    assert {job.id: starts[job.id] for job in jobs if starts[job.id] != 1} == {}
    for queue in ("default", "other"):
        assert stage.redis.llen(stage.keys_of(queue).active) == 0
    assert worker.logged("Child died") == []
    assert worker.logged("Lock lost") == []
    assert worker.stop() == 0


def test_all_connections_reset_a_hundred_times_under_load(stage: Stage, dice: random.Random) -> None:
    proxy = stage.proxy()
    worker = start_worker(stage, proxy)
    jobs: list[AsyncResult[int]] = []
    for _ in range(100):
        jobs += send_some(stage, dice, 10)
        stage.journal.wait_for(len(jobs) - dice.randrange(10), what="start")
        proxy.reset()
    stage.note(jobs=len(jobs), connections=proxy.connections)
    assert_each_ran_once(stage, worker, jobs)


def test_every_twentieth_reply_to_a_script_lost_under_load(stage: Stage, dice: random.Random) -> None:
    proxy = stage.proxy()
    worker = start_worker(stage, proxy)
    proxy.drop_replies(every=20, match="evalsha")
    jobs = send_some(stage, dice, 1000)
    for job in jobs:
        job.get(timeout=60)
    proxy.pass_all()
    stage.note(jobs=len(jobs), lost_replies=proxy.dropped)
    assert proxy.dropped >= 20
    assert_each_ran_once(stage, worker, jobs)


def test_every_tenth_reply_to_a_script_cut_after_three_bytes_under_load(stage: Stage, dice: random.Random) -> None:
    proxy = stage.proxy()
    worker = start_worker(stage, proxy)
    jobs: list[AsyncResult[int]] = []
    for _ in range(30):
        proxy.partial_reply(3, match="evalsha")
        jobs += send_some(stage, dice, 10)
        stage.journal.wait_for(len(jobs) - 5, what="start")
    proxy.pass_all()
    stage.note(jobs=len(jobs), connections=proxy.connections)
    assert_each_ran_once(stage, worker, jobs)


def test_bytes_that_come_one_by_one_are_no_fault(stage: Stage) -> None:
    proxy = stage.proxy()
    proxy.slice(1)
    worker = start_worker(stage, proxy)
    jobs = send_some(stage, random.Random(1), 30)
    assert_each_ran_once(stage, worker, jobs)
    assert worker.complaints() == []
