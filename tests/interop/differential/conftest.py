"""Fixtures of the differential tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.interop.differential.pair import Pair
from tests.interop.node_bridge import NodeBridge


@pytest.fixture
def pair(session_node: NodeBridge, broker_url: str) -> Iterator[Pair]:
    """A pair of queues on an empty server."""
    pair = Pair(broker_url, session_node)
    yield pair
    pair.close()
    session_node.reset()
