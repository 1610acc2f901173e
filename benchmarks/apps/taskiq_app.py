"""The Taskiq app: a list of jobs without acknowledgments, which is the fastest of its Redis brokers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import Any

from taskiq_redis import ListQueueBroker, RedisAsyncResultBackend

from benchmarks.apps.body import arun

BROKER = os.environ["BENCH_BROKER"]
# As with Celery, the results are in a separate database, whose keys can be counted quickly.
broker = ListQueueBroker(BROKER).with_result_backend(RedisAsyncResultBackend(f"{BROKER.removesuffix('/0')}/1"))
loop = asyncio.new_event_loop()


@broker.task(task_name="noop")
async def noop(index: int) -> int:
    return await arun(index)


def send(index: int) -> Any:
    return loop.run_until_complete(noop.kiq(index))


def send_many(indexes: Sequence[int]) -> None:
    async def send_all() -> None:
        for index in indexes:  # Taskiq has no bulk send
            await noop.kiq(index)

    loop.run_until_complete(send_all())


def wait(handle: Any) -> int:
    # It can only poll.
    return int(loop.run_until_complete(handle.wait_result(check_interval=0.001, timeout=20)).return_value)
