from __future__ import annotations

import hashlib
import json
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bulltask.errors import DecodeError
from bulltask.jobs.clock import zone_of
from bulltask.jobs.job import JobOptions, RunningJob
from bulltask.jobs.schedules import Repeat, Scheduler
from bulltask.queue.schedulers import next_iteration, next_repeat

NOON = round(datetime(2026, 5, 1, 12, tzinfo=UTC).timestamp() * 1000)
DAY = 86_400_000


def job(repeat: object, **options: Any) -> RunningJob:
    """Return the job of an iteration as it is read from Redis."""
    opts = {"attempts": 3, **options} | ({} if repeat is None else {"repeat": repeat})
    fields = {"name": "send", "data": '{"n":1}', "opts": json.dumps(opts), "rjk": "beat", "timestamp": str(NOON)}
    flat = [text.encode() for pair in fields.items() for text in pair]
    return RunningJob.from_hash("mail", "repeat:beat:1", flat)


# --- the next iteration -----------------------------------------------------------------------------------------------


def test_the_next_iteration_of_a_pattern_has_its_time_in_the_job_id() -> None:
    repeat = {"pattern": "0 3 * * *", "count": 4, "tz": "Europe/Berlin"}
    current = job(repeat, prevMillis=1, delay=5, kl=3, custom={"a": 1})
    following = next_iteration(current, NOON, UTC)
    assert following is not None
    next_ms = round(datetime(2026, 5, 2, 1, tzinfo=UTC).timestamp() * 1000)
    assert (following.next_ms, following.data) == (next_ms, b'{"n":1}')
    assert following.options == {
        "attempts": 3,
        "delay": 5,
        "kl": 3,
        "custom": {"a": 1},
        "repeat": {"pattern": "0 3 * * *", "count": 5, "tz": "Europe/Berlin"},
        "prevMillis": next_ms,
        "jobId": f"repeat:beat:{next_ms}",
        "timestamp": NOON,
        "repeatJobKey": "beat",
    }


@pytest.mark.parametrize(
    ("pattern", "before", "previous"),
    [
        ("0 3 * * *", "2026-05-02T03:00", "2026-05-01T03:00"),
        ("*/5 9-17 * * mon-fri", "2026-05-04T09:00", "2026-05-01T17:55"),
        ("* * * * * *", "2026-05-01T00:00:01", "2026-05-01T00:00:00"),
        ("0 0 29 2 *", "2028-02-29T00:00", "2024-02-29T00:00"),
    ],
)
def test_the_time_before_one_is_the_last_at_which_the_pattern_matches(pattern: str, before: str, previous: str) -> None:
    before_ms, previous_ms = (
        round(datetime.fromisoformat(f"{text}+00:00").timestamp() * 1000) for text in (before, previous)
    )
    assert Repeat(pattern=pattern).previous_ms(before_ms, UTC) == previous_ms


def test_the_next_time_of_an_interval_is_computed_by_the_script() -> None:
    following = next_iteration(job({"every": 1000, "count": 1}, prevMillis=NOON), NOON, UTC)
    assert following is not None
    assert following.next_ms is None
    assert "prevMillis" not in following.options
    assert following.options["repeat"] == {"every": 1000, "count": 2}


def test_a_pattern_without_a_time_zone_uses_the_configured_time_zone() -> None:
    following = next_iteration(job({"pattern": "0 3 * * *"}), NOON, zone_of("America/New_York"))
    assert following is not None
    assert following.next_ms == round(datetime(2026, 5, 2, 7, tzinfo=UTC).timestamp() * 1000)


def test_a_lagging_clock_does_not_repeat_an_iteration() -> None:
    following = next_iteration(job({"pattern": "* * * * *"}, prevMillis=NOON), NOON - 5, UTC)
    assert following is not None
    assert following.next_ms == NOON + 60_000


@pytest.mark.parametrize(
    "repeat",
    [
        {"every": 1000, "limit": 3, "count": 3},
        {"every": 1000, "endDate": NOON - 1},
        {"pattern": "0 3 * * *", "endDate": NOON + 60_000},
        {"pattern": "0 0 31 2,4 *"},
    ],
)
def test_no_iteration_follows_the_last_iteration(repeat: dict[str, Any]) -> None:
    assert next_iteration(job(repeat), NOON, UTC) is None


@pytest.mark.parametrize(
    "repeat",
    [
        {"every": 1000, "limit": 4, "count": 3},
        {"every": 1000, "endDate": NOON},
        {"pattern": "0 3 * * *", "endDate": NOON + DAY},
    ],
)
def test_iterations_continue_up_to_the_limit_and_the_end_date(repeat: dict[str, Any]) -> None:
    assert next_iteration(job(repeat), NOON, UTC) is not None


def test_no_iteration_runs_before_the_start_date() -> None:
    following = next_iteration(job({"pattern": "0 3 * * *", "startDate": NOON + 10 * DAY}), NOON, UTC)
    assert following is not None
    assert following.next_ms == NOON + 10 * DAY + 15 * 3_600_000


def test_old_repeatable_jobs_may_have_dates_as_strings() -> None:
    rule = Repeat.from_wire({"pattern": "* * * * *", "utc": True, "endDate": "2026-05-01T12:00:00.000Z"})
    assert (rule.end_ms, rule.tz) == (NOON, "UTC")


@pytest.mark.parametrize(
    "repeat",
    [
        None,
        [],
        "x",
        {},
        {"every": 1, "pattern": "* * * * *"},
        {"every": "1"},
        {"every": True},
        {"pattern": 5},
        {"every": 1, "limit": "x"},
    ],
)
def test_invalid_repeat_options_are_rejected(repeat: object) -> None:
    with pytest.raises(DecodeError):
        next_iteration(job(repeat), NOON, UTC)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from(["pattern", "every", "tz", "limit", "count", "startDate", "endDate", "utc", "offset"])


@given(st.dictionaries(NAMES, JSON, max_size=6), st.integers(0, 4 * 10**12))
def test_any_repeat_options_are_either_read_or_rejected(repeat: dict[str, Any], now: int) -> None:
    try:
        following = next_iteration(job({"pattern": "* * * * *", **repeat}), now, UTC)
    except (ValueError, OverflowError):  # the worker pauses the scheduler after these errors
        return
    assert following is None or following.next_ms is None or following.next_ms > now


# --- schedulers read from Redis ---------------------------------------------------------------------------------------


def test_a_malformed_scheduler_can_be_read() -> None:
    flat = [b"name", b"send", b"ic", b"x", b"every", b"1e3", b"data", b"{", b"opts", b"[]", b"limit", b"\xff"]
    read = Scheduler.from_hash("beat", flat, 5)
    assert (read.id, read.name, read.next_ms, read.next_job_id) == ("beat", "send", 5, "repeat:beat:5")
    assert (read.iterations, read.every_ms, read.limit, read.data, read.opts) == (0, 1000, None, None, {})
    assert Scheduler.from_hash("old", [], 5).name == ""


# --- expiry -----------------------------------------------------------------------------------------------------------


def test_each_iteration_expires_relative_to_its_time() -> None:
    template = JobOptions(expires_in_ms=5000, headers='{"a":1}', sender="shop@web").to_template(beat="shop")
    assert template["bulltask"] == {"v": 1, "ttl": 5000, "headers": '{"a":1}', "beat": "shop"}
    assert "jobId" not in template
    assert job({"every": 1000}, delay=300, **template).expires_ms == NOON + 5300
    assert job({"every": 1000}, **template).expires_ms == NOON + 5000


def test_a_template_keeps_an_absolute_expiry_time() -> None:
    assert JobOptions(expires_ms=NOON).to_template()["bulltask"] == {"v": 1, "expires": NOON}


# --- repeatable jobs of BullMQ before 5.10 ----------------------------------------------------------------------------


def test_an_old_repeatable_job_runs_at_multiples_of_its_interval() -> None:
    following = next_repeat(job({"every": 60_000, "count": 2, "immediately": True, "jobId": "x"}), NOON + 5, UTC)
    assert following is not None
    assert (following.next_ms, following.key) == (NOON + 60_000, "send:x:::60000")
    assert following.hashed_key == hashlib.md5(following.key.encode()).hexdigest()
    assert following.rule == {"every": 60_000, "count": 3, "jobId": "x"}


def test_old_repeat_options_may_have_cron_instead_of_pattern() -> None:
    following = next_repeat(job({"cron": "0 3 * * *", "tz": "UTC", "endDate": NOON + 9 * DAY}), NOON, UTC)
    assert following is not None
    assert (following.next_ms, following.key) == (NOON + 15 * 3_600_000, f"send::{NOON + 9 * DAY}:UTC:0 3 * * *")
    assert (following.rule["pattern"], following.rule["count"]) == ("0 3 * * *", 1)


def test_old_repeatable_jobs_end_at_their_limit_or_end_date() -> None:
    assert next_repeat(job({"every": 1000, "limit": 2, "count": 2}), NOON, UTC) is None
    assert next_repeat(job({"pattern": "0 3 * * *", "endDate": NOON + 5}), NOON, UTC) is None
    with pytest.raises(DecodeError):
        next_repeat(job([]), NOON, UTC)


def test_a_job_is_repeated_if_it_has_a_scheduler_or_repeat_options() -> None:
    assert job({"every": 1}).is_repeated
    assert job(None).is_repeated, "it has a scheduler"
    assert not RunningJob.from_hash("mail", "1", [b"opts", b"{}"]).is_repeated
    assert RunningJob.from_hash("mail", "1", [b"opts", b'{"repeat":{"every":1}}']).is_repeated
