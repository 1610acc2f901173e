"""Kill workers of three clients that share a queue: ``.venv/bin/python -m tests.soak.mixed``.

A worker of bulltask, two of Node.js and one of the official Python client run 20,000 jobs while their processes are
killed with ``kill -9`` at random. Needs Node.js and the clients that ``make externals`` installs. The exit code is 0 if
every job completes once, and each attempt that was not a job's last has a known cause, which is printed.
"""

from __future__ import annotations

import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final

import click
import redis

from bulltask import App
from bulltask.testing.worker import RedisServer
from bulltask.transport.call import QueueKeys
from tests.interop.node_bridge import NodeBridge
from tests.soak.attempts import causes_of_repetitions, read_attempts
from tests.soak.mixed_fleet import QUEUE, MixedFleet

BULK: Final = 50
NO_PROGRESS_S: Final = 60.0
KINDS: Final[tuple[dict[str, Any], ...]] = ({}, {"priority": 3}, {}, {"delay": 150}, {"lifo": True})
KEYS: Final = QueueKeys("bull", f"{{{QUEUE}}}", QUEUE)
MAX_SHOWN: Final = 10


class Load:
    """Sends jobs with bulltask and Node.js in turn, so that the queue is sometimes long and sometimes empty.

    Args:
        app: The sending app.
        node: The sending client of Node.js, which is not killed.
        client: A client of the server.
        rng: Chooses the jobs.

    Attributes:
        ids: The acknowledged jobs.
    """

    def __init__(self, app: App, node: NodeBridge, client: redis.Redis, rng: random.Random) -> None:
        self._app, self._node, self._redis, self._rng = app, node, client, rng
        self._never = threading.Event()
        self.ids: list[str] = []

    def run(self, count: int) -> None:
        """Send ``count`` jobs, and wait until almost all of them have finished."""
        limit = BULK
        while len(self.ids) < count:
            if self.unfinished < limit:
                self.ids += self._rng.choice([self._send, self._send_from_node])()
                limit = self._rng.choice([BULK, 500, 1_500])
            self._never.wait(0.01)
        self.wait(BULK)

    def wait(self, left: int) -> None:
        """Wait until at most ``left`` jobs have not finished, or none has finished for a while."""
        last, since = -1, time.monotonic()
        while (now_left := self.unfinished) > left and time.monotonic() < since + NO_PROGRESS_S:
            if now_left != last:
                last, since = now_left, time.monotonic()
            self._never.wait(0.1)

    @property
    def unfinished(self) -> int:
        """How many jobs have not finished."""
        completed, failed = self._redis.zcard(KEYS.completed), self._redis.zcard(KEYS.failed)
        return len(self.ids) - int(completed) - int(failed)

    def _send(self) -> list[str]:
        signature = self._app.signature
        calls = []
        for task, ms, options in self._choices():
            own = {"countdown": options["delay"] / 1000} if "delay" in options else options
            calls.append(signature(task, kwargs={"ms": ms}, queue=QUEUE, max_retries=3, **own))
        return [job.id for job in self._app.send_many(calls)]

    def _send_from_node(self) -> list[str]:
        jobs = [
            {"name": task, "data": {"ms": ms}, "opts": {"attempts": 4, **options}}
            for task, ms, options in self._choices()
        ]
        return [str(job["id"]) for job in self._node.call("queue.addBulk", queue=f"{{{QUEUE}}}", jobs=jobs)]

    def _choices(self) -> Iterator[tuple[str, int, dict[str, Any]]]:
        for _ in range(BULK):
            yield self._rng.choice(["attempt", "aattempt"]), self._rng.randrange(60), dict(self._rng.choice(KINDS))


@contextmanager
def repeatedly(kill: Callable[[], None], rng: random.Random, every: float) -> Iterator[None]:
    """Call ``kill`` in a thread, on average after ``every`` seconds."""
    stopped, errors = threading.Event(), list[BaseException]()

    def run() -> None:
        try:
            while not stopped.wait(rng.uniform(0, 2 * every)):
                kill()
        except BaseException as exc:  # noqa: BLE001 (raised below)
            errors.append(exc)

    killer = threading.Thread(target=run, name="killer")
    killer.start()
    try:
        yield
    finally:
        stopped.set()
        killer.join()
    if errors:
        raise errors[0]


def events_of(client: redis.Redis) -> dict[str, dict[str, list[int]]]:
    """Return the times of each event in epoch milliseconds, by event and job."""
    result: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    first: str = "-"
    while True:
        part: Any = client.xrange(KEYS.events, first, "+", 10_000)
        if not part:
            return result
        for entry_id, fields in part:
            if "jobId" in fields:
                result[fields["event"]][fields["jobId"]].append(int(entry_id.partition("-")[0]))
        first = f"({part[-1][0]}"


def check_states(client: redis.Redis, ids: list[str], events: dict[str, dict[str, list[int]]]) -> list[str]:
    """Return the jobs that did not complete, or not once."""
    where: dict[str, str] = {}
    for state in ("wait", "active", "paused"):
        where |= dict.fromkeys(client.lrange(KEYS.base + state, 0, -1), state)  # type: ignore[arg-type]
    for state in ("prioritized", "delayed", "failed", "completed"):
        where |= dict.fromkeys(client.zrange(KEYS.base + state, 0, -1), state)  # type: ignore[arg-type]
    states = Counter(where.get(job, "nowhere") for job in ids)
    click.echo(f"{len(ids)} jobs acknowledged, states: {dict(states)}")
    problems = []
    for job in ids:
        state = where.get(job, "nowhere")
        if state != "completed":
            reason = client.hget(KEYS.job(job), "failedReason")
            lock = client.get(KEYS.lock(job))
            problems.append(f"{job} is {state}: reason {reason!r}, lock {lock!r}")
        if len(events["completed"][job]) != 1:
            problems.append(f"{job} has {len(events['completed'][job])} events completed")
    return problems


def report(fleet: MixedFleet, file: Path, stalls: dict[str, list[int]]) -> list[str]:
    """Print the counts of attempts, kills and causes; return the attempts without a known cause."""
    attempts = read_attempts(file)
    causes, unknown = causes_of_repetitions(attempts, fleet.killed, fleet.clients, stalls)
    click.echo(f"kills: {dict(sorted(fleet.kills.items()))}, {sum(fleet.kills.values())} in all")
    by_client = Counter(fleet.clients.get(each.pid, "bulltask") for found in attempts.values() for each in found)
    click.echo(f"attempts by client: {dict(by_client)}")
    click.echo(f"jobs by the number of their attempts: {dict(sorted(Counter(map(len, attempts.values())).items()))}")
    ended = Counter(sum(each.end_ms is not None for each in found) for found in attempts.values())
    click.echo(f"jobs by the number of attempts that ran to the end: {dict(sorted(ended.items()))}")
    click.echo("causes of further attempts:")
    for cause, count in sorted(causes.items()):
        click.echo(f"  {count:5} {cause}")
    for error, count in fleet.errors.most_common(MAX_SHOWN):
        click.echo(f"  {count:5} errors of an official worker: {error}")
    return [f"repeated for an unknown cause: {each}" for each in unknown]


@click.command(help=__doc__)
@click.option("--jobs", default=20_000, show_default=True)
@click.option("--seed", type=int, help="Seed of the random generators; random by default.")
@click.option("--every", default=0.8, show_default=True, help="Mean seconds between two kills.")
def main(*, jobs: int, seed: int | None, every: float) -> None:
    seed = random.randrange(10**6) if seed is None else seed
    directory = Path(tempfile.mkdtemp(prefix="bulltask-mixed-"))
    click.echo(f"seed {seed}, {jobs} jobs, files in {directory}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # runs the cleanup of all processes
    began = time.monotonic()
    problems, counts = run(directory, jobs, seed, every)
    for problem in problems[:MAX_SHOWN]:
        click.echo(f"* {problem}")
    click.echo(f"{counts}, {len(problems)} problems in {time.monotonic() - began:.0f} s")
    sys.exit(1 if problems else 0)


def run(directory: Path, jobs: int, seed: int, every: float) -> tuple[list[str], str]:
    """Run the jobs while workers are killed; return the problems, and a line with counts."""
    file = directory / "attempts"
    with (
        RedisServer.start(directory / "redis") as server,
        redis.Redis.from_url(server.url, decode_responses=True) as client,
        NodeBridge.to(server.url) as node,
        closing(App("sender", server.url)) as app,
    ):
        fleet = MixedFleet(directory, server.url, file, random.Random(seed))
        try:
            fleet.start()
            node.call("queue.getJobCounts", queue=f"{{{QUEUE}}}")  # a new Queue resets the length of the stream
            client.hset(KEYS.meta, "opts.maxLenEvents", 5_000_000)
            load = Load(app, node, client, random.Random(seed + 1))
            with repeatedly(fleet.kill, random.Random(seed + 2), every):
                load.run(jobs)
            load.wait(0)
            events = events_of(client)
            problems = check_states(client, load.ids, events)
            code = fleet.stop()
        finally:
            fleet.close()
    lost = len(problems)
    problems += report(fleet, file, events["stalled"])
    problems += [f"bulltask's worker exited with {code}"] if code else []
    again = sum(len(found) > 1 for found in read_attempts(file).values())
    kills = sum(fleet.kills.values())
    return problems, f"{len(load.ids)} jobs, {kills} kills, {lost} lost, {again} ran more than once"


if __name__ == "__main__":
    main()
