"""Tests of the calls of bulk readers: ranges and pages of a stream, score ranges, queues with a prefix."""

from __future__ import annotations

import pytest
import redis

from bulltask.transport.broker import scan_all
from bulltask.transport.call import QueueKeys, SyncClient
from bulltask.transport.scripts.job import job_fields
from bulltask.transport.scripts.queue import count_by_score, ids_by_score, list_ids, scan_queues, score_at
from bulltask.transport.streams import MAX_RANGE, last_id_of_range, page, stream_info
from tests.conftest import needs_redis_7

pytestmark = pytest.mark.redis

KEYS = QueueKeys("bull", "{mail}", "mail")


def fill(redis_client: redis.Redis, count: int, *, per_millisecond: int = 10) -> list[str]:
    """Add entries with the ids 1-0 … 1-9, 2-0 and so on."""
    pipeline = redis_client.pipeline(transaction=False)
    for number in range(count):
        pipeline.xadd(KEYS.events, {"event": "added"}, id=f"{number // per_millisecond + 1}-{number % per_millisecond}")
    return [str(entry_id) for entry_id in pipeline.execute()]


@pytest.mark.parametrize("max_entries", [1, 499, 500, 501, 1_000, 1_499])
def test_a_stream_range_has_at_most_the_requested_number_of_entries(
    client: SyncClient, redis_client: redis.Redis, max_entries: int
) -> None:
    ids = fill(redis_client, 1_500)

    end = client.run(last_id_of_range(KEYS, "0-0", "+", max_entries))

    assert (end.last, end.count) == (ids[max_entries - 1], max_entries)


def test_a_stream_range_excludes_its_start_and_includes_its_end(client: SyncClient, redis_client: redis.Redis) -> None:
    fill(redis_client, 1_500)

    bounded = client.run(last_id_of_range(KEYS, "2-4", "3-1", 100))
    whole_millisecond = client.run(last_id_of_range(KEYS, "2-4", "3", 100))
    nothing = client.run(last_id_of_range(KEYS, "3-1", "3-1", 100))

    assert (bounded.last, bounded.count) == ("3-1", 7)
    assert (whole_millisecond.last, whole_millisecond.count) == ("3-9", 15)
    assert (nothing.last, nothing.count) == ("", 0)


def test_a_range_of_an_empty_stream_is_empty(client: SyncClient) -> None:
    assert client.run(last_id_of_range(KEYS, "0-0", "+", 5)).count == 0


def test_a_call_reads_a_limited_number_of_entries(client: SyncClient, redis_client: redis.Redis) -> None:
    ids = fill(redis_client, MAX_RANGE + 10)

    end = client.run(last_id_of_range(KEYS, "0-0", "+", MAX_RANGE + 10))

    assert (end.last, end.count) == (ids[MAX_RANGE - 1], MAX_RANGE)


def test_pages_of_a_stream_have_no_gap_and_no_overlap(client: SyncClient, redis_client: redis.Redis) -> None:
    ids = fill(redis_client, 25)
    read: list[str] = []

    while entries := client.run(page(KEYS, read[-1] if read else "0-0", ids[20], 7)):
        read += [entry_id.decode() for entry_id, _ in entries]

    assert read == ids[:21]


def test_score_ranges_count_and_list_the_same_jobs(client: SyncClient, redis_client: redis.Redis) -> None:
    redis_client.zadd(KEYS.completed, {"a": 1, "b": 2, "c": 2, "d": 1760010061025, "e": 2**53})

    assert client.run(score_at(KEYS, "completed", 3)) == "1760010061025"
    assert client.run(score_at(KEYS, "completed", 5)) is None
    assert client.run(ids_by_score(KEYS, "completed", "2", "(1760010061025")) == ["b", "c"]
    assert client.run(count_by_score(KEYS, "completed", "(2", "+inf")) == 2


def test_job_fields_and_list_ids_are_returned_unchanged(client: SyncClient, redis_client: redis.Redis) -> None:
    redis_client.hset(KEYS.job("1"), mapping={"name": "send", "data": "{}"})
    redis_client.rpush(KEYS.wait, "1", "2")

    assert client.run(list_ids(KEYS, "wait")) == ["1", "2"]
    assert client.run(job_fields(KEYS, "1", ("name", "atm", "data"))) == [b"send", None, b"{}"]
    assert client.run(job_fields(KEYS, "2", ("name", "atm"))) == [None, None]


def test_only_queues_with_the_prefix_are_found(client: SyncClient, redis_client: redis.Redis) -> None:
    for key in ("b*d:{mail}:meta", "b*d:plain:meta", "bad:{other}:meta", "b*d:{mail}:de:meta", "b*d::meta"):
        redis_client.hset(key, "opts.maxLenEvents", 10)

    queues = scan_all(client, lambda cursor: scan_queues("b*d", cursor))

    assert sorted(queues) == ["plain", "{mail}"]


@needs_redis_7
def test_a_stream_reports_its_entries_and_its_counters(client: SyncClient, redis_client: redis.Redis) -> None:
    fill(redis_client, 25)
    redis_client.xtrim(KEYS.events, 12, approximate=False)
    trimmed = client.run(stream_info(KEYS))
    redis_client.xtrim(KEYS.events, 0, approximate=False)
    emptied = client.run(stream_info(KEYS))

    assert (trimmed.first, trimmed.last, trimmed.length, trimmed.trimmed) == ("2-3", "3-4", 12, 13)
    assert (emptied.first, emptied.last, emptied.length, emptied.trimmed) == ("", "3-4", 0, 25)
