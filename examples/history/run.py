"""The demo of the pipeline: ``make demo-spark``. A DataFrame becomes jobs, workers run them, their history is tables.

The exit code is 0 only if the tables say what has become of every single job. Needs Java 17.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "demo"))  # server and worker are those of the other demo

from stage import DemoWorker, Interrupted, end_on_signals, forget_settings, ignore_signals, throw_away_server

from bulltask.embedded import EmbeddedServer
from bulltask.errors import BulltaskError

HERE = Path(__file__).parent
QUEUES = ["--queues", "shop,mail"]
MARK = "_made_by_the_demo"


def main() -> int:
    """Run the demo; return the exit code."""
    parser = argparse.ArgumentParser(description="Jobs from a DataFrame; their history as tables and as a report.")
    parser.add_argument("--jobs", type=int, default=100_000, metavar="N", help="how many jobs (100000)")
    parser.add_argument("--root", type=Path, default=Path("history-demo"), help="directory of the lake (history-demo)")
    args = parser.parse_args()
    if shutil.which("java") is None and "JAVA_HOME" not in os.environ:
        sys.exit("The demo needs Java 17: apt-get install default-jre-headless, or set JAVA_HOME")
    make_room(args.root)
    forget_settings()
    end_on_signals()
    try:
        with throw_away_server() as server:
            return play(server, max(100, args.jobs), args.root)
    except Interrupted as signal:
        print("\nStopped; server, worker and Spark are gone. The lake is as far as it got.")
        return 128 + signal.number
    except BulltaskError as error:
        sys.exit(f"The demo failed: {error}")


def make_room(root: Path) -> None:
    """Begin with an empty directory; only one that an earlier demo has made is emptied."""
    if (root / MARK).exists():
        shutil.rmtree(root)
    if root.exists() and any(root.iterdir()):
        sys.exit(f"The demo begins a lake of its own, and {root} is not empty: choose another --root DIR")
    root.mkdir(parents=True, exist_ok=True)
    (root / MARK).touch()


def play(server: EmbeddedServer, jobs: int, root: Path) -> int:
    """Send, run, follow, build, look; return the exit code."""
    begin, faults = time.perf_counter(), list[str]()
    worker = DemoWorker(HERE, QUEUES)  # before Spark: a process with threads should not fork
    try:
        # Imported now: the app of tasks.py reads its broker's address from the environment when it is made.
        from story import Story  # noqa: PLC0415

        with Story(server, root) as story:
            story.send(jobs)
            story.follow(jobs)
            story.build()
            faults += story.check(jobs)
            story.report()
    finally:
        ignore_signals()  # what is left takes a moment and must not be left undone
        code = worker.stop()
    if code:
        faults.append(f"the worker ended with exit code {code}")
    for fault in faults:
        print(f"✗ {fault}", file=sys.stderr)
    if not faults:
        print(f"✓ The tables say of every job what became of it. {time.perf_counter() - begin:.0f} s in all.")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
