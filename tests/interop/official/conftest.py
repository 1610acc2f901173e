"""One queue from both sides: bulltask, and the official Python client."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from bulltask.testing.flaky import FlakyProxy
from bulltask.testing.server import RedisServer
from tests.interop.node_bridge import connection_of
from tests.interop.official.bridge import OfficialPython
from tests.interop.side_by_side import SideBySide

Officials = Callable[[str], OfficialPython]


@pytest.fixture(scope="session")
def officials(redis_server: RedisServer, session_processes: set[int]) -> Iterator[Officials]:
    """One process with the official client of a major version for many tests; reset it after use."""
    made: dict[str, OfficialPython] = {}
    with ExitStack() as stack:

        def of(major: str) -> OfficialPython:
            if major not in made:
                made[major] = stack.enter_context(OfficialPython.to(redis_server.url, package=major))
                session_processes.add(made[major].pid)
            return made[major]

        yield of


@pytest.fixture
def mail(request: pytest.FixtureRequest, officials: Officials, broker_url: str, tmp_path: Path) -> Iterator[SideBySide]:
    """Our queue ``mail``, which the official client calls ``{mail}``; what is "Node" in its methods is that client.

    It is that of the major version that is the parameter (versions.py), else 2.
    """
    yield from sides(officials(getattr(request, "param", "2")), broker_url, tmp_path, hash_tag=True)


@pytest.fixture(params=["braces", "no braces"])
def either(
    request: pytest.FixtureRequest, officials: Officials, broker_url: str, tmp_path: Path
) -> Iterator[SideBySide]:
    """The same, and once more with ``queue_hash_tag=False``, where both call it ``mail``."""
    yield from sides(officials("2"), broker_url, tmp_path, hash_tag=request.param == "braces")


def sides(official: OfficialPython, url: str, directory: Path, *, hash_tag: bool) -> Iterator[SideBySide]:
    """Both sides of a queue; what is still open is closed afterwards."""
    made = SideBySide(url, official, directory, hash_tag=hash_tag)
    yield made
    made.close()
    official.reset()


@pytest.fixture
def flaky(broker_url: str) -> Iterator[FlakyProxy]:
    """A way to the server that the test may break."""
    with FlakyProxy("127.0.0.1", connection_of(broker_url)["port"]) as proxy:
        yield proxy
