"""The commands of ``bulltask pipeline`` that need a Spark session; they use the tests' shared session."""

from __future__ import annotations

import json
import os
import signal
import threading
import urllib.request
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path

import pytest
import redis
from click.testing import CliRunner, Result
from pyspark.sql import SparkSession

from bulltask.cli.main import main
from bulltask.cli.pipeline import queues
from bulltask.embedded.server import pick_port
from bulltask.lake.ledger import last_record
from bulltask.lake.reader import TableReader
from bulltask.lake.storage import Lake
from bulltask.lake.tables import EVENTS, SNAPSHOTS, TASK_MINUTE
from bulltask.queue import Queue
from bulltask.testing.worker import wait_until
from bulltask.transport.broker import Broker
from tests.conftest import ServerFactory
from tests.support.event_writing import fill
from tests.support.lake import LakeBuilder, at
from tests.support.manual_worker import ManualWorker
from tests.support.skipped_queues import write_skipped_queues

pytestmark = [pytest.mark.spark, pytest.mark.redis, pytest.mark.timeout(300)]

Run = Callable[..., Result]


@pytest.fixture
def run(spark: SparkSession, broker_url: str) -> Run:
    """Return a function that runs a command in the shared session."""

    def invoke(*args: str) -> Result:
        return CliRunner().invoke(main, ["-b", broker_url, "pipeline", *args])

    return invoke


@pytest.fixture
def manual_worker(broker_url: str) -> Iterator[ManualWorker]:
    with Queue("mail", broker_url) as queue:
        broker: Broker = queue.context.broker
        worker = ManualWorker(broker, broker.keys("mail"))
        yield worker
        worker.close()


def output_of(result: Result, code: int = 0) -> str:
    assert result.exit_code == code, result.output
    return result.output


CONF = ("--master", "local[2]", "--conf", "spark.sql.shuffle.partitions=2")


def test_enqueue_and_gather_add_jobs_and_write_their_results(
    run: Run, spark: SparkSession, tmp_path: Path, manual_worker: ManualWorker
) -> None:
    rows = str(tmp_path / "rows")
    spark.range(3).selectExpr("id AS n", "'send' AS task", "concat('k', id) AS key").write.parquet(rows)
    args = ("enqueue", rows, "--queue", "mail", "--name-col", "task", "--data-cols", "n", "--write-id", "one", *CONF)
    assert "3 rows: 3 jobs added, 0 duplicates\nwrite id one" in output_of(run(*args))
    assert "3 rows: 0 jobs added, 3 duplicates" in output_of(run(*args))
    manual_worker.complete("done")
    summary = output_of(run("gather", "one", "--queue", "mail", "--out", str(tmp_path / "out"), *CONF))
    assert [line.split() for line in summary.splitlines()[1:]] == [["completed", "1"], ["unfinished", "2"]]
    assert spark.read.parquet(str(tmp_path / "out")).where("state = 'completed'").first()["return_value"] == '"done"'  # type: ignore[index]
    invalid, rejected = str(tmp_path / "invalid"), str(tmp_path / "rejected")
    spark.sql("SELECT n, IF(n = 'NaN', NULL, 'send') AS task FROM VALUES (1D), (double('NaN')) AS t(n)").write.parquet(
        invalid
    )
    args = (
        "enqueue",
        invalid,
        "--queue",
        "mail",
        "--name-col",
        "task",
        "--data-cols",
        "n",
        "--rejected",
        rejected,
        *CONF,
    )
    assert f"1 invalid row in {rejected}; see the column rejected_reason\n2 rows: 1 job" in output_of(run(*args))
    assert "a row has no name" in spark.read.parquet(rejected).first()["rejected_reason"]  # type: ignore[index]
    failed = run("enqueue", rows, "--queue", "mail", "--name", "send", "--data-cols", "m", *CONF)
    assert "has no column 'm'" in output_of(failed, 1)
    assert "either --name or --name-col" in output_of(run("enqueue", rows, "--queue", "mail", "--data-cols", "n"), 2)


def test_a_stopped_run_ends_after_its_batch_and_the_next_run_continues(
    run: Run, tmp_path: Path, redis_client: redis.Redis
) -> None:
    root, events = str(tmp_path / "lake"), "bull:{mail}:events"
    redis_client.hset("bull:{mail}:meta", "opts.maxLenEvents", 10_000)
    for _ in range(10):
        redis_client.xadd(events, {"event": "paused"})
    lake, port, scraped = Lake(root), pick_port(), list[str]()

    def scrape_and_stop() -> None:
        try:
            wait_until(lambda: last_record(lake) is not None, 120, "the first batch")
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=50) as reply:
                scraped.append(reply.read().decode())
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    stopper = threading.Thread(target=scrape_and_stop)
    stopper.start()
    printed = output_of(run("run", "--lake", root, "--trigger", "0.2s", "--metrics-port", str(port), *CONF))
    stopper.join()
    assert 'bulltask_pipeline_lag_events{queue="mail"} 0.0' in scraped[0]
    assert "10 events" in printed
    assert "stopping after this batch" in printed
    redis_client.xtrim(events, maxlen=0, approximate=False)
    for _ in range(30):
        redis_client.xadd(events, {"event": "paused"})
    redis_client.xtrim(events, maxlen=20, approximate=False)
    assert "10 LOST" in output_of(run("run", "--lake", root, "--once", *CONF), 3)
    assert "1 gap, 10 events lost" in output_of(run("gaps", "--lake", root), 3)
    output_of(run("run", "--lake", root, "--once", *CONF))
    redis_client.xadd(events, {"event": "paused"})
    redis_client.xtrim(events, maxlen=0, approximate=False)
    failed = output_of(run("run", "--lake", root, "--once", "--on-loss", "fail", *CONF), 4)
    assert "Error: [BULLTASK_EVENTS_LOST] queue={mail}" in failed
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_server_that_restarts_empty_is_a_gap_in_the_summary_the_status_and_the_exit_code(
    spark: SparkSession, tmp_path: Path, server_factory: ServerFactory
) -> None:
    server, root = server_factory(), str(tmp_path / "lake")

    def run(command: str, *args: str) -> Result:
        return CliRunner().invoke(main, ["-b", server.url, "pipeline", command, "--lake", root, *args])

    with redis.Redis.from_url(server.url, decode_responses=True) as client:
        ids = fill(client, 20)
        client.xtrim("bull:{mail}:events", 4, approximate=False)
    printed = output_of(run("run", "--once", "--on-loss", "fail", *CONF), 3)
    assert "16 LOST" in printed
    assert "16 events lost in 1 gap: 'bulltask pipeline gaps' lists them" in printed
    assert "lost events   16 in 1 gap" in output_of(run("status"))

    server.restart()
    assert "lost events   16 in 1 gap" in output_of(run("status")), "no batch has noticed it"
    printed = output_of(run("run", "--once", *CONF), 3)
    assert "an unknown number LOST" in printed
    assert "an unknown number of events lost in 1 gap" in printed
    assert "lost events   16 in 2 gaps" in output_of(run("status"))
    gaps = json.loads(output_of(run("gaps", "--json"), 3))
    assert [(gap["loss_reason"], gap["lost"], gap["exact"], gap["last_id_before"]) for gap in gaps] == [
        ("trimmed-before-start", 16, True, "0-0"),
        ("stream-deleted", 0, False, ids[-1]),
    ]
    with redis.Redis.from_url(server.url, decode_responses=True) as client:
        fill(client, 3)
    assert "3 events" in output_of(run("run", "--once", *CONF)), "the gap is reported once"


def test_skipped_queues_do_not_block_other_queues(run: Run, tmp_path: Path, redis_client: redis.Redis) -> None:
    root = tmp_path / "lake"
    fill(redis_client, 20, "mail")
    write_skipped_queues(redis_client)
    output_of(run("run", "--lake", str(root), "--once", *CONF))
    fill(redis_client, 20, "mail")
    output_of(run("run", "--lake", str(root), "--once", *CONF))
    redis_client.hset("bull:{mail}:1", mapping={"name": "send", "timestamp": "1760000000000"})
    redis_client.zadd("bull:{mail}:completed", {"1": 1760000000000})
    assert "1 job written to bronze.jobs" in output_of(run("snapshot", "--lake", str(root), *CONF))
    head = last_record(Lake(root))
    assert head is not None
    assert (head.queues["mail"].events, list(head.last_ids), head.lost) == (20, ["mail"], {})
    reader = TableReader(Lake(root))
    assert {name for table in (EVENTS, SNAPSHOTS) for name in reader.queues(table)} == {"mail"}


def test_snapshot_replay_and_backfill_print_summaries(
    run: Run, tmp_path: Path, manual_worker: ManualWorker, broker_url: str
) -> None:
    with Queue("mail", broker_url) as queue:
        for number in range(2):
            queue.add("send", {"n": number}, job_id=f"job{number}")
    manual_worker.fail("no")
    manual_worker.complete()
    LakeBuilder(tmp_path).jobs([])
    assert "2 jobs written to bronze.jobs" in output_of(run("snapshot", "--lake", str(tmp_path), *CONF))
    args = ("replay", "--lake", str(tmp_path), "--where", "state = 'failed'", *CONF)
    assert "0 finished jobs selected" in output_of(run(*args))
    summary = output_of(
        run("backfill", "--lake", str(tmp_path), "--since", "2026-01-01", "--until", "2036-01-01", *CONF)
    )
    assert summary.startswith("0 gaps")
    assert "must be later" in output_of(
        run("backfill", "--lake", str(tmp_path), "--since", "2026-01-02", "--until", "2026-01-01"), 2
    )


def test_days_are_rebuilt_unless_their_events_have_expired(run: Run, tmp_path: Path) -> None:
    lake = LakeBuilder(tmp_path)
    lake.jobs([{"job_id": "1", "name": "send", "state": "completed", "finished_at": at("2026-11-20 10:00")}])
    lake.attempts(
        [{"job_id": "1", "name": "send", "outcome": "completed", "started_at": at("2026-11-20 09:59"),
          "ended_at": at("2026-11-20 10:00"), "run_ms": 60_000}]
    )  # fmt: skip
    args = ("--lake", str(tmp_path), "--days", "2026-11-19..2026-11-20", *CONF)
    assert "built gold for 2 days, 2026-11-19 to 2026-11-20" in output_of(run("build", "gold", *args))
    assert date(2026, 11, 20) in TableReader(lake.lake).days(TASK_MINUTE)
    assert "events that it is derived from have expired" in output_of(run("build", "silver", *args), 1)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("Py4J\n  x.EventsLostError: [BULLTASK_EVENTS_LOST] queue=a\n at java", "[BULLTASK_EVENTS_LOST] queue=a"),
        ("\nfirst\nsecond", "first"),
        ("Said: Traceback (most recent call last):\n  File x\n    y()\nbulltask.errors.LakeError: no\n\n\tat",
         "LakeError: no"),
        ("Traceback (most recent call last):\n  a\nKeyError: 1\n\nX:\n\nTraceback (most recent call last):\n  b\nE: 2",
         "E: 2"),
    ],
)  # fmt: skip
def test_a_failed_query_is_reported_with_the_error_message_of_its_cause(text: str, line: str) -> None:
    assert queues._first_line(text) == line


def test_invalid_settings_and_missing_java_are_reported_in_one_line(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "must be NAME=VALUE" in output_of(run("snapshot", "--lake", str(tmp_path), "--conf", "nonsense"), 2)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    assert "Spark needs Java 17 or newer" in output_of(run("snapshot", "--lake", str(tmp_path)), 1)
