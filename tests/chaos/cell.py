"""One cell of the fault-injection matrix: a workload, a point and a fault, run with real processes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import sqlalchemy as sa
from sqlalchemy import orm

from bulltask import App, group
from bulltask.outbox.sqlalchemy import Outbox
from bulltask.queue.sync.queue import Queue
from tests.chaos.points import BUSY_S, LOCK_S, STALLED_S
from tests.chaos.tasks import SOURCE
from tests.support.programs import ROOT
from tests.support.worker import PREFETCHING, Worker

__all__ = ["WORKLOADS", "Cell", "Point", "Result", "run_cell"]

CONCURRENCY: Final = 2
"""The number of a worker's children, and of the jobs that run concurrently in a child with async tasks or threads."""

SLOW_S: Final = 0.6
"""Longer than half a lock, so that the supervisor renews the lock."""

TIMEOUT_S: Final = 30.0
POLL_S: Final = 0.03
_LEFT: Final = ("waiting", "paused", "prioritized", "active", "delayed", "waiting-children")


def _send_jobs(app: App, queue: str, _: str) -> int:
    """Send short jobs, one at a time and many at once, one that is retried, a delayed one, and a longer one."""
    app.send_task("work", queue=queue)
    app.send_many([app.signature("work").set(queue=queue)] * 4)
    app.send_task("work", queue=queue, countdown=0.1)
    app.send_task("flaky", queue=queue)
    app.send_task("work", kwargs={"seconds": SLOW_S}, queue=queue)
    return 8


def _send_canvas(app: App, queue: str, _: str) -> int:
    call = app.signature("work").set(queue=queue)
    members: Any = group([call, call, call])
    (members | app.signature("body").set(queue=queue)).delay()
    return 4


def _add_scheduler(app: App, queue: str, _: str) -> int:
    with app.queue(queue) as adder:
        adder.schedulers.upsert("tick", name="work", every=0.15, limit=3)
    return 3


def _write_rows(app: App, queue: str, database: str) -> int:
    engine = sa.create_engine(database)
    outbox = Outbox(app, engine)
    call = app.signature("work").set(queue=queue)
    for _ in range(3):
        with orm.Session(engine) as session, session.begin():
            outbox.send(session, call)
    engine.dispose()
    return 3


def _send_crash(app: App, queue: str, _: str) -> int:
    app.send_task("crash", queue=queue)
    app.send_task("work", queue=queue)
    return 2


def _send_nothing(*_: object) -> int:
    return 0


WORKLOADS: Final[dict[str, Callable[[App, str, str], int]]] = {
    "jobs": _send_jobs,
    "canvas": _send_canvas,
    "scheduler": _add_scheduler,
    "outbox": _write_rows,
    "crash": _send_crash,
    "sender": _send_nothing,  # another process sends
}
"""Functions that send jobs and return their number, by the workload's name."""


@dataclass(frozen=True, slots=True, order=True)
class Point:
    """An injection point: a step of the process with this role, and the side of the step."""

    role: str
    step: str
    side: str


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of the matrix.

    Attributes:
        workload: One of `WORKLOADS`.
        mode: ``sync``, ``prefetch``, ``async`` or ``threads``: how the worker runs jobs.
        point: Where the fault is injected; ``None`` for no fault.
        fault: Its name in `tests.chaos.points`.
        nth: The fault is injected when a process reaches the point for the n-th time.
    """

    workload: str
    mode: str
    point: Point | None = None
    fault: str = ""
    nth: int = 1

    def __str__(self) -> str:
        point = self.point or Point("", "", "")
        return f"{self.workload}/{self.mode}: {self.fault}, {point.role}, {point.side} {point.step!r}, {self.nth}"

    @property
    def environ(self) -> dict[str, str]:
        """The variables that `tests.chaos.points` reads."""
        if self.point is None:
            return {}
        point = f"{self.point.role}|{self.point.step}|{self.point.side}"
        return {"CHAOS_POINT": point, "CHAOS_FAULT": self.fault, "CHAOS_NTH": str(self.nth)}


@dataclass(frozen=True, slots=True)
class Result:
    """What happened in a cell.

    Attributes:
        reached: Whether the fault was injected.
        jobs: How many jobs were sent; if the sender was killed, how many of its sends had returned.
        lost: How many of them have not completed.
        unsent: How many jobs have completed in addition to those that were sent, or were being sent.
        repeated: How many attempts there were in addition to the expected ones.
        unexplained: Jobs that ran again although the process that had run them was not the target of the fault.
        recovery_s: The time from the fault to the last start of a job; ``None`` if all had started before.
        states: The queue's jobs by state.
        points: The points that the cell's processes have reached.
        log: The output of the cell's processes.
    """

    cell: Cell
    reached: bool
    jobs: int
    lost: int
    unsent: int
    repeated: int
    unexplained: tuple[str, ...]
    recovery_s: float | None
    states: Mapping[str, int]
    points: frozenset[Point] = field(repr=False)
    log: str = field(repr=False)


def run_cell(cell: Cell, url: str, directory: Path, *, source: str = "") -> Result:
    """Run a cell in a separate queue.

    Args:
        cell: The cell.
        url: The server.
        directory: The directory for its files, which is created and removed.
        source: Source code for the worker's module.
    """
    run = _CellRun(cell, url, directory, source)
    try:
        return run.run()
    finally:
        run.close()


class _CellRun:
    """The processes of a cell, and what they have recorded."""

    def __init__(self, cell: Cell, url: str, directory: Path, source: str) -> None:
        self._cell, self._url, self._directory, self._source = cell, url, directory, source
        self._queue_name = f"chaos-{uuid4().hex[:8]}"
        self._processes: list[Worker] = []
        self._has_replaced = False
        directory.mkdir(parents=True)
        self._database = f"sqlite:///{directory / 'outbox.db'}" if cell.workload == "outbox" else ""
        self._app = App("sender", url)
        if self._database:
            engine = sa.create_engine(self._database)
            Outbox(self._app, engine).metadata.create_all(engine)
            engine.dispose()

    def run(self) -> Result:
        """Send the jobs, wait until they have ended, and count."""
        is_sender = self._cell.workload == "sender"
        worker = self._start("supervisor", armed=not is_sender)
        self._wait_while(
            lambda: not (worker.logged("Child started") or worker.process.poll() is not None or self._fault)
        )
        jobs = WORKLOADS[self._cell.workload](self._app, self._queue_name, self._database)
        at_most = jobs
        if is_sender:
            self._start("sender").wait(TIMEOUT_S)
            jobs, at_most = self._count("sent"), self._count("sending")
        with self._app.queue(self._queue_name) as queue:
            self._wait_while(lambda: self._keep_running(worker) or not _has_ended(queue, jobs))
            for process in self._processes:
                process.send(signal.SIGTERM)  # it exits after the jobs that it may still be running
                self._wait_while(lambda process=process: self._continue() or process.process.poll() is None)  # type: ignore[misc]
                process.wait()
            return self._result(jobs, at_most, queue.get_job_counts())

    def close(self) -> None:
        """End the processes, and remove the queue and the directory."""
        for process in self._processes:
            process.close()
        with self._app.queue(self._queue_name) as queue:
            queue.obliterate(force=True)
        self._app.close()
        shutil.rmtree(self._directory)

    def _start(self, role: str, *, armed: bool = True) -> Worker:
        mode = self._cell.mode
        threads = ["-P", "threads"] if mode == "threads" else []
        self._processes.append(
            Worker(
                self._directory / f"process-{len(self._processes)}",
                PREFETCHING["always" if mode == "prefetch" else "off"] + SOURCE + self._source,
                options=["-Q", self._queue_name, *threads],
                settings={
                    "broker_url": self._url,
                    "worker_concurrency": CONCURRENCY,
                    "worker_async_concurrency": CONCURRENCY,
                    "lock_duration": LOCK_S,
                    "stalled_interval": STALLED_S,
                },
                environ={
                    "PYTHONPATH": str(ROOT),
                    "CHAOS_DIRECTORY": str(self._directory),
                    "CHAOS_QUEUE": self._queue_name,
                    "CHAOS_DATABASE": self._database,
                    "CHAOS_MODE": mode,
                    "CHAOS_ROLE": role,
                    **(self._cell.environ if armed else {}),
                },
            )
        )
        return self._processes[-1]

    @staticmethod
    def _wait_while(condition: Callable[[], bool]) -> None:
        deadline, timer = time.monotonic() + TIMEOUT_S, threading.Event()
        while condition() and time.monotonic() < deadline:
            timer.wait(POLL_S)

    def _keep_running(self, worker: Worker) -> bool:
        """Continue a stopped process, and replace a dead or stopped worker; return whether a process is stopped."""
        is_stopped, point = self._continue(), self._cell.point
        is_alone = is_stopped and point is not None and point.role == "supervisor"
        if not self._has_replaced and (is_alone or worker.process.poll() is not None):
            self._has_replaced = True
            self._start("supervisor")
        return is_stopped

    def _continue(self) -> bool:
        """Continue a stopped process after a while; return whether it is still stopped."""
        fault = self._fault
        if fault is None or fault["fault"] != "SIGSTOP":
            return False
        if time.monotonic() <= fault["at"] + BUSY_S:
            return True
        with suppress(ProcessLookupError):
            os.kill(fault["pid"], signal.SIGCONT)
        return False

    @property
    def _journal(self) -> list[dict[str, Any]]:
        with suppress(FileNotFoundError):
            lines = (self._directory / "journal").read_text().splitlines(keepends=True)
            return [json.loads(line) for line in lines if line.endswith("\n")]
        return []

    @property
    def _fault(self) -> dict[str, Any] | None:
        return next((line for line in self._journal if line["what"] == "fault"), None)

    def _count(self, what: str) -> int:
        return sum(line["jobs"] for line in self._journal if line["what"] == what)

    def _result(self, jobs: int, at_most: int, states: Mapping[str, int]) -> Result:
        history = _History(self._journal)
        return Result(
            self._cell,
            history.fault is not None,
            jobs,
            max(0, jobs - states["completed"]),
            max(0, states["completed"] - at_most),
            history.repeated,
            history.unexplained,
            history.recovery_s,
            {state: count for state, count in states.items() if count},
            history.points,
            "\n".join(process.log for process in self._processes),
        )


def _has_ended(queue: Queue, jobs: int) -> bool:
    counts = queue.get_job_counts()
    return counts["completed"] >= jobs and not any(counts[state] for state in _LEFT)


class _History:
    """A cell's journal."""

    def __init__(self, lines: list[dict[str, Any]]) -> None:
        self.fault = next((line for line in lines if line["what"] == "fault"), None)
        self.points = frozenset(
            Point(line["role"], line["step"], line["side"]) for line in lines if line["what"] == "point"
        )
        self._starts: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for line in lines:
            if line["what"] == "start":
                self._starts[line["job"]].append(line)

    @cached_property
    def _repeated(self) -> Counter[str]:
        return Counter(
            {job: extra for job, starts in self._starts.items() if (extra := len(starts) - starts[0]["expected"]) > 0}
        )

    @property
    def repeated(self) -> int:
        """How many attempts there were in addition to the expected ones."""
        return self._repeated.total()

    @property
    def unexplained(self) -> tuple[str, ...]:
        """Jobs that ran again although they had not been running in the target of the fault, or twice."""
        target = self.fault["pid"] if self.fault else 0
        return tuple(
            job
            for job, extra in self._repeated.items()
            if extra > 1 or not any(target in {start["pid"], start["parent"]} for start in self._starts[job][:-1])
        )

    @property
    def recovery_s(self) -> float | None:
        """The time from the fault to the last start of a job that was waiting or running."""
        if self.fault is None:
            return None
        last = max((starts[-1]["at"] for starts in self._starts.values()), default=0.0)
        return last - self.fault["at"] if last > self.fault["at"] else None
