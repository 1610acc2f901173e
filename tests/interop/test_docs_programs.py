"""The programs of docs/how-to/interop-node.md work as the page describes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bulltask import App
from tests.interop.node_program import node_program
from tests.support.programs import ROOT
from tests.support.worker import Worker

pytestmark = [pytest.mark.interop, pytest.mark.process]

PAGE = ROOT / "docs/how-to/interop-node.md"


def blocks(language: str) -> list[str]:
    """Return the page's blocks of code in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)


def test_the_documented_node_sender_gets_the_result_of_the_python_task(
    node_client: None, broker_url: str, tmp_path: Path
) -> None:
    sender, _ = blocks("js")
    worker = Worker(tmp_path / "worker", blocks("python")[0], settings={"broker_url": broker_url})
    try:
        with node_program(sender, broker_url, tmp_path) as program:
            printed, _ = program.communicate(timeout=20)
        assert printed.split() == re.findall(r"console\.log\(.*// (.*)$", sender, re.MULTILINE)
        assert worker.stop() == 0
    finally:
        worker.close()


def test_the_documented_node_worker_runs_jobs_of_the_python_sender(
    node_client: None, broker_url: str, tmp_path: Path
) -> None:
    _, runner = blocks("js")
    app = App("sender", broker_url)
    with node_program(runner, broker_url, tmp_path):
        job = app.send_task("image.resize", kwargs={"path": "a.jpg", "width": 300}, queue="images")
        assert job.get(timeout=60) == {"name": "image.resize", "width": 300}
        assert job.progress == 50
    app.close()
