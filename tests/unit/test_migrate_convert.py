"""Conversion of Bull's jobs to BullMQ's format."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bulltask.errors import DecodeError
from bulltask.jobs.stored_job import StoredJob
from bulltask.migrate.inspection import BullJob, JobOrigin
from bulltask.migrate.plan import convert

PLAIN = {"name": "n", "data": "{}", "opts": '{"attempts":1,"delay":0,"timestamp":5}', "timestamp": "5", "delay": "0"}
STATES = {"wait": "waiting", "delayed": "delayed", "completed": "completed", "failed": "failed", "active": "recovered"}


def bull_job(
    key_suffix: str = "wait", score: str = "", opts: str | dict[str, Any] | None = None, **fields: str
) -> BullJob:
    """Return a Bull 4 job. ``opts`` are options in addition to the usual ones, or the text of all options."""
    all_opts = {"attempts": 1, "delay": 0, "timestamp": 5, **(opts if isinstance(opts, dict) else {})}
    hash_ = {**PLAIN, "opts": opts if isinstance(opts, str) else json.dumps(all_opts), **fields}
    return BullJob(
        id="7", key_suffix=key_suffix, score=score, fields={name: text.encode() for name, text in hash_.items()}
    )


def converted_hash(job: BullJob, state: str = "waiting") -> dict[str, bytes]:
    """Return the job's hash after the conversion."""
    conversion = convert(job, state)
    fields = {**job.fields, **conversion.fields}
    return {name: value for name, value in fields.items() if name not in conversion.dropped}


def opts_of(job: BullJob) -> dict[str, Any]:
    opts: dict[str, Any] = json.loads(converted_hash(job)["opts"])
    return opts


@pytest.mark.parametrize(
    ("bull", "bullmq"),
    [
        ({}, {}),
        ({"backoff": 50}, {"backoff": {"type": "fixed", "delay": 50}}),
        ({"backoff": {"type": "custom", "options": {"a": 1}}}, {"backoff": {"type": "custom", "options": {"a": 1}}}),
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
        ({"timeout": 9, "custom": [1]}, {"timeout": 9, "custom": [1]}),
    ],
)
def test_options_are_converted_to_bullmqs(bull: dict[str, Any], bullmq: dict[str, Any]) -> None:
    assert opts_of(bull_job(opts=bull)) == {"attempts": 1, **bullmq}


@pytest.mark.parametrize(
    ("state", "count", "atm"), [("waiting", 0, None), ("waiting", 2, b"2"), ("failed", 3, b"3"), ("completed", 0, b"1")]
)
def test_the_number_of_attempts_includes_the_successful_attempt(state: str, count: int, atm: bytes | None) -> None:
    fields = {"attemptsMade": str(count)} if count else {}
    hash_ = converted_hash(bull_job(score="9" if state in {"failed", "completed"} else "", **fields), state)
    assert (hash_.get("atm"), hash_.get("ats"), "attemptsMade" in hash_) == (atm, atm, False)


def test_a_missing_finish_time_is_taken_from_the_jobs_score() -> None:
    assert converted_hash(bull_job("failed", "88"), "failed")["finishedOn"] == b"88"
    assert converted_hash(bull_job("failed", "88", finishedOn="77"), "failed")["finishedOn"] == b"77"
    assert converted_hash(bull_job("failed", "88"), "failed")["failedReason"] == b"Unknown reason"


def test_the_delay_of_a_retry_is_computed_from_the_jobs_score() -> None:
    job = bull_job("delayed", str(9_000 * 4096 + 17), processedOn="8400", attemptsMade="1")
    assert converted_hash(job, "delayed")["delay"] == b"600"


def test_the_stalled_counter_is_kept_and_fields_only_bull_uses_are_removed() -> None:
    hash_ = converted_hash(bull_job(stalledCounter="1", retriedOn="5", id="7", progress="{", custom="kept"))
    assert hash_["stc"] == b"1"
    assert not {"stalledCounter", "retriedOn", "id", "progress"} & hash_.keys()
    assert hash_["custom"] == b"kept"


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"data": "{"}, "its data is not valid JSON"),
        ({"data": '{"a":NaN}'}, "NaN is not JSON"),
        ({"opts": "[]"}, "its options are not a JSON object"),
        ({"opts": "x"}, "the text of its options is not valid JSON"),
    ],
)
def test_malformed_jobs_are_rejected(fields: dict[str, str], text: str) -> None:
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
def test_the_origin_of_a_job_is_detected(fields: dict[str, Any], origin: JobOrigin) -> None:
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
    key_suffix=st.sampled_from(list(STATES)),
    fields=st.dictionaries(
        st.sampled_from(["attemptsMade", "stalledCounter", "processedOn", "progress", "stacktrace", "priority"]),
        st.text(max_size=6),
    ),
)
def test_any_job_is_converted_to_a_valid_bullmq_job(
    opts: dict[str, Any], key_suffix: str, fields: dict[str, str]
) -> None:
    job = bull_job(key_suffix, "1000000" if key_suffix not in {"wait", "active"} else "", opts, **fields)
    hash_ = converted_hash(job, STATES[key_suffix])
    flat = [item for name, value in hash_.items() for item in (name.encode(), value)]
    record = StoredJob.from_hash("q", "7", flat)
    assert 0 <= record.priority < 2**21
    assert record.opts["attempts"] >= 1
    assert not {"timestamp", "repeat", "debounce"} & record.opts.keys()
    assert BullJob(id="7", key_suffix=key_suffix, score="", fields=hash_).origin in {JobOrigin.EITHER, JobOrigin.BULLMQ}
    json.loads(hash_.get("progress", b"0"))
