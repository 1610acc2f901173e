"""Fixtures of tests with real workers: workers, the events of the queue, the journal of the tasks, a sender."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest
import redis

from bulltask import App
from bulltask.transport.keys import QueueKeys
from tests.support.streams import Stream
from tests.support.worker import Worker

QUEUE = "default"


class StartWorker(Protocol):
    """Starts a worker; takes the arguments of `Worker` but the directory, and the URL of its broker."""

    def __call__(self, source: str = "", *, url: str = "", **options: Any) -> Worker: ...


@pytest.fixture
def keys() -> QueueKeys:
    """The keys of the default queue."""
    return QueueKeys("bull", f"{{{QUEUE}}}", QUEUE)


@pytest.fixture
def start_worker(broker_url: str, tmp_path: Path) -> Iterator[StartWorker]:
    """Start workers; all are ended after the test."""
    workers: list[Worker] = []

    def start(source: str = "", *, url: str = "", settings: dict[str, object] | None = None, **more: Any) -> Worker:
        said = {"broker_url": url or broker_url, "worker_concurrency": 2, **(settings or {})}
        directory = tmp_path / f"worker-{len(workers)}"
        workers.append(Worker(directory, source, settings=said, environ={"JOURNAL_URL": broker_url}, **more))
        return workers[-1]

    yield start
    for worker in workers:
        worker.close()


@pytest.fixture
def open_stream() -> Iterator[Callable[[str, str], Stream]]:
    """Follow streams of any server."""
    streams: list[Stream] = []

    def open_one(url: str, key: str) -> Stream:
        streams.append(Stream(url, key))
        return streams[-1]

    yield open_one
    for stream in streams:
        stream.close()


@pytest.fixture
def journal(broker_url: str, open_stream: Callable[[str, str], Stream]) -> Stream:
    """What the tasks tell: ``what``, ``pid``, ``job``."""
    return open_stream(broker_url, "journal")


@pytest.fixture
def events(broker_url: str, keys: QueueKeys, open_stream: Callable[[str, str], Stream]) -> Stream:
    """BullMQ's events of the default queue: ``event``, ``jobId``, …"""
    return open_stream(broker_url, keys.events)


@pytest.fixture
def sender(broker_url: str) -> Iterator[App]:
    """An app that sends by task name."""
    app = App("sender", broker_url)
    yield app
    app.close()


@pytest.fixture
def open_gate(redis_client: redis.Redis) -> Callable[..., None]:
    """Let as many tasks pass that wait at a gate of the journal's server, now or later."""

    def open_one(gate: str, times: int = 1) -> None:
        redis_client.rpush(f"gate:{gate}", *["open"] * times)

    return open_one
