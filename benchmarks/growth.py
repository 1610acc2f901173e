"""How much slower is a long queue? Measures rates with many other jobs in the queue.

``growth.py`` prints jobs/s, and the rate with many further jobs divided by the rate with 1,000. Each queue is
filled once, and every round loads its dump, so a run with a million waiting jobs takes about ten minutes.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.apps.body import run
from benchmarks.apps.counter import progress
from benchmarks.frameworks import FRAMEWORKS
from benchmarks.processes import Worker, poll, server
from benchmarks.report import spread
from bulltask import App

JOBS = 20_000
SINGLE, BULK = 2_000, 10_000
PART = 10_000
FEW = 1_000
HOUR_S = 3_600


@dataclass(frozen=True)
class Queue:
    """What is in the queue: ``JOBS`` measured jobs, and other jobs, which run later.

    Attributes:
        options: The options of the measured jobs.
        others: The number of other jobs.
        options_of_others: Their options.
    """

    options: Mapping[str, int]
    others: int
    options_of_others: Mapping[str, int]


def queues(waiting: int, others: int) -> dict[tuple[str, int], Queue]:
    """Return a short and a long queue of each kind."""
    high, low, later = {"priority": 1}, {"priority": 2}, {"countdown": HOUR_S}
    kinds = {"waiting": ({}, {}, waiting), "delayed": ({}, later, others), "prioritized": (high, low, others)}
    return {
        (kind, count): Queue(options, count, options_of_others)
        for kind, (options, options_of_others, most) in kinds.items()
        for count in (FEW, most)
    }


def fill(url: str, queue: Queue) -> None:
    app = App("bench", broker_url=url)
    noop = app.task(name="noop")(run)
    for count, options in ((JOBS, queue.options), (queue.others, queue.options_of_others)):
        for first in range(0, count, PART):
            app.send_many([noop.s(0).set(**options) for _ in range(first, min(first + PART, count))])
    app.close()


def process(url: str, directory: Path) -> float:
    """Return how many jobs per second a worker processes, from a tenth to nine tenths of ``JOBS``."""
    framework, counters = FRAMEWORKS["bulltask"], directory / "counters"
    moments: list[float] = []
    with Worker(framework, framework.worker(2), url, counters, 1, directory / "worker.log") as worker:
        for share in (0.1, 0.9):
            poll(lambda share=share: progress(counters) >= JOBS * share, 0.002, 60)  # type: ignore[misc]
            moments.append(time.monotonic())
        worker.check()
    return JOBS * 0.8 / (moments[1] - moments[0])


def send(url: str, queue: Queue, operation: str) -> float:
    """Return how many jobs like the other ones can be sent per second, one by one or in bulk."""
    app = App("bench", broker_url=url)
    noop = app.task(name="noop")(run)
    call, jobs = noop.s(0).set(**queue.options_of_others), SINGLE if operation == "single" else BULK
    call.delay()  # connect
    started = time.perf_counter()
    if operation == "single":
        for _ in range(jobs):
            call.delay()
    else:
        app.send_many([call] * jobs)
    seconds = time.perf_counter() - started
    app.close()
    return jobs / seconds


OPERATIONS: Mapping[str, Callable[[str, Queue, Path], float]] = {
    "process": lambda url, _, directory: process(url, directory),
    "send one by one": lambda url, queue, _: send(url, queue, "single"),
    "bulk send": lambda url, queue, _: send(url, queue, "bulk"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--waiting", type=int, default=1_000_000, help="number of further waiting jobs (1000000)")
    parser.add_argument(
        "--others", type=int, default=100_000, help="number of delayed, and of prioritized jobs (100000)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds (3)")
    options = parser.parse_args()
    measured = queues(options.waiting, options.others)
    rates: dict[tuple[str, str, int], list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="bulltask-growth-") as name:
        dumps = {each: _dump(Path(name) / str(number), measured[each]) for number, each in enumerate(measured)}
        for number in range(options.rounds):
            for operation, measure in OPERATIONS.items():
                for each, queue in measured.items():
                    directory = Path(tempfile.mkdtemp(dir=name, prefix=f"{number}-"))
                    with server(directory / "server", dumps[each]) as (started, _):
                        rates.setdefault((operation, *each), []).append(measure(started.url, queue, directory))
    print(*_lines(rates), sep="\n")


def _dump(directory: Path, queue: Queue) -> Path:
    with server(directory) as (started, client):
        fill(started.url, queue)
        client.save()
    return directory / "dump.rdb"


def _lines(rates: Mapping[tuple[str, str, int], list[float]]) -> list[str]:
    lines = ["| | other jobs | jobs/s | compared with 1,000 |", "|---|---|---|---|"]
    for (operation, kind, others), values in rates.items():
        few = rates[operation, kind, FEW]
        ratios = [value / other for value, other in zip(values, few, strict=True)]
        compared = "" if others == FEW else spread(ratios, 2)
        lines.append(f"| {operation} | {others:,} {kind} | {spread(values)} | {compared} |")
    return lines


if __name__ == "__main__":
    main()
