"""Measures how long one call keeps Redis busy when a million jobs have piled up: ``python -m tools blocking``.

Each operation runs on a queue with ``COUNT`` jobs (default: 1,000,000) with 2 KB of data; those named in ``READS``, and
the retries, on a queue with that many completed jobs and a tenth as many failed ones. The program prints the longest
call of each operation, and the longest of each script or command, and fails if one took more than 5 ms, or, of those
that only workers make, 25 ms.

The time is the CPU time of the server's main thread, not the time in the slow log, which contains the time that the
server waited for a CPU. An operation with a call that took too long is repeated, up to twice, and the least time of
each call counts: a busy machine makes calls slower (its caches are cold), but none faster.
"""

from __future__ import annotations

import fcntl
import gc
import json
import os
import sys
import tempfile
import termios
import time
from collections.abc import Callable, Iterator, Sequence
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
from bulltask.lua.loader import Script, sha1
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
MAX_MS: Final = 5
WORKERS_MAX_MS: Final = 25
REPETITIONS: Final = 3
MAX_WAIT_S: Final = 5
SHA_LENGTH: Final = 40
_LINE: Final = 1_000
DATA: Final = json.dumps({"text": "x" * 2_000})
FAILURE: Final = {
    "failedReason": "ValueError: no such customer: 17",
    "stacktrace": json.dumps(
        ["Traceback (most recent call last):\n" + "  File\n" * 200 + "ValueError: no such customer"]
    ),
}


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
        pile_up(self.redis, self.keys, state, COUNT, data=DATA)

    def keep(self) -> None:
        """Keep completed jobs, and a tenth as many failed ones, beside one that is waiting."""
        self.queue.add("n")
        self.add("completed")
        pile_up(self.redis, self.keys, "failed", COUNT // 10, skipped=COUNT, data=DATA, **FAILURE)

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


READS: Final = {
    "search": "jobs mail --search nothing",
    "jobs": "jobs mail",
    "failed jobs": "jobs mail --state failed --error customer --limit 1000",
    "oldest": "jobs mail --oldest --state completed",
    "failures": "failures",
    "queues": "queues",
    "why -Q": "why -Q mail",
    "why": "why j1 -Q mail",
    "job show": "job show j1",
    "report": "report",
}
"""Commands that only read, by their names."""

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
    "retry all failed": (Pile.keep, lambda pile: pile.queue.retry_jobs(count=10**9)),
    "retry all completed": (
        lambda pile: pile.add("completed"),
        lambda pile: pile.queue.retry_jobs(state="completed", count=10**9),
    ),
    "retry by filter": (Pile.keep, lambda pile: pile.run_command("jobs mail --state failed --task n --retry --yes")),
    "remove failed by filter": (
        Pile.keep,
        lambda pile: pile.run_command("jobs mail --state failed --error customer --remove --yes"),
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
    "revoke next jobs": (
        lambda pile: pile.add("wait"),
        lambda pile: pile.run_command("jobs mail --task n --limit 1000 --revoke --yes"),
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
    **{name: (Pile.keep, lambda pile, command=command: pile.run_command(command)) for name, command in READS.items()},
}
OF_WORKERS: Final = {
    "removal by age",
    "removal by count",
    "stalled check",
    "prefetch due jobs",
    "batch of due jobs",
    "revocation requests",
    "schedules",
}


class Meter:
    """Measures the CPU time of a server's main thread for each call, while nothing else uses the server.

    Scripts that are sent together are sent one by one instead. Other commands that are sent together count as one
    call, which takes at least as long as each of them.

    Args:
        pid: The server's process.

    Attributes:
        longest: The time of the longest call in milliseconds, by the name of its script or command.
        calls: How many calls were measured.
        over: How many of them took more than ``MAX_MS``.
    """

    def __init__(self, pid: int) -> None:
        self._task = Path(f"/proc/{pid}/task/{pid}")
        self._names: dict[str, str] = {}
        self.longest: dict[str, float] = {}
        self.calls = self.over = 0

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Measure the calls in the ``with`` block."""
        send: Callable[..., None] = AbstractConnection.send_packed_command

        def send_and_measure(connection: Any, packed: bytes | list[bytes], *args: Any, **kwargs: Any) -> None:
            for name, calls in self._pieces(packed if isinstance(packed, bytes) else b"".join(packed)):
                before_ms, unread = self._idle_ms(), _unread_bytes(connection)
                send(connection, [calls], *args, **kwargs)
                deadline = time.monotonic() + MAX_WAIT_S
                while _unread_bytes(connection) == unread and time.monotonic() < deadline:
                    os.sched_yield()
                spent_ms = self._idle_ms() - before_ms
                self.longest[name] = max(self.longest.get(name, 0), spent_ms)
                self.calls += 1
                self.over += spent_ms > MAX_MS

        with (
            (self._task / "stat").open("rb", buffering=0) as self._status,
            (self._task / "schedstat").open("rb", buffering=0) as self._times,
            patch.object(AbstractConnection, "send_packed_command", send_and_measure),
        ):
            yield

    def _idle_ms(self) -> float:
        """Return the thread's CPU time when it waits again: only then has the kernel counted all of it."""
        while b") R" in os.pread(self._status.fileno(), _LINE, 0):
            os.sched_yield()
        return int(os.pread(self._times.fileno(), _LINE, 0).split()[0]) / 1e6

    def _pieces(self, packed: bytes) -> list[tuple[str, bytes]]:
        """Split calls that are sent together: each script with its name, and what is between two scripts."""
        pieces: list[tuple[str, bytes]] = []
        start = 0
        while start < len(packed):
            words, end = _read_call(packed, start)
            name, calls = words[0].decode(), packed[start:end]
            if name.startswith("EVAL"):
                pieces.append((self._script_name(words[1]), calls))
            elif pieces and pieces[-1][0].rstrip("…") == name:
                pieces[-1] = (f"{name}…", pieces[-1][1] + calls)
            else:
                pieces.append((name, calls))
            start = end
        return pieces

    def _script_name(self, word: bytes) -> str:
        sha = word.decode() if len(word) == SHA_LENGTH else sha1(word)
        if sha not in self._names:
            self._names = {script.sha: script.name for script in gc.get_objects() if type(script) is Script}
        return self._names.setdefault(sha, "script of this program")


def _unread_bytes(connection: Any) -> int:
    if (sock := connection._sock) is None:  # noqa: SLF001 - redis-py connects when the first call is sent
        return 0
    return int.from_bytes(fcntl.ioctl(sock, termios.FIONREAD, bytes(4)), sys.byteorder)


def _read_call(packed: bytes, start: int) -> tuple[list[bytes], int]:
    """Return the words of the call at ``start``, and where the next call begins."""
    end = packed.index(b"\r\n", start)
    count, end = int(packed[start + 1 : end]), end + 2
    words: list[bytes] = []
    for _ in range(count):
        first = packed.index(b"\r\n", end) + 2
        last = first + int(packed[end + 1 : first])
        words.append(packed[first:last])
        end = last + 2
    return words, end


def report(line: str) -> None:
    """Print a line."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def measure(names: Sequence[str]) -> dict[str, dict[str, float]]:
    """Run operations with the same preparation on a new server; return the longest time of each call, by operation."""
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as directory, RedisServer.start(Path(directory), flavor="redis") as server:
        pile = Pile(server.url)
        pile.queue.wait_until_ready()
        OPERATIONS[names[0]][0](pile)
        for name in names:
            meter, start = Meter(pile.redis.info("server")["process_id"]), time.monotonic()
            with meter.measure():
                OPERATIONS[name][1](pile)
            seconds = time.monotonic() - start
            longest = max(meter.longest, key=lambda call: meter.longest[call])
            over = f"{meter.over:,} of {meter.calls:,}"
            report(f"{name:24} {meter.longest[longest]:8.1f} ms {over:>18} {seconds:6.1f} s  {longest}")
            found[name] = meter.longest
        pile.app.close()
        pile.redis.close()
    return found


def measure_again(names: Sequence[str]) -> dict[str, dict[str, float]]:
    """Measure operations, and those with a call that took too long again; return the least time of each call."""
    found = measure(names)
    for _ in range(REPETITIONS - 1):
        if again := [name for name in names if max(found[name].values()) > limit_ms(name)]:
            for name, longest in measure(again).items():
                found[name] = {call: min(ms, longest.get(call, 0)) for call, ms in found[name].items()}
    return found


def limit_ms(name: str) -> int:
    """Return how long a call of an operation may take."""
    return WORKERS_MAX_MS if name in OF_WORKERS else MAX_MS


def main(names: list[str]) -> int:
    """Measure the named operations, by default all."""
    report(f"{f'{COUNT:,} jobs':24} {'CPU time':>11} {f'over {MAX_MS} ms':>18} {'total':>8}  longest call")
    wanted = names or list(OPERATIONS)
    reads = [name for name in wanted if name in READS]
    groups = [*([reads] if reads else []), *([name] for name in wanted if name not in READS)]
    found = {name: calls for group in groups for name, calls in measure_again(group).items()}
    rows = [(ms, call, name) for name, calls in found.items() for call, ms in calls.items()]
    report("\nThe longest time of each script and command (…: of several, sent together)")
    for call in dict.fromkeys(call for _, call, _ in sorted(rows, reverse=True)):
        ms, _, name = max(row for row in rows if row[1] == call)
        report(f"{ms:8.1f} ms  {call:45} {name}")
    too_long = [row for row in rows if row[0] > limit_ms(row[2])]
    for ms, call, name in too_long:
        report(f"more than {limit_ms(name)} ms: {call} in {name!r} took {ms:.1f} ms")
    return 1 if too_long else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
