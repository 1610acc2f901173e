from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bulltask.errors import ConfigError, DecodeError, InvalidNameError
from bulltask.jobs.backoff import Backoff
from bulltask.jobs.job import (
    MAX_PRIORITY,
    Deduplication,
    JobOptions,
    JobRef,
    NewJob,
    RunningJob,
    StoredOptions,
)
from bulltask.jobs.names import JobState, check_job_id, check_job_name, check_queue_name, check_scheduler_id
from bulltask.registry.request import ancestry

NOW_MS = 1_800_000_000_000
BACKOFF = {"type": "exponential", "delay": 1_000, "jitter": 0.2, "maxDelay": 3_600_000}

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


def stored_options(**options: Any) -> dict[str, Any]:
    return JobOptions(**options).to_wire(NOW_MS)


def acquired_job(fields: dict[str, object] | None = None, /, **opts: object) -> RunningJob:
    """Return a job as a fetch would read it."""
    raw = {"name": "t", "data": "{}", "timestamp": NOW_MS, "opts": json.dumps(opts), **(fields or {})}
    flat = [item if isinstance(item, bytes) else str(item).encode() for pair in raw.items() for item in pair]
    return RunningJob.from_hash("mail", "id-1", flat)


# --- stored options ---------------------------------------------------------------------------------------------------


def test_a_job_without_options_stores_attempts_backoff_and_bulltasks_key() -> None:
    assert stored_options() == {"attempts": 3, "backoff": BACKOFF, "bulltask": {"v": 1}}


def test_the_job_id_is_stored_as_an_option_only_if_the_caller_chose_it() -> None:
    job = NewJob("mail", "id-1", "t", b"{}", JobOptions())
    assert "jobId" not in job.opts(NOW_MS)
    assert replace(job, has_custom_id=True).opts(NOW_MS) == {**stored_options(), "jobId": "id-1"}


@pytest.mark.parametrize(
    ("options", "written"),
    [
        ({"attempts": 1}, {"attempts": 1}),
        ({"backoff": Backoff("fixed", 250)}, {"backoff": {**BACKOFF, "type": "fixed", "delay": 250, "jitter": 0}}),
        ({"delay_ms": 500}, {"delay": 500}),
        ({"eta_ms": NOW_MS + 70}, {"delay": 70}),
        ({"eta_ms": NOW_MS + 70, "delay_ms": 80}, {"delay": 80}),
        ({"eta_ms": NOW_MS - 70}, {}),
        ({"priority": 7}, {"priority": 7}),
        ({"lifo": True}, {"lifo": True}),
        ({"keep_completed_ms": 90_000}, {"removeOnComplete": {"age": 90}}),
        ({"keep_completed_ms": 1}, {"removeOnComplete": {"age": 1}}),
        ({"keep_completed_ms": 0}, {"removeOnComplete": True}),
        ({"keep_failed_ms": 3_600_000}, {"removeOnFail": {"age": 3_600}}),
        ({"expires_in_ms": 5}, {"bulltask": {"v": 1, "expires": NOW_MS + 5}}),
        ({"expires_ms": 5}, {"bulltask": {"v": 1, "expires": 5}}),
        ({"headers": '{"a":[]}'}, {"bulltask": {"v": 1, "headers": '{"a":[]}'}}),
    ],
)
def test_each_option_is_stored_under_bullmqs_name(options: dict[str, Any], written: dict[str, Any]) -> None:
    assert stored_options(**options) == {**stored_options(), **written}


def test_a_missing_backoff_is_not_stored() -> None:
    assert "backoff" not in stored_options(backoff=None)


def test_a_new_job_has_a_reference() -> None:
    assert NewJob("mail", "id-1", "t", b"{}", JobOptions()).ref == JobRef("mail", "id-1")


# --- jobs read from Redis ---------------------------------------------------------------------------------------------


def test_a_job_is_read_from_its_hash() -> None:
    job = acquired_job(
        {
            "name": "mail.send",
            "data": '{"to":"é"}',
            "priority": 7,
            "atm": 1,
            "ats": 3,
            "defa": "child failed",
            "rjk": "daily",
            "stacktrace": '["one","two"]',
        },
        attempts=5,
        lifo=True,
        bulltask={"v": 1, "expires": NOW_MS, "headers": '{"trace":"1"}'},
    )
    assert (job.queue, job.id, job.name, job.data) == ("mail", "id-1", "mail.send", '{"to":"é"}'.encode())
    assert (job.timestamp_ms, job.priority, job.attempts_made, job.attempts_started) == (NOW_MS, 7, 1, 3)
    assert (job.deferred_failure, job.scheduler_id) == ("child failed", "daily")
    assert (job.attempts, job.lifo, job.sent_by_bulltask) == (5, True, True)
    assert (job.expires_ms, job.headers) == (NOW_MS, {"trace": "1"})
    assert job.traces() == ["one", "two"]


def test_a_job_of_another_client_has_bullmqs_defaults() -> None:
    job = acquired_job()
    assert (job.attempts, job.lifo, job.sent_by_bulltask, job.backoff(), job.expires_ms) == (
        0,
        False,
        False,
        None,
        None,
    )
    assert (job.headers, job.traces(), job.trace_limit(), job.scheduler_id) == ({}, [], None, "")
    assert (job.attempts_made, job.attempts_started, job.priority, job.deferred_failure) == (0, 0, 0, "")


def test_a_job_without_data_has_null_as_data() -> None:
    assert RunningJob.from_hash("q", "1", []).data == b"null"


def test_numbers_that_lua_wrote_with_an_exponent_are_read() -> None:
    assert acquired_job({"timestamp": "1.7952166521581e+15"}).timestamp_ms == 1_795_216_652_158_100


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"opts": "{"}, "field opts of job id-1 is not valid JSON"),
        ({"opts": "[]"}, "field opts of job id-1 is not a JSON object"),
        ({"atm": "many"}, "field atm of job id-1 is not a number: b'many'"),
        ({"priority": "inf"}, "field priority of job id-1 is not a number"),
        ({"timestamp": "nan"}, "field timestamp of job id-1 is not a number"),
    ],
)
def test_a_malformed_field_is_rejected_by_name(fields: dict[str, object], message: str) -> None:
    with pytest.raises(DecodeError) as caught:
        acquired_job(fields)
    assert message in str(caught.value)


def test_a_malformed_job_becomes_a_placeholder_with_the_error() -> None:
    job = RunningJob.placeholder("mail", "id-1", "field opts is not JSON")
    assert job.deferred_failure == "field opts is not JSON"
    assert (job.queue, job.id, job.attempts, job.keep("removeOnFail")) == ("mail", "id-1", 0, {"count": -1})
    assert job.timestamp_ms == 0


@given(st.lists(st.tuples(st.sampled_from([b"opts", b"atm", b"ats", b"timestamp", b"priority"]), st.binary())))
def test_any_hash_is_either_read_or_rejected_as_malformed(pairs: list[tuple[bytes, bytes]]) -> None:
    with contextlib.suppress(DecodeError):
        RunningJob.from_hash("q", "1", [item for pair in pairs for item in pair])


@given(
    st.dictionaries(
        st.sampled_from(
            ["attempts", "backoff", "lifo", "removeOnComplete", "stackTraceLimit", "bulltask", "kl", "priority"]
        ),
        json_values | st.dictionaries(st.sampled_from(["expires", "headers", "age", "count", "delay"]), json_values),
    ),
    st.binary(),
)
def test_any_options_are_either_read_or_rejected_as_malformed(opts: Any, trace: bytes) -> None:
    job = RunningJob("q", "1", "t", b"", StoredOptions(opts), 0, 0, 0, 0, "", "", trace)
    assert isinstance(job.attempts, int)
    assert isinstance(job.lifo, bool)
    assert all(isinstance(number, int) for number in job.keep("removeOnComplete").values())
    assert all(isinstance(text, str) for text in job.traces())
    assert job.trace_limit() is None or isinstance(job.trace_limit(), int)
    assert job.expires_ms is None or isinstance(job.expires_ms, int)
    for read in (lambda: job.headers, job.backoff):
        with contextlib.suppress(DecodeError):
            read()


@pytest.mark.parametrize(
    ("stored", "expected"),
    [(5, 5), (5.0, 5), ("5", 0), (True, 0), (None, 0), (-1, -1), (float("inf"), 0), (float("nan"), 0), ([], 0)],
)
def test_an_option_that_is_not_a_number_counts_as_zero(stored: object, expected: int) -> None:
    assert RunningJob("q", "1", "t", b"", StoredOptions(attempts=stored), 0, 0, 0, 0, "", "", None).attempts == expected


@pytest.mark.parametrize(
    ("stored", "kept"),
    [
        (None, {"count": -1}),
        (False, {"count": -1}),
        (True, {"count": 0}),
        (0, {"count": 0}),
        (100, {"count": 100}),
        ({"age": 60}, {"age": 60}),
        ({"age": 60, "count": 5, "limit": 9}, {"age": 60, "count": 5}),
        ("yes", {"count": -1}),
    ],
)
def test_retention_is_read_as_in_bullmq(stored: object, kept: dict[str, int]) -> None:
    opts = {} if stored is None else {"removeOnComplete": stored}
    assert acquired_job(**opts).keep("removeOnComplete") == kept


@pytest.mark.parametrize(("stored", "limit"), [(3, 3), (0, 0), (-1, None), ("3", None), (True, None)])
def test_the_traceback_limit_must_be_a_count(stored: object, limit: int | None) -> None:
    assert acquired_job(stackTraceLimit=stored).trace_limit() == limit


@pytest.mark.parametrize(
    ("stored", "traces"),
    [(b'["a",1,"b"]', ["a", "b"]), (b"{}", []), (b"not json", []), (None, [])],
)
def test_a_job_with_malformed_tracebacks_can_fail(stored: bytes | None, traces: list[str]) -> None:
    assert RunningJob("q", "1", "t", b"", StoredOptions(), 0, 0, 0, 0, "", "", stored).traces() == traces


def test_malformed_headers_and_backoffs_are_ignored_or_rejected() -> None:
    assert acquired_job(bulltask={"headers": 5}).headers == {}
    assert acquired_job(bulltask={"headers": "[1]"}).headers == {}
    with pytest.raises(DecodeError, match="headers of job id-1"):
        _ = acquired_job(bulltask={"headers": "{"}).headers
    with pytest.raises(DecodeError, match="backoff"):
        acquired_job(backoff="soon").backoff()


@given(
    st.builds(
        JobOptions,
        attempts=st.integers(1, 1000),
        delay_ms=st.integers(0, 2**40),
        priority=st.integers(0, MAX_PRIORITY),
        lifo=st.booleans(),
        expires_ms=st.none() | st.integers(0, 2**40),
        headers=st.sampled_from(["", '{"a":1}']),
    )
)
def test_stored_options_are_read_back_unchanged(options: JobOptions) -> None:
    job = acquired_job(**options.to_wire(NOW_MS))
    assert job.sent_by_bulltask
    assert (job.attempts, job.lifo, job.expires_ms) == (options.attempts, options.lifo, options.expires_ms)
    assert job.backoff() == options.backoff
    assert job.headers == json.loads(options.headers or "{}")


@pytest.mark.parametrize("state", JobState)
def test_only_completed_and_failed_are_finished_states(state: JobState) -> None:
    assert state.finished is (state in {"completed", "failed"})


# --- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mail", "{mail}", "a{b}c", "höflich mit Leerzeichen", "x" * 255, "a/b#c"])
def test_a_valid_queue_name_is_accepted(name: str) -> None:
    assert check_queue_name(name) == name


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "non-empty"),
        ("{}", "braces"),
        ("{mail", "braces"),
        ("a:b", "separates"),
        ("x" * 256, "256 characters"),
        ("a\nb", "control characters"),
        ("a\ud800", "UTF-8"),
        (5, "must be a non-empty string"),
        (None, "must be a non-empty string"),
    ],
)
def test_an_invalid_queue_name_is_rejected(name: Any, message: str) -> None:
    with pytest.raises(InvalidNameError, match=message):
        check_queue_name(name)


@pytest.mark.parametrize("job_id", ["a", "order-17", "1e5", "é", "0x", "007", "٣", "a:b:c", "x" * 255])
def test_a_valid_job_id_is_accepted(job_id: str) -> None:
    assert check_job_id(job_id) == job_id


@pytest.mark.parametrize(
    ("job_id", "message"),
    [
        ("", "non-empty"),
        ("17", "a number"),
        ("0", "a number"),
        ("-17", "a number"),
        ("0:1", "':'"),
        ("0:a:b", "':'"),
        ("a:b", "':'"),
        ("a:b:c:d", "':'"),
        ("wait", "queue's own keys"),
        ("stalled-check", "queue's own keys"),
        ("de:a:b", "queue's own keys"),
        ("metrics:completed:data", "queue's own keys"),
        ("x" * 256, "256 characters"),
        ("a\x00", "control"),
        (17, "must be a non-empty string"),
    ],
)
def test_an_invalid_job_id_is_rejected(job_id: Any, message: str) -> None:
    with pytest.raises(InvalidNameError, match=message):
        check_job_id(job_id)


def test_a_task_name_may_be_any_string_without_control_characters() -> None:
    assert check_job_name("mail:send now") == "mail:send now"
    with pytest.raises(InvalidNameError, match="task name"):
        check_job_name("a\tb")


def test_a_job_is_delayed_until_its_eta_or_for_its_countdown() -> None:
    assert JobOptions(eta_ms=NOW_MS + 3_000).delay_at(NOW_MS) == 3_000
    assert JobOptions(eta_ms=NOW_MS - 3_000).delay_at(NOW_MS) == 0
    assert JobOptions(delay_ms=5).delay_at(NOW_MS) == 5


def test_the_times_to_keep_finished_jobs_are_stored_in_seconds() -> None:
    stored = stored_options(keep_completed_ms=60_000, keep_failed_ms=120_000)
    assert (stored["removeOnComplete"], stored["removeOnFail"]) == ({"age": 60}, {"age": 120})


def test_a_scheduler_id_has_at_most_three_colons() -> None:
    assert check_scheduler_id("a:b:c:d") == "a:b:c:d"
    with pytest.raises(InvalidNameError, match="more than three ':'"):
        check_scheduler_id("a:b:c:d:e")


@pytest.mark.parametrize("stored", [None, 7, "-1", "x", "9" * 400])
def test_a_foreign_count_of_replacements_is_zero(stored: object) -> None:
    options = StoredOptions(bulltask={"origin": {"parent": "p", "root": "r", "replacements": stored}})
    job = RunningJob("q", "1", "t", b"", options, 0, 0, 0, 0, "", "", None)
    assert ancestry(job)["replaced_task_nesting"] == 0


def test_a_deduplication_id_that_utf_8_cannot_encode_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"deduplication.id 'a\\ud800' contains characters that UTF-8 cannot encode"):
        Deduplication("a\ud800").to_wire()
