"""The five scenes of the demo. Each sends jobs, shows what becomes of them, and notes how they have to end."""

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

from checks import Promise
from feed import PATIENCE, DemoFailed, Feed, Heard
from screen import Row, Screen
from stage import WORKER, run_async
from tasks import app, charge, fetch, noop, render, resize

from bulltask import AsyncResult, PermanentError

PHOTOS, PAGES, WAIT = 24, 100, 0.5


@dataclass
class Story:
    """What the scenes share."""

    screen: Screen
    feed: Feed
    promises: list[Promise] = field(default_factory=list)
    photos: list[AsyncResult[Any]] = field(default_factory=list)
    killed: int = 0

    def promise(self, *promises: Promise) -> None:
        """Note how jobs have to end."""
        self.promises += promises

    def follow(self, job: AsyncResult[Any], sent_at: float) -> Iterator[Heard]:
        """Show all that is heard of one job until it has ended."""
        for heard in self.feed.follow(job.id):
            self.screen.heard(heard, sent_at)
            yield heard


def worker_is_up(story: Story, since: float) -> None:
    """A first job tells when the worker is there, or that it is not."""
    job = resize.delay(0)
    for _ in story.feed.follow(job.id):
        pass
    story.photos.append(job)
    took = time.perf_counter() - since
    story.screen.say(f"worker  bulltask {' '.join(WORKER)}: up after {took:.1f} s")


def jobs_flow(story: Story) -> None:
    """Plain functions in two children."""
    story.screen.scene("Jobs flow: sent here, run in a child, results back here", "resize.delay(1)")
    begin = time.perf_counter()
    job = resize.delay(1)
    for _ in story.follow(job, begin):
        pass
    story.screen.code(f"jobs = [resize.delay(photo) for photo in range(2, {PHOTOS})]")
    story.screen.code("[job.get() for job in jobs]")
    begin = time.perf_counter()
    jobs = [*story.photos, job, *(resize.delay(photo) for photo in range(2, PHOTOS))]
    results = [job.get(timeout=PATIENCE) for job in jobs]
    took = time.perf_counter() - begin
    ran = Counter(result["child"] for result in results[2:])
    story.screen.say(f"[{results[2]}, {results[3]}, …]")
    story.screen.say(f"{took:.2f} s: {' and '.join(f'{count} ran in child {pid}' for pid, count in ran.items())}")
    story.screen.row(Row("sync tasks", PHOTOS, "all completed", f"{PHOTOS - 2} of them together: {took:.2f} s"))
    for photo, (job, result) in enumerate(zip(jobs, results, strict=True)):
        story.promise(Promise(job, {"photo": photo, "child": result["child"]}))


def async_side_by_side(story: Story) -> None:
    """Coroutines that wait at the same time."""
    story.screen.scene(
        "Async tasks wait side by side, not one after the other",
        f"jobs = await asyncio.gather(*(fetch.adelay(page) for page in range({PAGES})))",
        "await asyncio.gather(*jobs)",
    )

    async def send_and_wait() -> list[AsyncResult[str]]:
        jobs = await asyncio.gather(*(fetch.adelay(page) for page in range(PAGES)))
        async with asyncio.timeout(PATIENCE):
            await asyncio.gather(*jobs)
        return jobs

    begin = time.perf_counter()
    jobs = run_async(send_and_wait)
    took, alone = time.perf_counter() - begin, PAGES * WAIT
    if took > alone / 4:
        raise DemoFailed(f"{PAGES} async jobs took {took:.1f} s: that is not side by side")
    story.screen.say(f"{PAGES} jobs that wait {WAIT:g} s each: all done after {took:.2f} s, not {alone:g} s")
    story.screen.row(Row("async tasks", PAGES, "all completed", f"{alone:g} s of waiting in {took:.2f} s"))
    story.promise(*(Promise(job, f"page {page}") for page, job in enumerate(jobs)))


def one_retry(story: Story) -> None:
    """A transient error is tried again, a permanent one is not."""
    story.screen.scene("A passing error is retried, a lasting one is not", 'charge.delay("visa")')
    begin = time.perf_counter()
    job = charge.delay("visa")
    starts = [heard.at for heard in story.follow(job, begin) if heard.source == "event" and heard.what == "active"]
    waited = starts[-1] - starts[0]
    story.screen.row(Row("a passing error", 1, "completed, try 2", f"tried again after {waited:.2f} s"))
    story.promise(Promise(job, "charged at try 2", tries=2, starts=2))

    story.screen.code('charge.delay("stolen").get()')
    begin = time.perf_counter()
    job = charge.delay("stolen")
    for _ in story.follow(job, begin):
        pass
    try:
        job.get(timeout=PATIENCE)
    except PermanentError as error:
        story.screen.say(f"PermanentError: {error}  (raised here, by get())")
        story.promise(Promise(job, error="the bank refuses this card"))
    else:
        raise DemoFailed("the charge of the stolen card did not fail")
    story.screen.row(Row("a lasting error", 1, "failed, try 1", "get() raised PermanentError"))


def kill_a_child(story: Story) -> None:
    """``kill -9`` in the middle of a job."""
    story.screen.scene("kill -9 in the middle of a job", 'render.delay("intro.mp4")')
    begin = time.perf_counter()
    job, killed_at, back_at = render.delay("intro.mp4"), 0.0, 0.0
    for heard in story.follow(job, begin):
        progress = json.loads(heard.fields["data"]) if heard.what == "progress" else {}
        if progress.get("scene") == 2 and not killed_at:
            story.killed = progress["child"]
            killed_at = time.perf_counter()
            os.kill(story.killed, signal.SIGKILL)
            story.screen.moment(killed_at - begin, "demo", f"kill -9 {story.killed}")
        elif heard.source == "event" and heard.what == "active" and killed_at:
            back_at = heard.at
    if not back_at:
        raise DemoFailed("the child was killed too late, the job had ended")
    away, lock = (back_at - killed_at) * 1000, app.config.lock_ms / 1000
    story.screen.say(f"running again {away:.0f} ms after the kill, though its lock would have lasted {lock:g} s")
    story.screen.row(Row("kill -9 mid-job", 1, "completed, try 1", f"back after {away:.0f} ms (lock: {lock:g} s)"))
    story.promise(Promise(job, "intro.mp4: 4 scenes", starts=2))


def speed(story: Story, number: int) -> None:
    """As many jobs as the machine can do."""
    story.screen.scene("Speed", f"jobs = noop.delay_many([()] * {number:_})", "jobs[-1].get()")
    begin = time.perf_counter()
    jobs = noop.delay_many([()] * number)
    sent = time.perf_counter() - begin
    jobs[-1].get(timeout=2 * PATIENCE)
    took = time.perf_counter() - begin
    results = run_async(_all_results, jobs)
    children = _two_children(story, Counter(results))
    story.screen.say(f"{number:,} jobs sent in {sent:.2f} s, all done {took:.2f} s after the first was sent")
    story.screen.say(f"two children work again: {' and '.join(map(str, children))}, for {story.killed} that was killed")
    story.screen.row(Row("no-op jobs", number, "all completed", f"{number / took:,.0f} a second, sending included"))
    story.promise(*(Promise(job, result) for job, result in zip(jobs, results, strict=True)))


async def _all_results(jobs: list[AsyncResult[int]]) -> list[int]:
    async with asyncio.timeout(PATIENCE):
        return await asyncio.gather(*jobs)


def _two_children(story: Story, ran: Counter[int]) -> list[int]:
    """The two that run jobs now; on a busy machine the new one may not be there yet, so it is waited for."""
    deadline = time.perf_counter() + PATIENCE
    while len(ran) < 2 and time.perf_counter() < deadline:
        jobs = noop.delay_many([()] * 100)
        results = run_async(_all_results, jobs)
        story.promise(*(Promise(job, result) for job, result in zip(jobs, results, strict=True)))
        ran.update(results)
    if len(ran) != 2 or story.killed in ran:
        raise DemoFailed(f"jobs ran in the children {sorted(ran)}: two were expected, and not {story.killed}")
    return sorted(ran)
