"""A queue that bulltask shares with the newest BullMQ, and what docs/reference/mixed-versions.md says about that."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from bulltask.testing.server import RedisServer
from tests.hazard.page import NEWEST_5, NEWEST_6, PINNED, PYTHON_6, VERSIONS, pairings
from tests.interop.conftest import node_client, sides  # noqa: F401 - a fixture
from tests.interop.node_bridge import NodeBridge
from tests.interop.official.bridge import OfficialPython
from tests.interop.side_by_side import SideBySide

PACKAGES = {PINNED: "bullmq", NEWEST_5: "bullmq-5-newest", NEWEST_6: "bullmq-6-newest"}


class Clients(Mapping[str, NodeBridge]):
    """Official clients by their version, each started when it is asked for."""

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
        """Close their queues and workers."""
        for client in self._started.values():
            client.reset()

    def close(self) -> None:
        """End them."""
        for client in self._started.values():
            client.close()


@pytest.fixture(scope="session")
def session_clients(node_client: None, redis_server: RedisServer, session_processes: set[int]) -> Iterator[Clients]:  # noqa: F811
    """Processes for many tests, which saves half a second in each."""
    made = Clients(redis_server.url, session_processes)
    yield made
    made.close()


@pytest.fixture
def clients(session_clients: Clients, broker_url: str) -> Iterator[Clients]:
    """Official clients by their version, connected to the empty server of ``broker_url``."""
    yield session_clients
    session_clients.reset()


@pytest.fixture(params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    """The version of the other client; every test that asks for it runs with each."""
    found: str = request.param
    return found


@pytest.fixture
def mail(clients: Clients, version: str, broker_url: str, tmp_path: Path) -> Iterator[SideBySide]:
    """Our queue ``mail``, and the newest client of that version on it; "Node" is that client."""
    yield from sides(clients[version], broker_url, tmp_path, hash_tag=True)


@pytest.fixture
def documented(request: pytest.FixtureRequest, version: str) -> str:
    """What the page says about this test and version: ``safe``, ``differs`` or ``unsafe``."""
    name = request.node.originalname
    rows = pairings()
    assert name in rows, f"docs/reference/mixed-versions.md has no row for {name}"
    return rows[name][version]
