"""The workers: started, watched, killed and started again."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.soak.tasks import QUEUES, TASKS
from tests.support.processes import SESSION_VARIABLE
from tests.support.worker import Worker

__all__ = ["CHILDREN", "Fleet", "Sample", "probe_queue"]

CHILDREN = 2
LOOK_S = 0.2
SAMPLE_S = 5.0


def probe_queue(index: int) -> str:
    """The queue that only the worker of this index serves."""
    return f"probe-{index}"


@dataclass(frozen=True, slots=True)
class Sample:
    """What a supervisor holds at one moment: resident memory in MB, open files."""

    memory_mb: float
    files: int

    @classmethod
    def of(cls, pid: int) -> Sample:
        """Look at a process.

        Raises:
            OSError: it is gone.
        """
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return cls(pages * os.sysconf("SC_PAGESIZE") / 2**20, sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir()))


class Fleet:
    """Responsible for the workers; one that ends by itself is written down and started again.

    Args:
        directory: for the workers' modules and logs.
        urls: the way to Redis of each worker.
        journal_url: where the tasks tell of their runs.
        settings: of all workers.
        mark: in the environment of all their processes.

    Attributes:
        deaths: supervisors that ended although nobody ended them: how, and the end of their log.
        samples: memory and files of each supervisor that lived, in the order of time, by its process id.
    """

    def __init__(
        self, directory: Path, urls: list[str], journal_url: str, settings: Mapping[str, object], mark: str
    ) -> None:
        self._directory, self._urls, self._settings = directory, urls, dict(settings)
        self._environ = {"JOURNAL_URL": journal_url, SESSION_VARIABLE: mark}
        self._started, self._lock, self._over = 0, threading.RLock(), threading.Event()
        self.deaths: list[str] = []
        self.samples: dict[int, list[Sample]] = {}
        self._all: list[Worker] = []
        self.workers = [self._start(index) for index in range(len(urls))]
        self._watcher = threading.Thread(target=self._watch, name="fleet", daemon=True)

    def wait_until_ready(self) -> None:
        """Wait for the first children, and watch from then on."""
        for worker in self.workers:
            worker.wait_for_line("Child started", CHILDREN)
        self._watcher.start()

    def kill(self, index: int) -> None:
        """``kill -9`` a supervisor, and start another one in its place; return when that has children."""
        with self._lock:
            self.workers[index].process.kill()
            self.workers[index].wait()
            self.workers[index] = self._start(index)
            fresh = self.workers[index]
        fresh.wait_for_line("Child started", CHILDREN)

    def stop(self) -> list[str]:
        """End all as an operator would; return what is wrong with it."""
        self._over.set()
        self._watcher.join()
        wrong = []
        for index, worker in enumerate(self.workers):
            try:
                code = worker.stop(60)
            except TimeoutError as exc:
                wrong.append(f"worker {index} did not stop: {exc}")
            else:
                wrong += [f"worker {index} stopped with exit code {code}"] if code else []
        return wrong

    def close(self) -> None:
        """End what is left, and write the logs into the directory."""
        self._over.set()
        for number, worker in enumerate(self._all):
            worker.send(signal.SIGCONT)
            worker.close()
            (self._directory / f"worker-{number}.log").write_text(worker.log + "\n")

    def _start(self, index: int) -> Worker:
        place = self._directory / f"app-{self._started}"
        self._started += 1
        worker = Worker(
            place,
            TASKS,
            options=["-Q", ",".join([*QUEUES, probe_queue(index)])],
            settings={**self._settings, "broker_url": self._urls[index]},
            environ={**self._environ, "SOAK_WORKER": str(index)},
        )
        self._all.append(worker)
        return worker

    def _watch(self) -> None:
        looks = 0
        while not self._over.wait(LOOK_S):
            with self._lock:
                for index, worker in enumerate(self.workers):
                    if (code := worker.process.poll()) is not None:
                        worker.wait()
                        end = "\n".join(worker.text[-15:])
                        self.deaths.append(f"worker {index} (process {worker.pid}) ended with {code}:\n{end}")
                        self.workers[index] = self._start(index)
                    elif looks % int(SAMPLE_S / LOOK_S) == 0:
                        self.samples.setdefault(worker.pid, []).append(Sample.of(worker.pid))
            looks += 1
