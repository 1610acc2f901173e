"""Tests of sending jobs: what is stored in Redis, the number of round trips, and broken connections."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import redis

from bulltask import App, AsyncResult, JobState
from bulltask.errors import (
    BrokerNotReadyError,
    BrokerOutOfMemoryError,
    BrokerUnavailableError,
    EncodeError,
    InvalidNameError,
    PayloadTooLargeError,
)
from bulltask.jobs.clock import wall_ms
from bulltask.queue import FlowJob, Queue
from bulltask.testing.worker import RedisServer
from bulltask.transport import produce
from bulltask.transport.async_client import AsyncClient
from bulltask.transport.call import QueueKeys, known_queues
from bulltask.transport.client import Client
from tests.conftest import ServerFactory
from tests.support.flaky_proxy import FlakyProxy
from tests.support.machine_load import scale_to_load
from tests.support.streams import ROUND_TRIP_MS, server_ms

pytestmark = pytest.mark.redis

KEYS = QueueKeys("bull", "{mail}", "mail")
TWO_32 = 2**32


@pytest.fixture
def app(broker_url: str) -> Iterator[App]:
    app = App("producer", broker_url, task_default_queue="mail", result_expires=None)
    yield app
    app.close()


@pytest.fixture
def proxy(redis_server: RedisServer, broker_url: str) -> Iterator[FlakyProxy]:
    with FlakyProxy("127.0.0.1", redis_server.port) as proxy:
        yield proxy


@pytest.fixture
def proxied(proxy: FlakyProxy) -> Iterator[App]:
    """An app whose connection can be broken; it waits a little before it sends again."""
    url = f"redis://127.0.0.1:{proxy.port}/0"
    proxied = App(
        "producer",
        url,
        task_default_queue="mail",
        broker_reconnect_delay=0.02,
        redis_socket_timeout=0.5,
        redis_socket_connect_timeout=0.5,
    )
    yield proxied
    proxied.close()


def send(app: App, **options: Any) -> AsyncResult[Any]:
    return app.send_task("work", kwargs={"x": 1}, **options)


def stored(client: redis.Redis, job_id: str) -> dict[str, str]:
    fields: Any = client.hgetall(KEYS.job(job_id))
    return dict(fields)


def options_of(client: redis.Redis, job_id: str) -> dict[str, Any]:
    opts: dict[str, Any] = json.loads(stored(client, job_id)["opts"])
    return opts


def events(client: redis.Redis) -> list[dict[str, str]]:
    entries: Any = client.xrange(KEYS.events)
    return [fields for _, fields in entries]


def scored(client: redis.Redis, key: str) -> list[tuple[str, float]]:
    members: Any = client.zrange(key, 0, -1, withscores=True)
    return list(members)


# --- stored options ---------------------------------------------------------------------------------------------------


@pytest.mark.every_topology
def test_a_plain_job_is_stored_in_wait_with_exactly_bullmqs_fields(app: App, redis_client: redis.Redis) -> None:
    before = server_ms(redis_client)
    result = send(app)
    fields = stored(redis_client, result.id)
    assert set(fields) == {"name", "data", "opts", "timestamp", "delay", "priority"}
    assert (fields["name"], fields["data"], fields["delay"], fields["priority"]) == ("work", '{"x":1}', "0", "0")
    assert before - ROUND_TRIP_MS <= int(fields["timestamp"]) <= server_ms(redis_client) + ROUND_TRIP_MS
    assert json.loads(fields["opts"]) == {
        "attempts": 3,
        "backoff": {"type": "exponential", "delay": 1000, "jitter": 0.2, "maxDelay": 3_600_000},
        "bulltask": {"v": 1, "sender": f"{app.name}@{socket.gethostname()}"},
    }
    assert redis_client.lrange(KEYS.wait, 0, -1) == [result.id]
    assert events(redis_client) == [
        {"event": "added", "jobId": result.id, "name": "work"},
        {"event": "waiting", "jobId": result.id},
    ]
    assert scored(redis_client, KEYS.marker) == [("0", 0.0)]


def test_a_queues_protocol_version_is_written_once(app: App, redis_client: redis.Redis) -> None:
    send(app)
    assert redis_client.hgetall(KEYS.meta) == {"version": "bullmq:5.62.0", "opts.maxLenEvents": "10000"}
    other = QueueKeys("bull", "{other}")
    redis_client.hset(other.meta, mapping={"version": "bullmq:5.81.5", "opts.maxLenEvents": "5"})
    send(app, queue="other")
    assert redis_client.hgetall(other.meta) == {"version": "bullmq:5.81.5", "opts.maxLenEvents": "5"}


def test_a_send_writes_only_bullmqs_keys_and_registers_the_queue(app: App, redis_client: redis.Redis) -> None:
    result = send(app)
    keys = {str(key) for key in redis_client.keys("*")}
    assert keys - {"bulltask:queues"} == {KEYS.wait, KEYS.meta, KEYS.id, KEYS.events, KEYS.marker, KEYS.job(result.id)}


@pytest.mark.every_topology
@pytest.mark.parametrize("options", [{"countdown": 60}, {"countdown": timedelta(minutes=1)}])
def test_a_countdown_makes_a_delayed_job_due_by_the_servers_time(
    app: App, redis_client: redis.Redis, options: dict[str, Any]
) -> None:
    before = server_ms(redis_client)
    result = send(app, **options)
    ((job_id, score),) = scored(redis_client, KEYS.delayed)
    due_ms = int(score) // 4096
    assert job_id == result.id
    assert before - ROUND_TRIP_MS <= due_ms - 60_000 <= server_ms(redis_client) + ROUND_TRIP_MS
    assert int(stored(redis_client, result.id)["delay"]) == options_of(redis_client, result.id)["delay"] == 60_000
    assert redis_client.exists(KEYS.wait) == 0
    assert events(redis_client)[-1] == {"event": "delayed", "jobId": result.id, "delay": str(due_ms)}
    assert scored(redis_client, KEYS.marker) == [("1", float(due_ms))]


def test_an_eta_is_stored_exactly_and_a_past_eta_means_no_delay(app: App, redis_client: redis.Redis) -> None:
    moment_ms = server_ms(redis_client) + 3_600_000
    result = send(app, eta=datetime.fromtimestamp(moment_ms / 1000, UTC))
    ((_, score),) = scored(redis_client, KEYS.delayed)
    assert int(score) // 4096 == moment_ms
    past = send(app, eta=datetime(2020, 1, 1, tzinfo=UTC))
    assert "delay" not in options_of(redis_client, past.id)
    assert (result.state, past.state) == (JobState.DELAYED, JobState.WAITING)


@pytest.mark.every_topology
def test_jobs_are_ordered_by_priority_and_then_by_order_of_arrival(app: App, redis_client: redis.Redis) -> None:
    ids = [send(app, priority=priority).id for priority in (7, 1, 7, 2**21 - 1)]
    assert scored(redis_client, KEYS.prioritized) == [
        (ids[1], 1.0 * TWO_32 + 2),
        (ids[0], 7.0 * TWO_32 + 1),
        (ids[2], 7.0 * TWO_32 + 3),
        (ids[3], (2**21 - 1.0) * TWO_32 + 4),
    ]
    assert stored(redis_client, ids[0])["priority"] == "7"
    assert options_of(redis_client, ids[0])["priority"] == 7
    assert redis_client.exists(KEYS.wait) == 0


def test_priority_zero_means_no_priority(app: App, redis_client: redis.Redis) -> None:
    result = send(app, priority=0)
    assert redis_client.lrange(KEYS.wait, 0, -1) == [result.id]
    assert "priority" not in options_of(redis_client, result.id)


def test_a_delayed_job_keeps_its_priority(app: App, redis_client: redis.Redis) -> None:
    result = send(app, countdown=60, priority=7)
    assert redis_client.zcard(KEYS.delayed) == 1
    assert redis_client.exists(KEYS.prioritized) == 0
    assert stored(redis_client, result.id)["priority"] == "7"


@pytest.mark.every_topology
def test_lifo_puts_a_job_before_the_waiting_jobs(app: App, redis_client: redis.Redis) -> None:
    first, second, urgent = send(app), send(app), send(app, lifo=True)
    # Jobs are acquired from the right.
    assert redis_client.lrange(KEYS.wait, 0, -1) == [second.id, first.id, urgent.id]
    assert options_of(redis_client, urgent.id)["lifo"] is True


def test_a_job_for_a_paused_queue_is_stored_in_paused(app: App, redis_client: redis.Redis) -> None:
    redis_client.hset(KEYS.meta, "paused", 1)
    result = send(app)
    assert redis_client.lrange(KEYS.paused, 0, -1) == [result.id]
    assert redis_client.exists(KEYS.wait, KEYS.marker) == 0


@pytest.mark.parametrize(
    ("task", "call", "written"),
    [
        ({"max_retries": 0}, {}, {"attempts": 1}),
        ({}, {"max_retries": 9}, {"attempts": 10}),
        ({"max_retries": None}, {}, {"attempts": 2**31 - 1}),
        ({"retry_backoff": False, "default_retry_delay": 5}, {}, {"backoff": {"type": "fixed", "delay": 5000}}),
        ({"retry_backoff": 2, "retry_jitter": False}, {}, {"backoff": {"type": "exponential", "delay": 2000}}),
        ({"result_expires": 60}, {}, {"removeOnComplete": {"age": 60}}),
        ({"result_expires": 0}, {}, {"removeOnComplete": True}),
        ({"result_failure_expires": timedelta(days=7)}, {}, {"removeOnFail": {"age": 604_800}}),
        ({"result_failure_expires": 0}, {}, {"removeOnFail": True}),
        (
            {},
            {"headers": {"trace": [], "n": 2**53 - 1}},
            {"bulltask": {"headers": '{"trace":[],"n":9007199254740991}'}},
        ),
    ],
)
def test_options_of_tasks_and_calls_are_stored_under_bullmqs_names(
    app: App, redis_client: redis.Redis, task: dict[str, Any], call: dict[str, Any], written: dict[str, Any]
) -> None:
    work = app.task(name="work", **task)(lambda: None)
    opts = options_of(redis_client, work.apply_async(**call).id)
    for name, value in written.items():
        if isinstance(value, dict):
            assert {key: opts[name][key] for key in value} == value
        else:
            assert opts[name] == value


def test_expires_is_stored_as_a_server_time(app: App, redis_client: redis.Redis) -> None:
    before = server_ms(redis_client)
    expires_ms = options_of(redis_client, send(app, expires=60).id)["bulltask"]["expires"]
    assert before - ROUND_TRIP_MS <= expires_ms - 60_000 <= server_ms(redis_client) + ROUND_TRIP_MS
    moment = datetime(2030, 1, 1, tzinfo=UTC)
    assert options_of(redis_client, send(app, expires=moment).id)["bulltask"]["expires"] == 1_893_456_000_000


def test_results_are_kept_for_a_day_by_default(broker_url: str, redis_client: redis.Redis) -> None:
    app = App("producer", broker_url, task_default_queue="mail")
    opts = options_of(redis_client, send(app).id)
    assert opts["removeOnComplete"] == {"age": 86_400}
    assert "removeOnFail" not in opts
    app.close()


def test_job_times_are_server_times_even_if_the_senders_clock_is_wrong(
    app: App, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bulltask.jobs.clock.wall_ms", lambda: wall_ms() + 120_000)
    monkeypatch.setattr(time, "time", lambda: 0.0)
    result = send(app, countdown=1)
    assert abs(int(stored(redis_client, result.id)["timestamp"]) - server_ms(redis_client)) < 1_000


@pytest.mark.every_topology
def test_a_custom_id_is_stored_once(app: App, redis_client: redis.Redis) -> None:
    first = send(app, job_id="order-7")
    again = app.send_task("other", kwargs={"y": 2}, job_id="order-7")
    assert first == again
    assert stored(redis_client, "order-7")["data"] == '{"x":1}'
    assert redis_client.lrange(KEYS.wait, 0, -1) == ["order-7"]
    assert events(redis_client)[-1] == {"event": "duplicated", "jobId": "order-7"}


def test_unicode_is_stored_unchanged(app: App, redis_client: redis.Redis) -> None:
    result = app.send_task(
        "töne.schön", kwargs={"text": "ünïcödé ✓ 🎉", "key é": [None, True, 1.5]}, job_id="auftrag-é"
    )
    fields = stored(redis_client, result.id)
    assert fields["name"] == "töne.schön"
    assert json.loads(fields["data"]) == {"text": "ünïcödé ✓ 🎉", "key é": [None, True, 1.5]}


@pytest.mark.parametrize(
    ("settings", "queue", "base"),
    [
        ({}, "emails", "bull:{emails}:"),
        pytest.param({"queue_hash_tag": False}, "emails", "bull:emails:", marks=pytest.mark.one_server),
        ({}, "{all}-emails", "bull:{all}-emails:"),
        ({"prefix": "shop"}, "emails", "shop:{emails}:"),
        ({"prefix": "{shop}", "queue_hash_tag": False}, "emails", "{shop}:emails:"),
    ],
)
def test_the_keys_of_a_queue_follow_the_settings(
    broker_url: str, redis_client: redis.Redis, settings: dict[str, Any], queue: str, base: str
) -> None:
    app = App("producer", broker_url, **settings)
    result = send(app, queue=queue)
    assert redis_client.lrange(f"{base}wait", 0, -1) == [result.id]
    registry = known_queues(app._config.prefix)
    assert all(str(key).startswith(base) for key in redis_client.keys("*") if key != registry)
    assert redis_client.zrange(registry, 0, -1) == [base.removeprefix(f"{app._config.prefix}:")[:-1]]
    app.close()


@pytest.mark.every_topology
async def test_asyncio_stores_the_same_jobs(app: App, redis_client: redis.Redis) -> None:
    work = app.task(name="work")(lambda x: None)
    results = [
        await work.adelay(1),
        await work.aapply_async((1,), priority=7),
        await app.asend_task("work", kwargs={"x": 1}, countdown=60),
        *await app.asend_many([work.s(1)]),
    ]
    assert [stored(redis_client, result.id)["data"] for result in results] == ['{"x":1}'] * 4
    assert [(await result.asnapshot()).state for result in results] == ["waiting", "prioritized", "delayed", "waiting"]
    await app.aclose()


# --- round trips ------------------------------------------------------------------------------------------------------


@pytest.fixture
def round_trips(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of calls in each round trip of either client."""
    sizes: list[int] = []
    sync, receive, asynchronous = Client._round_trip, Client.receive, AsyncClient._round_trip

    def count_calls(self: Client, connection: Any, packed: Sequence[bytes], *more: Any) -> list[Any]:
        replies = sync(self, connection, packed, *more)
        sizes.append(len(replies))
        return replies

    def count_replies(self: Client, count: int) -> list[Any]:
        sizes.append(count)
        return receive(self, count)

    async def acount_calls(self: AsyncClient, connection: Any, packed: Sequence[bytes], *more: Any) -> list[Any]:
        sizes.append(len(packed))
        return await asynchronous(self, connection, packed, *more)

    monkeypatch.setattr(Client, "_round_trip", count_calls)
    monkeypatch.setattr(Client, "receive", count_replies)
    monkeypatch.setattr(AsyncClient, "_round_trip", acount_calls)
    return sizes


def test_2500_jobs_take_three_round_trips_and_keep_their_order(
    app: App, redis_client: redis.Redis, round_trips: list[int]
) -> None:
    work = app.task(name="work")(lambda n: None)
    work.delay(0)
    round_trips.clear()
    results = work.delay_many([(n,) for n in range(2_500)])
    assert round_trips == [1_000, 1_000, 500]
    waiting: Any = redis_client.lrange(KEYS.wait, 0, -2)
    assert waiting[::-1] == [result.id for result in results]


async def test_2500_jobs_take_three_round_trips_with_asyncio(
    app: App, redis_client: redis.Redis, round_trips: list[int]
) -> None:
    work = app.task(name="work")(lambda n: None)
    await work.adelay(0)
    round_trips.clear()
    results = await app.asend_many(work.s(n) for n in range(2_500))
    assert round_trips == [1_000, 1_000, 500]
    assert redis_client.llen(KEYS.wait) == 2_501
    assert len({result.id for result in results}) == 2_500
    await app.aclose()


def test_connecting_takes_two_calls_and_each_send_one_round_trip(
    app: App, round_trips: list[int], redis_client: redis.Redis
) -> None:
    send(app)
    redis_client.config_resetstat()
    assert round_trips[0] == 2, "the server's kind and time, on connect"
    round_trips.clear()
    send(app)
    send(app)
    assert round_trips == [1, 1]


@pytest.mark.one_server
def test_jobs_of_several_queues_share_a_round_trip(app: App, redis_client: redis.Redis, round_trips: list[int]) -> None:
    send(app)
    round_trips.clear()
    work = app.task(name="work")(lambda n: None)
    app.send_many([work.s(n).set(queue=f"q{n % 3}") for n in range(9)])
    assert round_trips == [9 + 2 * 3 + 1], "three queues get their metadata, and are registered"
    assert [redis_client.llen(f"bull:{{q{n}}}:wait") for n in range(3)] == [3, 3, 3]


def test_large_jobs_take_more_round_trips(
    app: App, redis_client: redis.Redis, round_trips: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(produce, "BULK_BYTES", 10_000)
    work = app.task(name="work")(lambda text: None)
    work.delay("x")
    round_trips.clear()
    work.delay_many([("x" * 4_000,)] * 5 + [("x" * 50_000,)] + [("x",)])
    assert round_trips == [2, 2, 1, 1, 1]
    assert redis_client.llen(KEYS.wait) == 8


def test_sending_no_jobs_takes_no_round_trip(app: App, round_trips: list[int]) -> None:
    assert app.send_many([]) == []
    assert app.task(name="work")(lambda: None).delay_many([]) == []
    assert round_trips == []


# --- checks before anything is sent -----------------------------------------------------------------------------------


def bad_calls(app: App) -> list[tuple[Callable[[], object], type[Exception]]]:
    work = app.task(name="work")(lambda x: None)
    bad: Any = b"bytes"
    return [
        (lambda: work.delay_many([(1,), (2,), (bad,)]), EncodeError),
        (lambda: work.delay_many([(1,), (1, 2)]), TypeError),
        (lambda: app.send_many([work.s(1), work.s(2).set(job_id="17")]), InvalidNameError),
        (lambda: app.send_many([work.s(1), work.s("x" * 20_000)]), PayloadTooLargeError),
        (lambda: app.send_task("work", kwargs={"x": 1}, queue="a:b"), InvalidNameError),
        (lambda: work.apply_async((1,), headers={"x": float("nan")}), EncodeError),
    ]


@pytest.mark.parametrize("number", range(6))
def test_if_one_call_of_many_is_invalid_none_is_sent(broker_url: str, redis_client: redis.Redis, number: int) -> None:
    app = App("producer", broker_url, max_payload=10_000)
    call, error = bad_calls(app)[number]
    with pytest.raises(error):
        call()
    assert redis_client.dbsize() == 0
    app.close()


def test_max_payload_limits_the_arguments_of_a_task(broker_url: str, redis_client: redis.Redis) -> None:
    app = App("producer", broker_url, max_payload=1_000)
    work = app.task(name="work")(lambda x: None)
    options: Any = redis_client.hget(app._broker.keys("default").job(work.delay("x").id), "opts")
    room = 1_000 - len(options) - len('{"x":""}')
    work.delay("x" * room)
    with pytest.raises(PayloadTooLargeError, match=r"arguments of task work \(.*\) and the job's options .* of 1,000"):
        work.delay("x" * (room + 1))
    with pytest.raises(PayloadTooLargeError, match="the arguments of task work: 1,001 bytes of JSON"):
        work.delay("x" * (1_001 - len('{"x":""}')))
    app.close()


@pytest.mark.parametrize(
    "send",
    [
        lambda app, text: app.send_task("work", [text], headers={"h": text}),
        lambda app, text: app.send_task("work", [text], telemetry_metadata=text),
        lambda app, text: app.send_task("work", [text], deduplication=text),
        lambda app, text: app.send_many([app.task(name="many")(lambda x: None).s(text).set(headers={"h": text})]),
        lambda app, text: app.queue("mail").add("work", text, headers={"h": text}),
        lambda app, text: app.queue("mail").add("work", text, telemetry_metadata=text),
        lambda app, text: app.queue("mail").add("work", "", headers={"h": text}, telemetry_metadata=text),
        lambda app, text: app.flows().add(FlowJob("work", "mail", text, options={"telemetry_metadata": text})),
        lambda app, text: app.queue("mail").schedulers.upsert("s", data=text, options={"headers": text}, every=60),
    ],
)
def test_max_payload_limits_data_and_options_together(
    broker_url: str, redis_client: redis.Redis, send: Callable[[App, str], object]
) -> None:
    app = App("producer", broker_url, max_payload=10_000)
    with pytest.raises(PayloadTooLargeError, match="together exceed the limit of 10,000"):
        send(app, 6_000 * "x")
    assert redis_client.dbsize() == 0
    send(app, 4_000 * "x")
    app.close()


def test_update_data_rejects_data_that_exceeds_max_payload(broker_url: str) -> None:
    with Queue("mail", broker_url, max_payload=10_000) as queue:
        job = queue.add("work", headers={"h": 6_000 * "x"})
        with pytest.raises(PayloadTooLargeError, match="together exceed the limit of 10,000"):
            job.update_data(6_000 * "x")
        job.update_data(3_000 * "x")


# --- broken connections -----------------------------------------------------------------------------------------------


def test_thirty_sends_with_ten_lost_replies_make_thirty_jobs(
    proxied: App, proxy: FlakyProxy, redis_client: redis.Redis
) -> None:
    send(proxied)
    proxy.drop_replies(10, every=3, match="evalsha")
    results = [send(proxied) for _ in range(30)]
    assert proxy.dropped == 10
    waiting: Any = redis_client.lrange(KEYS.wait, 0, -2)
    assert waiting[::-1] == [result.id for result in results]


async def test_thirty_async_sends_with_ten_lost_replies_make_thirty_jobs(
    proxied: App, proxy: FlakyProxy, redis_client: redis.Redis
) -> None:
    await proxied.asend_task("work")
    proxy.drop_replies(10, every=3, match="evalsha")
    results = [await proxied.asend_task("work") for _ in range(30)]
    assert proxy.dropped == 10
    waiting: Any = redis_client.lrange(KEYS.wait, 0, -2)
    assert waiting[::-1] == [result.id for result in results]
    await proxied.aclose()


def test_a_bulk_send_whose_replies_are_lost_partway_through_is_stored_once(
    proxied: App, proxy: FlakyProxy, redis_client: redis.Redis
) -> None:
    send(proxied)
    proxy.drop_replies(1, every=700, match="evalsha")
    results = proxied.task(name="work")(lambda n: None).delay_many([(n,) for n in range(2_500)])
    waiting: Any = redis_client.lrange(KEYS.wait, 0, -2)
    assert waiting[::-1] == [result.id for result in results]


@pytest.mark.parametrize("reply", ["LOADING Redis is loading", "READONLY You can't write", "MISCONF no snapshots"])
def test_a_send_is_repeated_if_the_server_is_not_ready(
    proxied: App, proxy: FlakyProxy, redis_client: redis.Redis, reply: str
) -> None:
    send(proxied)
    proxy.inject_error(reply, 3, match="evalsha")
    send(proxied)
    assert proxy.injected == 3
    assert redis_client.llen(KEYS.wait) == 2


@pytest.mark.slow
def test_a_send_raises_the_error_after_three_resends(proxied: App, proxy: FlakyProxy) -> None:
    send(proxied)
    proxy.inject_error("LOADING Redis is loading", 4, match="evalsha")
    with pytest.raises(BrokerNotReadyError):
        send(proxied)
    assert proxy.injected == 4
    proxy.blackhole()
    started = time.monotonic()
    with pytest.raises(BrokerUnavailableError):
        send(proxied)
    assert 1 < time.monotonic() - started < 5, "each of four attempts has its timeout"
    proxy.pass_all()
    send(proxied)


@pytest.mark.parametrize("retries", [0, 2])
def test_the_number_of_resends_is_a_setting(proxy: FlakyProxy, retries: int) -> None:
    url = f"redis://127.0.0.1:{proxy.port}/0"
    app = App("producer", url, broker_publish_retries=retries, broker_reconnect_delay=0.01)
    send(app)
    proxy.inject_error("READONLY no", match="evalsha", count=None)
    with pytest.raises(BrokerNotReadyError):
        send(app)
    assert proxy.injected == retries + 1
    app.close()


def test_resends_wait_longer_each_time(proxied: App, proxy: FlakyProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    wait = threading.Event.wait

    def record_wait(self: threading.Event, timeout: float | None = None) -> bool:
        if timeout is not None:
            pauses.append(timeout)
        return wait(self, timeout)

    send(proxied)
    proxy.inject_error("READONLY no", 3, match="evalsha")
    monkeypatch.setattr(threading.Event, "wait", record_wait)
    send(proxied)
    assert [
        pause == pytest.approx(expected, rel=0.2) for pause, expected in zip(pauses, (0.02, 0.04, 0.08), strict=True)
    ]


def test_a_send_succeeds_if_the_server_returns_in_time(
    proxied: App, proxy: FlakyProxy, redis_client: redis.Redis
) -> None:
    send(proxied)
    proxy.reset()
    proxy.refuse()
    with ThreadPoolExecutor(1) as threads:
        sending = threads.submit(send, proxied)
        proxy.accept()
        assert sending.result(10).state is JobState.WAITING
    assert redis_client.llen(KEYS.wait) == 2


def test_a_send_to_a_server_that_is_out_of_memory_fails_without_a_resend(server_factory: ServerFactory) -> None:
    server = server_factory(extra=["--maxmemory", "3mb", "--maxmemory-policy", "noeviction"])
    app = App("producer", server.url, broker_reconnect_delay=5, broker_reconnect_delay_max=5)
    started = time.monotonic()

    def fill() -> None:
        for _ in range(1_000):
            app.send_task("work", ["x" * 100_000])

    with pytest.raises(BrokerOutOfMemoryError, match="out of memory"):
        fill()
    assert time.monotonic() - started < scale_to_load(5)
    app.close()


def test_a_send_to_a_closed_port_fails_after_its_resends() -> None:
    app = App("producer", "redis://127.0.0.1:1/0", broker_reconnect_delay=0.01)
    with pytest.raises(BrokerUnavailableError, match="cannot connect to Redis"):
        send(app)


@pytest.mark.every_topology
def test_threads_send_at_the_same_time(app: App, redis_client: redis.Redis) -> None:
    with ThreadPoolExecutor(8) as threads:
        results = list(threads.map(lambda _: send(app), range(400)))
    assert redis_client.llen(KEYS.wait) == len({result.id for result in results}) == 400
