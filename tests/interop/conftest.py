"""Fixtures that need Node.js: they install the official client once, and run it in a process."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bulltask.testing.worker import RedisServer
from tests.interop.board import Board
from tests.interop.bull_bridge import BullBridge
from tests.interop.interop_queue import InteropQueue
from tests.interop.migration_harness import MigrationHarness
from tests.interop.node_bridge import NodeBridge
from tests.support.worker_harness import WorkerHarness

HERE = Path(__file__).parent
LOCK_FILE = HERE / "package-lock.json"
INSTALLED = HERE / "node_modules" / ".package-lock.json"  # npm writes it last
INSTALL = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"]


@pytest.fixture(scope="session")
def node_client() -> None:
    """Install BullMQ's Node client (package-lock.json) into tests/interop/node_modules, unless it is installed."""
    if not (shutil.which("node") and shutil.which("npm")):
        needs = "needs Node.js 18 or newer and npm (apt install nodejs npm)"
        if os.environ.get("CI"):
            pytest.fail(needs, pytrace=False)
        pytest.skip(needs)
    with LOCK_FILE.open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one of pytest-xdist's workers installs, the others wait
        if not is_installed():
            completed = subprocess.run(INSTALL, cwd=HERE, capture_output=True, text=True, check=False)
            if completed.returncode:
                pytest.fail(f"{' '.join(INSTALL)} failed:\n{completed.stdout}{completed.stderr}", pytrace=False)


@pytest.fixture
def node(node_client: None, broker_url: str) -> Iterator[NodeBridge]:
    """A Node process with the official client, connected to the empty server of ``broker_url``."""
    with NodeBridge.to(broker_url) as bridge:
        yield bridge


@pytest.fixture(scope="session")
def session_node(node_client: None, redis_server: RedisServer, session_processes: set[int]) -> Iterator[NodeBridge]:
    """One Node process for many tests, which saves half a second in each; reset it before and after use."""
    with NodeBridge.to(redis_server.url) as bridge:
        session_processes.add(bridge.pid)
        yield bridge


@pytest.fixture(scope="session")
def session_board(node_client: None, redis_server: RedisServer, session_processes: set[int]) -> Iterator[Board]:
    """One bull-board for many tests: two queues, one whose name has no hash tag, and a read-only one."""
    names = ("{default}", "{parts}", "default", "{look}")
    with Board(redis_server.url, [{"name": name, "readOnlyMode": name == "{look}"} for name in names]) as board:
        session_processes.add(board.pid)
        yield board


@pytest.fixture
def board(session_board: Board, broker_url: str) -> Board:
    """bull-board on the empty server of ``broker_url``."""
    return session_board


@pytest.fixture
def harness(broker_url: str, tmp_path: Path, record_property: Callable[[str, object], None]) -> Iterator[WorkerHarness]:
    """bulltask's workers and senders, for tests in which Node only reads."""
    harness = WorkerHarness(broker_url, tmp_path, record_property)
    yield harness
    harness.close()


@pytest.fixture
def mail(session_node: NodeBridge, broker_url: str, tmp_path: Path) -> Iterator[InteropQueue]:
    """The queue ``mail``, whose name in BullMQ is ``{mail}``."""
    yield from open_interop_queue(session_node, broker_url, tmp_path, hash_tag=True)


@pytest.fixture(params=["braces", "no braces"])
def any_mail(
    request: pytest.FixtureRequest, session_node: NodeBridge, broker_url: str, tmp_path: Path
) -> Iterator[InteropQueue]:
    """The queue ``mail`` with a hash tag in BullMQ, and in a second run without (``queue_hash_tag=False``)."""
    yield from open_interop_queue(session_node, broker_url, tmp_path, hash_tag=request.param == "braces")


@pytest.fixture(params=["moved", "in place"])
def migration(
    request: pytest.FixtureRequest, session_node: NodeBridge, session_bull: BullBridge, broker_url: str
) -> Iterator[MigrationHarness]:
    """Bull 4's queue ``mail``, to be migrated to ``{mail}``, and in a second run to BullMQ's ``mail`` in place."""
    migration = MigrationHarness(broker_url, session_bull, session_node, in_place=request.param == "in place")
    yield migration
    migration.close()
    session_node.reset()


@pytest.fixture(scope="session")
def session_bull(node_client: None, redis_server: RedisServer, session_processes: set[int]) -> Iterator[BullBridge]:
    """One Node process with Bull 4 for many tests."""
    with BullBridge.to(redis_server.url, package="bull") as bridge:
        session_processes.add(bridge.pid)
        yield bridge


def open_interop_queue(node: NodeBridge, url: str, directory: Path, *, hash_tag: bool) -> Iterator[InteropQueue]:
    """Open a queue that both clients share, and close it and its clients after the test."""
    queue = InteropQueue(url, node, directory, hash_tag=hash_tag)
    yield queue
    queue.close()
    node.reset()


def is_installed() -> bool:
    """Return whether npm has installed the packages of the lock file, except those of other platforms."""
    if not INSTALLED.exists():
        return False
    locked, installed = packages(LOCK_FILE), packages(INSTALLED)
    return all(name in installed or package.get("optional") for name, package in locked.items()) and all(
        locked.get(name, {}).get("integrity") == package.get("integrity") for name, package in installed.items()
    )


def packages(path: Path) -> dict[str, dict[str, Any]]:
    """Return the packages of a lock file by their paths, without the project itself."""
    paths: dict[str, dict[str, Any]] = json.loads(path.read_text())["packages"]
    return {name: package for name, package in paths.items() if name}
