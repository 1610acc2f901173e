"""The writers with a real server, called as Spark calls them, but without a JVM."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest
from pyspark.serializers import CloudPickleSerializer
from pyspark.sql.types import LongType, StringType, StructField, StructType

from bulltask.errors import ConfigError, DecodeError, EncodeError, InvalidNameError, PayloadTooLargeError
from bulltask.queue import Queue
from bulltask.spark.sink import JobsStreamWriter, JobsWriter, TaskCommit
from bulltask.spark.source.options import WriteOptions, read_options

pytestmark = pytest.mark.redis

TEXT = StringType()
Make = Callable[..., Any]


def schema(*names: str, **kinds: Any) -> StructType:
    return StructType([StructField(name, kinds.get(name, TEXT)) for name in names])


def rows(first: int, last: int, **columns: Any) -> pa.RecordBatch:
    jobs = [{"name": "send", "data": json.dumps({"n": n}), **columns} for n in range(first, last)]
    return pa.RecordBatch.from_pylist(jobs)


@pytest.fixture
def options(broker_url: str) -> Callable[..., WriteOptions]:
    return lambda **values: read_options(WriteOptions, {"url": broker_url, "queue": "mail", **values})


@pytest.fixture
def writer(options: Make) -> Callable[..., JobsWriter]:
    def make(columns: StructType | None = None, overwrite: bool = False, **values: str) -> JobsWriter:
        return JobsWriter(options(**values), columns or schema("name", "data"), overwrite=overwrite)

    return make


@pytest.fixture
def stream_writer(options: Make) -> Callable[..., JobsStreamWriter]:
    def make(columns: StructType | None = None, overwrite: bool = False, **values: str) -> JobsStreamWriter:
        return JobsStreamWriter(options(**values), columns or schema("name", "data"), overwrite=overwrite)

    return make


@pytest.fixture
def plain(broker_url: str) -> Iterator[Any]:
    """The queue, to which a test adds jobs without Spark."""
    with Queue("mail", broker_url) as opened:
        yield opened


def write(writer: JobsWriter, *batches: pa.RecordBatch) -> dict[str, int]:
    """Write as a Spark task does: with a pickled copy of the writer."""
    serializer = CloudPickleSerializer()
    commit = serializer.loads(serializer.dumps(writer)).write(iter(batches))
    assert isinstance(commit, TaskCommit)
    return commit.counts


def ids(redis_client: Any) -> list[str]:
    return list(reversed(redis_client.lrange("bull:{mail}:wait", 0, -1)))


def test_a_row_becomes_the_same_job_as_with_queue_add(writer: Make, plain: Queue, redis_client: Any) -> None:
    opts = {"attempts": 5, "backoff": 3, "remove_on_complete": True}
    assert write(writer(jobOpts=json.dumps(opts)), rows(0, 1)) == {"added": 1}
    [job_id] = ids(redis_client)
    added = redis_client.hgetall(f"bull:{{mail}}:{job_id}")
    redis_client.delete(f"bull:{{mail}}:{job_id}", "bull:{mail}:wait")
    plain.add("send", {"n": 0}, job_id=job_id, **opts)  # type: ignore[arg-type]
    expected = redis_client.hgetall(f"bull:{{mail}}:{job_id}")
    assert json.loads(added.pop("opts")) == json.loads(expected.pop("opts"))
    assert int(expected.pop("timestamp")) - int(added.pop("timestamp")) < 60_000
    assert added == expected


def test_delays_and_expiry_start_when_a_row_is_sent(writer: Make, redis_client: Any) -> None:
    """They do not start when the writer is created, which happens earlier and in another process."""
    prepared = writer(jobOpts='{"delay":3600,"expires":7200}')
    seconds, micros = redis_client.time()
    redis_client.blpop("never", 0.5)
    assert write(prepared, rows(0, 2)) == {"added": 2}
    for job_id, due in redis_client.zrange("bull:{mail}:delayed", 0, -1, withscores=True):
        job = redis_client.hgetall(f"bull:{{mail}}:{job_id}")
        sent = int(job["timestamp"])
        assert sent > seconds * 1_000 + micros // 1_000 + 100
        assert due // 4096 == sent + 3_600_000
        assert json.loads(job["opts"])["bulltask"]["expires"] == sent + 7_200_000


def test_a_task_that_runs_again_adds_the_missing_jobs(writer: Make, redis_client: Any) -> None:
    """The first attempt sent 400 rows before it failed; half of those jobs ran and were removed."""
    prepared = writer(chunkSize="100")
    assert write(prepared, rows(0, 400)) == {"added": 400}
    removed = ids(redis_client)[:200]
    redis_client.delete(*(f"bull:{{mail}}:{job_id}" for job_id in removed))
    redis_client.ltrim("bull:{mail}:wait", 0, 199)
    assert write(prepared, rows(0, 400), rows(400, 1_000)) == {"added": 600, "duplicate": 400}
    assert len(set(ids(redis_client))) == len(ids(redis_client)) == 800
    assert not set(removed) & set(ids(redis_client))


def test_a_write_that_is_not_idempotent_adds_removed_jobs_again(writer: Make, redis_client: Any) -> None:
    prepared = writer(idempotent="false")
    write(prepared, rows(0, 10))
    redis_client.delete("bull:{mail}:wait", *(f"bull:{{mail}}:{job_id}" for job_id in ids(redis_client)))
    write(prepared, rows(0, 10))
    assert len(ids(redis_client)) == 10
    assert redis_client.keys("bulltask:*") == ["bulltask:queues"]


def test_only_writes_with_the_same_id_are_added_once(writer: Make, redis_client: Any) -> None:
    for _ in range(2):
        write(writer(), rows(0, 10))
        write(writer(writeId="nightly"), rows(0, 10))
    assert len(ids(redis_client)) == 30


def test_equal_rows_in_a_write_are_added_once(writer: Make) -> None:
    assert write(writer(), rows(0, 3), rows(1, 5)) == {"added": 5, "duplicate": 2}


def test_rows_are_equal_if_their_json_is_equal_when_sent(writer: Make, redis_client: Any) -> None:
    """Spaces and escapes are normalized; the order of keys matters, and 1.0 differs from 1."""
    same = ['{"n":1,"t":"ä"}', ' { "n" : 1, "t": "\\u00e4" } ', '{"n":0,"t":"ä","n":1}']
    others = ['{"t":"ä","n":1}', '{"n":1.0,"t":"ä"}', '{"n":"1","t":"ä"}']
    batch = pa.RecordBatch.from_pylist([{"name": "send", "data": text} for text in (*same, *others)])
    assert write(writer(), batch) == {"added": 4, "duplicate": 2}
    sent = [redis_client.hget(f"bull:{{mail}}:{job_id}", "data") for job_id in ids(redis_client)]
    assert sent == [same[0], *others]


def test_rows_may_have_columns_for_job_id_and_queue(writer: Make, broker_url: str, redis_client: Any) -> None:
    prepared = writer(schema("name", "data", "id"))
    assert write(prepared, rows(0, 1, id="order-1"), rows(1, 2, id="order-2")) == {"added": 2}
    assert ids(redis_client) == ["order-1", "order-2"]
    columns = schema("name", "data", "key", "queue")
    mixed = JobsWriter(read_options(WriteOptions, {"url": broker_url, "idColumn": "key"}), columns, overwrite=False)
    write(mixed, rows(0, 1, key="a", queue="fax"), rows(1, 2, key="b", queue="post"))
    assert redis_client.lrange("bull:{fax}:wait", 0, -1) == ["a"]
    assert redis_client.lrange("bull:{post}:wait", 0, -1) == ["b"]


@pytest.mark.parametrize(
    ("columns", "values", "message"),
    [
        (schema("name"), {}, r"COLUMN_MISSING.*'data'.*have the columns name"),
        (schema("name", "data", data=LongType()), {}, r"COLUMN_TYPE.*'data'.*bigint.*to_json"),
        (schema("name", "data", "id", id=LongType()), {}, r"COLUMN_TYPE.*'id'.*bigint"),
        (schema("name", "data", "extra"), {}, r"COLUMN_UNKNOWN.*'extra'.*columns name, data"),
        (schema("name", "data"), {"idColumn": "key"}, r"COLUMN_MISSING.*'key'"),
        (schema("name", "data"), {"jobOpts": '{"removeOnComplete": true}'}, r"OPTION_INVALID.*'removeOnComplete'"),
        (schema("name", "data"), {"jobOpts": '{"job_id": "a"}'}, r"job_id applies to a single job"),
        (schema("name", "data"), {"jobOpts": '{"priority": -1}'}, r"priority must be"),
        (schema("name", "data"), {"writeId": "a b"}, r"write id 'a b'"),
    ],
)
def test_invalid_columns_and_options_fail_before_any_task_starts(
    columns: StructType, values: dict[str, str], message: str, writer: Make, stream_writer: Make
) -> None:
    with pytest.raises(ConfigError, match=message):
        writer(columns, **values)
    with pytest.raises(ConfigError, match=message):
        stream_writer(columns, **values)


def test_a_queue_is_required_as_an_option_or_a_column(broker_url: str) -> None:
    with pytest.raises(ConfigError, match=r"'queue', or the option queue"):
        JobsWriter(read_options(WriteOptions, {"url": broker_url}), schema("name", "data"), overwrite=False)


def test_overwrite_mode_is_rejected(writer: Make, stream_writer: Make) -> None:
    with pytest.raises(ConfigError, match=r"BULLTASK_OVERWRITE.*mode\('append'\)"):
        writer(overwrite=True)
    with pytest.raises(ConfigError, match="BULLTASK_OVERWRITE"):
        stream_writer(overwrite=True)


def test_an_invalid_row_fails_before_its_round_trip_is_sent(writer: Make, redis_client: Any) -> None:
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"name": None}, ConfigError, "ROW_INCOMPLETE.*no name"),
        ({"id": None}, ConfigError, "ROW_INCOMPLETE.*no id"),
        ({"id": "12"}, InvalidNameError, "'12' is a number"),
        ({"name": "a\nb"}, InvalidNameError, "control characters"),
        ({"data": "{"}, DecodeError, "job send in queue mail.*'{'"),
        ({"data": '{"n":9007199254740993}'}, EncodeError, r"data of job send: \['n'\].*beyond"),
        ({"data": '{"n":1e999}'}, EncodeError, "is inf"),
        ({"data": '{"n":169299987.35345112}'}, EncodeError, r"job send in queue mail.*169299987\.35345112 has more"),
        ({"data": '{"text":"longer than 24 bytes"}'}, PayloadTooLargeError, "data of job send"),
    ]
    for values, error, message in cases:
        columns = schema("name", "data", "id")
        batch = pa.RecordBatch.from_pylist(
            [{"name": "send", "data": "{}", "id": "a"}, {"name": "send", "data": "{}", "id": "b", **values}],
            pa.schema([(name, pa.string()) for name in columns.names]),
        )
        with pytest.raises(error, match=message):
            write(writer(columns, jobOpts='{"size_limit":24}'), batch)
    assert ids(redis_client) == []


def test_a_stream_batch_that_runs_again_adds_no_jobs(stream_writer: Make, redis_client: Any) -> None:
    """Each batch has a new writer, as in Spark; batch 8 has the same rows as batch 7."""
    added = [
        stream_writer().write_batch(iter([rows(0, 10)]), "query", batch).counts["added"]
        for batch in ("7", "7", "8", "7")
    ]
    assert added == [10, 0, 10, 0]
    assert len(ids(redis_client)) == 20


def test_a_stream_with_a_write_id_adds_nothing_after_a_new_checkpoint(stream_writer: Make) -> None:
    added = [
        stream_writer(writeId="feed").write_batch(iter([rows(0, 10)]), query, "0").counts["added"]
        for query in ("a", "b")
    ]
    assert added == [10, 0]


def test_the_error_for_an_interrupted_write_reports_the_sent_rows(writer: Make, redis_client: Any) -> None:
    def batches() -> Iterator[pa.RecordBatch]:
        yield rows(0, 20)
        raise RuntimeError("the rows end here")

    with pytest.raises(RuntimeError) as caught:
        writer(writeId="w1", chunkSize="10").write(batches())
    [note] = caught.value.__notes__
    assert "[BULLTASK_WRITE_ABORTED] The write w1 has failed" in note
    assert "This task had sent 20 rows; other tasks may have sent theirs" in note
    assert write(writer(writeId="w1"), rows(0, 30)) == {"added": 10, "duplicate": 20}


def test_the_rows_of_a_failed_round_trip_are_not_reported_as_unsent(writer: Make, redis_client: Any) -> None:
    """If the connection is lost, for example, they may have been added."""

    def batches() -> Iterator[pa.RecordBatch]:
        yield rows(0, 10)
        redis_client.delete("bull:{mail}:wait")
        redis_client.set("bull:{mail}:wait", "not a list")
        yield rows(10, 15)

    with pytest.raises(Exception, match="WRONGTYPE") as caught:
        writer(chunkSize="10").write(batches())
    assert "had sent 10 rows, and perhaps some of the next 5; other tasks" in caught.value.__notes__[0]


def test_an_aborted_write_is_logged_with_the_rows_its_tasks_sent(
    writer: Make, stream_writer: Make, caplog: pytest.LogCaptureFixture
) -> None:
    batch, stream = writer(writeId="w1"), stream_writer()
    batch.abort([batch.write(iter([rows(0, 20)])), None])
    stream.abort([stream.write_batch(iter([rows(0, 5)]), "query", "7"), None, None], 7)
    stream.abort([None], 8)
    messages = [record.getMessage() for record in caplog.records]
    assert "The write w1 has failed" in messages[0]
    assert "1 of 2 tasks had finished, with 20 rows" in messages[0]
    assert "The write query-7 has failed" in messages[1]
    assert "1 of 3 tasks had finished, with 5 rows" in messages[1]
    assert "The write of batch 8 has failed" in messages[2]


def test_the_repr_of_a_writer_masks_the_password(writer: Make) -> None:
    prepared = writer(url="redis://:sesame@127.0.0.1:1/0")
    assert "sesame" not in repr(prepared._sender)
