"""The measurements: each starts a new server and returns numbers."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import redis

from benchmarks.apps.body import BODY, SLEEP_S
from benchmarks.apps.counter import Counts, progress, read_counts
from benchmarks.frameworks import FRAMEWORKS, SLEEPERS, Framework, with_processes
from benchmarks.processes import (
    Failed,
    Worker,
    ideal_seconds,
    loops_of,
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
BUSY_JOBS, BUSY_S = 2_000, 0.005
SLEEPING_JOBS = 4_000


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
        self._dumps: dict[tuple[str, int], Path] = {}
        self._measurements = 0

    def throughput(self, framework: Framework) -> Result:
        """Measure the time to process a backlog: from the start of the first job until the queue is empty."""
        return self._process(framework, self._jobs, framework.worker(self._children))

    def busy(self, framework: Framework) -> Result:
        """Measure jobs that use the CPU for 5 ms, compared with the same work in plain processes before and after."""
        if not framework.has_results:  # variants of other frameworks, and the baseline
            return {}
        loops, jobs = loops_of(framework, BUSY_S), min(BUSY_JOBS, self._jobs)
        ideals = [ideal_seconds(framework, loops, jobs, self._children)]
        busy = replace(framework, environ={**framework.environ, BODY: f"busy:{loops}"})
        # Not the setting that is fastest for no-op jobs, which may have only one process.
        result = self._process(busy, jobs, FRAMEWORKS[framework.name].worker(self._children))
        ideals.append(ideal_seconds(framework, loops, jobs, self._children))
        return _of_ideal(result, statistics.mean(ideals))

    def sleep(self, framework: Framework) -> Result:
        """Measure jobs that sleep for 50 ms, 200 at the same time."""
        if framework.sleeper is None:
            return {}
        jobs = min(SLEEPING_JOBS, self._jobs)
        sleeping = replace(framework, environ={**framework.environ, BODY: "sleep"})
        result = self._process(sleeping, jobs, framework.sleeper)
        return _of_ideal(result, jobs * SLEEP_S / SLEEPERS)

    def _process(self, framework: Framework, jobs: int, command: list[str]) -> Result:
        directory, dump = self._new_directory(), self._dump(framework, jobs)
        with server(directory / "server", dump) as (started, client):
            if framework.pending(client) != jobs:
                raise Failed(f"{framework.name}: the queue has {framework.pending(client)} jobs instead of {jobs}")
            other_cpu = watch_other_cpu()
            with self._worker(framework, started.url, directory, command) as worker:
                first, settled_ns, last = self._watch(framework, client, worker, directory / "counters", jobs)
                other, pss_mib = other_cpu(), tree_pss_mib(worker.pid)
                worker.stop()  # after this, no more jobs run
            counts = read_counts(directory / "counters", self._jobs)
            stored = framework.stored(client) if framework.stored is not None else None
        lost = counts.lost - (self._jobs - jobs)
        result = _result(counts, settled_ns, first, last)
        return result | {"lost": lost, "stored": stored, "pss_mib": pss_mib, "other_cpu": other}

    def fastest(self, framework: Framework) -> tuple[Framework, str]:
        """Measure each of the framework's settings once; return the framework with the fastest, and a summary."""
        if not framework.settings:
            return framework, ""
        rates = {each: self.throughput(with_processes(framework, *each))["rate"] for each in framework.settings}
        summary = ", ".join(f"{processes} x {jobs} {rate:,.0f}" for (processes, jobs), rate in rates.items())
        return with_processes(framework, *max(rates, key=lambda each: rates[each])), f"best of (jobs/s): {summary}"

    def single(self, framework: Framework) -> Result:
        """Measure sending jobs one by one, each acknowledged before the next."""
        return self._send(framework, "single", max(1, self._jobs // 4))

    def bulk(self, framework: Framework) -> Result:
        """Measure bulk sends of a thousand jobs each."""
        return self._send(framework, "bulk", self._jobs)

    def latency(self, framework: Framework) -> Result:
        """Measure the time from sending a job to receiving its result, with an idle worker."""
        if not framework.has_results:
            return {}
        directory, number, command = self._new_directory(), min(LATENCIES, self._jobs), framework.worker(self._children)
        with (
            server(directory / "server") as (started, _),
            self._worker(framework, started.url, directory, command) as worker,
        ):
            other_cpu = watch_other_cpu()
            output = produce(framework, started.url, "latency", number, directory / "counters")
            idle_mib = tree_pss_mib(worker.pid)
        return {
            **_percentiles("result", output["results"]),
            **_percentiles("task", output["task_ends"]),
            "idle_mib": idle_mib,
            "other_cpu": other_cpu(),
        }

    def _send(self, framework: Framework, operation: str, jobs: int) -> Result:
        with server(self._new_directory() / "server") as (started, client):
            other_cpu, cpu_us = watch_other_cpu(), server_cpu_us(client)
            output = produce(framework, started.url, operation, jobs)
            cpu_us = server_cpu_us(client) - cpu_us
            pending = framework.pending(client)
        if pending != output["sent"]:
            raise Failed(f"{framework.name}: {output['sent']} jobs were sent, but {pending} are in the queue")
        return {"rate": jobs / output["seconds"], "redis_us": cpu_us / output["sent"], "other_cpu": other_cpu()}

    def _watch(
        self, framework: Framework, client: redis.Redis, worker: Worker, counters: Path, jobs: int
    ) -> tuple[_Usage, int, _Usage]:
        """Wait for the first and the last job; return usage at the start, the end time, and usage at the end."""

        def usage() -> _Usage:
            return _Usage(progress(counters), tree_cpu_us(worker.pid), server_cpu_us(client))

        def has_started() -> bool:
            worker.check()
            return progress(counters) > 0

        if not poll(has_started, 0.005, START_S):
            raise Failed(f"{framework.name}: no job started within {START_S} s: {worker.log_tail()}")
        first = usage()
        self._wait_for_all(counters, worker, jobs)
        # If a job was lost, wait only until the queue is empty; the counts will show the loss.
        poll(lambda: self._settled(framework, client, jobs), 0.002, 5)
        return first, time.monotonic_ns(), usage()

    def _wait_for_all(self, counters: Path, worker: Worker, jobs: int) -> None:
        done, since = 0, time.monotonic()

        def finished() -> bool:
            nonlocal done, since
            now = progress(counters)
            if now > done:
                done, since = now, time.monotonic()
            worker.check()
            return done >= jobs or time.monotonic() - since > STUCK_S

        while not poll(finished, 0.005, 60):
            pass

    def _settled(self, framework: Framework, client: redis.Redis, jobs: int) -> bool:
        return framework.pending(client) == 0 and (framework.stored is None or framework.stored(client) >= jobs)

    def _dump(self, framework: Framework, jobs: int) -> Path:
        """Return a dump of a backlog that the framework's producer sent; it is created once per run."""
        key = framework.name, jobs
        if key not in self._dumps:
            directory = self._new_directory()
            with server(directory / "server") as (started, client):
                produce(framework, started.url, "bulk", jobs)
                client.save()
                self._dumps[key] = directory / "server/dump.rdb"
        return self._dumps[key]

    def _worker(self, framework: Framework, url: str, directory: Path, command: list[str]) -> Worker:
        return Worker(framework, command, url, directory / "counters", self._jobs, directory / "worker.log")

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
        "job_seconds": (counts.ended_ns - counts.started_ns) / 1e9,
        "worker_us": (last.worker_us - first.worker_us) / jobs,
        "redis_us": (last.server_us - first.server_us) / jobs,
        "done": counts.done,
        "lost": counts.lost,
        "duplicated": counts.duplicated,
        "split": list(counts.processes),
    }


def _of_ideal(result: Result, ideal_s: float) -> Result:
    """Compare the time of the jobs with the ideal; it does not include the time until all results are stored."""
    return result | {"rate": result["done"] / result["job_seconds"], "of_ideal": ideal_s / result["job_seconds"]}


def _percentiles(name: str, samples: list[float]) -> Result:
    quantiles = statistics.quantiles(samples, n=100, method="inclusive")
    return {f"{name}_p{percent}_ms": quantiles[percent - 1] * 1e3 for percent in (50, 95, 99)}


MEASURES: dict[str, Callable[[Bench, Framework], Result]] = {
    "throughput": Bench.throughput,
    "single": Bench.single,
    "bulk": Bench.bulk,
    "latency": Bench.latency,
    "busy": Bench.busy,
    "sleep": Bench.sleep,
}
