"""``bulltask exporter``: the metrics of a server's queues, without a worker."""

from __future__ import annotations

import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from bulltask import App
from tests.support.worker_harness import WorkerHarness

pytestmark = pytest.mark.process


@contextmanager
def exporter(*options: str) -> Iterator[str]:
    command = [sys.executable, "-m", "bulltask", "exporter", "--port", "0", "--cache", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            (url,) = re.findall(r"http://\S+", process.stdout.readline())
            yield url
        finally:
            process.terminate()
            assert process.wait(10) == 0


def scrape(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as response:
        return str(response.read().decode())


def test_all_queues_of_a_server_are_exported_without_a_worker(harness: WorkerHarness) -> None:
    url = harness.url
    harness.app.send_task("quick", queue="mail")
    App("node", broker_url=url, queue_hash_tag=False).send_task("quick", queue="of-node")
    with exporter("-b", url) as served:
        text = scrape(served)
        assert 'bulltask_queue_jobs{queue="mail",state="wait"} 1.0' in text
        assert 'bulltask_queue_jobs{queue="of-node",state="wait"} 1.0' in text
        assert 'bulltask_queue_workers{queue="mail"} 0.0' in text
        assert re.search(r'bulltask_queue_oldest_waiting_seconds\{queue="mail"\} \d+\.\d', text)
        assert "bulltask_exporter_redis_up 1.0" in text
    with exporter("-b", url, "-Q", "mail") as served:
        text = scrape(served)
        assert 'queue="mail"' in text
        assert "of-node" not in text


def test_without_redis_the_exporter_says_so_and_shows_no_queue() -> None:
    with exporter("-b", "redis://127.0.0.1:1") as served:
        text = scrape(served)
    assert "bulltask_exporter_redis_up 0.0" in text
    assert "bulltask_queue_jobs{" not in text
