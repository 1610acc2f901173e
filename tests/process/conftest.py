"""The fixtures of tests with real workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.stage import Stage


@pytest.fixture
def stage(broker_url: str, tmp_path: Path, record_property: Callable[[str, object], None]) -> Iterator[Stage]:
    """Everything that a test with real workers needs; ended after it."""
    made = Stage(broker_url, tmp_path, record_property)
    yield made
    made.close()


@pytest.fixture
def stage_on(
    broker_url: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> Iterator[Callable[[str], Stage]]:
    """Make a stage whose queues are on a server that the test harms; the journal stays on the session's."""
    made: list[Stage] = []

    def make(url: str) -> Stage:
        made.append(Stage(broker_url, tmp_path, record_property, broker_url=url))
        return made[-1]

    yield make
    for stage in made:
        stage.close()
