"""The setting ``limiter``: formats of rate limits, and the limit of each queue."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bulltask.config.settings import Settings
from bulltask.errors import ConfigError

MINUTE = {"max": 100, "duration": 60_000}


def limiter(value: Any, queue: str = "mail") -> Any:
    """Return the limit that workers of an app with this setting pass to BullMQ's scripts."""
    return Settings({"limiter": value}, {}).freeze().limiter(queue)


@pytest.mark.parametrize("value", [None, "", "none", "None"])
def test_an_empty_value_means_no_rate_limit(value: object) -> None:
    assert limiter(value) is None


@pytest.mark.parametrize(
    "value",
    [
        {"max": 100, "duration": 60},
        {"max": 100, "duration": 60.0},
        {"max": 100, "duration": timedelta(minutes=1)},
        "100/m",
        "100/1m",
        "100/60s",
        " 100 / 60 s ",
        "100/60000ms",
        {"*": "100/m"},
        {"mail": "100/m"},
        {"mail": {"max": 100, "duration": 60}, "*": "1/h"},
        "mail=100/m",
        "1/h, mail = 100/m",
    ],
)
def test_a_rate_limit_may_be_a_string_or_a_dictionary(value: object) -> None:
    assert limiter(value) == MINUTE


@pytest.mark.parametrize(
    ("text", "duration_ms"), [("1/ms", 1), ("1/s", 1_000), ("1/h", 3_600_000), ("1/2d", 172_800_000), ("1/1.5s", 1_500)]
)
def test_a_rate_limit_may_have_any_unit_of_time(text: str, duration_ms: int) -> None:
    assert limiter(text) == {"max": 1, "duration": duration_ms}


def test_the_star_limit_applies_to_queues_without_a_named_limit() -> None:
    setting = "mail=100/m, {tagged}=2/s, bulk=none, 5/s"
    assert limiter(setting, "mail") == MINUTE
    assert limiter(setting, "{tagged}") == {"max": 2, "duration": 1_000}
    assert limiter(setting, "bulk") is None
    assert limiter(setting, "others") == {"max": 5, "duration": 1_000}


def test_queues_without_a_named_or_star_limit_have_no_rate_limit() -> None:
    assert limiter({"mail": "100/m"}, "others") is None
    assert limiter("mail=100/m", "others") is None
    assert limiter({"mail": None, "*": "1/s"}, "mail") is None


@pytest.mark.parametrize("queue", ["max", "duration"])
def test_a_queue_may_be_named_max_or_duration(queue: str) -> None:
    assert limiter({queue: "100/m"}, queue) == MINUTE
    assert limiter({queue: {"max": 100, "duration": 60}}, queue) == MINUTE
    assert limiter(f"{queue}=100/m", queue) == MINUTE
    assert limiter({"max": "100/m", "duration": "100/m"}, queue) == MINUTE


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("100", "limiter must be a rate such as '100/m' or .*, not '100'"),
        (100, "limiter must be a rate such as"),
        ("100/10", "limiter must be a rate such as"),
        ("0.5/s", "limiter must be a rate such as"),
        ("-1/s", "limiter must be a rate such as"),
        ("100/w", "limiter must be a rate such as"),
        ("mail=5/s,", "limiter must be a rate such as .*, not ''"),
        ("mail=", r"limiter\['mail'\] must be a rate such as"),
        ({}, "limiter must be a rate such as"),
        ({1: "5/s"}, "limiter must be a rate such as"),
        ({"": "5/s"}, "limiter must be a rate such as"),
        ({"mail": 5}, r"limiter\['mail'\] must be a rate such as .*, not 5"),
        ("5/s, 6/s", "limiter must have one limit per queue, not two for every queue"),
        ("a=5/s, a=6/s", "limiter must have one limit per queue, not two for a"),
        ("0/s", r"limiter\.max must be an integer from 1 to 9007199254740991, not 0"),
        ({"max": True, "duration": 1}, r"limiter\.max must be an integer"),
        ({"max": 2**53, "duration": 1}, r"limiter\.max must be an integer"),
        ({"max": 5}, "limiter must contain exactly max and duration, not {'max': 5}"),
        ({"max": 5, "duration": 1, "groupKey": "x"}, "limiter must contain exactly max and duration"),
        ({"mail": {"duration": 1}}, r"limiter\['mail'\] must contain exactly max and duration"),
        ("5/0s", r"limiter\.duration must be at least 0.001 s"),
        ({"max": 5, "duration": 0}, r"limiter\.duration must be at least 0.001 s, not 0"),
        ({"max": 5, "duration": "60"}, r"limiter\.duration must be a number of seconds or a timedelta, not '60'"),
        ({"max": 5, "duration": -1}, r"limiter\.duration must be a finite duration of zero or more"),
        ({"mail": {"max": 5, "duration": None}}, r"limiter\['mail'\]\.duration must be a number of seconds"),
    ],
)
def test_an_invalid_rate_limit_is_rejected_with_the_reason(value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        limiter(value)


@given(st.text(max_size=20))
def test_any_string_is_either_a_rate_limit_or_a_config_error(text: str) -> None:
    limit = None
    with suppress(ConfigError):
        limit = limiter(text)
    assert limit is None or (limit["max"] >= 1 and limit["duration"] >= 1)
