"""Run the fault-injection matrix: ``.venv/bin/python -m tests.chaos --repetitions 3 --seed 1``.

Each cell injects one fault at one injection point of a worker or a sender, and counts the attempts of its jobs. The
exit code is 0 if no job was lost, none ran more often than the fault explains, and each cell recovered in time. All
cells use the server of ``CHAOS_BROKER_URL``, or a temporary one.

Afterwards, it injects faults of the servers themselves, on one server, with Sentinel, and in a cluster.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import click
import redis

from bulltask.testing.worker import RedisServer
from tests.chaos import topologies
from tests.chaos.cell import Cell, Result
from tests.chaos.matrix import all_cells, fault_free_cells, problems_of, run_cells
from tests.chaos.measurements import measurements
from tests.support.fork_server import fork_server

RESULTS: Final = Path(__file__).parent / "results.json"
FLAVOR: Final = "valkey"
"""The servers of the topologies."""

MAX_NTH: Final = 4
"""In repetitions after the first, the fault is injected the n-th time that the point is reached; n is at most this."""


@contextmanager
def broker(directory: Path) -> Iterator[str]:
    """Return the URL of the server for all cells."""
    if url := os.environ.get("CHAOS_BROKER_URL"):
        yield url
        return
    with RedisServer.start(directory / "server") as server:
        yield server.url


def server_name(url: str) -> str:
    """Return the name and version of a server; of a cluster or sentinels, the scheme of their URL."""
    scheme = url.partition("://")[0]
    if "+" in scheme:
        return scheme
    with redis.Redis.from_url(url) as client:
        info: Any = client.info("server")
    name, version = info.get("server_name", "redis"), info.get("valkey_version", info["redis_version"])
    return f"{name.capitalize()} {version}"


@click.command(help=__doc__)
@click.option("--repetitions", default=1, show_default=True, help="How often each cell is run.")
@click.option("--seed", type=int, help="Seed of the order of the cells and of the times; random by default.")
@click.option("--parallel", default=6, show_default=True, help="Cells that run at the same time.")
@click.option("--only", default="", help="Run only the cells whose name contains this text.")
@click.option(
    "--part", type=click.Choice(["all", "cells", "topologies"]), default="all", show_default=True, help="What to run."
)
@click.option("--write", is_flag=True, help=f"Write the measurements to {RESULTS.name}.")
def main(*, repetitions: int, seed: int | None, parallel: int, only: str, part: str, write: bool) -> None:
    problems = list[str]()
    new = {} if part == "topologies" else _run_cells(repetitions, seed, parallel, only, problems)
    rows = [] if part == "cells" else _run_topologies(repetitions, only, problems)
    fork_server.close()
    if write:
        found = json.loads(RESULTS.read_text())
        measured = {(row["topology"], row["fault"]): row for row in [*found["topologies"], *rows]}
        order = [(topology, fault) for topology, faults in topologies.FAULTS.items() for fault in faults]
        new["topologies"] = [measured[key] for key in order if key in measured]
        RESULTS.write_text(json.dumps(found | new, indent=1) + "\n")
    for problem in problems:
        click.echo(f"* {problem}")
    sys.exit(1 if problems else 0)


def _run_topologies(repetitions: int, only: str, problems: list[str]) -> list[dict[str, Any]]:
    measured = []
    for one in topologies.measure(FLAVOR, only, repetitions, click.echo):
        measured.append(one)
        problems += topologies.problems_of(one)
        click.echo(
            f"{one.topology}: {one.fault}: {one.jobs} jobs, {one.lost} lost, {one.repeated} ran more than once, "
            f"no start for {one.pause_s:.2f} s"
        )
    return topologies.rows(measured)


def _run_cells(repetitions: int, seed: int | None, parallel: int, only: str, problems: list[str]) -> dict[str, Any]:
    seed = random.randrange(10**6) if seed is None else seed
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="bulltask-chaos-") as name, broker(Path(name)) as url:
        server, rng = server_name(url), random.Random(seed)
        plain = list(_run(fault_free_cells(), url, Path(name, "plain"), parallel, problems))
        cells = [cell for cell in all_cells(plain) if only in str(cell)]
        cells += [replace(cell, nth=rng.randint(1, MAX_NTH)) for _ in range(repetitions - 1) for cell in cells]
        rng.shuffle(cells)
        click.echo(f"seed {seed}: {len(cells)} cells on {server}")
        results = list(_run(cells, url, Path(name, "cells"), parallel, problems))
    found = measurements(results, server, seed, repetitions)
    click.echo(
        f"{found['points']} injection points x {repetitions} repetitions: {found['faults']} faults in "
        f"{time.monotonic() - began:.0f} s ({found['not_reached']} points were not reached), {found['jobs']} jobs, "
        f"{found['lost']} lost, {found['repeated']} ran more than once, {len(problems)} problems"
    )
    return found


def _run(cells: list[Cell], url: str, directory: Path, parallel: int, problems: list[str]) -> Iterator[Result]:
    """Run cells; print the progress, and the output of each cell that has problems, which are added to ``problems``."""
    for number, result in enumerate(run_cells(cells, url, directory, parallel), 1):
        found = [f"{result.cell}: {problem}" for problem in problems_of(result)]
        problems += found
        if found:
            click.echo("\n".join([*found, result.log]))
        if number % 100 == 0:
            click.echo(f"{number} cells")
        yield result


if __name__ == "__main__":
    main()
