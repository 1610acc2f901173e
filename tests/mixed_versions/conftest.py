"""Fixtures for a queue that bulltask shares with BullMQ, and the outcomes in docs/reference/mixed-versions.md."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from bulltask.testing.worker import RedisServer
from tests.interop.conftest import node_client, open_interop_queue  # noqa: F401 - a fixture
from tests.interop.interop_queue import InteropQueue
from tests.interop.node_bridge import NodeBridge
from tests.interop.official.bridge import OfficialPython
from tests.mixed_versions.page import NEWEST_5, NEWEST_6, PINNED, PYTHON_6, VERSIONS, documented_outcomes

PACKAGES = {PINNED: "bullmq", NEWEST_5: "bullmq-5-newest", NEWEST_6: "bullmq-6-newest"}


class Clients(Mapping[str, NodeBridge]):
    """Official clients by version, started on first access."""

    def __init__(self, url: str, allowed: set[int]) -> None:
        self._url, self._allowed = url, allowed
        self._started: dict[str, NodeBridge] = {}

    def __getitem__(self, version: str) -> NodeBridge:
        if version not in self._started:
            official = version == PYTHON_6
            kind, package = (OfficialPython, "3") if official else (NodeBridge, PACKAGES[version])
            self._started[version] = kind.to(self._url, package=package)
            self._allowed.add(self._started[version].pid)
        return self._started[version]

    def __iter__(self) -> Iterator[str]:
        return iter((*PACKAGES, PYTHON_6))

    def __len__(self) -> int:
        return len(PACKAGES) + 1

    def reset(self) -> None:
        """Close the queues and workers of all clients."""
        for client in self._started.values():
            client.reset()

    def close(self) -> None:
        """Close all clients."""
        for client in self._started.values():
            client.close()


@pytest.fixture(scope="session")
def session_clients(node_client: None, redis_server: RedisServer, session_processes: set[int]) -> Iterator[Clients]:  # noqa: F811
    """Official clients whose processes are shared by all tests, which saves half a second per test."""
    clients = Clients(redis_server.url, session_processes)
    yield clients
    clients.close()


@pytest.fixture
def clients(session_clients: Clients, broker_url: str) -> Iterator[Clients]:
    """Official clients by version, connected to the empty server of ``broker_url``."""
    yield session_clients
    session_clients.reset()


@pytest.fixture(params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    """The version of the official client; tests with this fixture run once per version."""
    found: str = request.param
    return found


@pytest.fixture
def mail(clients: Clients, version: str, broker_url: str, tmp_path: Path) -> Iterator[InteropQueue]:
    """bulltask and an official client of ``version`` on the queue ``mail``."""
    yield from open_interop_queue(clients[version], broker_url, tmp_path, hash_tag=True)


@pytest.fixture
def documented(request: pytest.FixtureRequest, version: str) -> str:
    """The documented outcome of this test and version: ``safe``, ``differs`` or ``unsafe``."""
    name = request.node.originalname
    rows = documented_outcomes()
    assert name in rows, f"docs/reference/mixed-versions.md has no row for {name}"
    return rows[name][version]
