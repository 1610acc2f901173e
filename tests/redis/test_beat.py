"""Beat entries of an app become job schedulers; schedulers that other clients created are not changed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import MagicMock

import pytest
import redis

from bulltask import App, crontab
from bulltask.errors import BrokerUnavailableError
from bulltask.events import Bus
from bulltask.queue.sync.schedulers import JobSchedulers
from bulltask.transport.call import QueueKeys
from bulltask.transport.operation import run_sync
from bulltask.transport.scripts.queue import leave_schedule, register_schedule_version
from bulltask.worker.beat import Beat, BeatWorker, Changes, read_entries, reconcile
from bulltask.worker.broker_backoff import ReconnectBackoff

QUEUE = "default"
KEYS = QueueKeys("bull", "{default}", QUEUE)
HOURLY = {"task": "work", "schedule": 3600}
NIGHTLY = {"task": "work", "schedule": crontab(0, 3)}


@pytest.fixture
def shop(broker_url: str) -> Iterator[Callable[..., App]]:
    """Return a function that creates an app named ``shop``, which is closed after the test."""
    apps: list[App] = []

    def create(**settings: Any) -> App:
        apps.append(App("shop", broker_url, **settings))
        return apps[-1]

    yield create
    for app in apps:
        app.close()


@pytest.fixture
def schedulers(broker_url: str) -> Iterator[JobSchedulers]:
    with App("reader", broker_url).queue(QUEUE) as queue:
        yield queue.schedulers


def reconcile_app(url: str, entries: dict[str, Any], name: str = "shop") -> Changes:
    """Reconcile the beat schedule as a worker of this app does when it starts."""
    app = App(name, url, beat_schedule=entries)
    with app._broker.pool.client() as client:
        client.connect()
        changes = run_sync(client, reconcile(KEYS, read_entries(app) or [], name, app._now_ms()))
    app.close()
    return changes


@pytest.mark.every_topology
def test_beat_entries_become_schedulers_with_the_app_name_in_the_template(
    broker_url: str, schedulers: JobSchedulers, redis_client: redis.Redis
) -> None:
    assert reconcile_app(broker_url, {"a": HOURLY, "b": NIGHTLY}) == Changes(added=["a", "b"])
    by_id = {scheduler.id: scheduler for scheduler in schedulers.list()}
    assert (by_id["a"].every_ms, by_id["b"].pattern, by_id["b"].tz) == (3_600_000, "0 3 * * *", "UTC")
    for scheduler in by_id.values():
        assert scheduler.name == "work"
        assert scheduler.opts["bulltask"]["beat"] == "shop"
        job: Any = redis_client.hget(KEYS.job(scheduler.next_job_id), "opts")
        assert json.loads(job)["bulltask"] == scheduler.opts["bulltask"]


def test_an_interval_first_runs_after_one_interval(broker_url: str, schedulers: JobSchedulers) -> None:
    reconcile_app(broker_url, {"a": HOURLY})
    (scheduler,) = schedulers.list()
    assert scheduler.start_ms == scheduler.next_ms
    assert scheduler.next_ms - App("x", broker_url)._now_ms() > 3_500_000


def test_unchanged_beat_entries_are_not_written_again(
    broker_url: str, schedulers: JobSchedulers, redis_client: redis.Redis
) -> None:
    reconcile_app(broker_url, {"a": HOURLY, "b": NIGHTLY})
    before = schedulers.list()
    events = redis_client.xlen(KEYS.events)
    assert reconcile_app(broker_url, {"b": NIGHTLY, "a": HOURLY}) == Changes()
    assert schedulers.list() == before
    assert redis_client.xlen(KEYS.events) == events


def test_changed_beat_entries_are_replaced_and_deleted_entries_removed(
    broker_url: str, schedulers: JobSchedulers
) -> None:
    reconcile_app(broker_url, {"a": HOURLY, "b": NIGHTLY, "c": HOURLY})
    due = schedulers.get("a")
    assert due is not None
    changed = {**HOURLY, "kwargs": {"n": 2}}
    assert reconcile_app(broker_url, {"a": changed, "b": NIGHTLY}) == Changes(changed=["a"], removed=["c"])
    after = schedulers.get("a")
    assert after is not None
    assert (after.data, after.next_ms) == ({"n": 2}, due.next_ms)
    assert {scheduler.id for scheduler in schedulers.list()} == {"a", "b"}
    assert set(reconcile_app(broker_url, {}).removed) == {"a", "b"}
    assert schedulers.count() == 0


def test_an_interval_becomes_a_pattern_and_back(
    broker_url: str, schedulers: JobSchedulers, redis_client: redis.Redis
) -> None:
    reconcile_app(broker_url, {"a": HOURLY})
    assert reconcile_app(broker_url, {"a": NIGHTLY}).changed == ["a"]
    assert reconcile_app(broker_url, {"a": {**HOURLY, "schedule": 7200}}).changed == ["a"]
    (scheduler,) = schedulers.list()
    assert (scheduler.every_ms, scheduler.pattern) == (7_200_000, None)
    assert redis_client.zcard(KEYS.delayed) == 1


@pytest.mark.every_topology
def test_a_paused_beat_entry_stays_paused_until_it_is_resumed_or_deleted(
    broker_url: str, schedulers: JobSchedulers, redis_client: redis.Redis
) -> None:
    reconcile_app(broker_url, {"a": HOURLY, "b": NIGHTLY, "c": HOURLY})
    for name in "abc":
        schedulers.pause(name)
    assert reconcile_app(broker_url, {"a": HOURLY, "b": NIGHTLY, "c": HOURLY}) == Changes()
    changed = {**HOURLY, "kwargs": {"n": 2}}
    assert reconcile_app(broker_url, {"a": changed, "b": NIGHTLY}) == Changes(changed=["a"], removed=["c"])
    assert {scheduler.id: scheduler.data for scheduler in schedulers.list_paused()} == {"a": {"n": 2}, "b": {}}
    assert (schedulers.count(), redis_client.zcard(KEYS.delayed)) == (0, 0)
    assert reconcile_app(broker_url, {"a": NIGHTLY}, name="other").foreign == ["a"]
    resumed = schedulers.resume("a")
    assert resumed is not None
    assert resumed.data == {"n": 2}
    assert reconcile_app(broker_url, {"a": changed, "b": NIGHTLY}) == Changes()


def test_schedulers_of_other_origins_are_not_changed(broker_url: str, schedulers: JobSchedulers) -> None:
    schedulers.upsert("manual", every=3600, name="work")
    reconcile_app(broker_url, {"of-other": HOURLY}, name="other")
    before = schedulers.list()
    entries = {"manual": NIGHTLY, "of-other": NIGHTLY, "mine": NIGHTLY}
    assert reconcile_app(broker_url, entries) == Changes(added=["mine"], foreign=["manual", "of-other"])
    assert [scheduler for scheduler in schedulers.list() if scheduler.id != "mine"] == before
    assert reconcile_app(broker_url, {}) == Changes(removed=["mine"])
    assert schedulers.list() == before


def test_a_scheduler_that_was_recreated_manually_is_not_changed(broker_url: str, schedulers: JobSchedulers) -> None:
    reconcile_app(broker_url, {"a": HOURLY})
    schedulers.upsert("a", every=60, name="other-work")
    assert reconcile_app(broker_url, {"a": HOURLY}) == Changes(foreign=["a"])
    assert reconcile_app(broker_url, {}) == Changes()
    assert schedulers.count() == 1


def test_a_beat_entry_that_fails_does_not_prevent_the_others(
    broker_url: str, schedulers: JobSchedulers, redis_client: redis.Redis
) -> None:
    yearly = {"task": "work", "schedule": "0 0 1 1 *"}
    reconcile_app(broker_url, {"a": yearly})
    scheduler = schedulers.get("a")
    assert scheduler is not None
    redis_client.zrem(KEYS.delayed, scheduler.next_job_id)  # as if it had been promoted and run
    changes = reconcile_app(broker_url, {"a": {**yearly, "kwargs": {"n": 1}}, "b": HOURLY})
    assert changes.added == ["b"]
    assert set(changes.failed) == {"a"}
    assert scheduler.next_job_id in changes.failed["a"]


def test_a_beat_entry_that_never_fires_is_reported(broker_url: str, schedulers: JobSchedulers) -> None:
    never = {"task": "work", "schedule": crontab(0, 0, day_of_month=31, month_of_year="2,4")}
    assert reconcile_app(broker_url, {"a": never}) == Changes(failed={"a": "no time ever matches it"})
    assert schedulers.count() == 0


def test_schedulers_with_malformed_templates_are_not_changed(broker_url: str, redis_client: redis.Redis) -> None:
    for number, text in enumerate(["", "{", "[]", '{"bulltask":5}', '{"bulltask":{"beat":["shop"]}}']):
        redis_client.zadd(KEYS.repeat, {f"s{number}": 1})
        redis_client.hset(KEYS.scheduler(f"s{number}"), "opts", text)
    redis_client.zadd(KEYS.repeat, {"no-hash": 1})
    assert reconcile_app(broker_url, {}) == Changes()
    assert redis_client.zcard(KEYS.repeat) == 6


def test_beat_entries_are_reconciled_among_thousands_of_schedulers(broker_url: str, redis_client: redis.Redis) -> None:
    redis_client.zadd(KEYS.repeat, {f"user-{number}": number for number in range(2_500)})
    assert reconcile_app(broker_url, {"a": HOURLY}).added == ["a"]
    assert reconcile_app(broker_url, {}).removed == ["a"]


def test_a_worker_reconciles_once_and_only_warns_if_beat_schedule_is_not_set(
    shop: Callable[..., App], schedulers: JobSchedulers
) -> None:
    app, bus = shop(beat_schedule={"a": HOURLY}), Bus()
    logger = MagicMock()
    with app._broker.pool.client() as client:
        client.connect()
        unused: Any = None

        def start(entries: Any) -> Beat:
            beat = Beat(app, entries, client, ReconnectBackoff(bus, app._config), logger)
            assert beat.interval_ms < 60_000
            beat.tick(0, 0)
            beat._client = unused
            beat.tick(0, 0)
            return beat

        start(read_entries(app))
        assert [scheduler.id for scheduler in schedulers.list()] == ["a"]
        start(None).tick(0, 0)
        logger.warning.assert_called_once()
        assert [scheduler.id for scheduler in schedulers.list()] == ["a"]
        start([])
        assert schedulers.list() == []


def test_a_schedule_that_could_not_be_stored_during_an_outage_is_stored_after_it(
    shop: Callable[..., App], schedulers: JobSchedulers, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, bus = shop(beat_schedule={"a": HOURLY}), Bus()
    with app._broker.pool.client() as client:
        client.connect()
        beat = Beat(app, read_entries(app), client, ReconnectBackoff(bus, app._config), MagicMock())
        with monkeypatch.context() as outage:
            outage.setattr("bulltask.worker.beat.reconcile", MagicMock(side_effect=BrokerUnavailableError("gone")))
            beat.tick(0, 0)
        assert schedulers.list() == []
        beat.tick(1_000, 0)
    assert [scheduler.id for scheduler in schedulers.list()] == ["a"]


@pytest.mark.parametrize("entry", [{"task": "work", "schedule": 60}, {"task": "work", "schedule": crontab()}])
def test_a_schedule_continues_after_the_clock_has_gone_back_by_an_hour(
    shop: Callable[..., App], schedulers: JobSchedulers, entry: dict[str, Any]
) -> None:
    app = shop(beat_schedule={"a": entry})
    with app._broker.pool.client() as client:
        client.connect()
        now_ms = app._now_ms()
        for earlier_ms, changed in ((-3_600_000, []), (0, ["a"]), (0, []), (30_000, [])):  # an hour ahead, then right
            operation = reconcile(KEYS, read_entries(app) or [], "shop", now_ms - earlier_ms)
            assert run_sync(client, operation).changed == changed
            (scheduler,) = schedulers.list()
            assert scheduler.next_ms <= now_ms - min(0, earlier_ms) + 61_000


def test_a_queue_with_many_schedulers_is_checked_in_several_ticks_while_the_worker_stays_registered(
    shop: Callable[..., App], redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bulltask.worker.beat._RESTORE_MS", -1)
    redis_client.zadd(KEYS.repeat, {f"user-{number}": number for number in range(2_500)})
    app, logger = shop(beat_schedule={"a": HOURLY}), MagicMock()
    with app._broker.pool.client() as client:
        client.connect()
        backoff = ReconnectBackoff(Bus(), app._config)
        beat = Beat(app, read_entries(app), client, backoff, logger, BeatWorker("w", [QUEUE]))
        beat.tick(0, 0)
        lost: Any = redis_client.zrange(KEYS.delayed, 0, 0)
        redis_client.zrem(KEYS.delayed, *lost)
        seen = []
        for second in range(1, 70):
            redis_client.hdel("bulltask:schedule-versions:bull:shop", "worker:w")
            beat.tick(second * 1000, 0)
            seen.append(bool(redis_client.hget("bulltask:schedule-versions:bull:shop", "worker:w")))
        assert seen.count(True) == 1
        beat.check_now()
        for second in range(70, 80):
            beat.tick(second * 1000, 0)
    logger.warning.assert_called_with("Missing jobs of schedules added again", queue=QUEUE, schedulers=["a"])
    assert redis_client.zrange(KEYS.delayed, 0, -1) == lost


def test_an_entry_in_another_queue_is_another_version(shop: Callable[..., App], redis_client: redis.Redis) -> None:
    other = {**HOURLY, "options": {"queue": "other"}}
    apps = [shop(beat_schedule={"a": entry}) for entry in (HOURLY, other)]
    with apps[0]._broker.pool.client() as client:
        client.connect()
        beats = [
            Beat(app, read_entries(app), client, ReconnectBackoff(Bus(), app._config), MagicMock(), BeatWorker(name))
            for app, name in zip(apps, ("old", "new"), strict=True)
        ]
        for beat in (*beats, beats[0]):
            beat.check_now()
            beat.tick(0, 0)
    assert redis_client.zcard(KEYS.repeat) == 0
    assert redis_client.zcard(QueueKeys("bull", "{other}", "other").repeat) == 1


def test_old_workers_change_nothing_while_new_ones_run_whatever_restarts(
    shop: Callable[..., App], redis_client: redis.Redis, rng: random.Random
) -> None:
    with shop()._broker.pool.client() as client:
        client.connect()
        for _ in range(20):
            redis_client.delete("bulltask:schedule-versions:bull:shop")
            now_ms, numbers = 1_000_000, dict[str, int]()  # of live workers

            def register(worker: str, now_ms: int, numbers: dict[str, int]) -> str:
                call = register_schedule_version("bull", "shop", worker, worker[:3], numbers.get(worker, 0), now_ms)
                state = client.run(call)
                numbers[worker] = state.number
                assert set(state.workers) == {name for name in numbers if name[:3] == state.in_effect}
                return state.in_effect

            assert {register(worker, now_ms, numbers) for worker in ("old1", "old2")} == {"old"}
            assert register("new1", now_ms, numbers) == "new"
            for _ in range(40):
                now_ms += 1_000
                worker = rng.choice(["old1", "old2", "new1", "new2"])
                if rng.random() < 0.4 and worker in numbers:
                    client.run(leave_schedule("bull", "shop", worker))
                    del numbers[worker]
                else:
                    in_effect = register(worker, now_ms, numbers)
                    assert in_effect == ("new" if any(name.startswith("new") for name in numbers) else "old")
            for worker in [name for name in numbers if name.startswith("old")]:
                client.run(leave_schedule("bull", "shop", worker))
                del numbers[worker]
            assert register("new1", now_ms, numbers) == "new"
            # The workers were killed: they count as dead after a while, and the deployment is rolled back.
            assert register("old1", now_ms + 1_000, numbers) == "new"
            numbers = {"old1": numbers["old1"]}
            assert register("old1", now_ms + 200_000, numbers) == "old"
