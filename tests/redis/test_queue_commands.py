"""``bulltask queues`` shows all queues of a server, and ``bulltask queue`` changes one."""

from __future__ import annotations

import base64
import re
import socket
import time
from contextlib import closing
from typing import Any

import pytest
import redis
from click.testing import CliRunner, Result

from bulltask import App
from bulltask.cli.main import main
from bulltask.queue import Queue
from tests.support.command_output import json_of
from tests.support.machine_load import scale_to_load
from tests.support.queue_contents import add

pytestmark = [pytest.mark.redis, pytest.mark.one_server]


def run(broker_url: str, *args: str) -> Result:
    return CliRunner().invoke(main, ["-b", broker_url, *args], catch_exceptions=False)


def by_name(document: Any) -> dict[str, Any]:
    """Return the queues of a JSON document by their names."""
    return {queue["queue"]: queue for queue in document["queues"]}


def test_a_queue_is_shown_with_its_jobs_their_age_and_how_many_come_and_go(
    broker_url: str, redis_client: redis.Redis, queue: Queue
) -> None:
    now_ms = int(time.time() * 1000)
    add(queue, 1, timestamp=(now_ms - 90_000) / 1000)
    add(queue, 2)
    add(queue, 1, priority=7, timestamp=(now_ms - 180_000) / 1000)
    add(queue, 3, delay=3_600)
    for token in ("1", "2"):
        job = queue.get_next_job(token)
        assert job is not None
        job.move_to_completed(1)
    for state in ("failed", "active"):
        job = queue.get_next_job(state)
        assert job is not None
        if state == "failed":
            job.discard()
            job.move_to_failed(ValueError("no"))
    add(queue, 1, timestamp=(now_ms - 30_000) / 1000)
    queue.set_global_concurrency(5)
    document = json_of(run(broker_url, "queues", "--json"), "queues")
    (mail,) = document["queues"]
    assert (mail["queue"], mail["bullmq_name"], document["scanned_all"]) == ("mail", "{mail}", True)
    counts = {name: mail[name] for name in ("waiting", "active", "delayed", "completed", "failed", "workers")}
    assert counts == {"waiting": 1, "active": 1, "delayed": 3, "completed": 2, "failed": 1, "workers": 0}
    assert 30 <= mail["oldest_waiting"] <= scale_to_load(60)
    assert mail["added_per_second"] * mail["rate_window"] == pytest.approx(8)
    assert mail["finished_per_second"] * mail["rate_window"] == pytest.approx(3)
    assert (mail["rate_window"], mail["concurrency"], mail["paused"]) == (60, 5, False)
    line = run(broker_url, "queues").output.splitlines()[1]
    assert re.match(r"mail +1 +3\d\.\d s +1 +3 +1 +2 +8/min +3/min +0  concurrency 5$", line), line


def test_the_oldest_age_is_that_of_waiting_jobs_that_no_worker_has_had(broker_url: str, queue: Queue) -> None:
    now_s = time.time()

    def oldest() -> float | None:
        age = json_of(run(broker_url, "queues", "--json"), "queues")["queues"][0]["oldest_waiting"]
        return None if age is None else round(age / 100)

    add(queue, 1, timestamp=now_s - 500)
    acquired = queue.get_next_job("token")
    assert acquired is not None
    acquired.move_to_failed(ValueError("again"))
    queue.promote_jobs()
    assert queue.count() == 1
    assert oldest() is None, "when it was put back is not stored"
    assert re.match(r"mail +1 +\? ", run(broker_url, "queues").output.splitlines()[1])
    add(queue, 1, timestamp=now_s - 300)
    assert oldest() == 3
    add(queue, 20, priority=1)
    add(queue, 1, priority=9, timestamp=now_s - 700)
    assert oldest() == 7
    queue.pause()
    assert oldest() == 7


def test_a_paused_queue_shows_who_has_paused_it_unless_another_client_has_resumed_it(
    broker_url: str, redis_client: redis.Redis, queue: Queue
) -> None:
    def shown() -> tuple[bool, str | None]:
        mail = json_of(run(broker_url, "queues", "--json"), "queues")["queues"][0]
        return mail["paused"], mail["paused_by"]

    add(queue, 1)
    queue.pause(by="ann")
    queue.pause(by="bob")
    assert shown() == (True, "ann"), "it was paused already"
    assert re.search(r" paused by ann, 0\.\d+ s ago$", run(broker_url, "queues").output, re.MULTILINE)
    queue.resume()
    assert shown() == (False, None)
    assert not redis_client.exists("bulltask:{mail}:pause-note")
    queue.pause()
    assert shown() == (True, socket.gethostname())
    redis_client.set("bulltask:{mail}:pause-note", '{"by":"ann","at_ms":1}')
    redis_client.xadd("bull:{mail}:events", {"event": "resumed"})  # and paused again, both by Node.js
    assert shown() == (True, None)


def test_queues_of_node_alone_are_found_and_so_are_workers(broker_url: str, redis_client: redis.Redis) -> None:
    redis_client.hset("bull:videos:meta", "version", "bullmq:5.62.0")
    redis_client.lpush("bull:videos:wait", "1")
    name = f"bull:{base64.b64encode(b'connected').decode()}"
    with closing(redis.Redis.from_url(broker_url, client_name=name)) as worker:
        worker.ping()
        queues = by_name(json_of(run(broker_url, "queues", "--json"), "queues"))
    assert {queue: found["workers"] for queue, found in queues.items()} == {"videos": 0, "connected": 1}
    assert queues["videos"]["waiting"] == 1
    assert queues["videos"]["oldest_waiting"] is None
    assert queues["videos"]["added_per_second"] is None, "it has no events"


def test_a_sender_registers_its_queue_which_is_then_found_without_a_scan(
    broker_url: str, redis_client: redis.Redis, app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    app.queue("mail").add("send")
    assert redis_client.zscore("bulltask:queues", "{mail}")
    monkeypatch.setattr("bulltask.queue.overview.MAX_PAGES", 0)
    document = json_of(run(broker_url, "queues", "--json"), "queues")
    assert list(by_name(document)) == ["mail"]
    assert not document["scanned_all"]


def test_a_sender_that_may_not_register_its_queue_sends_nevertheless(
    broker_url: str, redis_client: redis.Redis
) -> None:
    redis_client.execute_command("ACL SETUSER strict reset on >secret ~bull:* ~bulltask:{mail}:* &* +@all")
    try:
        with Queue("mail", broker_url.replace("://", "://strict:secret@")) as queue:
            queue.add("send")
            assert queue.count() == 1
    finally:
        redis_client.execute_command("ACL DELUSER strict")
    assert not redis_client.exists("bulltask:queues")


def test_2000_queues_are_listed_in_two_seconds_without_a_long_call(
    broker_url: str, redis_client: redis.Redis, app: App
) -> None:
    pipe = redis_client.pipeline(transaction=False)
    for number in range(2_000):
        base = f"bull:{{q{number}}}:"
        pipe.hset(f"{base}meta", "version", "bullmq:5.62.0")
        pipe.lpush(f"{base}wait", *(str(job) for job in range(10)))
        for job in range(10):
            pipe.hset(f"{base}{job}", mapping={"timestamp": 1, "opts": '{"attempts":3}', "data": "{}"})
            pipe.xadd(f"{base}events", {"event": "added", "jobId": job})
    pipe.execute()
    before: Any = redis_client.config_get("slowlog-log-slower-than")
    redis_client.config_set("slowlog-log-slower-than", int(scale_to_load(5) * 1000))
    redis_client.slowlog_reset()
    started = time.monotonic()
    document = json_of(run(broker_url, "queues", "--json"), "queues")
    seconds = time.monotonic() - started
    slow = redis_client.slowlog_get()
    redis_client.config_set("slowlog-log-slower-than", before["slowlog-log-slower-than"])
    assert len(document["queues"]) == 2_000
    assert seconds <= scale_to_load(2)
    assert slow == []
