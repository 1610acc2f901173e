"""The servers, workers and producers of the benchmark, and their CPU usage."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis

from benchmarks.apps.counter import DIRECTORY, JOBS
from benchmarks.frameworks import Framework
from bulltask.testing.worker import RedisServer

__all__ = [
    "Failed",
    "Worker",
    "executors_of",
    "ideal_seconds",
    "loops_of",
    "poll",
    "produce",
    "server",
    "server_cpu_us",
    "tree_cpu_us",
    "tree_pss_mib",
    "watch_other_cpu",
]

ROOT = Path(__file__).parent.parent
_TICK_US = 1_000_000 // os.sysconf("SC_CLK_TCK")


class Failed(Exception):
    """A measurement failed."""


@contextmanager
def server(directory: Path, dump: Path | None = None) -> Iterator[tuple[RedisServer, redis.Redis]]:
    """Start a server without persistence, with the data of a dump if one is given; yield it with a client."""
    directory.mkdir()
    if dump is not None:
        (directory / "dump.rdb").hardlink_to(dump)
    with RedisServer.start(directory, appendonly=False) as started, redis.Redis(port=started.port) as client:
        yield started, client


def server_cpu_us(client: redis.Redis) -> int:
    """Return the CPU time that the server has used."""
    info: Any = client.info("cpu")
    return int((info["used_cpu_user"] + info["used_cpu_sys"]) * 1_000_000)


def environ(framework: Framework, broker: str, **more: str) -> dict[str, str]:
    """Return the environment for an app's process, without the caller's settings for bulltask and Celery."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("BULLTASK_", "CELERY_"))}
    return {
        **inherited,
        **framework.environ,
        **more,
        "BENCH_BROKER": broker,
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "ignore",
    }


def produce(
    framework: Framework, broker: str, operation: str, jobs: int, counters: Path | None = None
) -> dict[str, Any]:
    """Run the framework's producer and return its output; ``counters`` is the directory of its worker's counters."""
    command = [*framework.producer, operation, str(jobs)]
    env = environ(framework, broker, **({} if counters is None else {DIRECTORY: str(counters)}))
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise Failed(f"{framework.name}: {operation} exited with {done.returncode}: {_tail(done.stderr)}")
    output: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return output


def ideal_seconds(framework: Framework, loops: int, jobs: int, processes: int) -> float:
    """Return how long ``processes`` processes without a framework need for the busy loops of ``jobs`` jobs."""
    command = [*framework.busy, str(loops), str(jobs // processes)]
    env = environ(framework, "redis://")
    running = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) for _ in range(processes)]
    return max(float(process.communicate(timeout=120)[0]) for process in running)


def loops_of(framework: Framework, seconds: float) -> int:
    """Return how many iterations of the busy loop take ``seconds``; measured once for each language."""
    kind = framework.busy[0]
    if kind not in _LOOPS:
        _LOOPS[kind] = round(_SAMPLE * seconds * 20 / ideal_seconds(framework, _SAMPLE, 20, 1))
    return _LOOPS[kind]


_LOOPS: dict[str, int] = {}
_SAMPLE = 100_000


class Worker:
    """A worker with its children, which is stopped at the end of the ``with`` statement.

    Args:
        framework: The framework.
        command: The worker's command.
        broker: The URL of the server.
        counters: The directory of the counter files.
        jobs: The number of jobs in the run.
        log: The file for the worker's output.
    """

    def __init__(
        self, framework: Framework, command: list[str], broker: str, counters: Path, jobs: int, log: Path
    ) -> None:
        self._framework, self._log = framework, log
        counters.mkdir()
        env = environ(framework, broker, **{DIRECTORY: str(counters), JOBS: str(jobs)})
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=log.parent
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def check(self) -> None:
        """Raise an exception if the worker has exited."""
        if self._process.poll() is not None:
            raise Failed(
                f"{self._framework.name}: the worker exited with {self._process.returncode}: {self.log_tail()}"
            )

    def log_tail(self) -> str:
        """Return the last lines of the log."""
        return _tail(self._log.read_text(errors="replace"))

    def stop(self) -> None:
        """Terminate the worker; after 15 s, kill it and its descendants."""
        pids = [self.pid, *_descendants(self.pid)]
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(15)
        except subprocess.TimeoutExpired:
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._process.wait()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self.stop()


def poll(condition: Callable[[], bool], interval_s: float, timeout_s: float) -> bool:
    """Wait until the condition is true; return false after the timeout."""
    never = threading.Event()
    for _ in range(max(1, round(timeout_s / interval_s))):
        if condition():
            return True
        never.wait(interval_s)
    return condition()


def tree_cpu_us(pid: int) -> int:
    """Return the CPU time of a process and its descendants, including exited children."""
    table = _processes()
    return sum(table[each].cpu_us for each in [pid, *_descendants(pid, table)] if each in table)


def executors_of(pid: int) -> list[int]:
    """Return the JVMs of Spark's executors below a process; there are none with a master ``local[…]``."""
    found = []
    for each in _descendants(pid):
        with suppress(OSError):
            if b"CoarseGrainedExecutorBackend" in Path(f"/proc/{each}/cmdline").read_bytes():
                found.append(each)
    return found


def tree_pss_mib(pid: int) -> float:
    """Return the memory of a process and its descendants; a shared page counts in equal parts for its processes."""
    kib = 0
    for each in [pid, *_descendants(pid)]:
        with suppress(OSError):
            lines = Path(f"/proc/{each}/smaps_rollup").read_text().splitlines()
            kib += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return kib / 1024


@dataclass(frozen=True)
class _Process:
    parent: int
    cpu_us: int


def _processes() -> Mapping[int, _Process]:
    table = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            table[int(folder.name)] = _Process(int(fields[1]), sum(map(int, fields[11:15])) * _TICK_US)
    return table


def _descendants(pid: int, table: Mapping[int, _Process] | None = None) -> list[int]:
    table = table or _processes()
    descendants, parents = [], [pid]
    while parents:
        children = [child for child, process in table.items() if process.parent in parents]
        descendants += children
        parents = children
    return descendants


def watch_other_cpu() -> Callable[[], float]:
    """Return a function that returns the fraction of CPU time that other processes have used since this call."""
    all_before, busy_before, own_before = *_machine_us(), tree_cpu_us(os.getpid())

    def fraction() -> float:
        all_now, busy_now = _machine_us()
        other = busy_now - busy_before - (tree_cpu_us(os.getpid()) - own_before)
        return max(0.0, other / max(1, all_now - all_before))

    return fraction


def _machine_us() -> tuple[int, int]:
    ticks = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return sum(ticks) * _TICK_US, (sum(ticks) - ticks[3] - ticks[4]) * _TICK_US


def _tail(text: str) -> str:
    return " | ".join(text.strip().splitlines()[-4:]) or "no output"
