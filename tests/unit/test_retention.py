"""The settings ``remove_on_complete`` and ``remove_on_fail``, and the retention options of jobs."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest

from bulltask.config.settings import Settings
from bulltask.errors import ConfigError
from bulltask.jobs.job import RunningJob

NAMES = pytest.mark.parametrize("name", ["remove_on_complete", "remove_on_fail"])


def setting(name: str, value: Any) -> Any:
    """Return BullMQ's ``keepJobs`` for a worker with this setting."""
    config = Settings({name: value}, {}).freeze()
    return config.keep_completed if name == "remove_on_complete" else config.keep_failed


@NAMES
@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        ("none", None),
        (True, {"count": 0}),
        ("true", {"count": 0}),
        (False, {"count": -1}),
        ("no", {"count": -1}),
        (0, {"count": 0}),
        ("0", {"count": 0}),
        (1000, {"count": 1000}),
        ("1000", {"count": 1000}),
        ({"count": 5}, {"count": 5}),
        ({"age": 3600, "count": 5}, {"age": 3600, "count": 5}),
        ({"age": timedelta(hours=1)}, {"age": 3600}),
        ({"age": 0.5}, {"age": 1}),  # BullMQ counts whole seconds
        ("age=3600,count=5", {"age": 3600, "count": 5}),
        (" count = 5 ", {"count": 5}),
        ("age=0.5", {"age": 1}),
        ({}, {}),
    ],
)
def test_a_retention_setting_may_be_a_flag_a_count_or_limits(name: str, value: object, expected: object) -> None:
    assert setting(name, value) == expected


@NAMES
@pytest.mark.parametrize(
    ("value", "message"),
    [
        (-1, " must be true, false, a number of jobs, or .*, not -1"),
        ("many", " must be true, false, a number of jobs, or .*, not 'many'"),
        ("age=soon", " must be true, false, a number of jobs"),
        ("age", " must be true, false, a number of jobs"),
        (1.5, " must be true, false, a number of jobs"),
        (2**53, ".count must be an integer"),
        ({"age": -1}, ".age must be a finite duration"),
        ({"count": -1}, ".count must be an integer of 0 or more"),
        ({"count": True}, ".count must be an integer of 0 or more"),
        ({"age": 1, "limit": 5}, " has no key 'limit'; use age, count"),
        ("limit=5", " has no key 'limit'; use age, count"),
    ],
)
def test_an_invalid_retention_setting_is_rejected_with_the_reason(name: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}{message}"):
        setting(name, value)


@pytest.mark.parametrize(
    ("stored", "kept"),
    [
        (None, {"count": 7}),
        ("nonsense", {"count": 7}),
        (True, {"count": 0}),
        (False, {"count": -1}),
        (3, {"count": 3}),
        ({"age": 60}, {"age": 60}),
        ({}, {}),
    ],
)
def test_a_jobs_retention_overrides_the_workers(stored: object, kept: object) -> None:
    opts = {} if stored is None else {"removeOnFail": stored}
    fields = [b"name", b"n", b"opts", json.dumps(opts).encode()]
    assert RunningJob.from_hash("mail", "1", fields).keep("removeOnFail", {"count": 7}) == kept


def test_every_job_is_kept_without_a_retention_option() -> None:
    job = RunningJob.from_hash("mail", "1", [])
    assert job.keep("removeOnComplete") == job.keep("removeOnComplete", None) == {"count": -1}
