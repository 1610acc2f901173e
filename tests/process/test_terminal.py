"""Workers in a terminal, and without one."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bulltask import App
from bulltask.jobs.clock import mono_s

pytestmark = [pytest.mark.process, pytest.mark.slow]

TASKS = """
    import os
    from bulltask import App

    app = App("tested", {url!r})

    @app.task(name="debugged")
    def debugged(x):
        y = x + 1
        breakpoint()
        return y

    @app.task(name="streams")
    def streams():
        os.write(2, b"printed by a library")
        return [os.readlink(f"/proc/self/fd/{{number}}") for number in range(3)]
"""


class Terminal:
    """A worker in a terminal of its own, as in a shell."""

    def __init__(self, directory: Path, *options: str) -> None:
        self.output = ""
        self._read = 0
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            os.chdir(directory)
            words = [sys.executable, "-m", "bulltask", "worker", "-A", "tasks", "-c", "1", *options]
            os.execve(sys.executable, words, {**os.environ, "NO_COLOR": "1"})

    def read_until(self, text: str) -> str:
        """Read until ``text`` follows what the last call returned, for up to a minute; return the output up to it."""
        start, until_s = self._read, mono_s() + 60
        while (found := self.output.find(text, start)) < 0:
            assert select.select([self._fd], [], [], max(0, until_s - mono_s()))[0], self.output
            self.output += os.read(self._fd, 4096).decode()
        self._read = found + len(text)
        return self.output[start : self._read]

    def type(self, text: str) -> None:
        """Type keys."""
        os.write(self._fd, text.encode())

    def close(self) -> None:
        """End the worker."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self._fd)


@pytest.fixture
def directory(tmp_path: Path, broker_url: str) -> Path:
    lines = TASKS.format(url=broker_url).splitlines()
    (tmp_path / "tasks.py").write_text("\n".join(line[4:] for line in lines))
    return tmp_path


@pytest.fixture
def terminal(directory: Path) -> Iterator[Terminal]:
    terminal = Terminal(directory)
    yield terminal
    terminal.close()


def test_a_breakpoint_in_a_task_opens_the_debugger_in_the_terminal(terminal: Terminal, app: App) -> None:
    result = app.send_task("debugged", kwargs={"x": 41})
    terminal.read_until("(Pdb)")
    terminal.type("p y * 100\n")
    terminal.read_until("4200")
    terminal.type("continue\n")
    assert result.get(timeout=60) == 42
    terminal.type("\x03")
    terminal.read_until("mode=warm")
    assert "(Pdb)" not in terminal.read_until("exit_code=0")


@pytest.mark.parametrize("closed", ["2>&-", "<&- >&- 2>&-"])
def test_a_worker_runs_with_closed_standard_streams(directory: Path, app: App, closed: str) -> None:
    result = app.send_task("streams")
    command = f'exec "$0" -m bulltask worker -A tasks -c 1 --burst {closed}'
    done = subprocess.run(["/bin/sh", "-c", command, sys.executable], cwd=directory, check=False)
    assert done.returncode == 0
    streams = result.get(timeout=1)
    assert streams[2] == "/dev/null"
    assert closed == "2>&-" or streams == 3 * ["/dev/null"]
