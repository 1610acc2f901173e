"""Tests of BullMQ's job options: how each is stored, invalid values, and the five deduplication modes."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import redis

from bulltask import App
from bulltask.errors import BulltaskError, ConfigError, EncodeError, InvalidNameError, PayloadTooLargeError
from bulltask.jobs.backoff import Backoff
from bulltask.jobs.job import Deduplication
from bulltask.queue import FlowJob, Queue
from bulltask.testing.worker import wait_until
from tests.support.manual_worker import ManualWorker

DEFAULTS = {
    "attempts": 3,
    "backoff": {"type": "exponential", "delay": 1_000, "jitter": 0.2, "maxDelay": 3_600_000},
    "removeOnComplete": {"age": 86_400},
    "bulltask": {"v": 1},
}
"""The options that are stored by default; Node stores only ``attempts: 0``."""

COMMON: list[tuple[dict[str, Any], dict[str, Any]]] = [
    # options of both Queue.add and tasks
    ({"priority": 7}, {"priority": 7}),
    ({"lifo": True}, {"lifo": True}),
    ({"remove_on_complete": True}, {"removeOnComplete": True}),
    ({"remove_on_complete": False}, {"removeOnComplete": False}),
    ({"remove_on_complete": 100}, {"removeOnComplete": 100}),
    ({"remove_on_fail": {"age": timedelta(hours=1), "count": 5}}, {"removeOnFail": {"age": 3_600, "count": 5}}),
    ({"remove_on_fail": {"age": 0.5}}, {"removeOnFail": {"age": 1}}),
    ({"keep_logs": 20}, {"kl": 20}),
    ({"stack_trace_limit": 0}, {"stackTraceLimit": 0}),
    ({"size_limit": 1_000}, {"sizeLimit": 1_000}),
    ({"backoff": 5}, {"backoff": {"type": "fixed", "delay": 5_000}}),
    ({"backoff": {"type": "exponential", "delay": 0.5}}, {"backoff": {"type": "exponential", "delay": 500}}),
    (
        {"backoff": {"type": "fixed", "delay": 1, "jitter": 0.5, "max_delay": 60}},
        {"backoff": {"type": "fixed", "delay": 1_000, "jitter": 0.5, "maxDelay": 60_000}},
    ),
    (
        {"backoff": Backoff("exponential", 200, 0.1, None)},
        {"backoff": {"type": "exponential", "delay": 200, "jitter": 0.1}},
    ),
    ({"deduplication": "x"}, {"de": {"id": "x"}}),
    ({"deduplication": {"id": "x", "ttl": 5}}, {"de": {"id": "x", "ttl": 5_000}}),
    (
        {"deduplication": Deduplication("x", timedelta(seconds=5), extend=True, replace=True)},
        {"de": {"id": "x", "ttl": 5_000, "extend": True, "replace": True}},
    ),
    ({"fail_parent_on_failure": True}, {"fpof": True}),
    ({"continue_parent_on_failure": True}, {"cpof": True}),
    ({"ignore_dependency_on_failure": True, "fail_parent_on_failure": False}, {"idof": True}),
    ({"remove_dependency_on_failure": True}, {"rdof": True}),
    ({"telemetry_metadata": '{"traceparent":"00-1"}'}, {"tm": '{"traceparent":"00-1"}'}),
    ({"omit_context": True}, {"omc": True}),
    ({"timestamp": datetime(2026, 1, 1, tzinfo=UTC)}, {"timestamp": 1_767_225_600_000}),
    ({"timestamp": 1_767_225_600}, {"timestamp": 1_767_225_600_000}),
    ({"headers": {"a": [1]}}, {"bulltask": {"v": 1, "headers": '{"a":[1]}'}}),
]
ADD_ONLY: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"attempts": 0}, {"attempts": 0}),
    ({"attempts": 9}, {"attempts": 9}),
    ({"delay": timedelta(seconds=5)}, {"delay": 5_000}),
    ({"delay": 0}, {}),
]
CALL_ONLY: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"max_retries": 8}, {"attempts": 9}),
    ({"countdown": 5}, {"delay": 5_000}),
]


def stored(redis_client: redis.Redis, job_id: str) -> dict[str, Any]:
    text: Any = redis_client.hget(f"bull:{{mail}}:{job_id}", "opts")
    opts: dict[str, Any] = json.loads(text)
    opts["bulltask"].pop("sender", None)
    return opts


@pytest.mark.parametrize(("given", "wire"), [*COMMON, *ADD_ONLY])
def test_an_option_of_add_is_stored_under_bullmqs_name(
    queue: Queue, redis_client: redis.Redis, given: dict[str, Any], wire: dict[str, Any]
) -> None:
    job = queue.add("n", {}, **given)  # type: ignore[typeddict-item, unused-ignore]
    assert stored(redis_client, job.id) == {**DEFAULTS, **wire}
    assert job.opts == {**DEFAULTS, **wire}


@pytest.mark.parametrize(("given", "wire"), [*COMMON, *CALL_ONLY])
def test_an_option_of_a_call_is_stored_under_bullmqs_name(
    app: App, redis_client: redis.Redis, given: dict[str, Any], wire: dict[str, Any]
) -> None:
    sent = app.send_task("n", queue="mail", **given)
    assert stored(redis_client, sent.id) == {**DEFAULTS, **wire}


@pytest.mark.parametrize(("given", "wire"), COMMON)
def test_an_option_of_a_task_is_stored_under_bullmqs_name(
    app: App, redis_client: redis.Redis, given: dict[str, Any], wire: dict[str, Any]
) -> None:
    if given.keys() & {"backoff", "deduplication", "telemetry_metadata", "omit_context", "timestamp", "headers"}:
        with pytest.raises(TypeError, match="unknown task option"):
            app.task(name="n", **given)  # only a call has these options
        return
    task = app.task(name="n", queue="mail", **given)(_anything)
    assert stored(redis_client, task.delay().id) == {**DEFAULTS, **wire}


def _anything() -> None: ...


def test_backoff_none_stores_no_backoff(queue: Queue, redis_client: redis.Redis) -> None:
    assert "backoff" not in stored(redis_client, queue.add("n", backoff=None).id)


def test_a_call_option_overrides_the_same_task_option(app: App, redis_client: redis.Redis) -> None:
    task = app.task(name="n", queue="mail", keep_logs=5, remove_on_fail=3)(_anything)
    opts = stored(redis_client, task.apply_async(keep_logs=9).id)
    assert (opts["kl"], opts["removeOnFail"]) == (9, 3)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"attempts": -1}, ConfigError, "attempts"),
        ({"attempts": 2.5}, ConfigError, "attempts"),
        ({"delay": -1}, ConfigError, "delay"),
        ({"priority": 2**21}, ConfigError, "priority"),
        ({"priority": 1.5}, ConfigError, "priority"),
        ({"lifo": 1}, ConfigError, "lifo must be true or false"),
        ({"backoff": {"type": "fixed", "delay": 1, "jitter": 2}}, ConfigError, "jitter must be a number from 0 to 1"),
        ({"backoff": {"delay": 1}}, ConfigError, r"backoff\.type"),
        ({"backoff": {"type": "fixed", "delay_ms": 1}}, ConfigError, "backoff has no key 'delay_ms'"),
        ({"backoff": -1}, ConfigError, "backoff"),
        ({"backoff": {"type": "Fixed", "delay": 1}}, ConfigError, "type 'Fixed'.*; did you mean 'fixed'"),
        ({"backoff": {"type": "mine"}}, ConfigError, "unknown backoff type 'mine': use fixed, exponential"),
        ({"backoff": Backoff("mine")}, ConfigError, "unknown backoff type 'mine'"),
        ({"remove_on_complete": {"age": 1, "limit": 2}}, ConfigError, "has no key 'limit'"),
        ({"remove_on_complete": -2}, ConfigError, "remove_on_complete"),
        ({"remove_on_fail": "yes"}, ConfigError, "remove_on_fail"),
        ({"keep_logs": -1}, ConfigError, "keep_logs"),
        ({"stack_trace_limit": 1.5}, ConfigError, "stack_trace_limit"),
        ({"size_limit": 0}, ConfigError, "size_limit"),
        ({"size_limit": 1}, PayloadTooLargeError, "size_limit of 1"),
        ({"deduplication": ""}, ConfigError, r"deduplication\.id must be"),
        ({"deduplication": {"ttl": 5}}, ConfigError, r"deduplication\.id must be"),
        ({"deduplication": {"id": "x", "ttl": -5}}, ConfigError, r"deduplication\.ttl"),
        ({"deduplication": {"id": "x", "keepLastIfActive": True}}, ConfigError, "has no key"),
        ({"deduplication": {"id": "x", "extend": 1}}, ConfigError, "extend"),
        (
            {"fail_parent_on_failure": True, "remove_dependency_on_failure": True},
            ConfigError,
            "use only one of the options fail_parent_on_failure, remove_dependency_on_failure",
        ),
        ({"omit_context": "no"}, ConfigError, "omit_context"),
        ({"telemetry_metadata": {}}, ConfigError, "telemetry_metadata"),
        ({"timestamp": "now"}, ConfigError, "timestamp"),
        ({"parent": "p"}, ConfigError, "parent must be a job"),
        ({"parent": {"id": "p"}}, ConfigError, "parent must be a job"),
        ({"job_id": "17"}, InvalidNameError, "is a number"),
        ({"job_id": "0"}, InvalidNameError, "is a number"),
        ({"job_id": "0:a:b"}, InvalidNameError, "':'"),
        ({"job_id": "a:b"}, InvalidNameError, "':'"),
        ({"job_id": "meta"}, InvalidNameError, "queue's own keys"),
        ({"headers": {"x": b""}}, EncodeError, "headers"),
        ({"expires": []}, ConfigError, "expires"),
    ],
)
def test_an_invalid_option_raises_an_error_before_anything_is_sent(
    queue: Queue, redis_client: redis.Redis, given: dict[str, Any], error: type[BulltaskError], message: str
) -> None:
    with pytest.raises(error, match=message):
        queue.add("n", {"text": "a long one"}, **given)  # type: ignore[typeddict-item, unused-ignore]
    assert redis_client.dbsize() == 0


@pytest.mark.parametrize(
    "send",
    [
        lambda app, given: app.send_task("n", **given),
        lambda app, given: app.flows().add(FlowJob("n", "mail", options=given)),
        lambda app, given: app.queue("mail").schedulers.upsert("s", name="n", options=given, every=60),
        lambda app, given: app.queue("mail", default_job_options=given).add("n"),
    ],
    ids=["call", "flow", "scheduler", "default"],
)
def test_an_unknown_backoff_type_is_rejected_by_every_method_that_sends_a_job(
    app: App, redis_client: redis.Redis, send: Callable[[App, Any], object]
) -> None:
    with pytest.raises(ConfigError, match="unknown backoff type 'Fixed'"):
        send(app, {"backoff": {"type": "Fixed", "delay": 1}})
    assert redis_client.dbsize() == 0


def test_a_registered_backoff_strategy_is_stored_by_its_name(broker_url: str, redis_client: redis.Redis) -> None:
    app = App("shop", broker_url, backoff_strategies=["mine", "other"])
    for backoff in ({"type": "mine"}, Backoff("other", 5, 0.0, None)):
        job = app.queue("mail").add("n", backoff=backoff)
        assert stored(redis_client, job.id)["backoff"]["type"] in {"mine", "other"}
        sent = app.send_task("n", queue="mail", backoff=backoff)
        assert stored(redis_client, sent.id)["backoff"]["type"] in {"mine", "other"}
    app.close()


@pytest.mark.parametrize("backoff", [3_601, {"type": "exponential", "delay": timedelta(hours=2)}])
def test_a_backoff_of_more_than_an_hour_is_sent_with_a_warning(queue: Queue, backoff: Any) -> None:
    with pytest.warns(UserWarning, match=r"backoff\.delay is (3601|7200) s, more than an hour"):
        queue.add("n", backoff=backoff)
    queue.add("n", backoff=3_600)  # pytest turns warnings into errors


@pytest.mark.parametrize("name", ["retry_backoff", "default_retry_delay"])
def test_the_warning_about_a_long_backoff_names_the_line_of_the_task(app: App, name: str) -> None:
    with pytest.warns(UserWarning, match=f"{name} is 7200 s") as warned:
        app.task(name="n", **{name: 7_200})(_anything)  # type: ignore[call-overload]
    assert warned[0].filename == __file__


def test_a_job_id_may_have_two_colons_as_in_bullmq(queue: Queue) -> None:
    assert queue.add("n", job_id="repeat:mine:1").id == "repeat:mine:1"


def test_a_delay_counts_from_the_timestamp_of_the_job(queue: Queue, manual_worker: ManualWorker) -> None:
    sent = queue.add("n", delay=60, timestamp=queue.context.now_ms() / 1000 - 61)
    assert manual_worker.acquire() == sent.id


# ---- deduplication --------------------------------------------------------------------------------------------------


def stored_data(queue: Queue) -> list[Any]:
    return sorted(job.data for job in queue.get_jobs())


def test_a_job_is_deduplicated_until_the_first_job_has_finished(queue: Queue, manual_worker: ManualWorker) -> None:
    first = queue.add("n", 1, deduplication="x")
    assert queue.add("n", 2, deduplication="x").id == first.id
    manual_worker.acquire()
    assert queue.add("n", 3, deduplication="x").id == first.id
    manual_worker.finish(first.id)
    assert queue.add("n", 4, deduplication="x").id != first.id
    assert stored_data(queue) == [1, 4]


def test_a_job_is_deduplicated_for_the_ttl(
    queue: Queue, manual_worker: ManualWorker, redis_client: redis.Redis
) -> None:
    mode = Deduplication("x", ttl=60)
    first = queue.add("n", 1, deduplication=mode)
    manual_worker.complete()
    assert queue.add("n", 2, deduplication=mode).id == first.id, "even though the first job has completed"
    redis_client.pexpire("bull:{mail}:de:x", 1)
    wait_until(lambda: not redis_client.exists("bull:{mail}:de:x"), 5.0, "the end of the ttl")
    assert queue.add("n", 3, deduplication=mode).id != first.id


def test_each_duplicate_extends_the_ttl(queue: Queue, redis_client: redis.Redis) -> None:
    mode = Deduplication("x", ttl=60, extend=True)
    first = queue.add("n", 1, deduplication=mode)
    redis_client.pexpire("bull:{mail}:de:x", 5_000)
    assert queue.add("n", 2, deduplication=mode).id == first.id
    left: Any = redis_client.pttl("bull:{mail}:de:x")
    assert left > 50_000


def test_a_debounce_keeps_the_newest_job(queue: Queue) -> None:
    mode = Deduplication("x", ttl=60, extend=True, replace=True)
    first = queue.add("n", 1, deduplication=mode, delay=60)
    second = queue.add("n", 2, deduplication=mode, delay=60)
    assert second.id != first.id
    assert stored_data(queue) == [2]


def test_replace_replaces_a_delayed_job(queue: Queue) -> None:
    mode = Deduplication("x", replace=True)
    first = queue.add("n", 1, deduplication=mode, delay=60)
    second = queue.add("n", 2, deduplication=mode, delay=60)
    second.promote()
    assert queue.add("n", 3, deduplication=mode, delay=60).id == second.id, "the second job is not delayed any more"
    assert stored_data(queue) == [2]
    assert first.id != second.id


def test_a_deduplicated_call_returns_the_result_of_the_first_call(app: App) -> None:
    first = app.send_task("n", deduplication="x")
    assert app.send_task("n", deduplication="x") == first
    task = app.task(name="n")(_anything)
    assert task.apply_async(deduplication="x") == first


@pytest.mark.parametrize(
    "options", [{}, {"delay": 60}, {"priority": 2}, {"deduplication": Deduplication("d", replace=True), "delay": 60}]
)
def test_a_deduplication_id_whose_owner_no_longer_exists_is_free(
    queue: Queue, redis_client: redis.Redis, options: dict[str, Any]
) -> None:
    lost = queue.add("lost", deduplication="d")
    redis_client.delete(lost.key)
    job = queue.add("new", **{"deduplication": "d", **options})
    assert job.id != lost.id
    assert queue.get_job(job.id) is not None
    assert queue.get_deduplication_job_id("d") == job.id
    assert queue.add("duplicate", deduplication="d").id == job.id


def test_a_throttled_deduplication_id_outlives_its_owner(queue: Queue, redis_client: redis.Redis) -> None:
    throttle = Deduplication("d", ttl=60)
    first = queue.add("first", deduplication=throttle)
    redis_client.delete(first.key)  # as a job that has finished may be removed before the time is over
    assert queue.add("second", deduplication=throttle).id == first.id
