"""The topologies on which a test runs: a single server, a Redis Cluster, or a primary that Sentinels monitor.

The fixture ``broker_url`` is the URL of one of them. See "Topologies" in CONTRIBUTING.md.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final, Literal, cast

import pytest

__all__ = ["TOPOLOGY", "Topology", "deselect_other_tests", "parameters"]

Topology = Literal["single", "cluster", "sentinel"]

TOPOLOGY = cast("Topology | Literal['']", os.environ.get("BULLTASK_TEST_TOPOLOGY", ""))
"""The topology of all tests, from ``BULLTASK_TEST_TOPOLOGY``; ``""``: one server, and more for some tests."""

ADDED: Final[tuple[Topology, ...]] = ("cluster", "sentinel")
"""The topologies on which tests with the marker ``every_topology`` also run; the last one only for tests of workers."""


def parameters(metafunc: pytest.Metafunc) -> list[object]:
    """Return the parameters for ``broker_url``: an empty list for a test that runs only on `TOPOLOGY`.

    The name of the test on one server remains unchanged.
    """
    if TOPOLOGY or not ADDED or not _may_change(metafunc.definition):
        return []
    if metafunc.definition.get_closest_marker("every_topology") is None:
        return []
    # Behind sentinels, calls are those to a single server; what differs is how processes find it, and follow it.
    topologies = ADDED if metafunc.definition.get_closest_marker("process") else ADDED[:1]
    added = [pytest.param(topology, marks=pytest.mark.slow) for topology in topologies]
    return [pytest.param("single", id=pytest.HIDDEN_PARAM), *added]


def deselect_other_tests(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep only the tests that can run on `TOPOLOGY`, unless it is a single server."""
    if TOPOLOGY not in {"", "single"}:
        config.hook.pytest_deselected(items=[item for item in items if not _may_change(item)])
        items[:] = [item for item in items if _may_change(item)]


def _may_change(item: pytest.Item) -> bool:
    """Return whether a test takes its server from ``broker_url``, and whether this may be any topology."""
    names: Sequence[str] = getattr(item, "fixturenames", ())
    # A test that uses redis_server itself puts a proxy before it, or stops it.
    return "broker_url" in names and "redis_server" not in names and item.get_closest_marker("one_server") is None
