"""Warnings that a worker logs when it starts, about other clients of its queue."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis

from bulltask.testing.worker import wait_until
from tests.interop.interop_queue import InteropQueue
from tests.mixed_versions.page import NEWEST_6, PAGE, PYTHON_6
from tests.support.worker import Worker

pytestmark = [pytest.mark.interop, pytest.mark.process]


def test_a_worker_warns_once_about_a_bullmq_6_client(mail: InteropQueue, version: str) -> None:
    mail.call("count")
    wait_until(lambda: mail.redis.hget(mail.keys.meta, "version") == f"bullmq:{version}")
    worker = mail.worker(children=2)
    worker.wait_for_line("Worker started")
    if version == NEWEST_6:
        [warning] = worker.warnings()
        assert "BullMQ 6" in warning["event"]
        assert f"docs/reference/{PAGE.name}" in warning["event"]
        assert (warning["level"], warning["queue"], warning["version"]) == ("warning", "mail", f"bullmq:{version}")
    else:
        assert worker.warnings() == []


@pytest.mark.parametrize("version", [PYTHON_6])
def test_the_official_python_client_does_not_store_its_version(mail: InteropQueue) -> None:
    mail.node.call("queue.add", queue=mail.name, name="a", data={}, opts={})
    mail.node.call("queue.call", queue=mail.name, method="pause", args=[])
    assert mail.redis.hgetall(mail.keys.meta).keys() == {"opts.maxLenEvents", "paused"}


def test_a_worker_warns_only_about_bullmq_6_and_newer(
    redis_client: redis.Redis, broker_url: str, tmp_path: Path
) -> None:
    """Versions of the Pro edition are numbered differently."""
    queues = {"five": "bullmq:5.62.0", "pro": "bullmq-pro:7.40.0", "ten": "bullmq:10.0.0", "odd": "nonsense"}
    for queue, version in queues.items():
        redis_client.hset(f"bull:{{{queue}}}:meta", "version", version)
    settings = {"broker_url": broker_url, "worker_concurrency": 1}
    worker = Worker(tmp_path, options=["-Q", ",".join(queues)], settings=settings)
    try:
        worker.wait_for_line("Worker started")
        assert [(line["queue"], line["version"]) for line in worker.warnings()] == [("ten", "bullmq:10.0.0")]
    finally:
        worker.close()
