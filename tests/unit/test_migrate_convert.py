"""Jobs of Bull in BullMQ's words, whatever somebody has put into them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bulltask.errors import DecodeError
from bulltask.jobs.stored_job import StoredJob
from bulltask.migrate.bull_job import BullJob, JobOrigin
from bulltask.migrate.convert import convert

PLAIN = {"name": "n", "data": "{}", "opts": '{"attempts":1,"delay":0,"timestamp":5}', "timestamp": "5", "delay": "0"}
STATES = {"wait": "waiting", "delayed": "delayed", "completed": "completed", "failed": "failed", "active": "recovered"}


def bull_job(place: str = "wait", score: str = "", opts: str | dict[str, Any] | None = None, **fields: str) -> BullJob:
    """A job of Bull 4; ``opts`` beside those that it always has, or their whole text."""
    said = {"attempts": 1, "delay": 0, "timestamp": 5, **(opts if isinstance(opts, dict) else {})}
    hash_ = {**PLAIN, "opts": opts if isinstance(opts, str) else json.dumps(said), **fields}
    return BullJob(id="7", place=place, score=score, fields={name: text.encode() for name, text in hash_.items()})


def after(job: BullJob, state: str = "waiting") -> dict[str, bytes]:
    """The hash that BullMQ gets."""
    made = convert(job, state)
    return {name: value for name, value in {**job.fields, **made.fields}.items() if name not in made.dropped}


def opts_of(job: BullJob) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(after(job)["opts"])
    return found


@pytest.mark.parametrize(
    ("bulls", "bullmqs"),
    [
        ({}, {}),
        ({"backoff": 50}, {"backoff": {"type": "fixed", "delay": 50}}),
        ({"backoff": {"type": "mine", "options": {"a": 1}}}, {"backoff": {"type": "mine", "options": {"a": 1}}}),
        ({"attempts": None}, {}),
        ({"attempts": "3"}, {"attempts": 3}),
        ({"attempts": 0}, {}),
        ({"delay": 5}, {"delay": 5}),
        (
            {"removeOnComplete": True, "removeOnFail": {"age": 5}},
            {"removeOnComplete": True, "removeOnFail": {"age": 5}},
        ),
        ({"stackTraceLimit": 0}, {}),
        ({"stackTraceLimit": 3}, {"stackTraceLimit": 3}),
        ({"priority": 4, "lifo": True, "jobId": "x"}, {"priority": 4, "lifo": True, "jobId": "x"}),
        ({"priority": 2**31}, {"priority": 2**21 - 1}),
        ({"priority": 1.5}, {"priority": 1}),
        ({"debounce": {"id": "d", "ttl": 9}}, {"de": {"id": "d", "ttl": 9}}),
        ({"repeat": {"cron": "* * * * *"}, "prevMillis": 8}, {}),
        ({"timeout": 9, "mine": [1]}, {"timeout": 9, "mine": [1]}),
    ],
)
def test_options_become_those_of_bullmq(bulls: dict[str, Any], bullmqs: dict[str, Any]) -> None:
    assert opts_of(bull_job(opts=bulls)) == {"attempts": 1, **bullmqs}


@pytest.mark.parametrize(
    ("state", "made", "atm"), [("waiting", 0, None), ("waiting", 2, b"2"), ("failed", 3, b"3"), ("completed", 0, b"1")]
)
def test_bullmq_counts_the_try_that_succeeds_too(state: str, made: int, atm: bytes | None) -> None:
    fields = {"attemptsMade": str(made)} if made else {}
    found = after(bull_job(score="9" if state in {"failed", "completed"} else "", **fields), state)
    assert (found.get("atm"), found.get("ats"), "attemptsMade" in found) == (atm, atm, False)


def test_the_end_of_a_job_is_taken_from_its_score_if_the_hash_does_not_have_it() -> None:
    assert after(bull_job("failed", "88"), "failed")["finishedOn"] == b"88"
    assert after(bull_job("failed", "88", finishedOn="77"), "failed")["finishedOn"] == b"77"
    assert after(bull_job("failed", "88"), "failed")["failedReason"] == b"Unknown reason"


def test_how_long_a_job_waits_for_its_next_try_is_in_its_score() -> None:
    job = bull_job("delayed", str(9_000 * 4096 + 17), processedOn="8400", attemptsMade="1")
    assert after(job, "delayed")["delay"] == b"600"


def test_stalls_are_counted_on_and_what_is_only_bulls_is_gone() -> None:
    found = after(bull_job(stalledCounter="1", retriedOn="5", id="7", progress="{", mine="kept"))
    assert found["stc"] == b"1"
    assert not {"stalledCounter", "retriedOn", "id", "progress"} & found.keys()
    assert found["mine"] == b"kept"


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"data": "{"}, "its data is not valid JSON"),
        ({"data": '{"a":NaN}'}, "NaN is not JSON"),
        ({"opts": "[]"}, "its options are not a JSON object"),
        ({"opts": "x"}, "the text of its options is not valid JSON"),
    ],
)
def test_jobs_that_no_worker_could_read_are_rejected(fields: dict[str, str], text: str) -> None:
    with pytest.raises(DecodeError, match=text):
        convert(bull_job(**fields), "waiting")


@pytest.mark.parametrize(
    ("fields", "origin"),
    [
        ({}, JobOrigin.BULL),
        ({"attemptsMade": "1"}, JobOrigin.BULL),
        ({"opts": '{"attempts":0}'}, JobOrigin.EITHER),
        ({"opts": '{"attempts":0,"delay":5}'}, JobOrigin.EITHER),
        ({"opts": '{"attempts":0}', "attemptsMade": "1"}, JobOrigin.EITHER),  # also BullMQ before 5
        ({"atm": "1"}, JobOrigin.BULLMQ),
        ({"rjk": "every"}, JobOrigin.BULLMQ),
        ({"opts": {"repeat": {"pattern": "* * * * *"}}}, JobOrigin.BULLMQ),
        ({"opts": {"repeat": {"every": 5}, "repeatJobKey": "n:::5"}}, JobOrigin.BULLMQ),
        ({"opts": {"repeat": {"every": 5}}}, JobOrigin.BULL),
        ({"opts": {"bulltask": {"v": 1}}}, JobOrigin.BULLMQ),
        ({"opts": {"de": {"id": "x"}}}, JobOrigin.BULLMQ),
        ({"retriedOn": "1", "opts": "{}"}, JobOrigin.BULL),
        ({"opts": "{"}, JobOrigin.UNREADABLE),
    ],
)
def test_whose_a_job_is(fields: dict[str, Any], origin: JobOrigin) -> None:
    assert bull_job(**fields).origin is origin


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
KNOWN = st.sampled_from(
    [
        "attempts",
        "backoff",
        "delay",
        "priority",
        "timestamp",
        "debounce",
        "repeat",
        "stackTraceLimit",
        "timeout",
        "jobId",
    ]
)


@given(
    opts=st.dictionaries(KNOWN, JSON),
    place=st.sampled_from(list(STATES)),
    fields=st.dictionaries(
        st.sampled_from(["attemptsMade", "stalledCounter", "processedOn", "progress", "stacktrace", "priority"]),
        st.text(max_size=6),
    ),
)
def test_any_job_is_converted_to_a_valid_job_of_bullmq(
    opts: dict[str, Any], place: str, fields: dict[str, str]
) -> None:
    job = bull_job(place, "1000000" if place not in {"wait", "active"} else "", opts, **fields)
    found = after(job, STATES[place])
    flat = [word for name, value in found.items() for word in (name.encode(), value)]
    record = StoredJob.from_hash("q", "7", flat)
    assert 0 <= record.priority < 2**21
    assert record.opts["attempts"] >= 1
    assert not {"timestamp", "repeat", "debounce"} & record.opts.keys()
    assert BullJob(id="7", place=place, score="", fields=found).origin in {JobOrigin.EITHER, JobOrigin.BULLMQ}
    json.loads(found.get("progress", b"0"))
