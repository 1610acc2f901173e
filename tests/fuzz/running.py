"""What the fuzz tests share: examples without shrinking, a worker's tasks and settings, and checks of its processes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from bulltask.testing.worker import wait_until
from tests.support.worker import Worker

__all__ = ["SETTINGS", "TASKS", "Processes", "make_examples"]

TASKS: Final = """
@app.task(name="work")
def work(**_):
    return "done"


@app.task(name="awork")
async def awork(**_):
    return "done"
"""
SETTINGS: Final = {
    "stalled_interval": 1,
    "lock_duration": 5,
    "run_retry_delay": 0.2,
    "incompatible_timeout": 0,
    "log_level": "warning",
}
MAX_SHARE_OF_A_CORE: Final = 0.3


def make_examples(count: int, strategy: st.SearchStrategy[Any], use: Callable[[Any], None]) -> None:
    """Call ``use`` with ``count`` examples; they are not shrunk, because one worker runs all of them at once."""

    @settings(
        max_examples=count,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def call(example: Any) -> None:
        use(example)

    call()


class Processes:
    """The processes of a worker: whether one has died, and how much CPU time they use.

    Args:
        worker: The worker.
        children: Its number of children, which this class waits for.
    """

    def __init__(self, worker: Worker, children: int) -> None:
        wait_until(lambda: len(worker.children) == children, 60, "the worker's children")
        self._worker, self._children, self._never = worker, worker.children, threading.Event()

    def check(self) -> None:
        """Check that no process has died or logged a traceback, and that they use little CPU time when they wait."""
        failed = self._worker.logged("Child died") + self._worker.logged("Supervisor service failed")
        assert failed == [], "\n".join([str(failed[:3]), *self._tracebacks(), *self._worker.text[-400:]])
        assert self._tracebacks() == []
        assert self._worker.children == self._children
        wait_until(lambda: self._share_of_a_core() < MAX_SHARE_OF_A_CORE, 30, "a worker that does not spin")

    def _tracebacks(self) -> list[str]:
        """Return the last lines of uncaught exceptions."""
        text = self._worker.text
        return ["\n".join(text[at : at + 40]) for at, line in enumerate(text) if line.startswith("Traceback")]

    def _share_of_a_core(self) -> float:
        began, before_s = time.monotonic(), self._cpu_s()
        self._never.wait(0.3)
        return (self._cpu_s() - before_s) / (time.monotonic() - began)

    def _cpu_s(self) -> float:
        stats = [Path(f"/proc/{pid}/stat").read_text() for pid in (self._worker.pid, *self._children)]
        ticks = sum(int(ticks) for stat in stats for ticks in stat.rpartition(")")[2].split()[11:13])
        return ticks / os.sysconf("SC_CLK_TCK")
