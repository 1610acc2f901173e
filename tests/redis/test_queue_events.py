"""Tests of QueueEvents, in its sync and async forms."""

from __future__ import annotations

import asyncio
import base64
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol, cast

import pytest
import redis

from bulltask.config.settings import Settings
from bulltask.errors import BrokerError, BrokerUnavailableError, ConfigError, InvalidNameError
from bulltask.jobs.job import JobOptions, NewJob
from bulltask.queue import AsyncQueueEvents, QueueEvents
from bulltask.queue import events as types
from bulltask.queue.events import KINDS, QueueEvent
from bulltask.testing.worker import RedisServer, wait_until
from bulltask.transport.broker import Broker
from tests.conftest import ServerFactory
from tests.support.flaky_proxy import FlakyProxy
from tests.support.machine_load import scale_to_load
from tests.support.server_clients import client_of

pytestmark = pytest.mark.redis

STREAM = "bull:{mail}:events"


class Listener(Protocol):
    """The methods of both forms, as plain calls."""

    position: str

    def open(self) -> object: ...
    def next(self, timeout: float | None = None) -> QueueEvent | None: ...
    def on(self, event: Any, callback: Any = None, *, job_id: str | None = None) -> Any: ...
    def publish(self, name: str, fields: Any = None) -> str: ...
    def close(self) -> None: ...


class OnLoop:
    """An `AsyncQueueEvents` whose coroutines run to completion when they are called."""

    def __init__(self, events: AsyncQueueEvents, runner: asyncio.Runner) -> None:
        self._events, self._runner = events, runner

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._events, name)
        if name in {"open", "next", "publish", "close"}:
            return lambda *args: self._runner.run(attribute(*args))
        return attribute


Listen = Callable[..., Listener]


@pytest.fixture
def broker(broker_url: str) -> Iterator[Broker]:
    broker = broker_to(broker_url)
    yield broker
    broker.close()


def broker_to(url: str, **settings: object) -> Broker:
    return Broker(
        Settings({"broker_reconnect_delay": 0.02, "broker_reconnect_delay_max": 0.1, **settings}).freeze(), url
    )


@pytest.fixture(params=["sync", "async"])
def listen(request: pytest.FixtureRequest, broker: Broker) -> Iterator[Listen]:
    """Create listeners of one form; they are closed after the test."""
    listeners: list[Listener] = []
    with asyncio.Runner() as runner:

        def create(start: str = "$", *, on: Broker = broker, opened: bool = True) -> Listener:
            if request.param == "sync":
                listeners.append(cast("Listener", QueueEvents("mail", start=start, broker=lambda: on)))
            else:
                listeners.append(
                    cast("Listener", OnLoop(AsyncQueueEvents("mail", start=start, broker=lambda: on), runner))
                )
            if opened:
                listeners[-1].open()
            return listeners[-1]

        yield create
        for listener in listeners:
            listener.close()
        runner.run(broker.aclose())


def add(client: redis.Redis, event: str, **fields: Any) -> str:
    return str(client.xadd(STREAM, cast("Any", {"event": event, **fields})))


def add_many(client: redis.Redis, count: int) -> list[str]:
    pipeline = client.pipeline(transaction=False)
    for number in range(count):
        pipeline.xadd(STREAM, {"event": "stalled", "jobId": f"job-{number}"})
    return [str(entry_id) for entry_id in pipeline.execute()]


def receive(listener: Listener, count: int, timeout: float = 5) -> list[QueueEvent]:
    events = [listener.next(timeout) for _ in range(count)]
    assert None not in events, events
    return cast("list[QueueEvent]", events)


# ---- received events -------------------------------------------------------------------------------------------------

ROWS: list[tuple[str, dict[str, str], type[QueueEvent], dict[str, Any]]] = [
    ("added", {"jobId": "7", "name": "send"}, types.Added, {"job_id": "7", "name": "send"}),
    ("waiting", {"jobId": "7"}, types.Waiting, {"job_id": "7", "prev": None}),
    ("waiting", {"jobId": "7", "prev": "active"}, types.Waiting, {"job_id": "7", "prev": "active"}),
    ("active", {"jobId": "7", "prev": "waiting"}, types.Active, {"job_id": "7", "prev": "waiting"}),
    (
        "completed",
        {"jobId": "7", "returnvalue": '{"sent":[1,"ä"]}', "prev": "active"},
        types.Completed,
        {
            "job_id": "7",
            "returnvalue": {"sent": [1, "ä"]},
            "text": '{"sent":[1,"ä"]}',
            "error": None,
            "prev": "active",
        },
    ),
    (
        "failed",
        {"jobId": "7", "failedReason": 'no "quotes" {here}', "prev": "active"},
        types.Failed,
        {"job_id": "7", "failed_reason": 'no "quotes" {here}', "prev": "active"},
    ),
    (
        "retries-exhausted",
        {"jobId": "7", "attemptsMade": "3"},
        types.RetriesExhausted,
        {"job_id": "7", "attempts_made": 3},
    ),
    ("waiting-children", {"jobId": "7"}, types.WaitingChildren, {"job_id": "7", "prev": None}),
    ("waiting-children", {"jobId": "7", "prev": "active"}, types.WaitingChildren, {"job_id": "7", "prev": "active"}),
    ("stalled", {"jobId": "7"}, types.Stalled, {"job_id": "7"}),
    ("released", {"jobId": "7"}, types.Released, {"job_id": "7"}),
    ("delayed", {"jobId": "7", "delay": "1795216652158"}, types.Delayed, {"job_id": "7", "due_ms": 1795216652158}),
    ("delayed", {"jobId": "7", "delay": "1.795216652158e+12"}, types.Delayed, {"job_id": "7", "due_ms": 1795216652158}),
    (
        "progress",
        {"jobId": "7", "data": "[50]"},
        types.Progress,
        {"job_id": "7", "data": [50], "text": "[50]", "error": None},
    ),
    ("removed", {"jobId": "7", "prev": "delayed"}, types.Removed, {"job_id": "7", "prev": "delayed"}),
    ("removed", {"jobId": "7"}, types.Removed, {"job_id": "7", "prev": None}),
    ("duplicated", {"jobId": "7"}, types.Duplicated, {"job_id": "7"}),
    (
        "deduplicated",
        {"jobId": "7", "deduplicationId": "x", "deduplicatedJobId": "8"},
        types.Deduplicated,
        {"job_id": "7", "deduplication_id": "x", "deduplicated_job_id": "8"},
    ),
    ("debounced", {"jobId": "7", "debounceId": "x"}, types.Debounced, {"job_id": "7", "debounce_id": "x"}),
    ("cleaned", {"count": "12"}, types.Cleaned, {"count": 12}),
    ("drained", {}, types.Drained, {}),
    ("paused", {}, types.Paused, {}),
    ("resumed", {}, types.Resumed, {}),
    ("custom event", {"a": "1"}, types.Custom, {"name": "custom event", "fields": {"a": "1"}, "job_id": ""}),
    ("paid", {"jobId": "7"}, types.Custom, {"name": "paid", "fields": {"jobId": "7"}, "job_id": "7"}),
    # Known names with missing or invalid fields are custom events.
    ("completed", {"jobId": "7"}, types.Custom, {"name": "completed", "fields": {"jobId": "7"}, "job_id": "7"}),
    (
        "delayed",
        {"jobId": "7", "delay": "soon"},
        types.Custom,
        {"name": "delayed", "fields": {"jobId": "7", "delay": "soon"}, "job_id": "7"},
    ),
    ("cleaned", {"count": "inf"}, types.Custom, {"name": "cleaned", "fields": {"count": "inf"}, "job_id": ""}),
    ("waiting", {}, types.Custom, {"name": "waiting", "fields": {}, "job_id": ""}),
    ("events-lost", {"a": "1"}, types.Custom, {"name": "events-lost", "fields": {"a": "1"}, "job_id": ""}),
    ("custom", {"a": "1"}, types.Custom, {"name": "custom", "fields": {"a": "1"}, "job_id": ""}),
]


@pytest.mark.parametrize(("event", "fields", "kind", "attributes"), ROWS)
def test_each_event_of_bullmq_has_its_class(
    broker: Broker, redis_client: redis.Redis, event: str, fields: dict[str, Any], kind: Any, attributes: dict[str, Any]
) -> None:
    with QueueEvents("mail", broker=lambda: broker) as events:
        entry_id = add(redis_client, event, **fields)
        assert events.next(5) == kind(entry_id, "mail", **attributes)


def test_every_event_that_scripts_of_bullmq_and_bulltask_write_has_a_class() -> None:
    rows = "added waiting active completed failed retries-exhausted waiting-children stalled delayed progress removed"
    more = "duplicated deduplicated debounced cleaned drained paused resumed released custom events-lost"
    assert set(KINDS) == {*rows.split(), *more.split()}
    assert {name: kind.event for name, kind in KINDS.items()} == {name: name for name in KINDS}


@pytest.mark.every_topology
def test_a_listener_receives_events_added_after_it_was_opened(listen: Listen, redis_client: redis.Redis) -> None:
    add_many(redis_client, 3)
    events = listen()
    ids = add_many(redis_client, 2)
    assert [event.id for event in receive(events, 2)] == ids
    assert events.next(0.05) is None


def test_a_listener_for_a_queue_that_does_not_exist_yet_receives_its_first_event(
    listen: Listen, broker: Broker
) -> None:
    events = listen()
    assert events.next(0.01) is None
    broker.producer.send([NewJob("mail", "a", "send", b"{}", JobOptions())])
    added, waiting = receive(events, 2)
    assert (added, waiting) == (
        types.Added(added.id, "mail", "a", "send"),
        types.Waiting(waiting.id, "mail", "a", None),
    )
    assert abs(added.timestamp_ms - broker.clock.now_ms()) < 5_000


@pytest.mark.every_topology
def test_a_listener_from_the_start_receives_all_remaining_events(listen: Listen, redis_client: redis.Redis) -> None:
    ids = add_many(redis_client, 10)
    redis_client.xtrim(STREAM, 8, approximate=False)
    assert [event.id for event in receive(listen("0"), 8)] == ids[2:], (
        "events that were trimmed before are not reported"
    )


def test_a_listener_can_start_after_an_event_id(listen: Listen, redis_client: redis.Redis) -> None:
    ids = add_many(redis_client, 10)
    first = listen("0")
    receive(first, 4)
    assert first.position == ids[3]
    again = listen(first.position)
    assert again.position == ids[3]
    assert [event.id for event in receive(again, 6)] == ids[4:]
    moment = ids[-1].partition("-")[0]
    assert listen(str(int(moment) + 1)).next(0.01) is None, "an id may be a time"


def test_a_listener_receives_thousands_of_events_in_order(listen: Listen, redis_client: redis.Redis) -> None:
    events = listen()
    ids = add_many(redis_client, 3_456)
    assert [event.id for event in receive(events, 3_456)] == ids
    assert events.next(0.01) is None


@pytest.mark.parametrize("bad", ["NaN", "[1,Infinity]", "{", "", "'a'", "\ud800" * 3])
def test_malformed_json_does_not_stop_a_listener(listen: Listen, redis_client: redis.Redis, bad: str) -> None:
    """Any of these stops Node's QueueEvents permanently."""
    events = listen()
    raw = bad.encode("utf-8", "surrogatepass")
    for fields in (
        {"event": "completed", "jobId": "7", "returnvalue": raw},
        {"event": "progress", "jobId": "7", "data": raw},
    ):
        redis_client.xadd(STREAM, cast("Any", fields))
    add(redis_client, "drained")
    completed, progress, drained = receive(events, 3)
    assert isinstance(completed, types.Completed)
    assert isinstance(progress, types.Progress)
    assert isinstance(drained, types.Drained)
    assert (completed.returnvalue, progress.data) == (None, None)
    assert completed.text == progress.text == raw.decode("utf-8", "backslashreplace")
    assert "returnvalue of job 7 is not valid JSON" in str(completed.error)
    assert "data of job 7 is not valid JSON" in str(progress.error)


def test_invalid_utf_8_does_not_stop_a_listener(listen: Listen, redis_client: redis.Redis, broker: Broker) -> None:
    events = listen()
    redis_client.xadd(STREAM, cast("Any", {"event": "stalled", "jobId": b"\xff\x00"}))
    redis_client.xadd(STREAM, cast("Any", {"event": b"\xfe", b"\xfd": b"\xfc"}))
    stalled, custom = receive(events, 2)
    assert isinstance(stalled, types.Stalled)
    assert broker.keys("mail").job(stalled.job_id).encode("utf-8", "surrogateescape") == b"bull:{mail}:\xff\x00"
    assert custom == types.Custom(custom.id, "mail", "\\xfe", {"\\xfd": "\\xfc"})


async def test_a_listener_needs_no_app(broker_url: str, redis_client: redis.Redis) -> None:
    with QueueEvents("mail", broker_url, prefix="{shop}", queue_hash_tag=False) as events:
        entry_id = redis_client.xadd("{shop}:mail:events", {"event": "drained"})
        assert events.next(5) == types.Drained(str(entry_id), "mail")
    async with AsyncQueueEvents("mail", broker_url, start="0", prefix="{shop}", queue_hash_tag=False) as aevents:
        assert await aevents.next(5) == types.Drained(str(entry_id), "mail")
        await aevents.publish("paid")
    assert redis_client.xlen("{shop}:mail:events") == 2


@pytest.mark.parametrize("start", ["", "now", "-1", "1-", "1-2-3", "$1", 0, None])
def test_an_invalid_start_is_rejected(broker: Broker, start: Any) -> None:
    with pytest.raises(ConfigError, match="start must be"):
        QueueEvents("mail", start=start, broker=lambda: broker)
    with pytest.raises(InvalidNameError, match="queue name"):
        QueueEvents("ma:il", broker=lambda: broker)


def test_the_connection_has_the_name_that_bullmq_gives_to_listeners(listen: Listen, redis_client: redis.Redis) -> None:
    listen()
    clients: Any = redis_client.client_list()
    name = f"bull:{base64.b64encode(b'{mail}').decode()}:qe"
    assert [client["name"] for client in clients].count(name) == 1


# ---- callbacks -------------------------------------------------------------------------------------------------------


@pytest.mark.every_topology
def test_callbacks_receive_their_events_in_order_of_registration(listen: Listen, redis_client: redis.Redis) -> None:
    events, calls = listen(), list[tuple[str, str]]()
    for name, kind, job_id in [
        ("by name", "stalled", None),
        ("by class", types.Stalled, None),
        ("of jobs", types.JobEvent, None),
        ("of all", QueueEvent, None),
        ("of job b", "stalled", "b"),
        ("all of job b", types.JobEvent, "b"),
        ("everything of job b", QueueEvent, "b"),
        ("paid", "paid", None),
        ("paid of job b", "paid", "b"),
        ("customs", "custom", None),
        ("others", "progress", None),
    ]:
        events.on(kind, lambda event, name=name: calls.append((name, event.id)), job_id=job_id)
    ids = [add(redis_client, "stalled", jobId="a"), add(redis_client, "stalled", jobId="b")]
    ids += [add(redis_client, "drained"), add(redis_client, "paid", jobId="b")]
    receive(events, 4)
    assert [name for name, event_id in calls if event_id == ids[0]] == ["by name", "by class", "of jobs", "of all"]
    assert [name for name, event_id in calls if event_id == ids[1]] == [
        "by name", "by class", "of jobs", "of all", "of job b", "all of job b", "everything of job b",
    ]  # fmt: skip
    assert [name for name, event_id in calls if event_id == ids[2]] == ["of all"]
    assert [name for name, event_id in calls if event_id == ids[3]] == [
        "of all", "everything of job b", "paid", "paid of job b", "customs",
    ]  # fmt: skip


def test_a_callback_that_raises_is_logged_and_the_others_are_called(
    listen: Listen, redis_client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    events, calls = listen(), list[str]()

    def broken(event: QueueEvent) -> None:
        raise ValueError("broken callback")

    events.on("stalled", broken)
    events.on("stalled", lambda event: calls.append(event.id))
    ids = add_many(redis_client, 2)
    with caplog.at_level(logging.ERROR, "bulltask"):
        receive(events, 2)
    assert calls == ids
    assert [record.getMessage().split(" raised ")[1] for record in caplog.records] == [
        "an exception for event stalled in queue mail"
    ] * 2
    assert caplog.records[0].exc_info is not None


def test_on_is_also_a_decorator_and_off_removes_a_callback(broker: Broker, redis_client: redis.Redis) -> None:
    with QueueEvents("mail", broker=lambda: broker) as events:
        calls: list[str] = []

        @events.on("stalled")
        def record(event: QueueEvent) -> None:
            calls.append(event.id)

        assert events.on(types.Drained, record) is record
        add(redis_client, "stalled", jobId="a")
        add(redis_client, "drained")
        receive(cast("Listener", events), 2)
        events.off(record)
        events.off(print)
        add(redis_client, "drained")
        receive(cast("Listener", events), 1)
        assert len(calls) == 2


async def test_coroutine_callbacks_are_awaited_one_after_another(broker: Broker, redis_client: redis.Redis) -> None:
    async with AsyncQueueEvents("mail", broker=lambda: broker) as events:
        calls: list[str] = []

        @events.on("stalled")
        async def slow(event: types.Stalled) -> None:
            calls.append(f"begins {event.job_id}")
            await asyncio.sleep(0.01)
            calls.append(f"ends {event.job_id}")

        add_many(redis_client, 2)
        await events.next(5)
        await events.next(5)
        assert calls == ["begins job-0", "ends job-0", "begins job-1", "ends job-1"]


@pytest.mark.every_topology
def test_listen_reads_in_a_thread_until_it_is_closed(broker: Broker, redis_client: redis.Redis) -> None:
    events, calls, done = QueueEvents("mail", broker=lambda: broker), list[str](), threading.Event()
    events.on("stalled", lambda event: calls.append(event.id))
    events.on("drained", lambda event: done.set())
    assert events.listen() is events.listen()
    ids = add_many(redis_client, 20)
    add(redis_client, "drained")
    assert done.wait(60)
    assert calls == ids
    events.close()
    assert not any(thread.name == "bulltask-events-mail" for thread in threading.enumerate())


@pytest.mark.every_topology
async def test_listen_reads_in_a_task_until_it_is_closed(broker: Broker, redis_client: redis.Redis) -> None:
    events, calls, done = AsyncQueueEvents("mail", broker=lambda: broker), list[str](), asyncio.Event()
    events.on("stalled", lambda event: calls.append(event.id))
    events.on("drained", lambda event: done.set())
    assert await events.listen() is await events.listen()
    ids = add_many(redis_client, 20)
    add(redis_client, "drained")
    async with asyncio.timeout(5):
        await done.wait()
    assert calls == ids
    await events.close()
    assert not any(task.get_name() == "bulltask-events-mail" for task in asyncio.all_tasks())


# ---- custom events ---------------------------------------------------------------------------------------------------


@pytest.mark.every_topology
def test_a_published_event_is_received_and_does_not_trim_others(listen: Listen, redis_client: redis.Redis) -> None:
    add_many(redis_client, 2_000)
    events = listen()
    entry_id = events.publish("invoice-paid", {"jobId": "7", "total": 12.5, "text": "ä😀"})
    assert events.next(5) == types.Custom(
        entry_id, "mail", "invoice-paid", {"jobId": "7", "total": "12.5", "text": "ä😀"}, "7"
    )
    bare = events.publish("bare")
    assert events.next(5) == types.Custom(bare, "mail", "bare", {})
    assert redis_client.xlen(STREAM) == 2_002, "Node's QueueEventsProducer trims the stream to 1,000"


def test_publish_rejects_the_names_of_bullmqs_events(listen: Listen, redis_client: redis.Redis) -> None:
    events = listen()
    for name in ("completed", "events-lost", ""):
        with pytest.raises(InvalidNameError, match="a name that BullMQ does not use"):
            events.publish(name)
    with pytest.raises(InvalidNameError, match="the field 'event'"):
        events.publish("paid", {"event": "x"})
    for value in (True, None, [1], {"a": 1}):
        with pytest.raises(ConfigError, match="field 'a' of an event must be a string or a number"):
            events.publish("paid", {"a": value})
    assert redis_client.exists(STREAM) == 0


# ---- closing ---------------------------------------------------------------------------------------------------------


@pytest.mark.every_topology
def test_close_ends_a_blocked_read_immediately(broker: Broker) -> None:
    events, seen = QueueEvents("mail", broker=lambda: broker), list[QueueEvent]()
    events.open()
    reader = threading.Thread(target=lambda: seen.extend(events))
    reader.start()
    wait_until(lambda: blocked(broker), what="a blocked reader")
    started = time.monotonic()
    events.close()
    reader.join(60)
    assert time.monotonic() - started < scale_to_load(0.5)
    assert not reader.is_alive()
    assert seen == []
    assert events.next() is None, "a closed listener stays closed"
    events.close()


@pytest.mark.every_topology
async def test_close_ends_a_blocked_read_in_a_task_immediately(broker: Broker) -> None:
    events = AsyncQueueEvents("mail", broker=lambda: broker)
    await events.open()

    async def read() -> list[QueueEvent]:
        return [event async for event in events]

    task = asyncio.create_task(read())
    await asyncio.to_thread(wait_until, lambda: blocked(broker), 5, "a blocked reader")
    started = time.monotonic()
    await events.close()
    assert await task == []
    assert time.monotonic() - started < scale_to_load(0.5)
    assert await events.next() is None
    await events.close()


def blocked(broker: Broker) -> bool:
    with client_of(broker.endpoint.url.get_secret_value()) as plain:
        clients: Any = plain.client_list()
    return any("b" in client["flags"] and client["cmd"] == "xread" for client in clients)


def test_close_from_a_signal_handler_ends_the_loop_that_it_interrupts(broker: Broker) -> None:
    events = QueueEvents("mail", broker=lambda: broker).open()
    before = signal.signal(signal.SIGUSR1, lambda *_: events.close())
    main = threading.get_ident()

    def send() -> None:
        wait_until(lambda: blocked(broker), what="a blocked reader")
        signal.pthread_kill(main, signal.SIGUSR1)

    sender = threading.Thread(target=send)
    try:
        sender.start()
        started = time.monotonic()
        assert list(events) == []
        assert time.monotonic() - started < scale_to_load(3)
    finally:
        sender.join()
        signal.signal(signal.SIGUSR1, before)
    assert not blocked(broker)


def test_close_from_a_callback_ends_the_loop(broker: Broker, redis_client: redis.Redis) -> None:
    with QueueEvents("mail", broker=lambda: broker) as events:
        events.on("drained", lambda event: events.close())
        add(redis_client, "drained")
        assert [type(event) for event in events] == [types.Drained]
    events = QueueEvents("mail", broker=lambda: broker).listen()
    done = threading.Event()
    events.on("drained", lambda event: events.close())
    events.on("drained", lambda event: done.set())
    add(redis_client, "drained")
    assert done.wait(60)


async def test_close_from_a_callback_ends_the_loop_in_a_task(broker: Broker, redis_client: redis.Redis) -> None:
    events = AsyncQueueEvents("mail", broker=lambda: broker)
    events.on("drained", lambda event: events.close())
    await events.listen()
    task = next(task for task in asyncio.all_tasks() if task.get_name() == "bulltask-events-mail")
    add(redis_client, "drained")
    async with asyncio.timeout(5):
        await task


def test_close_ends_the_wait_for_an_unavailable_server(server_factory: ServerFactory) -> None:
    server = server_factory()
    broker = broker_to(server.url, broker_reconnect_delay=20, broker_reconnect_delay_max=20)
    events = QueueEvents("mail", broker=lambda: broker).open()
    server.stop()
    reader = threading.Thread(target=lambda: list(events))
    reader.start()
    reader.join(0.3)
    assert reader.is_alive()
    started = time.monotonic()
    events.close()
    reader.join(60)
    assert time.monotonic() - started < scale_to_load(0.5)
    broker.close()


def test_a_closed_listener_leaves_no_connection(listen: Listen, redis_client: redis.Redis) -> None:
    events = listen()
    events.next(0.01)
    events.close()

    def listed() -> bool:
        clients: Any = redis_client.client_list()
        return any(client["name"].endswith(":qe") for client in clients)

    wait_until(lambda: not listed(), what="the connection's end")


# ---- outages ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def proxy(redis_server: RedisServer, broker_url: str) -> Iterator[FlakyProxy]:
    with FlakyProxy("127.0.0.1", redis_server.port) as proxy:
        yield proxy


@pytest.fixture
def unreliable_broker(proxy: FlakyProxy) -> Iterator[Broker]:
    """A broker whose connection the test may break."""
    unreliable_broker = broker_to(f"redis://127.0.0.1:{proxy.port}/0", redis_socket_timeout=1)
    yield unreliable_broker
    unreliable_broker.close()


def cut(proxy: FlakyProxy) -> None:
    proxy.refuse()
    proxy.reset()


def test_opening_a_listener_fails_if_redis_is_unavailable(
    listen: Listen, proxy: FlakyProxy, unreliable_broker: Broker
) -> None:
    proxy.refuse()
    events = listen(on=unreliable_broker, opened=False)
    with pytest.raises(BrokerUnavailableError):
        events.open()
    with pytest.raises(BrokerUnavailableError):
        events.next(1)
    proxy.accept()
    assert events.next(0.05) is None


def test_no_event_is_missed_or_received_twice_while_the_connection_breaks(
    listen: Listen, proxy: FlakyProxy, unreliable_broker: Broker, redis_client: redis.Redis
) -> None:
    events, ids, seen = listen(on=unreliable_broker), list[str](), list[str]()
    for number in range(12):
        if number % 3 == 0:
            proxy.reset()
        if number % 3 == 1:
            proxy.drop_replies(1, match="xread")
        if number % 3 == 2:
            cut(proxy)
            assert events.next(0.1) is None
            ids += add_many(redis_client, 25)
            proxy.accept()
        ids += add_many(redis_client, 25)
        seen += [event.id for event in receive(events, len(ids) - len(seen))]
    assert seen == ids
    assert proxy.dropped == 4


def test_a_listener_survives_a_restart_of_the_server(listen: Listen, server_factory: ServerFactory) -> None:
    server = server_factory(appendonly=True)
    broker = broker_to(server.url)
    events = listen(on=broker)
    with redis.Redis.from_url(server.url, decode_responses=True) as client:
        ids = add_many(client, 3)
        assert [event.id for event in receive(events, 3)] == ids
        server.kill()
        assert events.next(0.1) is None
        server.restart()
        ids = add_many(client, 3)
    assert [event.id for event in receive(events, 3)] == ids
    broker.close()


def test_next_times_out_on_time_while_the_server_is_unavailable(
    listen: Listen, proxy: FlakyProxy, unreliable_broker: Broker
) -> None:
    events = listen(on=unreliable_broker)
    cut(proxy)
    started = time.monotonic()
    assert events.next(0.3) is None
    assert 0.28 < time.monotonic() - started < scale_to_load(1)


@pytest.mark.slow
@pytest.mark.usefixtures("short_block")
def test_a_listener_detects_a_half_open_connection(
    listen: Listen, proxy: FlakyProxy, unreliable_broker: Broker, redis_client: redis.Redis
) -> None:
    events = listen(on=unreliable_broker)
    proxy.freeze()
    ids = add_many(redis_client, 3)
    started = time.monotonic()
    assert [event.id for event in receive(events, 3, timeout=20)] == ids
    assert time.monotonic() - started < scale_to_load(3), "at most the longest wait plus redis_socket_timeout"


def test_an_outage_is_logged_once(
    listen: Listen, proxy: FlakyProxy, unreliable_broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    events = listen(on=unreliable_broker)
    with caplog.at_level(logging.WARNING, "bulltask"):
        cut(proxy)
        events.next(0.5)
        proxy.accept()
        wait_until(lambda: events.next(0.05) is None and proxy.connections, what="a connection")
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 1
    assert "cannot read the events of queue mail, retrying" in messages[0]


def test_a_key_that_is_not_a_stream_raises_an_error(listen: Listen, redis_client: redis.Redis) -> None:
    redis_client.set(STREAM, "text")
    with pytest.raises(BrokerError, match="WRONGTYPE"):
        listen()
    redis_client.delete(STREAM)
    events = listen()
    redis_client.set(STREAM, "text")
    with pytest.raises(BrokerError, match="WRONGTYPE"):
        events.next(5)
