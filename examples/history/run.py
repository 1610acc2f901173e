"""The demo of the pipeline: ``make demo-spark``. A DataFrame becomes jobs, workers run them, their history is tables.

The exit code is 0 only if the tables say what has become of every single job. Needs Java 17.
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

sys.path.append(str(Path(__file__).parents[1] / "demo"))  # server and worker are those of the other demo

from stage import DemoWorker, Interrupted, end_on_signals, forget_settings, ignore_signals, throw_away_server

from bulltask.errors import BulltaskError
from bulltask.queue import Queue

HERE = Path(__file__).parent
QUEUES = ["--queues", "shop,mail"]
PREFIX = "history-demo"  # of all keys, so that on a server of yours nothing else is touched
MARK = "_made_by_the_demo"


@dataclass(frozen=True)
class Plan:
    """What a demo does, noted in its lake for one that goes on.

    Attributes:
        jobs: how many.
        write_id: makes it known which of them are there already.
    """

    jobs: int
    write_id: str

    def note(self, root: Path) -> None:
        (root / MARK).write_text(json.dumps(asdict(self)))

    @classmethod
    def noted(cls, root: Path) -> Plan:
        try:
            return cls(**json.loads((root / MARK).read_text()))
        except (OSError, ValueError):
            sys.exit(f"There is nothing to resume: {root} is not the lake of a demo that was begun with --url")


def main() -> int:
    """Run the demo; return the exit code."""
    args = arguments()
    if shutil.which("java") is None and "JAVA_HOME" not in os.environ:
        sys.exit("The demo needs Java 17: apt-get install default-jre-headless, or set JAVA_HOME")
    plan = Plan.noted(args.root) if args.resume else begin_anew(args.root, max(100, args.jobs))
    forget_settings()
    os.environ["BULLTASK_PREFIX"] = PREFIX
    end_on_signals()
    try:
        with server_of(args.url) as (url, server):
            if args.url and not args.resume:
                forget_jobs(url)
            return play(plan, url, server, args)
    except Interrupted as signal:
        print("\nStopped; server, worker and Spark are gone. The lake is as far as it got.")
        return 128 + signal.number
    except BulltaskError as error:
        sys.exit(f"The demo failed: {error}")


def arguments() -> argparse.Namespace:
    """What the user wants."""
    parser = argparse.ArgumentParser(description="Jobs from a DataFrame; their history as tables and as a report.")
    parser.add_argument("--jobs", type=int, default=100_000, metavar="N", help="how many jobs (100000)")
    parser.add_argument("--root", type=Path, default=Path("history-demo"), help="directory of the lake (history-demo)")
    parser.add_argument(
        "--url", help=f"a server of yours in place of one that is thrown away; the demo's keys begin with {PREFIX}"
    )
    parser.add_argument(
        "--resume", action="store_true", help="with --url: go on where a demo has ended that was killed"
    )
    parser.add_argument("--no-worker", action="store_true", help="with --url: workers of yours run the jobs")
    parser.add_argument("--master", default="local[2]", help="where Spark runs (local[2])")
    parser.add_argument("--conf", action="append", default=[], metavar="NAME=VALUE", help="a setting of Spark's")
    args = parser.parse_args()
    if not args.url and (args.resume or args.no_worker):
        parser.error("--resume and --no-worker need the --url of a server that outlives the demo")
    return args


def begin_anew(root: Path, jobs: int) -> Plan:
    """Begin with an empty directory; only one that an earlier demo has made is emptied."""
    if (root / MARK).exists():
        shutil.rmtree(root)
    if root.exists() and any(root.iterdir()):
        sys.exit(f"The demo begins a lake of its own, and {root} is not empty: choose another --root DIR")
    root.mkdir(parents=True, exist_ok=True)
    plan = Plan(jobs, f"demo-{secrets.token_hex(4)}")
    plan.note(root)
    return plan


@contextmanager
def server_of(url: str | None) -> Iterator[tuple[str, str]]:
    """The server's URL, and what to call it."""
    if url is not None:
        os.environ["BULLTASK_BROKER_URL"] = url
        yield url, f"yours; all keys of the demo begin with {PREFIX}"
        return
    with throw_away_server() as server:
        yield server.url, f"{server.binary} on port {server.port}, thrown away at the end"


def forget_jobs(url: str) -> None:
    """Remove what an earlier demo has left on a server of yours."""
    for name in QUEUES[1].split(","):
        with Queue(name, url, prefix=PREFIX) as queue:
            queue.obliterate(force=True)


def play(plan: Plan, url: str, server: str, args: argparse.Namespace) -> int:
    """Stream, send, run, build, look; return the exit code."""
    begin, faults = time.perf_counter(), list[str]()
    # Before Spark: a process with threads should not fork.
    worker = None if args.no_worker else DemoWorker(HERE, QUEUES)
    try:
        # Imported now: the app of tasks.py reads its broker's address from the environment when it is made.
        from story import Story  # noqa: PLC0415

        conf = dict(word.split("=", 1) for word in args.conf)
        with Story(url, server, args.root, args.master, conf) as story:
            story.stream()
            story.send(plan.jobs, plan.write_id)
            story.follow(plan.jobs)
            story.build()
            faults += story.check(plan.jobs)
            story.report()
    finally:
        ignore_signals()  # what is left takes a moment and must not be left undone
        code = 0 if worker is None else worker.stop()
    if code:
        faults.append(f"the worker ended with exit code {code}")
    for fault in faults:
        print(f"✗ {fault}", file=sys.stderr)
    if not faults:
        print(f"✓ The tables say of every job what became of it. {time.perf_counter() - begin:.0f} s in all.")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
