"""Fixtures of tests with real workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.worker_harness import WorkerHarness


@pytest.fixture
def harness(
    broker_url: str, single_url: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> Iterator[WorkerHarness]:
    """A harness for real workers, which are stopped after the test. The journal is on the session's single server."""
    harness = WorkerHarness(single_url, tmp_path, record_property, broker_url=broker_url)
    yield harness
    harness.close()


@pytest.fixture
def harness_on(
    single_url: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> Iterator[Callable[[str], WorkerHarness]]:
    """Return a factory of harnesses with queues on a given server, and the journal on the session's server."""
    harnesses: list[WorkerHarness] = []

    def make(url: str) -> WorkerHarness:
        harnesses.append(WorkerHarness(single_url, tmp_path, record_property, broker_url=url))
        return harnesses[-1]

    yield make
    for harness in harnesses:
        harness.close()
