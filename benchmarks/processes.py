"""The benchmark's own servers, workers and producers, and what they cost."""

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
from benchmarks.peers import Peer
from bulltask.testing.server import RedisServer

__all__ = ["Failed", "Worker", "foreign_share", "poll", "produce", "server", "server_cpu_us", "tree_cpu_us"]

ROOT = Path(__file__).parent.parent
_TICK_US = 1_000_000 // os.sysconf("SC_CLK_TCK")


class Failed(Exception):
    """A measurement could not be taken."""


@contextmanager
def server(directory: Path, dump: Path | None = None) -> Iterator[tuple[RedisServer, redis.Redis]]:
    """A fresh server without persistence, filled from a dump if one is given, and a client of it."""
    directory.mkdir()
    if dump is not None:
        (directory / "dump.rdb").hardlink_to(dump)
    with RedisServer.start(directory, appendonly=False) as started, redis.Redis(port=started.port) as client:
        yield started, client


def server_cpu_us(client: redis.Redis) -> int:
    """CPU time of the server so far."""
    info: Any = client.info("cpu")
    return int((info["used_cpu_user"] + info["used_cpu_sys"]) * 1_000_000)


def environ(peer: Peer, broker: str, **more: str) -> dict[str, str]:
    """The environment of an app's process; settings of the caller's own bulltask stay out of it."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("BULLTASK_", "CELERY_"))}
    return {**own, **peer.environ, **more, "BENCH_BROKER": broker, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}


def produce(peer: Peer, broker: str, operation: str, jobs: int) -> dict[str, Any]:
    """Run the peer's producer and return what it says."""
    command = [*peer.producer, operation, str(jobs)]
    env = environ(peer, broker)
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise Failed(f"{peer.name}: {operation} ended with {done.returncode}: {_tail(done.stderr)}")
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


class Worker:
    """One worker with its children, stopped at the end of the ``with`` statement.

    Args:
        peer: whose.
        broker: URL of the server.
        children: how many.
        counters: directory of the counter files.
        jobs: of the run.
        log: file for what it says.
    """

    def __init__(self, peer: Peer, broker: str, children: int, counters: Path, jobs: int, log: Path) -> None:
        self._peer, self._log = peer, log
        counters.mkdir()
        env = environ(peer, broker, **{DIRECTORY: str(counters), JOBS: str(jobs)})
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                peer.worker(children), env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=log.parent
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def check(self) -> None:
        """Raise if the worker has ended."""
        if self._process.poll() is not None:
            raise Failed(f"{self._peer.name}: the worker ended with {self._process.returncode}: {self.said()}")

    def said(self) -> str:
        """The last lines of its log."""
        return _tail(self._log.read_text(errors="replace"))

    def stop(self) -> None:
        """Ask it to end and wait; after 15 s kill it and what it started."""
        family = [self.pid, *_descendants(self.pid)]
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(15)
        except subprocess.TimeoutExpired:
            for pid in family:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._process.wait()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self.stop()


def poll(answer: Callable[[], bool], every_s: float, within_s: float) -> bool:
    """Ask until the answer is true; false when it was not in time."""
    never = threading.Event()
    for _ in range(max(1, round(within_s / every_s))):
        if answer():
            return True
        never.wait(every_s)
    return answer()


def tree_cpu_us(pid: int) -> int:
    """CPU time of a process and all that descend from it, ended children included."""
    table = _processes()
    return sum(table[each].cpu_us for each in [pid, *_descendants(pid, table)] if each in table)


@dataclass(frozen=True)
class _Process:
    parent: int
    cpu_us: int


def _processes() -> Mapping[int, _Process]:
    table = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (folder / "stat").read_text().rpartition(")")[2].split()
            table[int(folder.name)] = _Process(int(words[1]), sum(map(int, words[11:15])) * _TICK_US)
    return table


def _descendants(pid: int, table: Mapping[int, _Process] | None = None) -> list[int]:
    table = table or _processes()
    found, looked_at = [], [pid]
    while looked_at:
        children = [child for child, process in table.items() if process.parent in looked_at]
        found += children
        looked_at = children
    return found


def foreign_share() -> Callable[[], float]:
    """Begin to watch; the function returned says which share of the machine's CPU others have used since."""
    all_before, busy_before, own_before = *_machine_us(), tree_cpu_us(os.getpid())

    def share() -> float:
        all_now, busy_now = _machine_us()
        foreign = busy_now - busy_before - (tree_cpu_us(os.getpid()) - own_before)
        return max(0.0, foreign / max(1, all_now - all_before))

    return share


def _machine_us() -> tuple[int, int]:
    ticks = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return sum(ticks) * _TICK_US, (sum(ticks) - ticks[3] - ticks[4]) * _TICK_US


def _tail(text: str) -> str:
    return " | ".join(text.strip().splitlines()[-4:]) or "it said nothing"
