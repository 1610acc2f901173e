"""The official Python client and bulltask leave the same state in Redis, except for the asserted differences."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bulltask.queue import FlowJob, FlowProducer, Queue
from tests.interop.differential.intended_differences import apply
from tests.interop.differential.state import State, difference, dump
from tests.interop.interop_queue import InteropQueue

pytestmark = [pytest.mark.interop, pytest.mark.redis]

NOW_MS = 1_800_000_000_000
SETTINGS: dict[str, Any] = {"queue_hash_tag": False, "result_expires": None, "result_failure_expires": None}
ADDS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"attempts": 3}, {"attempts": 3}),
    ({"attempts": 2, "backoff": 500}, {"attempts": 2, "backoff": 0.5}),
    ({"delay": 60_000}, {"delay": 60}),
    ({"priority": 5}, {"priority": 5}),
    ({"priority": 5, "delay": 60_000}, {"priority": 5, "delay": 60}),
    ({"lifo": True}, {"lifo": True}),
    ({"jobId": "invoice-1"}, {"job_id": "invoice-1"}),
    ({"removeOnComplete": True, "removeOnFail": 5}, {"remove_on_complete": True, "remove_on_fail": 5}),
    ({"removeOnComplete": {"age": 3600, "count": 9}}, {"remove_on_complete": {"age": 3600, "count": 9}}),
    ({"stackTraceLimit": 3}, {"stack_trace_limit": 3}),
    ({"sizeLimit": 99}, {"size_limit": 99}),
]
COMMAS = (",", ":")
DATA: Any = {"to": "ünï 😀", "n": [1, 2.5, None, {}, []], "deep": {"er": {"est": True}}}


def states(side: InteropQueue, official_ids: list[str], bulltask_ids: list[str]) -> tuple[State, State]:
    """Return everything in Redis of both queues, without the intended differences from Node."""
    dumps = tuple(
        dump(side.redis, base, list(dict.fromkeys(ids)))
        for base, ids in (("bull:official:", official_ids), ("bull:bulltask:", bulltask_ids))
    )
    for key, entry in dumps[0].items():
        if key.startswith("#") and entry["type"] == "hash":
            stored = entry["value"]["opts"]
            assert "delay" in stored, "only the official Python client stores a delay of 0"
            if stored["delay"] == 0:
                del stored["delay"]
            # The official client escapes non-ASCII characters, like Python's default; Node and bulltask do not.
            entry["value"]["data"] = json.dumps(
                json.loads(entry["value"]["data"]), ensure_ascii=False, separators=COMMAS
            )
    official_state, bulltask_state = dumps
    apply(official_state, bulltask_state)
    return official_state, bulltask_state


@pytest.mark.parametrize(
    ("official_options", "bulltask_options"), ADDS, ids=[json.dumps(official_options) for official_options, _ in ADDS]
)
def test_both_clients_store_the_same_job(
    mail: InteropQueue, official_options: dict[str, Any], bulltask_options: dict[str, Any]
) -> None:
    opts = {**official_options, "timestamp": NOW_MS}
    official_job_ids = [
        mail.node.call("queue.add", queue="official", name="mail.send", data=DATA, opts=opts)["id"] for _ in range(2)
    ]
    with Queue("bulltask", mail.url, **SETTINGS) as queue:
        merged = {"attempts": 0, "backoff": None, **bulltask_options, "timestamp": NOW_MS / 1000}
        bulltask_job_ids = [queue.add("mail.send", DATA, **merged).id for _ in range(2)]
    official_state, bulltask_state = states(mail, official_job_ids, bulltask_job_ids)
    assert official_state["#1"]["value"]["name"] == "mail.send"
    assert difference(official_state, bulltask_state) == ""


def test_both_clients_store_the_same_flow(mail: InteropQueue) -> None:
    at = {"timestamp": NOW_MS}
    child = {"name": "load", "queueName": "official", "data": {"n": 1}, "opts": at}
    flow = {"name": "report", "queueName": "official", "data": DATA, "children": [child], "opts": at}
    tree = mail.node.call("flow.add", flow=flow)
    official_job_ids = [tree["job"]["id"], tree["children"][0]["job"]["id"]]
    options: Any = {"attempts": 0, "backoff": None, "timestamp": NOW_MS / 1000}
    with FlowProducer(mail.url, **SETTINGS) as flows:
        bulltask_options = flows.add(
            FlowJob(
                "report", "bulltask", DATA, options=options, children=[FlowJob("load", "bulltask", {"n": 1}, options)]
            )
        )
    bulltask_job_ids = [bulltask_options.job.id, bulltask_options.children[0].job.id]
    assert difference(*states(mail, official_job_ids, bulltask_job_ids)) == ""


def events_of(side: InteropQueue, job: str) -> list[tuple[str, ...]]:
    """Return the events of a job, and those of no job, without times and values of a single job."""
    skipped = {"event", "jobId", "delay", "failedReason", "returnvalue"}
    return [
        (entry["event"], *(f"{name}={value}" for name, value in entry.fields.items() if name not in skipped))
        for entry in side.stream.all()
        if entry.fields.get("jobId", job) == job
    ]


@pytest.mark.parametrize("ends", ["echo", "fail"])
def test_both_workers_write_the_same_events_and_fields_except_the_name(mail: InteropQueue, ends: str) -> None:
    opts = {"attempts": 2, "backoff": 10} if ends == "fail" else {}
    official_options = mail.add(ends, {}, **opts)
    mail.node_worker(ends, {})
    mail.stream.wait_for(event="drained")
    mail.node.call("reset")
    official_events, official_hash = (
        events_of(mail, official_options),
        mail.redis.hgetall(mail.keys.job(official_options)),
    )
    mail.redis.delete(mail.keys.events)
    mail.stream.seen.clear()

    bulltask_options = mail.add(ends, {}, **opts)
    mail.worker()
    mail.stream.wait_for(event="drained")
    bulltask_events, bulltask_hash = (
        events_of(mail, bulltask_options),
        mail.redis.hgetall(mail.keys.job(bulltask_options)),
    )
    assert bulltask_events == official_events
    assert bulltask_hash.keys() - official_hash.keys() == {"pb"}, "the official worker has no name"
    changing = {"pb", "timestamp", "processedOn", "finishedOn", "stacktrace", "failedReason", "returnvalue"}
    assert {k: v for k, v in bulltask_hash.items() if k not in changing} == {
        k: v for k, v in official_hash.items() if k not in changing
    }
    if ends == "fail":
        assert official_hash["failedReason"] == json.dumps(bulltask_hash["failedReason"]), (
            "the official worker adds quotes"
        )
        assert len(json.loads(official_hash["stacktrace"])) == len(json.loads(bulltask_hash["stacktrace"])) == 2
