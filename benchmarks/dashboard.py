"""How fast are the dashboard's pages, and what does an open tab cost Redis? ``dashboard.py`` takes about ten minutes.

It fills a server with 1,000,000 completed and 100,000 failed jobs of one queue, copies of jobs that a worker has run,
with a lake that has as many, and another one with 2,000 queues. For each page of ``bulltask dashboard`` it prints how
long the first view takes (after a change, so that nothing is remembered), and a repeated one, and how many calls
blocked Redis for more than 5 ms; then the share of a core that Redis uses without, with one, and with five open tabs,
without and with jobs that run.

The exit code is 1 if the 95th percentile of a page is above 300 ms, if a call blocked Redis for more than 5 ms, or if
an open tab costs Redis 1% of a core.
"""

from __future__ import annotations

import argparse
import http.client
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from html import unescape
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

import redis

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.processes import ROOT, Failed, poll, server, server_cpu_us, tree_cpu_us
from bulltask import App, Signature, chord, signature
from tests.support.lake import LakeBuilder

GOAL_MS: Final = 300
SLOW_US: Final = 5_000
TAB_SHARE: Final = 0.01
SEEDS: Final = 40
AT_ONCE: Final = 1_000
DAY_MS: Final = 86_400_000
NODES: Final = 990
TAB_ROUNDS: Final = 2
FLOOD: Final = 20  # jobs, every tenth of a second
MAIL: Final = "bull:{mail}:"
LAKE: Final = "lake"
LAKE_ROWS: Final = 100_000  # of one file of a day, at most
TABS: Final[Mapping[str, tuple[str, ...]]] = {
    "no tab": (),
    "one: overview": ("/",),
    "one: queue": ("/queues/mail",),
    "five pages": ("/", "/queues/mail", "/failures", "/workers", "/charts"),
}

COPY: Final = """
-- KEYS: the state's set, and the hashes that are copied; ARGV: base, first and last number, how many there will be, now
local seeds = {}
for i = 2, #KEYS do seeds[i - 1] = redis.call('HGETALL', KEYS[i]) end
local now, step = tonumber(ARGV[5]), tonumber(ARGV[6]) / tonumber(ARGV[4])
for i = tonumber(ARGV[2]), tonumber(ARGV[3]) do
  local seed, copy = seeds[i % #seeds + 1], {}
  local finished = math.floor(now - (tonumber(ARGV[4]) - i) * step)
  for at = 1, #seed, 2 do
    local name, value = seed[at], seed[at + 1]
    if name == 'finishedOn' then value = finished
    elseif name == 'processedOn' then value = finished - 150
    elseif name == 'timestamp' then value = finished - 1800
    else value = string.gsub(value, 'reader@', 'reader' .. i .. '@') end
    copy[at], copy[at + 1] = name, value
  end
  local id = string.format('%08x-0000-7000-8000-%012x', #seeds, i)
  redis.call('HSET', ARGV[1] .. id, unpack(copy))
  redis.call('ZADD', KEYS[1], finished, id)
end
"""


@dataclass
class Times:
    """How long the views of a page took, in milliseconds; ``start`` is the first one of a process."""

    start: float = 0.0
    first: list[float] = field(default_factory=list)
    again: list[float] = field(default_factory=list)
    kib: float = 0.0
    slow: list[str] = field(default_factory=list)


Address = Callable[[int], str]
"""The address of a page in each round, so that pages of single jobs are of another one each time."""

_never = threading.Event()


class Board:
    """A process of ``bulltask dashboard``."""

    def __init__(self, broker: str, directory: Path) -> None:
        command = [sys.executable, "-m", "bulltask", "dashboard", "-A", "benchmarks.apps.dashboard_app"]
        command += ["--lake", str(directory / LAKE)] if (directory / LAKE).exists() else []
        self._log = (directory / f"dashboard-{time.monotonic_ns()}.log").open("w+")
        self._process = subprocess.Popen(
            [*command, "--port", "0", "--anonymous", "admin"],
            env=environ(broker),
            stdout=self._log,
            stderr=self._log,
            cwd=ROOT,
        )
        if not poll(self._is_ready, 0.05, 60):
            raise Failed(f"the dashboard did not start: {Path(self._log.name).read_text()}")
        self._connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        self._token = ""

    def _is_ready(self) -> bool:
        found = re.search(r"http://127\.0\.0\.1:(\d+)", Path(self._log.name).read_text())
        self.port = int(found[1]) if found else 0
        return found is not None

    @property
    def cpu_us(self) -> int:
        return tree_cpu_us(self._process.pid)

    def get(self, path: str) -> tuple[float, str]:
        """Return how many milliseconds a page takes, and the page."""
        started = time.perf_counter()
        self._connection.request("GET", path)
        response = self._connection.getresponse()
        body = response.read()
        took = (time.perf_counter() - started) * 1000
        if response.status != 200:
            raise Failed(f"{path}: status {response.status}")
        return took, body.decode()

    def post(self, path: str, **fields: str) -> tuple[float, str]:
        """Send a form; return how many milliseconds that takes, and the address of the next page."""
        if not self._token:
            self._token = re.findall(r'name="form_token" value="([^"]*)"', self.get("/queues/mail")[1])[0]
        body = urlencode({"form_token": self._token, "back": "/queues/mail", **fields})
        started = time.perf_counter()
        self._connection.request("POST", path, body, {"Content-Type": "application/x-www-form-urlencoded"})
        response = self._connection.getresponse()
        response.read()
        took = (time.perf_counter() - started) * 1000
        if response.status != 303:
            raise Failed(f"{path}: status {response.status}")
        return took, str(response.headers["location"])

    def close(self) -> None:
        self._connection.close()
        self._process.terminate()
        self._process.wait(30)
        self._log.close()

    def __enter__(self) -> Board:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Tab:
    """An open page, which receives its updates until it is closed."""

    def __init__(self, board: Board, path: str) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", board.port)
        self._connection.request("GET", path, headers={"Accept": "text/event-stream"})
        self._response = self._connection.getresponse()
        self._socket = self._connection.sock
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        try:
            while self._response.readline():
                pass
        except (OSError, ValueError, AttributeError):
            pass  # closed

    def close(self) -> None:
        self._socket.shutdown(2)


def environ(broker: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("BULLTASK_")}
    return {**inherited, "BENCH_BROKER": broker, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}


@contextmanager
def worker(broker: str, queues: str, directory: Path) -> Iterator[None]:
    """Run a worker with two children."""
    command = [sys.executable, "-m", "bulltask", "worker", "-A", "benchmarks.apps.dashboard_app", "-Q", queues]
    with (directory / f"worker-{time.monotonic_ns()}.log").open("w") as log:
        process = subprocess.Popen(
            [*command, "-c", "2", "-l", "warning"], env=environ(broker), stdout=log, stderr=log, cwd=ROOT
        )
        try:
            yield
        finally:
            process.terminate()
            process.wait(30)


# ---- what the servers contain ----


def call(task: str, *args: object, **options: Any) -> Signature[Any, Any]:
    """Return a call of a task."""
    called: Signature[Any, Any] = signature(task, args=args)  # type: ignore[assignment]
    called.set(**options)
    return called


def finished(client: redis.Redis, base: str, state: str, start: int, end: int) -> list[str]:
    """Return the ids of some of a queue's jobs that have finished."""
    ids: Any = client.zrange(f"{base}{state}", start, end)
    return [job_id.decode() for job_id in ids]


def fill_jobs(app: App, client: redis.Redis, completed: int, failed: int, directory: Path) -> dict[str, str]:
    """Fill the queue ``mail``; return the ids of a waiting job and of a workflow's last one."""
    mail = app.queue("mail")
    app.send_many(
        [call("mail.send", number, "reader@example.com", queue="mail", max_retries=0) for number in range(2 * SEEDS)]
    )
    with worker(str(app.conf.broker_url), "mail,load", directory):
        if not poll(lambda: sum(mail.get_job_counts("completed", "failed").values()) == 2 * SEEDS, 0.1, 60):
            raise Failed("the worker did not run the first jobs")
    copy(client, MAIL, "completed", completed)
    copy(client, MAIL, "failed", failed)
    app.send_many([call("mail.send", 0, "later@example.com", queue="mail") for _ in range(5_000)])
    app.send_many(
        [call("mail.send", 0, "later@example.com", queue="mail", countdown=3600 + number) for number in range(1_000)]
    )
    parts = [call("shop.noop", number, queue="flows") for number in range(NODES)]
    last = chord(parts, call("shop.noop", queue="flows")).apply_async()
    app.send_task("shop.noop", args=(1,), queue="spare")
    waiting = mail.get_jobs(["waiting"], 0, 0)[0]
    return {"waiting": waiting.id, "workflow": last.id}


def fill_queues(app: App, client: redis.Redis, queues: int, directory: Path) -> None:
    """Make queues, each with a few jobs in three states."""
    fill_jobs(app, client, 1_000, 100, directory)
    keys = client.scan_iter(f"{MAIL}*-*", count=1_000)
    seeds = [key for key in keys if client.type(key) == b"hash"][:SEEDS]
    for first in range(0, queues, 100):
        names = [f"team{number % 20}-queue{number}" for number in range(first, min(first + 100, queues))]
        app.send_many([call("mail.send", 0, "x@example.com", queue=name) for name in names] * 3)
        for name in names:
            copy(client, f"bull:{{{name}}}:", "completed", 20, seeds)
            copy(client, f"bull:{{{name}}}:", "failed", 5, seeds)


def fill_lake(root: Path, completed: int, failed: int) -> None:
    """Write jobs and their attempts that have ended during the last 30 days, and the events of one of a hundred."""
    lake, now, total = LakeBuilder(root), datetime.now(UTC), completed + failed
    for first in range(0, total, LAKE_ROWS):
        jobs: list[dict[str, Any]] = []
        for number in range(first, min(first + LAKE_ROWS, total)):
            end = now - timedelta(days=30) * ((total - number) / total)
            is_failed = number * failed // total != (number + 1) * failed // total
            error = f"cannot send letter {number} to reader{number}@example.com" if is_failed else None
            jobs.append(
                {
                    "job_id": lake_id(number),
                    "incarnation": f"{number}-0",
                    "name": "mail.send",
                    "created_at": end - timedelta(milliseconds=1_800),
                    "finished_at": end,
                    "state": "failed" if is_failed else "completed",
                    "attempt_count": 1,
                    "wait_ms": 1_650 + number % 97,
                    "run_ms": 150 + number % 89,
                    "failed_reason": error,
                    "error_fingerprint": error and "cannot send letter # to reader#@example.com",
                }
            )
        same = ("job_id", "incarnation", "name", "wait_ms", "run_ms", "failed_reason", "error_fingerprint")
        lake.jobs(jobs)
        lake.attempts({"outcome": job["state"], "ended_at": job["finished_at"], **{key: job[key] for key in same}}
                      for job in jobs)  # fmt: skip
        lake.events(
            {
                "event_id": f"{round(job['finished_at'].timestamp() * 1000)}-{at}",
                "event": event,
                "job_id": job["job_id"],
            }
            for job in jobs[::100]
            for at, event in enumerate(("added", "waiting", "active", job["state"]))
        )


def lake_id(number: int) -> str:
    return f"lake-{number:012d}"


def copy(client: redis.Redis, base: str, state: str, number: int, seeds: Sequence[str | bytes] = ()) -> None:
    """Add so many copies of the jobs of a state, which have finished during the last day."""
    found = list(seeds) or [f"{base}{job_id}" for job_id in finished(client, base, state, 0, -1)]
    script, now_ms = client.register_script(COPY), int(time.time() * 1000)
    for first in range(0, number, AT_ONCE):
        last = min(first + AT_ONCE, number) - 1
        script(keys=[f"{base}{state}", *found], args=[base, first, last, number, now_ms, DAY_MS])


# ---- pages ----


def pages_of_jobs(client: redis.Redis, ids: Mapping[str, str], rounds: int) -> dict[str, Address]:
    some = {state: finished(client, MAIL, state, 500, 500 + rounds) for state in ("completed", "failed")}
    mail = "/queues/mail"
    error = {"state": "failed", "task": "mail.send", "error": "cannot send letter # to reader#@example.com"}
    return {
        "overview": lambda _: "/",
        "queue, waiting": lambda _: mail,
        "queue, delayed": lambda _: f"{mail}?state=delayed",
        "queue, failed": lambda _: f"{mail}?state=failed",
        "queue, completed": lambda _: f"{mail}?state=completed",
        "queue, one error": lambda _: f"{mail}?{urlencode(error)}",
        "queue, a task": lambda _: f"{mail}?state=completed&task=mail.send",
        "queue, a task without jobs": lambda _: f"{mail}?state=completed&task=mail.none",
        "queue, text of many": lambda _: f"{mail}?state=completed&text=reader",
        "queue, text of one": lambda n: f"{mail}?state=completed&text=reader{1000 + 97 * n}@",
        "queue, text of one failed": lambda n: f"{mail}?state=failed&text=reader{1000 + 97 * n}@",
        "job, completed": lambda n: f"{mail}/jobs/{some['completed'][n]}",
        "job, failed": lambda n: f"{mail}/jobs/{some['failed'][n]}",
        "job, waiting": lambda _: f"{mail}/jobs/{ids['waiting']}",
        f"workflow of {NODES + 1} jobs": lambda _: f"/queues/flows/jobs/{ids['workflow']}/workflow",
        "search, an id": lambda n: f"/search?text={some['completed'][n]}",
        "search, text of one": lambda n: f"/search?text=reader{1000 + 97 * n}@",
        "search, nothing": lambda n: f"/search?text=nobody{n}",
        **pages_of_all(),
        "charts of a queue": lambda _: f"{mail}/charts",
        "schedule": lambda _: f"{mail}/schedules/report",
        "run": lambda _: "/run",
        "run a task": lambda _: "/run/mail.send",
        "audit": lambda _: "/audit",
        "history": lambda _: "/history",
        "history, failed": lambda _: "/history?state=failed",
        "history, text of many": lambda _: "/history?text=letter",
        "history, text of one": lambda n: f"/history?text=reader{97 * n + 11}@",
        "history, an id": lambda n: f"/history?id={lake_id(97 * n)}",
        "history, a job": lambda n: f"/history/mail/{lake_id(97 * n)}",
    }


def pages_of_all() -> dict[str, Address]:
    return {
        "workers": lambda _: "/workers",
        "failures": lambda _: "/failures",
        "charts": lambda _: "/charts",
        "schedules": lambda _: "/schedules",
    }


def pages_of_queues() -> dict[str, Address]:
    return {
        "overview": lambda _: "/",
        "queue": lambda n: f"/queues/team{n % 20}-queue{n}",
        "search, an id": lambda n: f"/search?text={SEEDS:08x}-0000-7000-8000-{n:012x}",
        "search, nothing": lambda n: f"/search?text=nobody{n}",
        **pages_of_all(),
    }


def measure(
    broker: str, client: redis.Redis, pages: Mapping[str, Address], rounds: int, directory: Path
) -> list[Times]:
    """View each page as the first one of a process, then after changes, and each time once more."""
    client.config_set("slowlog-log-slower-than", SLOW_US)
    client.config_set("slowlog-max-len", 10_000)
    found = []
    for address in pages.values():
        times = Times()
        client.slowlog_reset()
        with Board(broker, directory) as board:
            times.start, html = board.get(address(0))
        times.kib = len(html) / 1024
        found.append(times)
    with Board(broker, directory) as board:
        board.get("/")
        for times, address in zip(found, pages.values(), strict=True):
            client.slowlog_reset()
            for number in range(rounds):
                board.post(f"/queues/spare/{'resume' if number % 2 else 'pause'}")  # pages are read again after changes
                times.first.append(board.get(address(number))[0])
                times.again.append(board.get(address(number))[0])
            times.slow += slow_calls(client)
    return found


def slow_calls(client: redis.Redis) -> list[str]:
    """Return the calls that took long, the longest first."""
    calls = sorted(client.slowlog_get(1_000), key=lambda one: -one["duration"])
    return [f"{one['duration'] / 1000:.1f} ms: {one['command'][:60].decode(errors='replace')}" for one in calls]


def count_and_next(broker: str, directory: Path) -> list[str]:
    """Follow links to next pages of a search, and count the jobs of a change."""
    lines: list[str] = []
    with Board(broker, directory) as board:
        took, html = board.get("/queues/mail?state=completed&text=nobody")
        while (link := re.search(r'<a rel="next" href="([^"]+)"', html)) and len(lines) < 3:
            took, html = board.get(f"/queues/mail{unescape(link[1])}")
            lines.append(f"{took:.0f} ms")
        took, after = board.post("/queues/mail/changes/retry", state="failed")
        started = time.perf_counter()
        counted = poll(lambda: "counting" not in board.get(after)[1], 0.2, 120)
        seconds = time.perf_counter() - started
    return [
        f"a search that goes on: {', '.join(lines)}",
        f"count of the failed jobs of a change: reply after {took:.0f} ms, counted after {seconds:.1f} s ({counted})",
    ]


# ---- the cost of open tabs ----


def load(app: App, stop: threading.Event) -> None:
    """Send jobs at a constant rate."""
    due = time.monotonic()
    while not stop.is_set():
        app.send_many([call("shop.noop", number, queue="load") for number in range(FLOOD)])
        due += 0.1
        stop.wait(max(0.0, due - time.monotonic()))


def shares(client: redis.Redis, board: Board, paths: Sequence[str], seconds: float) -> tuple[float, float]:
    """Return the shares of a core that Redis and the dashboard use while these pages are open."""
    tabs = [Tab(board, path) for path in paths]
    _never.wait(3)  # the first views
    started, redis_us, board_us = time.monotonic(), server_cpu_us(client), board.cpu_us
    _never.wait(seconds)
    took_us = (time.monotonic() - started) * 1_000_000
    found = (server_cpu_us(client) - redis_us) / took_us, (board.cpu_us - board_us) / took_us
    for tab in tabs:
        tab.close()
    _never.wait(2)  # until the dashboard has noticed
    return found


def cost(
    client: redis.Redis, broker: str, rounds: int, seconds: float, directory: Path
) -> dict[str, list[tuple[float, float]]]:
    """Return the shares of Redis and of the dashboard, by what is open."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in TABS}
    with Board(broker, directory) as board:
        board.get("/")
        for _ in range(rounds):
            for name, paths in TABS.items():
                found[name].append(shares(client, board, paths, seconds))
    return found


# ---- the report ----


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[math.ceil(len(values) * share) - 1]


def report(title: str, pages: Mapping[str, Address], found: Sequence[Times]) -> bool:
    """Print a table; return whether the goals are met."""
    print(f"\n{title}\n")
    print("| page | first view: p50 | p95 | max | repeated: p50 | p95 | max | after a start | KiB | calls > 5 ms |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    is_good = True
    for name, times in zip(pages, found, strict=True):
        cells = [f"{f(values):.0f}" for values in (times.first, times.again) for f in (statistics.median, p95, max)]
        slow = "; ".join([str(len(times.slow)), *times.slow[:3]]) if times.slow else ""
        print(f"| {name} | {' | '.join(cells)} | {times.start:.0f} | {times.kib:.0f} | {slow} |", flush=True)
        is_good &= p95([*times.first, *times.again]) <= GOAL_MS and not times.slow
    return is_good


def p95(values: Sequence[float]) -> float:
    return percentile(values, 0.95)


def report_cost(title: str, found: Mapping[str, list[tuple[float, float]]]) -> bool:
    """Print a table; return whether a tab costs Redis less than the goal."""
    print(f"\n{title}: shares of a core\n")
    print("| open | Redis | more than without a tab | dashboard |\n|---|---|---|---|")
    without = statistics.median(of_redis for of_redis, _ in found["no tab"])
    is_good = True
    for name, values in found.items():
        of_redis, of_board = (statistics.median(column) for column in zip(*values, strict=True))
        print(f"| {name} | {of_redis:.2%} | {of_redis - without:.2%} | {of_board:.1%} |", flush=True)
        is_good &= of_redis - without < TAB_SHARE
    return is_good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--completed", type=int, default=1_000_000, help="number of completed jobs (1000000)")
    parser.add_argument("--failed", type=int, default=100_000, help="number of failed jobs (100000)")
    parser.add_argument("--queues", type=int, default=2_000, help="number of queues of the second server (2000)")
    parser.add_argument("--rounds", type=int, default=20, help="number of views of each page (20)")
    parser.add_argument("--seconds", type=float, default=10, help="how long tabs are open (10)")
    parser.add_argument("--only", choices=["jobs", "queues"], help="only one of the servers")
    options = parser.parse_args()
    is_good = True
    with tempfile.TemporaryDirectory(prefix="bulltask-dashboard-") as name:
        for only, run in (("jobs", _jobs), ("queues", _queues)):
            if options.only in {None, only}:
                directory = Path(name) / only
                directory.mkdir()
                is_good &= run(options, directory)
    print("\ngoals: met" if is_good else "\ngoals: missed")
    return 0 if is_good else 1


def _jobs(options: argparse.Namespace, directory: Path) -> bool:
    with server(directory / "server") as (started, client), ExitStack() as stack:
        app = App("bench", broker_url=started.url)
        stack.callback(app.close)
        begun = time.monotonic()
        ids = fill_jobs(app, client, options.completed, options.failed, directory)
        fill_lake(directory / LAKE, options.completed, options.failed)
        title = f"{options.completed:,} completed and {options.failed:,} failed jobs"
        print(f"{title}: filled in {time.monotonic() - begun:.0f} s", flush=True)
        pages = pages_of_jobs(client, ids, options.rounds)
        found = measure(started.url, client, pages, options.rounds, directory)
        is_good = report(f"{title}: milliseconds", pages, found)
        print(*count_and_next(started.url, directory), sep="\n", flush=True)
        is_good &= report_cost("Open tabs, idle", cost(client, started.url, TAB_ROUNDS, options.seconds, directory))
        ends = threading.Event()
        with worker(started.url, "load", directory):
            thread = threading.Thread(target=load, args=(app, ends))
            thread.start()
            try:
                found_cost = cost(client, started.url, TAB_ROUNDS, options.seconds, directory)
            finally:
                ends.set()
                thread.join()
        return report_cost(f"Open tabs, while {10 * FLOOD} jobs/s run", found_cost) and is_good


def _queues(options: argparse.Namespace, directory: Path) -> bool:
    with server(directory / "server") as (started, client), ExitStack() as stack:
        app = App("bench", broker_url=started.url)
        stack.callback(app.close)
        fill_queues(app, client, options.queues, directory)
        title = f"{options.queues:,} queues"
        pages = pages_of_queues()
        stack.enter_context(worker(started.url, "team0-queue0,team1-queue1", directory))
        is_good = report(
            f"{title}: milliseconds", pages, measure(started.url, client, pages, options.rounds, directory)
        )
        return (
            report_cost(f"Open tabs, {title}", cost(client, started.url, TAB_ROUNDS, options.seconds, directory))
            and is_good
        )


if __name__ == "__main__":
    sys.exit(main())
