"""The workers of a soak test: started, monitored, killed and restarted."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.soak.resources import Resources
from tests.soak.tasks import QUEUES, TASKS
from tests.support.processes import SESSION_VARIABLE
from tests.support.worker import Worker

__all__ = ["CHILDREN", "Fleet", "probe_queue"]

CHILDREN = 2
THREADS_INDEX = 1
"""The worker that runs sync tasks in two threads of one child, instead of in two children."""
CHECK_S = 0.2
SAMPLE_S = 5.0


def probe_queue(index: int) -> str:
    """Return the queue that only the worker with this index consumes."""
    return f"probe-{index}"


class Fleet:
    """Starts the workers, and restarts and records those that crash.

    Args:
        directory: The directory for the workers' modules and logs.
        urls: The broker URL of each worker.
        journal_url: The server on which the tasks record their attempts.
        settings: The settings of all workers.
        session_id: An id in the environment of all their processes.

    Attributes:
        deaths: Supervisors that exited without being stopped or killed: exit code and end of the log.
        resources: Memory, open files and threads of all processes over time.
    """

    def __init__(
        self, directory: Path, urls: list[str], journal_url: str, settings: Mapping[str, object], session_id: str
    ) -> None:
        self._directory, self._urls, self._settings = directory, urls, dict(settings)
        self._environ = {"JOURNAL_URL": journal_url, SESSION_VARIABLE: session_id}
        self._started, self._lock, self._over = 0, threading.RLock(), threading.Event()
        self.deaths: list[str] = []
        self.resources = Resources()
        self._all: list[Worker] = []
        self.workers = [self._start(index) for index in range(len(urls))]
        self._monitor_thread = threading.Thread(target=self._monitor, name="fleet", daemon=True)

    def wait_until_ready(self) -> None:
        """Wait for the first children, and start to monitor the workers."""
        for index, worker in enumerate(self.workers):
            worker.wait_for_line("Child started", _children(index))
        self._monitor_thread.start()

    def kill(self, index: int) -> None:
        """Kill a supervisor with ``kill -9`` and start a new worker; return when it has children."""
        with self._lock:
            self.workers[index].process.kill()
            self.workers[index].wait()
            self.workers[index] = self._start(index)
            worker = self.workers[index]
        worker.wait_for_line("Child started", _children(index))

    def stop(self) -> list[str]:
        """Stop all workers with TERM; return the problems."""
        self._over.set()
        self._monitor_thread.join()
        problems = []
        for index, worker in enumerate(self.workers):
            try:
                code = worker.stop(60)
            except TimeoutError as exc:
                problems.append(f"worker {index} did not stop: {exc}")
            else:
                problems += [f"worker {index} stopped with exit code {code}"] if code else []
        return problems

    def close(self) -> None:
        """Kill the remaining workers, and write the logs to the directory."""
        self._over.set()
        for number, worker in enumerate(self._all):
            worker.send(signal.SIGCONT)
            worker.close()
            (self._directory / f"worker-{number}.log").write_text(worker.log + "\n")

    def _start(self, index: int) -> Worker:
        directory = self._directory / f"app-{self._started}"
        self._started += 1
        worker = Worker(
            directory,
            TASKS,
            options=["-Q", ",".join([*QUEUES, probe_queue(index)]), *(["-P", "threads"] * (index == THREADS_INDEX))],
            settings={**self._settings, "broker_url": self._urls[index]},
            environ={**self._environ, "SOAK_WORKER": str(index)},
        )
        self._all.append(worker)
        return worker

    def _monitor(self) -> None:
        checks = 0
        while not self._over.wait(CHECK_S):
            with self._lock:
                for index, worker in enumerate(self.workers):
                    if (code := worker.process.poll()) is not None:
                        worker.wait()
                        end = "\n".join(worker.text[-15:])
                        self.deaths.append(f"worker {index} (process {worker.pid}) exited with {code}:\n{end}")
                        self.workers[index] = self._start(index)
                if checks % int(SAMPLE_S / CHECK_S) == 0:
                    self.resources.record(self._processes())
            checks += 1

    def _processes(self) -> Iterator[tuple[str, int]]:
        for index, worker in enumerate(self.workers):
            yield f"supervisor {index}", worker.pid
            for pid in worker.children:
                yield f"child of {index}", pid


def _children(index: int) -> int:
    return 1 if index == THREADS_INDEX else CHILDREN
