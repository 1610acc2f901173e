"""Run small Python programs and exchange lines with them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

__all__ = ["ROOT", "Program", "run_program"]

ROOT = Path(__file__).resolve().parents[2]


class Program:
    """A running Python program with pipes for its input and output."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.pid = process.pid

    def read_line(self) -> str:
        """Return the next line of the program's output without the newline; empty at the end."""
        return cast("IO[str]", self.process.stdout).readline().rstrip("\n")

    def write_line(self, text: str) -> None:
        """Write a line to the program's standard input."""
        stdin = cast("IO[str]", self.process.stdin)
        stdin.write(text + "\n")
        stdin.flush()

    def close_stdin(self, timeout: float = 60.0) -> int:
        """Close the program's standard input and wait until it exits; return the exit code."""
        cast("IO[str]", self.process.stdin).close()
        return self.process.wait(timeout)

    def send(self, number: int, timeout: float = 60.0) -> int:
        """Send a signal and wait until the program exits; return the exit code."""
        self.process.send_signal(number)
        return self.process.wait(timeout)

    def read_rest(self) -> str:
        """Return the remaining output, until the program exits."""
        return cast("IO[str]", self.process.stdout).read()


@contextmanager
def run_program(code: str, *arguments: str, **environment: str) -> Iterator[Program]:
    """Run ``python -c code arguments…`` with both outputs in one pipe; kill it at the end if it is still running."""
    with subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
    ) as process:
        try:
            yield Program(process)
        finally:
            process.kill()
