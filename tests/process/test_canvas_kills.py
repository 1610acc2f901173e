"""Canvases survive the deaths of workers, and are stored whole or not at all if the sender dies."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from typing import Any

from bulltask import group
from bulltask.registry.canvas import Canvas
from tests.support.programs import ROOT
from tests.support.worker_harness import WorkerHarness

TASKS = """
    @app.task(bind=True, name="member", max_retries=3)
    def member(self, number, offset=0):
        record("start", job=self.request.id)
        return number + offset

    @app.task(bind=True, name="body", max_retries=3)
    def body(self, numbers):
        record("start", job=self.request.id)
        return sum(numbers)
"""

SENDER = """
import sys
from bulltask import App, group

app = App("sender", sys.argv[1])
member, body = app.signature("member", kwargs={{"number": 1}}), app.signature("body")
while True:
    (group(member.clone() for _ in range({members})) | group(body, body.clone()) | body.clone()).delay()
    print("sent", flush=True)
"""


def test_workers_killed_at_random_lose_no_step_of_a_canvas_and_deliver_each_result_once(
    harness: WorkerHarness, rng: random.Random
) -> None:
    worker = harness.worker(TASKS, children=4, settings={"lock_duration": 30, "max_crashes": 50})
    sign = harness.app.signature

    def canvas(number: int) -> Canvas[Any, Any]:
        members = group(sign("member", kwargs={"number": number, "offset": n}) for n in range(10))
        canvas: Canvas[Any, Any] = members | group(sign("body"), sign("body")) | sign("body")
        return canvas  # results go through a chord, a fan-out and another chord

    results = []
    for number in range(60):
        results.append(canvas(number).delay())
        if number % 3 == 0 and (children := worker.children):
            with suppress(ProcessLookupError):  # the child that was killed before this one
                os.kill(rng.choice(children), signal.SIGKILL)
    for number, result in enumerate(results):
        assert result.get(timeout=60) == 2 * (10 * number + 45)
    starts = Counter(entry["job"] for entry in harness.journal.all(what="start"))
    harness.report(jobs=len(starts), repeated=sum(starts.values()) - len(starts))
    assert len(starts) == 60 * 13
    assert worker.stop() == 0


def test_a_killed_sender_stores_a_canvas_whole_or_not_at_all(harness: WorkerHarness, rng: random.Random) -> None:
    members = 100
    jobs_of_canvas = members + 1 + 2 + 1  # with the fan-out job
    for _ in range(5):
        program = SENDER.format(members=members)
        command = [sys.executable, "-c", program, harness.url]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as sender:
            assert sender.stdout is not None
            for _ in range(rng.randrange(1, 8)):
                assert sender.stdout.readline() == "sent\n"
            sender.kill()
        keys: Any = harness.redis.keys("bull:{default}:*-*-*")
        stored = [key for key in keys if key.count(":") == 2]
        assert stored
        assert len(stored) % jobs_of_canvas == 0, "each canvas is complete"
        harness.redis.flushdb()
