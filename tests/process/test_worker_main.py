"""A worker that a program starts itself: ``app.worker_main(…)`` and ``app.start(…)``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bulltask import App
from bulltask.worker.slots import ExitCode

pytestmark = pytest.mark.process

PROGRAM = """
import sys
from bulltask import App

app = App("shop", {url!r})

@app.task(name="add")
def add(x, y):
    return x + y

if __name__ == "__main__":
    print("ended with", {call})
"""


def run(directory: Path, url: str, call: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    program = directory / "shop.py"
    program.write_text(PROGRAM.format(url=url, call=call))
    command = [sys.executable, str(program), *arguments]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ('app.worker_main(["worker", "--burst", "-c", "1", "-l", "warning"])', []),
        ("app.start()", ["worker", "--burst", "-c", "1", "-l", "warning"]),
    ],
)
def test_a_program_runs_a_worker_with_its_own_tasks(
    app: App, broker_url: str, tmp_path: Path, call: str, arguments: list[str]
) -> None:
    sent = app.send_task("add", kwargs={"x": 2, "y": 3})
    done = run(tmp_path, broker_url, call, *arguments)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"ended with {int(ExitCode.OK)}\n", "")
    assert sent.get(timeout=60) == 5


def test_an_invalid_argument_ends_the_program_with_the_error(broker_url: str, tmp_path: Path) -> None:
    done = run(tmp_path, broker_url, 'app.worker_main(["worker", "--bursd"])')
    assert (done.returncode, done.stdout) == (2, "")
    assert "No such option '--bursd'" in done.stderr
