"""What was sent is what is read, in both directions; what one side would read differently is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bulltask import BulltaskError, TaskError
from bulltask.errors import EncodeError, InvalidJobError, PayloadTooLargeError
from tests.interop.side_by_side import SideBySide

pytestmark = [pytest.mark.interop, pytest.mark.process]


def nested(depth: int) -> Any:
    """Lists in objects in lists …, so many levels deep."""
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
    """Equality that tells ``True`` from 1 and ``[]`` from ``{}``, and knows the order of keys."""
    return json.dumps(left) == json.dumps(right)


def test_values_from_bulltask_to_node_and_back_are_unchanged(mail: SideBySide) -> None:
    mail.node_worker("echo", concurrency=10)
    task: Any = mail.app.tasks["echo"]
    jobs = mail.app.send_many([task.s(value) for value in VALUES])
    for job, value in zip(jobs, VALUES, strict=True):
        assert same(job.get(timeout=60), {"value": value})
        assert same(mail.seen(job.id)["data"], {"value": value})


@pytest.mark.parametrize("task", ["echo", "aecho"])
def test_values_from_node_to_bulltask_and_back_are_unchanged(mail: SideBySide, task: str) -> None:
    mail.worker()
    jobs = mail.call("addBulk", [{"name": task, "data": {"value": value}} for value in VALUES])
    for job, value in zip(jobs, VALUES, strict=True):
        assert same(mail.finished(job["id"]), value)
        assert same(mail.result(job["id"]).get(timeout=60), value)


def test_data_is_stored_byte_for_byte_like_in_node(mail: SideBySide) -> None:
    """Byte for byte, but for the few floats that the two languages spell differently."""
    for value in VALUES:
        if isinstance(value, float):
            continue
        ours, theirs = mail.send("echo", value=value).id, mail.add("echo", {"value": value})
        texts = [mail.redis.hget(mail.keys.job(job), "data") for job in (ours, theirs)]
        assert texts[0] == texts[1]


def test_node_returns_a_whole_float_as_an_integer(mail: SideBySide) -> None:
    mail.node_worker("echo")
    returned = mail.send("echo", value=2.0).get(timeout=60)["value"]
    assert (returned, type(returned)) == (2, int)


def test_keys_that_look_like_integers_come_first_in_node(mail: SideBySide) -> None:
    mail.node_worker("echo")
    assert list(mail.send("echo", value={"b": 1, "10": 2, "9": 3}).get(timeout=60)["value"]) == ["9", "10", "b"]


def test_nothing_is_sent_if_an_argument_cannot_be_encoded(mail: SideBySide) -> None:
    loop: list[Any] = []
    loop.append(loop)
    refused = [2**53, -(2**53), float("nan"), float("inf"), -float("inf"), {1: "x"}, {1, 2}, b"x", loop, object()]
    task: Any = mail.app.tasks["echo"]
    for value in refused:
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


def test_a_return_value_that_cannot_be_encoded_fails_the_job(mail: SideBySide) -> None:
    mail.worker()
    reasons = {"integer": r"\['total'\] is the integer 9007199254740992", "nan": " is nan", "infinity": r"\[0\] is inf"}
    for kind, reason in reasons.items():
        theirs = mail.add("huge", {"kind": kind}, attempts=3)
        for job in (mail.result(theirs), mail.send("huge", kind=kind)):
            with pytest.raises((BulltaskError, ValueError), match=f"return value of task huge.*{reason}"):
                job.get(timeout=60)
            assert mail.redis.hget(mail.keys.job(job.id), "returnvalue") is None


def test_a_number_of_node_beyond_2_53_cannot_be_returned(mail: SideBySide) -> None:
    mail.worker()
    job = mail.result(mail.add("add", {"x": 1e16, "y": 1}))  # Node writes 10000000000000000
    with pytest.raises(TaskError, match="is the integer 10000000000000001, beyond"):
        job.get(timeout=60)


def test_a_progress_that_cannot_be_encoded_fails_the_attempt(mail: SideBySide) -> None:
    mail.worker()
    mail.listen()
    job = mail.add("report", {"steps": [1, 10**16]})
    assert "progress of job" in mail.wait_for_event("failed", job)["failedReason"]
    assert [event["data"] for event in mail.all_heard("progress", job)] == [1]


def test_a_job_with_invalid_json_data_fails_instead_of_stalling(mail: SideBySide) -> None:
    mail.worker(children=1)
    for broken in ('{"value":', '{"value":NaN}', ""):
        mail.call("pause")
        job = mail.add("echo", {"value": 1}, attempts=3)
        mail.redis.hset(mail.keys.job(job), "data", broken)
        mail.call("resume")
        with pytest.raises(InvalidJobError, match=f"data of job {job} is not valid JSON"):
            mail.result(job).get(timeout=60)
