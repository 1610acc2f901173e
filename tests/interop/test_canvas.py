"""Steps of a canvas run on Node.js workers: they read the results before them as BullMQ's children values."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bulltask import App, group
from tests.interop.node_bridge import NodeBridge
from tests.support.programs import ROOT
from tests.support.worker import Worker

pytestmark = [pytest.mark.interop, pytest.mark.process]

TASKS = """
@app.task(name="add", queue="python")
def add(x, y):
    return x + y


@app.task(name="sorted_values", queue="python")
def sorted_values(gathered):
    return sorted(gathered["values"].values())
"""


@pytest.fixture
def app(session_node: NodeBridge, broker_url: str, tmp_path: Path) -> Iterator[App]:
    settings = {"broker_url": broker_url, "worker_concurrency": 1}
    environ = {"PYTHONPATH": str(ROOT), "JOURNAL_URL": broker_url}
    worker = Worker(tmp_path / "worker", TASKS, options=["-Q", "python"], settings=settings, environ=environ)
    app = App("sender", broker_url, task_canvas_queue="python")
    yield app
    app.close()
    worker.close()
    session_node.reset()


def test_a_chord_and_a_fan_out_continue_across_node_and_python(app: App, session_node: NodeBridge) -> None:
    add, gather = app.signature("add", queue="python"), app.signature("gather", queue="node")
    values = app.signature("sorted_values", queue="python")
    session_node.call("worker.start", queue="{node}", processor="gather", args={})
    members = group(add.clone(kwargs={"x": n, "y": n}) for n in (1, 2, 3))
    assert (members | gather | values).delay().get(timeout=60) == [2, 4, 6]
    assert (gather | group(values, values.clone())).delay().get(timeout=60) == [[], []]


def test_the_jobs_after_one_that_node_fails_fail_with_its_error(app: App, session_node: NodeBridge) -> None:
    session_node.call("worker.start", queue="{node}", processor="fail", args={})
    failing = app.signature("any", queue="node", max_retries=0)
    values = app.signature("sorted_values", queue="python")
    for canvas in (failing | values, failing | group(values, values.clone()), group(failing, failing.clone()) | values):
        outcome = canvas.delay().get(timeout=60, propagate=False)
        assert "it failed" in str(outcome)
