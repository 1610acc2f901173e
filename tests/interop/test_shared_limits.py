"""Worker options that act on Redis work the same in Node and bulltask: limiter, retention, metrics."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from bulltask.queue.fields import Metrics
from tests.interop.interop_queue import InteropQueue
from tests.support.rate_windows import max_starts_per_window
from tests.support.streams import server_ms

pytestmark = [pytest.mark.interop, pytest.mark.process, pytest.mark.timeout(120)]

AMPLE = {"max": 1_000, "duration": 1_000}
LIMIT_MS = 1_500
MINUTE_MS = 60_000


def history(mail: InteropQueue, job_id: str) -> dict[str, Any]:
    """Return the fields and events that show what happened to a job."""
    fields = mail.redis.hgetall(mail.keys.job(job_id))
    fields_of_run = {name: fields.get(name) for name in ("ats", "atm", "failedReason", "stacktrace", "defa")}
    return {
        **fields_of_run,
        "events": [(entry["event"], entry.fields.get("prev")) for entry in mail.stream.all(jobId=job_id)],
    }


# ---- limiter --------------------------------------------------------------------------------------------------------


def test_node_and_bulltask_workers_share_a_rate_limit(mail: InteropQueue) -> None:
    mail.worker(limiter="2/600ms", worker_name="bulltask").wait_for_line("Worker started")
    mail.app.send_task("echo").get(timeout=60)  # the worker is running
    # The worker that acquires the first job of a window stays busy, so the other worker gets the second.
    mail.node_worker("sleep", {"ms": 200}, name="node", limiter={"max": 2, "duration": 600})
    jobs = [mail.add("spin", {"seconds": 0.2}) for _ in range(11)]
    for job in jobs:
        mail.node_result(job)
    starts = [entry.ms for entry in mail.stream.all(event="active")]
    assert len(starts) == 12
    assert max_starts_per_window(starts, 600) == 2
    assert {mail.redis.hget(mail.keys.job(job), "pb").partition("@")[0] for job in jobs} == {"node", "bulltask"}


def test_a_task_that_rate_limits_the_queue_stops_a_node_worker(mail: InteropQueue) -> None:
    mail.worker(limiter="1000/s")
    first = mail.send("busy", duration=LIMIT_MS / 1000)
    limited_ms = mail.stream.wait_for(timeout=60, event="waiting", jobId=first.id, prev="active")[0].ms
    handle = mail.node_worker("echo", {}, limiter=AMPLE)
    second = mail.add("echo", {"value": 1})
    mail.node_result(second)
    assert mail.stream.wait_for(timeout=60, event="active", jobId=second)[0].ms - limited_ms >= LIMIT_MS - 200
    mail.node.call("worker.close", worker=handle)


def test_a_node_processor_that_rate_limits_the_queue_stops_a_bulltask_worker(mail: InteropQueue) -> None:
    mail.node_worker("busy", {"ms": LIMIT_MS, "connection": {"url": mail.url}}, limiter=AMPLE)
    first = mail.add("echo", {"value": 1})
    limited_ms = mail.stream.wait_for(timeout=60, event="waiting", jobId=first, prev="active")[0].ms
    mail.worker(limiter="1000/s")
    second = mail.send("echo", value=2)
    second.get(timeout=60)
    assert mail.stream.wait_for(timeout=60, event="active", jobId=second.id)[0].ms - limited_ms >= LIMIT_MS - 200


@pytest.mark.parametrize("limited", [True, False])
def test_a_job_that_rate_limits_its_queue_emits_the_same_events_in_both_workers(
    mail: InteropQueue, limited: bool
) -> None:
    options: dict[str, Any] = {"limiter": AMPLE} if limited else {}
    handle = mail.node_worker("busy", {"ms": 300, "connection": {"url": mail.url}}, **options)
    node_id = mail.add("busy", {"duration": 0.3}, attempts=1)
    mail.node_result(node_id)
    in_node = history(mail, node_id)
    mail.node.call("worker.close", worker=handle)
    mail.worker(limiter="1000/s" if limited else "none")
    bulltask_id = mail.add("busy", {"duration": 0.3}, attempts=1)
    mail.node_result(bulltask_id)
    assert history(mail, bulltask_id) == in_node
    assert (in_node["ats"], in_node["atm"]) == ("2", "1")
    starts = [entry.ms for entry in mail.stream.all(event="active", jobId=bulltask_id)]
    assert starts[1] - starts[0] >= 290


# ---- remove_on_complete, remove_on_fail -----------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["echo", "fail"])
@pytest.mark.parametrize(
    ("option", "setting", "job_options"),
    [
        ({"count": 2}, "2", [None] * 4),
        ({"count": 0}, "true", [None] * 4),
        ({"age": 3_600, "count": 1}, "age=3600,count=1", [None] * 4),
        ({"age": 3_600}, "age=3600", [None] * 4),
        ({"count": 1}, "1", [None, None, 3, False]),
        ({"count": 0}, "0", [None, {"count": 5}, True, None]),
        (None, "none", [None, True, None]),
    ],
)
def test_both_workers_keep_the_same_jobs_with_the_same_retention_option(
    mail: InteropQueue, task: str, option: Any, setting: str, job_options: list[Any]
) -> None:
    node_option, bulltask_setting = (
        ("removeOnComplete", "remove_on_complete") if task == "echo" else ("removeOnFail", "remove_on_fail")
    )

    def kept_positions() -> list[int]:
        """Run jobs; return the positions of those that are kept when all have ended."""
        jobs = [
            mail.add(task, {}, **({} if job_option is None else {node_option: job_option}))
            for job_option in job_options
        ]
        event = "completed" if task == "echo" else "failed"
        for job in jobs:
            mail.stream.wait_for(timeout=60, event=event, jobId=job)
        kept = mail.redis.zrange(mail.keys.completed if task == "echo" else mail.keys.failed, 0, -1)
        assert kept == [job for job in jobs if mail.redis.exists(mail.keys.job(job))]
        return [jobs.index(job) for job in kept]

    handle = mail.node_worker(task, {}, **({} if option is None else {node_option: option}))
    in_node = kept_positions()
    mail.node.call("worker.close", worker=handle)
    mail.call("clean", 0, 100, "completed" if task == "echo" else "failed")
    settings: dict[str, Any] = {bulltask_setting: setting}
    mail.worker(**settings)
    assert kept_positions() == in_node


# ---- metrics --------------------------------------------------------------------------------------------------------


def node_metrics(mail: InteropQueue, kind: str) -> Metrics:
    """Return the result of Node's getMetrics."""
    metrics = mail.call("getMetrics", kind)
    facts = metrics["meta"]
    points = tuple(int(point) for point in metrics["data"])
    return Metrics(int(facts["count"]), int(facts["prevTS"]), int(facts["prevCount"]), points, int(metrics["count"]))


@pytest.mark.parametrize("kind", ["completed", "failed"])
@pytest.mark.parametrize("max_points", [3, 100])
def test_both_workers_write_the_same_metrics(mail: InteropQueue, kind: str, max_points: int) -> None:
    key = mail.keys.metrics_completed if kind == "completed" else mail.keys.metrics_failed
    task = "echo" if kind == "completed" else "fail"

    def minute() -> int:
        return server_ms(mail.redis) // MINUTE_MS

    def run(count: int) -> None:
        for _ in range(count):
            mail.stream.wait_for(timeout=60, event=kind, jobId=mail.add(task, {}, attempts=1))

    def count_metrics() -> Metrics:
        """Return the metrics of three jobs that end, and of one more ten minutes later."""
        while True:
            mail.redis.delete(key, f"{key}:data")
            start_minute = minute()
            run(3)
            mail.redis.hset(key, "prevTS", (start_minute - 10) * MINUTE_MS)
            run(1)
            if minute() == start_minute:  # otherwise a new minute began in between, which changes the counts
                break
        metrics = mail.app.queue("mail").get_metrics(kind)
        assert metrics == node_metrics(mail, kind), "both clients read the same"
        assert metrics.previous_ms // MINUTE_MS == start_minute
        return dataclasses.replace(metrics, previous_ms=0)

    handle = mail.node_worker(task, {}, metrics={"maxDataPoints": max_points})
    in_node = count_metrics()
    mail.node.call("worker.close", worker=handle)
    mail.worker(metrics_max_data_points=max_points)
    assert count_metrics() == in_node
    assert (in_node.count, in_node.points) == (4, min(max_points, 10))
