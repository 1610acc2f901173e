"""The number of examples, and the processes that the fuzz tests share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.interop.node_bridge import NodeBridge
from tests.support.worker_harness import WorkerHarness

EXAMPLES = int(os.environ.get("BULLTASK_FUZZ_EXAMPLES", "200"))


@pytest.fixture
def harness(broker_url: str, tmp_path: Path, record_property: Callable[[str, object], None]) -> Iterator[WorkerHarness]:
    """A harness for real workers, which are stopped after the test."""
    harness = WorkerHarness(broker_url, tmp_path, record_property)
    yield harness
    harness.close()


@pytest.fixture
def node(broker_url: str) -> Iterator[NodeBridge]:
    """A process with the official client, which must survive everything in its queue."""
    with NodeBridge.to(broker_url) as bridge:
        yield bridge


@pytest.fixture(scope="session")
def examples() -> int:
    """The number of examples of all fuzz tests: ``BULLTASK_FUZZ_EXAMPLES``, 200 by default."""
    return EXAMPLES
