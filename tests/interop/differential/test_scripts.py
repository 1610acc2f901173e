"""Each official script that bulltask calls leaves the same state in Redis as the same operations in Node."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import pytest

import bulltask.transport
from bulltask.lua import loader
from tests.interop.differential.pair import HOUR, START_MS, Pair
from tests.interop.differential.processors import FORMS, Form
from tests.interop.differential.state import TTL_UNIT_MS

pytestmark = [pytest.mark.interop, pytest.mark.redis]

Steps = list[dict[str, Any]]


def add(name: str = "a", data: object = None, **opts: object) -> dict[str, Any]:
    return {"do": "add", "name": name, "data": data, "opts": opts}


def child(job: int, name: str = "child", **opts: object) -> dict[str, Any]:
    return {"do": "add_child", "job": job, "name": name, "data": {}, "opts": opts}


def do(operation: str, **fields: object) -> dict[str, Any]:
    return {"do": operation, **fields}


def acquire(token: str = "t0") -> dict[str, Any]:
    return do("acquire", token=token)


def complete(value: object = None, *, following: bool = False, **fields: object) -> dict[str, Any]:
    return {"do": "complete", "held": 0, "value": value, "next": following, **fields}


def fail(message: str = "no", *, following: bool = False, **fields: object) -> dict[str, Any]:
    return {"do": "fail", "held": 0, "message": message, "trace": "a trace", "next": following, **fields}


def flow(*children: dict[str, Any], **opts: object) -> dict[str, Any]:
    return do("flow", flow={"name": "parent", "data": {}, "opts": opts, "children": list(children)})


def leaf(**opts: object) -> dict[str, Any]:
    return {"name": "leaf", "data": {"n": 1}, "opts": opts}


def every(ms: int, **template: object) -> dict[str, Any]:
    return scheduled("s", {"every": ms}, **template)


def scheduled(name: str, repeat: dict[str, object], **opts: object) -> dict[str, Any]:
    # Node adds no default "attempts": 0 to a template, so it is explicit.
    template = {"name": "tick", "data": {"n": 1}, "opts": {"attempts": 2, **opts}}
    return do("upsert_scheduler", id=name, repeat=repeat, template=template)


PAUSED: Final[Steps] = [do("pause"), add(), add(lifo=True), do("pause"), add("later")]
FAILED: Final[Steps] = [add(), add(priority=3), acquire(), fail(), acquire(), fail("nö")]
FAMILY: Final[Steps] = [flow(leaf(), leaf(failParentOnFailure=True), leaf(ignoreDependencyOnFailure=True))]
FIVE_WAYS: Final[Steps] = [
    add(deduplication={"id": "d"}),
    add(deduplication={"id": "d"}),
    add(deduplication={"id": "t", "ttl": TTL_UNIT_MS}),
    add(deduplication={"id": "t", "ttl": TTL_UNIT_MS}),
    add(deduplication={"id": "x", "ttl": TTL_UNIT_MS, "extend": True}),
    add(deduplication={"id": "x", "ttl": 2 * TTL_UNIT_MS, "extend": True}),
    add(deduplication={"id": "r", "replace": True}, delay=HOUR),
    add("newer", deduplication={"id": "r", "replace": True}, delay=HOUR),
    add(deduplication={"id": "b", "ttl": TTL_UNIT_MS, "extend": True, "replace": True}, delay=HOUR),
    add("newer", deduplication={"id": "b", "ttl": TTL_UNIT_MS, "extend": True, "replace": True}, delay=HOUR),
    acquire(),
    complete(),
    add(deduplication={"id": "d"}),
]

CASES: Final[dict[str, Steps]] = {
    "addStandardJob": [
        add(data={"text": "ä😀", "none": None, "big": 2**53 - 1}),
        add(lifo=True),
        add(jobId="custom"),
        add(jobId="custom"),
        *FIVE_WAYS,
        *PAUSED,
        do("set_concurrency", n=1),
        do("resume"),
        acquire(),
        add(keepLogs=3, stackTraceLimit=2, removeOnComplete={"age": 60, "count": 3}, removeOnFail=True, attempts=5),
    ],
    "addDelayedJob": [
        add(delay=HOUR),
        add(delay=2 * HOUR, priority=4),
        add(delay=HOUR, jobId="custom"),
        add(delay=HOUR, jobId="custom"),
        do("add_bulk", jobs=[{"name": f"n{n}", "data": n, "opts": {"delay": HOUR}} for n in range(3)]),
        *FIVE_WAYS,
    ],
    "addPrioritizedJob": [
        *(add(priority=priority) for priority in (5, 1, 5, 2**21 - 1)),
        add(priority=2, deduplication={"id": "p"}),
        add(priority=1, deduplication={"id": "p"}),
        *(step for _ in range(3) for step in (acquire(), complete())),
        do("pause"),
        add(priority=1),
    ],
    "addParentJob": [
        *FAMILY,
        flow(leaf(), {"name": "middle", "data": [], "opts": {}, "children": [leaf(priority=2), leaf(delay=HOUR)]}),
        flow(leaf(), priority=3),
    ],
    "moveToActive": [
        acquire(),
        add(),
        add(priority=1),
        add(delay=HOUR),
        add(delay=HOUR, priority=2),
        acquire("t1"),
        acquire("t2"),
        do("wait", ms=2 * HOUR),
        acquire("t3"),
        acquire("t4"),
        acquire("t5"),
        *(add() for _ in range(4)),
        do("set_concurrency", n=5),
        acquire(),
        acquire(),
        do("remove_concurrency"),
        do("set_rate", max=1, ms=TTL_UNIT_MS),
        acquire(),
        acquire(),
        do("pause"),
        acquire(),
    ],
    "moveToFinished": [
        *(add(**opts) for opts in ({}, {"removeOnComplete": True}, {"removeOnComplete": 1}, {"priority": 1})),
        *(add(removeOnComplete={"age": 3600}), add(removeOnFail={"count": 1}), add(stackTraceLimit=0)),
        acquire(),
        complete({"to": "ä😀"}, following=True),
        complete([None, {}], following=True),
        do("wait", ms=2 * HOUR),
        complete(None, following=True),
        complete("text", following=True),
        fail("nö", following=True),
        fail("no", following=True),
        complete(token="foreign"),
        add(),
        acquire(),
        do("expire_lock", held=0),
        complete(),
    ],
    "moveToDelayed": [
        add(attempts=3, backoff={"type": "exponential", "delay": HOUR}),
        add(attempts=2, backoff=HOUR, priority=2),
        acquire(),
        fail(),
        acquire(),
        fail(),
        do("wait", ms=HOUR),
        acquire(),
        fail("again"),
        acquire(),
        fail("the last failure"),
        add(),
        acquire(),
        do("delay", held=0, ms=HOUR),
        acquire(),
        add(),
        acquire(),
        do("delay", held=0, ms=HOUR, token="foreign"),
    ],
    "retryJob": [
        add(attempts=3),
        add(attempts=2, lifo=True),
        add(attempts=2, priority=2),
        add(attempts=2, stackTraceLimit=1),
        *(step for _ in range(9) for step in (acquire(), fail())),
        add(attempts=3),
        acquire(),
        fail(token="foreign"),
        add(attempts=3),
        acquire(),
        do("pause"),
        fail(),
        do("resume"),
        acquire(),
        fail("a permanent one", unrecoverable=True),
    ],
    "moveJobFromActiveToWait": [
        add(),
        add(),
        add(priority=2),
        add(priority=2),
        *(step for token in ("t0", "t1", "t2") for step in (acquire(token),)),
        do("release", held=0),
        do("pause"),
        do("release", held=0),
        do("rate_limit", ms=TTL_UNIT_MS),
        do("release", held=0, token="foreign"),
    ],
    "moveToWaitingChildren": [
        add("parent"),
        acquire(),
        child(0),
        child(0, failParentOnFailure=True),
        do("await_children", held=0),
        acquire("t1"),
        complete(1),
        acquire("t2"),
        complete(2),
        acquire("t3"),
        do("await_children", held=0),
    ],
    # One at a time: the order of several jobs is that of a set in Redis, on both sides.
    "moveStalledJobsToWait": [
        *(add() for _ in range(3)),
        add(priority=1),
        *(acquire(f"t{n}") for n in range(4)),
        do("check_stalled"),
        do("expire_lock", held=0),
        do("extend_lock", held=1, ms=TTL_UNIT_MS),
        do("check_stalled"),
        do("expire_lock", held=3),
        do("check_stalled"),
        acquire("t9"),
        do("check_stalled"),
        do("expire_lock", held=4),
        do("pause"),
        do("check_stalled"),
        do("resume"),
        acquire("t10"),
    ],
    "extendLock": [
        add(),
        acquire(),
        do("check_stalled"),
        do("extend_lock", held=0, ms=2 * TTL_UNIT_MS, token="foreign"),
        do("extend_lock", held=0, ms=2 * TTL_UNIT_MS),
        do("expire_lock", held=0),
        do("extend_lock", held=0, ms=2 * TTL_UNIT_MS),
    ],
    "updateProgress": [add(), *(do("progress", job=0, value=value) for value in (50, {"to": "ä😀"}, None, [1]))],
    "addLog": [add(), add(keepLogs=1), *(do("log", job=n % 2, line=f"line {n} ä") for n in range(6))],
    "updateData": [add(), do("update_data", job=0, data={"to": "ä😀"}), do("update_data", job=0, data=None)],
    "promote": [
        add(delay=HOUR),
        add(delay=HOUR, priority=2),
        add(delay=2 * HOUR),
        do("promote", job=0),
        do("promote", job=0),
        do("promote", job=1),
        do("pause"),
        do("promote", job=2),
    ],
    "changeDelay": [
        add(delay=HOUR),
        add(delay=HOUR),
        do("change_delay", job=0, ms=5 * HOUR),
        do("change_delay", job=1, ms=0),
        add(),
        do("change_delay", job=2, ms=HOUR),
    ],
    "changePriority": [
        add(),
        add(),
        add(priority=3),
        do("change_priority", job=0, priority=3, lifo=False),
        do("change_priority", job=1, priority=3, lifo=True),
        do("change_priority", job=2, priority=0, lifo=False),
        do("change_priority", job=1, priority=0, lifo=True),
        add(delay=HOUR),
        do("change_priority", job=3, priority=9, lifo=False),
        do("pause"),
        do("change_priority", job=0, priority=0, lifo=True),
    ],
    "reprocessJob": [
        *FAILED,
        do("retry", job=0, state="failed"),
        do("retry", job=1, state="failed"),
        do("retry", job=1, state="failed"),
        acquire(),
        complete(5),
        do("pause"),
        do("retry", of="completed", job=0, state="completed"),
    ],
    "removeJob": [
        *(add(), add(priority=1), add(delay=HOUR), add()),
        flow(leaf()),
        *(do("remove", job=n, children=True) for n in (0, 1, 2)),
        acquire(),
        do("remove", job=3, children=True),
        do("remove", job=4, children=True),
        flow(leaf(), leaf()),
        do("remove", job=6, children=False),
        every(HOUR),
    ],
    "removeChildDependency": [
        flow(leaf(), leaf()),
        do("remove_dependency", job=1),
        do("remove_dependency", job=1),
        do("remove_dependency", job=2),
        do("remove_dependency", job=0),
    ],
    "removeUnprocessedChildren": [
        flow(leaf(), leaf(), leaf()),
        acquire(),
        complete(1),
        acquire(),
        do("remove_unprocessed", job=0),
    ],
    "drain": [
        *(add(), add(priority=1), add(delay=HOUR)),
        *FAMILY,
        acquire(),
        do("drain", delayed=False),
        *PAUSED,
        do("drain", delayed=True),
    ],
    "cleanJobsInSet": [
        *FAILED,
        *(add(), acquire(), complete(1), add(), add(priority=2), add(delay=HOUR), add(), acquire()),
        do("wait", ms=HOUR),
        *(add(), add(priority=2)),
        do("clean", grace=HOUR // 2, limit=0, state="completed"),
        do("clean", grace=0, limit=1, state="failed"),
        do("clean", grace=HOUR // 2, limit=0, state="wait"),
        do("clean", grace=HOUR // 2, limit=0, state="prioritized"),
        do("clean", grace=0, limit=0, state="delayed"),
        do("clean", grace=0, limit=0, state="active"),
        do("expire_lock", held=0),
        do("clean", grace=0, limit=0, state="active"),
        *PAUSED,
        do("clean", grace=0, limit=2, state="paused"),
    ],
    "obliterate": [
        *FAILED,
        *FAMILY,
        *(add(), add(delay=HOUR), add(priority=2)),
        acquire(),
        do("obliterate", force=False),
        do("obliterate", force=True),
    ],
    "moveJobsToWait": [
        *FAILED,
        *(add(delay=HOUR), add(delay=2 * HOUR, priority=3)),
        do("promote_jobs"),
        do("retry_jobs", state="failed"),
        acquire(),
        complete(1),
        do("pause"),
        do("retry_jobs", state="completed"),
    ],
    "addJobScheduler": [
        every(HOUR, priority=3),
        do("get_scheduler", id="s"),
        scheduled("p", {"pattern": "0 3 * * *", "tz": "UTC"}, priority=2),
        scheduled("l", {"every": HOUR, "limit": 2}),
    ],
    "updateJobScheduler": [
        every(HOUR),
        scheduled("p", {"pattern": "0 3 * * *", "tz": "UTC"}),
        acquire(),
        complete(1),
        do("wait", ms=3 * HOUR),
        acquire(),
        complete(2),
        do("wait", ms=30 * HOUR),
        acquire(),
        acquire(),
    ],
    "removeJobScheduler": [
        every(HOUR),
        acquire(),
        do("remove_scheduler", id="s"),
        do("remove_scheduler", id="s"),
    ],
    "getJobScheduler": [do("get_scheduler", id="s"), every(HOUR), do("get_scheduler", id="s")],
    "getCounts": [*FAILED, add(), *PAUSED, do("counts", states=["waiting", "paused", "failed", "active", "delayed"])],
    "getCountsPerPriority": [
        *(add(priority=n % 3) if n % 3 else add() for n in range(7)),
        do("counts_per_priority", priorities=[0, 1, 2, 3]),
        do("pause"),
        do("counts_per_priority", priorities=[0, 1, 2, 3]),
    ],
    "getRanges": [
        *(add(), add(), add(priority=2), add(delay=HOUR), add(), acquire(), complete(1)),
        *(
            do("jobs", states=states, start=start, end=end, asc=asc)
            for states in (["waiting"], ["waiting", "prioritized", "completed"], ["delayed"])
            for start, end in ((0, -1), (1, 2))
            for asc in (True, False)
        ),
        *(add(), add(priority=2), add(delay=2 * HOUR), flow(leaf()), flow(leaf()), add(attempts=1)),
        *(step for _ in range(2) for step in (acquire(), complete(1), acquire(), fail())),
        *(acquire(), acquire("t1"), add(), add()),
        *(
            do("of_state", state=state, start=start, end=end)
            for state in ("Waiting", "Active", "Delayed", "Prioritized", "Completed", "Failed", "WaitingChildren")
            for start, end in ((0, -1), (1, 1))
        ),
        do("count_by_types", states=["waiting", "delayed"]),
    ],
    "getStateV2": [
        *FAILED,
        *(add(), add(delay=HOUR), add(priority=2), flow(leaf())),
        *(add(), acquire(), complete(1), acquire()),
        *(do("state", job=n) for n in range(8)),
        do("pause"),
        *(do("state", job=n) for n in range(8)),
    ],
    "isFinished": [*FAILED, add(), acquire(), complete({"n": 1}), add(), *(do("finished", job=n) for n in range(4))],
    "isMaxed": [do("is_maxed"), do("set_concurrency", n=1), add(), do("is_maxed"), acquire(), do("is_maxed")],
    "getMetrics": [add(), acquire(), complete(1), do("metrics", kind="completed"), do("metrics", kind="failed")],
    "getRateLimitTtl": [
        do("rate_ttl", max=1),
        do("rate_limit", ms=TTL_UNIT_MS),
        do("rate_ttl", max=1),
        do("rate_ttl", max=0),
        do("remove_rate_limit"),
        do("remove_rate_limit"),
        do("set_rate", max=1, ms=TTL_UNIT_MS),
        *(add(), add(), acquire()),
        do("rate_ttl", max=0),
        do("remove_rate"),
        do("remove_rate"),
    ],
    "getDependencyCounts": [
        *FAMILY,
        *(step for _ in range(2) for step in (acquire(), complete(1))),
        do("dependency_counts", job=0),
        acquire(),
        fail(),
        do("dependency_counts", job=0),
    ],
    "paginate": [
        *FAMILY,
        acquire(),
        complete(1),
        do("dependencies", job=0, kind="processed"),
        do("dependencies", job=0, kind="pending"),
        do("dependencies", job=1, kind="pending"),
    ],
}
"""The steps for both sides, by the script that they test."""

NOT_IN_NODE: Final = {"removeDeduplicationKey"}
"""Scripts that BullMQ 5.62.0 on npm does not have, tested in test_table.py."""

REPLACED: Final = {"drain": "cleanJobsInSet"}
"""Scripts of Node that bulltask does not call, because they have no limit, and the script that it calls instead."""

ELSEWHERE: Final = {"updateRepeatableJobMillis", "removeRepeatable"}
"""Scripts of BullMQ's legacy repeatable jobs, which only Node can add, tested in test_repeatables.py."""


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("script", CASES)
def test_each_script_leaves_the_same_state_in_redis_as_node(pair: Pair, script: str, form: Form) -> None:
    outcome = pair.run(CASES[script], form)
    report = outcome.report()
    assert not report, f"\n{report}"
    assert REPLACED.get(script, script) in outcome.bulltask_scripts
    assert script in outcome.node_scripts


def test_every_official_script_that_bulltask_calls_has_a_case() -> None:
    assert scripts_in_source() - ELSEWHERE == (CASES.keys() - REPLACED.keys()) | NOT_IN_NODE


def scripts_in_source() -> set[str]:
    """Return the names of official scripts in the modules that build calls."""
    names: set[str] = set()
    for path in Path(next(iter(bulltask.transport.__path__)), "scripts").glob("*.py"):
        names |= set(re.findall(r'"([A-Za-z0-9]+)"', path.read_text()))
    return {name for name in names if name in ALL_SCRIPTS}


ALL_SCRIPTS: Final = {name.rpartition("-")[0] for name in loader._official_hashes()}


def test_node_and_bulltask_use_the_same_simulated_clock(pair: Pair) -> None:
    outcome = pair.run([add(), do("wait", ms=HOUR), add()])
    for state in (outcome.node_state, outcome.bulltask_state):
        assert [state[job]["value"]["timestamp"] for job in ("#1", "#2")] == [
            str(START_MS),
            str(START_MS + 1000 + HOUR),
        ]
