"""Redis Sentinel: clients and workers follow the sentinels to another primary."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import redis

from bulltask import App, AsyncResult
from bulltask.config.urls import Address
from bulltask.errors import BrokerAuthError, BrokerConfigError, BrokerError, BrokerUnavailableError
from bulltask.jobs.clock import mono_ms
from bulltask.queue import FlowJob, Queue
from bulltask.testing.worker import wait_until
from bulltask.transport import discovery
from bulltask.transport.discovery import SentinelEvents, _events, refresh
from bulltask.transport.endpoint import CHECK_MS, Endpoint
from tests.conftest import FLAVOR
from tests.support.machine_load import scale_to_load
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


class Senders:
    """A thread and the tasks of an event loop, which send one job after another."""

    def __init__(self, app: App) -> None:
        self._app, self._done = app, threading.Event()
        self.sent: list[AsyncResult[None]] = []
        self._threads = [threading.Thread(target=target) for target in (self._send, self._run_loop)]

    def __enter__(self) -> list[AsyncResult[None]]:
        for thread in self._threads:
            thread.start()
        return self.sent

    def __exit__(self, *_: object) -> None:
        self._done.set()
        for thread in self._threads:
            thread.join()

    def _send(self) -> None:
        while not self._done.wait(0.002):
            self.sent.append(self._app.send_task("quick"))

    def _run_loop(self) -> None:
        async def send() -> None:
            while not self._done.is_set():
                self.sent.append(await self._app.asend_task("quick"))
                await asyncio.sleep(0.004)

        async def main() -> None:
            await asyncio.gather(send(), send())
            await self._app.aclose()

        asyncio.run(main())


def wait_for_sends(sent: Sequence[AsyncResult[None]], what: str) -> None:
    before = len(sent)
    wait_until(lambda: len(sent) >= before + 100, 60.0, what)


@contextmanager
def sends_to_old_primary(sentinels: Sentinels) -> Iterator[Callable[[], list[float]]]:
    """Yield a function that returns when the old primary has added jobs, in ms after the first `+switch-master`."""
    times, ready = list[float](), threading.Event()
    with redis.Redis(port=sentinels.primary.port, decode_responses=True) as plain, sentinels.events() as events:

        def record() -> None:
            with plain.monitor() as monitor:
                ready.set()
                for entry in monitor.listen():
                    if entry["command"] == "ECHO the end":
                        return
                    if "quick" in entry["command"]:
                        times.append(entry["time"])

        def results() -> list[float]:
            first = min(time for time, channel in events if channel == "+switch-master")
            return [1000 * (time - first) for time in times]

        thread = threading.Thread(target=record)
        thread.start()
        ready.wait()
        try:
            yield results
        finally:
            plain.echo("the end")
            thread.join()


@pytest.mark.parametrize("noticed", ["from its beginning", "at its end"])
def test_a_planned_failover_ends_all_calls_to_the_old_primary(
    sentinels: Sentinels, monkeypatch: pytest.MonkeyPatch, noticed: str
) -> None:
    if noticed == "at its end":
        monkeypatch.setattr(discovery, "_BEGINS", b"none of the events")
    app = App("shop", sentinels.url)
    with sends_to_old_primary(sentinels) as sends, Senders(app) as sent:
        wait_for_sends(sent, "jobs before the failover")
        sentinels.fail_over()
        wait_for_sends(sent, "jobs after the failover")
    assert max(sends()) < scale_to_load(200)
    stored = {job.id for job in app.queue("default").get_waiting()}
    lost = [job.id for job in sent if job.id not in stored]
    assert lost == [] or noticed == "at its end"  # what the old primary executed after the replica was promoted
    app.queue("default").obliterate()
    app.close()


def test_a_worker_loses_and_repeats_no_job_in_a_planned_failover(sentinels: Sentinels, harness_on: HarnessOn) -> None:
    harness = harness_on(sentinels.url)
    worker = harness.worker(children=3, settings={"lock_duration": 30})
    app = harness.sender()
    with sends_to_old_primary(sentinels) as sends, Senders(app) as sent:
        wait_for_sends(sent, "jobs before the failover")
        harness.wait_for_start(sent[50])
        sentinels.fail_over()
        wait_for_sends(sent, "jobs after the failover")
    assert max(sends()) < scale_to_load(200)
    for job in sent:
        job.get(timeout=60)
    starts = Counter(entry["job"] for entry in harness.journal.all(what="start"))
    assert {job.id: starts[job.id] for job in sent if starts[job.id] != 1} == {}
    assert worker.logged("Child died") == []
    worker.stop()


def test_an_idle_worker_leaves_the_old_primary_before_the_sentinels_make_it_a_replica(
    sentinels: Sentinels, harness_on: HarnessOn
) -> None:
    old = sentinels.primary
    harness = harness_on(sentinels.url)
    worker = harness.worker(settings={"drain_delay": 60})
    harness.wait_until_idle(2)
    sentinels.fail_over()
    harness.wait_for_start(harness.app.send_task("quick"))
    with redis.Redis(port=old.port) as plain:
        assert plain.role()[0] == b"master"
    worker.stop()


def test_no_job_that_was_sent_is_lost_when_a_suspended_primary_returns_after_the_failover(sentinels: Sentinels) -> None:
    app, old = App("shop", sentinels.url), sentinels.primary
    with Senders(app) as sent:
        wait_for_sends(sent, "jobs before the failover")
        sentinels.stop_replying(old)
        sentinels.wait_for_failover(old)
        # Without those that the old primary acknowledged, but had not sent to its replicas when it was suspended.
        before = len(sent)
        sentinels.resume(old)
        wait_for_sends(sent, "jobs after the failover")
    stored = {job.id for job in app.queue("default").get_waiting()}
    assert [job.id for job in sent[before:] if job.id not in stored] == []
    app.queue("default").obliterate()
    app.close()


def subscribed(endpoint: Endpoint) -> dict[Address, object]:
    """Return the process's subscriptions to events of sentinels."""
    known = endpoint.primary
    assert known is not None
    events = _events(endpoint, known)
    assert isinstance(events, SentinelEvents)
    return {**events._subscriptions}


def test_a_fork_reads_events_of_its_own(sentinels: Sentinels) -> None:
    app = App("shop", sentinels.url)
    endpoint = app._broker.endpoint
    known = endpoint.primary
    assert known is not None

    def subscriptions() -> int:
        refresh(endpoint)
        return len(subscribed(endpoint))

    wait_until(lambda: subscriptions() == 3, what="subscriptions")
    kept = list(subscribed(endpoint).values())  # else a new object could get the id of an old one
    inherited = {*map(id, kept)}
    if (pid := os.fork()) == 0:
        code = 1
        try:
            wait_until(lambda: subscriptions() == 3 and inherited.isdisjoint(map(id, subscribed(endpoint).values())))
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    assert subscriptions() == 3
    epoch = known.epoch
    sentinels.fail_over()
    wait_until(lambda: subscriptions() == 3 and known.epoch > epoch, what="the failover")
    app.close()


@pytest.mark.parametrize("rules", ["+psubscribe +ping &*", "-psubscribe"])
def test_without_permission_to_read_events_a_process_asks_often(sentinels: Sentinels, rules: str) -> None:
    needed = "+sentinel|get-master-addr-by-name +sentinel|master"
    sentinels.set_user("watcher", *f"on >watching {needed} {rules}".split())
    url = sentinels.url.replace(
        "sentinel_password=sentinel-secret", "sentinel_username=watcher&sentinel_password=watching"
    )
    app = App("shop", url)
    endpoint = app._broker.endpoint
    known = endpoint.primary
    assert known is not None
    expected = CHECK_MS if rules.startswith("+") else discovery.REFUSED_CHECK_MS

    def is_as_expected() -> bool:
        refresh(endpoint)
        has_all = len(subscribed(endpoint)) == 3
        return has_all == rules.startswith("+") and known.check_ms == expected

    wait_until(is_as_expected, what="subscriptions, or frequent checks")
    app.close()


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
        wait_for_sends(sent, "jobs before the failover")
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
