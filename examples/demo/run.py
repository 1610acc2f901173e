"""The demo: ``make demo``. Starts a server and a worker of its own, shows jobs, checks every one, stops everything.

The exit code is 0 only if every job has ended as it should.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING

from stage import DemoWorker, Interrupted, end_on_signals, forget_settings, ignore_signals, throw_away_server

from bulltask.embedded import EmbeddedServer
from bulltask.errors import BulltaskError

if TYPE_CHECKING:
    import scenes

try:
    from screen import Row, Screen
except ModuleNotFoundError as missing:
    sys.exit(f'The demo needs {missing.name}: pip install "bulltask[demo]"')


def main() -> int:
    """Run the demo; return the exit code."""
    parser = argparse.ArgumentParser(description="bulltask at work: jobs, a retry, a crash recovered, results.")
    parser.add_argument("--jobs", type=int, default=5_000, metavar="N", help="no-op jobs of the last scene (5000)")
    jobs = max(100, parser.parse_args().jobs)
    screen, begin = Screen(), time.perf_counter()
    forget_settings()
    end_on_signals()
    try:
        with throw_away_server() as server:
            faults, log = play(screen, server, jobs)
    except Interrupted as signal:
        screen.note("\nStopped; the worker and the server are gone, and nothing is left behind.")
        return 128 + signal.number
    except BulltaskError as error:
        faults, log = [str(error)], []
    if faults:
        screen.failure(faults, log)
        return 1
    screen.verdict(
        f"Every job ended as it should; worker and server have stopped. {time.perf_counter() - begin:.1f} s in all."
    )
    return 0


def play(screen: Screen, server: EmbeddedServer, jobs: int) -> tuple[list[str], list[str]]:
    """Show the scenes and check them; return what was wrong, and the end of the worker's log."""
    # Imported now: the app of tasks.py reads its broker's address from the environment when it is made.
    import scenes  # noqa: PLC0415
    from feed import Feed  # noqa: PLC0415

    feed, faults = Feed(), []
    story = scenes.Story(screen, feed)
    begin, worker = time.perf_counter(), DemoWorker()
    try:
        feed.read_log(worker.log)
        feed.listen(server.url, "bull:{demo}:events")
        screen.opening(f"{server.binary} on port {server.port}, its data in a throw-away directory")
        scenes.worker_is_up(story, begin)
        for scene in (scenes.jobs_flow, scenes.async_side_by_side, scenes.one_retry, scenes.kill_a_child):
            scene(story)
        scenes.speed(story, jobs)
    except Exception as error:  # noqa: BLE001 - what get() raises may be anything; it is the reason of the failure
        faults.append(f"{type(error).__name__}: {error}")
    finally:
        ignore_signals()  # what is left takes a moment and must not be left undone
        code = worker.stop()
        feed.close()
    if code:
        faults.append(f"the worker ended with exit code {code}")
    if not faults:
        faults = check(screen, server.url, story)
    return faults, list(feed.log)


def check(screen: Screen, url: str, story: scenes.Story) -> list[str]:
    """Look at every job in Redis and in the events; show the table; return what is not as it should be."""
    import checks  # noqa: PLC0415 - as above

    stalls, faults = checks.audit(url, story.promises)
    faults += checks.audit_events(story.feed.events, [one for one in story.promises if one.job.queue == "demo"])
    if not faults:
        screen.row(Row("stalled jobs", stalls, "", f"of {len(story.promises):,}, all checked in Redis"))
        screen.table()
    return faults


if __name__ == "__main__":
    sys.exit(main())
