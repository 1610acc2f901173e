"""What metrics say about a queue, on a real server."""

from __future__ import annotations

from typing import Any

import pytest

from bulltask import App
from bulltask.jobs.job import JobOptions, NewJob
from bulltask.queue.overview import read_figures
from bulltask.transport.call import command
from bulltask.transport.scripts.queue import QueueFigures

pytestmark = pytest.mark.every_topology

HOUR_MS = 3_600_000


@pytest.fixture
def app(broker_url: str) -> App:
    return App("metrics", broker_url=broker_url)


def read(app: App, *queues: str) -> dict[str, QueueFigures]:
    with app._broker.pool.client() as client:
        client.connect()
        return read_figures(client, [app._broker.keys(queue) for queue in queues])


def run(app: App, *words: str | int) -> None:
    app._broker.pool.run(command(*words))


def send(app: App, job_id: str, age_ms: int = 0, queue: str = "mail", **options: Any) -> None:
    app.send_many([NewJob(queue, job_id, "send", b"{}", JobOptions(**options))])
    keys, created_ms = app._broker.keys(queue), app._broker.clock.now_ms() - age_ms
    run(app, "HSET", keys.job(job_id), "timestamp", created_ms)
    if delay_ms := options.get("delay_ms"):
        run(app, "ZADD", keys.delayed, "XX", (created_ms + delay_ms) * 4096, job_id)


def test_an_empty_queue_has_no_age_and_no_worker(app: App) -> None:
    reading = read(app, "mail")["mail"]
    assert set(reading.jobs.values()) == {0}
    assert (reading.oldest_ms, reading.due, reading.scheduler_lag_ms, reading.workers) == (None, 0, 0, ())
    assert not reading.is_paused


@pytest.mark.parametrize(
    ("sent", "minimum"),
    [
        ([("old", HOUR_MS, {}), ("new", 0, {})], HOUR_MS),
        ([("old", HOUR_MS, {}), ("lifo", 0, {"lifo": True})], HOUR_MS),
        ([("first", 2 * HOUR_MS, {"priority": 3}), ("other", HOUR_MS, {})], 2 * HOUR_MS),
        ([("due", HOUR_MS, {"delay_ms": HOUR_MS // 2})], HOUR_MS // 2),
    ],
    ids=["fifo", "lifo", "prioritized", "due"],
)
def test_the_oldest_job_is_found_wherever_it_waits(
    app: App, sent: list[tuple[str, int, dict[str, Any]]], minimum: int
) -> None:
    for job_id, age_ms, options in sent:
        send(app, job_id, age_ms, **options)
    assert abs((read(app, "mail")["mail"].oldest_ms or 0) - minimum) < 60_000


def test_a_delayed_job_counts_as_due_once_its_time_has_come(app: App) -> None:
    send(app, "later", delay_ms=HOUR_MS)
    assert read(app, "mail")["mail"].due == 0
    send(app, "due", age_ms=HOUR_MS, delay_ms=1_000)
    reading = read(app, "mail")["mail"]
    assert (reading.due, reading.jobs["delayed"]) == (1, 2)


def test_pause_and_many_queues_are_read(app: App) -> None:
    app.queue("mail").pause()
    names = [f"queue-{number}" for number in range(150)]
    send(app, "1", queue="queue-149")
    readings = read(app, "mail", *names)
    assert readings["mail"].is_paused
    assert [name for name, reading in readings.items() if reading.jobs["wait"]] == ["queue-149"]


def test_a_scheduler_without_worker_lags(app: App) -> None:
    app.queue("mail").schedulers.upsert("hourly", every=HOUR_MS / 1000, name="send")
    assert read(app, "mail")["mail"].scheduler_lag_ms < 60_000
    keys = app._broker.keys("mail")
    run(app, "ZADD", keys.repeat, "XX", app._broker.clock.now_ms() - HOUR_MS, "hourly")
    assert abs(read(app, "mail")["mail"].scheduler_lag_ms - HOUR_MS) < 60_000


def test_a_malformed_job_has_no_age(app: App) -> None:
    keys = app._broker.keys("mail")
    run(app, "LPUSH", keys.wait, "broken")
    run(app, "HSET", keys.job("broken"), "timestamp", "soon", "opts", "{")
    assert read(app, "mail")["mail"].oldest_ms is None
