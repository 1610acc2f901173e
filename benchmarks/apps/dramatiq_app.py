"""The Dramatiq app, with default middleware and the Redis result backend."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import dramatiq
from dramatiq.brokers.redis import RedisBroker
from dramatiq.results import Results
from dramatiq.results.backends import RedisBackend

from benchmarks.apps.body import run

broker = RedisBroker(url=os.environ["BENCH_BROKER"])  # type: ignore[no-untyped-call]
broker.add_middleware(Results(backend=RedisBackend(url=os.environ["BENCH_BROKER"])))  # type: ignore[no-untyped-call]
dramatiq.set_broker(broker)


@dramatiq.actor(actor_name="noop", store_results=True)
def noop(index: int) -> int:
    return run(index)


def send(index: int) -> Any:
    return noop.send(index)


def send_many(indexes: Sequence[int]) -> None:
    for index in indexes:  # Dramatiq has no bulk send
        noop.send(index)


def wait(handle: Any) -> int:
    return int(handle.get_result(block=True, timeout=20_000))
