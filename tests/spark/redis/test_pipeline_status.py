"""``bulltask pipeline status``: a lake's ledger beside a real server."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import redis
from click.testing import CliRunner, Result

from bulltask.cli.main import main
from bulltask.lake.layout import Layout
from bulltask.lake.ledger import BatchRecord, Ledger, QueueRecord
from bulltask.lake.lock import RunLock, writer_pid
from tests.support.skipped_queues import SKIPPED_QUEUES, write_skipped_queues

pytestmark = [pytest.mark.redis]

BEGIN_MS = 1_760_000_000_000
Status = Callable[..., Result]


@pytest.fixture
def status(broker_url: str, tmp_path: Path) -> Status:
    def ran(*words: str, url: str = broker_url) -> Result:
        return CliRunner().invoke(main, ["-b", url, "pipeline", "status", "--root", str(tmp_path), *words])

    return ran


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    """One batch was written: it has the first 300 events of ``mail``, and 7 were lost of ``gone``."""
    made = Ledger(Layout(tmp_path))
    made.finish(
        BatchRecord(
            "3f0c2a91-00000000",
            written_ms=BEGIN_MS + 60_000,
            queues={"mail": QueueRecord(300, f"{BEGIN_MS}-0", f"{BEGIN_MS + 29_900}-0", lost=5, gaps=1)},
            ends={"mail": f"{BEGIN_MS + 29_900}-0"},
            lost={"mail": 5, "gone": 7},
            open_job_events=12,
            steps_ms={"bronze": 1_200, "publish": 300},
        )
    )
    return made


def write(client: redis.Redis, count: int, queue: str = "mail") -> None:
    """Ten events a second."""
    pipeline = client.pipeline(transaction=False)
    for number in range(count):
        pipeline.xadd(f"bull:{{{queue}}}:events", {"event": "stalled"}, id=f"{BEGIN_MS + number * 100}-0")
    pipeline.hset(f"bull:{{{queue}}}:meta", "opts.maxLenEvents", 10_000)
    pipeline.execute()


def queues(result: Result) -> Mapping[str, Any]:
    return {one["queue"]: one for one in json.loads(result.output)["queues"]}


def test_a_lake_that_is_behind_reports_lag_and_headroom(
    status: Status, ledger: Ledger, redis_client: redis.Redis
) -> None:
    write(redis_client, 500)
    found = status("--json")
    assert found.exit_code == 0, found.output
    said = json.loads(found.output)
    assert (said["batches"], said["batch_s"], said["events"]) == (1, 1.5, 300)
    assert (said["open_job_events"], said["lost"]) == (12, 12)
    assert said["written_at"] == "2025-10-09T08:54:20+00:00"
    mail = queues(found)["mail"]
    assert (mail["lag_events"], mail["lag_s"]) == (200, 20.0)
    assert (mail["stream_length"], mail["stream_limit"], mail["lost"]) == (500, 10_000, 5)
    assert mail["headroom_s"] == pytest.approx((10_000 - 200) / 10, rel=0.005)
    assert queues(found)["gone"]["lost"] == 7
    assert queues(found)["gone"]["lag_events"] is None
    shown = status().output
    assert "500 of 10,000" in shown
    assert "lost events   12" in shown


def test_a_lake_that_is_up_to_date_has_no_lag(status: Status, ledger: Ledger, redis_client: redis.Redis) -> None:
    write(redis_client, 300)
    mail = queues(status("--json"))["mail"]
    assert (mail["lag_events"], mail["lag_s"]) == (0, 0.0)


def test_an_unread_queue_lags_by_all_its_events(status: Status, ledger: Ledger, redis_client: redis.Redis) -> None:
    write(redis_client, 101, "new")
    new = queues(status("--json"))["new"]
    assert (new["last_id"], new["lag_events"], new["lag_s"]) == (None, 101, 10.0)


def test_before_the_first_batch_and_without_redis_there_is_still_a_status(status: Status, tmp_path: Path) -> None:
    assert "none yet" in status().output
    found = status("--json", url="redis://:secret@127.0.0.1:1")
    assert found.exit_code == 0
    assert json.loads(found.output)["redis_error"]
    assert "secret" not in found.output


def test_the_process_that_feeds_the_lake_is_reported_while_it_runs(tmp_path: Path, status: Status) -> None:
    layout = Layout(tmp_path)
    assert writer_pid(layout) is None
    with RunLock(layout):
        assert writer_pid(layout) == os.getpid()
        assert f"process {os.getpid()}" in status().output
    assert writer_pid(layout) is None


@pytest.mark.parametrize("command", ["status", "doctor"])
def test_queues_that_cannot_be_recorded_are_counted_and_named_beside_the_others(
    broker_url: str, redis_client: redis.Redis, tmp_path: Path, command: str
) -> None:
    write(redis_client, 10)
    write_skipped_queues(redis_client)
    words = ["-b", broker_url, "pipeline", command, *(["--root", str(tmp_path)] if command == "status" else [])]

    as_json, shown = (CliRunner().invoke(main, [*words, *more]) for more in (["--json"], []))

    assert as_json.exit_code == (0 if command == "status" else 1), as_json.output
    said = json.loads(as_json.output)
    assert [one["queue"] for one in said["queues"]] == ["mail", "odd"]
    assert len(said["skipped"]) == len(SKIPPED_QUEUES)
    for name in SKIPPED_QUEUES:
        assert any(name in one["queue"] and one["reason"] for one in said["skipped"]), name
        assert name in shown.output
    assert "6 queues skipped, nothing of which is recorded:" in shown.output
