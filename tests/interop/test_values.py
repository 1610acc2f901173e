"""Values are unchanged in both directions; values that one client would read differently are rejected."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bulltask import BulltaskError, TaskError
from bulltask.errors import EncodeError, InvalidJobError, PayloadTooLargeError
from tests.interop.interop_queue import InteropQueue

pytestmark = [pytest.mark.interop, pytest.mark.process]


def nested(depth: int) -> Any:
    """Return lists in objects in lists …, with a number of levels."""
    value: Any = "bottom"
    for level in range(depth):
        value = [value, level] if level % 2 else {"level": level, "inner": value}
    return value


VALUES: list[Any] = [
    "",
    "plain",
    "äöü ß ñ 中文 עברית ﷽",
    "😀 👩‍👩‍👧‍👦 🇩🇪 𐐷",
    "e\u0301 is not é",
    "line\u2028paragraph\u2029end\ufeff",
    'tab\t newline\n return\r quote" backslash\\ slash/ nul\0 escape\x1b delete\x7f',
    "half a pair: \ud83d",
    "</script><!-- ${x} {{y}} %s \\u0041",
    0,
    1,
    -1,
    2**53 - 1,
    -(2**53 - 1),
    10**15 + 1,
    1_795_216_652_158_123,
    0.1,
    -2.5,
    1 / 3,
    1e-7,
    5e-324,
    1.7976931348623157e308,
    3.141592653589793,
    True,
    False,
    None,
    [],
    {},
    [[]],
    [{}],
    {"a": {}, "b": []},
    [None, True, 0, "", [], {}],
    {"1": 0, "": "empty key", "ключ": 1, "😀": 2, "a.b": 3, "a b": 4, "constructor": 5, "toString": 6},
    {"z": 1, "a": 2, "m": 3},
    nested(20),
    "x" * 200_000,
    list(range(2_000)),
]


def same(left: Any, right: Any) -> bool:
    """Return whether values are equal, where ``True`` is not 1, ``[]`` is not ``{}``, and the order of keys matters."""
    return json.dumps(left) == json.dumps(right)


def test_values_from_bulltask_to_node_and_back_are_unchanged(mail: InteropQueue) -> None:
    mail.node_worker("echo", concurrency=10)
    task: Any = mail.app.tasks["echo"]
    jobs = mail.app.send_many([task.s(value) for value in VALUES])
    for job, value in zip(jobs, VALUES, strict=True):
        assert same(job.get(timeout=60), {"value": value})
        assert same(mail.node_job(job.id)["data"], {"value": value})


@pytest.mark.parametrize("task", ["echo", "aecho"])
def test_values_from_node_to_bulltask_and_back_are_unchanged(mail: InteropQueue, task: str) -> None:
    mail.worker()
    jobs = mail.call("addBulk", [{"name": task, "data": {"value": value}} for value in VALUES])
    for job, value in zip(jobs, VALUES, strict=True):
        assert same(mail.node_result(job["id"]), value)
        assert same(mail.result(job["id"]).get(timeout=60), value)


def test_data_is_stored_byte_for_byte_as_node_stores_it(mail: InteropQueue) -> None:
    """Floats are not compared, because the two languages write a few of them differently."""
    for value in VALUES:
        if isinstance(value, float):
            continue
        from_bulltask, from_node = mail.send("echo", value=value).id, mail.add("echo", {"value": value})
        texts = [mail.redis.hget(mail.keys.job(job), "data") for job in (from_bulltask, from_node)]
        assert texts[0] == texts[1]


def test_node_returns_a_whole_float_as_an_integer(mail: InteropQueue) -> None:
    mail.node_worker("echo")
    returned = mail.send("echo", value=2.0).get(timeout=60)["value"]
    assert (returned, type(returned)) == (2, int)


def test_keys_that_look_like_integers_come_first_in_javascript(mail: InteropQueue) -> None:
    mail.node_worker("echo")
    assert list(mail.send("echo", value={"b": 1, "10": 2, "9": 3}).get(timeout=60)["value"]) == ["9", "10", "b"]


def test_nothing_is_sent_if_an_argument_cannot_be_encoded(mail: InteropQueue) -> None:
    loop: list[Any] = []
    loop.append(loop)
    invalid = [2**53, -(2**53), float("nan"), float("inf"), -float("inf"), {1: "x"}, {1, 2}, b"x", loop, object()]
    task: Any = mail.app.tasks["echo"]
    for value in invalid:
        for wrapped in (value, [0, {"deep": value}]):
            with pytest.raises(EncodeError, match="echo"):
                task.delay(wrapped)
            with pytest.raises(EncodeError, match="echo"):
                task.delay_many([("good",), (wrapped,)])
    with pytest.raises(PayloadTooLargeError):
        mail.sender(max_payload=100).send_task("echo", kwargs={"value": "x" * 100})
    with pytest.raises(EncodeError):
        mail.send("echo", options={"headers": {"size": 2**53}})
    assert mail.redis.keys("*") == []
    assert mail.counts() == {}


def test_a_return_value_that_cannot_be_encoded_fails_the_job(mail: InteropQueue) -> None:
    mail.worker()
    reasons = {"integer": r"\['total'\] is the integer 9007199254740992", "nan": " is nan", "infinity": r"\[0\] is inf"}
    for kind, reason in reasons.items():
        node_job = mail.add("huge", {"kind": kind}, attempts=3)
        for job in (mail.result(node_job), mail.send("huge", kind=kind)):
            with pytest.raises((BulltaskError, ValueError), match=f"return value of task huge.*{reason}"):
                job.get(timeout=60)
            assert mail.redis.hget(mail.keys.job(job.id), "returnvalue") is None


def test_a_large_number_received_from_node_cannot_be_returned(mail: InteropQueue) -> None:
    mail.worker()
    job = mail.result(mail.add("add", {"x": 1e16, "y": 1}))  # Node writes 10000000000000000
    with pytest.raises(TaskError, match="is the integer 10000000000000001, beyond"):
        job.get(timeout=60)


def test_progress_that_cannot_be_encoded_fails_the_attempt(mail: InteropQueue) -> None:
    mail.worker()
    mail.listen()
    job = mail.add("report", {"steps": [1, 10**16]})
    assert "progress of job" in mail.wait_for_event("failed", job)["failedReason"]
    assert [event["data"] for event in mail.node_events("progress", job)] == [1]


def test_a_job_with_invalid_json_data_fails_instead_of_stalling(mail: InteropQueue) -> None:
    mail.worker(children=1)
    for broken in ('{"value":', '{"value":NaN}', ""):
        mail.call("pause")
        job = mail.add("echo", {"value": 1}, attempts=3)
        mail.redis.hset(mail.keys.job(job), "data", broken)
        mail.call("resume")
        with pytest.raises(InvalidJobError, match=f"data of job {job} is not valid JSON"):
            mail.result(job).get(timeout=60)
