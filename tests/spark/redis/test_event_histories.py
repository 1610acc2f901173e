"""Rows and reported losses account for every event in 200 random histories of real streams."""

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
from bulltask.spark.source import readers
from bulltask.spark.source.columns import EVENTS
from bulltask.spark.source.connection import Connection
from bulltask.spark.source.offsets import Offsets, StreamId, batch_start, decode_offsets
from bulltask.spark.source.options import StreamOptions, read_options
from bulltask.spark.source.planning import expected_rows
from bulltask.transport.call import Call
from tests.support.event_streams import RandomStreams
from tests.support.fake_query import FakeQuery

pytestmark = [pytest.mark.redis, pytest.mark.slow]

SEEDS = [range(first, first + 20) for first in range(0, 200, 20)]

GAP = "bulltask.gap"


class DisturbedConnection(Connection):
    """A connection that all readers share; ``before_command`` is called before each command."""

    before_command: Callable[[], None] | None = None

    def __exit__(self, *_: object) -> None:
        """Keep the connection open."""

    def run(self, call: Call[Any]) -> Any:
        self._call_back()
        return super().run(call)

    def try_many(self, calls: Sequence[Call[Any]]) -> list[Any]:
        self._call_back()
        return super().try_many(calls)

    def run_many(self, calls: Sequence[Call[Any]]) -> list[Any]:
        self._call_back()
        return super().run_many(calls)

    def try_atomically(self, transactions: Sequence[Sequence[Call[Any]]]) -> list[list[Any]]:
        self._call_back()
        return super().try_atomically(transactions)

    def _call_back(self) -> None:
        if self.before_command is not None:
            self.before_command()


@pytest.fixture
def connection(broker_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[DisturbedConnection]:
    shared = DisturbedConnection(read_options(StreamOptions, {"url": broker_url, "queue": "*"}).config)
    monkeypatch.setattr(readers, "Connection", lambda *_, **__: shared)
    yield shared
    super(DisturbedConnection, shared).__exit__()


class FewColumns(FakeQuery):
    """A query for the columns that these tests use."""

    schema = StructType([field for field in EVENTS.fields if field.name in ("queue", "event_id", "event", "extra")])


class History:
    """A query of queues that are created and deleted.

    Args:
        seed: The seed of the history. Every fourth history is ``racy``: its streams change even while a batch is
            planned.
    """

    def __init__(self, url: str, client: redis.Redis, connection: DisturbedConnection, seed: int) -> None:
        self.rng = random.Random(seed)
        self.racy, self.targets = seed % 4 == 3, seed % 5 == 4
        self.streams, self._connection, self._url = RandomStreams(client, self.rng), connection, url
        for queue in ("a", "b")[: self.rng.randrange(3)]:
            self.streams.create_queue(queue)
        size = {name: str(self.rng.randrange(2, 9)) for name in ("fetchSize", "eventsPerPartition")}
        align = str(self.rng.random() < 0.5).lower()
        self._options = {"queue": "*", "alignQueues": align, **size}
        found = self.streams.current()
        self.query = FewColumns(url, **self._options, failOnDataLoss="false", gapRows="true")
        self.streams.mark_read(found)

    def play(self) -> History:
        for step in range(8):
            if self.rng.random() < 0.1 or not self.streams.generations:
                self.streams.create_queue(f"late{step}")
            self._step()
        for queue in self.streams.generations:
            if self.rng.random() < 0.2:
                self.streams.obliterate(queue)
        self.query.restart()
        progressed = [self.batch(calm=True) for _ in range(5)]
        assert not progressed[-1], "the query did not catch up"
        return self

    def _step(self) -> None:
        for _ in range(self.rng.randrange(4)):
            self.streams.change_one()
        if self.rng.random() < 0.3:
            self.query.restart()
        if self.targets and self.rng.random() < 0.2:
            self.query.reader.prepareForTriggerAvailableNow()
        self.batch()

    def batch(self, calm: bool = False) -> bool:
        query, max_rows = self.query, None if calm else self.rng.choice([None, 1, 3, 10, 20])
        if not self.racy and self.rng.random() < 0.4:
            self._check_failing_query(max_rows)
        found = self.streams.current()
        with self._disturbed(self.racy and not calm):
            end = query.plan(max_rows)
        # A reader with a target does not record the end of a stream beyond the target.
        self.streams.mark_read(found, counting=query.reader._target is None)
        with self._disturbed(not calm):
            if self.rng.random() < 0.2:
                query.read(end)  # Spark crashes and reads the batch again
            rows = query.read(end)
        self._check_batch(batch_start(query.offset, end) or {}, decode_offsets(end), rows)
        query.rows += rows
        progressed: bool = end != query.offset
        query.offset = end
        return progressed

    def _check_batch(self, begin: Offsets, end: Offsets, rows: list[dict[str, Any]]) -> None:
        """Assert that the rows and losses of a batch match its two offsets."""
        for name, upto in end.items():
            of_queue = [row for row in rows if f"{{{row['queue']}}}" == name]
            gaps = [int(json.loads(row["extra"])["lost"]) for row in of_queue if row["event"] == GAP]
            read = len(of_queue) - len(gaps)
            assert expected_rows(begin.get(name), upto).is_met(read, sum(gaps), len(gaps)), (
                name,
                begin.get(name),
                upto,
            )

    def _check_failing_query(self, max_rows: int | None) -> None:
        """Assert that a query with ``failOnDataLoss`` reports the numbers that this query returns in gap rows."""
        query, strict = self.query, FewColumns(self._url, **self._options)
        strict.offset, strict.reader._target = query.offset, query.reader._target
        end = query.plan(max_rows)
        gaps = [json.loads(row["extra"]) for row in query.read(end) if row["event"] == GAP]
        try:
            strict.read(strict.plan(max_rows))
        except EventsLostError as lost:
            reported = re.findall(
                r"\[BULLTASK_EVENTS_LOST\] queue=\S+ last_id_before=\S+ .*?(\d+) events? lost", str(lost)
            )
            assert Counter(reported) == Counter(gap["lost"] for gap in gaps)
        else:
            assert not gaps

    @contextmanager
    def _disturbed(self, active: bool) -> Iterator[None]:
        left = self.rng.choice([0, 0, 1, 2, 4])

        def disturb() -> None:
            nonlocal left
            if left and self.streams.generations and self.rng.random() < 0.4:
                left -= 1
                self.streams.change_one()

        self._connection.before_command = disturb if active else None
        yield
        self._connection.before_command = None

    def rows(self, queue: str) -> list[StreamId]:
        return [StreamId.parse(row["event_id"]) for row in self._rows_of(queue) if row["event"] != GAP]

    def gaps(self, queue: str) -> list[tuple[StreamId, dict[str, str]]]:
        rows = [row for row in self._rows_of(queue) if row["event"] == GAP]
        return [(StreamId.parse(row["event_id"]), json.loads(row["extra"])) for row in rows]

    def _rows_of(self, queue: str) -> list[dict[str, Any]]:
        return [row for row in self.query.rows if row["queue"] == queue]

    def check(self) -> None:
        for queue in self.streams.generations:
            self._check_rows(queue)
            self._check_gaps(queue)

    def _check_rows(self, queue: str) -> None:
        rows, added = self.rows(queue), self.streams.added(queue)
        lost = sum(int(gap["lost"]) for _, gap in self.gaps(queue))
        assert rows == sorted(set(rows)), "an event was read twice or out of order"
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
            upto = StreamId.parse(gap["first_id_after"]) if "first_id_after" in gap else StreamId(10**9, 0)
            inside = {entry for entry in missing if after < entry < upto}
            assert len(inside) >= int(gap["lost"]), f"{gap} after {after} does not cover the missing events"
            covered |= inside
            if gap["exact"] == "true":
                assert int(gap["lost"]) > 0
        assert {entry for entry in self.streams.seen(queue) if entry not in rows} <= covered
        if not self.streams.deleted:
            assert all(gap["exact"] == "true" for _, gap in gaps)


@pytest.mark.parametrize("seeds", SEEDS, ids=lambda seeds: f"{seeds.start}-{seeds.stop - 1}")
def test_rows_and_losses_account_for_all_added_events(
    broker_url: str, redis_client: redis.Redis, connection: DisturbedConnection, seeds: range
) -> None:
    for seed in seeds:
        redis_client.flushdb()
        try:
            History(broker_url, redis_client, connection, seed).play().check()
        except Exception as exc:
            exc.add_note(f"the history's seed: {seed}")
            raise
