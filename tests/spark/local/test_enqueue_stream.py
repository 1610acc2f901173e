"""``enqueue_stream`` with a real session: each row becomes one job, even across restarts."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import redis
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from bulltask import App
from bulltask.errors import ConfigError
from bulltask.spark import enqueue, enqueue_stream
from bulltask.testing.worker import wait_until

pytestmark = [pytest.mark.spark, pytest.mark.redis, pytest.mark.timeout(300)]

WAIT = "bull:{mail}:wait"
SENT: dict[str, Any] = {"name": "send", "data": ["n", "who"]}


class Feed:
    """A directory of files, read as a stream."""

    def __init__(self, spark: SparkSession, directory: Path) -> None:
        self.directory, self._spark, self._files = directory, spark, 0
        directory.mkdir()

    def add(self, *numbers: int) -> None:
        """Add a file in one step."""
        self._files += 1
        file = self.directory.with_name(f"{self._files}.json")
        file.write_text("".join(json.dumps({"n": number, "who": None}) + "\n" for number in numbers))
        file.rename(self.directory / file.name)

    def rows(self) -> DataFrame:
        return self._spark.readStream.schema("n int, who string").json(str(self.directory))


@pytest.fixture
def feed(spark: SparkSession, tmp_path: Path) -> Feed:
    return Feed(spark, tmp_path / "in")


def wait_for_end(query: StreamingQuery) -> None:
    query.awaitTermination()
    assert query.exception() is None


def test_a_running_stream_sends_new_rows_with_its_job_options(
    feed: Feed, broker_url: str, redis_client: redis.Redis, tmp_path: Path
) -> None:
    opts: Any = {"attempts": 4, "backoff": timedelta(seconds=2), "remove_on_complete": {"age": timedelta(hours=1)}}
    query = enqueue_stream(
        feed.rows(), "mail", **SENT, checkpoint=str(tmp_path / "c"), trigger=0.2, opts=opts, url=broker_url
    )
    try:
        for number in range(2):
            feed.add(number)
            wait_until(lambda: redis_client.llen(WAIT) == number + 1, 120.0, "a job")  # noqa: B023 # called in this iteration
    finally:
        query.stop()
    first: Any = redis_client.lrange(WAIT, -1, -1)
    job: Any = redis_client.hgetall(f"bull:{{mail}}:{first[0]}")
    stored = json.loads(job["opts"])
    assert (job["name"], job["data"]) == ("send", '{"n":0,"who":null}')
    assert (stored["attempts"], stored["backoff"], stored["removeOnComplete"]) == (
        4, {"type": "fixed", "delay": 2000}, {"age": 3600},
    )  # fmt: skip


def test_a_stream_continues_from_its_checkpoint(
    feed: Feed, broker_url: str, redis_client: redis.Redis, tmp_path: Path
) -> None:
    def run(checkpoint: str, **options: Any) -> None:
        directory = str(tmp_path / checkpoint)
        wait_for_end(
            enqueue_stream(
                feed.rows(), "mail", **SENT, checkpoint=directory, available_now=True, url=broker_url, **options
            )
        )

    feed.add(1, 2, 2)
    run("a", write_id="feed")
    assert redis_client.llen(WAIT) == 2
    feed.add(2, 3)
    run("a", write_id="feed")  # 2 is in another batch again, so it is another job
    assert redis_client.llen(WAIT) == 4
    redis_client.delete(WAIT, *redis_client.keys("bull:{mail}:s*"))
    (tmp_path / "a" / "commits" / "1").unlink()
    (tmp_path / "a" / "commits" / ".1.crc").unlink(missing_ok=True)
    run("a", write_id="feed")
    assert redis_client.llen(WAIT) == 0
    run("b", write_id="feed")  # one batch with all files: the rows of the previous first batch are duplicates, 3 is new
    assert redis_client.llen(WAIT) == 1


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"on_duplicate_rows": "error"}, TypeError, "unknown option 'on_duplicate_rows'; known options are "),
        ({"opts": {"job_id": "a"}}, ConfigError, "job_id applies to a single job"),
        ({"opts": {"expires": datetime(2030, 1, 1, tzinfo=UTC)}}, ConfigError, "the same for every batch"),
        ({"write_id": "a b"}, ConfigError, "write id 'a b'"),
        ({"data": "n"}, ConfigError, r"\['n'\], not 'n'"),
        ({"chunk_size": 0}, ConfigError, "OPTION_INVALID.*chunkSize"),
        ({"trigger": -1}, ConfigError, "trigger must be"),
    ],
)
def test_invalid_options_fail_before_the_stream_starts(
    options: Any, error: Any, message: str, feed: Feed, broker_url: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        enqueue_stream(feed.rows(), "mail", **{**SENT, **options}, checkpoint=str(tmp_path / "c"), url=broker_url)
    assert not (tmp_path / "c").exists()


def test_enqueue_rejects_streams_and_enqueue_stream_rejects_tables(
    feed: Feed, spark: SparkSession, broker_url: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="use enqueue_stream for a streaming DataFrame"):
        enqueue(feed.rows(), "mail", name="send", data=["n"], url=broker_url)
    with pytest.raises(ConfigError, match="call it in foreachBatch"):
        App("tests", broker_url).task(name="send")(lambda n: n).map_dataframe(feed.rows(), ["n"])
    with pytest.raises(ConfigError, match="use enqueue for a batch DataFrame"):
        enqueue_stream(spark.range(1), "mail", name="send", data=["id"], checkpoint=str(tmp_path), url=broker_url)
