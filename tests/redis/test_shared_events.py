"""The readers of one app's events in one event loop share a connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from typing import Any, cast

import pytest
import redis

from bulltask import App
from bulltask.queue import AsyncQueueEvents
from bulltask.queue.events import EventsLost
from bulltask.testing.worker import RedisServer, wait_until
from bulltask.transport import streams
from tests.conftest import needs_redis_7
from tests.support.flaky_proxy import FlakyProxy

pytestmark = pytest.mark.redis

STREAM = "bull:{mail}:events"
READERS = 50


@pytest.fixture
def proxy(redis_server: RedisServer, broker_url: str) -> Iterator[FlakyProxy]:
    with FlakyProxy("127.0.0.1", redis_server.port) as proxy:
        yield proxy


@pytest.fixture
async def app(proxy: FlakyProxy) -> AsyncIterator[App]:
    """An app whose connections the test may break."""
    app = App(
        "shop",
        f"redis://127.0.0.1:{proxy.port}/0",
        broker_reconnect_delay=0.02,
        broker_reconnect_delay_max=0.05,
    )
    yield app
    await app.aclose()


def add(client: redis.Redis, count: int) -> list[str]:
    pipeline = client.pipeline(transaction=False)
    for number in range(count):
        pipeline.xadd(STREAM, {"event": "stalled", "jobId": str(number)})
    return [str(entry_id) for entry_id in pipeline.execute()]


def readers_connections(client: redis.Redis) -> int:
    clients: Any = client.client_list()
    return sum(one["name"].endswith(":qe") for one in clients)


async def until(condition: Callable[[], bool], what: str) -> None:
    await asyncio.to_thread(wait_until, condition, 10, what)


async def blocked(client: redis.Redis) -> None:
    """Wait until the shared read waits at the end of the stream."""
    await until(lambda: any("b" in one["flags"] for one in cast("Any", client.client_list())), "a blocked read")


async def receive(events: AsyncQueueEvents, count: int) -> list[str]:
    """Return the ids of the next events, none of which may be `EventsLost`."""
    received = [await events.next(10) for _ in range(count)]
    assert not any(event is None or isinstance(event, EventsLost) for event in received), received
    return [event.id for event in received if event is not None]


async def test_fifty_readers_use_one_connection_and_each_begins_where_it_wants(
    app: App, redis_client: redis.Redis
) -> None:
    await app.queue("mail").context.aconnect()
    before: int = len(cast("Any", redis_client.client_list()))
    ids = add(redis_client, 10)
    starts = ["0", ids[4], "$"]
    expected = [ids, ids[5:], []]
    async with AsyncExitStack() as stack:
        readers = await asyncio.gather(
            *(stack.enter_async_context(app.aevents("mail", start=starts[number % 3])) for number in range(READERS))
        )
        first = await asyncio.gather(
            *(receive(events, len(expected[number % 3])) for number, events in enumerate(readers))
        )
        assert first == [expected[number % 3] for number in range(READERS)]
        for _ in range(3):
            waits = [asyncio.create_task(receive(events, 2)) for events in readers]
            await blocked(redis_client)
            later = add(redis_client, 2)
            assert await asyncio.gather(*waits) == [later] * READERS
        assert len(cast("Any", redis_client.client_list())) <= before + 1
        assert readers_connections(redis_client) == 1
    await until(lambda: readers_connections(redis_client) == 0, "the end of the connection")


async def test_a_slow_reader_delays_no_other_and_gets_every_event(app: App, redis_client: redis.Redis) -> None:
    async with app.aevents("mail") as slow, app.aevents("mail") as fast, app.aevents("mail") as other:
        ids = add(redis_client, 1)
        assert await receive(slow, 1) == ids
        ids += add(redis_client, 2_500)
        assert [await receive(fast, 2_501), await receive(other, 2_501)] == [ids, ids]
        waiting = asyncio.create_task(receive(fast, 1))
        await blocked(redis_client)
        assert await receive(slow, 2_500) == ids[1:], "it reads while another one waits"
        last = add(redis_client, 1)
        assert [await waiting, await receive(slow, 1)] == [last, last]


@needs_redis_7
async def test_a_reader_that_was_too_slow_learns_how_many_events_were_trimmed(
    app: App, redis_client: redis.Redis
) -> None:
    async with app.aevents("mail") as slow, app.aevents("mail") as fast:
        ids = add(redis_client, 3)
        assert [await receive(slow, 3), await receive(fast, 3)] == [ids, ids]
        ids = add(redis_client, 20)
        assert await receive(fast, 20) == ids
        redis_client.xtrim(STREAM, 5, approximate=False)
        gap = await slow.next(10)
        assert isinstance(gap, EventsLost)
        assert (gap.first_id_after, gap.count) == (ids[15], 15)
        assert await receive(slow, 5) == ids[15:]
        waits = [asyncio.create_task(receive(events, 1)) for events in (slow, fast)]
        await blocked(redis_client)
        last = add(redis_client, 1)
        assert await asyncio.gather(*waits) == [last, last]


async def test_cancelling_or_closing_one_reader_leaves_the_others_waiting(app: App, redis_client: redis.Redis) -> None:
    async with AsyncExitStack() as stack:
        readers = [await stack.enter_async_context(app.aevents("mail")) for _ in range(4)]
        waits = [asyncio.create_task(events.next()) for events in readers]
        await blocked(redis_client)
        waits[0].cancel()  # it has begun the shared read
        await readers[1].close()
        assert await waits[1] is None, "close() ends the wait of its reader"
        with pytest.raises(asyncio.CancelledError):
            await waits[0]
        await readers[0].close()
        (entry_id,) = add(redis_client, 1)
        events = await asyncio.gather(*waits[2:])
        assert [event.id for event in events if event is not None] == [entry_id] * 2
        assert readers_connections(redis_client) == 1
        assert await readers[1].next() is None
    await until(lambda: readers_connections(redis_client) == 0, "the end of the connection")
    async with app.aevents("mail", start=entry_id) as again:
        assert await receive(again, len(later := add(redis_client, 1))) == later, "a later reader connects again"


async def test_after_an_outage_every_reader_continues_where_it_stopped(
    app: App, proxy: FlakyProxy, redis_client: redis.Redis
) -> None:
    async with AsyncExitStack() as stack:
        readers = [await stack.enter_async_context(app.aevents("mail")) for _ in range(5)]
        waits = [asyncio.create_task(receive(events, 6)) for events in readers]
        ids = add(redis_client, 2)
        await blocked(redis_client)
        proxy.refuse()
        proxy.reset()
        ids += add(redis_client, 2)
        proxy.accept()
        ids += add(redis_client, 2)
        assert await asyncio.gather(*waits) == [ids] * 5
        assert readers_connections(redis_client) == 1


async def test_readers_with_a_timeout_and_with_a_later_start_do_not_disturb_a_waiting_one(
    app: App, redis_client: redis.Redis
) -> None:
    future = "9999999999999-0"
    async with app.aevents("mail", start=future) as later, app.aevents("mail") as now, app.aevents("mail") as short:
        waits = [asyncio.create_task(receive(events, 1)) for events in (later, now)]
        await blocked(redis_client)
        assert await short.next(0) is None
        assert await short.next(0.05) is None
        ids = add(redis_client, 1)
        assert await waits[1] == ids
        assert await receive(short, 1) == ids
        assert not waits[0].done()
        redis_client.xadd(STREAM, {"event": "drained"}, id="9999999999999-1")
        assert await waits[0] == ["9999999999999-1"]


@needs_redis_7
async def test_readers_of_a_deleted_stream_report_a_gap_and_read_its_successor(
    app: App, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "LONGEST_BLOCK_MS", 200)
    async with app.aevents("mail") as one, app.aevents("mail") as two:
        ids = add(redis_client, 3)
        assert [await receive(one, 3), await receive(two, 3)] == [ids, ids]
        redis_client.delete(STREAM)
        gaps = await asyncio.gather(one.next(10), two.next(10))
        assert [type(gap) for gap in gaps] == [EventsLost, EventsLost]
        ids = add(redis_client, 2)
        assert [await receive(one, 2), await receive(two, 2)] == [ids, ids]
