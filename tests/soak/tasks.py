"""The tasks and queues of a soak test's workers."""

from __future__ import annotations

from typing import Final

__all__ = ["QUEUES", "TASKS"]

QUEUES: Final = ("main", "narrow", "shared", "batches")
"""``narrow`` has a global concurrency; ``shared`` also has a Node.js worker; ``batches`` has a batch task."""

TASKS: Final = '''
import asyncio
import ctypes
import signal
import time

from bulltask import BatchJob, PermanentError, TransientError


def record_start(self):
    """Record the start of an attempt in the journal; return whether it is the job's first."""
    request = self.request
    record("start", job=request.id, queue=request.queue, worker=os.environ["SOAK_WORKER"])
    return journal().incr(f"attempts:{request.id}") == 1


@app.task(bind=True, name="plain")
def plain(self, ms=5, **_):
    record_start(self)
    time.sleep(ms / 1000)
    return ms


@app.task(bind=True, name="nap")
async def nap(self, ms=5):
    record_start(self)
    await asyncio.sleep(ms / 1000)
    return ms


@app.task(bind=True, name="flaky")
def flaky(self):
    if record_start(self):
        raise TransientError("the first attempt fails")


@app.task(bind=True, name="aflaky")
async def aflaky(self):
    if record_start(self):
        raise TransientError("the first attempt fails")


@app.task(bind=True, name="broken")
def broken(self):
    record_start(self)
    raise PermanentError("expected")


@app.task(name="batched", batch=10, batch_wait=0.05)
def batched(jobs: list[BatchJob[int]]) -> list[int]:
    for job in jobs:
        record_start(job)
    time.sleep(0.01)
    return [2 * job.data for job in jobs]


@app.task(bind=True, name="limited", rate_limit="20/s")
def limited(self):
    record_start(self)


@app.task(bind=True, name="steps", checkpoint=True, checkpoint_interval=0.05)
def steps(self, count):
    record_start(self)
    for _ in self.iterate(range(count)):
        time.sleep(0.005)


@app.task(bind=True, name="total")
def total(self, numbers):
    record_start(self)
    return sum(numbers)


@app.task(bind=True, name="forks")
def forks(self, then):
    record_start(self)
    if os.fork() == 0:
        if then == "raise":
            raise RuntimeError("in the copy")
        if then == "exit":
            raise SystemExit(0)
    return then


@app.task(bind=True, name="stops_its_loop")
async def stops_its_loop(self):
    if record_start(self):
        asyncio.get_running_loop().stop()
    await asyncio.sleep(0.01)


@app.task(bind=True, name="holds_the_gil")
def holds_the_gil(self, seconds):
    record_start(self)
    ctypes.PyDLL(None).usleep(int(seconds * 1_000_000))  # unlike CDLL, PyDLL holds the GIL


@app.task(bind=True, name="aholds_the_gil")
async def aholds_the_gil(self, seconds):
    record_start(self)
    ctypes.PyDLL(None).usleep(int(seconds * 1_000_000))


@app.task(bind=True, name="kills_its_child")
def kills_its_child(self):
    if record_start(self):
        os.kill(os.getpid(), signal.SIGKILL)
'''
