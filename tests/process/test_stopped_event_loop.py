"""A task that ends the event loop that it shares with the other async tasks of its child."""

from __future__ import annotations

import pytest

from tests.support.worker_harness import WorkerHarness

pytestmark = pytest.mark.process

ENDING = """
import asyncio, sys, threading

async def leave():
    sys.exit(3)

WAYS = {
    "stop": lambda loop: loop.stop(),
    "stop and close": lambda loop: threading.Thread(target=stop_and_close, args=(loop,)).start(),
    "an exit in a task beside it": lambda loop: loop.create_task(leave()),
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
    if self.request.deliveries == 1:
        WAYS[how](asyncio.get_running_loop())
        await asyncio.sleep(60)

@app.task(bind=True, name="neighbour")
async def neighbour(self):
    record("start", job=self.request.id)
    if self.request.deliveries == 1:
        await asyncio.sleep(60)
"""


@pytest.mark.parametrize("how", ["stop", "stop and close", "an exit in a task beside it"])
def test_a_child_whose_event_loop_a_task_has_ended_says_so_and_is_replaced_and_its_jobs_run_again(
    harness: WorkerHarness, how: str
) -> None:
    worker = harness.worker(ENDING, children=1)
    neighbour = harness.app.send_task("neighbour")
    child = int(harness.wait_for_start(neighbour)["pid"])
    culprit = harness.app.send_task("end", kwargs={"how": how})
    culprit.get(timeout=20)
    neighbour.get(timeout=20)
    (line,) = worker.logged("Event loop stopped")
    assert (line["pid"], line["jobs"]) == (child, [neighbour.id, culprit.id])
    assert ("SystemExit: 3" in line["error"]) is (how == "an exit in a task beside it")
    worker.wait_for_line("Child died", pid=child)
    assert worker.stop() == 0
