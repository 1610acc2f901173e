"""The programs of docs/reference/official-python.md work with both clients."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bulltask import App
from tests.interop.official.environment import python_of
from tests.support.programs import ROOT
from tests.support.worker import Worker

pytestmark = [pytest.mark.interop, pytest.mark.process]

PAGE = ROOT / "docs/reference/official-python.md"
URL = "redis://localhost:6379"


def block(language: str, name: str) -> str:
    """Return the page's code block that begins with ``# name``; ``py`` marks programs of the official client."""
    matches = re.findall(rf"^```{language}\n(# {name}\n.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert len(matches) == 1
    return str(matches[0])


@contextmanager
def program(name: str, url: str, directory: Path) -> Iterator[subprocess.Popen[str]]:
    """Run one of the official client's programs on a server other than its own; it is killed if it does not end."""
    code = block("py", name)
    assert URL in code
    (directory / name).write_text(code.replace(URL, url.removesuffix("/0")))
    with subprocess.Popen([python_of(2), name], cwd=directory, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_the_documented_sender_gets_the_same_results_from_both_workers(broker_url: str, tmp_path: Path) -> None:
    expected = re.findall(r"print\(.*\)  # (.*)$", block("py", "send.py"), re.MULTILINE)
    settings = {"broker_url": broker_url, "task_default_queue": "emails", "queue_hash_tag": "0"}
    # The module's app replaces the app at the beginning of the test's module.
    worker = Worker(tmp_path / "worker", block("python", "emails.py"), options=["-Q", "emails"], settings=settings)
    try:
        with program("send.py", broker_url, tmp_path) as sender:
            assert sender.communicate(timeout=30)[0].splitlines() == expected
        assert worker.stop() == 0
    finally:
        worker.close()
    with program("worker.py", broker_url, tmp_path), program("send.py", broker_url, tmp_path) as sender:
        assert sender.communicate(timeout=30)[0].splitlines() == expected


def test_the_documented_official_worker_runs_bulltask_jobs(broker_url: str, tmp_path: Path) -> None:
    app = App("sender", broker_url, queue_hash_tag=False)
    with program("worker.py", broker_url, tmp_path):
        job = app.send_task("send", kwargs={"to": "ada@example.com"}, queue="emails")
        assert job.get(timeout=60) == {"sent": "ada@example.com"}
        assert job.progress == 50
    app.close()
