"""The readers of events and of counts, with a real server."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import redis
from pyspark.sql.datasource import DataSourceReader

from bulltask.errors import EventsLostError
from bulltask.queue import Queue
from bulltask.spark.source.planning import EntryRange
from tests.support import event_writing
from tests.support.manual_worker import ManualWorker

pytestmark = pytest.mark.redis

STREAM = "bull:{mail}:events"
KNOWN = {
    "event": "event",
    "job_id": "jobId",
    "name": "name",
    "prev": "prev",
    "failed_reason": "failedReason",
    "return_value": "returnvalue",
}

Rows = list[dict[str, Any]]
Read = Callable[..., Rows]


def at(ms: int) -> datetime:
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=ms)


def as_row(entry_id: str, fields: dict[str, str]) -> dict[str, Any]:
    """Return the expected row of one entry: the oracle."""
    ms, seq = (int(half) for half in entry_id.split("-"))
    known = {*KNOWN.values(), "delay", "attemptsMade"}
    extra = {name: value for name, value in fields.items() if name not in known}
    return {
        "queue": "mail",
        "event_id": entry_id,
        "event_ms": ms,
        "event_seq": seq,
        "event_at": at(ms),
        "delay_until": at(int(fields["delay"])) if "delay" in fields else None,
        "attempts_made": int(fields["attemptsMade"]) if "attemptsMade" in fields else None,
        "extra": json.dumps(extra, sort_keys=True) if extra else None,
        **{column: fields.get(name) for column, name in KNOWN.items()},
    }


def all_rows(client: redis.Redis) -> Rows:
    reply: Any = client.xrange(STREAM)
    return [as_row(entry_id, fields) for entry_id, fields in reply]


def write_events(queue: Queue, manual_worker: ManualWorker) -> None:
    """Make BullMQ's scripts write events of every kind."""
    for number in range(20):
        queue.add("send", {"n": number})
    for number in range(8):
        manual_worker.complete({"n": number})
    manual_worker.fail("it broke")
    job = queue.add("later", None, delay=3_600)
    queue.update_job_progress(job.id, {"percent": 50})
    queue.pause()
    queue.resume()
    queue.remove(job.id)
    queue.clean(0, state="completed")


def fill(client: redis.Redis, count: int) -> None:
    pipeline = client.pipeline(transaction=False)
    for number in range(count):
        pipeline.xadd(STREAM, {"event": "stalled", "jobId": str(number)})
    pipeline.execute()


@pytest.mark.parametrize("options", [{}, {"fetchSize": "7", "eventsPerPartition": "20"}])
def test_events_are_the_entries_of_the_stream_in_order(
    read: Read, queue: Queue, manual_worker: ManualWorker, redis_client: redis.Redis, options: dict[str, str]
) -> None:
    write_events(queue, manual_worker)

    rows = read(table="events", **options)

    assert rows == all_rows(redis_client)
    seen = {row["event"] for row in rows}
    assert seen >= {"added", "waiting", "active", "completed", "failed", "delayed", "progress", "paused", "removed"}


@pytest.mark.slow
def test_a_long_stream_is_split_into_partitions_of_known_size(
    make_reader: Callable[..., DataSourceReader], redis_client: redis.Redis
) -> None:
    fill(redis_client, 25_050)
    redis_client.xtrim(STREAM, 25_010, approximate=False)

    parts = make_reader(table="events", eventsPerPartition="12000").partitions()

    sizes = [[piece.expect for _, piece in part.pieces if isinstance(piece, EntryRange)] for part in parts]  # type: ignore[attr-defined]
    assert sizes == [[12_000], [12_000], [1_010]]


def test_the_streams_of_many_queues_share_a_task(
    make_reader: Callable[..., DataSourceReader], read_rows: Callable[..., Rows], redis_client: redis.Redis
) -> None:
    ids = [entry for number in range(20) for entry in event_writing.fill(redis_client, 3, f"q{number:02}")]
    reader = make_reader(table="events", queue="*")
    assert len(reader.partitions()) == 1
    assert [row["event_id"] for row in read_rows(reader)] == ids


def test_events_added_after_planning_are_not_read(
    make_reader: Callable[..., DataSourceReader], read_rows: Callable[..., Rows], redis_client: redis.Redis
) -> None:
    fill(redis_client, 10)
    reader = make_reader(table="events")
    parts = reader.partitions()

    fill(redis_client, 5)

    assert len(read_rows(reader, parts)) == 10


def test_a_trim_between_planning_and_reading_is_an_error(
    make_reader: Callable[..., DataSourceReader], read_rows: Callable[..., Rows], redis_client: redis.Redis
) -> None:
    fill(redis_client, 30)
    reader = make_reader(table="events", eventsPerPartition="100")
    parts = reader.partitions()

    redis_client.xtrim(STREAM, 18, approximate=False)

    with pytest.raises(EventsLostError, match=r"\[BULLTASK_EVENTS_LOST\].*: 12 events lost .trimmed between"):
        read_rows(reader, parts)


def test_streams_without_entries_have_no_rows(read: Read, redis_client: redis.Redis) -> None:
    assert read(table="events") == []
    fill(redis_client, 3)
    redis_client.xtrim(STREAM, 0, approximate=False)
    assert read(table="events") == []


def test_event_fields_that_are_not_utf8_are_escaped(read: Read, redis_client: redis.Redis) -> None:
    redis_client.xadd(STREAM, {"event": "completed", "jobId": "1", "returnvalue": b"\xff"})
    redis_client.xadd(STREAM, {"event": b"\xfe", b"\xfd": b"\xfc", "delay": "soon", "attemptsMade": "x"})

    first, second = read(table="events")

    assert first["return_value"] == "\\xff"
    assert (second["event"], second["extra"]) == ("\\xfe", json.dumps({"\\xfd": "\\xfc"}))
    assert (second["delay_until"], second["attempts_made"]) == (None, None)


def test_counts_contain_the_number_of_jobs_per_queue_and_state(
    read: Read, queue: Queue, manual_worker: ManualWorker
) -> None:
    for _ in range(5):
        queue.add("send")
    manual_worker.complete()
    manual_worker.acquire()
    queue.add("later", None, delay=60)

    rows = read(table="counts", queue="mail,empty")

    assert {row["state"]: row["jobs"] for row in rows if row["queue"] == "mail"} == {
        "wait": 3,
        "active": 1,
        "completed": 1,
        "failed": 0,
        "delayed": 1,
        "prioritized": 0,
        "waiting-children": 0,
        "paused": 0,
    }
    assert sum(row["jobs"] for row in rows if row["queue"] == "empty") == 0
    assert len(rows) == 16
