"""Tests of creating, changing, reading, pausing and removing job schedulers. Every test runs with both classes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
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


# --- pausing ----------------------------------------------------------------------------------------------------------


def paused_before(jobs: Queue, client: redis.Redis, scheduler_id: str, hours: float) -> int:
    """Move the pause of a scheduler, and the next job that it then had, into the past; return that job's time."""
    key = jobs.context.keys.paused_schedulers
    time = round(now_ms(jobs) - hours * HOUR_MS)
    client.zadd(key, {scheduler_id: time})
    return time


@pytest.mark.every_topology
@pytest.mark.parametrize(
    "rule",
    [
        {"every": 3600, "start": FAR, "limit": 5, "end": FAR + timedelta(days=9)},
        {"every": 3600, "offset": 1200},
        {"cron": "0 3 * * *", "tz": "Europe/Berlin", "limit": 2},
    ],
)
def test_a_paused_scheduler_keeps_its_definition_and_adds_no_job(
    schedulers: JobSchedulers, jobs: Queue, redis_client: redis.Redis, rule: dict[str, Any]
) -> None:
    before = not_none(schedulers.upsert("s", name="send", data={"to": "ä"}, options={"priority": 3}, **rule))
    paused = not_none(schedulers.pause("s", by="ann@web-1"))
    assert paused.paused_by == "ann@web-1"
    assert abs((paused.paused_ms or 0) - now_ms(jobs)) < scale_to_load(5_000)
    assert replace(paused, paused_ms=None, paused_by=None) == before
    assert [scheduler.id for scheduler in schedulers.list_paused()] == ["s"]
    assert (schedulers.get("s"), schedulers.list(), schedulers.count()) == (paused, [], 0)
    assert (jobs.get_job(before.next_job_id), jobs.get_job_counts()["delayed"]) == (None, 0)
    assert not_none(schedulers.pause("s", by="bob")) == paused, "the first pause stays"
    assert schedulers.resume("s") == before
    assert schedulers.resume("s") == before
    assert jobs.get_job_state(before.next_job_id) == "delayed"
    assert (schedulers.list(), schedulers.list_paused()) == ([before], [])
    assert not list(redis_client.scan_iter(f"{jobs.context.keys.paused_schedulers}*"))


def test_what_does_not_exist_is_neither_paused_nor_resumed(schedulers: JobSchedulers, jobs: Queue) -> None:
    assert (schedulers.pause("s"), schedulers.resume("s"), schedulers.list_paused()) == (None, None, [])


def test_a_repeatable_job_of_an_old_bullmq_cannot_be_paused(
    schedulers: JobSchedulers, jobs: Queue, redis_client: redis.Redis
) -> None:
    redis_client.zadd(jobs.context.keys.repeat, {"old": 1})
    redis_client.hset(jobs.context.keys.scheduler("old"), mapping={"name": "old", "every": 5})
    with pytest.raises(ConfigError, match=r"'old' of queue 'mail' is a repeatable job of BullMQ before 5\.16"):
        schedulers.pause("old")
    assert redis_client.zrange(jobs.context.keys.repeat, 0, -1) == ["old"]


@pytest.mark.parametrize("rule", [{"every": 3600, "start": FAR}, {"cron": "20 * * * *", "tz": "UTC"}])
def test_times_that_a_pause_has_skipped_are_not_caught_up(
    schedulers: JobSchedulers, jobs: Queue, redis_client: redis.Redis, rule: dict[str, Any]
) -> None:
    schedulers.upsert("s", **rule)
    schedulers.pause("s")
    missed = paused_before(jobs, redis_client, "s", hours=10.4)
    resumed = not_none(schedulers.resume("s"))
    assert now_ms(jobs) < resumed.next_ms <= now_ms(jobs) + HOUR_MS
    if "every" in rule:
        assert (resumed.next_ms - missed) % HOUR_MS == 0, "it keeps its rhythm"
    else:
        assert resumed.next_ms % HOUR_MS == HOUR_MS // 3
    counts = jobs.get_job_counts()
    assert (counts["delayed"], counts["waiting"], resumed.iterations) == (1, 0, 1)


def test_a_job_that_runs_when_its_scheduler_is_paused_is_not_followed_by_another(
    schedulers: JobSchedulers, jobs: Queue, manual_worker: ManualWorker
) -> None:
    first = not_none(schedulers.upsert("s", every=3600, data={"n": 1}))
    assert manual_worker.acquire() == first.next_job_id
    schedulers.pause("s")
    job = jobs.get_job(first.next_job_id)
    assert job is not None
    call = update_job_scheduler(jobs.context.keys, "s", job.id, Iteration(None, b"{}", dict(job.opts)), now_ms(jobs))
    assert jobs.context.broker.pool.run(call) is None, "what every worker calls"
    resumed = not_none(schedulers.resume("s"))
    assert (resumed.next_ms, resumed.iterations, resumed.data) == (first.next_ms + HOUR_MS, 2, {"n": 1})
    following = jobs.get_job(resumed.next_job_id)
    assert following is not None
    assert following.opts["repeat"]["count"] == 2
    assert jobs.context.broker.pool.run(call) is None, "a worker that was slow adds no second one"
    manual_worker.finish(first.next_job_id)
    assert jobs.get_job_counts()["delayed"] == 1


def test_a_job_that_still_waits_continues_its_schedule_after_the_pause(schedulers: JobSchedulers, jobs: Queue) -> None:
    first = not_none(schedulers.upsert("s", every=3600))
    schedulers.pause("s")
    assert jobs.get_job_state(first.next_job_id) == "waiting"
    assert schedulers.resume("s") == first
    assert jobs.get_job_counts()["delayed"] == 0
    job = jobs.get_next_job("token")
    assert job is not None
    assert not_none(schedulers.get("s")).next_ms == first.next_ms + HOUR_MS


def test_a_retry_that_is_delayed_survives_a_pause_and_its_end(schedulers: JobSchedulers, jobs: Queue) -> None:
    first = not_none(schedulers.upsert("s", cron="0 3 1 1 *", immediately=True, options={"attempts": 3}))
    schedulers.pause("s")
    job = jobs.get_next_job("token")
    assert job is not None
    job.move_to_delayed(now_ms(jobs) + HOUR_MS)
    resumed = not_none(schedulers.resume("s"))
    assert resumed.next_ms > first.next_ms
    assert {jobs.get_job_state(name) for name in (first.next_job_id, resumed.next_job_id)} == {"delayed"}


@pytest.mark.parametrize("ran_before", [False, True])
def test_a_limit_counts_across_a_pause(schedulers: JobSchedulers, jobs: Queue, ran_before: bool) -> None:
    schedulers.upsert("s", every=3600, limit=2)
    ran = 0
    if ran_before:
        job = jobs.get_next_job("token")  # adds the second one
        assert job is not None
        job.move_to_completed(None)
        ran += 1
    for _ in range(3):
        schedulers.pause("s")
        schedulers.resume("s")
        jobs.promote_jobs()
        if (job := jobs.get_next_job("token")) is not None:
            job.move_to_completed(None)
            ran += 1
    assert ran == 2
    over = not_none(schedulers.resume("s"))
    assert (over.iterations, over.paused_ms, schedulers.count()) == (2, None, 1)


def test_an_update_of_a_paused_scheduler_leaves_it_paused(
    schedulers: JobSchedulers, jobs: Queue, redis_client: redis.Redis
) -> None:
    schedulers.upsert("s", every=3600, start=FAR, limit=7, data={"n": 1})
    paused = schedulers.pause("s", by="ann")
    updated = not_none(schedulers.upsert("s", every=60, name="send", data={"n": 2}, options={"priority": 3}))
    assert (updated.paused_ms, updated.paused_by) == (not_none(paused).paused_ms, "ann")
    assert (updated.every_ms, updated.limit, updated.start_ms, updated.name) == (60_000, None, None, "send")
    assert (updated.data, updated.opts["priority"]) == ({"n": 2}, 3)
    assert (jobs.get_job_counts()["delayed"], jobs.get_job_counts()["prioritized"], schedulers.count()) == (0, 0, 0)
    run = schedulers.run_now("s")
    assert run is not None
    assert (run.name, run.data) == ("send", {"n": 2})
    jobs.remove(run.id)
    resumed = not_none(schedulers.resume("s"))
    assert now_ms(jobs) - 1000 < resumed.next_ms <= now_ms(jobs) + 60_000
    schedulers.pause("s")
    assert not_none(schedulers.upsert("s", cron="@daily")).pattern == "@daily"
    assert not_none(schedulers.resume("s")).next_ms % (24 * HOUR_MS) == 0
    assert jobs.get_job_counts()["delayed"] == 1


def test_a_paused_scheduler_is_removed_and_obliterated(
    schedulers: JobSchedulers, jobs: Queue, redis_client: redis.Redis
) -> None:
    for name in ("removed", "kept", "kept too"):
        schedulers.upsert(name, every=3600, start=FAR)
        schedulers.pause(name)
    assert (schedulers.remove("removed"), schedulers.remove("removed")) == (True, False)
    assert {scheduler.id for scheduler in schedulers.list_paused()} == {"kept", "kept too"}
    jobs.obliterate()
    assert schedulers.list_paused() == []
    assert not list(redis_client.scan_iter("bulltask:{mail}:paused-schedules*"))


def test_a_paused_scheduler_that_another_client_adds_again_is_not_paused(
    schedulers: JobSchedulers, jobs: Queue, redis_client: redis.Redis
) -> None:
    keys = jobs.context.keys
    for name, then in (("a", schedulers.resume), ("b", schedulers.pause), ("c", schedulers.remove)):
        schedulers.upsert(name, every=3600, start=FAR, data={"of": "bulltask"})
        schedulers.pause(name)
        redis_client.zadd(keys.repeat, {name: FAR.timestamp() * 1000})
        redis_client.hset(keys.scheduler(name), mapping={"name": name, "every": 60_000, "ic": 1})
        found = not_none(schedulers.get(name))
        assert (found.paused_ms, found.data) == (None, {})
        assert name not in {scheduler.id for scheduler in schedulers.list_paused()}
        then(name)
    assert not_none(schedulers.get("a")).data == not_none(schedulers.get("b")).data == {}
    assert (not_none(schedulers.get("b")).paused_ms is None, schedulers.get("c")) == (False, None)
    assert redis_client.zrange(keys.paused_schedulers, 0, -1) == ["b"]


def test_a_resumption_that_cannot_add_the_next_job_leaves_the_scheduler_paused(
    schedulers: JobSchedulers, jobs: Queue, redis_client: redis.Redis
) -> None:
    first = not_none(schedulers.upsert("s", cron="0 0 1 1 *"))
    paused = schedulers.pause("s")
    paused_before(jobs, redis_client, "s", hours=1)
    redis_client.hset(jobs.context.keys.job(first.next_job_id), "name", "in the way")
    with pytest.raises(SchedulerCollisionError, match=first.next_job_id):
        schedulers.resume("s")
    assert not_none(schedulers.get("s")).paused_ms == not_none(paused).paused_ms
    assert schedulers.count() == 0
    redis_client.delete(jobs.context.keys.job(first.next_job_id))
    assert not_none(schedulers.resume("s")) == first


def test_pauses_resumptions_and_updates_at_once_lose_nothing(broker_url: str, jobs: Queue) -> None:
    jobs.schedulers.upsert("s", every=3600, start=FAR)
    start = threading.Barrier(6)

    def change(number: int) -> None:
        with Queue("mail", broker_url) as queue:
            queue.schedulers.count()
            start.wait()
            for _ in range(20):
                if number % 3 == 0:
                    queue.schedulers.pause("s")
                elif number % 3 == 1:
                    queue.schedulers.resume("s")
                else:
                    queue.schedulers.upsert("s", every=3600, start=FAR, data={"n": number})

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(change, range(6)))
    found = not_none(jobs.schedulers.resume("s"))
    assert (found.iterations, found.paused_ms, jobs.schedulers.list_paused()) == (1, None, [])
    assert jobs.get_job_counts()["delayed"] == jobs.schedulers.count() == 1
