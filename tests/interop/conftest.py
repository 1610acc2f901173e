"""Fixtures that need Node.js: the official client, installed once, and a process that runs it."""

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

from bulltask.testing.server import RedisServer
from tests.interop.board import Board
from tests.interop.bull_bridge import BullBridge
from tests.interop.migrating import Migrating
from tests.interop.node_bridge import NodeBridge
from tests.interop.side_by_side import SideBySide
from tests.support.worker_harness import WorkerHarness

HERE = Path(__file__).parent
LOCK_FILE = HERE / "package-lock.json"
INSTALLED = HERE / "node_modules" / ".package-lock.json"  # npm writes it last
INSTALL = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"]


@pytest.fixture(scope="session")
def node_client() -> None:
    """Install BullMQ's Node client as package-lock.json has it into tests/interop/node_modules, unless it is there."""
    if not (shutil.which("node") and shutil.which("npm")):
        needs = "needs Node.js 18 or newer and npm (apt install nodejs npm)"
        if os.environ.get("CI"):
            pytest.fail(needs, pytrace=False)
        pytest.skip(needs)
    with LOCK_FILE.open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one of pytest-xdist's workers installs, the others wait
        if not is_installed():
            done = subprocess.run(INSTALL, cwd=HERE, capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.fail(f"{' '.join(INSTALL)} failed:\n{done.stdout}{done.stderr}", pytrace=False)


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
    """One bull-board for many tests: two queues, one that is spelled without braces, one that it only looks at."""
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
    """Our workers and senders, where Node only looks on."""
    made = WorkerHarness(broker_url, tmp_path, record_property)
    yield made
    made.close()


@pytest.fixture
def mail(session_node: NodeBridge, broker_url: str, tmp_path: Path) -> Iterator[SideBySide]:
    """Our queue ``mail``, which Node calls ``{mail}``."""
    yield from sides(session_node, broker_url, tmp_path, hash_tag=True)


@pytest.fixture(params=["braces", "no braces"])
def either(
    request: pytest.FixtureRequest, session_node: NodeBridge, broker_url: str, tmp_path: Path
) -> Iterator[SideBySide]:
    """The same, and once more with ``queue_hash_tag=False``, where Node calls it ``mail`` as we do."""
    yield from sides(session_node, broker_url, tmp_path, hash_tag=request.param == "braces")


@pytest.fixture(params=["moved", "in place"])
def migrating(
    request: pytest.FixtureRequest, session_node: NodeBridge, session_bull: BullBridge, broker_url: str
) -> Iterator[Migrating]:
    """Bull 4's queue ``mail``, to be migrated to ``{mail}``, and once more to BullMQ's ``mail`` with the same keys."""
    made = Migrating(broker_url, session_bull, session_node, in_place=request.param == "in place")
    yield made
    made.close()
    session_node.reset()


@pytest.fixture(scope="session")
def session_bull(node_client: None, redis_server: RedisServer, session_processes: set[int]) -> Iterator[BullBridge]:
    """One Node process with Bull 4 for many tests."""
    with BullBridge.to(redis_server.url, package="bull") as bridge:
        session_processes.add(bridge.pid)
        yield bridge


def sides(node: NodeBridge, url: str, directory: Path, *, hash_tag: bool) -> Iterator[SideBySide]:
    """Both sides of a queue; what is still open is closed afterwards."""
    made = SideBySide(url, node, directory, hash_tag=hash_tag)
    yield made
    made.close()
    node.reset()


def is_installed() -> bool:
    """True when what npm has installed is what the lock file names, but for packages of other platforms."""
    if not INSTALLED.exists():
        return False
    wanted, there = packages(LOCK_FILE), packages(INSTALLED)
    return all(name in there or package.get("optional") for name, package in wanted.items()) and all(
        wanted.get(name, {}).get("integrity") == package.get("integrity") for name, package in there.items()
    )


def packages(path: Path) -> dict[str, dict[str, Any]]:
    """Return the packages of a lock file by their paths, without the project itself."""
    found: dict[str, dict[str, Any]] = json.loads(path.read_text())["packages"]
    return {name: package for name, package in found.items() if name}
