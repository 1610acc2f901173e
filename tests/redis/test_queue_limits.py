"""Tests of a queue's limits, metadata and connected clients. Every test runs with both classes."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest
import redis

from bulltask import App
from bulltask.errors import BrokerUnavailableError, ConfigError
from bulltask.queue import Queue
from bulltask.queue.fields import RateLimit
from tests.support.manual_worker import ManualWorker

META = "bull:{mail}:meta"


def test_global_concurrency_limits_the_active_jobs(queue: Queue, manual_worker: ManualWorker) -> None:
    assert queue.get_global_concurrency() is None
    assert not queue.is_maxed()
    queue.set_global_concurrency(1)
    assert queue.get_global_concurrency() == 1
    queue.add_bulk([{"name": "n"}] * 2)
    assert manual_worker.acquire()
    assert queue.is_maxed()
    assert not manual_worker.acquire()
    assert queue.remove_global_concurrency()
    assert not queue.remove_global_concurrency()
    assert manual_worker.acquire()
    with pytest.raises(ConfigError, match="concurrency must be 1 or more"):
        queue.set_global_concurrency(0)


def test_the_global_rate_limit_stops_workers_until_it_is_removed(
    queue: Queue, manual_worker: ManualWorker, redis_client: redis.Redis
) -> None:
    assert queue.get_global_rate_limit() is None
    queue.set_global_rate_limit(1, timedelta(minutes=1))
    assert queue.get_global_rate_limit() == RateLimit(max=1, duration=60.0)
    assert redis_client.hmget(META, "max", "duration") == ["1", "60000"]
    queue.add_bulk([{"name": "n"}] * 2)
    assert manual_worker.acquire()
    assert not manual_worker.acquire()
    assert 50 < queue.get_rate_limit_ttl() <= 60
    assert queue.remove_rate_limit_key()
    assert queue.get_rate_limit_ttl() == 0
    assert queue.remove_global_rate_limit()
    assert queue.get_global_rate_limit() is None
    assert manual_worker.acquire()
    with pytest.raises(ConfigError, match="duration must be 1 or more"):
        queue.set_global_rate_limit(1, 0)


def test_a_manual_rate_limit_stops_workers_until_it_is_removed(queue: Queue, manual_worker: ManualWorker) -> None:
    queue.add("n")
    queue.set_global_rate_limit(10, 1)
    assert queue.get_rate_limit_ttl() == 0
    queue.rate_limit(30)
    assert not manual_worker.acquire()
    assert 20 < queue.get_rate_limit_ttl() <= 30
    assert 20 < queue.get_rate_limit_ttl(5) <= 30
    assert queue.remove_rate_limit_key()
    assert not queue.remove_rate_limit_key()
    assert manual_worker.acquire()


def test_queue_metadata_is_read_and_written(queue: Queue, redis_client: redis.Redis) -> None:
    assert queue.get_version() is None
    queue.add("n")
    assert queue.get_version() == "bullmq:5.62.0"
    queue.set_meta({"opts.maxLenEvents": 500})
    assert queue.get_meta() == {"version": "bullmq:5.62.0", "opts.maxLenEvents": "500"}
    queue.set_meta({})
    with pytest.raises(ConfigError, match="pause"):
        queue.set_meta({"paused": 0})
    assert not queue.is_paused()


def test_trim_events_empties_the_event_stream(queue: Queue, redis_client: redis.Redis) -> None:
    queue.add_bulk([{"name": "n"}] * 500)
    assert queue.trim_events(0) == 1_000
    assert redis_client.xlen("bull:{mail}:events") == 0


def test_metrics_are_read_from_redis(queue: Queue, redis_client: redis.Redis) -> None:
    assert queue.get_metrics("completed").points == 0
    redis_client.hset("bull:{mail}:metrics:completed", mapping={"count": 7, "prevTS": 60_000, "prevCount": 4})
    redis_client.rpush("bull:{mail}:metrics:completed:data", 3, 0, 4)
    metrics = queue.get_metrics("completed")
    assert (metrics.count, metrics.previous_ms, metrics.previous_count) == (7, 60_000, 4)
    assert (metrics.data, metrics.points) == ((3, 0, 4), 3)
    assert queue.get_metrics("completed", 1, 1).data == (0,)
    with pytest.raises(ConfigError, match="active"):
        queue.get_metrics("active")


@pytest.mark.one_server
def test_connected_workers_and_listeners_are_listed(queue: Queue, broker_url: str) -> None:
    name = queue.context.keys.client_name()
    assert queue.get_workers() == []
    with (
        redis.Redis.from_url(broker_url, client_name=name) as plain,
        redis.Redis.from_url(broker_url, client_name=f"{name}:w:ann") as named,
        redis.Redis.from_url(broker_url, client_name=f"{name}:qe") as events,
        redis.Redis.from_url(broker_url, client_name="bull:other") as other,
    ):
        for client in (plain, named, events, other):
            client.ping()
        assert sorted(worker.name for worker in queue.get_workers()) == ["", "ann"]
        assert queue.get_workers_count() == 2
        assert [listener.raw_name for listener in queue.get_queue_events()] == [f"{name}:qe"]
        ann = next(worker for worker in queue.get_workers() if worker.name)
        assert ann.address.startswith("127.0.0.1:")
        assert ann.idle <= ann.age < 60


def test_progress_and_log_lines_are_stored_by_job_id(queue: Queue) -> None:
    job = queue.add("n")
    queue.update_job_progress(job.id, {"done": 3})
    assert [queue.add_job_log(job.id, f"line {number}", 3) for number in range(4)] == [1, 2, 3, 3]
    logs = queue.get_job_logs(job.id)
    assert (logs.lines, logs.count) == (("line 1", "line 2", "line 3"), 3)
    read = queue.get_job(job.id)
    assert read is not None
    assert read.progress == {"done": 3}


def test_prometheus_metrics_are_exported_as_text(queue: Queue) -> None:
    queue.add("n")
    text = queue.export_prometheus_metrics({"env": "test"})
    assert 'bullmq_job_count{queue="{mail}", state="waiting", env="test"} 1' in text.splitlines()
    assert len(text.splitlines()) == 10


def test_a_queue_has_a_name_and_a_qualified_name(queue: Queue) -> None:
    assert (queue.name, queue.qualified_name) == ("mail", "bull:{mail}")


def test_prefix_and_hash_tag_settings_determine_a_queues_keys(broker_url: str, redis_client: redis.Redis) -> None:
    with Queue("mail", broker_url, prefix="{shop}", queue_hash_tag=False) as queue:
        job = queue.add("n")
        assert redis_client.hget(f"{{shop}}:mail:{job.id}", "name") == "n"


def test_the_queues_of_an_app_share_its_connections(broker_url: str) -> None:
    app = App("queues", prefix="first")
    queue, aqueue = app.queue("mail"), app.aqueue("mail", default_job_options={"attempts": 9})
    app.conf.prefix = "shop"  # creating a queue does not freeze the settings
    app.conf.broker_url = broker_url
    job = queue.add("n")
    assert job.key == f"shop:{{mail}}:{job.id}"

    async def use_async_queue() -> None:
        assert await aqueue.count() == 1
        assert (await aqueue.add("n")).attempts == 9
        await aqueue.close()
        assert await aqueue.count() == 2
        await app.aclose()

    asyncio.run(use_async_queue())
    queue.close()
    assert queue.count() == 2
    app.close()


def test_an_unreachable_server_raises_broker_unavailable() -> None:
    with Queue("mail", "redis://127.0.0.1:1/0") as queue, pytest.raises(BrokerUnavailableError):
        queue.count()
