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

from bulltask.jobs import names as states
from bulltask.observe import events
from bulltask.observe.bus import Bus

__all__ = [
    "BUCKETS",
    "EXIT_REASONS",
    "FAILURE_REASONS",
    "Histogram",
    "MetricsBlock",
    "MetricsListener",
    "MetricsMemory",
    "QueueTotals",
]

BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
"""Upper bounds in seconds, as in ``prometheus_client``; one more bucket counts longer durations."""

# Cells of a block: doubles, exact up to 2**53 and written by one instruction, so a reader never sees half a value.
PID, CONNECTION, RECONNECTS = range(3)
EXIT_REASONS = ("max_tasks_per_child", "max_memory_per_child", "hard_memory_limit", "signal", "cancelled", "crashed")
"""Why a child exited, for children that are replaced."""
EXITS = range(3, 3 + len(EXIT_REASONS))
HEAD = EXITS.stop
# The cells of each queue, after the head; then one for each failure reason, then the histograms.
COMPLETED, RETRIED, STALLED, HEARTBEATS, HEARTBEAT_FAILURES, SKIPPED = range(6)
FAILURE_REASONS = ("transient_exhausted", "permanent", "unknown", "revoked", "crashed")
"""Why a job failed: the category of its error, or another reason."""
TRANSIENT_EXHAUSTED, PERMANENT, UNKNOWN, REVOKED, CRASHED = FAILED = range(6, 11)
HISTOGRAM_CELLS = 1 + len(BUCKETS) + 1  # the sum, then the buckets
DURATIONS, LOCK_RENEWALS = (FAILED.stop + number * HISTOGRAM_CELLS for number in range(2))
QUEUE_CELLS = LOCK_RENEWALS + HISTOGRAM_CELLS
CELL = 8  # bytes

_BY_CATEGORY = {
    "transient": TRANSIENT_EXHAUSTED,
    "permanent": PERMANENT,
    "unknown": UNKNOWN,
    states.REVOKED: REVOKED,
}

CONNECTED, DISCONNECTED = 1.0, 2.0  # 0: not connected yet


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
        fd: A descriptor from :func:`bulltask.config.process.anonymous_file`, which spawned children need; an empty file
            is enlarged. ``None`` for anonymous memory.

    Raises:
        ValueError: ``blocks`` is 0, a queue is given twice, or the file has the wrong size.
    """

    def __init__(self, queues: Sequence[str], blocks: int, fd: int | None = None) -> None:
        self.queues = tuple(queues)
        self.blocks = blocks
        if blocks < 1 or len(set(self.queues)) != len(self.queues):
            raise ValueError(f"metrics need at least one block, and each queue once: {blocks=}, {queues=}")
        self._block_cells = HEAD + QUEUE_CELLS * len(self.queues)
        size = self._block_cells * blocks * CELL
        if fd is not None:
            if os.fstat(fd).st_size == 0:
                os.ftruncate(fd, size)
            if os.fstat(fd).st_size != size:
                raise ValueError(f"the metrics file must be {size} bytes, not {os.fstat(fd).st_size}")
        self._cells: memoryview[float] = memoryview(mmap.mmap(-1 if fd is None else fd, size)).cast("d")

    def block(self, number: int) -> MetricsBlock:
        """Return block ``number``: 0 is the supervisor's, ``index + 1`` belongs to the child with that index.

        Raises:
            IndexError: The memory was created for fewer processes.
        """
        if not 0 <= number < self.blocks:
            raise IndexError(f"the metrics have {self.blocks} blocks, so there is no block {number}")
        start = number * self._block_cells
        return MetricsBlock(self._cells[start : start + self._block_cells], self.queues)

    def totals(self) -> Mapping[str, QueueTotals]:
        """Return the current totals by queue."""
        return {name: self._queue_totals(HEAD + QUEUE_CELLS * at) for at, name in enumerate(self.queues)}

    def reconnects(self) -> int:
        """Return the number of attempts to reconnect to Redis so far, by all processes."""
        return int(sum(self._column(RECONNECTS)))

    def exits(self) -> Mapping[str, int]:
        """Return the number of children that have been replaced so far, by the reason, one of `EXIT_REASONS`."""
        return {reason: int(sum(self._column(cell))) for reason, cell in zip(EXIT_REASONS, EXITS, strict=True)}

    def connected(self) -> bool:
        """Return False if a running process has lost its connection to Redis."""
        states = zip(self._column(PID), self._column(CONNECTION), strict=True)
        return not any(state == DISCONNECTED and _is_running(int(pid)) for pid, state in states)

    def live_children(self) -> int:
        """Return the number of running children."""
        return sum(_is_running(int(pid)) for pid in self._column(PID)[1:])

    def _column(self, cell: int) -> Sequence[float]:
        return self._cells[cell :: self._block_cells].tolist()

    def _queue_totals(self, first: int) -> QueueTotals:
        sums = [sum(self._column(first + cell)) for cell in range(QUEUE_CELLS)]
        return QueueTotals(
            completed=int(sums[COMPLETED]),
            failed_by={reason: int(sums[cell]) for reason, cell in zip(FAILURE_REASONS, FAILED, strict=True)},
            retried=int(sums[RETRIED]),
            stalled=int(sums[STALLED]),
            heartbeats=int(sums[HEARTBEATS]),
            heartbeat_failures=int(sums[HEARTBEAT_FAILURES]),
            skipped=int(sums[SKIPPED]),
            durations=_histogram(sums[DURATIONS:LOCK_RENEWALS]),
            lock_renewals=_histogram(sums[LOCK_RENEWALS:]),
        )


class MetricsBlock:
    """The cells of one process; created by `MetricsMemory.block`."""

    def __init__(self, cells: memoryview[float], queues: Sequence[str]) -> None:
        self._cells = cells
        self.queues = tuple(queues)
        self._first = {name: HEAD + QUEUE_CELLS * at for at, name in enumerate(queues)}
        self._lock = threading.Lock()  # += on shared memory takes three steps, so threads would lose counts

    def enter(self) -> None:
        """Make this process the writer of the block, and reset the state of its connection."""
        self._cells[CONNECTION] = 0.0
        self._cells[PID] = float(os.getpid())

    def add(self, queue: str, cell: int, amount: int = 1) -> None:
        """Add ``amount`` to a cell of ``queue``.

        Raises:
            KeyError: ``queue`` is not one of the worker's queues.
        """
        at = self._first[queue] + cell
        with self._lock:
            self._cells[at] += amount

    def attempt(self, queue: str, cell: int, duration_ms: float) -> None:
        """Count an attempt in ``cell`` (completed, retried, or a failure reason), and its duration.

        Raises:
            KeyError: As in `add`.
        """
        self._count(queue, cell, 1, DURATIONS, duration_ms)

    def locks_renewed(self, queue: str, locks: int, duration_ms: float) -> None:
        """Count the ``locks`` that one call renewed, and the duration of the call.

        Raises:
            KeyError: As in `add`.
        """
        self._count(queue, HEARTBEATS, locks, LOCK_RENEWALS, duration_ms)

    def _count(self, queue: str, cell: int, amount: int, histogram: int, duration_ms: float) -> None:
        first = self._first[queue]
        seconds = duration_ms / 1000
        bucket = first + histogram + 1 + bisect_left(BUCKETS, seconds)
        with self._lock:
            self._cells[first + cell] += amount
            self._cells[bucket] += 1
            self._cells[first + histogram] += seconds

    def reconnecting(self) -> None:
        """Count an attempt to reconnect to Redis."""
        with self._lock:
            self._cells[RECONNECTS] += 1

    def child_exited(self, reason: str) -> None:
        """Count a child that is replaced, by the reason, one of `EXIT_REASONS`."""
        with self._lock:
            self._cells[EXITS[EXIT_REASONS.index(reason)]] += 1

    def set_connected(self, connected: bool) -> None:
        """Record whether this process can reach Redis."""
        self._cells[CONNECTION] = CONNECTED if connected else DISCONNECTED


class MetricsListener:
    """Counts the events of one process.

    Args:
        block: The block of this process.
        queues: The queues whose events this process will emit.

    Raises:
        ValueError: A queue has no cells in the block.
    """

    def __init__(self, block: MetricsBlock, queues: Sequence[str]) -> None:
        if missing := set(queues) - set(block.queues):
            raise ValueError(f"MetricsMemory was created without these queues: {', '.join(sorted(missing))}")
        self._block = block

    def attach(self, bus: Bus) -> None:
        """Make the calling process the block's writer and count the events of ``bus``; call it after the fork."""
        block = self._block
        block.enter()
        bus.subscribe(events.JobCompleted, lambda e: block.attempt(e.queue, COMPLETED, e.duration_ms))
        bus.subscribe(
            events.JobFailed,
            lambda e: block.attempt(e.queue, _BY_CATEGORY.get(e.category, UNKNOWN), e.duration_ms),
        )
        bus.subscribe(events.JobRetried, lambda e: block.attempt(e.queue, RETRIED, e.duration_ms))
        # The job never ran, so it has no duration. This event replaces JobRetried.
        bus.subscribe(events.JobIncompatible, lambda e: block.add(e.queue, RETRIED))
        bus.subscribe(events.CrashLimitReached, lambda e: block.add(e.queue, CRASHED))
        bus.subscribe(events.MalformedJobFailed, lambda e: block.add(e.queue, PERMANENT))
        bus.subscribe(events.JobStalled, lambda e: block.add(e.queue, STALLED))
        # A recovered job is a stalled job that the supervisor found before the stalled check did.
        bus.subscribe(events.JobRecovered, lambda e: block.add(e.queue, STALLED))
        bus.subscribe(events.HeartbeatSucceeded, lambda e: block.locks_renewed(e.queue, e.locks, e.duration_ms))
        bus.subscribe(events.HeartbeatFailed, lambda e: block.add(e.queue, HEARTBEAT_FAILURES, len(e.job_ids)))
        bus.subscribe(events.RunningJobLostLock, lambda e: block.add(e.queue, HEARTBEAT_FAILURES))
        bus.subscribe(events.StalledCheckSkipped, lambda e: block.add(e.queue, SKIPPED, e.checks))
        bus.subscribe(events.ChildExited, lambda e: block.child_exited(e.reason))
        bus.subscribe(
            events.ChildKilled,
            lambda e: block.child_exited(e.reason if e.reason in EXIT_REASONS else "cancelled"),
        )
        bus.subscribe(events.ChildDied, lambda _: block.child_exited("crashed"))
        bus.subscribe(events.RedisDisconnected, lambda _: block.set_connected(False))
        bus.subscribe(events.RedisReconnecting, lambda _: block.reconnecting())
        bus.subscribe(events.RedisReconnected, lambda _: block.set_connected(True))
        bus.subscribe(events.RedisErrorReply, lambda e: block.set_connected(bool(e.queue)))
        bus.subscribe(events.RedisRecovered, lambda _: block.set_connected(True))


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
        return True
    return True
