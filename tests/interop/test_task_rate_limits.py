"""Node.js reads and runs the throttled jobs of a task with ``rate_limit``."""

from __future__ import annotations

import pytest

from tests.interop.interop_queue import InteropQueue

pytestmark = [pytest.mark.interop, pytest.mark.process, pytest.mark.timeout(120)]


def test_node_shows_and_runs_jobs_that_a_bulltask_worker_has_throttled(mail: InteropQueue) -> None:
    mail.listen()
    worker = mail.worker()
    first, *throttled = [mail.send("one_an_hour", value=number) for number in range(4)]
    assert first.get(timeout=60) == 0
    for job in throttled:
        mail.stream.wait_for(timeout=60, event="delayed", jobId=job.id)
    mail.send("echo", value="other").get(timeout=60)
    assert worker.stop() == 0

    shown = mail.node_job(throttled[0].id)
    assert (shown["state"], shown["attemptsStarted"], shown["attemptsMade"]) == ("delayed", 0, 0)
    assert 0 < shown["delay"] <= 3_601_000
    for job in throttled[:2]:
        mail.node.call("job.call", queue=mail.name, job=job.id, method="promote", args=[])
    handle = mail.node_worker("echo", {})
    assert [mail.node_result(job.id) for job in throttled[:2]] == [{"value": 1}, {"value": 2}]
    # Node's QueueEvents emits bulltask's own event, and reads on.
    mail.wait_for_event("completed", throttled[1].id)
    events = [(event["event"], event["args"].get("jobId")) for event in mail.node.events()]
    assert events.count(("released", throttled[0].id)) == 1
    names = [name for name, job_id in events if job_id == throttled[0].id]
    assert names[: names.index("delayed") + 1] == ["added", "waiting", "active", "released", "delayed"]
    assert mail.node.events("events.error") == []
    mail.node.call("worker.close", worker=handle)

    # The jobs that Node.js has run leave the list of throttled jobs; the other one becomes due at the next start.
    key = mail.keys.throttled("one_an_hour")
    assert mail.redis.zcard(key) == 3
    mail.worker()
    fourth = mail.send("one_an_hour", value=4)
    mail.stream.wait_for(timeout=60, event="delayed", jobId=fourth.id)
    mail.send("echo", value="other").get(timeout=60)
    due = [score / 4096 for _, score in mail.redis.zrange(mail.keys.delayed, 0, -1, withscores=True)]
    assert mail.redis.zrange(key, 0, -1) == [throttled[2].id, fourth.id]
    assert due[0] == pytest.approx(float(mail.redis.get(mail.keys.next_start("one_an_hour"))), abs=10)
