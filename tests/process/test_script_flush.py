"""Scripts are flushed from the server repeatedly."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from bulltask import AsyncResult
from tests.support.server_clients import client_of
from tests.support.worker_harness import WorkerHarness

pytestmark = pytest.mark.process

SECONDS = 5.0


@contextmanager
def scripts_flushed_every_20_ms(url: str) -> Iterator[Counter[str]]:
    """Flush scripts in a thread; yield a counter of the flushes."""
    done, counts = threading.Event(), Counter[str]()

    def flush() -> None:
        with client_of(url) as client:
            while not done.wait(0.02):
                client.script_flush()
                counts["flushes"] += 1

    thread = threading.Thread(target=flush)
    thread.start()
    try:
        yield counts
    finally:
        done.set()
        thread.join()


def test_senders_and_jobs_are_not_affected_by_script_flushes_every_20_ms(harness: WorkerHarness) -> None:
    @harness.app.task(name="quick")
    def quick() -> None:
        """Only the signature is needed to build the job."""

    worker = harness.worker(children=2, options=["-Q", "default,other"])
    harness.app.send_task("quick").get(timeout=60)
    sent: list[AsyncResult[None]] = []
    with scripts_flushed_every_20_ms(harness.url) as counts:
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline or counts["flushes"] < 250:
            sent += [harness.app.send_task("quick", queue=queue) for queue in ("default", "other") for _ in range(5)]
            sent += [harness.app.send_task("quick", countdown=0.1), harness.app.send_task("quick", priority=3)]
            sent += harness.app.send_many([quick.s() for _ in range(20)])
            sent[-1].get(timeout=60)
    for job in sent:
        job.get(timeout=60)
    starts = Counter(entry["job"] for entry in harness.journal.all(what="start"))
    harness.report(flushes=counts["flushes"], jobs=len(sent))

    assert counts["flushes"] >= 250
    assert {starts[job.id] for job in sent} == {1}
    assert worker.warnings() == []
    assert worker.stop() == 0
