"""What a developer sees of a worker: ``--reload``, Ctrl-C and Ctrl-Z in a terminal, the format of the log."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bulltask.worker.slots import ExitCode
from tests.support.worker import Worker
from tests.support.worker_harness import WorkerHarness

pytestmark = pytest.mark.process

CTRL_C, CTRL_Z = b"\x03", b"\x1a"
VERSION = """
@app.task(name="version")
def version():
    return "old"
"""


def wait_for_text(worker: Worker, pattern: str, timeout: float = 60.0) -> re.Match[str]:
    """Wait until a line that is not JSON matches."""
    with worker._changed:
        while not (found := re.search(pattern, worker.log)):
            if not worker._changed.wait(timeout):
                raise TimeoutError(f"no line matches {pattern!r}:\n{worker.log}")
    return found


@contextmanager
def terminal_worker(harness: WorkerHarness, *options: str, children: int = 2) -> Iterator[tuple[Worker, int]]:
    """A worker in the foreground of a terminal, and what types in this terminal; the log does not go there."""
    master, slave = pty.openpty()
    worker = harness.worker(VERSION, options=options, prefix=["setsid", "--ctty"], stdin=slave, children=children)
    os.close(slave)
    try:
        yield worker, master
    finally:
        os.close(master)


# ---- Ctrl-C and Ctrl-Z ----------------------------------------------------------------------------------------------


def test_the_first_ctrl_c_says_what_the_second_does(harness: WorkerHarness) -> None:
    with terminal_worker(harness) as (worker, terminal):
        job = harness.hold()
        harness.wait_for_start(job)
        os.write(terminal, CTRL_C)
        hint = worker.wait_for_line("Worker stopping", mode="warm", running=1)[0]["hint"]
        assert hint == "Another Ctrl-C or TERM kills the running jobs, which go back to their queues"
        os.write(terminal, CTRL_C)
        assert "hint" not in worker.wait_for_line("Worker stopping", mode="cold", running=1)[0]
        assert worker.wait() == ExitCode.OK
        assert job.state == "waiting"


def test_ctrl_z_pauses_the_worker_and_prints_the_command_that_resumes_it(harness: WorkerHarness) -> None:
    with terminal_worker(harness) as (worker, terminal):
        worker.wait_for_line("Child started")
        os.write(terminal, CTRL_Z)
        hint = worker.wait_for_line("Worker paused", running=0)[0]["hint"]
        job = harness.app.send_task("quick")
        assert hint == f"To resume it: kill -CONT {worker.pid}"
        subprocess.run(["sh", "-c", hint.partition(": ")[2]], check=True)
        worker.wait_for_line("Worker resumed")
        assert job.get(timeout=60) is None
        assert worker.stop() == ExitCode.OK


# ---- --log-format ---------------------------------------------------------------------------------------------------


def test_a_worker_writes_text_without_a_terminal_and_json_in_a_terminal_if_asked_to(harness: WorkerHarness) -> None:
    text = harness.worker(options=["--burst", "--log-format", "text"], children=1)
    master, slave = pty.openpty()
    to_terminal = ["setsid", "--ctty", "sh", "-c", 'exec "$@" 2>/dev/tty', "sh"]
    settings = {"log_format": "json"}
    other = harness.worker(settings=settings, children=1, options=["--burst"], prefix=to_terminal, stdin=slave)
    written = b""
    with os.fdopen(master, "rb", buffering=0) as terminal:
        while b"Worker stopped" not in written:
            written += terminal.read(65536)
        os.close(slave)
        assert other.wait() == ExitCode.OK
    lines = [json.loads(line) for line in written.decode().splitlines()]
    assert lines[-1]["event"] == "Worker stopped"
    assert text.wait() == ExitCode.OK
    assert text.lines == []
    assert re.search(r"Worker started .*tested", text.log)
    assert "\x1b" not in text.log, "colors are for terminals"


# ---- --reload -------------------------------------------------------------------------------------------------------


def test_reload_restarts_the_worker_when_its_code_changes_also_after_an_error(harness: WorkerHarness) -> None:
    with terminal_worker(harness, "--reload", children=1) as (worker, terminal):
        module = Path(f"/proc/{worker.pid}/cwd").readlink() / "tested.py"
        code = module.read_text()
        worker.wait_for_line("Worker started")
        assert harness.app.send_task("version").get(timeout=60) == "old"

        running = harness.hold()
        harness.wait_for_start(running)
        module.write_text(code.replace('"old"', '"brand new"'))
        wait_for_text(worker, r"Restarting, because of a change: tested\.py")
        worker.wait_for_line("Worker stopping", mode="restart", running=1)
        harness.open_gate()
        assert running.get(timeout=60) == "gate"
        assert harness.app.send_task("version").get(timeout=60) == "brand new"

        module.write_text("def broken(:")
        wait_for_text(worker, r"The worker exited with code 1: it starts again when a Python file changes")
        module.write_text(code.replace('"old"', '"newest"'))
        assert harness.app.send_task("version").get(timeout=60) == "newest"

        last = harness.hold()
        harness.wait_for_start(last)
        os.write(terminal, CTRL_C)
        worker.wait_for_line("Worker stopping", mode="warm", running=1)
        harness.open_gate()
        assert worker.wait() == ExitCode.OK
        assert last.get(timeout=60) == "gate", "one Ctrl-C is a warm shutdown"
        assert worker.logged("Worker stopping", mode="cold") == []


def test_reload_forwards_signals_and_ends_with_the_workers_exit_code(harness: WorkerHarness) -> None:
    worker = harness.worker(options=["--reload"], children=1)
    worker.wait_for_line("Worker started")
    worker.send(signal.SIGTSTP)
    worker.wait_for_line("Worker paused")
    assert worker.stop() == ExitCode.OK
    assert len(worker.logged("Worker stopped")) == 1
    invalid = harness.worker(options=["--reload", "-X", "default"])
    assert invalid.wait() == ExitCode.USAGE


def test_reload_without_watchfiles_says_what_to_install(tmp_path: Path) -> None:
    code = "import sys; sys.modules['watchfiles'] = None; from bulltask.__main__ import run; run()"
    command = [sys.executable, "-c", code, "worker", "-A", "tested:app", "--reload"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.strip()) == (
        1,
        "Error: --reload needs watchfiles, which is not installed: pip install 'bulltask[reload]'",
    )
