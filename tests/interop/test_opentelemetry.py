"""Node → Python → Node is one trace: bulltask's spans continue those of bullmq-otel, and the reverse."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.interop.conftest import HERE
from tests.support.spans import EXPORTED, python_spans
from tests.support.worker_harness import WorkerHarness

pytestmark = [pytest.mark.interop, pytest.mark.process]

TASK = """
@app.task(name="ping")
async def ping(text):
    await app.aqueue("back").add("pong", {"text": text})
"""


def test_a_trace_continues_from_node_to_python_and_back(
    node_client: None, harness: WorkerHarness, tmp_path: Path
) -> None:
    file = tmp_path / "spans"
    worker = harness.worker(EXPORTED + TASK, environ={"SPANS": str(file)})
    url = urlsplit(harness.url)
    address = [str(url.hostname), str(url.port), url.path.strip("/") or "0"]
    command = ["node", str(HERE / "node" / "traced.js"), *address, "{default}", "{back}"]
    output = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60, check=True).stdout
    assert worker.stop() == 0
    spans: dict[str, dict[str, Any]] = {}
    for span in [*map(json.loads, output.splitlines()), *python_spans(file)]:
        spans[span["name"]] = span
    path = ["web", "add {default}.ping", "process default", "add back.pong", "process {back}"]
    assert path == [name for name in path if name in spans], sorted(spans)
    assert {spans[name]["traceId"] for name in path} == {spans["web"]["traceId"]}
    assert [spans[name]["parentId"] for name in path] == [None, *(spans[name]["spanId"] for name in path[:-1])]
    node, python = spans["process {back}"]["attributes"], spans["process default"]["attributes"]
    common = {"bullmq.queue.operation", "bullmq.job.name", "bullmq.job.attempts.made", "bullmq.job.processed.timestamp"}
    assert common <= node.keys() & python.keys()
    assert [python[name] for name in ("bullmq.queue.name", "bullmq.job.name", "messaging.system")] == [
        "default",
        "ping",
        "bullmq",
    ]
    assert "hello" not in file.read_text()
