"""Methods that exist in a sync and an asyncio form return and do the same in both.

A method that is added to one of these classes needs a scenario in this module: tests compare the tables with the
classes.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Final

import pytest

from bulltask.queue import (
    AsyncBulkChange,
    AsyncFlowProducer,
    AsyncJob,
    AsyncQueue,
    AsyncQueueEvents,
    BulkChange,
    FlowJob,
    FlowProducer,
    Job,
    Queue,
    QueueEvents,
)
from bulltask.queue.aio.repeatables import AsyncRepeatables
from bulltask.queue.aio.schedulers import AsyncJobSchedulers
from bulltask.queue.sync.repeatables import Repeatables
from bulltask.queue.sync.schedulers import JobSchedulers
from bulltask.result import AsyncResult
from tests.support.api_forms import HOUR_MS, START_MS, ApiForm, AwaitedResult

pytestmark = pytest.mark.redis

Scenario = Callable[[ApiForm], Any]
TWINS: Final[dict[str, tuple[type, type]]] = {
    kind.__name__: (kind, twin)
    for kind, twin in [
        (Queue, AsyncQueue),
        (Job, AsyncJob),
        (FlowProducer, AsyncFlowProducer),
        (JobSchedulers, AsyncJobSchedulers),
        (Repeatables, AsyncRepeatables),
        (BulkChange, AsyncBulkChange),
        (QueueEvents, AsyncQueueEvents),
    ]
}
HOUR: Final = HOUR_MS // 1000


def after(*first: Scenario, then: Scenario) -> Scenario:
    """Run some scenarios and return the result of the last."""

    def run(side: ApiForm) -> Any:
        for scenario in first:
            scenario(side)
        return then(side)

    return run


def add_two(side: ApiForm) -> None:
    side.add()
    side.add(priority=1)


def acquire_job(side: ApiForm) -> Job:
    side.add()
    return side.acquire()


def pending_dependencies(side: ApiForm) -> Any:
    return side.queue.get_dependencies(side.add_flow().job.id, "pending")


def fetch_next(side: ApiForm) -> Any:
    side.add()
    job = side.queue.get_next_job("t", timeout=1, lock_duration=200, worker="me")
    return job and [job, job.token, job.processed_by]


def check_stalled_job(side: ApiForm) -> Any:
    side.add()
    side.acquire()
    side.queue.check_stalled()
    side.redis.delete(side.key("stalled-check"), side.key(f"{side.ids()[0]}:lock"))
    return side.queue.check_stalled(0)


def revoke_jobs(side: ApiForm) -> Any:
    job = acquire_job(side)
    answers = [side.queue.revoke(job.id), side.queue.revoke(job.id, terminate=True)]
    return [*answers, side.queue.revoke(side.add(priority=1).id), side.queue.revoke("gone")]


def read_metrics(side: ApiForm) -> Any:
    side.redis.hset(side.key("metrics:completed"), mapping={"count": 3, "prevTS": START_MS, "prevCount": 2})
    side.redis.rpush(side.key("metrics:completed:data"), 2, 1)
    return side.queue.get_metrics("completed", 1, 1)


def clean_completed(side: ApiForm) -> Any:
    side.add_completed()
    side.now_ms += 10_000
    side.add_completed()
    return side.queue.clean(5, 0, "completed")


def reach_concurrency(side: ApiForm) -> Any:
    add_two(side)
    side.queue.set_global_concurrency(1)
    side.acquire()
    return side.queue.is_maxed()


def limit_rate(side: ApiForm) -> Any:
    side.queue.rate_limit(100)
    return 0 < side.queue.get_rate_limit_ttl(1) <= 100


def with_worker(count: Callable[[ApiForm], Any]) -> Scenario:
    def run(side: ApiForm) -> Any:
        side.connect_worker("mine")
        return count(side)

    return run


def add_events(side: ApiForm) -> None:
    for _ in range(400):
        side.redis.xadd(side.key("events"), {"event": "mine"})


def list_listeners(side: ApiForm) -> Any:
    side.events().open()
    return [client.raw_name.rpartition(":")[2] for client in side.queue.get_queue_events()]


QUEUE: Final[dict[str, tuple[Scenario, Any]]] = {
    "add": (lambda s: s.queue.add("a", {"n": 1}, priority=2, delay=HOUR), "#1"),
    "add_bulk": (
        lambda s: s.queue.add_bulk([{"name": "a", "options": {"lifo": True}}, {"name": "b", "data": [1]}]),
        ["#1", "#2"],
    ),
    "add_job_log": (lambda s: s.queue.add_job_log(s.add().id, "line", 5), 1),
    "bulk": (after(lambda s: s.add_failed(), then=lambda s: s.queue.bulk("retry").run()), 1),
    "check_stalled": (check_stalled_job, ["#1"]),
    "clean": (clean_completed, ["#1"]),
    "close": (after(add_two, lambda s: s.queue.close(), then=lambda s: s.queue.count()), 2),
    "count": (after(add_two, then=lambda s: s.queue.count()), 2),
    "drain": (after(add_two, lambda s: s.add(delay=HOUR), then=lambda s: s.queue.drain(delayed=True)), None),
    "export_prometheus_metrics": (
        after(
            add_two, then=lambda s: 'state="waiting", env="x"} 1\n' in s.queue.export_prometheus_metrics({"env": "x"})
        ),
        True,
    ),
    "get_counts_per_priority": (after(add_two, then=lambda s: s.queue.get_counts_per_priority([0, 1])), {0: 1, 1: 1}),
    "get_deduplication_job_id": (
        after(lambda s: s.add(deduplication="d"), then=lambda s: s.queue.get_deduplication_job_id("d")),
        "#1",
    ),
    "get_dependencies": (pending_dependencies, {"items": {"Q:#2": None}, "total": 1}),
    "get_global_concurrency": (
        after(lambda s: s.queue.set_global_concurrency(3), then=lambda s: s.queue.get_global_concurrency()),
        3,
    ),
    "get_global_rate_limit": (
        after(lambda s: s.queue.set_global_rate_limit(2, 5), then=lambda s: s.queue.get_global_rate_limit()),
        {"max": 2, "duration": 5.0},
    ),
    "get_job": (lambda s: s.queue.get_job(s.add().id), "#1"),
    "get_job_counts": (after(add_two, then=lambda s: s.queue.get_job_counts("prioritized")), {"prioritized": 1}),
    "get_job_ids": (after(add_two, add_two, then=lambda s: s.queue.get_job_ids("waiting", 0, 0, asc=True)), ["#1"]),
    "explain": (after(lambda s: s.add(), then=lambda s: s.queue.explain().codes), ["no-worker", "clocks-apart"]),
    "get_job_logs": (
        after(lambda s: s.add().log("one"), then=lambda s: s.queue.get_job_logs(s.ids()[0], 0, 0, asc=False)),
        {"lines": ["one"], "count": 1},
    ),
    "get_job_state": (lambda s: s.queue.get_job_state(s.add().id), "waiting"),
    "get_jobs": (
        after(add_two, add_two, then=lambda s: s.queue.get_jobs(["waiting", "prioritized"], 0, 0, asc=True)),
        ["#1", "#2"],
    ),
    "get_meta": (
        after(add_two, then=lambda s: s.queue.get_meta()),
        {"version": "bullmq:5.62.0", "opts.maxLenEvents": "10000"},
    ),
    "get_metrics": (read_metrics, {"count": 3, "previous_ms": START_MS, "previous_count": 2, "data": [1], "points": 2}),
    "get_next_job": (fetch_next, ["#1", "t", "me"]),
    "get_queue_events": (list_listeners, ["qe"]),
    "get_rate_limit_ttl": (limit_rate, True),
    "get_version": (after(add_two, then=lambda s: s.queue.get_version()), "bullmq:5.62.0"),
    "get_active": (after(acquire_job, then=lambda s: [s.queue.get_active(), s.queue.get_active(1)]), [["#1"], []]),
    "get_active_count": (after(acquire_job, then=lambda s: s.queue.get_active_count()), 1),
    "get_completed": (
        after(lambda s: s.add_completed(), then=lambda s: [s.queue.get_completed(), s.queue.get_completed(1)]),
        [["#1"], []],
    ),
    "get_completed_count": (after(lambda s: s.add_completed(), then=lambda s: s.queue.get_completed_count()), 1),
    "get_delayed": (
        after(lambda s: s.add(delay=HOUR), then=lambda s: [s.queue.get_delayed(), s.queue.get_delayed(1)]),
        [["#1"], []],
    ),
    "get_delayed_count": (after(lambda s: s.add(delay=HOUR), then=lambda s: s.queue.get_delayed_count()), 1),
    "get_failed": (
        after(lambda s: s.add_failed(), then=lambda s: [s.queue.get_failed(), s.queue.get_failed(1)]),
        [["#1"], []],
    ),
    "get_failed_count": (after(lambda s: s.add_failed(), then=lambda s: s.queue.get_failed_count()), 1),
    "get_prioritized": (
        after(lambda s: s.add(priority=1), then=lambda s: [s.queue.get_prioritized(), s.queue.get_prioritized(1)]),
        [["#1"], []],
    ),
    "get_prioritized_count": (after(lambda s: s.add(priority=1), then=lambda s: s.queue.get_prioritized_count()), 1),
    "get_waiting": (
        after(lambda s: s.add(), then=lambda s: [s.queue.get_waiting(), s.queue.get_waiting(1)]),
        [["#1"], []],
    ),
    "get_waiting_count": (after(lambda s: s.add(), then=lambda s: s.queue.get_waiting_count()), 1),
    "get_waiting_children": (
        after(lambda s: s.add_flow(), then=lambda s: [s.queue.get_waiting_children(), s.queue.get_waiting_children(1)]),
        [["#1"], []],
    ),
    "get_waiting_children_count": (
        after(lambda s: s.add_flow(), then=lambda s: s.queue.get_waiting_children_count()),
        1,
    ),
    "get_job_count_by_types": (
        after(add_two, then=lambda s: s.queue.get_job_count_by_types("waiting", "prioritized")),
        2,
    ),
    "get_summary": (
        after(add_two, then=lambda s: s.queue.get_summary()),
        {"waiting": 2, "active": 0, "completed": 0, "failed": 0, "delayed": 0},
    ),
    "get_workers": (with_worker(lambda s: [worker.name for worker in s.queue.get_workers()]), ["mine"]),
    "get_worker_states": (with_worker(lambda s: s.queue.get_worker_states()), {}),  # Node's worker reports none
    "get_workers_count": (with_worker(lambda s: s.queue.get_workers_count()), 1),
    "group_failures": (
        after(lambda s: s.add_failed(), then=lambda s: [group.error for group in s.queue.group_failures().groups]),
        ["no"],
    ),
    "is_maxed": (reach_concurrency, True),
    "is_paused": (after(lambda s: s.queue.pause(), then=lambda s: s.queue.is_paused()), True),
    "iter_jobs": (
        after(add_two, add_two, then=lambda s: list(s.queue.iter_jobs("waiting", asc=False, page_size=1))),
        ["#3", "#1"],
    ),
    "obliterate": (after(add_two, acquire_job, then=lambda s: s.queue.obliterate(force=True, count=1)), None),
    "pause": (after(add_two, then=lambda s: s.queue.pause()), None),
    "promote_jobs": (after(lambda s: s.add(delay=HOUR), then=lambda s: s.queue.promote_jobs()), None),
    "rate_limit": (lambda s: s.queue.rate_limit(100), None),
    "remove": (lambda s: s.queue.remove(s.add_flow().job.id, remove_children=False), True),
    "remove_deduplication_key": (
        after(lambda s: s.add(deduplication="d"), then=lambda s: s.queue.remove_deduplication_key("d")),
        True,
    ),
    "remove_deprecated_priority_key": (
        after(
            lambda s: s.redis.zadd(s.key("priority"), {"1": 1}),
            then=lambda s: [s.queue.remove_deprecated_priority_key() for _ in range(2)],
        ),
        [True, False],
    ),
    "remove_global_concurrency": (
        after(lambda s: s.queue.set_global_concurrency(3), then=lambda s: s.queue.remove_global_concurrency()),
        True,
    ),
    "remove_global_rate_limit": (
        after(lambda s: s.queue.set_global_rate_limit(2, 5), then=lambda s: s.queue.remove_global_rate_limit()),
        True,
    ),
    "remove_rate_limit_key": (
        after(lambda s: s.queue.rate_limit(100), then=lambda s: s.queue.remove_rate_limit_key()),
        True,
    ),
    "repeatables": (after(lambda s: s.add_repeatable(), then=lambda s: s.queue.repeatables.count()), 1),
    "resume": (after(lambda s: s.queue.pause(), add_two, then=lambda s: s.queue.resume()), None),
    "retry_jobs": (
        after(
            lambda s: s.add_failed(),
            lambda s: s.add_completed(),
            then=lambda s: s.queue.retry_jobs(state="completed", count=1),
        ),
        None,
    ),
    "revoke": (revoke_jobs, ["running", "terminating", "revoked", "unknown"]),
    "schedulers": (lambda s: s.queue.schedulers.count(), 0),
    "search": (
        after(add_two, then=lambda s: [(job.id, job.state) for job in s.queue.search(limit=1).jobs]),
        [["#1", "waiting"]],
    ),
    "set_global_concurrency": (lambda s: s.queue.set_global_concurrency(3), None),
    "set_global_rate_limit": (lambda s: s.queue.set_global_rate_limit(2, 5), None),
    "set_meta": (lambda s: s.queue.set_meta({"opts.maxLenEvents": 77}), None),
    "trim_events": (after(add_events, then=lambda s: 0 < s.queue.trim_events(100) <= 300), True),
    "update_job_progress": (lambda s: s.queue.update_job_progress(s.add().id, {"at": [1]}), None),
    "wait_until_ready": (lambda s: s.queue.wait_until_ready(), None),
}


def change_job(change: Callable[[Job], Any], **options: Any) -> Scenario:
    """Change a new job and return the object's fields afterwards."""

    def run(side: ApiForm) -> Any:
        job = side.add(**options)
        return [change(job), job.data, job.progress, job.delay_ms, job.priority]

    return run


def state_of(name: str, make: Callable[[ApiForm], Job]) -> Scenario:
    return lambda side: [getattr(make(side), name)(), getattr(side.add(delay=HOUR, priority=1), name)()]


def next_after(end: Callable[[Job], Any]) -> Scenario:
    def run(side: ApiForm) -> Any:
        add_two(side)
        job = side.acquire()
        return [end(job), job.returnvalue, job.failed_reason, job.attempts_made]

    return run


def with_child(side: ApiForm) -> Job:
    parent = side.add_parent()
    side.acquire().move_to_completed({"price": 3})
    return parent


def with_failed_child(side: ApiForm) -> Job:
    parent = side.add_parent(attempts=1, ignore_dependency_on_failure=True)
    side.acquire().move_to_failed("gone")
    return parent


def clear_logs(side: ApiForm) -> Any:
    job = side.add()
    job.log("one")
    job.log("two")
    job.clear_logs(1)
    return job.get_logs().lines


def update_progress_of_result(side: ApiForm) -> Any:
    job = side.add()
    before = job.result().progress
    job.update_progress(50)
    return [before, job.result().progress]


def marked_as_ignored(side: ApiForm) -> Any:
    result = side.add().result()
    result._mark_ignored()
    return result.ignored


def read_snapshot(side: ApiForm) -> Any:
    snapshot = side.result(side.add_failed()).snapshot()
    return [snapshot.state, snapshot.failed_reason, snapshot.attempts_made]


def refresh_job(side: ApiForm) -> Any:
    job = side.add()
    side.acquire().move_to_completed("ok")
    before = job.returnvalue
    job.refresh()
    return [before, job.returnvalue]


def wait_for_children(side: ApiForm) -> Any:
    parent = side.add()
    job = side.acquire()
    without_children = job.move_to_waiting_children()
    side.add(parent={"id": parent.id, "queue": side.queue.qualified_name})
    return [without_children, job.move_to_waiting_children()]


JOB: Final[dict[str, tuple[Scenario, Any]]] = {
    "change_delay": (
        change_job(lambda job: job.change_delay(2 * HOUR), delay=HOUR),
        [None, {"n": 1}, None, 2 * HOUR_MS, 0],
    ),
    "change_priority": (change_job(lambda job: job.change_priority(3, lifo=True)), [None, {"n": 1}, None, 0, 3]),
    "clear_logs": (clear_logs, ["two"]),
    "explain": (lambda s: s.add(delay=HOUR).explain().codes, ["delayed", "no-worker", "clocks-apart"]),
    "extend_lock": (lambda s: [acquire_job(s).extend_lock(token, 200) for token in ("t", "foreign")], [True, False]),
    "get_children_values": (lambda s: with_child(s).get_children_values(), {"Q:#2": {"price": 3}}),
    "get_dependencies": (
        lambda s: with_child(s).get_dependencies(),
        {"processed": {"Q:#2": {"price": 3}}, "unprocessed": [], "ignored": {}, "failed": []},
    ),
    "get_dependencies_count": (lambda s: with_child(s).get_dependencies_count("processed"), {"processed": 1}),
    "get_failed_children": (
        lambda s: with_failed_child(s).get_failed_children(),
        {"ignored": {"Q:#2": "gone"}, "failed": []},
    ),
    "get_logs": (
        lambda s: [(job := s.add()).log("one"), job.log("two"), job.get_logs(0, 0, asc=False)][2],
        {"lines": ["two"], "count": 2},
    ),
    "get_state": (state_of("get_state", lambda s: s.add()), ["waiting", "delayed"]),
    "is_active": (state_of("is_active", acquire_job), [True, False]),
    "is_completed": (state_of("is_completed", lambda s: s.add_completed()), [True, False]),
    "is_delayed": (lambda s: [s.add(delay=HOUR).is_delayed(), s.add().is_delayed()], [True, False]),
    "is_failed": (state_of("is_failed", lambda s: s.add_failed()), [True, False]),
    "is_prioritized": (state_of("is_prioritized", lambda s: s.add(priority=1)), [True, False]),
    "is_waiting": (state_of("is_waiting", lambda s: s.add()), [True, False]),
    "is_waiting_children": (state_of("is_waiting_children", lambda s: s.add_parent()), [True, False]),
    "log": (change_job(lambda job: job.log("one"), keep_logs=1), [1, {"n": 1}, None, 0, 0]),
    "move_to_completed": (
        next_after(lambda job: job.move_to_completed({"v": 1}, fetch_next=True)),
        ["#2", {"v": 1}, None, 1],
    ),
    "move_to_delayed": (next_after(lambda job: job.move_to_delayed(HOUR)), [None, None, None, 0]),
    "move_to_failed": (next_after(lambda job: job.move_to_failed("no", "t")), [None, None, "no", 1]),
    "move_to_wait": (next_after(lambda job: job.move_to_wait("t")), [None, None, None, 0]),
    "move_to_waiting_children": (wait_for_children, [False, True]),
    "promote": (change_job(lambda job: job.promote(), delay=HOUR), [None, {"n": 1}, None, 0, 0]),
    "refresh": (refresh_job, [None, "ok"]),
    "remove": (lambda s: s.add_parent().remove(children=False), None),
    "remove_child_dependency": (lambda s: s.add_child().remove_child_dependency(), True),
    "remove_deduplication_key": (
        change_job(lambda job: job.remove_deduplication_key(), deduplication="d"),
        [True, {"n": 1}, None, 0, 0],
    ),
    "remove_unprocessed_children": (lambda s: s.add_parent().remove_unprocessed_children(), None),
    "retry": (lambda s: s.add_completed().retry("completed"), None),
    "update_data": (change_job(lambda job: job.update_data({"to": "ann"})), [None, {"to": "ann"}, None, 0, 0]),
    "update_progress": (change_job(lambda job: job.update_progress(50)), [None, {"n": 1}, 50, 0, 0]),
    "wait_until_finished": (lambda s: s.add_completed({"n": [1]}).wait_until_finished(30), {"n": [1]}),
}


def tree(side: ApiForm) -> FlowJob:
    return FlowJob("parent", side.name, {}, {"priority": 1}, [FlowJob("leaf", side.name), FlowJob("leaf", side.name)])


def shape(node: Any) -> Any:
    return node and [node.job.name, [shape(child) for child in node.children]]


FLOWS: Final[dict[str, tuple[Scenario, Any]]] = {
    "add": (lambda s: shape(s.flows.add(tree(s))), ["parent", [["leaf", []], ["leaf", []]]]),
    "add_bulk": (
        lambda s: [shape(node) for node in s.flows.add_bulk([tree(s), FlowJob("alone", s.name)])],
        [["parent", [["leaf", []], ["leaf", []]]], ["alone", []]],
    ),
    "add_planned": (lambda s: s.flows.add_planned([]), None),
    "close": (
        after(lambda s: s.add_flow(), lambda s: s.flows.close(), then=lambda s: shape(s.add_flow())),
        ["parent", [["leaf", []]]],
    ),
    "get_flow": (
        lambda s: [shape(s.flows.get_flow(s.name, s.add_flow().job.id)), s.flows.get_flow(s.name, "gone")],
        [["parent", [["leaf", []]]], None],
    ),
    "wait_until_ready": (lambda s: s.flows.wait_until_ready(), None),
}


def hourly(side: ApiForm) -> Any:
    return side.queue.schedulers.upsert("s", name="tick", data={"n": 1}, every=HOUR)


def facts(scheduler: Any) -> Any:
    return scheduler and [scheduler.id, scheduler.name, scheduler.next_ms - START_MS, scheduler.iterations]


SCHEDULERS: Final[dict[str, tuple[Scenario, Any]]] = {
    "count": (after(hourly, then=lambda s: s.queue.schedulers.count()), 1),
    "get": (after(hourly, then=lambda s: facts(s.queue.schedulers.get("s"))), ["s", "tick", 0, 1]),
    "list": (
        after(hourly, then=lambda s: [facts(scheduler) for scheduler in s.queue.schedulers.list()]),
        [["s", "tick", 0, 1]],
    ),
    "list_paused": (after(hourly, then=lambda s: s.queue.schedulers.list_paused()), []),
    "pause": (after(hourly, then=lambda s: facts(s.queue.schedulers.pause("s"))), ["s", "tick", 0, 1]),
    "resume": (
        after(hourly, then=lambda s: [facts(s.queue.schedulers.resume(name)) for name in "st"]),
        [["s", "tick", 0, 1], None],
    ),
    "remove": (after(hourly, then=lambda s: [s.queue.schedulers.remove("s") for _ in range(2)]), [True, False]),
    "run_now": (
        after(hourly, then=lambda s: [job and [job.name, job.data] for job in map(s.queue.schedulers.run_now, "st")]),
        [["tick", {"n": 1}], None],
    ),
    "upsert": (lambda s: facts(hourly(s)), ["s", "tick", 0, 1]),
}
REPEATABLES: Final[dict[str, tuple[Scenario, Any]]] = {
    "count": (after(lambda s: s.add_repeatable(), then=lambda s: s.queue.repeatables.count()), 1),
    "list": (
        after(
            lambda s: s.add_repeatable(), then=lambda s: [repeatable.key for repeatable in s.queue.repeatables.list()]
        ),
        ["old"],
    ),
    "remove": (
        after(
            lambda s: s.add_repeatable(f"tick::::{HOUR_MS}"),
            then=lambda s: [s.queue.repeatables.remove("tick", every=HOUR) for _ in range(2)],
        ),
        [True, False],
    ),
    "remove_by_key": (
        after(
            lambda s: s.add_repeatable(), then=lambda s: [s.queue.repeatables.remove_by_key("old") for _ in range(2)]
        ),
        [True, False],
    ),
}


def run_until_closed(side: ApiForm) -> Any:
    side.add()
    events, received = side.events(), list[str]()
    events.on("added", lambda event: received.append(event.event))
    events.on("waiting", side.close_callback(events))
    events.run()
    return received


def listen_in_background(side: ApiForm) -> Any:
    events, received = side.events(), side.signal()
    events.on("completed", received.set)
    events.listen()
    side.add_completed()
    return received.wait()


def close_events(side: ApiForm) -> Any:
    add_two(side)
    events = side.events()
    events.close()
    return events.next(30)


BULK: Final[dict[str, tuple[Scenario, Any]]] = {
    "find": (after(lambda s: s.add_failed(), then=lambda s: s.queue.bulk("retry").find()), 1),
    "run": (after(add_two, then=lambda s: s.queue.bulk("remove", states="waiting", limit=1).run()), 1),
}

EVENTS: Final[dict[str, tuple[Scenario, Any]]] = {
    "close": (close_events, None),
    "listen": (listen_in_background, True),
    "next": (after(add_two, then=lambda s: [s.events().next(30).event, s.queue.count()]), ["added", 2]),  # type: ignore[union-attr]
    "open": (after(add_two, then=lambda s: s.events().open().position), "0-0"),
    "publish": (
        lambda s: [len((events := s.events()).publish("mine", {"n": 1})) > 0, events.next(30).name],  # type: ignore[union-attr]
        [True, "mine"],
    ),
    "run": (run_until_closed, ["added"]),
}
CASES: Final = {
    f"{kind}.{name}": case
    for kind, cases in {
        "Queue": QUEUE,
        "Job": JOB,
        "FlowProducer": FLOWS,
        "JobSchedulers": SCHEDULERS,
        "Repeatables": REPEATABLES,
        "BulkChange": BULK,
        "QueueEvents": EVENTS,
    }.items()
    for name, case in cases.items()
}


@pytest.fixture
def sides(broker_url: str) -> Iterator[tuple[ApiForm, ApiForm]]:
    """The sync form and the async one, each with a queue of its own."""
    with asyncio.Runner() as runner:
        sides = ApiForm(broker_url, None), ApiForm(broker_url, runner)
        yield sides
        for side in sides:
            side.close()


def record_calls(monkeypatch: pytest.MonkeyPatch, kind: type, name: str) -> list[str]:
    """Record the calls of a method, or the reads of a property."""
    original, calls = getattr(kind, name), list[str]()

    def note(function: Any) -> Any:
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def acall(*args: Any, **options: Any) -> Any:
                calls.append(name)
                return await function(*args, **options)

            return acall
        if inspect.isasyncgenfunction(function):

            @functools.wraps(function)
            async def agenerate(*args: Any, **options: Any) -> Any:
                calls.append(name)
                async for item in function(*args, **options):
                    yield item

            return agenerate

        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            calls.append(name)
            return function(*args, **options)

        return call

    replacement = property(note(original.fget)) if isinstance(original, property) else note(original)
    monkeypatch.setattr(kind, name, replacement)
    return calls


@pytest.mark.parametrize("case", CASES)
def test_sync_and_async_methods_do_and_return_the_same(
    sides: tuple[ApiForm, ApiForm], case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario, expected = CASES[case]
    kind, _, method = case.partition(".")
    states, ids = [], []
    for side, form in zip(sides, TWINS[kind], strict=True):
        calls = record_calls(monkeypatch, form, method)
        answer = scenario(side)
        assert calls, f"the scenario does not call {form.__name__}.{method}"
        ids.append(side.ids())
        assert side.normalize(answer, ids[-1]) == expected
        states.append(side.state(ids[-1]))
    assert states[0] == states[1]


def members(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


def test_the_scenarios_cover_every_method_that_is_both_sync_and_async() -> None:
    """A member that both forms share is one function, which does not access Redis."""
    twice = {
        f"{name}.{member}"
        for name, (kind, twin) in TWINS.items()
        for member in members(kind) | members(twin)
        if getattr(kind, member, None) is not getattr(twin, member, None)
    }
    assert twice == CASES.keys()


# ---- with and for, which each form implements itself ---------------------------------------------------------------


def with_a_queue(url: str) -> str:
    with Queue("mail", url) as queue:
        return queue.add("a").name


async def with_an_async_queue(url: str) -> str:
    async with AsyncQueue("mail", url) as queue:
        return (await queue.add("a")).name


def with_flows(url: str) -> str:
    with FlowProducer(url) as flows:
        return flows.add(FlowJob("a", "mail")).job.name


async def with_async_flows(url: str) -> str:
    async with AsyncFlowProducer(url) as flows:
        return (await flows.add(FlowJob("a", "mail"))).job.name


def with_events(url: str) -> str:
    with_a_queue(url)
    with QueueEvents("mail", url, start="0") as events:
        return next(event.event for event in events)


async def with_async_events(url: str) -> str:
    await with_an_async_queue(url)
    async with AsyncQueueEvents("mail", url, start="0") as events:
        async for event in events:
            return event.event
    raise AssertionError("no event was received")


STATEMENTS: Final[dict[str, tuple[Callable[[str], str], Callable[[str], Coroutine[Any, Any, str]], str]]] = {
    "Queue": (with_a_queue, with_an_async_queue, "a"),
    "FlowProducer": (with_flows, with_async_flows, "a"),
    "QueueEvents": (with_events, with_async_events, "added"),
}


@pytest.mark.parametrize("kind", STATEMENTS)
def test_with_and_for_statements_work_sync_and_async(broker_url: str, kind: str) -> None:
    plain, awaitable, expected = STATEMENTS[kind]
    assert plain(broker_url) == expected
    assert asyncio.run(awaitable(broker_url)) == expected


def test_every_class_that_supports_with_or_for_statements_is_tested() -> None:
    pairs = {"__enter__": "__aenter__", "__exit__": "__aexit__", "__iter__": "__aiter__", "__next__": "__anext__"}
    with_statements = {name for name, (kind, _) in TWINS.items() if any(hasattr(kind, method) for method in pairs)}
    assert with_statements == STATEMENTS.keys()
    for kind, twin in TWINS.values():
        assert [hasattr(kind, method) for method in pairs] == [hasattr(twin, method) for method in pairs.values()]


# ---- results: one class, whose awaitable methods begin with a -------------------------------------------------------

RESULTS: Final[dict[str, tuple[Scenario, Any]]] = {
    "forget": (after(lambda s: s.result(s.add_completed(1)).forget(), then=lambda s: s.queue.count()), 0),
    "get": (lambda s: s.result(s.add_completed({"n": 1})).get(30), {"n": 1}),
    "revoke": (
        lambda s: [s.result(job := s.add()).revoke(), s.result(job).revoke(terminate=True)],
        ["revoked", "finished"],
    ),
    "snapshot": (read_snapshot, ["failed", "no", 1]),
}
PLAIN: Final[dict[str, tuple[Scenario, Any]]] = {
    "args": (lambda s: s.add().result().args, []),
    "as_tuple": (lambda s: s.add(job_id="a").result().as_tuple(), [["a", None], None]),
    "collect": (lambda s: [value for _, value in s.add_completed(3).result().collect()], [3]),
    "date_done": (lambda s: s.add().result().date_done, None),
    "failed": (lambda s: s.add_failed().result().failed(), True),
    "ignored": (marked_as_ignored, True),
    "info": (lambda s: s.add_completed(3).result().info, 3),
    "kwargs": (lambda s: s.add().result().kwargs, {"n": 1}),
    "name": (lambda s: s.add().result().name, "a"),
    "progress": (update_progress_of_result, [None, 50]),
    "ready": (lambda s: [s.add().result().ready(), s.add_completed(priority=1).result().ready()], [False, False]),
    "result": (lambda s: s.add_completed(3).result().result, 3),
    "state": (lambda s: s.add().result().state, "waiting"),
    "status": (lambda s: s.add_failed().result().status, "FAILURE"),
    "successful": (lambda s: s.add_completed().result().successful(), True),
    "traceback": (lambda s: s.add_failed().result().traceback, None),
    "wait": (lambda s: s.add_completed(3).result().wait(timeout=60), 3),
}
"""Members without an asyncio form: ``await result.asnapshot()`` has their values; an ``AsyncQueue`` reads the call."""


@pytest.mark.parametrize("case", RESULTS)
def test_sync_and_async_methods_of_a_result_return_the_same(sides: tuple[ApiForm, ApiForm], case: str) -> None:
    scenario, expected = RESULTS[case]
    for side in sides:
        answer = scenario(side)
        assert side.normalize(answer, side.ids()) == expected


def test_an_async_result_can_be_awaited(sides: tuple[ApiForm, ApiForm]) -> None:
    async def awaited() -> Any:
        try:
            return await job.result()
        finally:
            await sides[0].broker.aclose()

    job = sides[0].add_completed({"n": 1})
    assert asyncio.run(awaited()) == {"n": 1}


@pytest.mark.parametrize("case", PLAIN)
def test_properties_of_a_result_return_their_values(sides: tuple[ApiForm, ApiForm], case: str) -> None:
    scenario, expected = PLAIN[case]
    assert sides[0].normalize(scenario(sides[0]), []) == expected


def test_every_member_of_a_result_is_tested() -> None:
    twice = {name for name in members(AsyncResult) if f"a{name}" in members(AsyncResult)}
    assert twice == RESULTS.keys() == members(AwaitedResult)
    assert members(AsyncResult) - twice - {f"a{name}" for name in twice} - {"id", "queue", "task_id"} == PLAIN.keys()
