"""Redirects what tasks print to the log (``worker_redirect_stdouts``), so that each line names its job."""

from __future__ import annotations

import logging
import sys
import threading
from typing import Any, Final, TextIO

from bulltask.events import Bus, ChildClosing
from bulltask.registry.current_job import current_job

__all__ = ["redirect_output"]

_LOGGER: Final = "bulltask.output"


def redirect_output(level: str, bus: Bus) -> None:
    """Log the lines that code of this process writes to ``sys.stdout`` and ``sys.stderr``.

    Args:
        level: The level of the lines.
        bus: The child's bus: when the child closes, an incomplete line is logged, too.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None:  # closed
            output = _LoggedOutput(stream, logging.getLevelNamesMapping()[level.upper()])
            setattr(sys, name, output)
            bus.subscribe(ChildClosing, output.end_line)


class _LoggedOutput:
    """A text stream whose lines are logged; everything else is the original stream's.

    Args:
        stream: The original stream. Programs that a task starts still write to its descriptor.
        level: The level of the lines.
    """

    def __init__(self, stream: TextIO, level: int) -> None:
        self._stream, self._level, self._local = stream, level, threading.local()
        self._logger = logging.getLogger(_LOGGER)

    def write(self, text: str) -> int:
        """Log the complete lines, and keep the rest until its line is complete."""
        local = self._local
        if getattr(local, "is_logging", False):  # a handler of the app writes to sys.stderr
            return self._stream.write(text)
        job, (before, line) = current_job(), getattr(local, "rest", (None, ""))
        if line and before is not job:  # the job before has printed no newline
            self._log([line], before)
            line = ""
        *lines, line = (line + text).split("\n")
        local.rest = job, line
        self._log(lines, job)
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write several texts."""
        for line in lines:
            self.write(line)

    def end_line(self, _: ChildClosing) -> None:
        """Log a line that has no end."""
        job, line = getattr(self._local, "rest", (None, ""))
        self._log([line], job)

    def isatty(self) -> bool:
        """Return false: lines are logged."""
        return False

    def _log(self, lines: list[str], job: Any) -> None:
        extra = None if job is None else {"job_id": job.id, "task": job.name}
        self._local.is_logging = True
        try:
            for line in lines:
                if line.strip():
                    self._logger.log(self._level, "%s", line.rstrip(), extra=extra)
        finally:
            self._local.is_logging = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
