"""QueueEvents reports events that were trimmed before they were read, with their number, if it is known."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

import pytest
import redis

from bulltask.config.settings import Settings
from bulltask.queue import AsyncQueueEvents, QueueEvents
from bulltask.queue.events import EventsLost, QueueEvent
from bulltask.testing.worker import RedisServer, wait_until
from bulltask.transport.broker import Broker
from bulltask.transport.streams import BEGINNING, NEWEST, Entry, EventPage, Follower, StreamGap, StreamInfo
from tests.conftest import needs_redis_7
from tests.support.flaky_proxy import FlakyProxy
from tests.support.streams import server_ms

pytestmark = pytest.mark.redis

STREAM = "bull:{mail}:events"


@pytest.fixture
def proxy(redis_server: RedisServer, broker_url: str) -> Iterator[FlakyProxy]:
    with FlakyProxy("127.0.0.1", redis_server.port) as proxy:
        yield proxy


@pytest.fixture
def broker(proxy: FlakyProxy) -> Iterator[Broker]:
    """A broker whose connection the test may break."""
    settings = Settings({"broker_reconnect_delay": 0.02, "broker_reconnect_delay_max": 0.05}).freeze()
    broker = Broker(settings, f"redis://127.0.0.1:{proxy.port}/0")
    yield broker
    broker.close()


@pytest.fixture
def events(broker: Broker, short_block: None) -> Iterator[QueueEvents]:
    """A listener that was opened on an empty stream."""
    with QueueEvents("mail", broker=lambda: broker) as events:
        yield events


def add(client: redis.Redis, count: int) -> list[str]:
    pipeline = client.pipeline(transaction=False)
    for number in range(count):
        pipeline.xadd(STREAM, {"event": "stalled", "jobId": str(number)})
    return [str(entry_id) for entry_id in pipeline.execute()]


def trim(client: redis.Redis, length: int) -> None:
    client.xtrim(STREAM, length, approximate=False)


def receive(events: QueueEvents, count: int) -> list[str]:
    """Return the ids of the next events, none of which may be `EventsLost`."""
    received: list[QueueEvent | None] = [events.next(5) for _ in range(count)]
    assert not any(event is None or isinstance(event, EventsLost) for event in received), received
    return [event.id for event in received if event is not None]


def receive_gap(events: QueueEvents) -> EventsLost:
    gap = events.next(5)
    assert isinstance(gap, EventsLost)
    assert (gap.id, gap.queue) == (gap.last_id_before, "mail")
    return gap


def is_silent(events: QueueEvents) -> bool:
    return events.next(0.05) is None


class TestDisconnectedListener:
    @needs_redis_7
    def test_the_number_of_trimmed_events_is_reported(
        self, events: QueueEvents, proxy: FlakyProxy, redis_client: redis.Redis
    ) -> None:
        first = add(redis_client, 5)
        assert receive(events, 5) == first
        proxy.refuse()
        proxy.reset()
        later = add(redis_client, 40)
        trim(redis_client, 10)
        proxy.accept()
        gap = receive_gap(events)
        assert (gap.last_id_before, gap.first_id_after, gap.count) == (first[-1], later[30], 30)
        assert str(gap) == (
            f"30 events were trimmed from the stream of queue mail after {first[-1]} before they were read"
        )
        assert events.position == first[-1], "a listener that starts at this position gets the same gap"
        assert receive(events, 10) == later[30:]
        assert is_silent(events)

    @needs_redis_7
    def test_trimming_events_that_were_read_is_not_reported(
        self, events: QueueEvents, proxy: FlakyProxy, redis_client: redis.Redis
    ) -> None:
        assert len(receive(events, len(add(redis_client, 5)))) == 5
        for left in (1, 0):
            proxy.refuse()
            proxy.reset()
            trim(redis_client, left)
            proxy.accept()
            assert is_silent(events)
        ids = add(redis_client, 3)
        trim(redis_client, 3)
        assert receive(events, 3) == ids

    @needs_redis_7
    def test_a_fully_trimmed_stream_is_reported(
        self, events: QueueEvents, proxy: FlakyProxy, redis_client: redis.Redis
    ) -> None:
        first = add(redis_client, 5)
        assert receive(events, 5) == first
        add(redis_client, 7)
        trim(redis_client, 0)
        gap = receive_gap(events)
        assert (gap.last_id_before, gap.first_id_after, gap.count) == (first[-1], None, 7)
        assert is_silent(events)
        later = add(redis_client, 2)
        assert receive(events, 2) == later

    @needs_redis_7
    def test_a_callback_receives_events_lost(self, events: QueueEvents, redis_client: redis.Redis) -> None:
        counts: list[int | None] = []
        events.on(EventsLost, lambda event: counts.append(event.count))
        events.on("events-lost", lambda event: counts.append(event.count))
        add(redis_client, 9)
        trim(redis_client, 2)
        receive_gap(events)
        assert counts == [7, 7]


@needs_redis_7
def test_a_slow_listener_gets_the_number_of_events_that_it_missed(
    events: QueueEvents, redis_client: redis.Redis
) -> None:
    ids: list[str] = []
    counted = missed = 0
    for _ in range(6):  # one read is buffered; only later entries can be trimmed
        ids += add(redis_client, 300)
        trim(redis_client, 100)
        event = events.next(5)
        if isinstance(event, EventsLost):
            missed += event.count or 0
        else:
            counted += 1
    while (event := events.next(0.05)) is not None:
        if isinstance(event, EventsLost):
            missed += event.count or 0
        else:
            counted += 1
    assert counted + missed == len(ids) == 1_800
    assert missed >= 200


def test_trimming_behind_a_fast_reader_reports_no_loss(events: QueueEvents, redis_client: redis.Redis) -> None:
    ids: list[str] = []
    seen: list[str] = []
    for _ in range(10):
        ids += add(redis_client, 1_100)
        seen += receive(events, 1_100)
        redis_client.xtrim(STREAM, 500)
    assert seen == ids


class TestStartFromAnId:
    def test_no_gap_is_reported_if_an_entry_up_to_the_id_exists(
        self, broker: Broker, redis_client: redis.Redis
    ) -> None:
        ids = add(redis_client, 10)
        trim(redis_client, 5)
        with QueueEvents("mail", start=ids[5], broker=lambda: broker) as events:
            assert receive(events, 4) == ids[6:]
        redis_client.xadd(STREAM, {"event": "drained"}, id="9999999999999-0")
        with QueueEvents("mail", start="9999999999998-0", broker=lambda: broker) as events:  # no entry has this id
            assert receive(events, 1) == ["9999999999999-0"]

    @needs_redis_7
    def test_no_gap_is_reported_if_nothing_was_trimmed(self, broker: Broker, redis_client: redis.Redis) -> None:
        ids = add(redis_client, 10)
        with QueueEvents("mail", start="1-1", broker=lambda: broker) as events:
            assert receive(events, 10) == ids

    def test_no_gap_is_reported_if_the_first_entry_directly_follows_the_id(
        self, broker: Broker, redis_client: redis.Redis
    ) -> None:
        for number in range(10):
            redis_client.xadd(STREAM, {"event": "drained"}, id=f"1000-{number}")
        trim(redis_client, 5)
        with QueueEvents("mail", start="1000-4", broker=lambda: broker) as events:
            assert receive(events, 5) == [f"1000-{number}" for number in range(5, 10)]
        with QueueEvents("mail", start="1000-3", broker=lambda: broker) as events:
            assert receive_gap(events).count is None

    @needs_redis_7
    def test_the_size_of_a_gap_after_a_trimmed_id_is_unknown(self, broker: Broker, redis_client: redis.Redis) -> None:
        ids = add(redis_client, 10)
        trim(redis_client, 5)
        with QueueEvents("mail", start=ids[2], broker=lambda: broker) as events:
            gap = receive_gap(events)
            assert (gap.last_id_before, gap.first_id_after, gap.count) == (ids[2], ids[5], None)
            assert "events may have been trimmed" in str(gap)
            assert receive(events, 5) == ids[5:]
            # The listener counts from this position on.
            later = add(redis_client, 10)
            trim(redis_client, 4)
            assert receive_gap(events).count == 6
            assert receive(events, 4) == later[6:]

    @needs_redis_7
    def test_a_listener_from_an_id_counts_gaps_after_it_reached_the_end(
        self, broker: Broker, redis_client: redis.Redis
    ) -> None:
        ids = add(redis_client, 10)
        with QueueEvents("mail", start=ids[4], broker=lambda: broker) as events:
            assert receive(events, 5) == ids[5:]
            assert is_silent(events)
            add(redis_client, 10)
            trim(redis_client, 4)
            assert receive_gap(events).count == 6

    @needs_redis_7
    def test_a_listener_from_the_beginning_reports_only_later_gaps(
        self, broker: Broker, redis_client: redis.Redis
    ) -> None:
        add(redis_client, 10)
        trim(redis_client, 5)
        with QueueEvents("mail", start="0", broker=lambda: broker) as events:
            trim(redis_client, 3)
            assert receive_gap(events).count == 2
            receive(events, 3)


class TestReplacedStream:
    def test_a_deleted_stream_is_a_gap_of_unknown_size(self, events: QueueEvents, redis_client: redis.Redis) -> None:
        first = add(redis_client, 5)
        receive(events, 5)
        redis_client.delete(STREAM)
        gap = receive_gap(events)
        assert (gap.last_id_before, gap.first_id_after, gap.count) == (first[-1], None, None)
        assert is_silent(events)
        ids = add(redis_client, 3)
        assert receive(events, 3) == ids

    def test_a_new_stream_with_the_same_name_is_read_from_its_beginning(
        self, events: QueueEvents, redis_client: redis.Redis
    ) -> None:
        first = add(redis_client, 5)
        receive(events, 5)
        redis_client.delete(STREAM)
        wait_until(lambda: server_ms(redis_client) > int(first[-1].partition("-")[0]), what="another millisecond")
        ids = add(redis_client, 3)
        assert receive_gap(events).count is None
        assert receive(events, 3) == ids

    def test_a_stream_that_is_behind_the_listener_is_read_from_its_end(
        self, events: QueueEvents, proxy: FlakyProxy, redis_client: redis.Redis
    ) -> None:
        """A failover to a replica that lagged, and whose clock is behind, can cause this."""
        for number in range(5):
            redis_client.xadd(STREAM, {"event": "drained"}, id=f"9999999999999-{number}")
        receive(events, 5)
        redis_client.delete(STREAM)
        for number in range(3):
            redis_client.xadd(STREAM, {"event": "drained"}, id=f"9999999999999-{number}")
        proxy.reset()
        assert is_silent(events), "these were received before"
        redis_client.xadd(STREAM, {"event": "drained"}, id="9999999999999-3")
        assert receive(events, 1) == ["9999999999999-3"]

    def test_gaps_cannot_be_counted_after_individual_entries_were_deleted(
        self, events: QueueEvents, redis_client: redis.Redis
    ) -> None:
        ids = add(redis_client, 10)
        receive(events, 10)
        redis_client.xdel(STREAM, ids[5])
        later = add(redis_client, 10)
        trim(redis_client, 4)
        assert receive_gap(events).count is None
        assert receive(events, 4) == later[6:]


@needs_redis_7
async def test_async_queue_events_reports_lost_events(broker: Broker, redis_client: redis.Redis) -> None:
    async with AsyncQueueEvents("mail", broker=lambda: broker) as events:
        add(redis_client, 9)
        trim(redis_client, 2)
        gap = await events.next(5)
        assert isinstance(gap, EventsLost)
        assert gap.count == 7
        assert [type(await events.next(5)).__name__ for _ in range(2)] == ["Stalled"] * 2


# ---- servers before 7.0, without counters ----------------------------------------------------------------------------


class OldServer:
    """A fake of such a server with a follower: its stream holds ``entries``, and its last id is ``last``."""

    def __init__(self, start: str, broker: Broker) -> None:
        self.entries: list[str] = []
        self.last = "0-0"
        self.info_reads = 0
        self._follower = Follower(broker.keys("mail"), start, "server")

    def add(self, *ids: str) -> None:
        self.entries += ids
        self.last = ids[-1]

    def read(self) -> EventPage:
        operation: Generator[Any, Any, EventPage] = self._follower.read(1)
        calls = next(operation)
        try:
            while True:
                calls = operation.send(self._replies([call.args for call in calls]))
        except StopIteration as end:
            page: EventPage = end.value
            return page

    def _replies(self, calls: list[tuple[Any, ...]]) -> list[Any]:
        if calls[0][0] == "XREAD":
            return [
                self._after(calls[0][-1]),
                any(number(entry_id) <= number(calls[1][2]) for entry_id in self.entries),
            ]
        self.info_reads += 1  # MULTI, EXISTS, XINFO, XREAD?, EXEC
        info = StreamInfo(len(self.entries), self.last, None, deleted=False)
        results: list[Any] = [self.last != "0-0", info]
        return [*([None] * (len(calls) - 1)), results + ([self._after(calls[3][-1])] if len(calls) == 5 else [])]

    def _after(self, position: str) -> list[Entry]:
        return [(entry_id, {b"event": b"drained"}) for entry_id in self.entries if number(entry_id) > number(position)]


def number(entry_id: str) -> tuple[int, ...]:
    return tuple(int(part) for part in entry_id.split("-"))


class TestServerWithoutCounters:
    def test_a_new_stream_has_no_gap_when_read_from_its_newest_entry(self, broker: Broker) -> None:
        server = OldServer(NEWEST, broker)
        assert server.read() == EventPage([])
        server.add("5-0", "6-0")
        assert (len((page := server.read()).entries), page.gap) == (2, None)

    def test_a_stream_has_no_gap_when_read_from_its_beginning(self, broker: Broker) -> None:
        server = OldServer(BEGINNING, broker)
        server.add("5-0", "6-0")
        assert (len((page := server.read()).entries), page.gap) == (2, None)

    def test_a_gap_of_unknown_size_is_reported(self, broker: Broker) -> None:
        server = OldServer(BEGINNING, broker)
        server.add("5-0", "6-0")
        server.read()
        server.add("7-0", "8-0")
        del server.entries[:3]
        page = server.read()
        assert ([entry_id for entry_id, _ in page.entries], page.gap) == (["8-0"], StreamGap("6-0", "8-0", None))
        assert server.read() == EventPage([])

    def test_a_gap_at_the_end_of_the_stream_is_reported_once(self, broker: Broker) -> None:
        server = OldServer(BEGINNING, broker)
        server.add("5-0", "6-0")
        server.read()
        server.add("7-0")
        server.entries.clear()
        assert server.read() == EventPage([], StreamGap("6-0", None, None))
        assert server.read() == EventPage([])

    def test_nothing_is_reported_while_an_entry_up_to_the_position_exists(self, broker: Broker) -> None:
        server = OldServer(BEGINNING, broker)
        server.add("5-0", "6-0")
        server.read()
        server.add("7-0")
        del server.entries[:1]
        page = server.read()
        assert ([entry_id for entry_id, _ in page.entries], page.gap) == (["7-0"], None)

    def test_the_counts_of_the_stream_are_read_once(self, broker: Broker) -> None:
        server = OldServer("5-0", broker)
        server.add("5-0")
        for _ in range(5):
            assert server.read() == EventPage([])
        assert server.info_reads <= 2
