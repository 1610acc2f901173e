"""Workers of bulltask, Node.js and the official Python client on one queue, which are killed at random."""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Final

from tests.interop.node_bridge import NodeBridge
from tests.interop.official.bridge import OfficialPython
from tests.soak.journal import now_ms
from tests.support.worker import Worker

__all__ = ["QUEUE", "MixedFleet"]

QUEUE: Final = "mixed"
CHILDREN: Final = 2
LOCK_S: Final = 5
STALLED_INTERVAL_S: Final = 2
# Here, a job must not fail because its worker was killed.
SETTINGS: Final = {
    "worker_concurrency": CHILDREN,
    "lock_duration": LOCK_S,
    "stalled_interval": STALLED_INTERVAL_S,
    "max_stalled_count": 1_000,
    "max_crashes": 1_000,
}
OFFICIAL: Final = {
    "concurrency": 4,
    "lockDuration": LOCK_S * 1_000,
    "stalledInterval": STALLED_INTERVAL_S * 1_000,
    "maxStalledCount": 1_000,
}
TASKS: Final = """
import asyncio
import time

FILE = os.open(os.environ["ATTEMPTS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)


def note(what, self):
    os.write(FILE, f"{what} {self.request.id} {os.getpid()} {int(time.time() * 1000)}\\n".encode())


@app.task(bind=True, name="attempt")
def attempt(self, ms):
    note("start", self)
    time.sleep(ms / 1000)
    note("end", self)
    return ms


@app.task(bind=True, name="aattempt")
async def aattempt(self, ms):
    note("start", self)
    await asyncio.sleep(ms / 1000)
    note("end", self)
    return ms
"""
VICTIMS: Final = ("child", "child", "supervisor", "Node.js 1", "Node.js 2", "Python")


class MixedFleet:
    """One worker of bulltask with two children, two of Node.js, and one of the official Python client.

    Args:
        directory: The directory for bulltask's modules and logs.
        url: The server.
        file: The file to which the tasks append the start and the end of each attempt.
        rng: Chooses what is killed.

    Attributes:
        killed: When a process was killed, in epoch milliseconds, by process id.
        clients: The client of each process that is not a child of bulltask, by process id.
        kills: The number of kills by victim.
        errors: The number of errors that official workers reported, by client and message.
    """

    def __init__(self, directory: Path, url: str, file: Path, rng: random.Random) -> None:
        self._directory, self._url, self._file, self._rng = directory, url, file, rng
        self._workers: list[Worker] = []
        self._bridges: dict[str, NodeBridge] = {}
        self.killed: dict[int, int] = {}
        self.clients: dict[int, str] = {}
        self.kills: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()

    def start(self) -> None:
        """Start all workers, and wait for them."""
        self._start_worker()
        for name in VICTIMS[3:]:
            self._start_bridge(name)
        self._workers[-1].wait_for_line("Child started", CHILDREN)

    def kill(self) -> None:
        """Kill a random process with ``kill -9``, and start another one in its place."""
        victim = self._rng.choice(VICTIMS)
        self.kills[victim] += 1
        worker = self._workers[-1]
        if victim == "child":
            if children := worker.children:
                with suppress(ProcessLookupError):
                    self._kill(self._rng.choice(children))
        elif victim == "supervisor":
            worker.process.kill()
            worker.wait()
            # The children exit with their supervisor. From the log, because it may have started another one just now.
            started, died = ({line["pid"] for line in worker.logged(f"Child {end}")} for end in ("started", "died"))
            self.killed |= dict.fromkeys([worker.pid, *(started - died)], now_ms())
            self._start_worker()
        else:
            bridge = self._bridges[victim]
            self._kill(bridge.pid)
            self._close(victim)
            self._start_bridge(victim)

    def stop(self) -> int:
        """Stop all workers; return the exit code of bulltask's."""
        for name in tuple(self._bridges):
            self._close(name)
        return self._workers[-1].stop()

    def close(self) -> None:
        """Kill what is left, and write the logs."""
        for bridge in self._bridges.values():
            bridge.close()
        for number, worker in enumerate(self._workers):
            worker.close()
            (self._directory / f"worker-{number}.log").write_text(worker.log + "\n")

    def _kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        self.killed[pid] = now_ms()

    def _close(self, name: str) -> None:
        bridge = self._bridges.pop(name)
        bridge.close()
        for error in bridge.events("worker.error"):
            self.errors[f"{name.partition(' ')[0]}: {error['args']['message'][:120]}"] += 1

    def _start_worker(self) -> None:
        directory = self._directory / f"app-{len(self._workers)}"
        settings = {**SETTINGS, "broker_url": self._url}
        environ = {"ATTEMPTS": str(self._file), "JOURNAL_URL": self._url}
        self._workers.append(Worker(directory, TASKS, options=["-Q", QUEUE], settings=settings, environ=environ))

    def _start_bridge(self, name: str) -> None:
        bridge = (OfficialPython if name == "Python" else NodeBridge).to(self._url)
        self._bridges[name] = bridge
        self.clients[bridge.pid] = name.partition(" ")[0]
        args = {"file": str(self._file)}
        bridge.call("worker.start", queue=f"{{{QUEUE}}}", processor="attempt", args=args, opts=OFFICIAL)
