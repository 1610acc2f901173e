"""A query is stopped after its batch, without a JVM; tests/spark/local/test_pipeline_commands.py needs one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bulltask.errors import ConfigError
from bulltask.jobs.clock import mono_ms
from bulltask.spark import pipeline as module
from bulltask.spark.pipeline import Pipeline, stop_after_batch


class FakeQuery:
    """A fake Spark query; ``done`` has the batch numbers that ``lastProgress`` returns, one for each access."""

    def __init__(self, done: list[int], *, idle: bool = False, polls: int = 99) -> None:
        self._done, self._polls = iter([*done, *[done[-1]] * 99]), polls
        self.status, self.stops = {"isTriggerActive": not idle}, 0

    @property
    def isActive(self) -> bool:
        self._polls -= 1
        return not self.stops and self._polls >= 0

    @property
    def lastProgress(self) -> dict[str, int] | None:
        number = next(self._done)
        return None if number < 0 else {"batchId": number}

    def awaitTermination(self, timeout: float) -> bool:
        assert timeout > 0
        return not self.isActive

    def stop(self) -> None:
        self.stops += 1


def waits_before_stop(query: FakeQuery, *, urgent_at: int = 99) -> int:
    """Return how often ``stop_after_batch`` waited before it stopped the query."""
    waits: Iterator[int] = iter(range(1, 200))
    last = 0

    def urgent(seconds: float) -> bool:
        nonlocal last
        assert 0 < seconds <= 1
        last = next(waits)
        return last >= urgent_at

    stop_after_batch(query, urgent)  # type: ignore[arg-type]
    assert query.stops == 1
    return last


def test_a_stop_waits_for_the_current_batch_only() -> None:
    assert waits_before_stop(FakeQuery([4, 4, 4, 5])) == 2
    assert waits_before_stop(FakeQuery([-1, -1, -1, -1, 0])) == 3  # the first batch


def test_a_query_that_waits_for_its_trigger_is_stopped_immediately() -> None:
    assert waits_before_stop(FakeQuery([4], idle=True)) == 0


def test_an_urgent_stop_does_not_wait() -> None:
    assert waits_before_stop(FakeQuery([4], polls=99), urgent_at=2) == 2


def test_a_stop_does_not_wait_for_an_ended_query() -> None:
    assert waits_before_stop(FakeQuery([4], polls=3)) == 3


@pytest.fixture
def pipeline(tmp_path: Path) -> Pipeline:
    return Pipeline(None, tmp_path)  # type: ignore[arg-type]  # the session is not used


def set_running_query(monkeypatch: pytest.MonkeyPatch, pipeline: Pipeline, query: FakeQuery) -> None:
    running: Any = {(pipeline.lake.root, ""): (query, None)}
    monkeypatch.setattr(module, "_RUNNING_QUERIES", running)


def test_stop_ends_only_the_query_of_its_lake(
    pipeline: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = FakeQuery([4, 4, 5])
    set_running_query(monkeypatch, pipeline, query)
    Pipeline(None, tmp_path / "other").stop()  # type: ignore[arg-type]
    assert query.stops == 0
    pipeline.stop()
    assert query.stops == 1


def test_stop_waits_no_longer_than_its_limit(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    query, start_ms = FakeQuery([4], polls=1_000_000), mono_ms()
    set_running_query(monkeypatch, pipeline, query)
    pipeline.stop(timeout=0)
    assert query.stops == 1
    assert mono_ms() - start_ms < 10_000
    with pytest.raises(ConfigError, match="timeout"):
        pipeline.stop(timeout=-1)
