"""A send whose reply is lost is retried, and the job is added once."""

from __future__ import annotations

import asyncio

import pytest

from bulltask import App, AsyncResult
from tests.support.flaky_proxy import FlakyProxy
from tests.support.worker_harness import WorkerHarness

pytestmark = pytest.mark.process

JOBS = 1000
SINGLE_SENDS = 400
# Short delays, because there are hundreds of retried sends.
RETRIES = {"broker_reconnect_delay": 0.001, "broker_reconnect_delay_max": 0.01}


@pytest.fixture
def proxy(harness: WorkerHarness) -> FlakyProxy:
    return harness.proxy()


@pytest.fixture
def sender(harness: WorkerHarness, proxy: FlakyProxy) -> App:
    return harness.sender(f"redis://{proxy.host}:{proxy.port}/0", **RETRIES)


def assert_stored_once(
    harness: WorkerHarness, jobs: list[AsyncResult[None]], proxy: FlakyProxy, number: int = JOBS
) -> None:
    stored = harness.redis.lrange(harness.keys.wait, 0, -1)
    harness.report(acknowledged=len(jobs), lost_replies=proxy.dropped, stored=len(stored))
    assert len(stored) == len(jobs) == number
    assert set(stored) == {job.id for job in jobs}
    assert proxy.dropped > 0


def test_sends_with_every_third_reply_lost_add_each_job_once(
    harness: WorkerHarness, proxy: FlakyProxy, sender: App
) -> None:
    proxy.drop_replies(every=3, match="evalsha")
    jobs = [sender.send_task("quick") for _ in range(SINGLE_SENDS)]
    assert proxy.dropped >= SINGLE_SENDS // 3
    assert_stored_once(harness, jobs, proxy, SINGLE_SENDS)


async def test_async_sends_with_every_third_reply_lost_add_each_job_once(
    harness: WorkerHarness, proxy: FlakyProxy, sender: App
) -> None:
    proxy.drop_replies(every=3, match="evalsha")
    jobs = [await sender.asend_task("quick") for _ in range(SINGLE_SENDS)]
    assert proxy.dropped >= SINGLE_SENDS // 3
    assert_stored_once(harness, jobs, proxy, SINGLE_SENDS)


async def test_concurrent_async_sends_on_a_breaking_connection_add_each_job_once(
    harness: WorkerHarness, proxy: FlakyProxy, sender: App
) -> None:
    await sender.asend_task("quick", job_id="the-first")
    harness.redis.lrem(harness.keys.wait, 0, "the-first")
    proxy.drop_replies(3, every=100, match="evalsha")
    jobs = await asyncio.gather(*[sender.asend_task("quick") for _ in range(JOBS)])
    assert proxy.dropped == 3
    assert_stored_once(harness, jobs, proxy)


def test_send_many_with_replies_lost_three_times_adds_each_job_once(
    harness: WorkerHarness, proxy: FlakyProxy, sender: App
) -> None:

    @sender.task(name="quick")
    def quick() -> None:
        """Not run in this test."""

    proxy.drop_replies(3, match="evalsha")
    jobs = sender.send_many([quick.s() for _ in range(JOBS)])
    assert proxy.dropped == 3
    assert_stored_once(harness, jobs, proxy)
