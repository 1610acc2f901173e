"""The fixtures of tests with real workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.worker_harness import WorkerHarness


@pytest.fixture
def harness(broker_url: str, tmp_path: Path, record_property: Callable[[str, object], None]) -> Iterator[WorkerHarness]:
    """Everything that a test with real workers needs; ended after it."""
    made = WorkerHarness(broker_url, tmp_path, record_property)
    yield made
    made.close()


@pytest.fixture
def harness_on(
    broker_url: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> Iterator[Callable[[str], WorkerHarness]]:
    """Make a harness whose queues are on a server that the test harms; the journal stays on the session's."""
    made: list[WorkerHarness] = []

    def make(url: str) -> WorkerHarness:
        made.append(WorkerHarness(broker_url, tmp_path, record_property, broker_url=url))
        return made[-1]

    yield make
    for harness in made:
        harness.close()
