"""Redis Sentinel: clients and workers follow the sentinels to another primary."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from bulltask import App, AsyncResult
from bulltask.clock import mono_ms
from bulltask.errors import BrokerAuthError, BrokerConfigError, BrokerError, BrokerUnavailableError
from bulltask.queue import FlowJob, Queue
from bulltask.testing.wait import wait_until
from tests.conftest import FLAVOR
from tests.support.sentinels import SERVICE, Sentinels
from tests.support.worker_harness import WorkerHarness

pytestmark = [pytest.mark.process, pytest.mark.slow]

HarnessOn = Callable[[str], WorkerHarness]


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory, session_processes: set[int]) -> Iterator[Sentinels]:
    with Sentinels.started(tmp_path_factory.mktemp("sentinels"), FLAVOR) as sentinels:
        session_processes |= sentinels.pids
        yield sentinels


@pytest.fixture
def sentinels(started: Sentinels, session_processes: set[int]) -> Iterator[Sentinels]:
    """The servers and sentinels, which the test may disturb."""
    started.repair()
    session_processes |= started.pids
    yield started
    session_processes |= started.pids  # a test may restart a server


def waiting(server_port: int, queue: str) -> int:
    with redis.Redis(port=server_port) as plain:
        return int(plain.llen(f"bull:{{{queue}}}:wait"))


@pytest.mark.parametrize(
    ("old", "new", "error", "message"),
    [
        (SERVICE, "other", BrokerConfigError, r"redis\+sentinel://.* monitor no primary named 'other'"),
        ("sentinel-secret", "wrong", BrokerAuthError, "For the sentinels, set sentinel_username and"),
        ("?db=0&sentinel_password=sentinel-secret", "", BrokerAuthError, "For the sentinels, set sentinel_username"),
        ("?db=0", "?db=99", BrokerConfigError, "has no such database"),
    ],
)
def test_an_error_names_the_part_of_the_url_that_is_wrong(
    started: Sentinels, old: str, new: str, error: type[Exception], message: str
) -> None:
    with Queue("mail", started.url.replace(old, new)) as queue, pytest.raises(error, match=message) as caught:
        queue.get_job_counts()
    assert "secret" not in str(caught.value)


def test_if_no_sentinel_replies_the_error_says_so() -> None:
    with (
        Queue("mail", "redis+sentinel://127.0.0.1:1,127.0.0.1:2/main") as queue,
        pytest.raises(BrokerUnavailableError, match=r"no sentinel of redis\+sentinel://.* replied: .*:1.*:2"),
    ):
        queue.get_job_counts()


async def test_clients_use_the_new_primary_after_a_failover(sentinels: Sentinels) -> None:
    app = App("shop", sentinels.url, broker_publish_replicas=1)
    queue, aio, flows = app.queue("mail"), app.aqueue("mail"), app.flows()

    async def send() -> None:
        app.send_task("work", queue="mail")
        await aio.add("work", {})
        flows.add(FlowJob("work", "mail"))

    await send()
    assert (queue.get_waiting_count(), await aio.get_waiting_count()) == (3, 3)
    new = sentinels.fail_over()
    sentinels.repair()
    await send()
    assert (queue.get_waiting_count(), await aio.get_waiting_count()) == (6, 6)
    assert waiting(new.port, "mail") == 6
    queue.obliterate()
    app.close()
    await app.aclose()


async def test_a_credential_provider_is_for_the_primary_and_the_url_has_the_password_of_the_sentinels(
    sentinels: Sentinels,
) -> None:
    with redis.Redis(port=sentinels.primary.port) as plain:
        plain.execute_command("ACL SETUSER", "sender", "on", ">first", "~*", "&*", "+@all")
        app = App("shop", sentinels.url, broker_credential_provider=lambda: ("sender", "first"))
        app.send_task("add")
        await app.asend_task("add")
        await app.aclose()
        app.close()
        plain.execute_command("ACL DELUSER", "sender")


def test_a_send_fails_if_too_few_replicas_have_received_the_job(sentinels: Sentinels) -> None:
    settings: Any = {"broker_publish_timeout": 1, "broker_publish_retries": 1}
    with Queue("mail", sentinels.url, broker_publish_replicas=2, **settings) as queue:
        with pytest.raises(BrokerError, match=r"only 1 of 2 replicas \(broker_publish_replicas\) have received"):
            queue.add("work", {}, job_id="a")
        assert queue.get_waiting_count() == 1  # sent again with the same id
        queue.obliterate()


def test_no_replicated_job_is_lost_when_the_primary_is_killed_under_load(
    sentinels: Sentinels, harness_on: HarnessOn
) -> None:
    old = sentinels.primary
    harness = harness_on(old.url)
    settings = {"broker_url": sentinels.url, "lock_duration": 2, "stalled_interval": 1, "max_stalled_count": 10}
    worker = harness.worker(settings=settings)
    app = harness.sender(sentinels.url, broker_publish_replicas=1)
    sent: list[AsyncResult[None]] = []
    done = threading.Event()

    def produce() -> None:
        while not done.wait(0.004):
            sent.append(app.send_task("quick"))

    producer = threading.Thread(target=produce)
    producer.start()
    try:
        wait_until(lambda: len(sent) >= 100, 60.0, "jobs before the failover")
        old.kill()
        sentinels.wait_for_failover(old)
        promoted_ms, before = mono_ms(), len(sent)
        harness.wait_for_start(harness.sender(sentinels.url).send_task("quick"))
        resumed_ms = mono_ms() - promoted_ms
        sentinels.repair()  # until there is a replica again, the producer's sends do not return
        wait_until(lambda: len(sent) >= before + 20, 60.0, "jobs after the failover")
    finally:
        done.set()
        producer.join()
    for job in sent:
        job.get(timeout=60)
    harness.report(resumed_ms=resumed_ms)
    assert resumed_ms < 5_000
    worker.stop()


def test_a_primary_that_returns_after_a_failover_starts_no_job_again(
    sentinels: Sentinels, harness_on: HarnessOn
) -> None:
    old = sentinels.primary
    harness = harness_on(old.url)
    app = harness.sender(sentinels.url, broker_publish_replicas=1)
    first = harness.worker(settings={"broker_url": sentinels.url})
    held = [app.send_task("hold", kwargs={"gate": "gate"}) for _ in range(2)]
    for job in held:
        harness.wait_for_start(job)
    quick = [app.send_task("quick") for _ in range(20)]
    sentinels.stop_replying(old)
    sentinels.wait_for_failover(old)
    second = harness.worker(settings={"broker_url": sentinels.url})
    for job in quick:
        harness.wait_for_start(job)
    first.wait_for_line("Redis reconnected")
    sentinels.resume(old)
    # The children still have connections to the old primary, where the quick jobs are waiting, and which executes the
    # calls that write their outcomes and fetch the next jobs. The children must ignore the replies.
    harness.open_gate(times=2)
    results = [job.get(timeout=60) for job in held]
    assert results == ["gate", "gate"]
    assert [harness.start_count(job) for job in [*held, *quick]] == [1] * 22
    first.stop()
    second.stop()
