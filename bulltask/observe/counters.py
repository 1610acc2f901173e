"""The counters of all of a worker's processes, in shared memory, if the worker has metrics (``metrics_port``).

Each process writes to one block: the supervisor to block 0, the child with index ``i`` to block ``i + 1``. A block has
one writer at a time, so processes need no lock. A child that replaces a dead one continues the same block, so totals
never decrease (which Prometheus would interpret as a restart). Nothing is written to disk, unlike in the multi-process
mode of ``prometheus_client``, where the files of dead processes accumulate.

An attempt is counted exactly once, whenever its child is killed. Before a child sends an outcome, it notes in the block
what it will count (:meth:`MetricsBlock.ending`); once Redis has stored the outcome, it counts, and clears the note, in
one step (:meth:`MetricsBlock.ended`). If the child dies in between, the supervisor asks Redis which of the noted
attempts have ended, and counts those (:mod:`bulltask.worker.recovery`).
"""

from __future__ import annotations

import itertools
import mmap
import os
import struct
import threading
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from functools import partial
from typing import Final

from bulltask.config.parsers import JOB_BUCKETS
from bulltask.jobs.clock import value_class
from bulltask.observe.bus import Bus
from bulltask.observe.events import EVENTS, OUT_OF_MEMORY

__all__ = [
    "BUCKETS",
    "COUNTERS",
    "CRASH_CAUSES",
    "MAX_TASKS",
    "OTHER_TASKS",
    "Histogram",
    "MetricsBlock",
    "MetricsListener",
    "MetricsMemory",
    "NotedAttempt",
    "QueueTotals",
    "TaskTotals",
    "failure_counter",
]

BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
"""Upper bounds in seconds, as in ``prometheus_client``; one more bucket counts longer durations."""

MAX_TASKS: Final = 200
OTHER_TASKS: Final = "other"
"""The name under which all further tasks are counted together, as are jobs of unknown tasks."""

_ADDED_QUEUES: Final = 100
"""For how many queues that are added to a running worker there is room."""

_EXIT_REASONS: Final = (
    "hard_memory_limit unresponsive signal hard_limit revoked blocked_loop exit_timeout crashed other"
).split()
"""Why children are replaced, besides the limits of a child."""

FAILURE_REASONS: Final = ("transient_exhausted", "permanent", "unknown", "revoked", "crashed")
"""Why a job failed: the category of its error (``transient`` if no retry was left), or it crashed its process."""

COUNTERS: Final[Mapping[str, tuple[str, ...]]] = {
    "completed": ("bullmq_jobs_processed_total", "completed"),
    "retried": ("bullmq_jobs_processed_total", "retried"),
    "stalled": ("bullmq_stalled_jobs_total",),
    "heartbeats": ("bullmq_heartbeat_success_total",),
    "heartbeat_failures": ("bullmq_heartbeat_failure_total",),
    "skipped": ("bullmq_stalled_checker_skipped_total",),
    "task_limited": ("bulltask_rate_limit_waits_total", "task"),
    "queue_limited": ("bulltask_rate_limit_waits_total", "queue"),
}
"""The counters of a queue, besides failed jobs, with the metric of each, and its labels after ``queue``.

A new counter is a line here and the metric's declaration in :mod:`bulltask.observe.metrics`. What may be lost with the
child that dies can be counted by an event (``count=`` in :mod:`bulltask.observe.events`); ends of attempts may not.
"""

# Cells of a block: doubles, exact up to 2**53 and written by one instruction, so a reader never sees half a value.
# They are the process's, a cell for each reason why a child is replaced, and the cells of each queue.
_PID, _CONNECTION, _RECONNECTS, _EXITS = range(4)
_CELL: Final = {name: at for at, name in enumerate((*COUNTERS, *FAILURE_REASONS))}
"""The cells of a queue's counters, which its histograms follow."""

_HISTOGRAM_CELLS: Final = 1 + len(BUCKETS) + 1  # the sum, then the buckets
_DURATIONS: Final = len(_CELL)
_LOCK_RENEWALS: Final = _DURATIONS + _HISTOGRAM_CELLS
_QUEUE_CELLS: Final = _LOCK_RENEWALS + _HISTOGRAM_CELLS
_CELL_BYTES: Final = 8

# The journal makes several changes one step: it contains the new values of cells, which count as written from the
# moment at which its first cell is 1. If the process dies before it has written them all, the supervisor does.
_JOURNAL: Final = struct.Struct("=14d")  # seven pairs: a cell, and its new value
_JOURNAL_CELLS: Final = 1 + 14

# A note: whether there is one, and the fields of NotedAttempt.
_NOTE: Final = struct.Struct("=6d")
_NOTE_CELLS: Final = 1 + 6

# The cells of a task in a queue: which task and queue, the outcomes of attempts, then the run and wait times,
# and the CPU time.
_TASK_STATUS: Final = {"completed": 1, "retried": 2, "failed": 3}
_TASK_RUN: Final = 4

CRASH_CAUSES: Final = "out_of_memory SIGKILL SIGSEGV SIGABRT SIGBUS SIGFPE SIGILL SIGTERM exit_code other".split()
"""Why children died unexpectedly: killed by the kernel because memory was used up, a signal, or an exit code."""

_CONNECTED: Final = 1.0
_DISCONNECTED: Final = 2.0  # 0: not connected yet


@value_class
class Histogram:
    """A histogram of durations."""

    seconds: float
    """The sum of all durations."""
    buckets: tuple[int, ...]
    """Cumulative counts: for each of `BUCKETS`, how many durations do not exceed it; the last entry counts all."""


@value_class
class QueueTotals:
    """The totals of one queue across all processes."""

    counts: Mapping[str, int]
    """By the names of `COUNTERS`."""
    failed_by: Mapping[str, int]
    """Failed jobs by their reason, one of `FAILURE_REASONS`."""
    durations: Histogram
    """Durations of all attempts."""
    lock_renewals: Histogram
    """Durations of the calls that renewed locks."""

    @property
    def failed(self) -> int:
        """Failed jobs, for all reasons."""
        return sum(self.failed_by.values())


@value_class
class TaskTotals:
    """The totals of one task in one queue across all processes."""

    completed: int
    retried: int
    failed: int
    run: Histogram
    """Run times of attempts, for every outcome."""
    wait: Histogram
    """How long jobs waited from the time at which they were due until they started for the first time."""
    cpu_s: float
    """CPU seconds of ended attempts, of sync tasks on the main thread of a child."""


@value_class
class NotedAttempt:
    """What a child was about to count when it died.

    Attributes:
        slot: The position of the attempt's slot.
        order: The slot's :attr:`~bulltask.worker.slots.Slot.order` then: it has another job if this has changed.
        attempts_made: The job's ended attempts if this attempt has ended (``atm``).
        counter: The counter of the queue.
    """

    slot: int
    order: int
    attempts_made: int
    queue: str
    task: str
    counter: str
    seconds: float


class MetricsMemory:
    """The shared memory of all counters of a worker; create it before the first fork.

    It has room for queues that are added later (:meth:`add_queue`): pages that nobody uses take no memory.

    Args:
        queues: The names of the worker's queues in the app.
        blocks: The maximum number of children plus one.
        child_limits: The limits after which a child is replaced; 0 is none. The counters of replaced children have
            their names, so that a new limit need not be declared again.
        fd: A descriptor from :func:`bulltask.config.process.anonymous_file`, which spawned children need; an empty file
            is enlarged. ``None`` for anonymous memory.
        tasks: The names of tasks; those after `MAX_TASKS` are counted as `OTHER_TASKS`.
        slots: The number of slots of a child.
        buckets: Upper bounds of wait and run times, in seconds.
    """

    def __init__(  # noqa: PLR0913 - one for each part of the layout
        self,
        queues: Sequence[str],
        blocks: int,
        child_limits: type[IntEnum],
        fd: int | None = None,
        *,
        tasks: Sequence[str] = (),
        slots: int = 1,
        buckets: Sequence[float] = JOB_BUCKETS,
    ) -> None:
        self.blocks = blocks
        if blocks < 1 or len(set(queues)) != len(queues):
            raise ValueError(f"metrics need at least one block, and each queue once: {blocks=}, {queues=}")
        limits = (limit.name.lower() for limit in child_limits if limit)
        exit_reasons = (*limits, *_EXIT_REASONS)
        self._layout = _Layout(queues, exit_reasons, (OTHER_TASKS, *tasks[:MAX_TASKS]), slots, tuple(buckets))
        size = self._layout.cells * blocks * _CELL_BYTES
        if fd is not None:
            if os.fstat(fd).st_size == 0:
                os.ftruncate(fd, size)
            if os.fstat(fd).st_size != size:
                raise ValueError(f"the metrics file must be {size} bytes, not {os.fstat(fd).st_size}")
        self._cells: memoryview[float] = memoryview(mmap.mmap(-1 if fd is None else fd, size)).cast("d")

    def add_queue(self, name: str) -> bool:
        """Make room for another queue in this process, and those that it forks; return False if there is none.

        Another process does the same, in the same order.
        """
        return self._layout.add_queue(name)

    @property
    def queues(self) -> Sequence[str]:
        """The names of the queues."""
        return tuple(self._layout.queues)

    @property
    def buckets(self) -> tuple[float, ...]:
        """Upper bounds of wait and run times, in seconds."""
        return self._layout.buckets

    def block(self, number: int) -> MetricsBlock:
        """Return block ``number``: 0 is the supervisor's, ``index + 1`` belongs to the child with that index."""
        if not 0 <= number < self.blocks:
            raise IndexError(f"the metrics have {self.blocks} blocks, so there is no block {number}")
        return MetricsBlock(self._block_cells(number), self._layout)

    def totals(self) -> Mapping[str, QueueTotals]:
        """Return the current totals by queue."""
        return {name: self._queue_totals(first) for name, first in self._layout.first_cells.items()}

    def task_totals(self) -> Mapping[tuple[str, str], TaskTotals]:
        """Return the current totals by queue and task, of the tasks that have run."""
        layout = self._layout
        totals: dict[tuple[str, str], list[float]] = {}
        for block in map(self._block_cells, range(self.blocks)):
            for at, queue, task in layout.tasks_of(block):
                cells = block[at : at + layout.task_cells].tolist()
                before = totals.get((queue, task), [0.0] * len(cells))
                totals[queue, task] = [sum(pair) for pair in zip(before, cells, strict=True)]
        return {
            names: TaskTotals(
                **{status: int(cells[at]) for status, at in _TASK_STATUS.items()},
                run=_histogram(cells[_TASK_RUN : layout.task_wait]),
                wait=_histogram(cells[layout.task_wait : layout.task_cpu]),
                cpu_s=cells[layout.task_cpu],
            )
            for names, cells in totals.items()
            if any(cells[1:])
        }

    def reconnects(self) -> int:
        """Return the number of attempts to reconnect to Redis so far, by all processes."""
        return int(sum(self._column(_RECONNECTS)))

    def exits(self) -> Mapping[str, int]:
        """Return the number of children that have been replaced so far, by the reason."""
        return {reason: int(sum(self._column(_EXITS + at))) for at, reason in enumerate(self._layout.exit_reasons)}

    def crashes(self) -> Mapping[str, int]:
        """Return the number of children that have died unexpectedly so far, by `CRASH_CAUSES`."""
        first = self._layout.crashes_at
        return {cause: int(sum(self._column(first + at))) for at, cause in enumerate(CRASH_CAUSES)}

    def pids(self) -> Mapping[str, int]:
        """Return the pids of running processes: ``"supervisor"``, or the index of a child."""
        pids = map(int, self._column(_PID))
        return {str(at - 1) if at else "supervisor": pid for at, pid in enumerate(pids) if _is_running(pid)}

    def connected(self) -> bool:
        """Return False if a running process has lost its connection to Redis."""
        states = zip(self._column(_PID), self._column(_CONNECTION), strict=True)
        return not any(state == _DISCONNECTED and _is_running(int(pid)) for pid, state in states)

    def live_children(self) -> int:
        """Return the number of running children."""
        return sum(_is_running(int(pid)) for pid in self._column(_PID)[1:])

    def _block_cells(self, number: int) -> memoryview[float]:
        return self._cells[number * self._layout.cells : (number + 1) * self._layout.cells]

    def _column(self, cell: int) -> Sequence[float]:
        """Return the same cell of all blocks."""
        return self._cells[cell :: self._layout.cells].tolist()

    def _queue_totals(self, first: int) -> QueueTotals:
        sums = [sum(self._column(first + cell)) for cell in range(_QUEUE_CELLS)]
        return QueueTotals(
            counts={name: int(sums[_CELL[name]]) for name in COUNTERS},
            failed_by={reason: int(sums[_CELL[reason]]) for reason in FAILURE_REASONS},
            durations=_histogram(sums[_DURATIONS:_LOCK_RENEWALS]),
            lock_renewals=_histogram(sums[_LOCK_RENEWALS:]),
        )


class _Layout:
    """Where the cells of a block are.

    Attributes:
        queue_index: The indexes of the queues by their names.
        first_cells, other_tasks: Their first cells, and those of `OTHER_TASKS`, by their names.
    """

    def __init__(
        self,
        queues: Sequence[str],
        exit_reasons: tuple[str, ...],
        tasks: tuple[str, ...],
        slots: int,
        buckets: tuple[float, ...],
    ) -> None:
        self.queues: list[str] = []
        self.queue_index: dict[str, int] = {}
        self.first_cells: dict[str, int] = {}
        self.other_tasks: dict[str, int] = {}
        self.exit_reasons = exit_reasons
        self.tasks = tasks
        self.slots = slots
        self.buckets = buckets
        histogram_cells = 1 + len(buckets) + 1
        self.crashes_at = _EXITS + len(exit_reasons)
        self.journal_at = self.crashes_at + len(CRASH_CAUSES)
        self.notes_at = self.journal_at + _JOURNAL_CELLS
        self.task_wait = _TASK_RUN + histogram_cells
        self.task_cpu = self.task_wait + histogram_cells
        self.task_cells = self.task_cpu + 1
        queues_at = self.notes_at + _NOTE_CELLS * slots
        tasks_at = queues_at + _QUEUE_CELLS * len(queues)
        for index, queue in enumerate(queues):
            self._set_place(queue, queues_at + _QUEUE_CELLS * index, tasks_at + self.task_cells * index)
        first_dynamic = tasks_at + self.task_cells * len(queues)
        self._added_at = first_dynamic + self.task_cells * MAX_TASKS  # last, in pages of their own
        self.dynamic_places = range(first_dynamic, self._added_at, self.task_cells)
        """The first cells of the places that have no fixed task: one for each task and queue that a process meets."""
        self.cells = self._added_at + (_QUEUE_CELLS + self.task_cells) * _ADDED_QUEUES

    def add_queue(self, name: str) -> bool:
        """Give a queue the next free place; return False if there is none."""
        at = self._added_at
        if at == self.cells:
            return False
        self._set_place(name, at, at + _QUEUE_CELLS)
        self._added_at += _QUEUE_CELLS + self.task_cells
        return True

    def _set_place(self, queue: str, first_cell: int, other_tasks: int) -> None:
        self.queue_index[queue] = len(self.queues)
        self.queues.append(queue)
        self.first_cells[queue] = first_cell
        self.other_tasks[queue] = other_tasks

    def tasks_of(self, cells: memoryview[float]) -> Iterator[tuple[int, str, str]]:
        """Yield the first cell, the queue and the task of each place of a block that is in use."""
        for queue, at in self.other_tasks.items():
            yield at, queue, OTHER_TASKS
        for first in self.dynamic_places:
            if not (key := int(cells[first])):
                return
            queue_index, task_index = divmod(key, len(self.tasks))
            yield first, self.queues[queue_index], self.tasks[task_index]


class MetricsBlock:
    """The cells of one process; created by `MetricsMemory.block`. The declarations of events call its methods.

    A queue that is not one of the worker's raises ``KeyError``, as does the name of a counter that does not exist.
    """

    def __init__(self, cells: memoryview[float], layout: _Layout) -> None:
        self._cells = cells
        self._bytes = cells.cast("B")
        self._layout = layout
        self._exits = {reason: _EXITS + at for at, reason in enumerate(layout.exit_reasons)}
        self.queues: Sequence[str] = layout.queues
        self._first = layout.first_cells
        self._queue_index = layout.queue_index
        self._task_index = {name: at for at, name in enumerate(layout.tasks)}
        self._places: dict[tuple[str, str], int] = {}
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

    def waited(self, queue: str, task: str, wait_ms: float) -> None:
        """Count how long a job has waited for its first start."""
        seconds = wait_ms / 1000 if wait_ms > 0 else 0.0
        first = (self._places.get((queue, task)) or self._find_place(queue, task)) + self._layout.task_wait
        bucket = first + 1 + bisect_left(self._layout.buckets, seconds)
        with self._lock:
            self._cells[bucket] += 1
            self._cells[first] += seconds

    def used_cpu(self, queue: str, task: str, seconds: float) -> None:
        """Add the CPU time of an attempt that has ended."""
        at = (self._places.get((queue, task)) or self._find_place(queue, task)) + self._layout.task_cpu
        with self._lock:
            self._cells[at] += seconds

    # ---- attempts, counted once whatever happens ----

    def ending(  # noqa: PLR0913, PLR0917 - called for each job, so it receives no object
        self, slot: int, order: int, attempts_made: int, queue: str, task: str, counter: str, ms: float
    ) -> None:
        """Note what will be counted for the attempt in a slot; the call that writes its outcome has not been sent."""
        at = self._layout.notes_at + _NOTE_CELLS * slot
        names = self._queue_index[queue], self._task_index.get(task, 0), _CELL[counter]
        _NOTE.pack_into(self._bytes, (at + 1) * _CELL_BYTES, order, attempts_made, *names, ms / 1000)
        self._cells[at] = 1.0

    def ended(self, slot: int | None, queue: str, task: str, counter: str, ms: float) -> None:
        """Count an attempt whose outcome Redis has stored, and its run time, and clear the note of its slot."""
        layout, cells, seconds = self._layout, self._cells, ms / 1000
        first, place = self._first[queue], self._places.get((queue, task)) or self._find_place(queue, task)
        total, bucket = first + _DURATIONS, first + _DURATIONS + 1 + bisect_left(BUCKETS, seconds)
        count, status = first + _CELL[counter], place + _TASK_STATUS.get(counter, 3)
        run, run_bucket = place + _TASK_RUN, place + _TASK_RUN + 1 + bisect_left(layout.buckets, seconds)
        # Without a slot there is no note: the last cell of the journal itself takes its place.
        note = layout.notes_at + _NOTE_CELLS * slot if slot is not None else layout.journal_at + _JOURNAL_CELLS - 1
        with self._lock:
            counted, in_bucket, sum_of_all = cells[count] + 1, cells[bucket] + 1, cells[total] + seconds
            of_status, in_run_bucket, sum_of_runs = cells[status] + 1, cells[run_bucket] + 1, cells[run] + seconds
            at = layout.journal_at
            _JOURNAL.pack_into(
                self._bytes, (at + 1) * _CELL_BYTES,
                count, counted, bucket, in_bucket, total, sum_of_all,
                status, of_status, run_bucket, in_run_bucket, run, sum_of_runs, note, 0.0,
            )  # fmt: skip
            cells[at] = 1.0
            cells[count], cells[bucket], cells[total] = counted, in_bucket, sum_of_all
            cells[status], cells[run_bucket], cells[run], cells[note] = of_status, in_run_bucket, sum_of_runs, 0.0
            cells[at] = 0.0

    def not_ended(self, slot: int) -> None:
        """Clear the note of a slot: the outcome was discarded, because the lock was lost."""
        self._cells[self._layout.notes_at + _NOTE_CELLS * slot] = 0.0

    def take_notes(self) -> list[NotedAttempt]:
        """Complete what the block's process was counting when it died; return its notes, and clear them."""
        layout, cells = self._layout, self._cells
        if cells[layout.journal_at]:
            values = _JOURNAL.unpack_from(self._bytes, (layout.journal_at + 1) * _CELL_BYTES)
            for at, value in zip(values[::2], values[1::2], strict=True):
                cells[int(at)] = value
            cells[layout.journal_at] = 0.0
        counters, notes = {at: name for name, at in _CELL.items()}, []
        for slot in range(layout.slots):
            at = layout.notes_at + _NOTE_CELLS * slot
            if cells[at]:
                order, made, queue, task, counter, seconds = _NOTE.unpack_from(self._bytes, (at + 1) * _CELL_BYTES)
                names = layout.queues[int(queue)], layout.tasks[int(task)], counters[int(counter)]
                notes.append(NotedAttempt(slot, int(order), int(made), *names, seconds))
                cells[at] = 0.0
        return notes

    def _find_place(self, queue: str, task: str) -> int:
        """Return the first cell of a task's counters in a queue."""
        layout, cells, queue_index = self._layout, self._cells, self._queue_index[queue]
        place = layout.other_tasks[queue]
        if not (task_index := self._task_index.get(task, 0)):
            return place  # not cached: there may be any number of names
        key = queue_index * len(layout.tasks) + task_index
        with self._lock:
            for first in layout.dynamic_places:
                if not cells[first]:
                    cells[first] = float(key)
                if cells[first] == key:
                    place = first
                    break
        self._places[queue, task] = place
        return place

    # ---- other events ----

    def locks_renewed(self, queue: str, locks: int, duration_ms: float) -> None:
        """Count the ``locks`` that one call renewed, and the duration of the call."""
        first, seconds = self._first[queue], duration_ms / 1000
        bucket = first + _LOCK_RENEWALS + 1 + bisect_left(BUCKETS, seconds)
        with self._lock:
            self._cells[first + _CELL["heartbeats"]] += locks
            self._cells[bucket] += 1
            self._cells[first + _LOCK_RENEWALS] += seconds

    def reconnecting(self) -> None:
        """Count an attempt to reconnect to Redis."""
        with self._lock:
            self._cells[_RECONNECTS] += 1

    def child_replaced(self, reason: str) -> None:
        """Count a child that is replaced, by the reason."""
        with self._lock:
            self._cells[self._exits.get(reason, self._exits["other"])] += 1

    def child_crashed(self, exit_reason: str) -> None:
        """Count a child that died unexpectedly, as a replaced one, and by the cause."""
        self.child_replaced("crashed")
        cause = "out_of_memory" if exit_reason == OUT_OF_MEMORY else exit_reason
        if cause not in CRASH_CAUSES:
            cause = "exit_code" if exit_reason.startswith("exit code") else "other"
        with self._lock:
            self._cells[self._layout.crashes_at + CRASH_CAUSES.index(cause)] += 1

    def set_connected(self, connected: bool) -> None:
        """Record whether this process can reach Redis."""
        self._cells[_CONNECTION] = _CONNECTED if connected else _DISCONNECTED


def failure_counter(category: str, *, exhausted: bool) -> str:
    """Return the counter of a failed job: the category of its error, unless it had been retried until now."""
    if exhausted or category == "transient":
        return "transient_exhausted"
    return category if category in FAILURE_REASONS else "unknown"


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
