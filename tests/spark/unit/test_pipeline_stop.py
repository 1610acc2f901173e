"""Stopping a stream after its batch, without a JVM (with one: tests/spark/local/test_pipeline_commands.py)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bulltask.clock import mono_ms
from bulltask.errors import ConfigError
from bulltask.spark import pipeline as module
from bulltask.spark.pipeline import Pipeline, stop_after_batch


class Query:
    """Spark's query as far as it is asked: so many batches are done at each look, and one is made unless it is idle."""

    def __init__(self, done: list[int], *, idle: bool = False, looks: int = 99) -> None:
        self._done, self._looks = iter([*done, *[done[-1]] * 99]), looks
        self.status, self.stops = {"isTriggerActive": not idle}, 0

    @property
    def isActive(self) -> bool:
        self._looks -= 1
        return not self.stops and self._looks >= 0

    @property
    def lastProgress(self) -> dict[str, int] | None:
        number = next(self._done)
        return None if number < 0 else {"batchId": number}

    def awaitTermination(self, timeout: float) -> bool:
        assert timeout > 0
        return not self.isActive

    def stop(self) -> None:
        self.stops += 1


def looked(query: Query, *, hurried_at: int = 99) -> int:
    """How often it was waited for before it was stopped."""
    looks: Iterator[int] = iter(range(1, 200))
    last = 0

    def hurried(seconds: float) -> bool:
        nonlocal last
        assert 0 < seconds <= 1
        last = next(looks)
        return last >= hurried_at

    stop_after_batch(query, hurried)  # type: ignore[arg-type]
    assert query.stops == 1
    return last


def test_a_batch_is_waited_for_and_the_next_one_is_not() -> None:
    assert looked(Query([4, 4, 4, 5])) == 2
    assert looked(Query([-1, -1, -1, -1, 0])) == 3  # the first one


def test_a_stream_that_waits_for_its_trigger_is_stopped_at_once() -> None:
    assert looked(Query([4], idle=True)) == 0


def test_an_urgent_stop_does_not_wait() -> None:
    assert looked(Query([4], looks=99), hurried_at=2) == 2


def test_a_stop_does_not_wait_for_a_stream_that_has_ended() -> None:
    assert looked(Query([4], looks=3)) == 3


@pytest.fixture
def pipeline(tmp_path: Path) -> Pipeline:
    return Pipeline(None, tmp_path)  # type: ignore[arg-type]  # no session is asked for anything


def feeding(monkeypatch: pytest.MonkeyPatch, pipeline: Pipeline, query: Query) -> None:
    fed: Any = {pipeline.layout.root: (query, None)}
    monkeypatch.setattr(module, "_RUNNING", fed)


def test_stop_ends_the_stream_of_its_lake_and_of_no_other(
    pipeline: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = Query([4, 4, 5])
    feeding(monkeypatch, pipeline, query)
    Pipeline(None, tmp_path / "other").stop()  # type: ignore[arg-type]
    assert query.stops == 0
    pipeline.stop()
    assert query.stops == 1


def test_stop_waits_no_longer_than_it_may(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    query, began = Query([4], looks=1_000_000), mono_ms()
    feeding(monkeypatch, pipeline, query)
    pipeline.stop(within=0)
    assert query.stops == 1
    assert mono_ms() - began < 10_000
    with pytest.raises(ConfigError, match="within"):
        pipeline.stop(within=-1)
