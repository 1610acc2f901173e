"""A queue's limits, its description, and who is connected to it. Every test runs with both classes."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest
import redis

from bulltask import App
from bulltask.errors import BrokerUnavailableError, ConfigError
from bulltask.queue import Queue
from bulltask.queue.responses import RateLimit
from tests.support.manual_worker import ManualWorker

META = "bull:{mail}:meta"


def test_global_concurrency(queue: Queue, manual_worker: ManualWorker) -> None:
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


def test_the_global_rate_limit(queue: Queue, manual_worker: ManualWorker, redis_client: redis.Redis) -> None:
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


def test_a_rate_limit_set_manually(queue: Queue, manual_worker: ManualWorker) -> None:
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


def test_fields_of_meta(queue: Queue, redis_client: redis.Redis) -> None:
    assert queue.get_version() is None
    queue.add("n")
    assert queue.get_version() == "bullmq:5.62.0"
    queue.set_meta({"opts.maxLenEvents": 500})
    assert queue.get_meta() == {"version": "bullmq:5.62.0", "opts.maxLenEvents": "500"}
    queue.set_meta({})
    with pytest.raises(ConfigError, match="pause"):
        queue.set_meta({"paused": 0})
    assert not queue.is_paused()


def test_the_event_stream_is_trimmed(queue: Queue, redis_client: redis.Redis) -> None:
    queue.add_bulk([{"name": "n"}] * 500)
    assert queue.trim_events(0) == 1_000
    assert redis_client.xlen("bull:{mail}:events") == 0


def test_metrics(queue: Queue, redis_client: redis.Redis) -> None:
    assert queue.get_metrics("completed").points == 0
    redis_client.hset("bull:{mail}:metrics:completed", mapping={"count": 7, "prevTS": 60_000, "prevCount": 4})
    redis_client.rpush("bull:{mail}:metrics:completed:data", 3, 0, 4)
    found = queue.get_metrics("completed")
    assert (found.count, found.previous_ms, found.previous_count) == (7, 60_000, 4)
    assert (found.data, found.points) == ((3, 0, 4), 3)
    assert queue.get_metrics("completed", 1, 1).data == (0,)
    with pytest.raises(ConfigError, match="active"):
        queue.get_metrics("active")


def test_connected_workers_and_listeners(queue: Queue, broker_url: str) -> None:
    name = queue.context.keys.client_name()
    assert queue.get_workers() == []
    with (
        redis.Redis.from_url(broker_url, client_name=name) as plain,
        redis.Redis.from_url(broker_url, client_name=f"{name}:w:ann") as named,
        redis.Redis.from_url(broker_url, client_name=f"{name}:qe") as listener,
        redis.Redis.from_url(broker_url, client_name="bull:other") as other,
    ):
        for client in (plain, named, listener, other):
            client.ping()
        assert sorted(worker.name for worker in queue.get_workers()) == ["", "ann"]
        assert queue.get_workers_count() == 2
        assert [found.raw_name for found in queue.get_queue_events()] == [f"{name}:qe"]
        found = next(worker for worker in queue.get_workers() if worker.name)
        assert found.address.startswith("127.0.0.1:")
        assert found.idle <= found.age < 60


def test_progress_and_log_by_a_jobs_id(queue: Queue) -> None:
    job = queue.add("n")
    queue.update_job_progress(job.id, {"done": 3})
    assert [queue.add_job_log(job.id, f"line {number}", 3) for number in range(4)] == [1, 2, 3, 3]
    logs = queue.get_job_logs(job.id)
    assert (logs.lines, logs.count) == (("line 1", "line 2", "line 3"), 3)
    read = queue.get_job(job.id)
    assert read is not None
    assert read.progress == {"done": 3}


def test_prometheus_text(queue: Queue) -> None:
    queue.add("n")
    text = queue.export_prometheus_metrics({"env": "test"})
    assert 'bullmq_job_count{queue="{mail}", state="waiting", env="test"} 1' in text.splitlines()
    assert len(text.splitlines()) == 10


def test_names_of_the_queue(queue: Queue) -> None:
    assert (queue.name, queue.qualified_name) == ("mail", "bull:{mail}")


def test_a_queue_without_hash_tag_and_with_another_prefix(broker_url: str, redis_client: redis.Redis) -> None:
    with Queue("mail", broker_url, prefix="shop", queue_hash_tag=False) as queue:
        job = queue.add("n")
        assert redis_client.hget(f"shop:mail:{job.id}", "name") == "n"


def test_the_queues_of_an_app_share_its_connections(broker_url: str) -> None:
    app = App("queues", prefix="first")
    queue, aqueue = app.queue("mail"), app.aqueue("mail", default_job_options={"attempts": 9})
    app.conf.prefix = "shop"  # making a queue does not freeze the settings
    app.conf.broker_url = broker_url
    job = queue.add("n")
    assert job.key == f"shop:{{mail}}:{job.id}"

    async def both() -> None:
        assert await aqueue.count() == 1
        assert (await aqueue.add("n")).attempts == 9
        await aqueue.close()
        assert await aqueue.count() == 2
        await app.aclose()

    asyncio.run(both())
    queue.close()
    assert queue.count() == 2
    app.close()


def test_an_unreachable_server_is_named() -> None:
    with Queue("mail", "redis://127.0.0.1:1/0") as queue, pytest.raises(BrokerUnavailableError):
        queue.count()
