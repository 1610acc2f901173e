"""``bulltask queues`` shows all queues of a server, and ``bulltask queue`` changes one."""

from __future__ import annotations

import base64
import getpass
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

pytestmark = [pytest.mark.redis]


def run(broker_url: str, *args: str) -> Result:
    return CliRunner().invoke(main, ["-b", broker_url, *args], catch_exceptions=False)


def by_name(document: Any) -> dict[str, Any]:
    """Return the queues of a JSON document by their names."""
    return {queue["queue"]: queue for queue in document["queues"]}


@pytest.mark.every_topology
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
    queue.pause(by="someone with a long name@a-host-with-a-long-name.example.org")
    queue.set_global_rate_limit(100, 60)
    lines = run(broker_url, "queues").output.splitlines()
    assert re.match(r"mail +1 +3\d s +1 +3 +1 +8 +3 +0$", lines[1]), lines
    assert re.search(r"^  paused by someone .*, concurrency 5, *limit 100 per 60\.0 s$", " ".join(lines[2:])), lines
    assert max(map(len, lines)) <= 80


def test_the_rates_after_a_burst_are_those_of_the_whole_minute(
    broker_url: str, redis_client: redis.Redis, queue: Queue
) -> None:
    add(queue, 450)
    pipe = redis_client.pipeline(transaction=False)
    for number in range(450):
        pipe.xadd(queue.context.keys.events, {"event": "completed", "jobId": number})
    pipe.execute()
    (mail,) = json_of(run(broker_url, "queues", "--json"), "queues")["queues"]
    assert mail["rate_window"] == 60
    assert [round(mail[f"{name}_per_second"] * 60) for name in ("added", "finished")] == [450, 450]
    assert re.match(r"mail .* 450 +450 +0\n", run(broker_url, "queues").output.split("\n", 1)[1])


def test_drain_says_that_delayed_jobs_stay(broker_url: str, queue: Queue) -> None:
    add(queue, 2)
    add(queue, 3, delay=3_600)
    assert (
        "2 waiting jobs of queue mail; 3 delayed jobs stay" in run(broker_url, "queue", "drain", "mail", "--yes").output
    )


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


@pytest.mark.every_topology
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


@pytest.mark.one_server
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


@pytest.mark.one_server
def test_queues_that_differ_only_in_the_hash_tag_can_be_told_apart(
    broker_url: str, redis_client: redis.Redis, queue: Queue
) -> None:
    add(queue, 1)
    redis_client.hset("bull:mail:meta", "version", "bullmq:5.62.0")
    redis_client.hset("bull:videos:meta", "version", "bullmq:5.62.0")
    rows = [re.split(r" {2,}", line)[0] for line in run(broker_url, "queues").output.splitlines()[1:]]
    assert sorted(rows) == ["mail", "mail (--no-queue-hash-tag)", "videos"]


@pytest.mark.one_server
def test_a_sender_registers_its_queue_which_is_then_found_without_a_scan(
    broker_url: str, redis_client: redis.Redis, app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    app.queue("mail").add("send")
    assert redis_client.zscore("bulltask:queues", "{mail}")
    monkeypatch.setattr("bulltask.queue.overview.MAX_PAGES", 0)
    document = json_of(run(broker_url, "queues", "--json"), "queues")
    assert list(by_name(document)) == ["mail"]
    assert not document["scanned_all"]


@pytest.mark.one_server
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


@pytest.mark.slow
@pytest.mark.one_server
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

    def listing() -> tuple[float, list[Any]]:
        redis_client.slowlog_reset()
        started = time.monotonic()
        document = json_of(run(broker_url, "queues", "--json"), "queues")
        assert len(document["queues"]) == 2_000
        return time.monotonic() - started, redis_client.slowlog_get()

    found = [listing() for _ in range(2)]  # a busy machine makes single calls slower, but none faster
    redis_client.config_set("slowlog-log-slower-than", before["slowlog-log-slower-than"])
    assert min(seconds for seconds, _ in found) <= scale_to_load(2)
    assert min((slow for _, slow in found), key=len) == []


def test_a_queue_is_paused_with_a_name_which_why_shows_and_resumed(
    broker_url: str, queue: Queue, redis_client: Any
) -> None:
    add(queue, 2)
    document = json_of(run(broker_url, "queue", "pause", "mail", "--by", "ann", "--json"), "queue")
    assert (document["action"], document["paused"]) == ("pause", True)
    assert queue.is_paused()
    shown = run(broker_url, "why", "-Q", "mail")
    assert re.search(r"Queue mail is paused since \d.* UTC by ann: ", shown.output), shown.output
    assert run(broker_url, "queue", "resume", "mail").output == "Queue mail was resumed: 2 waiting\n"
    assert run(broker_url, "queue", "resume", "mail").output == "Queue mail was not paused: 2 waiting\n"
    queue.pause()
    redis_client.hdel("bull:{mail}:meta", "paused")
    merged = "Queue mail has 2 jobs back that no worker looked for (a pause by BullMQ 5): 2 waiting\n"
    assert run(broker_url, "queue", "resume", "mail").output == merged
    assert not queue.is_paused()
    assert re.match(r"Queue mail is paused: 2 waiting, 0 running\n", run(broker_url, "queue", "pause", "mail").output)
    paused_by = json_of(run(broker_url, "queues", "--json"), "queues")["queues"][0]["paused_by"]
    assert paused_by == f"{getpass.getuser()}@{socket.gethostname()}"


def test_jobs_are_counted_before_they_are_removed_and_only_with_consent(broker_url: str, queue: Queue) -> None:
    add(queue, 3)
    add(queue, 1, priority=1)
    add(queue, 2, delay=60)
    asked = run(broker_url, "queue", "drain", "mail")
    assert asked.exit_code == 2
    assert "pass --yes, or --dry-run" in asked.output
    would = run(broker_url, "queue", "drain", "mail", "--delayed", "--dry-run")
    assert would.output == "Would remove 6 waiting or delayed jobs of queue mail. Nothing was changed.\n"
    assert queue.count() == 6
    assert json_of(run(broker_url, "queue", "drain", "mail", "--yes", "--json"), "queue")["jobs"] == 4
    assert queue.count() == 2
    for number in range(3):
        job = add(queue, 1, remove_on_complete=False)[0]
        acquired = queue.get_next_job(f"token-{number}")
        assert acquired is not None
        assert acquired.id == job
        acquired.move_to_completed(number)
    clean = ("queue", "clean", "mail", "--state", "completed")
    assert run(broker_url, *clean, "--older-than", "1h", "--dry-run").output.startswith("Would remove 0 completed jobs")
    assert run(broker_url, *clean, "--limit", "2", "--yes").output == "Removed 2 jobs of queue mail\n"
    assert queue.get_completed_count() == 1


def test_jobs_are_cleaned_to_free_memory_when_redis_is_full(
    broker_url: str, redis_client: redis.Redis, queue: Queue
) -> None:
    add(queue, 2)
    clean = ("queue", "clean", "mail", "--state", "waiting", "--yes")
    assert run(broker_url, *clean, "--limit", "1").exit_code == 0, "now the server knows the scripts"
    redis_client.config_set("maxmemory", 1)
    try:
        cleaned = run(broker_url, *clean)
    finally:
        redis_client.config_set("maxmemory", 0)
    assert (cleaned.exit_code, cleaned.output) == (0, "Removed 1 job of queue mail\n")


def test_a_changed_limit_does_not_wait_for_the_end_of_the_old_period(broker_url: str, queue: Queue) -> None:
    add(queue, 3)
    for change in (["5/s"], ["--remove"]):
        assert run(broker_url, "queue", "limit", "mail", "1/h").exit_code == 0
        assert queue.get_next_job("token") is not None
        assert "; reached, free in " in run(broker_url, "queue", "limit", "mail", "1/h").output
        assert run(broker_url, "queue", "limit", "mail", *change).exit_code == 0
        assert queue.get_rate_limit_ttl() == 0
        queue.set_global_rate_limit(1, 3600)
        assert queue.get_rate_limit_ttl() == 0


def test_due_jobs_count_as_waiting_in_every_command(broker_url: str, redis_client: redis.Redis, queue: Queue) -> None:
    plain, prioritized = add(queue, 1)[0], add(queue, 1, priority=1)[0]
    later, *due = add(queue, 3, delay=60)
    redis_client.zadd(queue.context.keys.delayed, dict.fromkeys(due, 4096 * 1_600_000_000_000))
    assert json_of(run(broker_url, "queues", "--json"), "queues")["queues"][0]["waiting"] == 4
    assert run(broker_url, "queue", "pause", "mail").output == "Queue mail is paused: 4 waiting, 0 running\n"
    assert run(broker_url, "queue", "resume", "mail").exit_code == 0
    jobs = ("jobs", "mail", "--state", "waiting")
    listed = json_of(run(broker_url, *jobs, "--json"), "jobs")
    assert {job["id"] for job in listed["jobs"]} == {plain, prioritized, *due}
    assert (listed["total"], listed["complete"]) == (4, True)
    assert re.search(rf"^{due[0]} +send +due ", run(broker_url, *jobs).stdout, re.MULTILINE)
    assert run(broker_url, *jobs, "--remove", "--dry-run").output.startswith("4 jobs would be removed")
    drained = run(broker_url, "queue", "drain", "mail", "--dry-run").output
    assert drained.startswith(
        "Would remove 2 waiting jobs of queue mail, but not 2 delayed jobs that are due (--delayed)."
    )
    assert run(broker_url, *jobs, "--remove", "--yes").exit_code == 0
    assert [job.id for job in queue.get_jobs()] == [later]


def test_a_queue_with_running_jobs_is_obliterated_only_by_force(
    broker_url: str, redis_client: redis.Redis, queue: Queue
) -> None:
    add(queue, 2)
    assert queue.get_next_job("token") is not None
    refused = run(broker_url, "queue", "obliterate", "mail", "--yes")
    assert refused.exit_code == 1
    assert "1 running job of queue mail: wait, or pass --force" in refused.output
    assert not queue.is_paused()
    done = run(broker_url, "queue", "obliterate", "mail", "--yes", "--force")
    assert done.output == "Removed queue mail with 2 jobs\n"
    assert redis_client.keys("*") == []


def test_limits_are_set_shown_and_removed(broker_url: str, queue: Queue) -> None:
    add(queue, 1)

    def limit(*args: str) -> str:
        return run(broker_url, "queue", *args).output

    assert limit("limit", "mail", "100/m") == "Queue mail: 100 jobs per 60.0 s\n"
    assert queue.get_global_rate_limit() is not None
    document = json_of(run(broker_url, "queue", "limit", "mail", "--json"), "queue")
    assert document["rate_limit"] == {"max": 100, "duration": 60}
    assert limit("limit", "mail", "--remove") == "Queue mail: no rate limit\n"
    assert limit("concurrency", "mail", "4") == "Queue mail: at most 4, 0 running\n"
    assert queue.get_global_concurrency() == 4
    assert limit("concurrency", "mail", "--remove") == "Queue mail: no limit, 0 running\n"
    for rate in ("fast", "0"):
        refused = run(broker_url, "queue", "limit", "mail", rate)
        assert refused.exit_code == 2
        assert (
            f"RATE must be a rate such as '100/m', not '{rate}'; to remove the limit, pass --remove" in refused.output
        )


def test_a_queue_that_does_not_exist_is_not_created(broker_url: str, redis_client: redis.Redis) -> None:
    for args in (("pause", "male"), ("drain", "male", "--yes"), ("limit", "male", "1/s")):
        assert run(broker_url, "queue", *args).exit_code == 4
    missing = run(broker_url, "queues", "-Q", "male")
    assert (missing.exit_code, missing.stdout, "no queue '{male}'" in missing.stderr) == (4, "", True)
    assert redis_client.keys("*") == []


def test_a_user_without_a_name_can_pause_a_queue(broker_url: str, app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    app.send_task("t", queue="mail")

    def no_name() -> str:
        raise KeyError("getpwuid(): uid not found: 4242")

    monkeypatch.setattr("getpass.getuser", no_name)
    run(broker_url, "queue", "pause", "mail")
    (row,) = json_of(run(broker_url, "queues", "--json"), "queues")["queues"]
    assert row["paused_by"] == f"unknown@{socket.gethostname()}"
