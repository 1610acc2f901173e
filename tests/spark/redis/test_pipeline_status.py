"""``bulltask pipeline status`` with a lake and a real server."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import redis
from click.testing import CliRunner, Result

from bulltask.cli.main import main
from bulltask.lake.ledger import BatchRecord, QueueRecord
from bulltask.lake.storage import Lake, RunLock, writer_pid
from bulltask.lake.tables import OPEN_EVENTS
from bulltask.spark.source.connection import Connection
from bulltask.spark.source.streams import pipeline_status
from tests.support.command_output import json_of
from tests.support.skipped_queues import SKIPPED_QUEUES, write_skipped_queues

pytestmark = [pytest.mark.redis]

START_MS = 1_760_000_000_000
Status = Callable[..., Result]


@pytest.fixture
def status(broker_url: str, tmp_path: Path) -> Status:
    def invoke(*arguments: str, url: str = broker_url) -> Result:
        return CliRunner().invoke(main, ["-b", url, "pipeline", "status", "--lake", str(tmp_path), *arguments])

    return invoke


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    """A lake with a batch of the first 300 events of ``mail``; 7 events of ``gone`` were lost."""
    lake = Lake(tmp_path)
    record = BatchRecord(
        number=1,
        written_ms=START_MS + 60_000,
        queues={"mail": QueueRecord(300, f"{START_MS}-0", f"{START_MS + 29_900}-0", lost=5, gaps=1)},
        last_ids={"mail": f"{START_MS + 29_900}-0"},
        lost={"mail": 5, "gone": 7},
        open_job_events=12,
        steps_ms={"read": 1_200, "derive": 300},
    )
    lake.commit(OPEN_EVENTS, [], batch=1, metadata=record.to_json())
    return lake


def write(client: redis.Redis, count: int, queue: str = "mail") -> None:
    """Write ``count`` events, ten a second."""
    pipeline = client.pipeline(transaction=False)
    for number in range(count):
        pipeline.xadd(f"bull:{{{queue}}}:events", {"event": "stalled"}, id=f"{START_MS + number * 100}-0")
    pipeline.hset(f"bull:{{{queue}}}:meta", "opts.maxLenEvents", 10_000)
    pipeline.execute()


def queues(result: Result) -> Mapping[str, Any]:
    return {queue["queue"]: queue for queue in json_of(result, "pipeline status")["queues"]}


def test_a_lake_behind_redis_has_lag_and_headroom(status: Status, lake: Lake, redis_client: redis.Redis) -> None:
    write(redis_client, 500)
    result = status("--json")
    assert result.exit_code == 0, result.output
    report = json_of(result, "pipeline status")
    assert (report["batches"], report["batch_s"], report["events"], report["open_job_events"], report["lost"]) == (
        1,
        1.5,
        300,
        12,
        12,
    )
    assert report["written_at"] == "2025-10-09T08:54:20+00:00"
    mail = queues(result)["mail"]
    assert (mail["lag_events"], mail["lag_s"]) == (200, 20.0)
    assert (mail["stream_length"], mail["stream_limit"], mail["lost"]) == (500, 10_000, 5)
    assert mail["headroom_s"] == pytest.approx((10_000 - 200) / 10, rel=0.005)
    assert queues(result)["gone"]["lost"] == 7
    assert queues(result)["gone"]["lag_events"] is None
    table = status().output
    assert "500 of 10,000" in table
    assert "lost events   12" in table


def test_a_lake_that_is_up_to_date_has_no_lag(status: Status, lake: Lake, redis_client: redis.Redis) -> None:
    write(redis_client, 300)
    mail = queues(status("--json"))["mail"]
    assert (mail["lag_events"], mail["lag_s"]) == (0, 0.0)


def test_an_unread_queue_lags_by_all_its_events(status: Status, lake: Lake, redis_client: redis.Redis) -> None:
    write(redis_client, 101, "new")
    new = queues(status("--json"))["new"]
    assert (new["last_id"], new["lag_events"], new["lag_s"]) == (None, 101, 10.0)


def test_many_queues_share_round_trips(
    lake: Lake, broker_url: str, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = {"mail": 25_000, **{f"queue-{number}": 90 + 10 * number for number in range(40)}}
    for queue, length in lengths.items():
        write(redis_client, length, queue)
    last_ids = dict.fromkeys(lengths, f"{START_MS + 900}-0")
    last_ids |= {queue: f"{START_MS + (length - 1) * 100}-0" for queue, length in lengths.items() if queue == "queue-0"}
    lake.commit(OPEN_EVENTS, [], batch=2, metadata=BatchRecord(number=2, last_ids=last_ids).to_json())
    trips, request = itertools.count(), Connection._retry

    def count_request(connection: Connection, *args: Any) -> Any:
        next(trips)
        return request(connection, *args)

    monkeypatch.setattr(Connection, "_retry", count_request)
    status = pipeline_status(lake, {"url": broker_url, "queue": "*"})
    lags = {queue.queue: queue.lag_events for queue in status.queues}
    assert lags == {queue: 0 if queue == "queue-0" else length - 10 for queue, length in lengths.items()}
    assert next(trips) < 20


def test_the_status_is_available_without_batches_and_without_redis(status: Status, tmp_path: Path) -> None:
    assert "none yet" in status().output
    result = status("--json", url="redis://:secret@127.0.0.1:1")
    assert result.exit_code == 0
    assert json.loads(result.output)["redis_error"]
    assert "secret" not in result.output


def test_the_process_that_writes_to_the_lake_is_reported(tmp_path: Path, status: Status) -> None:
    lake = Lake(tmp_path)
    assert writer_pid(lake) is None
    with RunLock(lake):
        assert writer_pid(lake) == os.getpid()
        assert f"process {os.getpid()}" in status().output
    assert writer_pid(lake) is None


@pytest.mark.parametrize("command", ["status", "doctor"])
def test_skipped_queues_are_listed_with_their_reasons(
    broker_url: str, redis_client: redis.Redis, tmp_path: Path, command: str
) -> None:
    write(redis_client, 10)
    write_skipped_queues(redis_client)
    arguments = ["-b", broker_url, "pipeline", command, *(["--lake", str(tmp_path)] if command == "status" else [])]

    as_json, as_table = (CliRunner().invoke(main, [*arguments, *more]) for more in (["--json"], []))

    assert as_json.exit_code == (0 if command == "status" else 1), as_json.output
    report = json.loads(as_json.output)
    assert [queue["queue"] for queue in report["queues"]] == ["mail", "odd"]
    assert len(report["skipped"]) == len(SKIPPED_QUEUES)
    for name in SKIPPED_QUEUES:
        assert any(name in queue["queue"] and queue["reason"] for queue in report["skipped"]), name
        assert name in as_table.output
    assert "4 queues skipped and not recorded:" in as_table.output
