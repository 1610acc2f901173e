"""Replies that Redis never sends, and damaged ones: no process dies, and no job is lost."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import pytest
from hypothesis import strategies as st

from bulltask import AsyncResult
from bulltask.errors import BulltaskError
from tests.fuzz.running import SETTINGS, TASKS, Processes, make_examples
from tests.fuzz.strategies import damages, garbage
from tests.support.damaging_proxy import Damage, DamagingProxy
from tests.support.worker import Worker
from tests.support.worker_harness import WorkerHarness

pytestmark = [pytest.mark.process, pytest.mark.timeout(1_800)]


class SentJobs:
    """Jobs that are sent while replies are damaged.

    A damaged reply may be a valid one: if it says that a job was released which a lost call had acquired, the worker
    cannot detect this, and the job waits until the worker stops.

    Args:
        harness: The server and the workers.
    """

    def __init__(self, harness: WorkerHarness) -> None:
        self._harness = harness
        self._jobs: list[AsyncResult[Any]] = []

    def send(self) -> None:
        """Send a job."""
        self._jobs.append(self._harness.app.send_task(("work", "awork")[len(self._jobs) % 2]))

    def settle(self, worker: Worker, processes: Processes) -> None:
        """Check the worker and stop it; a worker without damaged replies must finish all jobs that are left."""
        processes.check()
        assert worker.stop() == 0
        self._harness.worker(TASKS, children=2, settings=SETTINGS)
        for job in self._jobs:
            with suppress(BulltaskError):  # a changed byte may fail a job
                job.get(timeout=60)
            assert job.ready(), job.id


REPLY_SETTINGS: Final = {**SETTINGS, "broker_reconnect_delay": 0.01, "broker_reconnect_delay_max": 0.1}


def test_replies_that_redis_never_sends_end_no_process(harness: WorkerHarness, examples: int) -> None:
    proxy = harness.proxy()
    worker = harness.worker(TASKS, via=proxy, children=2, settings=REPLY_SETTINGS)
    processes = Processes(worker, 2)
    harness.wait_until_idle(2)
    jobs = SentJobs(harness)

    def inject(example: tuple[bytes, int, str]) -> None:
        reply, count, match = example
        before = proxy.injected
        proxy.inject_reply(reply, count, match=match)
        jobs.send()
        with suppress(TimeoutError):
            proxy.wait_for(lambda proxy: proxy.injected > before, 0.2)

    matches = st.sampled_from(["", "", "evalsha", "bzpopmin", "hmget", "lockDuration"])
    make_examples(examples // 20, st.tuples(garbage(), st.integers(1, 3), matches), inject)
    proxy.pass_all()
    # The jobs are not checked: the reply to another call may be a valid one, such as another time or "released".
    processes.check()
    assert worker.stop() == 0


def damage_of(kind: str, where: int, by: int, applied: Callable[[], None]) -> Damage:
    """Return a function that damages one reply, and then passes all."""
    left = 1

    def damage(replies: list[bytes]) -> list[bytes]:
        nonlocal left
        if not left:
            return replies
        left -= 1
        index = where % len(replies)
        reply = replies[index]
        at = where % len(reply)
        applied()
        changed = {
            "flip": [reply[:at] + bytes([reply[at] ^ by]) + reply[at + 1 :]],
            "truncate": [reply[:at]],
            "repeat": [reply, reply],
            "swallow": [],
            "swap": [reply],
        }[kind]
        if kind == "swap":
            replies.reverse()
            return replies
        return [*replies[:index], *changed, *replies[index + 1 :]]

    return damage


def test_damaged_replies_end_no_process_and_lose_no_job(harness: WorkerHarness, examples: int) -> None:
    applied = threading.Event()
    with DamagingProxy(harness.redis.connection_pool.connection_kwargs["port"]) as proxy:
        settings_ = {**REPLY_SETTINGS, "broker_url": f"redis://127.0.0.1:{proxy.port}/0"}
        worker = harness.worker(TASKS, children=2, settings=settings_)
        processes = Processes(worker, 2)
        harness.wait_until_idle(2)
        jobs = SentJobs(harness)

        def damage(example: tuple[str, int, int]) -> None:
            applied.clear()
            proxy.damage = damage_of(*example, applied.set)
            jobs.send()
            applied.wait(0.5)

        make_examples(examples // 20, damages(), damage)
        proxy.damage = None
        proxy.reset()
        jobs.settle(worker, processes)
