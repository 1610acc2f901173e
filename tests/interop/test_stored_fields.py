"""What we store for a job, beside what Node's own ``queue.add`` stores for the same options."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.interop.side_by_side import CLOCKS_MS, SideBySide
from tests.support.machine_load import scale_to_load

pytestmark = [pytest.mark.interop, pytest.mark.redis]

DEFAULTS: dict[str, Any] = {
    # what bulltask says of every job, and Node only if asked
    "attempts": 3,
    "backoff": {"type": "exponential", "delay": 1000, "jitter": 0.2, "maxDelay": 3_600_000},
    "removeOnComplete": {"age": 86_400},
    # Node ignores it; it tells our workers that the job is ours
    "bulltask": {"v": 1},
}
"""The whole difference between our stored options and Node's, when Node is given none: Node stores ``attempts: 0``."""

CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("plain", {}, {}),
    ("delayed", {"countdown": 5}, {"delay": 5000}),
    ("prioritized", {"priority": 7}, {"priority": 7}),
    ("delayed and prioritized", {"countdown": 5, "priority": 7}, {"delay": 5000, "priority": 7}),
    ("lifo", {"lifo": True}, {"lifo": True}),
]


@pytest.fixture(params=CASES, ids=[case[0] for case in CASES])
def pair(request: pytest.FixtureRequest, either: SideBySide) -> tuple[dict[str, str], dict[str, str]]:
    """The hashes of the same job as we and as Node send it with the same options: ours with its defaults, Node's
    with the defaults spelled out."""
    _, ours, theirs = request.param
    job = either.send("echo", options={"job_id": "ours", **ours}, value={"to": "ä😀"})
    explicit = {name: value for name, value in DEFAULTS.items() if name != "bulltask"}
    other = either.add("echo", {"value": {"to": "ä😀"}}, jobId="theirs", **explicit, **theirs)
    return either.redis.hgetall(either.keys.job(job.id)), either.redis.hgetall(either.keys.job(other))


def test_a_bulltask_job_has_the_fields_of_a_node_job(pair: tuple[dict[str, str], dict[str, str]]) -> None:
    ours, theirs = pair
    assert ours.keys() == theirs.keys() == {"name", "data", "opts", "timestamp", "delay", "priority"}
    for field in ("name", "data", "delay", "priority"):
        assert ours[field] == theirs[field], field
    assert -CLOCKS_MS <= int(theirs["timestamp"]) - int(ours["timestamp"]) < scale_to_load(5_000)


def test_stored_options_are_those_of_node_and_the_key_bulltask(pair: tuple[dict[str, str], dict[str, str]]) -> None:
    ours, theirs = (json.loads(fields["opts"]) for fields in pair)
    assert ours.pop("bulltask") == {"v": 1}
    assert (ours.pop("jobId"), theirs.pop("jobId")) == ("ours", "theirs")
    assert ours == theirs


def test_stored_jobs_without_options_differ_by_bulltasks_defaults(mail: SideBySide) -> None:
    ours, theirs = mail.send("echo"), mail.add("echo")
    assert stored(mail, theirs) == {"attempts": 0}
    assert stored(mail, ours.id) == DEFAULTS


def test_each_setting_is_stored_as_an_option_of_node(mail: SideBySide) -> None:
    """What each setting and option of ours becomes; all but ``bulltask`` and ``maxDelay`` are BullMQ's."""
    table: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"task_max_retries": 0}, {"attempts": 1}),
        ({"task_retry_backoff": 0.5}, {"backoff": {**DEFAULTS["backoff"], "delay": 500}}),
        ({"task_retry_jitter": False}, {"backoff": {**DEFAULTS["backoff"], "jitter": 0}}),
        ({"task_retry_backoff_max": 60}, {"backoff": {**DEFAULTS["backoff"], "maxDelay": 60_000}}),
        ({"result_expires": None}, {"removeOnComplete": None}),
        ({"result_expires": 0}, {"removeOnComplete": True}),
        ({"result_expires": 60}, {"removeOnComplete": {"age": 60}}),
        ({"result_failure_expires": 60}, {"removeOnFail": {"age": 60}}),
    ]
    for settings, changed in table:
        job = mail.sender(**settings).send_task("echo")
        expected = {**DEFAULTS, **changed}
        assert stored(mail, job.id) == {name: value for name, value in expected.items() if value is not None}, settings


def test_a_fixed_retry_delay_is_stored_like_in_node(mail: SideBySide) -> None:
    mail.app.task(name="patient", retry_backoff=False, default_retry_delay=7)(print)
    ours = mail.app.send_task("patient")
    theirs = mail.add("patient", {}, backoff=7_000)
    assert stored(mail, theirs)["backoff"] == {"type": "fixed", "delay": 7_000}
    assert stored(mail, ours.id)["backoff"] == {"type": "fixed", "delay": 7_000, "jitter": 0, "maxDelay": 3_600_000}


def test_options_that_only_bulltask_has_are_stored_under_its_key(mail: SideBySide) -> None:
    job = mail.send("echo", options={"expires": 60, "headers": {"n": 2**53 - 1, "none": None, "empty": []}})
    own = stored(mail, job.id)["bulltask"]
    timestamp = int(mail.redis.hget(mail.keys.job(job.id), "timestamp") or 0)
    assert own.pop("expires") == timestamp + 60_000
    # A text, because the add scripts would turn [] into {} and round the number.
    assert own == {"v": 1, "headers": '{"n":9007199254740991,"none":null,"empty":[]}'}


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        ({}, {"marker", "wait"}),
        ({"countdown": 60}, {"marker", "delayed"}),
        ({"priority": 1}, {"marker", "prioritized", "pc"}),
    ],
)
def test_a_send_writes_the_same_keys_as_nodes_add(mail: SideBySide, options: dict[str, Any], keys: set[str]) -> None:
    opts = {"delay": 60_000} if "countdown" in options else options
    ours = mail.send("echo", options=options)
    written = keys_by_type(mail, ours.id)
    mail.redis.flushdb()
    mail.node.reset()  # Node writes meta once for each Queue
    theirs = mail.add("echo", {}, **opts)
    assert written == keys_by_type(mail, theirs)
    assert written.keys() == {"events", "id", "meta", "JOB", *keys}


def test_a_send_writes_the_same_queue_metadata_as_node(mail: SideBySide) -> None:
    mail.send("echo")
    ours = mail.redis.hgetall(mail.keys.meta)
    mail.redis.flushdb()
    mail.add("echo")
    assert ours == mail.redis.hgetall(mail.keys.meta) == {"opts.maxLenEvents": "10000", "version": "bullmq:5.62.0"}


@pytest.mark.process
@pytest.mark.parametrize(
    ("task", "ends", "more"),
    [("echo", "completed", {"returnvalue"}), ("fail", "failed", {"failedReason", "stacktrace"})],
)
def test_a_finished_job_has_the_same_fields_after_both_workers(
    mail: SideBySide, task: str, ends: str, more: set[str]
) -> None:
    mail.listen()
    in_node = mail.add(task)
    worker = mail.node_worker(task, name="node-1")
    mail.wait_for_event(ends, in_node)
    mail.node.call("worker.close", worker=worker)

    here = mail.add(task)
    mail.worker(worker_name="ours-1")
    mail.wait_for_event(ends, here)
    fields = {"name", "data", "opts", "timestamp", "delay", "priority", "processedOn", "finishedOn", "ats", "atm", "pb"}
    ran_in_node, ran_here = (mail.redis.hgetall(mail.keys.job(job)) for job in (in_node, here))
    assert ran_here.keys() == ran_in_node.keys() == fields | more
    assert ran_in_node["pb"] == "node-1"
    assert ran_here["pb"].startswith("ours-1@")


def stored(side: SideBySide, job_id: str) -> dict[str, Any]:
    """The job's options as they are stored."""
    found: dict[str, Any] = json.loads(side.redis.hget(side.keys.job(job_id), "opts") or "null")
    return found


def keys_by_type(side: SideBySide, job_id: str) -> dict[str, str]:
    """Every key of the server without the queue's prefix, and what it is."""
    names = sorted(side.redis.keys("*"))
    assert all(name.startswith(side.keys.base) for name in names), names
    return {
        "JOB" if name == side.keys.job(job_id) else name.removeprefix(side.keys.base): side.redis.type(name)
        for name in names
    }
