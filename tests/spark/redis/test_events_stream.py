"""The stream reader returns every event once, in batches that are fair to all queues; a real server, no JVM."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import redis
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

from bulltask.errors import ConfigError, EventsLostError
from bulltask.lake.storage import Lake
from bulltask.queue import Queue
from bulltask.spark.bronze import events_source
from bulltask.spark.connector import BulltaskSource
from bulltask.spark.source.planning import EntryRange
from bulltask.spark.source.readers import EventsPartition, EventsStreamReader
from tests.support.event_writing import fill
from tests.support.fake_query import FakeQuery
from tests.support.manual_worker import ManualWorker
from tests.support.skipped_queues import SKIPPED_QUEUES, write_skipped_queues

pytestmark = pytest.mark.redis

STREAM = "bull:{mail}:events"


def test_events_of_real_jobs_are_read_once_and_in_order(
    broker_url: str, queue: Queue, manual_worker: ManualWorker, redis_client: redis.Redis
) -> None:
    query = FakeQuery(broker_url, maxEventsPerTrigger="7", fetchSize="3", eventsPerPartition="4")
    for number in range(10):
        queue.add("send", {"n": number})
        query.batch()
        manual_worker.complete()
    query.run_until_idle()

    entries: Any = redis_client.xrange(STREAM)
    assert query.events() == [entry_id for entry_id, _ in entries]
    assert not query.batch()  # an idle stream is not read again


@pytest.mark.slow
def test_random_limits_restarts_and_new_queues_read_every_event_once(
    broker_url: str, redis_client: redis.Redis
) -> None:
    rng = random.Random(7)
    ids: dict[str, list[str]] = {"a": fill(redis_client, 40, "a"), "b": fill(redis_client, 5, "b")}
    query = FakeQuery(broker_url, queue="*", eventsPerPartition="9", fetchSize="4")
    for number in range(30):
        name = rng.choice("ab" if number < 10 else "abc")
        ids.setdefault(name, []).extend(fill(redis_client, rng.randrange(20), name))
        query.batch(rng.randrange(1, 25))
        if rng.random() < 0.3:
            query.restart()
        assert list(query.offset["queues"]) == sorted(query.offset["queues"])
    query.run_until_idle()

    assert {name: query.events(name) for name in ids} == ids


def test_a_query_with_starting_offsets_latest_starts_with_the_next_event(
    broker_url: str, redis_client: redis.Redis
) -> None:
    fill(redis_client, 5)
    query = FakeQuery(broker_url, startingOffsets="latest")

    late = fill(redis_client, 3)
    query.run_until_idle()

    assert query.events() == late


def test_an_available_now_query_ends_with_the_events_that_exist_at_its_start(
    broker_url: str, redis_client: redis.Redis
) -> None:
    ids = fill(redis_client, 25)
    query = FakeQuery(broker_url, maxEventsPerTrigger="10")
    query.reader.prepareForTriggerAvailableNow()

    fill(redis_client, 50)
    query.run_until_idle()

    assert query.events() == ids


@pytest.mark.slow
def test_a_batch_limit_larger_than_one_scan_is_used_completely(broker_url: str, redis_client: redis.Redis) -> None:
    ids = fill(redis_client, 25_100)
    query = FakeQuery(broker_url, eventsPerPartition="11000")

    query.batch(25_050)

    assert query.events() == ids[:25_050]


def test_a_large_batch_is_split_into_several_partitions(broker_url: str, redis_client: redis.Redis) -> None:
    fill(redis_client, 25)
    query = FakeQuery(broker_url, eventsPerPartition="10")

    parts = query.reader.partitions(query.offset, query.plan())

    assert sizes(parts) == [[10], [10], [5]]


def sizes(parts: Any) -> list[list[int | None]]:
    """Return the number of events of each queue in each partition."""
    assert all(isinstance(part, EventsPartition) for part in parts)
    return [[piece.expect for _, piece in part.pieces if isinstance(piece, EntryRange)] for part in parts]


def test_small_parts_of_many_queues_share_a_task_and_a_connection(broker_url: str, redis_client: redis.Redis) -> None:
    ids = {f"q{number:02}": fill(redis_client, 5, f"q{number:02}") for number in range(30)}
    query = FakeQuery(broker_url, queue="*", fetchSize="7")
    end = query.plan()
    assert sizes(query.reader.partitions(query.offset, end)) == [[5] * 30]
    query.restart(eventsPerPartition="50")
    assert sizes(query.reader.partitions(query.offset, end)) == [[5] * 10] * 3
    query.restart(eventsPerPartition="100000")
    (part,) = query.reader.partitions(query.offset, end)
    before: Any = redis_client.info("stats")

    query.rows = [row for batch in query.reader.read(part) for row in batch.to_pylist()]

    after: Any = redis_client.info("stats")
    assert after["total_connections_received"] - before["total_connections_received"] == 1
    assert {queue: query.events(queue) for queue in ids} == ids


def test_large_batches_of_many_queues_are_spread_over_tasks(broker_url: str, redis_client: redis.Redis) -> None:
    for number in range(4):
        fill(redis_client, 4_000, f"q{number}")
    query = FakeQuery(broker_url, queue="*", numPartitions="2")
    assert sizes(query.reader.partitions(query.offset, query.plan())) == [[4_000] * 2] * 2


def test_a_task_of_the_pipeline_has_50_000_events_or_more_because_it_writes_a_file(
    broker_url: str, redis_client: redis.Redis, tmp_path: Path
) -> None:
    for number in range(4):
        fill(redis_client, 10_000, f"q{number}")
    query = FakeQuery(broker_url, queue="*", numPartitions="4")
    end = query.plan()
    assert len(query.reader.partitions(query.offset, end)) == 4

    source = events_source(Lake(tmp_path))({"url": broker_url, "queue": "*", "numPartitions": "4"})

    assert len(source.streamReader(query.schema).partitions(query.offset, end)) == 1


def test_losses_of_queues_that_share_a_task_are_told_apart(broker_url: str, redis_client: redis.Redis) -> None:
    ids = {name: fill(redis_client, 20, name) for name in "abcd"}
    query = FakeQuery(broker_url, queue="*", fetchSize="9", failOnDataLoss="false", gapRows="true")
    end = query.plan()
    (part,) = query.reader.partitions(query.offset, end)
    for name, left in {"b": 4, "d": 0}.items():
        redis_client.xtrim(f"bull:{{{name}}}:events", left, approximate=False)

    query.rows = [row for batch in query.reader.read(part) for row in batch.to_pylist()]

    lost = {"b": 16, "d": 20}
    assert {name: query.events(name) for name in ids} == {name: ids[name][lost.get(name, 0) :] for name in ids}
    gaps = {row["queue"]: json.loads(row["extra"]) for row in query.rows if row["event"] == "bulltask.gap"}
    assert {name: int(gap["lost"]) for name, gap in gaps.items()} == lost
    assert gaps["b"]["first_id_after"] == ids["b"][16]
    query.restart(failOnDataLoss="true")
    with pytest.raises(EventsLostError, match=r"queue=\{b\}.*: 16 events lost"):
        list(query.reader.read(part))


@pytest.mark.parametrize(("queues", "reason"), [("*", "trimmed"), ("mail,later", "trimmed-before-start")])
def test_a_new_queue_begins_with_a_gap_for_its_trimmed_events(
    broker_url: str, redis_client: redis.Redis, queues: str, reason: str
) -> None:
    fill(redis_client, 3)
    query = FakeQuery(broker_url, queue="mail", failOnDataLoss="false", gapRows="true")
    fill(redis_client, 30, "later")
    redis_client.xtrim("bull:{later}:events", 10, approximate=False)

    query.restart(queue=queues)
    query.run_until_idle()

    assert [(gap["lost"], gap["loss_reason"]) for gap in query.gaps()] == [("20", reason)]
    assert len(query.events("later")) == 10


def test_no_queue_is_read_beyond_the_time_of_the_slowest_queue(broker_url: str, redis_client: redis.Redis) -> None:
    for second in range(100):
        redis_client.xadd("bull:{slow}:events", {"event": "stalled"}, id=f"{second * 1000 + 1}-0")
        for number in range(10):
            redis_client.xadd("bull:{fast}:events", {"event": "stalled"}, id=f"{second * 1000 + 1}-{number}")
    query = FakeQuery(broker_url, queue="slow,fast")

    query.batch(100)

    assert max(row["event_ms"] for row in query.rows if row["queue"] == "slow") <= 5_001
    assert max(row["event_ms"] for row in query.rows if row["queue"] == "fast") <= 5_001


def test_the_default_read_limit_is_the_option_max_events_per_trigger(broker_url: str) -> None:
    assert FakeQuery(broker_url, maxEventsPerTrigger="12").reader.getDefaultReadLimit() == ReadMaxRows(12)
    assert isinstance(FakeQuery(broker_url, maxEventsPerTrigger="none").reader.getDefaultReadLimit(), ReadAllAvailable)


def test_streaming_another_table_is_rejected_with_advice(broker_url: str) -> None:
    source = BulltaskSource({"url": broker_url, "queue": "mail"})
    with pytest.raises(ConfigError, match=r"^\[BULLTASK_OPTION_MISSING\] .*option\('table', 'events'\)"):
        source.streamReader(source.schema())

    events = BulltaskSource({"url": broker_url, "queue": "mail", "table": "events"})
    assert isinstance(events.streamReader(events.schema()), EventsStreamReader)


def test_queues_that_a_lake_cannot_store_are_skipped_and_logged_once(
    broker_url: str, redis_client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    ids = {"mail": fill(redis_client, 5), "typed": fill(redis_client, 3, "typed")}
    query = FakeQuery(broker_url, queue="*", skipUnsupportedQueues="true", failOnDataLoss="false", gapRows="true")
    query.batch(2)
    read = query.events("typed")
    lost = 3 - len(read)
    redis_client.delete("bull:{typed}:events")
    write_skipped_queues(redis_client)

    query.run_until_idle()
    ids["mail"] += fill(redis_client, 5)
    query.run_until_idle()
    redis_client.delete("bull:{typed}:events")
    read += fill(redis_client, 4, "typed")
    query.run_until_idle()

    assert (query.events("mail"), query.events("typed")) == (ids["mail"], read)
    assert {row["queue"] for row in query.rows} == {"mail", "typed"}
    assert [(gap["lost"], gap["loss_reason"]) for gap in query.gaps()] == [(str(lost), "stream-deleted")]
    assert len(caplog.messages) == len(SKIPPED_QUEUES), caplog.messages
    for name in SKIPPED_QUEUES:
        assert [name in message for message in caplog.messages].count(True) >= 1, name


def test_two_queues_with_the_same_name_in_the_app_fail_a_query(broker_url: str, redis_client: redis.Redis) -> None:
    fill(redis_client, 5)
    redis_client.hset("bull:mail:meta", "version", "bullmq:5.62.0")
    with pytest.raises(ConfigError, match="both would have the name 'mail'"):
        FakeQuery(broker_url, queue="*")


def test_a_reduced_stream_retention_is_logged_once(
    broker_url: str, redis_client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    fill(redis_client, 5)
    meta = "bull:{mail}:meta"
    redis_client.hset(meta, "opts.maxLenEvents", 747_000)
    query = FakeQuery(broker_url)
    query.run_until_idle()
    redis_client.hset(
        meta, mapping={"opts.maxLenEvents": 10_000, "version": "bullmq:5.62.0"}
    )  # as Node's new Queue() does
    query.run_until_idle()
    query.run_until_idle()
    [message] = caplog.messages
    assert message.startswith(
        "[BULLTASK_STREAM_LIMIT_LOWERED] queue mail: opts.maxLenEvents was 747,000 and is now 10,000"
    )
    redis_client.hset(meta, "opts.maxLenEvents", 747_000)
    query.run_until_idle()
    redis_client.hdel(meta, "opts.maxLenEvents")
    query.run_until_idle()
    assert len(caplog.messages) == 2
