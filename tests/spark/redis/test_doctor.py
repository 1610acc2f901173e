"""``bulltask pipeline doctor`` with a real server."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import redis
from click.testing import CliRunner, Result

from bulltask.cli.main import main
from tests.conftest import ServerFactory
from tests.support.command_output import json_of

pytestmark = [pytest.mark.redis]

Doctor = Callable[..., Result]


@pytest.fixture(autouse=True)
def _healthy(redis_client: redis.Redis) -> Iterator[None]:
    """A server that stores its data, and remembers nothing of other tests."""
    redis_client.config_set("save", "3600 1")
    redis_client.slowlog_reset()
    redis_client.execute_command("ACL", "LOG", "RESET")
    yield
    redis_client.config_set("save", "")
    redis_client.config_set("maxmemory-policy", "noeviction")


@pytest.fixture
def doctor(broker_url: str) -> Doctor:
    return lambda *arguments, url=broker_url: CliRunner().invoke(main, ["-b", url, "pipeline", "doctor", *arguments])


def queues(result: Result) -> Mapping[str, Any]:
    return {queue["queue"]: queue for queue in json_of(result, "pipeline doctor")["queues"]}


def write(client: redis.Redis, queue: str, count: int, *, ms: int, start_ms: int = 1_760_000_000_000) -> None:
    """Write ``count`` events at equal intervals within ``ms`` milliseconds."""
    pipeline = client.pipeline(transaction=False)
    for number in range(count):
        event_ms = start_ms + number * ms // count
        pipeline.xadd(f"bull:{{{queue}}}:events", {"event": "stalled"}, id=f"{event_ms}-{number}")
    pipeline.execute()
    client.hset(f"bull:{{{queue}}}:meta", "opts.maxLenEvents", 10_000)


def test_a_long_enough_stream_is_ok_and_a_short_one_gets_advice(doctor: Doctor, redis_client: redis.Redis) -> None:
    write(redis_client, "slow", 1_000, ms=100_000)
    assert doctor().exit_code == 0
    write(redis_client, "busy", 5_000, ms=10_000)
    result = doctor("--json")
    assert result.exit_code == 1
    busy, slow = queues(result)["busy"], queues(result)["slow"]
    assert (busy["length"], busy["max_length"], busy["enough"]) == (5_000, 10_000, False)
    assert busy["events_per_s"] == pytest.approx(500, rel=0.01)
    assert busy["retention_s"] == pytest.approx(20, rel=0.01)
    assert busy["recommended_max_length"] in {15_000, 16_000}
    assert slow["enough"]
    assert slow["retention_s"] == pytest.approx(1_000, rel=0.01)
    table = doctor()
    assert f"too short: set streams.events.maxLen to {busy['recommended_max_length']:,}" in table.output
    redis_client.hset("bull:{busy}:meta", "opts.maxLenEvents", busy["recommended_max_length"])
    assert doctor().exit_code == 0


def test_what_is_wrong_with_the_server_is_found_as_by_the_doctor_of_all_queues(
    doctor: Doctor, redis_client: redis.Redis, broker_url: str
) -> None:
    write(redis_client, "mail", 5_000, ms=10_000)
    redis_client.config_set("save", "")
    redis_client.config_set("maxmemory-policy", "allkeys-lru")
    result = doctor("--json")
    of_pipeline = {it["code"]: it for it in json_of(result, "pipeline doctor")["findings"]}
    general = json_of(CliRunner().invoke(main, ["-b", broker_url, "doctor", "--json"]), "doctor")
    of_server = {it["code"]: it for it in general["findings"] if it["queue"] is None}
    assert of_server.keys() == {"eviction", "no-persistence"}
    short = of_pipeline.pop("stream-too-short")
    assert (result.exit_code, of_pipeline) == (1, of_server)
    assert (short["queue"], short["evidence"]["needs_s"], short["severity"]) == ("mail", 30, "warning")
    assert re.search(r"set_meta\(\{'opts.maxLenEvents': 1[56]000\}\)", short["command"])
    printed = doctor().output
    assert "warning: eviction\n  Redis at redis://" in printed
    assert "keeps 10,000 events, those of 20.0 s: the pipeline needs those of 30 s" in " ".join(printed.split())


def test_a_burst_at_the_end_of_a_quiet_stream_determines_the_rate(doctor: Doctor, redis_client: redis.Redis) -> None:
    write(redis_client, "mail", 100, ms=1_000_000)
    write(redis_client, "mail", 4_000, ms=10_000, start_ms=1_760_001_000_000)
    assert queues(doctor("--json"))["mail"]["events_per_s"] == pytest.approx(400, rel=0.01)


def test_a_longer_outage_needs_a_longer_stream(doctor: Doctor, redis_client: redis.Redis) -> None:
    write(redis_client, "mail", 1_000, ms=100_000)
    result = doctor("--json", "--outage", "1h")
    assert (result.exit_code, queues(result)["mail"]["recommended_max_length"]) == (1, 37_000)


def test_queues_without_events_and_with_the_default_length_are_reported(
    doctor: Doctor, redis_client: redis.Redis
) -> None:
    redis_client.hset("bull:{new}:meta", "version", "bullmq:5.62.0")
    result = doctor("--json")
    assert result.exit_code == 0
    assert queues(result)["new"] == {
        "queue": "new", "length": 0, "max_length": 10_000, "events_per_s": None, "retention_s": None, "enough": None,
        "recommended_max_length": None,
    }  # fmt: skip
    assert "no events yet" in doctor().output


def test_an_unreachable_server_is_reported_without_its_password(doctor: Doctor, server_factory: ServerFactory) -> None:
    server = server_factory()
    url = server.url.replace("redis://", "redis://:secret@")
    server.stop()
    result = doctor(url=url)
    assert result.exit_code == 1
    assert "redis" in result.output
    assert "missing" in result.output
    assert "secret" not in result.output


def test_every_dependency_is_listed_with_its_version(doctor: Doctor) -> None:
    versions = {check["name"]: check["version"] for check in json.loads(doctor("--json").output)["requirements"]}
    assert versions.keys() == {"java", "pyspark", "pyarrow", "numpy", "hiredis", "redis"}
    assert all(versions.values())


def test_the_size_table_does_not_need_a_server(doctor: Doctor) -> None:
    result = doctor("--sizes", url="redis://127.0.0.1:1")
    assert result.exit_code == 0
    assert "747,000" in result.output
