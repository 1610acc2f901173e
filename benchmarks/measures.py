"""The measurements; each takes a fresh server and returns plain numbers."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis

from benchmarks.apps.counter import Tally, progress, tally
from benchmarks.peers import Peer, with_processes
from benchmarks.processes import (
    Failed,
    Worker,
    foreign_share,
    poll,
    produce,
    server,
    server_cpu_us,
    tree_cpu_us,
)

__all__ = ["MEASURES", "Bench", "Result"]

Result = dict[str, Any]

START_S = 30
STUCK_S = 30
LATENCIES = 300


@dataclass(frozen=True)
class _Cost:
    """CPU time up to a moment of a drain."""

    done: int
    worker_us: int
    server_us: int


class Bench:
    """Takes measurements.

    Args:
        directory: for servers' and workers' files; somebody else removes it.
        jobs: of a drain and a bulk send; a quarter of it are sent one by one.
        children: of each worker.
    """

    def __init__(self, directory: Path, jobs: int, children: int) -> None:
        self._directory, self._jobs, self._children = directory, jobs, children
        self._dumps: dict[str, Path] = {}
        self._taken = 0

    def drain(self, peer: Peer) -> Result:
        """Time from the start of the first job to the end of the last one with nothing left in the queue."""
        place, dump = self._place(), self._dump(peer)
        with server(place / "server", dump) as (started, client):
            if peer.left(client) != self._jobs:
                raise Failed(f"{peer.name}: the queue holds {peer.left(client)} jobs instead of {self._jobs}")
            others = foreign_share()
            with self._worker(peer, started.url, place) as worker:
                first, settled_ns, last = self._watch(peer, client, worker, place / "counters")
                foreign = others()
                worker.stop()  # what it still might run has run now
            counted = tally(place / "counters", self._jobs)
            stored = peer.stored(client) if peer.stored is not None else None
        return _drained(counted, settled_ns, first, last) | {"stored": stored, "foreign": foreign}

    def fastest(self, peer: Peer) -> tuple[Peer, str]:
        """The peer in the one of its settings that drains fastest, each tried once, and what was found."""
        if not peer.settings:
            return peer, ""
        tried = {each: self.drain(with_processes(peer, *each))["rate"] for each in peer.settings}
        rates = ", ".join(f"{processes} x {at_once} {rate:,.0f}" for (processes, at_once), rate in tried.items())
        return with_processes(peer, *max(tried, key=lambda each: tried[each])), f"best of (jobs/s): {rates}"

    def single(self, peer: Peer) -> Result:
        """Jobs sent one by one, each acknowledged before the next."""
        return self._send(peer, "single", max(1, self._jobs // 4))

    def bulk(self, peer: Peer) -> Result:
        """Jobs sent with the call for many, a thousand at a time."""
        return self._send(peer, "bulk", self._jobs)

    def latency(self, peer: Peer) -> Result:
        """Time from sending to having the result, the worker being idle otherwise."""
        if "BENCH_RESULTS" in peer.environ:
            return {}
        place, number = self._place(), min(LATENCIES, self._jobs)
        with server(place / "server") as (started, _), self._worker(peer, started.url, place):
            others = foreign_share()
            samples = produce(peer, started.url, "latency", number)["samples"]
            marks = statistics.quantiles(samples, n=100, method="inclusive")
        return {"p50_ms": marks[49] * 1e3, "p95_ms": marks[94] * 1e3, "p99_ms": marks[98] * 1e3, "foreign": others()}

    def _send(self, peer: Peer, operation: str, jobs: int) -> Result:
        with server(self._place() / "server") as (started, client):
            others, cpu_us = foreign_share(), server_cpu_us(client)
            said = produce(peer, started.url, operation, jobs)
            cpu_us = server_cpu_us(client) - cpu_us
            found = peer.left(client)
        if found != said["sent"]:
            raise Failed(f"{peer.name}: {said['sent']} jobs were sent and {found} are in the queue")
        return {"rate": jobs / said["seconds"], "redis_us": cpu_us / said["sent"], "foreign": others()}

    def _watch(self, peer: Peer, client: redis.Redis, worker: Worker, counters: Path) -> tuple[_Cost, int, _Cost]:
        """Wait for the first job and the last one; return the costs at both moments, and the last one itself."""

        def cost() -> _Cost:
            return _Cost(progress(counters), tree_cpu_us(worker.pid), server_cpu_us(client))

        def begun() -> bool:
            worker.check()
            return progress(counters) > 0

        if not poll(begun, 0.005, START_S):
            raise Failed(f"{peer.name}: no job began within {START_S} s: {worker.said()}")
        first = cost()
        self._wait_for_all(counters, worker)
        # A lost job never comes: then the queue's emptiness ends the wait, and the tally tells.
        poll(lambda: self._settled(peer, client), 0.002, 5)
        return first, time.monotonic_ns(), cost()

    def _wait_for_all(self, counters: Path, worker: Worker) -> None:
        done, since = 0, time.monotonic()

        def finished() -> bool:
            nonlocal done, since
            now = progress(counters)
            if now > done:
                done, since = now, time.monotonic()
            worker.check()
            return done >= self._jobs or time.monotonic() - since > STUCK_S

        while not poll(finished, 0.005, 60):
            pass

    def _settled(self, peer: Peer, client: redis.Redis) -> bool:
        return peer.left(client) == 0 and (peer.stored is None or peer.stored(client) >= self._jobs)

    def _dump(self, peer: Peer) -> Path:
        """A queue filled by the peer's own producer, made once in a run and kept as a dump."""
        if peer.name not in self._dumps:
            place = self._place()
            with server(place / "server") as (started, client):
                produce(peer, started.url, "bulk", self._jobs)
                client.save()
                self._dumps[peer.name] = place / "server/dump.rdb"
        return self._dumps[peer.name]

    def _worker(self, peer: Peer, url: str, place: Path) -> Worker:
        return Worker(peer, url, self._children, place / "counters", self._jobs, place / "worker.log")

    def _place(self) -> Path:
        self._taken += 1
        place = self._directory / str(self._taken)
        place.mkdir()
        return place


def _drained(counted: Tally, settled_ns: int, first: _Cost, last: _Cost) -> Result:
    seconds = (max(settled_ns, counted.ended_ns) - counted.started_ns) / 1e9
    charged = max(1, last.done - first.done)
    return {
        "rate": counted.done / seconds,
        "seconds": seconds,
        "worker_us": (last.worker_us - first.worker_us) / charged,
        "redis_us": (last.server_us - first.server_us) / charged,
        "done": counted.done,
        "lost": counted.lost,
        "duplicated": counted.duplicated,
        "split": list(counted.processes),
    }


MEASURES: dict[str, Callable[[Bench, Peer], Result]] = {
    "drain": Bench.drain,
    "single": Bench.single,
    "bulk": Bench.bulk,
    "latency": Bench.latency,
}
