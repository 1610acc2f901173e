"""Inject faults under load: ``.venv/bin/python -m tests.soak --minutes 8 --seed 1``. Needs redis-server.

Prints how long workers were idle after each fault, the states of all acknowledged jobs, and the resources of the
workers' processes. The exit code is 0 if no job is lost or finished twice, no supervisor crashed, no worker or queue
was idle for longer than 5 s, and after a warm-up the memory, open files and threads of no process have grown.
"""

from __future__ import annotations

import math
import os
import random
import signal
import statistics
import sys
import tempfile
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import click

from tests.soak.audit import Audit, audit, repeated_attempts, wait_for_outcomes
from tests.soak.environment import Idle, SoakEnvironment
from tests.soak.faults import FAULTS
from tests.soak.journal import now_ms
from tests.support.fork_server import fork_server
from tests.support.processes import LeftoverProcesses

MAX_IDLE_S = 5.0
MAX_SHOWN = 5


def shuffle_repeatedly(names: list[str], rng: random.Random) -> Iterator[str]:
    """Yield all names in random order, repeatedly."""
    while True:
        yield from rng.sample(names, len(names))


def inject_faults(env: SoakEnvironment, names: list[str], minutes: float, every_s: float) -> list[Idle]:
    """Inject one fault after another until time is up; return the idle times after each."""
    found: list[Idle] = []
    end = time.monotonic() + minutes * 60
    for name in shuffle_repeatedly(names, env.rng):
        began, since_ms = time.monotonic(), now_ms()
        if began >= end:
            return found
        FAULTS[name](env)
        found.append(env.idle_after(name, since_ms))
        seconds, target = found[-1].longest
        died = f", {len(env.fleet.deaths)} supervisors have crashed" if env.fleet.deaths else ""
        click.echo(
            f"{time.strftime('%H:%M:%S')} {name}: idle for {seconds:.2f} s ({target}), "
            f"{len(env.acknowledged.jobs)} jobs acknowledged, load {os.getloadavg()[0]:.1f}{died}"
        )
        env.pause(began + every_s - time.monotonic())
    return found


def report_faults(found: list[Idle], repeated_ms: list[int]) -> None:
    """Print a table of the idle times after each fault, and of repeated attempts until the next fault."""
    by_fault: dict[str, list[tuple[float, str]]] = defaultdict(list)
    repeated: Counter[str] = Counter()
    for idle, following in zip(found, [*found[1:], None], strict=True):
        by_fault[idle.fault].append(idle.longest)
        end_ms = following.since_ms if following else math.inf
        repeated[idle.fault] += sum(idle.since_ms <= at_ms < end_ms for at_ms in repeated_ms)
    click.echo(f"\n{'fault':40} {'times':>5} {'idle s: median':>14} {'longest':>8} {'repeated':>9}")
    for fault, longest in sorted(by_fault.items()):
        seconds, target = max(longest)
        median = statistics.median(each for each, _ in longest)
        click.echo(f"{fault:40} {len(longest):5} {median:14.2f} {seconds:8.2f} {repeated[fault]:9} {target}")


def report_jobs(env: SoakEnvironment, found: Audit) -> None:
    """Print the states of the jobs, and the resources of the processes."""
    kinds = Counter(sent.kind for sent in env.acknowledged.jobs.values())
    click.echo(f"\nkinds of jobs: {dict(sorted(kinds.items()))}")
    click.echo(f"acknowledged jobs: {len(env.acknowledged.jobs)}, final states: {dict(found.states)}")
    click.echo(f"sends that raised: {dict(env.acknowledged.failed)}")
    click.echo(f"attempts of a job: {dict(sorted(found.attempts.items()))} (those of Node.js are not counted)")
    click.echo(f"unexpected failures: {dict(found.reasons)}")
    for kind, states in sorted(found.malformed.items()):
        click.echo(f"malformed: {kind:40} {dict(states)}")
    for line in env.fleet.resources.growth()[0]:
        click.echo(line)


def add_problems(env: SoakEnvironment, found: Audit) -> None:
    """Stop the workers, and add the problems of processes and sends."""
    found.problems["workers that did not stop"] += env.fleet.stop()
    found.problems["sends that raised no BulltaskError"] += env.acknowledged.unexpected
    found.problems["supervisors that crashed"] += env.fleet.deaths
    found.problems["zombies"] += env.fleet.resources.zombies
    found.problems["processes that have grown"] += env.fleet.resources.growth()[1]


@click.command(help=__doc__)
@click.option("--minutes", default=8.0, show_default=True)
@click.option("--seed", type=int, help="Seed of the random generators; random by default.")
@click.option("--rate", default=50.0, show_default=True, help="Calls per second: half of what two cores can run.")
@click.option("--workers", default=3, show_default=True)
@click.option("--every", default=10.0, show_default=True, help="Seconds between the starts of two faults.")
@click.option("--only", multiple=True, type=click.Choice(sorted(FAULTS)))
@click.option("--without", multiple=True, type=click.Choice(sorted(FAULTS)))
@click.option(
    "--directory",
    type=click.Path(path_type=Path),
    help="Directory for files and logs; a temporary directory by default.",
)
def main(
    *,
    minutes: float,
    seed: int | None,
    rate: float,
    workers: int,
    every: float,
    only: tuple[str, ...],
    without: tuple[str, ...],
    directory: Path | None,
) -> None:
    seed = random.randrange(10**6) if seed is None else seed
    directory = directory or Path(tempfile.mkdtemp(prefix="bulltask-soak-"))
    names = [name for name in sorted(FAULTS) if name not in without and (not only or name in only)]
    click.echo(f"seed {seed}, {minutes:g} minutes, {len(names)} faults, files in {directory}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # runs the cleanup of all processes
    session_id = uuid.uuid4().hex
    with SoakEnvironment(directory, workers, rate, seed, session_id) as env:
        env.start()
        idle = inject_faults(env, names, minutes, every)
        env.stop_sending()
        wait_for_outcomes(env, 120)
        found, repeated_ms = audit(env), repeated_attempts(env)
        add_problems(env, found)
    leftovers = LeftoverProcesses(session_id, directory)
    left = leftovers.find(fork_server.pids)
    leftovers.end(set(left))
    found.problems["leftover processes"] += [f"{pid}: {command}" for pid, command in left.items()]
    found.problems[f"idle for longer than {MAX_IDLE_S:g} s"] += [
        f"{seconds:.1f} s after {each.fault}: {target}"
        for each in idle
        for target, seconds in each.seconds.items()
        if seconds > MAX_IDLE_S
    ]
    report_faults(idle, repeated_ms)
    report_jobs(env, found)
    count = sum(map(len, found.problems.values()))
    for what, cases in found.problems.items():
        if not cases:
            continue
        click.echo(f"* {what}: {len(cases)}")
        for case in cases[:MAX_SHOWN]:
            click.echo(f"    {case}")
    jobs = len(env.acknowledged.jobs)
    click.echo(
        f"\n{jobs} jobs, {len(idle)} faults, {count} problems in {minutes:g} minutes; the logs are in {directory}"
    )
    sys.exit(1 if count else 0)


if __name__ == "__main__":
    main()
