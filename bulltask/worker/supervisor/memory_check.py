"""Kills children that exceed the hard memory limit."""

from __future__ import annotations

from contextlib import suppress

from bulltask.process import memory_kib
from bulltask.worker.supervisor.child_pool import ChildPool

__all__ = ["MemoryCheck"]


class MemoryCheck:
    """Kills a child whose memory exceeds the hard limit while it runs a job.

    This counts as a crash of its jobs, not as a failed attempt, just as if the kernel's OOM killer had killed the
    child. The supervisor cannot know which job used the memory: the child may be running several, or an earlier job
    may have leaked it. The jobs therefore run again as after a crash, in small groups or alone, and a job fails
    only if it exceeds the limit again while it runs alone (:mod:`bulltask.worker.quarantine`).

    A child without a job is not killed. It checked its memory itself after its last job
    (:class:`~bulltask.worker.child.retirement.Retirement`).

    Args:
        pool: The children.
        limit_kib: The maximum resident memory of a child in KiB.
    """

    interval_ms = 200

    def __init__(self, pool: ChildPool, limit_kib: int) -> None:
        self._pool, self._limit_kib = pool, limit_kib

    def tick(self, _now_ms: int, _missed: int, /) -> None:
        """Check all children that are running a job."""
        for index, pid in self._pool.busy_children():
            with suppress(OSError):  # the child has just died
                if (used_kib := memory_kib(pid)) > self._limit_kib:
                    self._pool.kill_for_memory(index, used_kib, self._limit_kib)
