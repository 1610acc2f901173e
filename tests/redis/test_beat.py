"""Entries of code become job schedulers, and those of others stay."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from bulltask import App, crontab
from bulltask.queue.sync.schedulers import JobSchedulers
from bulltask.transport.keys import QueueKeys
from bulltask.transport.operation import run_sync
from bulltask.worker.beat import Changes, reconcile
from bulltask.worker.beat_entries import read_entries

QUEUE = "default"
KEYS = QueueKeys("bull", "{default}", QUEUE)
HOURLY = {"task": "work", "schedule": 3600}
NIGHTLY = {"task": "work", "schedule": crontab(0, 3)}


@pytest.fixture
def schedulers(broker_url: str) -> Iterator[JobSchedulers]:
    with App("looks", broker_url).queue(QUEUE) as queue:
        yield queue.schedulers


def bring(url: str, entries: dict[str, Any], name: str = "shop") -> Changes:
    """What a worker of this app does at its start."""
    app = App(name, url, beat_schedule=entries)
    with app.broker.pool.client() as client:
        client.connect()
        return run_sync(client, reconcile(KEYS, read_entries(app) or [], name, app.now_ms()))


def test_entries_become_schedulers_with_their_owner_in_the_template(
    broker_url: str, schedulers: JobSchedulers, redis_client: redis.Redis
) -> None:
    assert bring(broker_url, {"a": HOURLY, "b": NIGHTLY}) == Changes(added=["a", "b"])
    found = {it.id: it for it in schedulers.list()}
    assert (found["a"].every_ms, found["b"].pattern, found["b"].tz) == (3_600_000, "0 3 * * *", "UTC")
    for scheduler in found.values():
        assert scheduler.name == "work"
        assert scheduler.opts["bulltask"]["beat"] == "shop"
        job: Any = redis_client.hget(KEYS.job(scheduler.next_job_id), "opts")
        assert json.loads(job)["bulltask"] == scheduler.opts["bulltask"]


def test_an_interval_runs_for_the_first_time_when_it_is_over(broker_url: str, schedulers: JobSchedulers) -> None:
    bring(broker_url, {"a": HOURLY})
    (scheduler,) = schedulers.list()
    assert scheduler.start_ms == scheduler.next_ms
    assert scheduler.next_ms - App("x", broker_url).now_ms() > 3_500_000


def test_what_is_unchanged_is_left_alone(broker_url: str, schedulers: JobSchedulers, redis_client: redis.Redis) -> None:
    bring(broker_url, {"a": HOURLY, "b": NIGHTLY})
    before = schedulers.list()
    events = redis_client.xlen(KEYS.events)
    assert bring(broker_url, {"b": NIGHTLY, "a": HOURLY}) == Changes()
    assert schedulers.list() == before
    assert redis_client.xlen(KEYS.events) == events


def test_what_is_changed_is_replaced_and_what_is_gone_from_code_is_removed(
    broker_url: str, schedulers: JobSchedulers
) -> None:
    bring(broker_url, {"a": HOURLY, "b": NIGHTLY, "c": HOURLY})
    due = schedulers.get("a")
    assert due is not None
    changed = {**HOURLY, "kwargs": {"n": 2}}
    assert bring(broker_url, {"a": changed, "b": NIGHTLY}) == Changes(changed=["a"], removed=["c"])
    after = schedulers.get("a")
    assert after is not None
    assert (after.data, after.next_ms) == ({"n": 2}, due.next_ms)
    assert {it.id for it in schedulers.list()} == {"a", "b"}
    assert set(bring(broker_url, {}).removed) == {"a", "b"}
    assert schedulers.count() == 0


def test_an_interval_becomes_a_pattern_and_back(
    broker_url: str, schedulers: JobSchedulers, redis_client: redis.Redis
) -> None:
    bring(broker_url, {"a": HOURLY})
    assert bring(broker_url, {"a": NIGHTLY}).changed == ["a"]
    assert bring(broker_url, {"a": {**HOURLY, "schedule": 7200}}).changed == ["a"]
    (scheduler,) = schedulers.list()
    assert (scheduler.every_ms, scheduler.pattern) == (7_200_000, None)
    assert redis_client.zcard(KEYS.delayed) == 1


def test_schedulers_of_others_stay_and_are_not_taken_over(broker_url: str, schedulers: JobSchedulers) -> None:
    schedulers.upsert("by-hand", every=3600, name="work")
    bring(broker_url, {"theirs": HOURLY}, name="other")
    before = schedulers.list()
    mine = {"by-hand": NIGHTLY, "theirs": NIGHTLY, "mine": NIGHTLY}
    assert bring(broker_url, mine) == Changes(added=["mine"], foreign=["by-hand", "theirs"])
    assert [it for it in schedulers.list() if it.id != "mine"] == before
    assert bring(broker_url, {}) == Changes(removed=["mine"])
    assert schedulers.list() == before


def test_a_scheduler_that_somebody_made_anew_under_the_same_id_is_theirs(
    broker_url: str, schedulers: JobSchedulers
) -> None:
    bring(broker_url, {"a": HOURLY})
    schedulers.upsert("a", every=60, name="other-work")
    assert bring(broker_url, {"a": HOURLY}) == Changes(foreign=["a"])
    assert bring(broker_url, {}) == Changes()
    assert schedulers.count() == 1


def test_one_entry_that_redis_refuses_does_not_keep_the_others_away(
    broker_url: str, schedulers: JobSchedulers, redis_client: redis.Redis
) -> None:
    yearly = {"task": "work", "schedule": "0 0 1 1 *"}
    bring(broker_url, {"a": yearly})
    scheduler = schedulers.get("a")
    assert scheduler is not None
    redis_client.zrem(KEYS.delayed, scheduler.next_job_id)  # it has run ahead of its time
    changes = bring(broker_url, {"a": {**yearly, "kwargs": {"n": 1}}, "b": HOURLY})
    assert changes.added == ["b"]
    assert set(changes.failed) == {"a"}
    assert scheduler.next_job_id in changes.failed["a"]


def test_an_entry_that_never_fires_is_told_of(broker_url: str, schedulers: JobSchedulers) -> None:
    never = {"task": "work", "schedule": crontab(0, 0, day_of_month=31, month_of_year="2,4")}
    assert bring(broker_url, {"a": never}) == Changes(failed={"a": "the schedule never fires"})
    assert schedulers.count() == 0


def test_templates_that_cannot_be_read_are_nobodys(broker_url: str, redis_client: redis.Redis) -> None:
    for number, text in enumerate(["", "{", "[]", '{"bulltask":5}', '{"bulltask":{"beat":["shop"]}}']):
        redis_client.zadd(KEYS.repeat, {f"s{number}": 1})
        redis_client.hset(KEYS.scheduler(f"s{number}"), "opts", text)
    redis_client.zadd(KEYS.repeat, {"no-hash": 1})
    assert bring(broker_url, {}) == Changes()
    assert redis_client.zcard(KEYS.repeat) == 6


def test_thousands_of_others_schedulers_are_no_trouble(broker_url: str, redis_client: redis.Redis) -> None:
    redis_client.zadd(KEYS.repeat, {f"user-{number}": number for number in range(2_500)})
    assert bring(broker_url, {"a": HOURLY}).added == ["a"]
    assert bring(broker_url, {}).removed == ["a"]
