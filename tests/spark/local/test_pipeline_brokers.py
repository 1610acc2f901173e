"""Several brokers in one lake: their queues and ids may be the same, and none waits for another."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis
from click.testing import CliRunner, Result
from pyspark.sql import SparkSession

from bulltask.cli.main import main
from bulltask.cli.pipeline import queues
from bulltask.errors import LakeInUseError
from bulltask.lake import History
from bulltask.lake.ledger import last_record
from bulltask.lake.reader import TableReader
from bulltask.lake.storage import Lake, RunLock
from bulltask.lake.tables import ATTEMPTS, EVENTS, JOBS, TASK_MINUTE
from bulltask.queue import Queue
from bulltask.spark import Pipeline
from bulltask.testing.worker import RedisServer, wait_until
from tests.conftest import ServerFactory
from tests.support.command_output import json_of
from tests.support.event_writing import fill, write_events
from tests.support.job_histories import histories
from tests.support.manual_worker import ManualWorker

pytestmark = [pytest.mark.spark, pytest.mark.redis, pytest.mark.timeout(300)]

STATUS = (sys.executable, "-m", "bulltask", "pipeline", "status", "--lake")
CONF = ("--master", "local[2]", "--conf", "spark.sql.shuffle.partitions=2")


@pytest.fixture
def servers(broker_url: str, server_factory: ServerFactory, monkeypatch: pytest.MonkeyPatch) -> RedisServer:
    """The server of the broker us; that of eu is the session's."""
    server = server_factory()
    monkeypatch.setenv("BULLTASK_EU_BROKER_URL", broker_url)
    monkeypatch.setenv("BULLTASK_US_BROKER_URL", server.url)
    monkeypatch.setenv("BULLTASK_BROKERS", "eu,us")
    return server


def run(command: str, *args: str, code: int = 0) -> str:
    result: Result = CliRunner().invoke(main, ["pipeline", command, *args])
    assert result.exit_code == code, result.output
    return result.output


def rows_of(root: Path, table: Any, broker: str, names: str) -> list[dict[str, Any]]:
    """Return columns of a broker's rows, without its name."""
    rows = TableReader(Lake(root, broker=broker)).rows(table)
    chosen = [{name: row[name] for name in names.split()} for row in rows]
    return sorted(({**row, "queue": row["queue"].removeprefix(f"{broker}:")} for row in chosen), key=repr)


def test_the_same_queues_and_ids_of_two_brokers_stay_apart(
    spark: SparkSession, servers: RedisServer, redis_client: redis.Redis, tmp_path: Path, broker_url: str
) -> None:
    eu, us = ([replace(it, queue="mail", job_id=it.job_id[1:]) for it in histories(seed, 20)] for seed in (1, 2))
    assert {event.job_id for event in eu} & {event.job_id for event in us}
    write_events(redis_client, eu)
    with redis.Redis.from_url(servers.url, decode_responses=True) as client:
        write_events(client, us)
    root = tmp_path / "lake"
    pipelines = [Pipeline(spark, root, broker=name, queue_hash_tag=False) for name in ("eu", "us")]
    queries = [pipeline.run(available_now=True) for pipeline in pipelines]
    for query in queries:
        query.awaitTermination()
    days = TableReader(Lake(root)).days(ATTEMPTS)
    pipelines[0].build("gold", days=days)
    for broker, url in (("eu", broker_url), ("us", servers.url)):
        alone = tmp_path / broker
        pipeline = Pipeline(spark, alone, url=url, queue_hash_tag=False)
        pipeline.run(available_now=True).awaitTermination()
        pipeline.build("gold", days=days)
        for table, names in (
            (EVENTS, "queue event_id event job_id name"),
            (JOBS, "queue job_id incarnation state attempt_count wait_ms run_ms finished_at"),
            (ATTEMPTS, "queue job_id incarnation attempt outcome run_ms"),
            (TASK_MINUTE, "queue name minute added started completed failed busy_ms"),
        ):
            assert rows_of(root, table, broker, names) == rows_of(alone, table, "", names), table.full_name


def test_a_broker_that_is_down_does_not_stop_another_and_continues_when_it_is_back(
    spark: SparkSession,
    servers: RedisServer,
    redis_client: redis.Redis,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root, brokers = tmp_path / "lake", [Lake(tmp_path / "lake", broker=name) for name in ("eu", "us")]
    monkeypatch.setattr(queues, "_RESTART_MS", 200)
    fill(redis_client, 10)
    servers.stop()
    seen: dict[str, str] = {}

    def events_of(lake: Lake) -> int:
        return 0 if lake.open(EVENTS) is None else len(TableReader(lake).rows(EVENTS))

    def restart_and_stop() -> None:
        try:
            wait_until(lambda: events_of(brokers[0]) == 10, 120, "the events of eu, while us is down")
            fill(redis_client, 5)
            wait_until(lambda: events_of(brokers[0]) == 15, 60, "further events of eu")
            # In a process of its own: CliRunner would also catch what the run prints meanwhile.
            seen["down"] = subprocess.check_output([*STATUS, str(root)], text=True)
            servers.restart()
            with redis.Redis.from_url(servers.url, decode_responses=True) as client:
                fill(client, 7)
            wait_until(lambda: events_of(brokers[1]) == 7, 120, "the events of us, which is back")
            with pytest.raises(LakeInUseError, match="the events of us"):
                RunLock(brokers[1])
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    stopper = threading.Thread(target=restart_and_stop)
    stopper.start()
    printed = run("run", "--lake", str(root), "--trigger", "0.2s", *CONF)
    stopper.join()
    assert re.search(r"Error: us: .*BrokerUnavailableError.*", printed)
    assert "eu: batch 1: 10 events" in printed
    assert "us: batch 1: 7 events" in printed
    _, us = seen["down"].split("broker        us")
    assert "Redis         " in us
    assert "15 of" in seen["down"]
    statuses = json_of(
        CliRunner().invoke(main, ["pipeline", "status", "--lake", str(root), "--json"]), "pipeline status"
    )
    found = [(status["broker"], status["queues"][0]["queue"], status["queues"][0]["lag_events"]) for status in statuses]
    assert found == [("eu", "eu:mail", 0), ("us", "us:mail", 0)]
    assert (
        "--brokers eu,us shows the status"
        in CliRunner(env={"BULLTASK_BROKERS": ""})
        .invoke(main, ["-b", servers.url, "pipeline", "status", "--lake", str(root)])
        .output
    )
    assert (
        "--brokers cannot be used with --broker"
        in CliRunner().invoke(main, ["-b", servers.url, "pipeline", "status", "--lake", str(root)]).output
    )


def test_snapshots_backfills_and_replays_of_a_broker_concern_its_jobs_only(
    spark: SparkSession, servers: RedisServer, broker_url: str, tmp_path: Path
) -> None:
    root = str(tmp_path / "lake")
    for url, count in ((broker_url, 1), (servers.url, 2)):
        with Queue("mail", url) as queue:
            for number in range(count):
                queue.add("send", number)
            worker = ManualWorker(queue.context.broker, queue.context.broker.keys("mail"))
            for _ in range(count):
                worker.complete("done")
            worker.close()
    with redis.Redis.from_url(servers.url, decode_responses=True) as client:
        client.xtrim("bull:{mail}:events", 2, approximate=False)
    assert "us: 1 event" not in run("run", "--lake", root, "--once", *CONF, code=3)
    lake, us = Lake(root), History(root, broker="us")
    assert [job.queue for job in History(root, broker="eu").search().jobs] == ["eu:mail"]
    printed = run("backfill", "--lake", root, "--since", "2020-01-01", "--until", "2100-01-01", *CONF)
    assert "eu: 0 gaps" in printed
    assert "us: 1 gap" in printed
    assert [job.queue for job in us.search().jobs] == ["us:mail", "us:mail"]
    assert "1 job written" in run("snapshot", "--lake", root, "--brokers", "eu", *CONF)
    printed = run("replay", "--lake", root, "--where", "state = 'completed'", "--queue", "mail", "--yes", *CONF)
    assert re.findall(r"(\w\w):\n|(\d+) jobs? added", printed) == [("eu", ""), ("", "1"), ("us", ""), ("", "2")]
    for url, count in ((broker_url, 1), (servers.url, 2)):
        with Queue("mail", url) as queue:
            assert queue.get_job_counts("waiting")["waiting"] == count
    assert last_record(lake) is None, "no pipeline of a broker without a name"
