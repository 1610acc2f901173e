"""The counters of all of a worker's processes, in shared memory.

Each process writes to one block: the supervisor to block 0, the child with index ``i`` to block ``i + 1``. A block has
one writer at a time, so processes need no lock. A child that replaces a dead one continues the same block, so totals
never decrease (which Prometheus would interpret as a restart). Nothing is written to disk, unlike in the multi-process
mode of ``prometheus_client``, where the files of dead processes accumulate.
"""

from __future__ import annotations

import itertools
import mmap
import os
import threading
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Final

from bulltask.observe.bus import Bus
from bulltask.observe.events import EVENTS

__all__ = ["BUCKETS", "Histogram", "MetricsListener", "MetricsMemory", "QueueTotals"]

BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
"""Upper bounds in seconds, as in ``prometheus_client``; one more bucket counts longer durations."""

FAILURE_REASONS: Final = ("transient_exhausted", "permanent", "unknown", "revoked", "crashed")
"""Why a job failed: the category of its error (``transient`` if no retry was left), or it crashed its process."""

# Cells of a block: doubles, exact up to 2**53 and written by one instruction, so a reader never sees half a value.
# They are the process's, a cell for each reason why a child is replaced, and the cells of each queue.
_PID, _CONNECTION, _RECONNECTS, _EXITS = range(4)
_CELL: Final = {
    name: at
    for at, name in enumerate(
        ("completed", "retried", "stalled", "heartbeats", "heartbeat_failures", "skipped", *FAILURE_REASONS)
    )
}
"""The cells of a queue's counters, which its histograms follow."""

_HISTOGRAM_CELLS: Final = 1 + len(BUCKETS) + 1  # the sum, then the buckets
_DURATIONS: Final = len(_CELL)
_LOCK_RENEWALS: Final = _DURATIONS + _HISTOGRAM_CELLS
_QUEUE_CELLS: Final = _LOCK_RENEWALS + _HISTOGRAM_CELLS
_CELL_BYTES: Final = 8

_CONNECTED: Final = 1.0
_DISCONNECTED: Final = 2.0  # 0: not connected yet


@dataclass(frozen=True, slots=True)
class Histogram:
    """A histogram of durations."""

    seconds: float
    """The sum of all durations."""
    buckets: tuple[int, ...]
    """Cumulative counts: for each of `BUCKETS`, how many durations do not exceed it; the last entry counts all."""


@dataclass(frozen=True, slots=True)
class QueueTotals:
    """The totals of one queue across all processes."""

    completed: int
    failed_by: Mapping[str, int]
    """Failed jobs by their reason, one of `FAILURE_REASONS`."""
    retried: int
    stalled: int
    heartbeats: int
    heartbeat_failures: int
    skipped: int
    durations: Histogram
    """Durations of all attempts."""
    lock_renewals: Histogram
    """Durations of the calls that renewed locks."""

    @property
    def failed(self) -> int:
        """Failed jobs, for all reasons."""
        return sum(self.failed_by.values())


class MetricsMemory:
    """The shared memory of all counters of a worker; create it before the first fork.

    Args:
        queues: The names of the worker's queues in the app.
        blocks: The maximum number of children plus one.
        child_limits: The limits after which a child is replaced; 0 is none. The counters of replaced children have
            their names, so that a new limit need not be declared again.
        fd: A descriptor from :func:`bulltask.config.process.anonymous_file`, which spawned children need; an empty file
            is enlarged. ``None`` for anonymous memory.
    """

    def __init__(self, queues: Sequence[str], blocks: int, child_limits: type[IntEnum], fd: int | None = None) -> None:
        self.queues = tuple(queues)
        self.blocks = blocks
        if blocks < 1 or len(set(self.queues)) != len(self.queues):
            raise ValueError(f"metrics need at least one block, and each queue once: {blocks=}, {queues=}")
        limits = (limit.name.lower() for limit in child_limits if limit)
        self._exit_reasons = (*limits, "hard_memory_limit", "signal", "cancelled", "crashed")
        self._head_cells = _EXITS + len(self._exit_reasons)
        self._block_cells = self._head_cells + _QUEUE_CELLS * len(self.queues)
        size = self._block_cells * blocks * _CELL_BYTES
        if fd is not None:
            if os.fstat(fd).st_size == 0:
                os.ftruncate(fd, size)
            if os.fstat(fd).st_size != size:
                raise ValueError(f"the metrics file must be {size} bytes, not {os.fstat(fd).st_size}")
        self._cells: memoryview[float] = memoryview(mmap.mmap(-1 if fd is None else fd, size)).cast("d")

    def block(self, number: int) -> MetricsBlock:
        """Return block ``number``: 0 is the supervisor's, ``index + 1`` belongs to the child with that index."""
        if not 0 <= number < self.blocks:
            raise IndexError(f"the metrics have {self.blocks} blocks, so there is no block {number}")
        start = number * self._block_cells
        return MetricsBlock(self._cells[start : start + self._block_cells], self._exit_reasons, self.queues)

    def totals(self) -> Mapping[str, QueueTotals]:
        """Return the current totals by queue."""
        return {name: self._queue_totals(self._head_cells + _QUEUE_CELLS * at) for at, name in enumerate(self.queues)}

    def reconnects(self) -> int:
        """Return the number of attempts to reconnect to Redis so far, by all processes."""
        return int(sum(self._column(_RECONNECTS)))

    def exits(self) -> Mapping[str, int]:
        """Return the number of children that have been replaced so far, by the reason."""
        return {reason: int(sum(self._column(_EXITS + at))) for at, reason in enumerate(self._exit_reasons)}

    def connected(self) -> bool:
        """Return False if a running process has lost its connection to Redis."""
        states = zip(self._column(_PID), self._column(_CONNECTION), strict=True)
        return not any(state == _DISCONNECTED and _is_running(int(pid)) for pid, state in states)

    def live_children(self) -> int:
        """Return the number of running children."""
        return sum(_is_running(int(pid)) for pid in self._column(_PID)[1:])

    def _column(self, cell: int) -> Sequence[float]:
        return self._cells[cell :: self._block_cells].tolist()

    def _queue_totals(self, first: int) -> QueueTotals:
        sums = [sum(self._column(first + cell)) for cell in range(_QUEUE_CELLS)]
        counts = {name: int(sums[cell]) for name, cell in _CELL.items()}
        return QueueTotals(
            failed_by={reason: counts.pop(reason) for reason in FAILURE_REASONS},
            durations=_histogram(sums[_DURATIONS:_LOCK_RENEWALS]),
            lock_renewals=_histogram(sums[_LOCK_RENEWALS:]),
            **counts,
        )


class MetricsBlock:
    """The cells of one process; created by `MetricsMemory.block`. The declarations of events call its methods.

    A queue that is not one of the worker's raises ``KeyError``, as does the name of a counter that does not exist.
    """

    def __init__(self, cells: memoryview[float], exit_reasons: Sequence[str], queues: Sequence[str]) -> None:
        self._cells = cells
        self._exits = {reason: _EXITS + at for at, reason in enumerate(exit_reasons)}
        self.queues = tuple(queues)
        self._first = {name: _EXITS + len(exit_reasons) + _QUEUE_CELLS * at for at, name in enumerate(queues)}
        self._lock = threading.Lock()  # += on shared memory takes three steps, so threads would lose counts

    def enter(self) -> None:
        """Make this process the writer of the block, and reset the state of its connection."""
        self._cells[_CONNECTION] = 0.0
        self._cells[_PID] = float(os.getpid())

    def add(self, queue: str, counter: str, amount: int = 1) -> None:
        """Add ``amount`` to a counter of ``queue``."""
        at = self._first[queue] + _CELL[counter]
        with self._lock:
            self._cells[at] += amount

    def attempt(self, queue: str, counter: str, duration_ms: float) -> None:
        """Count an attempt in ``counter`` (completed, retried, or a failure reason), and its duration."""
        self._add_timed(queue, counter, 1, _DURATIONS, duration_ms)

    def failed(self, queue: str, category: str, duration_ms: float) -> None:
        """Count a job's last attempt by the category of its error."""
        reason = "transient_exhausted" if category == "transient" else category
        self.attempt(queue, reason if reason in FAILURE_REASONS else "unknown", duration_ms)

    def locks_renewed(self, queue: str, locks: int, duration_ms: float) -> None:
        """Count the ``locks`` that one call renewed, and the duration of the call."""
        self._add_timed(queue, "heartbeats", locks, _LOCK_RENEWALS, duration_ms)

    def _add_timed(self, queue: str, counter: str, amount: int, histogram: int, duration_ms: float) -> None:
        first = self._first[queue]
        seconds = duration_ms / 1000
        bucket = first + histogram + 1 + bisect_left(BUCKETS, seconds)
        with self._lock:
            self._cells[first + _CELL[counter]] += amount
            self._cells[bucket] += 1
            self._cells[first + histogram] += seconds

    def reconnecting(self) -> None:
        """Count an attempt to reconnect to Redis."""
        with self._lock:
            self._cells[_RECONNECTS] += 1

    def child_replaced(self, reason: str) -> None:
        """Count a child that is replaced, by the reason."""
        with self._lock:
            self._cells[self._exits[reason]] += 1

    def set_connected(self, connected: bool) -> None:
        """Record whether this process can reach Redis."""
        self._cells[_CONNECTION] = _CONNECTED if connected else _DISCONNECTED


class MetricsListener:
    """Counts the events of one process, as they are declared; ``queues`` are those whose events it will emit."""

    def __init__(self, block: MetricsBlock, queues: Sequence[str]) -> None:
        if missing := set(queues) - set(block.queues):
            raise ValueError(f"MetricsMemory was created without these queues: {', '.join(sorted(missing))}")
        self._block = block

    def attach(self, bus: Bus) -> None:
        """Make the calling process the block's writer and count the events of ``bus``; call it after the fork."""
        self._block.enter()
        for kind, declared in EVENTS.items():
            if declared.count is not None:
                bus.subscribe(kind, partial(declared.count, self._block))


def _histogram(cells: Sequence[float]) -> Histogram:
    # The total is the sum of the buckets, so a scrape during an update sees a consistent histogram.
    return Histogram(cells[0], tuple(itertools.accumulate(map(int, cells[1:]))))


def _is_running(pid: int) -> bool:
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # another user's
    return True
