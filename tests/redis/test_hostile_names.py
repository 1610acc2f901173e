"""Names and texts that other clients chose cannot reach other keys, run Lua, or manipulate the operator's terminal."""

from __future__ import annotations

import json
from typing import Any

import pytest
import redis
from click.testing import Result

from bulltask import App
from bulltask.testing import InlineWorker, use_server
from bulltask.transport.call import known_queues
from tests.redis.conftest import Run

pytestmark = pytest.mark.redis

NAMES = [
    "*",
    "[a-z]?",
    '"]]; redis.call("FLUSHALL") --',
    "'); return redis.call('KEYS', '*') --",
    "{0} %s $(id) `id` ../../etc",
    "\\r\\n*1\\r\\n$8\\r\\nFLUSHALL",
    "a\u2028b\u202ec\u2066d\ufeffe\x9bf",
    "a\u00adb\u034fc\u115fd\u3164e\u2800f\ufe0fg\U000e0041h",
]
UNSEEN = "\u00ad\u034f\u115f\u3164\u2800\ufe0f\U000e0041"
EVIL = "evil\x1b]0;title\x07\x1b[2J\x9b2J\r\u2028\u202e\u2066\u061c" + UNSEEN
FORBIDDEN = set("\x1b\x07\x9b\r\u2028\u202e\u2066\u061c" + UNSEEN)


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_only_a_part_of_its_own_keys(broker_url: str, redis_client: redis.Redis, name: str) -> None:
    app = App("tested", broker_url)

    @app.task(name=name, rate_limit="1000/s")
    def echo(value: str) -> str:
        return value

    with use_server(app, broker_url), InlineWorker(app) as worker:
        redis_client.set("bystander", "unchanged")
        sent = echo.apply_async((name,), queue=name, job_id=f"id-{name}", deduplication=name, headers={name: name})
        queue = app.queue(name)
        queue.schedulers.upsert(name, name=name, every=3600, data={"value": name})
        worker.run_jobs()
        assert sent.get() == name
        assert [scheduler.id for scheduler in queue.schedulers.list()] == [name]
        assert queue.schedulers.pause(name, by=name).paused_by == name  # type: ignore[union-attr]
        assert [scheduler.id for scheduler in queue.schedulers.list_paused()] == [name]
        assert queue.schedulers.resume(name).paused_ms is None  # type: ignore[union-attr]
        assert queue.get_job(f"id-{name}").name == name  # type: ignore[union-attr]
        queue.schedulers.remove(name)
        keys = app._broker.keys(name)
        found = set(redis_client.scan_iter(count=1000))
        others = {key for key in found if not key.startswith((keys.base, keys.bulltask_base))}
        assert others == {"bystander", known_queues(keys.prefix)}
        assert redis_client.zrange(known_queues(keys.prefix), 0, -1) == [keys.name]
        assert redis_client.get("bystander") == "unchanged"


def write_job(client: redis.Redis, queue: str, job_id: str) -> None:
    """Write a failed job as another client could, with control characters in every text."""
    fields: dict[Any, Any] = {
        "name": EVIL,
        "data": json.dumps({EVIL: EVIL}, ensure_ascii=False),
        "opts": json.dumps({"attempts": 1, "note": EVIL}, ensure_ascii=False),
        "timestamp": 1,
        "failedReason": EVIL,
        "stacktrace": json.dumps([f"{EVIL}\n{EVIL}"], ensure_ascii=False),
        "returnvalue": json.dumps(EVIL, ensure_ascii=False),
        "progress": json.dumps(EVIL, ensure_ascii=False),
        "pb": EVIL,
        "parentKey": EVIL,
        "rjk": EVIL,
        "deid": EVIL,
    }
    client.hset(f"bull:{{{queue}}}:{job_id}", mapping=fields)
    client.hset(f"bull:{{{queue}}}:meta", "version", "bullmq:5.62.0")
    client.zadd(f"bull:{{{queue}}}:failed", {job_id: 1})
    client.rpush(f"bull:{{{queue}}}:{job_id}:logs", EVIL)


def check(result: Result, *, code: int) -> str:
    assert result.exit_code == code, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    assert set(result.output) & FORBIDDEN == set(), result.output
    result.output.encode()  # no surrogates, which a terminal cannot print
    assert "evil" in result.output
    return result.output


def test_the_commands_print_no_control_characters_of_a_job(bulltask: Run, redis_client: redis.Redis) -> None:
    write_job(redis_client, "mail", EVIL)
    check(bulltask("job", "show", EVIL, "--queue", "mail"), code=0)
    shown = check(bulltask("job", "show", EVIL, "--queue", "mail", "--json"), code=0)
    assert json.loads(shown)["redis"]["name"] == EVIL
    check(bulltask("job", "show", f"{EVIL}-2"), code=4)
    check(bulltask("revoke", "--queue", "mail", EVIL), code=0)
    check(bulltask("revoke", "--queue", EVIL, EVIL), code=1)


def test_the_commands_print_no_control_characters_of_a_queues_name(bulltask: Run, redis_client: redis.Redis) -> None:
    for queue in ("evil\u2028", "evil\u202e\x9b", EVIL):  # no app can name the last one
        write_job(redis_client, queue, "same")
    assert "several queues" in check(bulltask("job", "show", "same"), code=2)
    assert "several queues" in check(bulltask("revoke", "same"), code=2)
    assert EVIL in {queue["queue"] for queue in json.loads(check(bulltask("queues", "--json"), code=0))["queues"]}
    check(bulltask("queues"), code=0)


def test_a_name_that_is_not_utf_8_can_be_printed(bulltask: Run, redis_client: redis.Redis) -> None:
    redis_client.hset(b"bull:{mail}:evil", mapping={b"name": b"evil\xff", b"data": b"{}", b"opts": b"{}"})
    check(bulltask("job", "show", "evil", "--queue", "mail"), code=0)
    check(bulltask("job", "show", "evil", "--queue", "mail", "--json"), code=0)


@pytest.mark.one_server
def test_a_migration_prints_no_control_characters(bulltask: Run, redis_client: redis.Redis) -> None:
    fields: dict[Any, Any] = {"name": EVIL, "data": "{", "opts": "{}", "timestamp": 1, "delay": 0, "attemptsMade": 0}
    for job_id in (f"1{EVIL}\nforged", f"2{EVIL}"):
        redis_client.hset(f"bull:mail:{job_id}", mapping=fields | {"opts": EVIL})
        redis_client.lpush("bull:mail:wait", job_id)
    redis_client.set("bull:mail:id", 2)
    output = check(bulltask("migrate-bull", "mail"), code=0)
    assert not any(line.startswith("forged") for line in output.splitlines())


def test_an_error_of_the_server_prints_no_control_characters(bulltask: Run, redis_client: redis.Redis) -> None:
    redis_client.execute_command("ACL SETUSER", "default", "on", "nopass", "~*", "&*", "+@all")
    redis_client.set("bull:{mail}:meta", "no hash")
    redis_client.hset("bull:{mail}:x", mapping={"name": "evil", "data": "{}", "opts": "{}", "timestamp": f"1{EVIL}"})
    redis_client.hset("bull:{mail}:x", "attemptsMade", EVIL)
    result = bulltask("job", "show", "x", "--queue", "mail")
    assert set(result.output) & FORBIDDEN == set(), result.output
    assert "Traceback" not in result.output
