"""What readers of much at once ask Redis: spans and pages of a stream, bounds of scores, queues under a prefix."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from bulltask.transport.client import Client
from bulltask.transport.endpoint import Endpoint
from bulltask.transport.keys import QueueKeys
from bulltask.transport.scripts.job import job_fields
from bulltask.transport.scripts.queue import count_by_score, ids_by_score, list_ids, scan_queues, score_at
from bulltask.transport.scripts.stream import SPAN, page, span_end, stream_info

pytestmark = pytest.mark.redis

KEYS = QueueKeys("bull", "{mail}", "mail")


@pytest.fixture
def client(broker_url: str) -> Iterator[Client]:
    made = Client(Endpoint(broker_url, 5_000, 10_000), None)
    yield made
    made.close()


def fill(redis_client: redis.Redis, count: int, *, of_each: int = 10) -> list[str]:
    """Entries with ids 1-0 … 1-9, 2-0 … and so on."""
    pipeline = redis_client.pipeline(transaction=False)
    for number in range(count):
        pipeline.xadd(KEYS.events, {"event": "added"}, id=f"{number // of_each + 1}-{number % of_each}")
    return [str(entry_id) for entry_id in pipeline.execute()]


@pytest.mark.parametrize("most", [1, 499, 500, 501, 1_000, 1_499])
def test_a_span_ends_at_its_last_entry_whatever_the_pages_inside_it(
    client: Client, redis_client: redis.Redis, most: int
) -> None:
    ids = fill(redis_client, 1_500)

    end = client.run(span_end(KEYS, "0-0", "+", most))

    assert (end.last, end.count) == (ids[most - 1], most)


def test_a_span_begins_behind_its_start_and_keeps_to_its_bound(client: Client, redis_client: redis.Redis) -> None:
    fill(redis_client, 1_500)

    bounded = client.run(span_end(KEYS, "2-4", "3-1", 100))
    whole_millisecond = client.run(span_end(KEYS, "2-4", "3", 100))
    nothing = client.run(span_end(KEYS, "3-1", "3-1", 100))

    assert (bounded.last, bounded.count) == ("3-1", 7)
    assert (whole_millisecond.last, whole_millisecond.count) == ("3-9", 15)
    assert (nothing.last, nothing.count) == ("", 0)


def test_a_span_of_an_empty_stream_is_empty(client: Client) -> None:
    assert client.run(span_end(KEYS, "0-0", "+", 5)).count == 0


def test_a_call_reads_a_limited_number_of_entries(client: Client, redis_client: redis.Redis) -> None:
    ids = fill(redis_client, SPAN + 10)

    end = client.run(span_end(KEYS, "0-0", "+", SPAN + 10))

    assert (end.last, end.count) == (ids[SPAN - 1], SPAN)


def test_pages_follow_each_other_without_a_gap_and_without_an_overlap(
    client: Client, redis_client: redis.Redis
) -> None:
    ids = fill(redis_client, 25)
    read: list[str] = []

    while found := client.run(page(KEYS, read[-1] if read else "0-0", ids[20], 7)):
        read += [entry_id.decode() for entry_id, _ in found]

    assert read == ids[:21]


def test_bounds_of_scores_count_and_list_the_same_jobs(client: Client, redis_client: redis.Redis) -> None:
    redis_client.zadd(KEYS.completed, {"a": 1, "b": 2, "c": 2, "d": 1760010061025, "e": 2**53})

    assert client.run(score_at(KEYS, "completed", 3)) == "1760010061025"
    assert client.run(score_at(KEYS, "completed", 5)) is None
    assert client.run(ids_by_score(KEYS, "completed", "2", "(1760010061025")) == ["b", "c"]
    assert client.run(count_by_score(KEYS, "completed", "(2", "+inf")) == 2


def test_fields_of_a_job_and_ids_of_a_list_come_as_they_are(client: Client, redis_client: redis.Redis) -> None:
    redis_client.hset(KEYS.job("1"), mapping={"name": "send", "data": "{}"})
    redis_client.rpush(KEYS.wait, "1", "2")

    assert client.run(list_ids(KEYS, "wait")) == ["1", "2"]
    assert client.run(job_fields(KEYS, "1", ("name", "atm", "data"))) == [b"send", None, b"{}"]
    assert client.run(job_fields(KEYS, "2", ("name", "atm"))) == [None, None]


def test_queues_are_found_under_their_prefix_only(client: Client, redis_client: redis.Redis) -> None:
    for key in ("b*d:{mail}:meta", "b*d:plain:meta", "bad:{other}:meta", "b*d:{mail}:de:meta", "b*d::meta"):
        redis_client.hset(key, "opts.maxLenEvents", 10)
    found: list[str] = []
    cursor = "0"

    while True:
        cursor, names = client.run(scan_queues("b*d", cursor))
        found += names
        if cursor == "0":
            break

    assert sorted(found) == ["plain", "{mail}"]


def test_a_stream_reports_its_entries_and_its_counters(client: Client, redis_client: redis.Redis) -> None:
    fill(redis_client, 25)
    redis_client.xtrim(KEYS.events, 12, approximate=False)
    trimmed = client.run(stream_info(KEYS))
    redis_client.xtrim(KEYS.events, 0, approximate=False)
    emptied = client.run(stream_info(KEYS))

    assert (trimmed.first, trimmed.last, trimmed.length, trimmed.trimmed) == ("2-3", "3-4", 12, 13)
    assert (emptied.first, emptied.last, emptied.length, emptied.trimmed) == ("", "3-4", 0, 25)
