"""A task stops the event loop that it shares with the other async tasks of its child."""

from __future__ import annotations

import pytest

from tests.support.worker_harness import WorkerHarness

pytestmark = pytest.mark.process

STOPS_THE_LOOP = """
import asyncio, sys, threading

async def leave():
    sys.exit(3)

WAYS = {
    "stop": lambda loop: loop.stop(),
    "stop and close": lambda loop: threading.Thread(target=stop_and_close, args=(loop,)).start(),
    "an exit in another asyncio task": lambda loop: loop.create_task(leave()),
}

def stop_and_close(loop):
    loop.call_soon_threadsafe(loop.stop)
    while not loop.is_closed():
        try:
            loop.close()
        except RuntimeError:
            pass

@app.task(bind=True, name="end")
async def end(self, how):
    if self.request.attempts_started == 1:
        WAYS[how](asyncio.get_running_loop())
        await asyncio.sleep(60)

@app.task(bind=True, name="other")
async def other(self):
    record("start", job=self.request.id)
    if self.request.attempts_started == 1:
        await asyncio.sleep(60)
"""


@pytest.mark.parametrize("how", ["stop", "stop and close", "an exit in another asyncio task"])
def test_a_child_whose_event_loop_was_stopped_is_replaced_and_its_jobs_run_again(
    harness: WorkerHarness, how: str
) -> None:
    worker = harness.worker(STOPS_THE_LOOP, children=1)
    other = harness.app.send_task("other")
    child = int(harness.wait_for_start(other)["pid"])
    ending = harness.app.send_task("end", kwargs={"how": how})
    ending.get(timeout=20)
    other.get(timeout=20)
    (line,) = worker.logged("Event loop stopped")
    assert (line["pid"], line["jobs"]) == (child, [other.id, ending.id])
    assert ("SystemExit: 3" in line["error"]) is (how == "an exit in another asyncio task")
    worker.wait_for_line("Child died", pid=child)
    assert worker.stop() == 0
