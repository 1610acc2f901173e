"""The five steps of the demo. Each sends jobs, shows their events, and records the expected outcomes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from checks import Expectation
from feed import TIMEOUT_S, DemoFailed, Entry, Feed
from processes import WORKER, run_async
from screen import Row, Screen
from tasks import app, charge, fetch, noop, render, resize

from bulltask import AsyncResult, PermanentError

PHOTOS, PAGES, WAIT = 24, 100, 0.5


@dataclass
class DemoContext:
    """Objects that all steps use, and their results."""

    screen: Screen
    feed: Feed
    expectations: list[Expectation] = field(default_factory=list)
    photos: list[AsyncResult[Any]] = field(default_factory=list)
    killed: int = 0

    def expect(self, *expectations: Expectation) -> None:
        """Record expected outcomes."""
        self.expectations += expectations

    def follow(self, job: AsyncResult[Any], sent_at: float) -> Iterator[Entry]:
        """Show and yield the entries of one job until it has finished."""
        for entry in self.feed.follow(job.id):
            self.screen.show_entry(entry, sent_at)
            yield entry


def wait_for_worker(context: DemoContext, since: float) -> None:
    """Run a first job to wait for the worker."""
    job = resize.delay(0)
    for _ in context.feed.follow(job.id):
        pass
    context.photos.append(job)
    took = time.perf_counter() - since
    context.screen.line(f"worker  bulltask {' '.join(WORKER)}: up after {took:.1f} s")


def sync_tasks(context: DemoContext) -> None:
    """Run sync tasks in two children."""
    context.screen.step("Send jobs, run them in a child, get their results", "resize.delay(1)")
    begin = time.perf_counter()
    job = resize.delay(1)
    for _ in context.follow(job, begin):
        pass
    context.screen.code(f"jobs = [resize.delay(photo) for photo in range(2, {PHOTOS})]")
    context.screen.code("[job.get() for job in jobs]")
    begin = time.perf_counter()
    jobs = [*context.photos, job, *(resize.delay(photo) for photo in range(2, PHOTOS))]
    results = [job.get(timeout=TIMEOUT_S) for job in jobs]
    took = time.perf_counter() - begin
    ran = Counter(result["child"] for result in results[2:])
    context.screen.line(f"[{results[2]}, {results[3]}, …]")
    context.screen.line(f"{took:.2f} s: {' and '.join(f'{count} ran in child {pid}' for pid, count in ran.items())}")
    context.screen.row(Row("sync tasks", PHOTOS, "all completed", f"{PHOTOS - 2} of them together: {took:.2f} s"))
    for photo, (job, result) in enumerate(zip(jobs, results, strict=True)):
        context.expect(Expectation(job, {"photo": photo, "child": result["child"]}))


def async_tasks(context: DemoContext) -> None:
    """Run async tasks concurrently."""
    context.screen.step(
        "Async tasks run concurrently",
        f"jobs = await asyncio.gather(*(fetch.adelay(page) for page in range({PAGES})))",
        "await asyncio.gather(*jobs)",
    )

    async def send_and_wait() -> list[AsyncResult[str]]:
        jobs = await asyncio.gather(*(fetch.adelay(page) for page in range(PAGES)))
        async with asyncio.timeout(TIMEOUT_S):
            await asyncio.gather(*jobs)
        return jobs

    begin = time.perf_counter()
    jobs = run_async(send_and_wait)
    took, alone = time.perf_counter() - begin, PAGES * WAIT
    if took > alone / 4:
        raise DemoFailed(f"{PAGES} async jobs took {took:.1f} s, so they did not run concurrently")
    context.screen.line(
        f"{PAGES} jobs that wait {WAIT:g} s each: all finished after {took:.2f} s instead of {alone:g} s"
    )
    context.screen.row(Row("async tasks", PAGES, "all completed", f"{alone:g} s of waiting in {took:.2f} s"))
    context.expect(*(Expectation(job, f"page {page}") for page, job in enumerate(jobs)))


def retry(context: DemoContext) -> None:
    """Retry after a transient error, but not after a permanent error."""
    context.screen.step("A transient error is retried, a permanent error is not", 'charge.delay("visa")')
    begin = time.perf_counter()
    job = charge.delay("visa")
    starts = [entry.at for entry in context.follow(job, begin) if entry.source == "event" and entry.name == "active"]
    waited = starts[-1] - starts[0]
    context.screen.row(Row("transient error", 1, "completed", f"attempt 2 after {waited:.2f} s"))
    context.expect(Expectation(job, "charged in attempt 2", attempts_made=2, attempts_started=2))

    context.screen.code('charge.delay("stolen").get()')
    begin = time.perf_counter()
    job = charge.delay("stolen")
    for _ in context.follow(job, begin):
        pass
    try:
        job.get(timeout=TIMEOUT_S)
    except PermanentError as error:
        context.screen.line(f"PermanentError: {error}  (raised here, by get())")
        context.expect(Expectation(job, error="the bank rejects this card"))
    else:
        raise DemoFailed("the charge of the stolen card did not fail")
    context.screen.row(Row("permanent error", 1, "failed", "get() raised PermanentError"))


def kill_a_child(context: DemoContext) -> None:
    """Kill a child while it runs a job."""
    context.screen.step("kill -9 while a job is running", 'render.delay("intro.mp4")')
    begin = time.perf_counter()
    job, killed_at, back_at = render.delay("intro.mp4"), 0.0, 0.0
    for entry in context.follow(job, begin):
        progress = json.loads(entry.fields["data"]) if entry.name == "progress" else {}
        if progress.get("step") == 2 and not killed_at:
            context.killed = progress["child"]
            killed_at = time.perf_counter()
            os.kill(context.killed, signal.SIGKILL)
            context.screen.timed_line(killed_at - begin, "demo", f"kill -9 {context.killed}")
        elif entry.source == "event" and entry.name == "active" and killed_at:
            back_at = entry.at
    if not back_at:
        raise DemoFailed("the child was killed too late: the job had already finished")
    recovery_ms, lock_s = (back_at - killed_at) * 1000, app.conf.lock_duration
    context.screen.line(f"running again {recovery_ms:.0f} ms after the kill; its lock expires only after {lock_s:g} s")
    context.screen.row(
        Row("killed child", 1, "completed", f"recovered after {recovery_ms:.0f} ms (lock: {lock_s:g} s)")
    )
    context.expect(Expectation(job, "intro.mp4: 4 scenes", attempts_started=2))


def speed(context: DemoContext, number: int) -> None:
    """Measure the throughput with no-op jobs."""
    context.screen.step("Speed", f"jobs = noop.delay_many([()] * {number:_})", "jobs[-1].get()")
    begin = time.perf_counter()
    jobs = noop.delay_many([()] * number)
    sent = time.perf_counter() - begin
    jobs[-1].get(timeout=2 * TIMEOUT_S)
    took = time.perf_counter() - begin
    results = run_async(_all_results, jobs)
    children = _two_children(context, Counter(results))
    context.screen.line(f"{number:,} jobs sent in {sent:.2f} s, all finished {took:.2f} s after the first was sent")
    context.screen.line(f"two children are running: {' and '.join(map(str, children))}; {context.killed} was replaced")
    context.screen.row(Row("no-op jobs", number, "all completed", f"{number / took:,.0f} jobs/s, including sends"))
    context.expect(*(Expectation(job, result) for job, result in zip(jobs, results, strict=True)))


async def _all_results(jobs: list[AsyncResult[int]]) -> list[int]:
    async with asyncio.timeout(TIMEOUT_S):
        return await asyncio.gather(*jobs)


def _two_children(context: DemoContext, ran: Counter[int]) -> list[int]:
    """Return the pids of the children; wait for the new one, which may start late on a busy machine."""
    deadline = time.perf_counter() + TIMEOUT_S
    while len(ran) < 2 and time.perf_counter() < deadline:
        jobs = noop.delay_many([()] * 100)
        results = run_async(_all_results, jobs)
        context.expect(*(Expectation(job, result) for job, result in zip(jobs, results, strict=True)))
        ran.update(results)
    if len(ran) != 2 or context.killed in ran:
        raise DemoFailed(f"jobs ran in the children {sorted(ran)}: expected two, without {context.killed}")
    return sorted(ran)
