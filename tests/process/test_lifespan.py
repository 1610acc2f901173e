"""``@app.lifespan`` and async receivers: what the async tasks of a child share."""

from __future__ import annotations

import pytest

from tests.support.worker_harness import WorkerHarness

pytestmark = pytest.mark.process

POOL = """
import asyncio

from bulltask import signals

class Pool:
    def __init__(self):
        self.loop, self.opened_in, self.uses = asyncio.get_running_loop(), os.getpid(), 0

    async def use(self):
        assert asyncio.get_running_loop() is self.loop
        await asyncio.sleep(0)
        self.uses += 1
        return self.uses

@app.lifespan
async def pools():
    record("opened")
    pool = Pool()
    task = asyncio.current_task()
    yield pool
    assert asyncio.current_task() is task, "as anyio requires"
    await pool.use()
    record("closed", uses=pool.uses)

@signals.worker_process_init.connect
async def on_init(**_):
    await asyncio.sleep(0)
    assert asyncio.get_running_loop() is app.state.loop
    record("init")

@signals.worker_process_shutdown.connect
async def on_shutdown(*, pid, exitcode, **_):
    await app.state.use()
    record("shutdown", exitcode=exitcode)

@app.task(bind=True, name="bound")
async def bound(self):
    return await self.state.use()

@app.task(name="unbound")
async def unbound():
    return await app.state.use()

@app.task(bind=True, name="sync")
def sync(self):
    return self.state.opened_in == os.getpid()
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_the_tasks_of_a_child_share_what_the_lifespan_has_yielded(harness: WorkerHarness, method: str) -> None:
    worker = harness.worker(POOL, children=1, settings={"worker_start_method": method})
    jobs = [harness.app.send_task(name) for name in ("bound", "unbound", "bound")]
    assert sorted(job.get(timeout=20) for job in jobs) == [1, 2, 3]
    assert harness.app.send_task("sync").get(timeout=20) is True
    assert worker.stop() == 0
    order = [entry["what"] for entry in harness.journal.all()]
    assert order == ["opened", "init", "shutdown", "closed"]
    (closed,) = harness.journal.all(what="closed")
    assert closed["uses"] == "5"


def test_a_child_whose_lifespan_fails_does_not_start(harness: WorkerHarness) -> None:
    source = """
@app.lifespan
async def pools():
    raise ConnectionError("no database")
    yield
"""
    worker = harness.worker(source, children=1)
    assert worker.wait(30) == 3
    assert "ConnectionError: no database" in worker.log


def test_a_lifespan_that_fails_at_its_end_is_logged(harness: WorkerHarness) -> None:
    source = """
@app.lifespan
async def pools():
    yield
    raise ConnectionError("cannot close")
"""
    worker = harness.worker(source, children=1)
    harness.hold()
    harness.open_gate()
    harness.journal.wait_for(1, what="end")
    assert worker.stop() == 0
    (line,) = worker.logged("Hook failed")
    assert "cannot close" in line["exception"]
