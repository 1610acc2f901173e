"""QueueEvents says what was trimmed away before it was read, and what it cannot know."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

import pytest
import redis

from bulltask.config.config import Conf
from bulltask.queue import AsyncQueueEvents, QueueEvents
from bulltask.queue.events import EventsLost, QueueEvent
from bulltask.testing.flaky import FlakyProxy
from bulltask.testing.server import RedisServer
from bulltask.testing.wait import wait_until
from bulltask.transport.broker import Broker
from bulltask.transport.follow import NEWEST, EventPage, Follower, StreamGap
from bulltask.transport.scripts.stream import BEGINNING, Entry, StreamInfo
from tests.support.streams import server_ms

pytestmark = pytest.mark.redis

STREAM = "bull:{mail}:events"


@pytest.fixture
def proxy(redis_server: RedisServer, broker_url: str) -> Iterator[FlakyProxy]:
    with FlakyProxy("127.0.0.1", redis_server.port) as made:
        yield made


@pytest.fixture
def broker(proxy: FlakyProxy) -> Iterator[Broker]:
    """A broker whose way to the server the test may break."""
    settings = Conf({"broker_reconnect_delay": 0.02, "broker_reconnect_delay_max": 0.05}).freeze()
    made = Broker(settings, f"redis://127.0.0.1:{proxy.port}/0")
    yield made
    made.close()


@pytest.fixture
def events(broker: Broker) -> Iterator[QueueEvents]:
    """A listener that was opened on an empty stream."""
    with QueueEvents("mail", broker=lambda: broker) as made:
        yield made


def add(client: redis.Redis, count: int) -> list[str]:
    pipeline = client.pipeline(transaction=False)
    for number in range(count):
        pipeline.xadd(STREAM, {"event": "stalled", "jobId": str(number)})
    return [str(entry_id) for entry_id in pipeline.execute()]


def trim(client: redis.Redis, length: int) -> None:
    client.xtrim(STREAM, length, approximate=False)


def heard(events: QueueEvents, count: int) -> list[str]:
    """The ids of the next events, none of which tells of a loss."""
    found: list[QueueEvent | None] = [events.next(5) for _ in range(count)]
    assert not any(event is None or isinstance(event, EventsLost) for event in found), found
    return [event.id for event in found if event is not None]


def lost(events: QueueEvents) -> EventsLost:
    found = events.next(5)
    assert isinstance(found, EventsLost)
    assert (found.id, found.queue) == (found.from_id, "mail")
    return found


def silent(events: QueueEvents) -> bool:
    return events.next(0.05) is None


class TestWhileTheListenerWasAway:
    def test_it_says_how_many_were_trimmed_and_goes_on(
        self, events: QueueEvents, proxy: FlakyProxy, redis_client: redis.Redis
    ) -> None:
        first = add(redis_client, 5)
        assert heard(events, 5) == first
        proxy.refuse()
        proxy.reset()
        later = add(redis_client, 40)
        trim(redis_client, 10)
        proxy.accept()
        gap = lost(events)
        assert (gap.from_id, gap.to_id, gap.count) == (first[-1], later[30], 30)
        assert str(gap) == (
            f"30 events were trimmed from the stream of queue mail after {first[-1]} before they were read"
        )
        assert events.position == first[-1], "whoever goes on from here meets the same gap"
        assert heard(events, 10) == later[30:]
        assert silent(events)

    def test_trimming_events_that_were_read_is_not_reported(
        self, events: QueueEvents, proxy: FlakyProxy, redis_client: redis.Redis
    ) -> None:
        assert len(heard(events, len(add(redis_client, 5)))) == 5
        for left in (1, 0):
            proxy.refuse()
            proxy.reset()
            trim(redis_client, left)
            proxy.accept()
            assert silent(events)
        ids = add(redis_client, 3)
        trim(redis_client, 3)
        assert heard(events, 3) == ids

    def test_a_fully_trimmed_stream_is_reported(
        self, events: QueueEvents, proxy: FlakyProxy, redis_client: redis.Redis
    ) -> None:
        first = add(redis_client, 5)
        assert heard(events, 5) == first
        add(redis_client, 7)
        trim(redis_client, 0)
        gap = lost(events)
        assert (gap.from_id, gap.to_id, gap.count) == (first[-1], None, 7)
        assert silent(events)
        later = add(redis_client, 2)
        assert heard(events, 2) == later

    def test_a_callback_receives_it(self, events: QueueEvents, redis_client: redis.Redis) -> None:
        told: list[int | None] = []
        events.on(EventsLost, lambda event: told.append(event.count))
        events.on("events-lost", lambda event: told.append(event.count))
        add(redis_client, 9)
        trim(redis_client, 2)
        lost(events)
        assert told == [7, 7]


def test_a_slow_listener_learns_what_it_missed(events: QueueEvents, redis_client: redis.Redis) -> None:
    ids: list[str] = []
    counted = missed = 0
    for _ in range(6):  # what is read at once is kept here; only what comes meanwhile can be trimmed away
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


def test_nothing_is_called_lost_while_thousands_are_read_and_trimmed_behind_the_reader(
    events: QueueEvents, redis_client: redis.Redis
) -> None:
    ids: list[str] = []
    seen: list[str] = []
    for _ in range(10):
        ids += add(redis_client, 1_100)
        seen += heard(events, 1_100)
        redis_client.xtrim(STREAM, 500)
    assert seen == ids


class TestFromAnId:
    def test_nothing_is_said_when_the_id_is_there_or_follows_one_that_is(
        self, broker: Broker, redis_client: redis.Redis
    ) -> None:
        ids = add(redis_client, 10)
        trim(redis_client, 5)
        with QueueEvents("mail", start=ids[5], broker=lambda: broker) as events:
            assert heard(events, 4) == ids[6:]
        redis_client.xadd(STREAM, {"event": "drained"}, id="9999999999999-0")
        with QueueEvents("mail", start="9999999999998-0", broker=lambda: broker) as events:  # no entry has this id
            assert heard(events, 1) == ["9999999999999-0"]

    def test_nothing_is_said_when_nothing_was_ever_trimmed(self, broker: Broker, redis_client: redis.Redis) -> None:
        ids = add(redis_client, 10)
        with QueueEvents("mail", start="1-1", broker=lambda: broker) as events:
            assert heard(events, 10) == ids

    def test_nothing_is_said_when_all_up_to_the_id_was_trimmed_and_the_next_one_follows_it(
        self, broker: Broker, redis_client: redis.Redis
    ) -> None:
        for number in range(10):
            redis_client.xadd(STREAM, {"event": "drained"}, id=f"1000-{number}")
        trim(redis_client, 5)
        with QueueEvents("mail", start="1000-4", broker=lambda: broker) as events:
            assert heard(events, 5) == [f"1000-{number}" for number in range(5, 10)]
        with QueueEvents("mail", start="1000-3", broker=lambda: broker) as events:
            assert lost(events).count is None

    def test_how_many_are_missing_behind_a_trimmed_id_cannot_be_known(
        self, broker: Broker, redis_client: redis.Redis
    ) -> None:
        ids = add(redis_client, 10)
        trim(redis_client, 5)
        with QueueEvents("mail", start=ids[2], broker=lambda: broker) as events:
            gap = lost(events)
            assert (gap.from_id, gap.to_id, gap.count) == (ids[2], ids[5], None)
            assert "events may have been trimmed" in str(gap)
            assert heard(events, 5) == ids[5:]
            # From here on it counts.
            later = add(redis_client, 10)
            trim(redis_client, 4)
            assert lost(events).count == 6
            assert heard(events, 4) == later[6:]

    def test_a_listener_from_an_id_counts_once_it_has_come_to_the_end(
        self, broker: Broker, redis_client: redis.Redis
    ) -> None:
        ids = add(redis_client, 10)
        with QueueEvents("mail", start=ids[4], broker=lambda: broker) as events:
            assert heard(events, 5) == ids[5:]
            assert silent(events)
            add(redis_client, 10)
            trim(redis_client, 4)
            assert lost(events).count == 6

    def test_the_start_has_nothing_before_it_that_could_be_lost_but_counts_from_there(
        self, broker: Broker, redis_client: redis.Redis
    ) -> None:
        add(redis_client, 10)
        trim(redis_client, 5)
        with QueueEvents("mail", start="0", broker=lambda: broker) as events:
            trim(redis_client, 3)
            assert lost(events).count == 2
            heard(events, 3)


class TestAnotherStream:
    def test_a_stream_that_was_deleted_may_have_held_more(self, events: QueueEvents, redis_client: redis.Redis) -> None:
        first = add(redis_client, 5)
        heard(events, 5)
        redis_client.delete(STREAM)
        gap = lost(events)
        assert (gap.from_id, gap.to_id, gap.count) == (first[-1], None, None)
        assert silent(events)
        ids = add(redis_client, 3)
        assert heard(events, 3) == ids

    def test_a_new_stream_of_the_same_name_is_read_from_its_beginning(
        self, events: QueueEvents, redis_client: redis.Redis
    ) -> None:
        first = add(redis_client, 5)
        heard(events, 5)
        redis_client.delete(STREAM)
        wait_until(lambda: server_ms(redis_client) > int(first[-1].partition("-")[0]), what="another millisecond")
        ids = add(redis_client, 3)
        assert lost(events).count is None
        assert heard(events, 3) == ids

    def test_a_stream_that_is_behind_the_listener_is_read_from_its_end(
        self, events: QueueEvents, proxy: FlakyProxy, redis_client: redis.Redis
    ) -> None:
        """After a failover to a replica that was behind, and whose clock is."""
        for number in range(5):
            redis_client.xadd(STREAM, {"event": "drained"}, id=f"9999999999999-{number}")
        heard(events, 5)
        redis_client.delete(STREAM)
        for number in range(3):
            redis_client.xadd(STREAM, {"event": "drained"}, id=f"9999999999999-{number}")
        proxy.reset()
        assert silent(events), "these were heard before"
        redis_client.xadd(STREAM, {"event": "drained"}, id="9999999999999-3")
        assert heard(events, 1) == ["9999999999999-3"]

    def test_gaps_cannot_be_counted_after_single_entries_were_deleted(
        self, events: QueueEvents, redis_client: redis.Redis
    ) -> None:
        ids = add(redis_client, 10)
        heard(events, 10)
        redis_client.xdel(STREAM, ids[5])
        later = add(redis_client, 10)
        trim(redis_client, 4)
        assert lost(events).count is None
        assert heard(events, 4) == later[6:]


async def test_the_async_form_reports_it_too(broker: Broker, redis_client: redis.Redis) -> None:
    async with AsyncQueueEvents("mail", broker=lambda: broker) as events:
        add(redis_client, 9)
        trim(redis_client, 2)
        gap = await events.next(5)
        assert isinstance(gap, EventsLost)
        assert gap.count == 7
        assert [type(await events.next(5)).__name__ for _ in range(2)] == ["Stalled"] * 2


# ---- servers before 7.0, which do not count --------------------------------------------------------------------------


class Old:
    """What such a server would answer to a follower: it holds ``entries`` and has seen ``last``."""

    def __init__(self, start: str, broker: Broker) -> None:
        self.entries: list[str] = []
        self.last = "0-0"
        self.looks = 0
        self._follower = Follower(broker.keys("mail"), start, "there")

    def add(self, *ids: str) -> None:
        self.entries += ids
        self.last = ids[-1]

    def read(self) -> EventPage:
        operation: Generator[Any, Any, EventPage] = self._follower.read(1)
        calls = next(operation)
        try:
            while True:
                calls = operation.send(self._answers([call.args for call in calls]))
        except StopIteration as end:
            page: EventPage = end.value
            return page

    def _answers(self, calls: list[tuple[Any, ...]]) -> list[Any]:
        if calls[0][0] == "XREAD":
            return [self._after(calls[0][-1]), any(number(it) <= number(calls[1][2]) for it in self.entries)]
        self.looks += 1  # MULTI, EXISTS, XINFO, XREAD?, EXEC
        info = StreamInfo(len(self.entries), self.last, None, deleted=False)
        found: list[Any] = [self.last != "0-0", info]
        return [*([None] * (len(calls) - 1)), found + ([self._after(calls[3][-1])] if len(calls) == 5 else [])]

    def _after(self, place: str) -> list[Entry]:
        return [(it, {b"event": b"drained"}) for it in self.entries if number(it) > number(place)]


def number(entry_id: str) -> tuple[int, ...]:
    return tuple(int(part) for part in entry_id.split("-"))


class TestAServerThatDoesNotCount:
    def test_a_new_stream_counts_as_complete(self, broker: Broker) -> None:
        server = Old(NEWEST, broker)
        assert server.read() == EventPage([])
        server.add("5-0", "6-0")
        assert (len((page := server.read()).entries), page.gap) == (2, None)

    def test_the_start_counts_as_complete(self, broker: Broker) -> None:
        server = Old(BEGINNING, broker)
        server.add("5-0", "6-0")
        assert (len((page := server.read()).entries), page.gap) == (2, None)

    def test_a_gap_of_unknown_size_is_reported(self, broker: Broker) -> None:
        server = Old(BEGINNING, broker)
        server.add("5-0", "6-0")
        server.read()
        server.add("7-0", "8-0")
        del server.entries[:3]
        page = server.read()
        assert ([it for it, _ in page.entries], page.gap) == (["8-0"], StreamGap("6-0", "8-0", None))
        assert server.read() == EventPage([])

    def test_a_gap_is_reported_once_where_nothing_came_after_it(self, broker: Broker) -> None:
        server = Old(BEGINNING, broker)
        server.add("5-0", "6-0")
        server.read()
        server.add("7-0")
        server.entries.clear()
        assert server.read() == EventPage([], StreamGap("6-0", None, None))
        assert server.read() == EventPage([])

    def test_nothing_is_reported_while_an_entry_up_to_the_position_exists(self, broker: Broker) -> None:
        server = Old(BEGINNING, broker)
        server.add("5-0", "6-0")
        server.read()
        server.add("7-0")
        del server.entries[:1]
        page = server.read()
        assert ([it for it, _ in page.entries], page.gap) == (["7-0"], None)

    def test_the_counts_of_the_stream_are_read_once(self, broker: Broker) -> None:
        server = Old("5-0", broker)
        server.add("5-0")
        for _ in range(5):
            assert server.read() == EventPage([])
        assert server.looks <= 2
