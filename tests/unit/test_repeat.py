from __future__ import annotations

import hashlib
import json
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bulltask.clock import zone_of
from bulltask.errors import DecodeError
from bulltask.jobs.job import JobOptions, RunningJob
from bulltask.queue.next_iteration import next_iteration
from bulltask.queue.repeatables import next_repeat
from bulltask.schedule.repeat import Repeat, Scheduler

NOON = round(datetime(2026, 5, 1, 12, tzinfo=UTC).timestamp() * 1000)
DAY = 86_400_000


def job(repeat: object, **options: Any) -> RunningJob:
    """The job of an iteration, as it comes out of Redis."""
    opts = {"attempts": 3, **options} | ({} if repeat is None else {"repeat": repeat})
    fields = {"name": "send", "data": '{"n":1}', "opts": json.dumps(opts), "rjk": "beat", "timestamp": str(NOON)}
    flat = [word.encode() for pair in fields.items() for word in pair]
    return RunningJob.from_hash("mail", "repeat:beat:1", flat)


# --- the job that follows ---------------------------------------------------------------------------------------------


def test_the_next_job_of_a_pattern_has_its_time_in_its_id_and_the_next_count() -> None:
    done = job({"pattern": "0 3 * * *", "count": 4, "tz": "Europe/Berlin"}, prevMillis=1, delay=5, kl=3, own={"a": 1})
    found = next_iteration(done, NOON, UTC)
    assert found is not None
    three = round(datetime(2026, 5, 2, 1, tzinfo=UTC).timestamp() * 1000)
    assert (found.next_ms, found.data) == (three, b'{"n":1}')
    assert found.options == {
        "attempts": 3,
        "delay": 5,
        "kl": 3,
        "own": {"a": 1},
        "repeat": {"pattern": "0 3 * * *", "count": 5, "tz": "Europe/Berlin"},
        "prevMillis": three,
        "jobId": f"repeat:beat:{three}",
        "timestamp": NOON,
        "repeatJobKey": "beat",
    }


def test_the_time_of_an_interval_is_left_to_the_script() -> None:
    found = next_iteration(job({"every": 1000, "count": 1}, prevMillis=NOON), NOON, UTC)
    assert found is not None
    assert found.next_ms is None
    assert "prevMillis" not in found.options
    assert found.options["repeat"] == {"every": 1000, "count": 2}


def test_a_pattern_without_a_time_zone_uses_that_of_the_settings() -> None:
    found = next_iteration(job({"pattern": "0 3 * * *"}), NOON, zone_of("America/New_York"))
    assert found is not None
    assert found.next_ms == round(datetime(2026, 5, 2, 7, tzinfo=UTC).timestamp() * 1000)


def test_a_lagging_clock_does_not_repeat_an_iteration() -> None:
    found = next_iteration(job({"pattern": "* * * * *"}, prevMillis=NOON), NOON - 5, UTC)
    assert found is not None
    assert found.next_ms == NOON + 60_000


@pytest.mark.parametrize(
    "repeat",
    [
        {"every": 1000, "limit": 3, "count": 3},
        {"every": 1000, "endDate": NOON - 1},
        {"pattern": "0 3 * * *", "endDate": NOON + 60_000},
        {"pattern": "0 0 31 2,4 *"},
    ],
)
def test_no_job_follows_the_last_one(repeat: dict[str, Any]) -> None:
    assert next_iteration(job(repeat), NOON, UTC) is None


@pytest.mark.parametrize(
    "repeat",
    [
        {"every": 1000, "limit": 4, "count": 3},
        {"every": 1000, "endDate": NOON},
        {"pattern": "0 3 * * *", "endDate": NOON + DAY},
    ],
)
def test_jobs_follow_up_to_the_limit_and_the_end(repeat: dict[str, Any]) -> None:
    assert next_iteration(job(repeat), NOON, UTC) is not None


def test_no_job_runs_before_the_start() -> None:
    found = next_iteration(job({"pattern": "0 3 * * *", "startDate": NOON + 10 * DAY}), NOON, UTC)
    assert found is not None
    assert found.next_ms == NOON + 10 * DAY + 15 * 3_600_000


def test_dates_of_old_repeatable_jobs_are_strings() -> None:
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
def test_invalid_repeat_options_are_rejected_with_the_reason(repeat: object) -> None:
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
        found = next_iteration(job({"pattern": "* * * * *", **repeat}), now, UTC)
    except (ValueError, OverflowError):  # what the worker turns into a pause
        return
    assert found is None or found.next_ms is None or found.next_ms > now


# --- what Redis holds -------------------------------------------------------------------------------------------------


def test_a_malformed_scheduler_can_be_shown() -> None:
    flat = [b"name", b"send", b"ic", b"x", b"every", b"1e3", b"data", b"{", b"opts", b"[]", b"limit", b"\xff"]
    found = Scheduler.from_hash("beat", flat, 5)
    assert (found.id, found.name, found.next_ms, found.next_job_id) == ("beat", "send", 5, "repeat:beat:5")
    assert (found.iterations, found.every_ms, found.limit, found.data, found.opts) == (0, 1000, None, None, {})
    assert Scheduler.from_hash("old", [], 5).name == ""


# --- expiry -----------------------------------------------------------------------------------------------------------


def test_each_job_of_a_scheduler_expires_relative_to_its_own_time() -> None:
    template = JobOptions(expires_in_ms=5000, headers='{"a":1}').to_template(beat="shop")
    assert template["bulltask"] == {"v": 1, "ttl": 5000, "headers": '{"a":1}', "beat": "shop"}
    assert "jobId" not in template
    assert job({"every": 1000}, delay=300, **template).expires_ms == NOON + 5300
    assert job({"every": 1000}, **template).expires_ms == NOON + 5000


def test_an_absolute_expiry_stays_one() -> None:
    assert JobOptions(expires_ms=NOON).to_template()["bulltask"] == {"v": 1, "expires": NOON}


# --- repeatable jobs of BullMQ before 5.10 ----------------------------------------------------------------------------


def test_an_interval_of_an_old_repeatable_job_runs_at_its_multiples() -> None:
    found = next_repeat(job({"every": 60_000, "count": 2, "immediately": True, "jobId": "x"}), NOON + 5, UTC)
    assert found is not None
    assert (found.next_ms, found.key) == (NOON + 60_000, "send:x:::60000")
    assert found.hashed_key == hashlib.md5(found.key.encode()).hexdigest()
    assert found.rule == {"every": 60_000, "count": 3, "jobId": "x"}


def test_old_repeat_options_may_have_cron_in_place_of_pattern() -> None:
    found = next_repeat(job({"cron": "0 3 * * *", "tz": "UTC", "endDate": NOON + 9 * DAY}), NOON, UTC)
    assert found is not None
    assert (found.next_ms, found.key) == (NOON + 15 * 3_600_000, f"send::{NOON + 9 * DAY}:UTC:0 3 * * *")
    assert found.rule["pattern"] == "0 3 * * *"


def test_old_repeatable_jobs_end_too() -> None:
    assert next_repeat(job({"every": 1000, "limit": 2, "count": 2}), NOON, UTC) is None
    assert next_repeat(job({"pattern": "0 3 * * *", "endDate": NOON + 5}), NOON, UTC) is None
    with pytest.raises(DecodeError):
        next_repeat(job([]), NOON, UTC)


def test_only_repeated_jobs_are_checked() -> None:
    assert job({"every": 1}).is_repeated
    assert job(None).is_repeated, "by its scheduler alone"
    assert not RunningJob.from_hash("mail", "1", [b"opts", b"{}"]).is_repeated
    assert RunningJob.from_hash("mail", "1", [b"opts", b'{"repeat":{"every":1}}']).is_repeated
