"""200 random histories of real streams: whatever happens to them, rows and losses are all that was ever added."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import redis
from pyspark.sql.types import StructType

from bulltask.errors import EventsLostError
from bulltask.spark.source import events_stream
from bulltask.spark.source.connection import Connection
from bulltask.spark.source.offsets import Offsets, StreamId, batch_start, decode_offsets
from bulltask.spark.source.options import StreamOptions, read_options
from bulltask.spark.source.ranges import expected_rows
from bulltask.spark.source.schemas import EVENTS
from bulltask.transport.call import Call
from tests.support.event_streams import RandomStreams
from tests.support.fake_query import FakeQuery

pytestmark = [pytest.mark.redis, pytest.mark.slow]

SEEDS = [range(first, first + 20) for first in range(0, 200, 20)]

GAP = "bulltask.gap"


class Disturbed(Connection):
    """One connection for all readers, which would open one each; something may happen before each command."""

    meanwhile: Callable[[], None] | None = None

    def __exit__(self, *_: object) -> None:
        """Stay open."""

    def run(self, call: Call[Any]) -> Any:
        self._happens()
        return super().run(call)

    def try_many(self, calls: Sequence[Call[Any]]) -> list[Any]:
        self._happens()
        return super().try_many(calls)

    def try_atomically(self, calls: Sequence[Call[Any]]) -> list[Any]:
        self._happens()
        return super().try_atomically(calls)

    def _happens(self) -> None:
        if self.meanwhile is not None:
            self.meanwhile()


@pytest.fixture
def connection(broker_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disturbed]:
    made = Disturbed(read_options(StreamOptions, {"url": broker_url, "queue": "*"}).config)
    monkeypatch.setattr(events_stream, "Connection", lambda *_, **__: made)
    yield made
    super(Disturbed, made).__exit__()


class FewColumns(FakeQuery):
    """A query of what these tests look at."""

    schema = StructType([field for field in EVENTS.fields if field.name in ("queue", "event_id", "event", "extra")])


class History:
    """A query over queues that come and go.

    Args:
        seed: makes the history; ``racy`` ones are disturbed also while a batch is planned.
    """

    def __init__(self, url: str, client: redis.Redis, connection: Disturbed, seed: int) -> None:
        self.chance = random.Random(seed)
        self.racy, self.targets = seed % 4 == 3, seed % 5 == 4
        self.streams, self._connection, self._url = RandomStreams(client, self.chance), connection, url
        for queue in ("a", "b")[: self.chance.randrange(3)]:
            self.streams.create_queue(queue)
        size = {name: str(self.chance.randrange(2, 9)) for name in ("batch", "eventsPerPartition")}
        align = str(self.chance.random() < 0.5).lower()
        self._options = {"queue": "*", "alignQueues": align, **size}
        found = self.streams.current()
        self.query = FewColumns(url, **self._options, failOnDataLoss="false", gapRows="true")
        self.streams.mark_read(found)

    def play(self) -> History:
        for step in range(8):
            if self.chance.random() < 0.1 or not self.streams.generations:
                self.streams.create_queue(f"late{step}")
            self._step()
        for queue in self.streams.generations:
            if self.chance.random() < 0.2:
                self.streams.obliterate(queue)
        self.query.restart()
        moved = [self.batch(calm=True) for _ in range(5)]
        assert not moved[-1], "the query never comes to an end"
        return self

    def _step(self) -> None:
        for _ in range(self.chance.randrange(4)):
            self.streams.change_one()
        if self.chance.random() < 0.3:
            self.query.restart()
        if self.targets and self.chance.random() < 0.2:
            self.query.reader.prepareForTriggerAvailableNow()
        self.batch()

    def batch(self, calm: bool = False) -> bool:
        query, most = self.query, None if calm else self.chance.choice([None, 1, 3, 10, 20])
        if not self.racy and self.chance.random() < 0.4:
            self._fails_as_it_should(most)
        found = self.streams.current()
        with self._disturbed(self.racy and not calm):
            end = query.plan(most)
        # A reader with a target does not record what is after it.
        self.streams.mark_read(found, counting=query.reader._target is None)
        with self._disturbed(not calm):
            if self.chance.random() < 0.2:
                query.read(end)  # and Spark crashes
            rows = query.read(end)
        self._check_batch(batch_start(query.offset, end) or {}, decode_offsets(end), rows)
        query.rows += rows
        moved: bool = end != query.offset
        query.offset = end
        return moved

    def _check_batch(self, begin: Offsets, end: Offsets, rows: list[dict[str, Any]]) -> None:
        """What the two ends of a batch say is what its rows are."""
        for name, upto in end.items():
            of_queue = [row for row in rows if f"{{{row['queue']}}}" == name]
            gaps = [int(json.loads(row["extra"])["lost"]) for row in of_queue if row["event"] == GAP]
            read = len(of_queue) - len(gaps)
            assert expected_rows(begin.get(name), upto).is_met(read, sum(gaps), len(gaps)), (
                name,
                begin.get(name),
                upto,
            )

    def _fails_as_it_should(self, most: int | None) -> None:
        """A query that fails at a loss reports the numbers that another query has in its gap rows."""
        query, strict = self.query, FewColumns(self._url, **self._options)
        strict.offset, strict.reader._target = query.offset, query.reader._target
        end = query.plan(most)
        gaps = [json.loads(row["extra"]) for row in query.read(end) if row["event"] == GAP]
        try:
            strict.read(strict.plan(most))
        except EventsLostError as lost:
            said = re.findall(r"\[BULLTASK_EVENTS_LOST\] queue=\S+ after=\S+ .*?(\d+) events? lost", str(lost))
            assert Counter(said) == Counter(gap["lost"] for gap in gaps)
        else:
            assert not gaps

    @contextmanager
    def _disturbed(self, when: bool) -> Iterator[None]:
        left = self.chance.choice([0, 0, 1, 2, 4])

        def happen() -> None:
            nonlocal left
            if left and self.streams.generations and self.chance.random() < 0.4:
                left -= 1
                self.streams.change_one()

        self._connection.meanwhile = happen if when else None
        yield
        self._connection.meanwhile = None

    def rows(self, queue: str) -> list[StreamId]:
        return [StreamId.parse(row["event_id"]) for row in self._of(queue) if row["event"] != GAP]

    def gaps(self, queue: str) -> list[tuple[StreamId, dict[str, str]]]:
        found = [row for row in self._of(queue) if row["event"] == GAP]
        return [(StreamId.parse(row["event_id"]), json.loads(row["extra"])) for row in found]

    def _of(self, queue: str) -> list[dict[str, Any]]:
        return [row for row in self.query.rows if row["queue"] == queue]

    def check(self) -> None:
        for queue in self.streams.generations:
            self._check_rows(queue)
            self._check_gaps(queue)

    def _check_rows(self, queue: str) -> None:
        rows, added = self.rows(queue), self.streams.added(queue)
        lost = sum(int(gap["lost"]) for _, gap in self.gaps(queue))
        assert rows == sorted(set(rows)), "each once, in their order"
        assert set(rows) <= set(added)
        assert len(rows) + lost <= len(added)
        assert len(rows) + lost + self.streams.lost_unread(queue) >= len(added)
        if not (self.racy or self.targets):
            assert len(rows) + lost + self.streams.lost_unread(queue) == len(added)

    def _check_gaps(self, queue: str) -> None:
        rows, gaps = set(self.rows(queue)), self.gaps(queue)
        missing = [entry for entry in self.streams.added(queue) if entry not in rows]
        covered = set[StreamId]()
        for after, gap in gaps:
            upto = StreamId.parse(gap["first"]) if "first" in gap else StreamId(10**9, 0)
            inside = {entry for entry in missing if after < entry < upto}
            assert len(inside) >= int(gap["lost"]), f"{gap} behind {after} is not where they are missing"
            covered |= inside
            if gap["exact"] == "true":
                assert int(gap["lost"]) > 0
        assert {entry for entry in self.streams.seen(queue) if entry not in rows} <= covered
        if not self.streams.deleted:
            assert all(gap["exact"] == "true" for _, gap in gaps)


@pytest.mark.parametrize("seeds", SEEDS, ids=lambda seeds: f"{seeds.start}-{seeds.stop - 1}")
def test_rows_and_losses_are_all_that_was_added_whatever_happens_to_the_streams(
    broker_url: str, redis_client: redis.Redis, connection: Disturbed, seeds: range
) -> None:
    for seed in seeds:
        redis_client.flushdb()
        try:
            History(broker_url, redis_client, connection, seed).play().check()
        except Exception as exc:
            exc.add_note(f"the history of seed {seed}")
            raise
