"""The pipeline demo (``make demo-spark``): send the rows of a DataFrame as jobs, and store their history in tables.

The exit code is 0 only if the tables have every job's outcome. Needs Java 17 or newer.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "demo"))  # the server and the worker of the first demo

from processes import DemoWorker, Interrupted, clear_settings, ignore_signals, install_signal_handlers, temporary_server

from bulltask.errors import BulltaskError
from bulltask.queue import Queue

HERE = Path(__file__).parent
QUEUES = ["--queues", "shop,mail"]
PREFIX = "history-demo"  # the first part of all keys of the demo, which changes no other keys on the server
PLAN_FILE = "_demo_plan.json"


@dataclass(frozen=True)
class Plan:
    """A demo's plan, stored in its lake so that the demo can be resumed.

    Attributes:
        jobs: The number of jobs.
        write_id: The id of the write, so that no job is sent twice.
    """

    jobs: int
    write_id: str

    def store(self, lake: Path) -> None:
        (lake / PLAN_FILE).write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, lake: Path) -> Plan:
        try:
            return cls(**json.loads((lake / PLAN_FILE).read_text()))
        except (OSError, ValueError):
            sys.exit(f"There is nothing to resume: {lake} is not the lake of a demo that was started with --url")


def main() -> int:
    """Run the demo; return the exit code."""
    args = arguments()
    if shutil.which("java") is None and "JAVA_HOME" not in os.environ:
        sys.exit("The demo needs Java 17 or newer: apt-get install default-jre-headless, or set JAVA_HOME")
    plan = Plan.load(args.lake) if args.resume else start_plan(args.lake, max(100, args.jobs))
    clear_settings()
    os.environ["BULLTASK_PREFIX"] = PREFIX
    install_signal_handlers()
    try:
        with demo_server(args.url) as (url, server):
            if args.url and not args.resume:
                remove_jobs(url)
            return run_steps(plan, url, server, args)
    except Interrupted as signal:
        print("\nStopped the worker, Spark and the server. The lake is incomplete.")
        return 128 + signal.number
    except BulltaskError as error:
        sys.exit(f"The demo failed: {error}")


def arguments() -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(
        description="Send jobs from a DataFrame; store their history as tables and as a report."
    )
    parser.add_argument("--jobs", type=int, default=40_000, metavar="N", help="number of jobs (40000)")
    parser.add_argument("--lake", type=Path, default=Path("history-demo"), help="directory of the lake (history-demo)")
    parser.add_argument("--url", help=f"your server, instead of a temporary one; the demo's keys begin with {PREFIX}")
    parser.add_argument("--resume", action="store_true", help="with --url: continue a demo that was killed")
    parser.add_argument("--no-worker", action="store_true", help="with --url: you start the workers")
    parser.add_argument("--master", default="local[2]", help="Spark's master (local[2])")
    parser.add_argument("--conf", action="append", default=[], metavar="NAME=VALUE", help="Spark setting")
    args = parser.parse_args()
    if not args.url and (args.resume or args.no_worker):
        parser.error("--resume and --no-worker need --url")
    return args


def start_plan(lake: Path, jobs: int) -> Plan:
    """Create an empty directory; only the directory of an earlier demo is removed."""
    if (lake / PLAN_FILE).exists():
        shutil.rmtree(lake)
    if lake.exists() and any(lake.iterdir()):
        sys.exit(f"The demo needs an empty directory, and {lake} is not empty: choose another --lake DIR")
    lake.mkdir(parents=True, exist_ok=True)
    plan = Plan(jobs, f"demo-{secrets.token_hex(4)}")
    plan.store(lake)
    return plan


@contextmanager
def demo_server(url: str | None) -> Iterator[tuple[str, str]]:
    """Yield the server's URL and its description."""
    if url is not None:
        os.environ["BULLTASK_BROKER_URL"] = url
        yield url, f"your server; all of the demo's keys begin with {PREFIX}"
        return
    with temporary_server() as server:
        yield server.url, f"{server.binary} on port {server.port}, removed at the end"


def remove_jobs(url: str) -> None:
    """Remove the jobs of an earlier demo from your server."""
    for name in QUEUES[1].split(","):
        with Queue(name, url, prefix=PREFIX) as queue:
            queue.obliterate(force=True)


def run_steps(plan: Plan, url: str, server: str, args: argparse.Namespace) -> int:
    """Run all steps; return the exit code."""
    start, problems = time.perf_counter(), list[str]()
    # Before Spark, because a process with threads should not fork.
    worker = None if args.no_worker else DemoWorker(HERE, QUEUES)
    try:
        # Imported here, because the app of tasks.py reads the broker's URL from the environment when it is created.
        from steps import DemoSteps  # noqa: PLC0415

        conf = dict(pair.split("=", 1) for pair in args.conf)
        with DemoSteps(url, server, args.lake, args.master, conf) as steps:
            steps.start_pipeline()
            steps.send(plan.jobs, plan.write_id)
            steps.watch(plan.jobs)
            steps.build()
            problems += steps.check(plan.jobs)
            problems += steps.query()
            steps.report()
    finally:
        ignore_signals()  # the cleanup must not be interrupted
        code = 0 if worker is None else worker.stop()
    if code:
        problems.append(f"the worker exited with code {code}")
    for problem in problems:
        print(f"✗ {problem}", file=sys.stderr)
    if not problems:
        print(f"✓ The tables have the outcome of every job. Total time: {time.perf_counter() - start:.0f} s.")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
