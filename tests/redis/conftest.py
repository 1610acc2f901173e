"""Fixtures of tests that need a server and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from click.testing import CliRunner, Result

from bulltask.app import App
from bulltask.cli.main import main
from bulltask.events import Bus, Event
from bulltask.queue import AsyncQueue, Queue
from bulltask.transport.broker import Broker
from bulltask.transport.client import Client
from tests.support.lake import LakeBuilder
from tests.support.manual_worker import ManualWorker
from tests.support.sync_facade import SyncFacade

Run = Callable[..., Result]


@pytest.fixture
def client(app: App) -> Iterator[Client]:
    """A client of the app's, as a supervisor and a child have one."""
    made = app.broker.client()
    yield made
    made.close()


@pytest.fixture
def emitted() -> list[Event]:
    """What the bus has emitted."""
    return []


@pytest.fixture
def bus(emitted: list[Event]) -> Bus:
    """A bus whose events can be read."""
    made = Bus()
    made.subscribe(Event, emitted.append)
    return made


@pytest.fixture(params=["sync", "async"])
def queue(request: pytest.FixtureRequest, broker_url: str) -> Iterator[Queue]:
    """The queue ``mail``, through its sync class and through its async one."""
    if request.param == "sync":
        with Queue("mail", broker_url) as made:
            yield made
        return
    with asyncio.Runner() as runner:
        facade: Any = SyncFacade(AsyncQueue("mail", broker_url), runner)
        yield cast("Queue", facade)
        facade.close()


@pytest.fixture
def manual_worker(queue: Queue) -> Iterator[ManualWorker]:
    """A manual worker of the queue ``mail``, one step at a time."""
    broker: Broker = queue.context.broker
    made = ManualWorker(broker, broker.keys("mail"))
    yield made
    made.close()


@pytest.fixture
def lake(tmp_path: Path) -> LakeBuilder:
    return LakeBuilder(tmp_path / "lake")


@pytest.fixture
def run(broker_url: str, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run ``bulltask -b URL job …``."""
    for name in ("BULLTASK_LAKE", "BULLTASK_APP", "BULLTASK_BROKER_URL"):
        monkeypatch.delenv(name, raising=False)

    def ran(*words: object) -> Result:
        return CliRunner().invoke(main, ["-b", broker_url, "job", *map(str, words)])

    return ran
