"""The same done by the official Python client and by us leaves the same in Redis, but for what is listed here."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bulltask.queue import FlowJob, FlowProducer, Queue
from tests.interop.differential.intended import apply
from tests.interop.differential.state import State, difference, dump
from tests.interop.side_by_side import SideBySide

pytestmark = [pytest.mark.interop, pytest.mark.redis]

NOW_MS = 1_800_000_000_000
OURS: dict[str, Any] = {"queue_hash_tag": False, "result_expires": None, "result_failure_expires": None}
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


def states(side: SideBySide, theirs: list[str], ours: list[str]) -> tuple[State, State]:
    """What Redis holds of both queues, without what we do otherwise than Node on purpose."""
    found = tuple(
        dump(side.redis, base, list(dict.fromkeys(ids)))
        for base, ids in (("bull:theirs:", theirs), ("bull:ours:", ours))
    )
    for key, entry in found[0].items():
        if key.startswith("#") and entry["type"] == "hash":
            stored = entry["value"]["opts"]
            assert "delay" in stored, "the official Python client stores a delay of 0 as well; Node and we do not"
            if stored["delay"] == 0:
                del stored["delay"]
            # It escapes what is not ASCII, as Python does unless told otherwise; Node and we store it as it is.
            entry["value"]["data"] = json.dumps(
                json.loads(entry["value"]["data"]), ensure_ascii=False, separators=COMMAS
            )
    their_state, our_state = found
    apply(their_state, our_state)
    return their_state, our_state


@pytest.mark.parametrize(("theirs", "ours"), ADDS, ids=[json.dumps(theirs) for theirs, _ in ADDS])
def test_both_clients_store_the_same_job(mail: SideBySide, theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    opts = {**theirs, "timestamp": NOW_MS}
    their_ids = [
        mail.node.call("queue.add", queue="theirs", name="mail.send", data=DATA, opts=opts)["id"] for _ in range(2)
    ]
    with Queue("ours", mail.url, **OURS) as queue:
        said = {"attempts": 0, "backoff": None, **ours, "timestamp": NOW_MS / 1000}
        our_ids = [queue.add("mail.send", DATA, **said).id for _ in range(2)]
    their_state, our_state = states(mail, their_ids, our_ids)
    assert their_state["#1"]["value"]["name"] == "mail.send"
    assert difference(their_state, our_state) == ""


def test_both_clients_store_the_same_flow(mail: SideBySide) -> None:
    at = {"timestamp": NOW_MS}
    child = {"name": "load", "queueName": "theirs", "data": {"n": 1}, "opts": at}
    flow = {"name": "report", "queueName": "theirs", "data": DATA, "children": [child], "opts": at}
    tree = mail.node.call("flow.add", flow=flow)
    their_ids = [tree["job"]["id"], tree["children"][0]["job"]["id"]]
    options: Any = {"attempts": 0, "backoff": None, "timestamp": NOW_MS / 1000}
    with FlowProducer(mail.url, **OURS) as flows:
        ours = flows.add(
            FlowJob("report", "ours", DATA, options=options, children=[FlowJob("load", "ours", {"n": 1}, options)])
        )
    our_ids = [ours.job.id, ours.children[0].job.id]
    assert difference(*states(mail, their_ids, our_ids)) == ""


def told(side: SideBySide, job: str) -> list[tuple[str, ...]]:
    """The events of a job without times and what only one job has; those that name no job too."""
    skipped = {"event", "jobId", "delay", "failedReason", "returnvalue"}
    return [
        (entry["event"], *(f"{name}={value}" for name, value in entry.fields.items() if name not in skipped))
        for entry in side.stream.all()
        if entry.fields.get("jobId", job) == job
    ]


@pytest.mark.parametrize("ends", ["echo", "fail"])
def test_both_workers_write_the_same_events_and_fields_except_the_name(mail: SideBySide, ends: str) -> None:
    opts = {"attempts": 2, "backoff": 10} if ends == "fail" else {}
    theirs = mail.add(ends, {}, **opts)
    mail.node_worker(ends, {})
    mail.stream.wait_for(event="drained")
    mail.node.call("reset")
    their_events, their_hash = told(mail, theirs), mail.redis.hgetall(mail.keys.job(theirs))
    mail.redis.delete(mail.keys.events)
    mail.stream.seen.clear()

    ours = mail.add(ends, {}, **opts)
    mail.worker()
    mail.stream.wait_for(event="drained")
    our_events, our_hash = told(mail, ours), mail.redis.hgetall(mail.keys.job(ours))
    assert our_events == their_events
    assert our_hash.keys() - their_hash.keys() == {"pb"}, "the name of the worker: it has none"
    changing = {"pb", "timestamp", "processedOn", "finishedOn", "stacktrace", "failedReason", "returnvalue"}
    assert {k: v for k, v in our_hash.items() if k not in changing} == {
        k: v for k, v in their_hash.items() if k not in changing
    }
    if ends == "fail":
        assert their_hash["failedReason"] == json.dumps(our_hash["failedReason"]), "the quotes that it adds"
        assert len(json.loads(their_hash["stacktrace"])) == len(json.loads(our_hash["stacktrace"])) == 2
