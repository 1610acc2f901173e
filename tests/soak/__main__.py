"""Faults of all kinds under load: ``.venv/bin/python -m tests.soak --minutes 8 --seed 1``; needs redis-server.

It prints how long workers were idle after each fault, and what became of every acknowledged job. The exit code is 0
when none is lost or ended twice, no supervisor died by itself, and nothing was idle for longer than 5 s.
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

from tests.soak.audit import Audit, audit, runs_again, wait_for_the_end
from tests.soak.faults import FAULTS
from tests.soak.journal import now_ms
from tests.soak.scene import Idle, Scene
from tests.support.processes import LeftoverProcesses

LONGEST_IDLE_S = 5.0
SHOWN = 5


def deck(names: list[str], rng: random.Random) -> Iterator[str]:
    """All names in any order, again and again."""
    while True:
        yield from rng.sample(names, len(names))


def torment(scene: Scene, names: list[str], minutes: float, every_s: float) -> list[Idle]:
    """One fault after the other, until the time is over; how idle the workers were after each."""
    found: list[Idle] = []
    over = time.monotonic() + minutes * 60
    for name in deck(names, scene.rng):
        began, since_ms = time.monotonic(), now_ms()
        if began >= over:
            return found
        FAULTS[name](scene)
        found.append(scene.idle_after(name, since_ms))
        seconds, who = found[-1].longest
        died = f", {len(scene.fleet.deaths)} supervisors have died" if scene.fleet.deaths else ""
        click.echo(
            f"{time.strftime('%H:%M:%S')} {name}: idle for {seconds:.2f} s ({who}), "
            f"{len(scene.ledger.jobs)} jobs acknowledged, load {os.getloadavg()[0]:.1f}{died}"
        )
        scene.pause(began + every_s - time.monotonic())
    return found


def report_faults(found: list[Idle], runs_again_ms: list[int]) -> None:
    """A table: how idle the workers were after each fault, and how many jobs ran again from then to the next one."""
    by_fault: dict[str, list[tuple[float, str]]] = defaultdict(list)
    again: Counter[str] = Counter()
    for idle, following in zip(found, [*found[1:], None], strict=True):
        by_fault[idle.fault].append(idle.longest)
        end_ms = following.since_ms if following else math.inf
        again[idle.fault] += sum(idle.since_ms <= at_ms < end_ms for at_ms in runs_again_ms)
    click.echo(f"\n{'fault':40} {'times':>5} {'idle s: median':>14} {'longest':>8} {'run again':>9}")
    for fault, longest in sorted(by_fault.items()):
        seconds, who = max(longest)
        median = statistics.median(each for each, _ in longest)
        click.echo(f"{fault:40} {len(longest):5} {median:14.2f} {seconds:8.2f} {again[fault]:9} {who}")


def report_jobs(scene: Scene, found: Audit) -> None:
    """What became of the jobs, and what the supervisors hold."""
    click.echo(f"\nacknowledged jobs: {len(scene.ledger.jobs)}, in the end: {dict(found.places)}")
    click.echo(f"sends that raised: {dict(scene.ledger.refused)}")
    click.echo(f"runs of a job: {dict(sorted(found.runs.items()))} (those of Node.js are not counted)")
    click.echo(f"unexpected failures: {dict(found.reasons)}")
    for kind, places in sorted(found.malformed.items()):
        click.echo(f"malformed: {kind:40} {dict(places)}")
    for pid, samples in scene.fleet.samples.items():
        first, last = samples[min(2, len(samples) - 1)], samples[-1]
        click.echo(
            f"supervisor {pid}: {len(samples) * 5} s, {first.memory_mb:.1f} to {last.memory_mb:.1f} MB, "
            f"{first.files} to {last.files} open files"
        )


@click.command(help=__doc__)
@click.option("--minutes", default=8.0, show_default=True)
@click.option("--seed", type=int, help="Of all chance; any by default.")
@click.option("--rate", default=12.0, show_default=True, help="Calls in a second.")
@click.option("--workers", default=3, show_default=True)
@click.option("--every", default=8.0, show_default=True, help="Seconds from fault to fault.")
@click.option("--only", multiple=True, type=click.Choice(sorted(FAULTS)))
@click.option("--without", multiple=True, type=click.Choice(sorted(FAULTS)))
@click.option("--directory", type=click.Path(path_type=Path), help="For files and logs; a temporary one by default.")
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
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and everything that was started ends
    mark = uuid.uuid4().hex
    with Scene(directory, workers, rate, seed, mark) as scene:
        scene.start()
        idle = torment(scene, names, minutes, every)
        scene.stop_sending()
        wait_for_the_end(scene, 120)
        found, again = audit(scene), runs_again(scene)
        found.problems["stopping"] += scene.fleet.stop()
        found.problems["sends that raised no BulltaskError"] += scene.ledger.raw
        found.problems["supervisors that died by themselves"] += scene.fleet.deaths
    leftovers = LeftoverProcesses(mark, directory)
    left = leftovers.find(set())
    leftovers.end(set(left))
    found.problems["processes that are left"] += [f"{pid}: {command}" for pid, command in left.items()]
    found.problems[f"idle for longer than {LONGEST_IDLE_S:g} s"] += [
        f"{seconds:.1f} s after {each.fault}: {who}"
        for each in idle
        for who, seconds in each.seconds.items()
        if seconds > LONGEST_IDLE_S
    ]
    report_faults(idle, again)
    report_jobs(scene, found)
    count = sum(map(len, found.problems.values()))
    click.echo(f"\n{count} problems; the logs are in {directory}")
    for what, cases in found.problems.items():
        if not cases:
            continue
        click.echo(f"* {what}: {len(cases)}")
        for case in cases[:SHOWN]:
            click.echo(f"    {case}")
    sys.exit(1 if count else 0)


if __name__ == "__main__":
    main()
