"""The measurements: each starts a new server and returns numbers."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis

from benchmarks.apps.counter import Counts, progress, read_counts
from benchmarks.peers import Peer, with_processes
from benchmarks.processes import (
    Failed,
    Worker,
    poll,
    produce,
    server,
    server_cpu_us,
    tree_cpu_us,
    tree_pss_mib,
    watch_other_cpu,
)

__all__ = ["MEASURES", "Bench", "Result"]

Result = dict[str, Any]

START_S = 30
STUCK_S = 30
LATENCIES = 300


@dataclass(frozen=True)
class _Usage:
    """CPU time and finished jobs at one moment of a throughput measurement."""

    done: int
    worker_us: int
    server_us: int


class Bench:
    """The measurements of one run.

    Args:
        directory: The directory for the servers' and workers' files; the caller removes it.
        jobs: The number of jobs in a backlog and in a bulk send; a quarter of that number is sent one by one.
        children: The number of children of each worker.
    """

    def __init__(self, directory: Path, jobs: int, children: int) -> None:
        self._directory, self._jobs, self._children = directory, jobs, children
        self._dumps: dict[str, Path] = {}
        self._measurements = 0

    def throughput(self, peer: Peer) -> Result:
        """Measure the time to process a backlog: from the start of the first job until the queue is empty."""
        directory, dump = self._new_directory(), self._dump(peer)
        with server(directory / "server", dump) as (started, client):
            if peer.pending(client) != self._jobs:
                raise Failed(f"{peer.name}: the queue has {peer.pending(client)} jobs instead of {self._jobs}")
            other_cpu = watch_other_cpu()
            with self._worker(peer, started.url, directory) as worker:
                first, settled_ns, last = self._watch(peer, client, worker, directory / "counters")
                other, pss_mib = other_cpu(), tree_pss_mib(worker.pid)
                worker.stop()  # after this, no more jobs run
            counts = read_counts(directory / "counters", self._jobs)
            stored = peer.stored(client) if peer.stored is not None else None
        return _result(counts, settled_ns, first, last) | {"stored": stored, "pss_mib": pss_mib, "other_cpu": other}

    def fastest(self, peer: Peer) -> tuple[Peer, str]:
        """Measure each of the peer's settings once; return the peer with the fastest, and a summary."""
        if not peer.settings:
            return peer, ""
        rates = {each: self.throughput(with_processes(peer, *each))["rate"] for each in peer.settings}
        summary = ", ".join(f"{processes} x {jobs} {rate:,.0f}" for (processes, jobs), rate in rates.items())
        return with_processes(peer, *max(rates, key=lambda each: rates[each])), f"best of (jobs/s): {summary}"

    def single(self, peer: Peer) -> Result:
        """Measure sending jobs one by one, each acknowledged before the next."""
        return self._send(peer, "single", max(1, self._jobs // 4))

    def bulk(self, peer: Peer) -> Result:
        """Measure bulk sends of a thousand jobs each."""
        return self._send(peer, "bulk", self._jobs)

    def latency(self, peer: Peer) -> Result:
        """Measure the time from sending a job to receiving its result, with an idle worker."""
        if not peer.has_results:
            return {}
        directory, number = self._new_directory(), min(LATENCIES, self._jobs)
        with server(directory / "server") as (started, _), self._worker(peer, started.url, directory):
            other_cpu = watch_other_cpu()
            samples = produce(peer, started.url, "latency", number)["samples"]
            quantiles = statistics.quantiles(samples, n=100, method="inclusive")
        return {
            **{f"p{percent}_ms": quantiles[percent - 1] * 1e3 for percent in (50, 95, 99)},
            "other_cpu": other_cpu(),
        }

    def _send(self, peer: Peer, operation: str, jobs: int) -> Result:
        with server(self._new_directory() / "server") as (started, client):
            other_cpu, cpu_us = watch_other_cpu(), server_cpu_us(client)
            output = produce(peer, started.url, operation, jobs)
            cpu_us = server_cpu_us(client) - cpu_us
            pending = peer.pending(client)
        if pending != output["sent"]:
            raise Failed(f"{peer.name}: {output['sent']} jobs were sent, but {pending} are in the queue")
        return {"rate": jobs / output["seconds"], "redis_us": cpu_us / output["sent"], "other_cpu": other_cpu()}

    def _watch(self, peer: Peer, client: redis.Redis, worker: Worker, counters: Path) -> tuple[_Usage, int, _Usage]:
        """Wait for the first and the last job; return usage at the start, the end time, and usage at the end."""

        def usage() -> _Usage:
            return _Usage(progress(counters), tree_cpu_us(worker.pid), server_cpu_us(client))

        def has_started() -> bool:
            worker.check()
            return progress(counters) > 0

        if not poll(has_started, 0.005, START_S):
            raise Failed(f"{peer.name}: no job started within {START_S} s: {worker.log_tail()}")
        first = usage()
        self._wait_for_all(counters, worker)
        # If a job was lost, wait only until the queue is empty; the counts will show the loss.
        poll(lambda: self._settled(peer, client), 0.002, 5)
        return first, time.monotonic_ns(), usage()

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
        return peer.pending(client) == 0 and (peer.stored is None or peer.stored(client) >= self._jobs)

    def _dump(self, peer: Peer) -> Path:
        """Return a dump of a backlog that the peer's producer sent; it is created once per run."""
        if peer.name not in self._dumps:
            directory = self._new_directory()
            with server(directory / "server") as (started, client):
                produce(peer, started.url, "bulk", self._jobs)
                client.save()
                self._dumps[peer.name] = directory / "server/dump.rdb"
        return self._dumps[peer.name]

    def _worker(self, peer: Peer, url: str, directory: Path) -> Worker:
        return Worker(peer, url, self._children, directory / "counters", self._jobs, directory / "worker.log")

    def _new_directory(self) -> Path:
        self._measurements += 1
        directory = self._directory / str(self._measurements)
        directory.mkdir()
        return directory


def _result(counts: Counts, settled_ns: int, first: _Usage, last: _Usage) -> Result:
    seconds = (max(settled_ns, counts.ended_ns) - counts.started_ns) / 1e9
    jobs = max(1, last.done - first.done)
    return {
        "rate": counts.done / seconds,
        "seconds": seconds,
        "worker_us": (last.worker_us - first.worker_us) / jobs,
        "redis_us": (last.server_us - first.server_us) / jobs,
        "done": counts.done,
        "lost": counts.lost,
        "duplicated": counts.duplicated,
        "split": list(counts.processes),
    }


MEASURES: dict[str, Callable[[Bench, Peer], Result]] = {
    "throughput": Bench.throughput,
    "single": Bench.single,
    "bulk": Bench.bulk,
    "latency": Bench.latency,
}
