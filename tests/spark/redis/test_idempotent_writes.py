"""An idempotent write adds each job at most once, even after its removal, and stores it like a plain send."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from bulltask.config.settings import Settings
from bulltask.errors import BrokerError, BrokerOutOfMemoryError, ParentNotFoundError
from bulltask.jobs.job import JobOptions, NewJob, ParentLink
from bulltask.lua import loader, wrappers
from bulltask.transport.broker import Broker
from bulltask.transport.call import Call, SyncClient
from bulltask.transport.scripts.add import MAX_JOBS_PER_CALL, IdempotentWrite, add_job, add_jobs_once
from tests.conftest import ServerFactory
from tests.support.flaky_proxy import FlakyProxy

pytestmark = pytest.mark.redis

NOW_MS = 1_700_000_000_000
WRITE = IdempotentWrite("w1", 60_000)
KEY = "bulltask:{mail}:added:w1"
KINDS = {
    "standard": JobOptions(),
    "lifo": JobOptions(lifo=True),
    "delayed": JobOptions(delay_ms=60_000),
    "prioritized": JobOptions(priority=2),
}


@pytest.fixture
def broker(broker_url: str) -> Iterator[Broker]:
    opened = Broker(Settings({"broker_publish_retries": 0}).freeze(), broker_url)
    yield opened
    opened.close()


def job(job_id: str, options: JobOptions = KINDS["standard"], **more: Any) -> NewJob:
    return NewJob("mail", job_id, "send", b'{"n":1}', options, **more)


def jobs(first: int, last: int) -> list[NewJob]:
    return [job(f"s{number}") for number in range(first, last)]


def contents_of(client: Any) -> dict[str, Any]:
    """Return the contents of Redis without the write's ids and without the events' ids, which are times."""
    contents: dict[str, Any] = {}
    for key in sorted(set(client.keys()) - {KEY}):
        match client.type(key):
            case "stream":
                contents[key] = [fields for _, fields in client.xrange(key)]
            case "hash":
                contents[key] = client.hgetall(key)
            case "zset":
                contents[key] = client.zrange(key, 0, -1, withscores=True)
            case "list":
                contents[key] = client.lrange(key, 0, -1)
            case _:
                contents[key] = client.get(key)
    return contents


@pytest.mark.parametrize("kind", KINDS)
def test_an_idempotent_write_stores_a_job_like_a_send(kind: str, broker: Broker, redis_client: redis.Redis) -> None:
    def contents_after(call: Call[Any]) -> dict[str, Any]:
        redis_client.flushdb()
        broker.pool.run(call)
        return contents_of(redis_client)

    keys, new = broker.keys("mail"), job("s1", KINDS[kind])
    plain = contents_after(add_job(keys, new, NOW_MS))
    assert len(plain) > 3
    [call] = add_jobs_once(keys, [new], NOW_MS, WRITE)
    assert contents_after(call) == plain
    assert redis_client.smembers(KEY) == {"s1"}


def test_a_retried_write_of_1000_jobs_adds_the_600_missing_ones(broker: Broker, redis_client: redis.Redis) -> None:
    """The first attempt's 400 jobs, which ran and were removed, are not added again."""
    broker.producer.send_once(jobs(0, 400), WRITE)
    redis_client.delete("bull:{mail}:wait", *(f"bull:{{mail}}:s{number}" for number in range(400)))
    sent = broker.producer.send_once(jobs(0, 1_000), WRITE)
    assert Counter(result.status for result in sent) == {"duplicate": 400, "added": 600}
    assert redis_client.lrange("bull:{mail}:wait", 0, -1) == [f"s{number}" for number in range(999, 399, -1)]


def test_a_retried_write_adds_no_jobs_and_no_events(broker: Broker, redis_client: redis.Redis) -> None:
    broker.producer.send_once(jobs(0, 3), WRITE)
    before = contents_of(redis_client)
    assert {result.status for result in broker.producer.send_once(jobs(0, 3), WRITE)} == {"duplicate"}
    assert contents_of(redis_client) == before


def test_equal_jobs_in_one_call_are_added_once(broker: Broker, redis_client: redis.Redis) -> None:
    sent = broker.producer.send_once([job("s1"), job("s2"), job("s1")], WRITE)
    assert [(result.id, result.status) for result in sent] == [("s1", "added"), ("s2", "added"), ("s1", "duplicate")]
    assert redis_client.lrange("bull:{mail}:wait", 0, -1) == ["s2", "s1"]


def test_results_from_several_queues_and_scripts_are_in_order(broker: Broker, redis_client: redis.Redis) -> None:
    kinds = list(KINDS.values())
    mixed = [NewJob(f"q{n % 7 // 3}", f"s{n}", "send", b"{}", kinds[n % 9 // 3]) for n in range(3 * MAX_JOBS_PER_CALL)]
    sent = broker.producer.send_once(mixed, WRITE)
    assert [(result.id, result.status) for result in sent] == [(new.id, "added") for new in mixed]
    for queue in ("q0", "q1", "q2"):
        of_queue = {new.id for new in mixed if new.queue == queue}
        assert redis_client.smembers(f"bulltask:{{{queue}}}:added:w1") == of_queue
        assert set(redis_client.keys(f"bull:{{{queue}}}:s*")) == {f"bull:{{{queue}}}:{job_id}" for job_id in of_queue}


def test_another_write_reports_an_existing_job_as_a_duplicate(broker: Broker, redis_client: redis.Redis) -> None:
    broker.producer.send_once(jobs(0, 1), WRITE)
    [result] = broker.producer.send_once(jobs(0, 1), IdempotentWrite("w2", 60_000))
    assert (result.id, result.status) == ("s0", "duplicate")
    assert redis_client.llen("bull:{mail}:wait") == 1


def test_a_deduplicated_job_is_reported_with_the_id_of_the_existing_job(broker: Broker) -> None:
    same = JobOptions(more={"de": {"id": "one"}})
    sent = broker.producer.send_once([job("s1", same), job("s2", same)], WRITE)
    assert [(result.id, result.status) for result in sent] == [("s1", "added"), ("s1", "duplicate")]


def test_the_ids_of_a_write_expire_one_ttl_after_its_last_job(broker: Broker, redis_client: redis.Redis) -> None:
    broker.producer.send_once(jobs(0, 1), WRITE)
    redis_client.pexpire(KEY, 5)
    broker.producer.send_once(jobs(1, 2), IdempotentWrite("w1", 50_000_000))
    assert 49_000_000 < redis_client.pttl(KEY) <= 50_000_000


def test_the_id_of_a_rejected_job_is_not_stored(broker: Broker, redis_client: redis.Redis) -> None:
    orphan = job("s1", parent=ParentLink("bull:{mail}:gone", {"id": "gone", "queueKey": "bull:{mail}"}))
    with pytest.raises(ParentNotFoundError):
        broker.producer.send_once([orphan], WRITE)
    assert not redis_client.exists(KEY)


def test_a_rejected_job_does_not_prevent_adding_the_others(broker: Broker, redis_client: redis.Redis) -> None:
    orphan = job("s5", parent=ParentLink("bull:{mail}:gone", {"id": "gone", "queueKey": "bull:{mail}"}))
    with pytest.raises(ParentNotFoundError):
        broker.producer.send_once([*jobs(0, 5), orphan, *jobs(6, 9)], WRITE)
    assert redis_client.smembers(KEY) == {"s0", "s1", "s2", "s3", "s4", "s6", "s7", "s8"}
    assert redis_client.lrange("bull:{mail}:wait", 0, -1) == ["s8", "s7", "s6", "s4", "s3", "s2", "s1", "s0"]


def test_a_script_that_fails_on_a_job_stores_the_ids_of_earlier_jobs(broker: Broker, redis_client: redis.Redis) -> None:
    """They may run and be removed before the write is retried, which then adds only the others."""
    redis_client.set("bull:{mail}:s3", "no hash")
    with pytest.raises(BrokerError, match="WRONGTYPE"):
        broker.producer.send_once(jobs(0, 6), WRITE)
    assert redis_client.smembers(KEY) == {"s0", "s1", "s2"}
    assert redis_client.pttl(KEY) > 0
    redis_client.delete("bull:{mail}:wait", *(f"bull:{{mail}}:s{number}" for number in range(4)))
    sent = broker.producer.send_once(jobs(0, 6), WRITE)
    assert [result.status for result in sent] == ["duplicate"] * 3 + ["added"] * 3
    assert redis_client.lrange("bull:{mail}:wait", 0, -1) == ["s5", "s4", "s3"]


def test_a_server_out_of_memory_neither_adds_jobs_nor_stores_ids(server_factory: ServerFactory) -> None:
    server = server_factory()
    broker = Broker(Settings({"broker_publish_retries": 0}).freeze(), server.url)
    with redis.Redis.from_url(server.url, decode_responses=True) as client:
        broker.producer.send_once(jobs(0, 1), WRITE)
        client.config_set("maxmemory", 1)
        with pytest.raises(BrokerOutOfMemoryError):
            broker.producer.send_once(jobs(1, 2), WRITE)
        client.config_set("maxmemory", 0)
        assert client.smembers(KEY) == {"s0"}
        assert [result.status for result in broker.producer.send_once(jobs(1, 2), WRITE)] == ["added"]
    broker.close()


def test_a_send_whose_reply_was_lost_adds_each_job_once(broker_url: str, redis_client: redis.Redis) -> None:
    with FlakyProxy("127.0.0.1", int(broker_url.rpartition(":")[2].partition("/")[0])) as proxy:
        settings = {"broker_reconnect_delay": 0.02, "redis_socket_timeout": 0.5}
        broker = Broker(Settings(settings).freeze(), f"redis://127.0.0.1:{proxy.port}/0")
        broker.producer.send_once(jobs(0, 1), WRITE)
        proxy.drop_replies(1, match="evalsha")
        sent = broker.producer.send_once(jobs(1, 5), WRITE)
        broker.close()
    assert [result.status for result in sent] == ["duplicate"] * 4
    assert redis_client.lrange("bull:{mail}:wait", 0, -1) == ["s4", "s3", "s2", "s1", "s0"]


def test_the_add_once_script_contains_bullmqs_script_unchanged(broker: Broker) -> None:
    script = wrappers.add_once("addStandardJob")
    assert loader.official_script("addStandardJob").source in script.source
    assert (script.name, script.key_count) == ("addOnce:addStandardJob", 10)


def test_the_add_once_script_is_loaded_again_after_a_script_flush(broker: Broker, redis_client: redis.Redis) -> None:
    client: SyncClient = broker.client()
    try:
        redis_client.script_flush()
        keys = broker.keys("mail")
        sent = client.run_many(add_jobs_once(keys, jobs(0, MAX_JOBS_PER_CALL + 3), NOW_MS, WRITE))
        assert [len(results) for results in sent] == [MAX_JOBS_PER_CALL, 3]
        assert {result.status for results in sent for result in results} == {"added"}
    finally:
        client.close()
