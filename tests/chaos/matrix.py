"""The fault-injection matrix: which cells there are, and what each of them may do to its jobs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Final

from tests.chaos.cell import CONCURRENCY, Cell, Point, Result, run_cell
from tests.chaos.phases import PHASES, phase_of
from tests.chaos.points import LOCK_S, METHODS, STALLED_S
from tests.support.machine_load import scale_to_load

__all__ = ["TARGETS", "all_cells", "allowed_repeats", "fault_free_cells", "problems_of", "run_cells"]

MODES: Final = {
    "jobs": ("sync", "prefetch", "async", "threads"),
    "canvas": ("sync", "prefetch", "async"),
    "scheduler": ("sync", "prefetch", "async"),
    "outbox": ("sync",),
    "crash": ("sync",),  # with threads, the crash would also interrupt the other job
    "sender": ("sync", "async"),
}
TARGETS: Final = {
    "jobs": {role: set(PHASES[role]) for role in ("child", "supervisor")},
    "canvas": {"child": {"waits for a job and acquires it", "runs the task", "writes the outcome"}},
    "scheduler": {"child": {"adds a scheduler's next iteration", "runs the task", "writes the outcome"}},
    "outbox": {"relay": set(PHASES["relay"])},
    "crash": {"supervisor": {"renews locks", "recovers the jobs of a dead child"}},
    "sender": {"sender": set(PHASES["sender"])},
}
"""The processes and phases in which a fault is injected, by workload."""

KILLS: Final = ("kill -9",)
"""The faults before and after each call to Redis."""

CHILD_FAULTS: Final = ("kill -9", "os._exit", "segfault", "MemoryError", "SIGSTOP", "GIL held")
"""The faults at the steps of a child that are not calls to Redis."""

SUPERVISOR_STOPS: Final = {"renewLocks", "moveStalledJobsToWait", "findByToken"}
"""The calls of a supervisor around which it is also stopped for longer than its locks last."""

_SURVIVED: Final = {"reply lost", "SIGSTOP", "GIL held"}
_RUNNING: Final = {
    ("run the task", "before"),
    ("mark the slot as finishing", "before"),
    ("mark the slot as finishing", "after"),
    ("store the outcome in the slot", "before"),
    ("moveToFinished", "before"),
    ("wakeNext:moveToDelayed", "before"),
}
"""Where a child that runs one job at a time has started a job whose outcome neither Redis nor the supervisor has."""


def fault_free_cells() -> list[Cell]:
    """Return a cell without a fault for each workload and mode, which finds the points that it reaches."""
    return [Cell(workload, mode) for workload, modes in MODES.items() for mode in modes]


def all_cells(fault_free: Iterable[Result]) -> list[Cell]:
    """Return the cells of the matrix: every fault at every point in the phases that `TARGETS` names."""
    return [
        replace(result.cell, point=point, fault=fault)
        for result in fault_free
        for point in sorted(result.points)
        if _is_target(result.cell.workload, point)
        for fault in _faults_at(result.cell.workload, point)
    ]


def _is_target(workload: str, point: Point) -> bool:
    phases = TARGETS[workload].get(point.role)
    return phases is not None and phase_of(point) in phases


def _faults_at(workload: str, point: Point) -> Sequence[str]:
    if point.side == "lost":
        return ("reply lost",)
    if workload == "jobs" and (point.step in METHODS or point.step == "run the task"):
        return CHILD_FAULTS
    if workload == "jobs" and point.role == "supervisor" and point.step in SUPERVISOR_STOPS:
        return (*KILLS, "SIGSTOP")
    return KILLS


def allowed_repeats(cell: Cell) -> int:
    """Return how many jobs may run once more in a cell: those that its fault interrupts while they are running."""
    point = cell.point
    if point is None or point.role in {"relay", "sender"}:
        return 0
    jobs_per_child = CONCURRENCY if cell.mode == "async" else 1
    if point.role == "supervisor":
        return 0 if cell.fault == "reply lost" else CONCURRENCY * jobs_per_child
    if cell.fault in _SURVIVED:
        return 0
    if cell.mode in {"async", "threads"}:
        return CONCURRENCY
    return int((point.step, point.side) in _RUNNING)


def allowed_recovery_s(cell: Cell) -> float:
    """Return how long after the fault all jobs must be running again, or have ended."""
    assert cell.point is not None
    is_dead = cell.point.role == "supervisor" and cell.fault != "reply lost"
    return scale_to_load(LOCK_S + 2 * STALLED_S + 1.0 if is_dead or cell.fault in {"SIGSTOP", "GIL held"} else 1.0)


def problems_of(result: Result) -> list[str]:
    """Return what a cell must not do: lose a job, run one too often, or take too long."""
    problems = []
    if result.lost or result.states.get("failed"):
        problems.append(f"{result.lost} of {result.jobs} jobs have not completed: {dict(result.states)}")
    if result.unsent:
        problems.append(f"{result.unsent} more jobs have completed than were sent")
    if result.repeated > (allowed := allowed_repeats(result.cell)):
        problems.append(f"{result.repeated} jobs ran more than once, not at most {allowed}")
    if result.unexplained:
        problems.append(f"these jobs ran more than once, but the fault did not interrupt them: {result.unexplained}")
    if result.recovery_s is not None and result.recovery_s > (limit := allowed_recovery_s(result.cell)):
        problems.append(f"the last job started {result.recovery_s:.2f} s after the fault, not within {limit:.2f} s")
    return problems


def run_cells(cells: Sequence[Cell], url: str, directory: Path, parallel: int) -> Iterator[Result]:
    """Run cells, several at a time, and yield their results in order."""

    def run(item: tuple[int, Cell]) -> Result:
        index, cell = item
        return run_cell(cell, url, directory / f"cell-{index}")

    with ThreadPoolExecutor(parallel) as executor:
        yield from executor.map(run, enumerate(cells))
