"""Fixtures of tests that need only a Redis server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import redis
from click.testing import CliRunner, Result

from bulltask.app import App
from bulltask.cli.main import main
from bulltask.events import Bus, Event
from bulltask.queue import AsyncQueue, Queue, aio, events, sync
from bulltask.testing import InlineWorker
from bulltask.testing.worker import RedisServer
from bulltask.transport.broker import Broker
from bulltask.transport.call import SyncClient
from tests.conftest import FLAVOR
from tests.support.cluster_and_sentinel import CLUSTER_NODE, assign_all_slots
from tests.support.lake import LakeBuilder
from tests.support.manual_worker import ManualWorker
from tests.support.sync_facade import SyncFacade

Run = Callable[..., Result]


@pytest.fixture(scope="session")
def cluster_node(session_processes: set[int], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A cluster of one node, which has all slots. A new node accepts no commands for two seconds."""
    with RedisServer.start(tmp_path_factory.mktemp("cluster"), flavor=FLAVOR, extra=CLUSTER_NODE) as server:
        session_processes.add(server.pid)
        assign_all_slots(server)
        yield server


@pytest.fixture
def cluster_url(cluster_node: RedisServer) -> str:
    """The URL of a cluster of one node, which is empty when the test starts."""
    with redis.Redis.from_url(cluster_node.url) as plain:
        plain.flushall()
    return cluster_node.url


@pytest.fixture
def short_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the longest wait of a listener for events from 5 s to 0.5 s."""
    for module in (events, aio.events, sync.events):
        monkeypatch.setattr(module, "LONGEST_BLOCK_MS", 500)


@pytest.fixture
def client(app: App) -> Iterator[SyncClient]:
    """A client of the app, like that of a supervisor or a child."""
    client = app._broker.client()
    yield client
    client.close()


@pytest.fixture
def worker(app: App) -> Iterator[InlineWorker]:
    """A worker in the test's thread."""
    with InlineWorker(app) as worker:
        yield worker


@pytest.fixture
def emitted() -> list[Event]:
    """The events that the bus has emitted."""
    return []


@pytest.fixture
def bus(emitted: list[Event]) -> Bus:
    """A bus that records its events in ``emitted``."""
    bus = Bus()
    bus.subscribe(Event, emitted.append)
    return bus


@pytest.fixture(params=["sync", "async"])
def queue(request: pytest.FixtureRequest, broker_url: str) -> Iterator[Queue]:
    """The queue ``mail``, through its sync class and through its async one."""
    if request.param == "sync":
        with Queue("mail", broker_url) as queue:
            yield queue
        return
    with asyncio.Runner() as runner:
        facade: Any = SyncFacade(AsyncQueue("mail", broker_url), runner)
        yield cast("Queue", facade)
        facade.close()


@pytest.fixture
def manual_worker(queue: Queue) -> Iterator[ManualWorker]:
    """A manual worker of the queue ``mail``, which a test runs one step at a time."""
    broker: Broker = queue.context.broker
    manual_worker = ManualWorker(broker, broker.keys("mail"))
    yield manual_worker
    manual_worker.close()


@pytest.fixture
def lake(tmp_path: Path) -> LakeBuilder:
    return LakeBuilder(tmp_path / "lake")


@pytest.fixture
def bulltask(broker_url: str, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run ``bulltask -b URL …``."""
    for name in ("BULLTASK_LAKE", "BULLTASK_APP", "BULLTASK_BROKER_URL"):
        monkeypatch.delenv(name, raising=False)
    return lambda *args, **more: CliRunner().invoke(main, ["-b", broker_url, *map(str, args)], **more)


@pytest.fixture
def run(bulltask: Run) -> Run:
    """Run ``bulltask -b URL job …``."""
    return partial(bulltask, "job")
