"""Tests of creating, changing, reading and removing job schedulers. Every test runs with both classes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest
import redis

from bulltask.errors import ConfigError, InvalidNameError, SchedulerBusyError, SchedulerCollisionError
from bulltask.jobs.schedules import Scheduler
from bulltask.queue import AsyncQueue, Queue
from bulltask.queue.sync.schedulers import JobSchedulers
from bulltask.transport.scripts.queue import Iteration, update_job_scheduler
from tests.support.machine_load import scale_to_load
from tests.support.manual_worker import ManualWorker
from tests.support.sync_facade import SyncFacade

HOUR_MS = 3_600_000
FAR = datetime(2100, 1, 1, tzinfo=UTC)


@pytest.fixture(params=["sync", "async"])
def schedulers(request: pytest.FixtureRequest, broker_url: str) -> Iterator[JobSchedulers]:
    """The schedulers of the queue ``mail``, through the sync class and through the async one."""
    if request.param == "sync":
        with Queue("mail", broker_url) as queue:
            yield queue.schedulers
        return
    with asyncio.Runner() as runner:
        other = AsyncQueue("mail", broker_url)
        facade: Any = SyncFacade(other.schedulers, runner)
        yield cast("JobSchedulers", facade)
        runner.run(other.close())


@pytest.fixture
def jobs(broker_url: str) -> Iterator[Queue]:
    """The schedulers' queue."""
    with Queue("mail", broker_url) as queue:
        yield queue


@pytest.fixture
def manual_worker(jobs: Queue) -> Iterator[ManualWorker]:
    manual_worker = ManualWorker(jobs.context.broker, jobs.context.keys)
    yield manual_worker
    manual_worker.close()


def not_none(scheduler: Scheduler | None) -> Scheduler:
    assert scheduler is not None
    return scheduler


def now_ms(jobs: Queue) -> int:
    jobs.context.connect()
    return jobs.context.now_ms()


# --- creating ---------------------------------------------------------------------------------------------------------


@pytest.mark.every_topology
def test_an_interval_starts_immediately_and_its_fields_can_be_read(
    schedulers: JobSchedulers, jobs: Queue, redis_client: redis.Redis
) -> None:
    before = now_ms(jobs)
    scheduler = not_none(
        schedulers.upsert("beat", every=timedelta(hours=1), name="send", data={"to": "ann"}, options={"priority": 3})
    )
    # The two clients estimate the server's time separately.
    assert before - 100 <= scheduler.next_ms <= now_ms(jobs) + 100
    assert (scheduler.id, scheduler.name, scheduler.data) == ("beat", "send", {"to": "ann"})
    assert (scheduler.every_ms, scheduler.pattern, scheduler.tz, scheduler.iterations) == (HOUR_MS, None, None, 1)
    assert (scheduler.opts["priority"], scheduler.opts["attempts"]) == (3, 3)
    job = jobs.get_job(scheduler.next_job_id)
    assert job is not None
    assert (job.name, job.data, job.priority, job.scheduler_id) == ("send", {"to": "ann"}, 3, "beat")
    assert job.opts["repeat"] == {"every": HOUR_MS, "count": 1}
    assert redis_client.hgetall(jobs.context.keys.meta) == {"version": "bullmq:5.62.0", "opts.maxLenEvents": "10000"}


def test_name_and_data_default_to_the_id_and_an_empty_object(schedulers: JobSchedulers, jobs: Queue) -> None:
    scheduler = not_none(schedulers.upsert("beat", every=60))
    assert (scheduler.name, scheduler.data) == ("beat", {})
    job = jobs.get_job(scheduler.next_job_id)
    assert job is not None
    assert (job.name, job.data) == ("beat", {})


def test_a_pattern_is_evaluated_in_its_time_zone(schedulers: JobSchedulers, jobs: Queue) -> None:
    scheduler = not_none(schedulers.upsert("nightly", cron="0 3 * * *", tz="Europe/Berlin"))
    assert (scheduler.pattern, scheduler.tz) == ("0 3 * * *", "Europe/Berlin")
    assert 0 < scheduler.next_ms - now_ms(jobs) <= 25 * HOUR_MS
    assert scheduler.next_ms % HOUR_MS == 0
    assert jobs.get_job_state(scheduler.next_job_id).value == "delayed"
    assert jobs.get_job_counts()["delayed"] == 1


def test_the_time_zone_of_a_pattern_defaults_to_the_setting(broker_url: str) -> None:
    with Queue("mail", broker_url, timezone="America/New_York") as queue:
        assert not_none(queue.schedulers.upsert("a", cron="@daily")).tz == "America/New_York"
    with Queue("mail", broker_url) as queue:
        assert not_none(queue.schedulers.upsert("b", cron="@daily")).tz == "UTC"


def test_a_pattern_may_start_immediately(schedulers: JobSchedulers, jobs: Queue) -> None:
    scheduler = not_none(schedulers.upsert("nightly", cron="0 3 * * *", immediately=True))
    assert abs(scheduler.next_ms - now_ms(jobs)) < scale_to_load(1000)
    assert jobs.get_job_counts()["waiting"] == 1
    job = jobs.get_job(scheduler.next_job_id)
    assert job is not None
    assert "immediately" not in job.opts["repeat"]


def test_nothing_runs_before_the_start(schedulers: JobSchedulers) -> None:
    assert not_none(schedulers.upsert("a", every=60, start=FAR)).next_ms == round(FAR.timestamp() * 1000)
    assert (
        not_none(schedulers.upsert("b", cron="30 * * * *", start=FAR)).next_ms
        == round(FAR.timestamp() * 1000) + HOUR_MS // 2
    )


def test_a_pattern_that_never_fires_creates_no_scheduler(schedulers: JobSchedulers) -> None:
    soon = datetime.now(UTC) + timedelta(seconds=30)
    assert schedulers.upsert("never", cron="0 0 29 2 *", end=soon) is None
    assert schedulers.upsert("never", cron="0 0 31 2,4 *") is None
    assert schedulers.count() == 0


def test_an_offset_aligns_an_interval_to_its_multiples(schedulers: JobSchedulers, jobs: Queue) -> None:
    scheduler = not_none(schedulers.upsert("hourly", every=3600, offset=600))
    assert scheduler.next_ms % HOUR_MS == 600_000
    assert 0 <= scheduler.next_ms - now_ms(jobs) <= HOUR_MS
    assert scheduler.offset_ms == 600_000


def test_expires_is_stored_in_the_template_as_a_duration(schedulers: JobSchedulers, jobs: Queue) -> None:
    scheduler = not_none(schedulers.upsert("a", every=60, start=FAR, options={"expires": 5}))
    assert scheduler.opts["bulltask"] == {"v": 1, "ttl": 5000}


def test_a_queues_default_options_apply_to_schedulers_if_they_are_allowed(broker_url: str) -> None:
    with Queue("mail", broker_url, default_job_options={"delay": 9, "deduplication": "x", "priority": 4}) as queue:
        scheduler = not_none(queue.schedulers.upsert("a", every=60))
        job = queue.get_job(scheduler.next_job_id)
        assert job is not None
        assert job.priority == scheduler.opts["priority"] == 4
        assert "delay" not in scheduler.opts
        assert "de" not in scheduler.opts
        assert (job.deduplication_id, job.get_state().value) == (None, "prioritized")


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({}, "either every= or cron="),
        ({"every": 1, "cron": "* * * * *"}, "either every= or cron="),
        ({"every": 0}, "at least 0.001 s"),
        ({"every": -1}, "every"),
        ({"every": "often"}, "every must be a number of seconds"),
        ({"every": 1, "tz": "UTC"}, "tz can only be used with cron="),
        ({"every": 10, "offset": 10}, "shorter than every"),
        ({"cron": "* * * *"}, "must have 5 fields"),
        ({"cron": "x"}, "must have 5 fields"),
        ({"cron": "60 * * * *"}, "minute '60'"),
        ({"cron": 5}, "cron must be a pattern"),
        ({"cron": "* * * * *", "tz": "Europe/Atlantis"}, "unknown tz"),
        ({"cron": "* * * * *", "offset": 1}, "offset can only be used with every="),
        ({"cron": "* * * * *", "limit": 0}, "limit must be"),
        ({"cron": "* * * * *", "limit": True}, "limit must be"),
        ({"cron": "* * * * *", "start": FAR, "immediately": True}, "use either immediately or start"),
        ({"cron": "* * * * *", "start": FAR, "end": FAR}, "must be later than start"),
        ({"cron": "* * * * *", "end": datetime(2020, 1, 1, tzinfo=UTC)}, "is in the past"),
        ({"cron": "* * * * *", "start": "tomorrow"}, "start must be a datetime"),
    ],
)
def test_invalid_scheduler_rules_are_rejected(schedulers: JobSchedulers, rule: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        schedulers.upsert("a", **rule)
    assert schedulers.count() == 0


def test_options_that_a_scheduler_sets_and_unknown_options_are_rejected(schedulers: JobSchedulers) -> None:
    for option in ({"job_id": "x"}, {"delay": 1}, {"deduplication": "x"}, {"parent": None, "timestamp": 1.0}):
        with pytest.raises(ConfigError, match="cannot have the option"):
            schedulers.upsert("a", every=1, options=cast("Any", option))
    with pytest.raises(TypeError, match="unknown option 'evry'"):
        schedulers.upsert("a", evry=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unknown option 'prio'"):
        schedulers.upsert("a", every=1, options=cast("Any", {"prio": 1}))
    for name in ("", "a:b:c:d:e", "a\n"):
        with pytest.raises(InvalidNameError):
            schedulers.upsert(name, every=1)


# --- changing ---------------------------------------------------------------------------------------------------------


@pytest.mark.every_topology
def test_an_unchanged_rule_only_updates_the_template(schedulers: JobSchedulers, jobs: Queue) -> None:
    first = not_none(schedulers.upsert("beat", every=3600, start=FAR))
    second = not_none(schedulers.upsert("beat", every=3600, start=FAR, data={"new": True}))
    assert (second.next_ms, second.data) == (first.next_ms, {"new": True})
    assert jobs.get_job_counts()["delayed"] == schedulers.count() == 1
    job = jobs.get_job(second.next_job_id)
    assert job is not None
    assert job.data == {"new": True}


@pytest.mark.every_topology
def test_a_changed_rule_replaces_the_next_job(schedulers: JobSchedulers, jobs: Queue) -> None:
    first = not_none(schedulers.upsert("beat", cron="0 3 * * *"))
    second = not_none(schedulers.upsert("beat", cron="0 4 * * *"))
    assert second.next_ms != first.next_ms
    assert jobs.get_job(first.next_job_id) is None
    assert jobs.get_job_counts()["delayed"] == 1
    third = not_none(schedulers.upsert("beat", every=5))
    assert (third.every_ms, third.pattern, third.tz) == (5000, None, None)


def test_the_next_job_cannot_be_replaced_after_it_has_run(
    schedulers: JobSchedulers, jobs: Queue, manual_worker: ManualWorker
) -> None:
    when = not_none(schedulers.upsert("nightly", cron="0 0 1 1 *", end=FAR))
    jobs.promote_jobs()
    assert manual_worker.complete() == when.next_job_id
    with pytest.raises(SchedulerCollisionError, match=when.next_job_id):
        schedulers.upsert("nightly", cron="0 0 1 1 *", end=FAR)


def test_an_interval_whose_next_two_jobs_have_run_is_busy(
    schedulers: JobSchedulers, jobs: Queue, manual_worker: ManualWorker, redis_client: redis.Redis
) -> None:
    first = not_none(schedulers.upsert("beat", every=3600, start=FAR))
    for _ in range(2):
        jobs.promote_jobs()
        manual_worker.complete()  # manually: no worker adds the next job
        second = not_none(schedulers.get("beat"))
        if second.next_ms == first.next_ms:
            second = not_none(schedulers.upsert("beat", every=3600, start=FAR))
            assert second.next_ms == first.next_ms + HOUR_MS, "the time after the one that has run"
    redis_client.zadd(jobs.context.keys.repeat, {"beat": first.next_ms - HOUR_MS})
    with pytest.raises(SchedulerBusyError):
        schedulers.upsert("beat", every=3600, start=FAR)


# --- the next job -----------------------------------------------------------------------------------------------------


@pytest.mark.every_topology
def test_the_next_job_is_added_once_even_if_it_is_requested_repeatedly(
    schedulers: JobSchedulers, jobs: Queue, manual_worker: ManualWorker
) -> None:
    first = not_none(schedulers.upsert("beat", every=3600, data={"n": 1}))
    assert manual_worker.acquire() == first.next_job_id
    job = jobs.get_job(first.next_job_id)
    assert job is not None
    options = {**job.opts, "repeat": {**job.opts["repeat"], "count": 2}}
    call = update_job_scheduler(jobs.context.keys, "beat", job.id, Iteration(None, b'{"n":1}', options), now_ms(jobs))
    run = jobs.context.broker.pool.run
    assert run(call) == f"repeat:beat:{first.next_ms + HOUR_MS}"
    assert run(call) is None
    after = not_none(schedulers.get("beat"))
    assert (after.next_ms, after.iterations) == (first.next_ms + HOUR_MS, 2)
    schedulers.remove("beat")
    assert run(call) is None


@pytest.mark.every_topology
def test_intervals_missed_without_a_worker_add_one_job(
    schedulers: JobSchedulers, jobs: Queue, manual_worker: ManualWorker
) -> None:
    first = not_none(schedulers.upsert("beat", every=60))
    assert manual_worker.acquire() == first.next_job_id
    late = first.next_ms + 10 * 60_000 + 7
    job = jobs.get_job(first.next_job_id)
    assert job is not None
    call = update_job_scheduler(jobs.context.keys, "beat", job.id, Iteration(None, b"{}", dict(job.opts)), late)
    jobs.context.broker.pool.run(call)
    following = not_none(schedulers.get("beat")).next_ms
    assert (following - first.next_ms) % 60_000 == 0
    assert late < following <= late + 2 * 60_000
    assert jobs.get_job_counts()["delayed"] == 1


# --- reading and removing ---------------------------------------------------------------------------------------------


def test_schedulers_are_listed_in_the_order_of_their_next_jobs(schedulers: JobSchedulers) -> None:
    for hours in (3, 1, 2):
        schedulers.upsert(f"in-{hours}", every=60, start=FAR + timedelta(hours=hours))
    assert [scheduler.id for scheduler in schedulers.list()] == ["in-3", "in-2", "in-1"]
    assert [scheduler.id for scheduler in schedulers.list(asc=True)] == ["in-1", "in-2", "in-3"]
    assert [scheduler.id for scheduler in schedulers.list(1, 1)] == ["in-2"]
    assert [scheduler.id for scheduler in schedulers.list(0, 1, asc=True)] == ["in-1", "in-2"]
    assert schedulers.count() == 3
    assert schedulers.list(5, 9) == []


@pytest.mark.parametrize(
    ("start", "end"), [(0, -1), (0, 5_000), (1, -2), (-2, -1), (-9, 1), (2, 1), (-1, -3), (0, -9), (9, -1)]
)
def test_ranges_of_schedulers_are_those_of_redis(
    schedulers: JobSchedulers, jobs: Queue, redis_client: Any, start: int, end: int
) -> None:
    for number, scheduler_id in enumerate(("b", "a", "ä", "C", "\U0001f600", "\uffee")):
        schedulers.upsert(scheduler_id, every=60, start=FAR + timedelta(hours=number // 5))
    for asc, command in ((True, redis_client.zrange), (False, redis_client.zrevrange)):
        found = [scheduler.id for scheduler in schedulers.list(start, end, asc=asc)]
        assert found == command(jobs.context.keys.repeat, start, end)


@pytest.mark.every_topology
def test_removing_a_scheduler_removes_its_next_job(schedulers: JobSchedulers, jobs: Queue) -> None:
    scheduler = not_none(schedulers.upsert("beat", every=60, start=FAR))
    assert schedulers.remove("beat") is True
    assert schedulers.remove("beat") is False
    assert schedulers.get("beat") is None
    assert jobs.get_job(scheduler.next_job_id) is None
    assert (schedulers.count(), schedulers.list()) == (0, [])


def test_scheduler_ids_may_have_any_characters(schedulers: JobSchedulers) -> None:
    for name in ("jeden Tag um 3", "ünï:co:de", "a" * 255, "{x}", "123"):
        assert not_none(schedulers.upsert(name, every=60, start=FAR)).id == name
        assert not_none(schedulers.get(name)).id == name
    assert schedulers.count() == 5


@pytest.mark.every_topology
def test_run_now_adds_a_job_beside_the_iterations(schedulers: JobSchedulers, jobs: Queue) -> None:
    scheduler = not_none(
        schedulers.upsert(
            "nightly", cron="0 3 * * *", name="report", data={"n": 1.5}, options={"attempts": 5, "priority": 2}
        )
    )
    job = schedulers.run_now("nightly")
    assert job is not None
    stored = jobs.get_job(job.id)
    assert stored is not None
    assert stored.stored == job.stored
    assert (stored.name, stored.data, stored.priority, stored.scheduler_id) == ("report", {"n": 1.5}, 2, None)
    assert stored.opts["attempts"] == 5
    assert "repeat" not in stored.opts
    assert stored.get_state() == "prioritized"
    assert schedulers.list() == [scheduler]
    assert jobs.get_job_state(scheduler.next_job_id) == "delayed"
    assert schedulers.run_now("unknown") is None
