from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bulltask import crontab
from bulltask.errors import ConfigError
from bulltask.jobs.cron import Cron


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({}, "* * * * *"),
        ({"minute": 0, "hour": 0}, "0 0 * * *"),
        ({"minute": 0, "hour": "*/3"}, "0 */3 * * *"),
        ({"minute": "*/15"}, "*/15 * * * *"),
        ({"minute": "3-59/5"}, "3,8,13,18,23,28,33,38,43,48,53,58 * * * *"),
        ({"minute": "5/20"}, "5,25,45 * * * *"),
        ({"minute": 30, "hour": "9-17"}, "30 9-17 * * *"),
        ({"minute": 0, "hour": "22-4"}, "0 0,1,2,3,4,22,23 * * *"),
        ({"minute": 0, "hour": "0,8-17/2"}, "0 0,8,10,12,14,16 * * *"),
        ({"minute": [0, 30], "hour": {1, 2, 3}}, "0,30 1-3 * * *"),
        ({"day_of_week": "sunday", "minute": 0, "hour": 4}, "0 4 * * 0"),
        ({"day_of_week": "mon-fri", "minute": 0, "hour": 4}, "0 4 * * 1-5"),
        ({"day_of_week": "fri-mon", "minute": 0, "hour": 4}, "0 4 * * 0,1,5,6"),
        ({"day_of_week": "thu,fri", "minute": 0, "hour": 4}, "0 4 * * 4,5"),
        ({"day_of_week": 7, "minute": 0, "hour": 4}, "0 4 * * 0"),
        ({"day_of_week": "*/2", "minute": 0, "hour": 4}, "0 4 * * */2"),
        ({"day_of_month": "2", "minute": 0, "hour": 0}, "0 0 2 * *"),
        ({"day_of_month": "2-30/2", "minute": 0, "hour": 0}, "0 0 2,4,6,8,10,12,14,16,18,20,22,24,26,28,30 * *"),
        ({"day_of_month": "*/2", "minute": 0, "hour": 0}, "0 0 */2 * *"),
        ({"month_of_year": "*/3", "day_of_month": 1, "minute": 0, "hour": 0}, "0 0 1 */3 *"),
        ({"month_of_year": "jan,July", "day_of_month": 1, "minute": 0, "hour": 0}, "0 0 1 1,7 *"),
        ({"day_of_week": "mon", "day_of_month": "1-7", "minute": 0, "hour": 0}, "0 0 * * 1#1"),
        ({"day_of_week": "fri", "day_of_month": range(22, 29), "minute": 0, "hour": 0}, "0 0 * * 5#4"),
        ({"day_of_week": "0-6", "day_of_month": "13", "minute": 0, "hour": 0}, "0 0 13 * *"),
    ],
)
def test_celerys_crontab_fields_become_a_cron_pattern(fields: dict[str, Any], pattern: str) -> None:
    assert crontab(**fields).pattern == pattern
    Cron.parse(pattern)


@pytest.mark.parametrize(
    ("fields", "unit", "advice"),
    [
        ({"hour": 3}, "minute of each hour", "minute=0"),
        ({"hour": "*/2"}, "minute of each hour", "minute=0"),
        ({"day_of_week": "sunday"}, "minute of each day", "minute=0"),
        ({"day_of_month": 1, "hour": "*"}, "minute of each day", "minute=0"),
        ({"month_of_year": 6}, "minute of each day", "minute=0"),
        ({"day_of_month": 1, "minute": 30}, "hour of each day", "hour=0"),
        ({"day_of_week": 1, "minute": 0}, "hour of each day", "hour=0"),
    ],
)
def test_a_forgotten_field_causes_a_warning(fields: dict[str, Any], unit: str, advice: str) -> None:
    with pytest.warns(UserWarning, match=f"runs every {unit} that matches: pass {advice} ") as caught:
        crontab(**fields)
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.parametrize(
    "fields",
    [{"minute": "*", "hour": 3}, {"minute": "*", "hour": "*", "day_of_week": 1}, {"minute": 5}, {"hour": "*"}, {}],
)
def test_a_field_that_was_not_forgotten_causes_no_warning(fields: dict[str, Any]) -> None:
    crontab(**fields)


def test_the_fields_can_be_positional() -> None:
    assert crontab(30, 9).pattern == "30 9 * * *"
    assert crontab(30, 9, "mon", "*", 6).pattern == "30 9 * 6 1"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"minute": 60}, "minute must be numbers from 0 to 59"),
        ({"minute": "60"}, "minute '60' is not within 0-59"),
        ({"minute": "x"}, "minute 'x' is not within 0-59"),
        ({"minute": ""}, "minute must be .*, not ''"),
        ({"minute": "*/0"}, "must be"),
        ({"minute": "*-5"}, "must be"),
        ({"minute": True}, "must be a number, a string or an iterable of numbers"),
        ({"minute": 1.5}, "must be a number, a string or an iterable of numbers"),
        ({"minute": []}, "must be numbers from"),
        ({"minute": ["1"]}, "must be numbers from"),
        ({"hour": 24}, "hour"),
        ({"day_of_week": "8"}, "day_of_week '8'"),
        ({"day_of_week": "mo"}, "'mo' is not within 0-7 and not a name"),
        ({"day_of_month": 0}, "day_of_month"),
        ({"month_of_year": "nevember"}, "month_of_year 'nevember'"),
        (
            {"day_of_week": "fri", "day_of_month": 13},
            r"day_of_month \(13\) and day_of_week \(5\) means days that match both",
        ),
        (
            {"day_of_week": "mon,tue", "day_of_month": "1-7"},
            "days that match both.*Add an entry for each .* or restrict",
        ),
    ],
)
def test_a_crontab_without_a_valid_cron_pattern_is_rejected(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        crontab(**fields)


def test_crontabs_with_the_same_pattern_are_equal() -> None:
    assert crontab(0, 1) == crontab("0", [1])
    assert len({crontab(0, 1), crontab("0", "1"), crontab(0, 2)}) == 2
    assert repr(crontab(0, 1)) == "<crontab 0 1 * * *>"


SETS = st.tuples(
    st.frozensets(st.integers(0, 59), min_size=1),
    st.frozensets(st.integers(0, 23), min_size=1),
    st.frozensets(st.integers(1, 28), min_size=1),
    st.frozensets(st.integers(1, 12), min_size=1),
)


@given(SETS, st.integers(0, 4_000_000_000_000))
def test_the_pattern_fires_at_the_first_matching_minute(sets: tuple[frozenset[int], ...], now: int) -> None:
    minutes, hours, days, months = sets
    pattern = crontab(minutes, hours, day_of_month=days, month_of_year=months).pattern
    fires_ms = Cron.parse(pattern).next_ms(now, UTC)
    assert fires_ms is not None
    fires = datetime.fromtimestamp(fires_ms / 1000, UTC)
    assert fires.minute in minutes
    assert fires.hour in hours
    assert fires.day in days
    assert fires.month in months
    earlier = fires - timedelta(minutes=1)
    if earlier.timestamp() * 1000 > now:
        assert not (
            earlier.minute in minutes and earlier.hour in hours and earlier.day in days and earlier.month in months
        )
