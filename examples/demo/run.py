"""The demo: ``make demo``. Start a server and a worker, run jobs, check every job, and stop all processes.

The exit code is 0 only if every job has the expected outcome.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING

from processes import DemoWorker, Interrupted, clear_settings, ignore_signals, install_signal_handlers, temporary_server

from bulltask.embedded import EmbeddedServer
from bulltask.errors import BulltaskError

if TYPE_CHECKING:
    import steps

try:
    from screen import Row, Screen
except ModuleNotFoundError as missing:
    sys.exit(f'The demo needs {missing.name}: pip install "bulltask[demo]"')


def main() -> int:
    """Run the demo; return the exit code."""
    parser = argparse.ArgumentParser(description="A demo of bulltask: jobs, results, a retry, recovery from a crash.")
    parser.add_argument(
        "--jobs", type=int, default=5_000, metavar="N", help="number of no-op jobs in the last step (5000)"
    )
    jobs = max(100, parser.parse_args().jobs)
    screen, begin = Screen(), time.perf_counter()
    clear_settings()
    install_signal_handlers()
    try:
        with temporary_server() as server:
            problems, log = run_steps(screen, server, jobs)
    except Interrupted as signal:
        screen.note("\nStopped the worker and the server; removed all temporary files.")
        return 128 + signal.number
    except BulltaskError as error:
        problems, log = [str(error)], []
    if problems:
        screen.failure(problems, log)
        return 1
    screen.success(
        f"Every job has the expected outcome; worker and server have stopped. {time.perf_counter() - begin:.1f} s."
    )
    return 0


def run_steps(screen: Screen, server: EmbeddedServer, jobs: int) -> tuple[list[str], list[str]]:
    """Run the steps and check the jobs; return the problems and the end of the worker's log."""
    # Imported here, because the app of tasks.py reads the broker's URL from the environment when it is created.
    import steps  # noqa: PLC0415
    from feed import Feed  # noqa: PLC0415

    feed, problems = Feed(), []
    context = steps.DemoContext(screen, feed)
    begin, worker = time.perf_counter(), DemoWorker()
    try:
        feed.read_log(worker.log)
        feed.listen(server.url, "bull:{demo}:events")
        screen.opening(f"{server.binary} on port {server.port}, with a temporary directory")
        steps.wait_for_worker(context, begin)
        for step in (steps.sync_tasks, steps.async_tasks, steps.retry, steps.kill_a_child):
            step(context)
        steps.speed(context, jobs)
    except Exception as error:  # noqa: BLE001 - get() can raise any exception that a task raised
        problems.append(f"{type(error).__name__}: {error}")
    finally:
        ignore_signals()  # the cleanup must not be interrupted
        code = worker.stop()
        feed.close()
    if code:
        problems.append(f"the worker exited with code {code}")
    if not problems:
        problems = check(screen, server.url, context)
    return problems, list(feed.log)


def check(screen: Screen, url: str, context: steps.DemoContext) -> list[str]:
    """Check every job in Redis and in the events; show the table; return the problems."""
    import checks  # noqa: PLC0415 - see above

    stalls, problems = checks.audit(url, context.expectations)
    problems += checks.audit_events(
        context.feed.events, [expected for expected in context.expectations if expected.job.queue == "demo"]
    )
    if not problems:
        screen.row(Row("stalled jobs", stalls, "", f"of {len(context.expectations):,}, all checked in Redis"))
        screen.table()
    return problems


if __name__ == "__main__":
    sys.exit(main())
