"""What becomes of a child that dies, and of its jobs."""

from __future__ import annotations

import os
import signal

import pytest

from tests.support.streams import server_ms

pytestmark = pytest.mark.process


def test_the_job_of_a_killed_child_runs_again_within_a_second_and_no_other_job_is_touched(
    start_worker, sender, events, journal, redis_client, open_gate, keys
):
    worker = start_worker(settings={"worker_concurrency": 3, "lock_duration": 30})
    victim = sender.send_task("hold", kwargs={"gate": "a"})
    other = sender.send_task("hold", kwargs={"gate": "b"})
    first = journal.wait_for(what="start", job=victim.id)[0]
    untouched = journal.wait_for(what="start", job=other.id)[0]
    assert first["pid"] != untouched["pid"]
    lock = redis_client.get(keys.lock(other.id))

    killed_ms = server_ms(redis_client)
    os.kill(int(first["pid"]), signal.SIGKILL)
    again = events.wait_for(event="active", jobId=victim.id, count=2)[1]
    second = journal.wait_for(what="start", job=victim.id, count=2)[1]
    took_ms = again.ms - killed_ms
    print(f"active again {took_ms} ms after the kill (lock 30 s)")

    assert took_ms <= 1000
    assert second["pid"] not in {first["pid"], untouched["pid"]}
    assert redis_client.get(keys.lock(other.id)) == lock
    worker.wait_for_line("Child started", count=4)
    assert len(worker.children) == 3
    open_gate("a")
    open_gate("b")
    assert victim.get(timeout=10) == "a"
    assert other.get(timeout=10) == "b"
    assert len(journal.all(what="start", job=victim.id)) == 2
    assert len(journal.all(what="start", job=other.id)) == 1
    assert redis_client.hget(keys.job(victim.id), "atm") == "1", "a crash is no attempt"
    assert events.all(event="stalled") == []
    assert worker.stop() == 0
