"""Several brokers in one lake: each has its own batches, state and lock; the tables are shared."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bulltask.errors import ConfigError, LakeError, LakeInUseError
from bulltask.lake import History
from bulltask.lake.ledger import BatchRecord, last_record
from bulltask.lake.maintenance import forget, jobs_with_id, maintain
from bulltask.lake.reader import TableReader, dataset_of
from bulltask.lake.storage import Lake, RunLock, writer_pid
from bulltask.lake.tables import EVENTS, JOBS
from tests.support.lake import LakeBuilder, at
from tests.support.object_store import BUCKET, object_store

END = at("2026-11-22 10:00")
MS = 1795341600000


def builder(root: Path, broker: str) -> LakeBuilder:
    built = LakeBuilder(root)
    built.lake = Lake(root, broker=broker)
    return built


@pytest.fixture
def eu(tmp_path: Path) -> LakeBuilder:
    return builder(tmp_path, "eu")


@pytest.fixture
def us(tmp_path: Path) -> LakeBuilder:
    return builder(tmp_path, "us")


def finish_batch(lake: Lake, number: int, job_id: str) -> None:
    """Write a batch with a finished job, as a pipeline does."""
    built, queue = builder(Path(lake.root), lake.broker), f"{lake.broker}:mail"
    built.lake = lake
    built.events([{"event_id": f"{MS}-{number}", "event": "completed", "job_id": job_id, "queue": queue}], number)
    built.jobs([{"job_id": job_id, "state": "completed", "finished_at": END, "queue": queue}], number)
    open_event = {"job_id": f"open-{number}", "event_ms": MS, "event_seq": number, "event": "added", "queue": queue}
    built.open_events([open_event], number, BatchRecord(number=number, last_ids={queue: f"{MS}-{number}"}))


def test_each_broker_has_its_own_lock_and_its_own_batches(eu: LakeBuilder, us: LakeBuilder) -> None:
    with RunLock(eu.lake), RunLock(us.lake), RunLock(Lake(eu.root)):
        with pytest.raises(LakeInUseError, match="is already writing the events of eu to the lake"):
            RunLock(Lake(eu.root, broker="eu"))
        assert writer_pid(us.lake) is not None
    for number in (1, 2):
        finish_batch(eu.lake, number, f"{number}")
    finish_batch(us.lake, 1, "1")
    assert not us.lake.commit(EVENTS, [], batch=1), "a batch that is in the lake is not written again"
    assert [record and record.number for record in map(last_record, (eu.lake, us.lake, Lake(eu.root)))] == [2, 1, None]
    assert [lake.broker for lake in Lake(eu.root).of_all_brokers()] == ["", "eu", "us"]
    with pytest.raises(ConfigError, match="broker: the name must consist of"):
        Lake(eu.root, broker="../eu")


def test_brokers_that_write_at_the_same_time_lose_nothing(eu: LakeBuilder, us: LakeBuilder) -> None:
    numbers = range(1, 21)

    def write_all(lake: Lake) -> None:
        for number in numbers:
            finish_batch(lake, number, f"{number}")

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(write_all, (eu.lake, us.lake)))
    for table in (EVENTS, JOBS):
        rows = TableReader(Lake(eu.root)).rows(table)
        expected = [(f"{name}:mail", f"{number}") for name in ("eu", "us") for number in numbers]
        assert sorted((row["queue"], row["job_id"]) for row in rows) == sorted(expected)


def test_the_history_of_a_broker_has_only_its_jobs(eu: LakeBuilder, us: LakeBuilder) -> None:
    finish_batch(eu.lake, 1, "1")
    finish_batch(us.lake, 1, "1")
    finish_batch(us.lake, 2, "2")
    both, only_us = History(eu.root), History(us.root, broker="us")
    assert both.queues() == ["eu:mail", "us:mail"]
    assert [job.queue for job in both.search(queue="eu:mail").jobs] == ["eu:mail"]
    with pytest.raises(ConfigError, match="several queues have a job '1': eu:mail, us:mail; choose one"):
        both.job("1")
    assert only_us.queues() == ["us:mail"]
    assert {(job.queue, job.id) for job in only_us.search().jobs} == {("us:mail", "1"), ("us:mail", "2")}
    assert [count.jobs for count in only_us.job_counts()] == [2]
    assert [count.jobs for count in only_us.job_counts(queue="mail")] == [2]
    for queue in (None, "mail", "{mail}", "us:mail"):
        found = only_us.job("1", queue)
        assert found is not None
        assert (found.queue, len(found.events)) == ("us:mail", 1)
    with pytest.raises(ConfigError, match=re.escape("has no data for queue 'us:other'. It has us:mail")):
        only_us.search(queue="other")


def test_a_job_is_forgotten_in_the_state_of_its_brokers_pipeline_only(eu: LakeBuilder, us: LakeBuilder) -> None:
    finish_batch(eu.lake, 1, "1")
    finish_batch(us.lake, 1, "1")
    lake = Lake(eu.root)
    assert jobs_with_id(lake, "open-1", "us:mail") == {("us:mail", "open-1")}
    with RunLock(us.lake), pytest.raises(LakeInUseError, match="the events of us"):
        forget(lake, {("us:mail", "open-1")})
    us.events([{"event_id": f"{MS}-9", "event": "added", "job_id": "9", "queue": "us:mail"}], batch=2)
    with pytest.raises(LakeError, match="the last batch of us in"):
        forget(lake, {("us:mail", "open-1")})
    us.open_events([], 2, BatchRecord(number=2))
    done = forget(lake, {("us:mail", "open-1")})
    assert [result.table for result in done if result.rows] == [us.lake.open_events.full_name]
    records = [last_record(Lake(eu.root, broker=name)) for name in ("eu", "us")]
    assert [record and record.number for record in records] == [1, 2]
    assert jobs_with_id(lake, "open-1") == {("eu:mail", "open-1")}


def test_files_of_any_brokers_unfinished_batch_are_not_merged(eu: LakeBuilder, us: LakeBuilder) -> None:
    finish_batch(eu.lake, 1, "1")
    finish_batch(us.lake, 1, "1")
    before = us.lake.open(EVENTS)
    assert before is not None
    (file,) = us.lake.write(EVENTS, dataset_of(us.lake, EVENTS, before.files()).to_table(), "read-by-a-task")
    us.lake.commit(EVENTS, [file], batch=2, metadata={"number": 2, "part": {"files": [{"path": file.path}]}})
    maintain(Lake(eu.root), today=END.date().replace(day=23))
    snapshot = Lake(eu.root).open(EVENTS)
    assert snapshot is not None
    assert file.path in {one.path for one in snapshot.files()}
    assert len(snapshot.files()) == 2


def test_in_an_object_store_a_pipeline_fences_an_earlier_one_of_its_broker_only() -> None:
    with object_store() as settings:
        lake = Lake(f"s3://{BUCKET}/lake", settings)
        assert [one.broker for one in lake.of_all_brokers()] == [""]
        eu, us = (RunLock(lake.of_broker(name)).lake for name in ("eu", "us"))
        assert [one.broker for one in lake.of_all_brokers()] == ["", "eu", "us"]
        assert eu.commit(EVENTS, [], batch=1)
        assert us.commit(EVENTS, [], batch=1)
        later = RunLock(lake.of_broker("us")).lake
        with pytest.raises(LakeInUseError):
            us.commit(EVENTS, [], batch=2)
        assert eu.commit(EVENTS, [], batch=2)
        assert later.commit(EVENTS, [], batch=2)
