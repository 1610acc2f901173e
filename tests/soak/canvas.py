"""Kill the workers of a thousand chords, and the senders of a canvas of a thousand jobs. Needs no other program.

``.venv/bin/python -m tests.soak.canvas chords`` kills child processes and supervisors at random while 1,000 chords of
20 run: every chord must complete with the right result, and a task may start a second time only if the process that
ran it was killed. With ``--separate-body-worker``, the body of each chord (the task that receives the results) runs on
a worker that is not killed, so it must start exactly once. ``.venv/bin/python -m tests.soak.canvas senders`` kills a
sender before each command of the canvas that it sends, and in the middle of commands: the server must have all jobs of
the canvas, or none.

The exit code is 0 if all of this is true.
"""

from __future__ import annotations

import random
import re
import socket
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import click
import redis

from bulltask import App, Signature, group
from bulltask.result import AsyncResult
from bulltask.testing.worker import RedisServer
from tests.soak.killed_sender import CanvasSender
from tests.soak.killed_workers import KilledWorkers

MEMBERS: Final = 20
OPEN_CHORDS: Final = 30
"""How many chords are waiting or running at a time, so that the kills are spread over all of them."""


@click.group(help=__doc__)
def main() -> None:
    pass


@main.command(help="Kill workers while chords run.")
@click.option("--chords", "count", default=1_000, show_default=True)
@click.option("--seed", type=int, help="Seed of the random generator; random by default.")
@click.option("--every", default=0.15, show_default=True, help="Mean seconds between two kills.")
@click.option("--separate-body-worker", is_flag=True, help="Run the chords' bodies on a worker that is not killed.")
def chords(count: int, seed: int | None, every: float, *, separate_body_worker: bool) -> None:
    rng = _generator(seed)
    with (
        tempfile.TemporaryDirectory(prefix="bulltask-canvas-") as name,
        RedisServer.start(Path(name, "redis")) as server,
    ):
        app = App("sender", server.url)
        safe_queue = "bodies" if separate_body_worker else ""
        body = app.signature("body", queue=safe_queue or "default")
        workers = KilledWorkers(Path(name), server.url, rng, every, safe_queue)
        began = time.monotonic()
        problems = _run_chords(app, count, body, workers.start())
        workers.stop()
        seconds = time.monotonic() - began
        with redis.Redis.from_url(server.url, decode_responses=True) as client:
            problems += _repeated(client.xrange("journal"), workers.killed)
        app.close()
    click.echo(f"{count} chords of {MEMBERS} in {seconds:.0f} s: {workers.summary}")
    _finish(problems)


def _run_chords(app: App, count: int, body: Signature[Any, Any], kill: Callable[[], None]) -> list[str]:
    """Send chords and wait for them, while a thread kills workers; return what went wrong."""
    stopped = threading.Event()

    def kill_repeatedly() -> None:
        while not stopped.is_set():
            kill()

    killer = threading.Thread(target=kill_repeatedly, name="killer")
    killer.start()
    problems: list[str] = []
    try:
        waiting: list[tuple[int, AsyncResult[Any]]] = []
        for number in range(count):
            members = group(app.signature("member", kwargs={"n": number + index}) for index in range(MEMBERS))
            waiting.append((number, (members | body).delay()))
            if len(waiting) == OPEN_CHORDS:
                problems += _check(*waiting.pop(0))
            if number % 100 == 99:
                click.echo(f"{number + 1} chords sent")
        for each in waiting:
            problems += _check(*each)
    finally:
        stopped.set()
        killer.join()
    return problems


def _check(number: int, result: AsyncResult[Any]) -> list[str]:
    expected = sum(range(number, number + MEMBERS))
    try:
        value = result.get(timeout=120)
    except Exception as exc:  # noqa: BLE001 - every error is a problem to report
        return [f"chord {number}: {type(exc).__name__}: {exc}"]
    return [] if value == expected else [f"chord {number}: {value}, not {expected}"]


def _repeated(journal: Any, killed: set[int]) -> list[str]:
    """Report how many tasks started more than once; return those whose earlier processes were not killed."""
    pids: dict[tuple[str, str], list[int]] = defaultdict(list)
    for _, entry in journal:
        pids[entry["what"], entry["job"]].append(int(entry["pid"]))
    for what in ("member", "body"):
        starts = Counter(len(found) for (kind, _), found in pids.items() if kind == what)
        click.echo(f"{what}: jobs by the number of their starts: {dict(sorted(starts.items()))}")
    return [
        f"{what} {job} started {len(found)} times, but process {pid} was not killed"
        for (what, job), found in pids.items()
        for pid in found[:-1]
        if pid not in killed
    ]


@main.command(help="Kill senders of a canvas.")
@click.option("--jobs", default=1_000, show_default=True, help="Jobs of the canvas.")
@click.option("--cuts", default=300, show_default=True, help="Kills in the middle of a command, at random bytes.")
@click.option("--seed", type=int, help="Seed of the random generator; random by default.")
def senders(jobs: int, cuts: int, seed: int | None) -> None:
    rng = _generator(seed)
    outcomes: Counter[str] = Counter()
    problems: list[str] = []
    with (
        tempfile.TemporaryDirectory(prefix="bulltask-canvas-") as name,
        RedisServer.start(Path(name, "redis")) as server,
    ):
        sender = CanvasSender(server.url, jobs)
        sent = sender.record()
        steps = [match.start() for match in re.finditer(rb"\*\d+\r\n\$\d+\r\n(EVALSHA|MULTI|EXEC)\r\n", sent)]
        points = [*steps, len(sent), *(rng.randrange(len(sent)) for _ in range(cuts))]
        click.echo(f"{jobs} jobs: {len(sent)} bytes, {len(steps)} commands")
        for number, point in enumerate(points):
            if number % 100 == 0:
                click.echo(f"{number} senders killed; stored: {dict(outcomes)}")
            stored = sender.killed_after(point)
            outcomes["all" if stored == jobs else "nothing" if stored == 0 else "a part"] += 1
            if stored not in {0, jobs}:
                problems.append(f"killed after {point} bytes: {stored} of {jobs} jobs are stored")
    click.echo(f"{len(points)} senders killed; stored: {dict(outcomes)}")
    _finish(problems)


def _generator(seed: int | None) -> random.Random:
    seed = random.randrange(10**6) if seed is None else seed
    click.echo(f"seed {seed}, on {socket.gethostname()}")
    return random.Random(seed)


def _finish(problems: list[str]) -> None:
    click.echo(f"{len(problems)} problems")
    for problem in problems[:20]:
        click.echo(f"* {problem}")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
