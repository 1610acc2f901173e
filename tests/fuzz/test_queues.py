"""Queues whose keys have wrong types: their jobs wait, and run when the keys are gone; the worker does not spin."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import pytest
import redis

from bulltask.testing.worker import wait_until
from bulltask.transport.call import QueueKeys
from tests.fuzz.running import SETTINGS, TASKS, Processes, make_examples
from tests.fuzz.strategies import damaged_keys
from tests.support.worker_harness import WorkerHarness

pytestmark = [pytest.mark.process, pytest.mark.timeout(1_800)]

QUEUES: Final = 40
MAKE: Final[dict[str, Callable[[redis.Redis, str], Any]]] = {
    "string": lambda client, key: client.set(key, "text"),
    "list": lambda client, key: client.lpush(key, "text"),
    "set": lambda client, key: client.sadd(key, "text"),
    "zset": lambda client, key: client.zadd(key, {"text": 1}),
    "hash": lambda client, key: client.hset(key, mapping={"concurrency": "many", "max": "x", "duration": "y"}),
    "stream": lambda client, key: client.xadd(key, {"text": "1"}),
}


class DamagedQueues:
    """Damages many queues at once, repairs them, and checks that their jobs then run.

    Args:
        harness: The server.
        processes: The worker of the queues.
    """

    def __init__(self, harness: WorkerHarness, processes: Processes) -> None:
        self._redis, self._processes, self._round = harness.redis, processes, 0
        self._damaged: list[tuple[QueueKeys, dict[str, str]]] = []

    def add(self, kinds: dict[str, str]) -> None:
        """Damage another queue; when all are damaged, check and repair them."""
        keys = WorkerHarness.keys_of(f"fuzz-{len(self._damaged)}")
        self._damaged.append((keys, kinds))
        for name, kind in kinds.items():
            key = keys.bulltask_base + name.partition(":")[2] if name.startswith("bulltask:") else keys.base + name
            self._redis.delete(key)
            MAKE[kind](self._redis, key)
        with suppress(redis.ResponseError):
            self._send(keys, "before")
        if len(self._damaged) == QUEUES:
            self.repair()

    def repair(self) -> None:
        """Check that the worker does not spin; repair the queues, and wait for a job of each."""
        self._processes.check()
        for keys, kinds in self._damaged:
            for name in kinds:
                base = keys.bulltask_base if name.startswith("bulltask:") else keys.base
                self._redis.delete(base + name.removeprefix("bulltask:"))
            self._send(keys, "after")
        waiting = {self._job(keys, "after"): kinds for keys, kinds in self._damaged}

        def left() -> dict[str, dict[str, str]]:
            with self._redis.pipeline() as pipe:
                for key in waiting:
                    pipe.hexists(key, "returnvalue")
                for key, done in zip(tuple(waiting), pipe.execute(), strict=True):
                    if done:
                        del waiting[key]
            return waiting

        wait_until(lambda: not left(), 60, "the jobs of repaired queues")
        self._round += 1
        self._damaged.clear()

    def _send(self, keys: QueueKeys, what: str) -> None:
        job = self._job(keys, what)
        self._redis.hset(job, mapping={"name": "work", "data": "{}", "opts": "{}", "timestamp": "1"})
        self._redis.lpush(keys.wait, job.removeprefix(keys.base))
        self._redis.zadd(keys.marker, {"0": 0})

    def _job(self, keys: QueueKeys, what: str) -> str:
        return keys.job(f"{what}-{self._round}")


def test_a_queue_with_keys_of_wrong_types_waits_and_works_when_they_are_gone(
    harness: WorkerHarness, examples: int
) -> None:
    options = ["-Q", ",".join(f"fuzz-{number}" for number in range(QUEUES))]
    worker = harness.worker(TASKS, children=2, options=options, settings=SETTINGS)
    queues = DamagedQueues(harness, Processes(worker, 2))
    make_examples(max(QUEUES, examples // 10), damaged_keys(), queues.add)
    queues.repair()
    assert worker.stop() == 0
