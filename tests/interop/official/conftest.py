"""Fixtures of queues that bulltask shares with the official Python client."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from bulltask.testing.worker import RedisServer
from tests.interop.interop_queue import InteropQueue
from tests.interop.node_bridge import connection_of
from tests.interop.official.bridge import OfficialPython
from tests.support.flaky_proxy import FlakyProxy

Officials = Callable[[str], OfficialPython]


@pytest.fixture(scope="session")
def officials(redis_server: RedisServer, session_processes: set[int]) -> Iterator[Officials]:
    """One process with the official client of a major version for many tests; reset it after use."""
    processes: dict[str, OfficialPython] = {}
    with ExitStack() as stack:

        def start(major: str) -> OfficialPython:
            if major not in processes:
                processes[major] = stack.enter_context(OfficialPython.to(redis_server.url, package=major))
                session_processes.add(processes[major].pid)
            return processes[major]

        yield start


@pytest.fixture
def mail(
    request: pytest.FixtureRequest, officials: Officials, broker_url: str, tmp_path: Path
) -> Iterator[InteropQueue]:
    """The queue ``mail``, whose name in the official client is ``{mail}``; methods named after Node use that client.

    The fixture's parameter is the client's major version (versions.py), 2 by default.
    """
    yield from open_interop_queue(officials(getattr(request, "param", "2")), broker_url, tmp_path, hash_tag=True)


@pytest.fixture(params=["braces", "no braces"])
def any_mail(
    request: pytest.FixtureRequest, officials: Officials, broker_url: str, tmp_path: Path
) -> Iterator[InteropQueue]:
    """The queue ``mail`` with a hash tag in BullMQ, and in a second run without (``queue_hash_tag=False``)."""
    yield from open_interop_queue(officials("2"), broker_url, tmp_path, hash_tag=request.param == "braces")


def open_interop_queue(
    official: OfficialPython, url: str, directory: Path, *, hash_tag: bool
) -> Iterator[InteropQueue]:
    """Open a queue that both clients share, and close it and its clients after the test."""
    shared = InteropQueue(url, official, directory, hash_tag=hash_tag)
    yield shared
    shared.close()
    official.reset()


@pytest.fixture
def flaky(broker_url: str) -> Iterator[FlakyProxy]:
    """A proxy to the server that the test may break."""
    with FlakyProxy("127.0.0.1", connection_of(broker_url)["port"]) as proxy:
        yield proxy
