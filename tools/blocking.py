"""Measures how long the longest call blocks Redis when a million jobs have piled up: ``python -m tools blocking``.

Each operation runs on a queue with ``COUNT`` jobs (default: 1,000,000). The program prints the longest call of each
operation, in CPU time of the server's main thread and in the server's slow log, and fails if one took more than 50 ms
of CPU time. On an idle machine, both are about the same. On a busy one, the times in the slow log contain the time that
the server waited for a CPU, which says nothing about the call.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import redis
from click.testing import CliRunner
from redis.connection import AbstractConnection

from bulltask import App
from bulltask.cli.main import main as main_command
from bulltask.events import Bus
from bulltask.queue import Queue
from bulltask.testing import RedisServer
from bulltask.transport.call import QueueKeys
from bulltask.transport.operation import run_sync
from bulltask.transport.scripts.job import revocation_requests
from bulltask.transport.scripts.move import FetchOptions, collect_batch, fetch_ahead
from bulltask.transport.scripts.queue import PageCursor, page_after
from bulltask.worker.beat import read_entries, reconcile
from bulltask.worker.broker_backoff import ReconnectBackoff
from bulltask.worker.locks import StalledCheck
from tests.support.piled_up import OLD_MS, pile_up, pile_up_schedulers

COUNT: Final = int(os.environ.get("COUNT", "1_000_000"))
MAX_MS: Final = 50


class Pile:
    """A queue in which jobs have piled up.

    Args:
        url: The URL of an empty server.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.app = App("blocking", url, beat_schedule={"beat": {"task": "n", "schedule": 60}})
        self.queue: Queue = self.app.queue("mail")
        self.keys = QueueKeys("bull", "{mail}", "mail")
        self.client = self.app._broker.client()
        self.redis: Any = redis.Redis.from_url(url, decode_responses=True, socket_timeout=None)

    def add(self, state: str) -> None:
        """Pile up jobs in a state."""
        pile_up(self.redis, self.keys, state, COUNT)

    def finish_jobs(self, number: int, **keep: int) -> None:
        """Run jobs that remove old ones when they finish."""
        for index in range(number):
            self.queue.add("n", remove_on_complete=keep)
            job = self.queue.get_next_job(f"token{index}")
            assert job is not None
            job.move_to_completed(None)

    def check_stalled(self) -> None:
        """Run the supervisor's stalled check twice."""
        bus = Bus()
        for _ in range(2):
            self.redis.delete(self.keys.stalled_check)
            backoff = ReconnectBackoff(bus, self.app._config)
            check = StalledCheck(self.app._broker, [self.keys], lambda _index: True, self.client, bus, backoff)
            check.tick(0, 0)
            while check.interval_ms < self.app._config.stalled_interval_ms:
                check.tick(0, 0)
        assert self.redis.llen(self.keys.active) == 0

    def prefetch(self, *, batch: bool) -> None:
        """Acquire jobs while all delayed jobs are due."""
        options = [FetchOptions(f"token{number}", 30_000, "") for number in range(32)]
        for _ in range(50):
            now_ms = self.app._now_ms()
            fetch = collect_batch(self.keys, options, "n", now_ms) if batch else fetch_ahead(self.keys, options, now_ms)
            self.redis.lpush(self.keys.wait, "j1")
            self.client.run(fetch)

    def add_schedulers(self) -> None:
        """Add job schedulers whose next iterations were due long ago, at the same time."""
        pile_up_schedulers(self.redis, self.keys, COUNT)

    def request_revocations(self) -> None:
        """Add obsolete revocation requests."""
        for first in range(0, COUNT, 5_000):
            self.redis.zadd(self.keys.revoked, {f"j{number}": 1 for number in range(first, first + 5_000)})

    def read_revocations(self) -> None:
        """Read the requests as supervisors do."""
        for _ in range(20):
            self.client.run(revocation_requests(self.keys, self.app._now_ms()))

    def schedule(self) -> None:
        """Do what a worker does when it starts after a long downtime, run the first jobs, and list the schedulers."""
        run_sync(self.client, reconcile(self.keys, read_entries(self.app) or [], self.app.name, self.app._now_ms()))
        self.queue.schedulers.upsert("tick", name="n", every=60)
        for number in range(100):
            job = self.queue.get_next_job(f"token{number}")
            assert job is not None
            job.move_to_completed(None)
        assert len(self.queue.schedulers.list(0, 4_999)) == 5_000
        assert self.redis.zcard(self.keys.repeat) == COUNT + 2
        assert self.redis.zcount(self.keys.repeat, OLD_MS + 1, "+inf") == 2 + 99  # "tick" itself was the first job

    def iterate(self) -> None:
        """Iterate over waiting jobs from either end; the last page has been acquired in the meantime."""
        for asc in (True, False):
            cursor = PageCursor(distance=1_000, ids=tuple(f"acquired{number}" for number in range(1_000)))
            ids, _ = self.client.run(page_after(self.keys, "wait", cursor, 1_000, asc=asc))
            assert len(ids) == 1_000

    def run_command(self, command: str) -> None:
        """Run ``bulltask`` with the server's URL."""
        done = CliRunner().invoke(main_command, ["-b", self.url, *command.split()])
        assert done.exit_code == 0, done.output

    def drain_iterations(self) -> None:
        """Drain a queue that contains nothing but the next iterations of schedulers."""
        self.queue.drain(delayed=True)
        assert self.redis.zcard(self.keys.delayed) == COUNT


OPERATIONS: Final[dict[str, tuple[Callable[[Pile], object], Callable[[Pile], object]]]] = {
    "removal by age": (lambda pile: pile.add("completed"), lambda pile: pile.finish_jobs(300, age=60)),
    "removal by count": (lambda pile: pile.add("completed"), lambda pile: pile.finish_jobs(300, count=10)),
    **{
        f"drain {state}": (lambda pile, state=state: pile.add(state), lambda pile: pile.queue.drain(delayed=True))
        for state in ("wait", "paused", "delayed", "prioritized")
    },
    **{
        f"clean {state}": (
            lambda pile, state=state: pile.add(state),
            lambda pile, state=state: pile.queue.clean(0, state=state),
        )
        for state in ("completed", "failed", "wait", "delayed", "prioritized", "active")
    },
    "clean wait: all stay": (lambda pile: pile.add("wait"), lambda pile: pile.queue.clean(10**9, state="wait")),
    "iterate": (lambda pile: pile.add("wait"), Pile.iterate),
    "ids wait": (lambda pile: pile.add("wait"), lambda pile: pile.queue.get_job_ids()),
    "ids completed": (lambda pile: pile.add("completed"), lambda pile: pile.queue.get_job_ids(asc=True)),
    "obliterate": (lambda pile: pile.add("completed"), lambda pile: pile.queue.obliterate(force=True)),
    "obliterate wait": (lambda pile: pile.add("wait"), lambda pile: pile.queue.obliterate(force=True)),
    "promote all": (lambda pile: pile.add("delayed"), lambda pile: pile.queue.promote_jobs(count=10**9)),
    "retry all failed": (lambda pile: pile.add("failed"), lambda pile: pile.queue.retry_jobs(count=10**9)),
    "retry all completed": (
        lambda pile: pile.add("completed"),
        lambda pile: pile.queue.retry_jobs(state="completed", count=10**9),
    ),
    "search": (lambda pile: pile.add("completed"), lambda pile: pile.run_command("jobs mail --search nothing")),
    "retry by filter": (
        lambda pile: pile.add("failed"),
        lambda pile: pile.run_command("jobs mail --state failed --task n --retry --yes"),
    ),
    "promote by filter": (
        lambda pile: pile.add("delayed"),
        lambda pile: pile.run_command("jobs mail --task n --promote --yes"),
    ),
    "remove by filter": (
        lambda pile: pile.add("wait"),
        lambda pile: pile.run_command("jobs mail --state waiting --task n --remove --yes"),
    ),
    "revoke by filter": (
        lambda pile: pile.add("wait"),
        lambda pile: pile.run_command("jobs mail --task n --revoke --yes"),
    ),
    "pause, resume": (
        lambda pile: [pile.add("wait"), pile.add("paused")],
        lambda pile: [pile.queue.pause(), pile.queue.resume()],
    ),
    "stalled check": (lambda pile: pile.add("active"), Pile.check_stalled),
    "prefetch due jobs": (lambda pile: pile.add("delayed"), lambda pile: pile.prefetch(batch=False)),
    "batch of due jobs": (lambda pile: pile.add("delayed"), lambda pile: pile.prefetch(batch=True)),
    "revocation requests": (Pile.request_revocations, Pile.read_revocations),
    "schedules": (Pile.add_schedulers, Pile.schedule),
    "drain: iterations stay": (Pile.add_schedulers, Pile.drain_iterations),
}


def longest_call(server: redis.Redis) -> tuple[float, str]:
    """Return the time of the longest call in the slow log, in milliseconds, and the end of its first line."""
    log: Any = server.slowlog_get(1_000)
    if not log:
        return 0.0, ""
    slowest = max(log, key=lambda entry: entry["duration"])
    return slowest["duration"] / 1000, slowest["command"][:40].decode(errors="replace")


class Meter:
    """Measures the CPU time of a server's main thread from each request to the next one.

    Args:
        pid: The server's process.
    """

    def __init__(self, pid: int) -> None:
        self._times, self._before_ms = Path(f"/proc/{pid}/task/{pid}/schedstat"), 0.0
        self.longest_ms = 0.0

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Measure the requests in the ``with`` block. Those that are sent together count as one."""
        send: Callable[..., None] = AbstractConnection.send_packed_command

        def send_and_measure(*args: Any, **kwargs: Any) -> None:
            self._read()
            send(*args, **kwargs)

        self._before_ms = self._now_ms()
        with patch.object(AbstractConnection, "send_packed_command", send_and_measure):
            yield
        self._read()

    def _read(self) -> None:
        now_ms = self._now_ms()
        self.longest_ms = max(self.longest_ms, now_ms - self._before_ms)
        self._before_ms = now_ms

    def _now_ms(self) -> float:
        return int(self._times.read_text().split()[0]) / 1e6


def report(line: str) -> None:
    """Print a line."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def measure(name: str) -> float:
    """Run an operation on a new server; print the longest call, and return its CPU time in milliseconds."""
    prepare, run = OPERATIONS[name]
    with tempfile.TemporaryDirectory() as directory, RedisServer.start(Path(directory), flavor="redis") as server:
        plain = redis.Redis.from_url(server.url, socket_timeout=None)
        pile = Pile(server.url)
        pile.queue.wait_until_ready()
        plain.config_set("slowlog-max-len", 1_000)
        prepare(pile)
        plain.config_set("slowlog-log-slower-than", 1_000)
        plain.slowlog_reset()
        info: Any = plain.info("server")
        meter, start = Meter(info["process_id"]), time.monotonic()
        with meter.measure():
            run(pile)
        seconds = time.monotonic() - start
        longest, command = longest_call(plain)
        report(f"{name:24} {meter.longest_ms:8.1f} ms  {longest:8.1f} ms  {seconds:6.1f} s  {command!r}")
        pile.app.close()
        plain.close()
        return meter.longest_ms


def main(names: list[str]) -> int:
    """Measure the named operations, by default all."""
    report(f"{COUNT:,} jobs{'CPU time':>20}     slow log     total")
    too_long = [name for name in names or OPERATIONS if measure(name) > MAX_MS]
    if too_long:
        report(f"longer than {MAX_MS} ms: {', '.join(too_long)}")
    return 1 if too_long else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
