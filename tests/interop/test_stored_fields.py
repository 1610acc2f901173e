"""bulltask stores a job like Node's ``queue.add`` with the same options."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest

from bulltask.transport.call import known_queues
from tests.interop.interop_queue import CLOCK_TOLERANCE_MS, InteropQueue
from tests.support.machine_load import scale_to_load

pytestmark = [pytest.mark.interop, pytest.mark.redis]

DEFAULTS: dict[str, Any] = {
    # bulltask stores these options in every job, Node only if they are given
    "attempts": 3,
    "backoff": {"type": "exponential", "delay": 1000, "jitter": 0.2, "maxDelay": 3_600_000},
    "removeOnComplete": {"age": 86_400},
    # Node ignores it; it marks the job as bulltask's
    "bulltask": {"v": 1},
}
"""bulltask's stored options of a job that is sent without options; Node stores ``attempts: 0``."""

CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("plain", {}, {}),
    ("delayed", {"countdown": 5}, {"delay": 5000}),
    ("prioritized", {"priority": 7}, {"priority": 7}),
    ("delayed and prioritized", {"countdown": 5, "priority": 7}, {"delay": 5000, "priority": 7}),
    ("lifo", {"lifo": True}, {"lifo": True}),
]


@pytest.fixture(params=CASES, ids=[case[0] for case in CASES])
def pair(request: pytest.FixtureRequest, any_mail: InteropQueue) -> tuple[dict[str, str], dict[str, str]]:
    """The hashes of a job that bulltask and Node send with the same options: Node gets the defaults explicitly."""
    _, bulltask_options, node_options = request.param
    job = any_mail.send("echo", options={"job_id": "bulltask", **bulltask_options}, value={"to": "ä😀"})
    explicit = {name: value for name, value in DEFAULTS.items() if name != "bulltask"}
    other = any_mail.add("echo", {"value": {"to": "ä😀"}}, jobId="node", **explicit, **node_options)
    return any_mail.redis.hgetall(any_mail.keys.job(job.id)), any_mail.redis.hgetall(any_mail.keys.job(other))


def test_a_bulltask_job_has_the_fields_of_a_node_job(pair: tuple[dict[str, str], dict[str, str]]) -> None:
    from_bulltask, from_node = pair
    assert from_bulltask.keys() == from_node.keys() == {"name", "data", "opts", "timestamp", "delay", "priority"}
    for field in ("name", "data", "delay", "priority"):
        assert from_bulltask[field] == from_node[field], field
    assert -CLOCK_TOLERANCE_MS <= int(from_node["timestamp"]) - int(from_bulltask["timestamp"]) < scale_to_load(5_000)


def test_stored_options_equal_those_of_a_node_job_plus_the_key_bulltask(
    pair: tuple[dict[str, str], dict[str, str]],
) -> None:
    from_bulltask, from_node = (json.loads(fields["opts"]) for fields in pair)
    assert from_bulltask.pop("bulltask") == {"v": 1, "sender": f"sender@{socket.gethostname()}"}
    assert (from_bulltask.pop("jobId"), from_node.pop("jobId")) == ("bulltask", "node")
    assert from_bulltask == from_node


def test_jobs_without_options_are_stored_with_bulltasks_defaults(mail: InteropQueue) -> None:
    from_bulltask, from_node = mail.send("echo"), mail.add("echo")
    assert stored(mail, from_node) == {"attempts": 0}
    assert stored(mail, from_bulltask.id) == DEFAULTS


def test_each_setting_is_stored_as_a_bullmq_option(mail: InteropQueue) -> None:
    """Each setting becomes an option; all but ``bulltask`` and ``maxDelay`` are BullMQ's."""
    table: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"task_max_retries": 0}, {"attempts": 1, "bulltask": {"v": 1, "max_explicit_retries": 3}}),
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


def test_a_fixed_retry_delay_is_stored_in_bullmqs_format(mail: InteropQueue) -> None:
    mail.app.task(name="patient", retry_backoff=False, default_retry_delay=7)(print)
    from_bulltask = mail.app.send_task("patient")
    from_node = mail.add("patient", {}, backoff=7_000)
    assert stored(mail, from_node)["backoff"] == {"type": "fixed", "delay": 7_000}
    assert stored(mail, from_bulltask.id)["backoff"] == {
        "type": "fixed",
        "delay": 7_000,
        "jitter": 0,
        "maxDelay": 3_600_000,
    }


def test_options_that_only_bulltask_has_are_stored_under_its_key(mail: InteropQueue) -> None:
    job = mail.send("echo", options={"expires": 60, "headers": {"n": 2**53 - 1, "none": None, "empty": []}})
    options_of_bulltask = stored(mail, job.id)["bulltask"]
    timestamp = int(mail.redis.hget(mail.keys.job(job.id), "timestamp") or 0)
    assert options_of_bulltask.pop("expires") == timestamp + 60_000
    # A string, because the add scripts would turn [] into {} and round the number.
    assert options_of_bulltask == {"v": 1, "headers": '{"n":9007199254740991,"none":null,"empty":[]}'}


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        ({}, {"marker", "wait"}),
        ({"countdown": 60}, {"marker", "delayed"}),
        ({"priority": 1}, {"marker", "prioritized", "pc"}),
    ],
)
def test_a_send_writes_the_same_keys_as_nodes_add_method(
    mail: InteropQueue, options: dict[str, Any], keys: set[str]
) -> None:
    opts = {"delay": 60_000} if "countdown" in options else options
    from_bulltask = mail.send("echo", options=options)
    written = keys_by_type(mail, from_bulltask.id)
    mail.redis.flushdb()
    mail.node.reset()  # Node writes meta once for each Queue
    from_node = mail.add("echo", {}, **opts)
    assert written == keys_by_type(mail, from_node)
    assert written.keys() == {"events", "id", "meta", "JOB", *keys}


def test_a_send_writes_the_same_queue_metadata_as_node(mail: InteropQueue) -> None:
    mail.send("echo")
    written = mail.redis.hgetall(mail.keys.meta)
    mail.redis.flushdb()
    mail.add("echo")
    assert written == mail.redis.hgetall(mail.keys.meta) == {"opts.maxLenEvents": "10000", "version": "bullmq:5.62.0"}


@pytest.mark.process
@pytest.mark.parametrize(
    ("task", "ends", "more"),
    [("echo", "completed", {"returnvalue"}), ("fail", "failed", {"failedReason", "stacktrace"})],
)
def test_a_finished_job_has_the_same_fields_after_both_workers(
    mail: InteropQueue, task: str, ends: str, more: set[str]
) -> None:
    mail.listen()
    in_node = mail.add(task)
    worker = mail.node_worker(task, name="node-1")
    mail.wait_for_event(ends, in_node)
    mail.node.call("worker.close", worker=worker)

    in_bulltask = mail.add(task)
    mail.worker(worker_name="bulltask-1")
    mail.wait_for_event(ends, in_bulltask)
    fields = {"name", "data", "opts", "timestamp", "delay", "priority", "processedOn", "finishedOn", "ats", "atm", "pb"}
    node_fields, bulltask_fields = (mail.redis.hgetall(mail.keys.job(job)) for job in (in_node, in_bulltask))
    assert bulltask_fields.keys() == node_fields.keys() == fields | more
    assert node_fields["pb"] == "node-1"
    assert bulltask_fields["pb"].startswith("bulltask-1@")


def stored(side: InteropQueue, job_id: str) -> dict[str, Any]:
    """Return the stored options of a job."""
    options: dict[str, Any] = json.loads(side.redis.hget(side.keys.job(job_id), "opts") or "null")
    if options.get("bulltask"):
        assert options["bulltask"].pop("sender").endswith(f"@{socket.gethostname()}")
    return options


def keys_by_type(side: InteropQueue, job_id: str) -> dict[str, str]:
    """Return the types of all keys, without the queue's prefix."""
    names = sorted(key for key in side.redis.keys("*") if key != known_queues(side.keys.prefix))
    assert all(name.startswith(side.keys.base) for name in names), names
    return {
        "JOB" if name == side.keys.job(job_id) else name.removeprefix(side.keys.base): side.redis.type(name)
        for name in names
    }
