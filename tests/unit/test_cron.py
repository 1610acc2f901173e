from __future__ import annotations

import zoneinfo
from datetime import UTC, datetime, timedelta, tzinfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bulltask.errors import ConfigError
from bulltask.jobs.clock import zone_of
from bulltask.jobs.cron import Cron

BERLIN, NEW_YORK = zone_of("Europe/Berlin"), zone_of("America/New_York")
YEAR_MS = 366 * 86_400_000


def next_times(pattern: str, after: str, zone: tzinfo = UTC, count: int = 1) -> list[str]:
    """Return the next times after a local time, as local times with their UTC offset."""
    moment = datetime.fromisoformat(after)
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=zone)
    ms: int | None = round(moment.timestamp() * 1000)
    times = []
    for _ in range(count):
        assert ms is not None
        ms = Cron.parse(pattern).next_ms(ms, zone)
        assert ms is not None
        times.append(datetime.fromtimestamp(ms / 1000, zone).isoformat(sep=" ").replace("+00:00", ""))
    return times


def number(low: int, high: int) -> st.SearchStrategy[str]:
    return st.integers(low, high).map(str)


def span(low: int, high: int) -> st.SearchStrategy[str]:
    pair = st.tuples(st.integers(low, high), st.integers(low, high)).map(sorted)
    return pair.map(lambda ends: f"{ends[0]}-{ends[1]}")


def field(low: int, high: int) -> st.SearchStrategy[str]:
    atom = st.just("*") | number(low, high) | span(low, high)
    stepped = st.tuples(atom, st.integers(1, high)).map(lambda pair: f"{pair[0]}/{pair[1]}")
    return st.lists(atom | stepped, min_size=1, max_size=3).map(",".join)


PATTERNS = st.tuples(field(0, 59), field(0, 59), field(0, 23), field(1, 28), field(1, 12), field(0, 7)).map(" ".join)
MOMENTS = st.integers(0, 4_000_000_000_000)
ZONES = st.sampled_from(
    [UTC, zone_of("UTC+5:30")]
    + [zone_of(name) for name in ("Europe/Berlin", "America/New_York", "Africa/Cairo", "America/Nuuk")]
    + [zone_of(name) for name in ("America/Havana", "Antarctica/Troll", "Australia/Lord_Howe", "Pacific/Chatham")]
)


# --- the dialect ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "after", "expected"),
    [
        ("*/5 * * * *", "2026-05-01 10:02:30", "2026-05-01 10:05:00"),
        ("*/5 * * * *", "2026-05-01 10:05:00", "2026-05-01 10:10:00"),
        ("*/5 * * * *", "2026-05-01 10:04:59.999", "2026-05-01 10:05:00"),
        ("*/10 * * * * *", "2026-05-01 10:02:30", "2026-05-01 10:02:40"),
        ("0 30 9 * * mon-fri", "2026-05-01 09:30", "2026-05-04 09:30:00"),
        ("5/20 * * * *", "2026-05-01 10:26", "2026-05-01 10:45:00"),
        ("10-30/10,50 * * * *", "2026-05-01 10:30", "2026-05-01 10:50:00"),
        ("0 0 1 jan,JUL *", "2026-05-01", "2026-07-01 00:00:00"),
        ("0 12 * * 7", "2026-05-01", "2026-05-03 12:00:00"),
        ("0 12 * * sun", "2026-05-01", "2026-05-03 12:00:00"),
        ("0 0 ? * 1", "2026-05-01", "2026-05-04 00:00:00"),
        ("0 0 13 * 5", "2026-05-02", "2026-05-08 00:00:00"),  # the day of month or the weekday must match, as in cron
        ("0 0 L * *", "2028-02-01", "2028-02-29 00:00:00"),
        ("0 0 15,L * *", "2026-05-16", "2026-05-31 00:00:00"),
        ("0 0 * * 5L", "2026-05-01", "2026-05-29 00:00:00"),
        ("0 0 * * friL", "2026-05-01", "2026-05-29 00:00:00"),
        ("0 0 * * 1#2", "2026-05-01", "2026-05-11 00:00:00"),
        ("0 0 29 2 *", "2026-05-01", "2028-02-29 00:00:00"),
        ("0 0 * 2 0#5", "2026-05-01", "2032-02-29 00:00:00"),
        ("@yearly", "2026-05-01", "2027-01-01 00:00:00"),
        ("@daily", "2026-05-01 00:00", "2026-05-02 00:00:00"),
        ("@hourly", "2026-05-01 10:02", "2026-05-01 11:00:00"),
        ("12 * * *", "2026-05-01 11:02", "2026-05-01 12:00:00"),  # missing leading fields mean "every"
        ("59 59 23 31 12 *", "2026-12-31 23:59:59", "2027-12-31 23:59:59"),
    ],
)
def test_a_pattern_fires_at_the_next_matching_time(pattern: str, after: str, expected: str) -> None:
    assert next_times(pattern, after) == [expected]


def test_a_pattern_that_never_fires_has_no_next_time() -> None:
    assert Cron.parse("0 0 31 2,4 *").next_ms(0, UTC) is None


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("", "must have 5 fields"),
        ("* * * * * * *", "must have 5 fields"),
        ("60 * * * *", "minute '60' is not within 0-59"),
        ("* 24 * * *", "hour '24' is not within 0-23"),
        ("* * 0 * *", "day of month '0' is not within 1-31"),
        ("* * * 13 *", "month '13'"),
        ("* * * * 8", "day of week '8'"),
        ("5-1 * * * *", "minute '5-1'"),
        ("*/0 * * * *", "not a valid minute"),
        ("*/x * * * *", "not a valid minute"),
        ("1, * * * *", "'' is not a valid minute"),
        ("-5 * * * *", "'-5' is not a valid minute"),
        ("1-2-3 * * * *", "not a valid minute"),
        ("* * * foo *", "'foo' is not a valid month"),
        ("* * * * mon#6", "one weekday and a number from 1 to 5"),
        ("* * * * 1,2#1", "one weekday and a number from 1 to 5"),
        ("* * * * L", "'L' is not a valid day of week"),
        ("? * * * *", "'\\?' is not a valid minute"),
        ("* * ?,* * *", "both \\* and \\?"),
        ("0 0 30 2 *", "month 2 has no day 30"),
        ("@reboot", "'@reboot' is no|'reb' is no"),
    ],
)
def test_an_invalid_pattern_is_rejected_with_the_invalid_part(pattern: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        Cron.parse(pattern)
    assert repr(pattern) in str(caught.value)


# --- daylight saving time ---------------------------------------------------------------------------------------------


def test_a_time_skipped_in_berlin_fires_an_hour_later() -> None:
    assert next_times("30 2 * * *", "2026-03-28 12:00", BERLIN, 2) == [
        "2026-03-29 03:30:00+02:00",
        "2026-03-30 02:30:00+02:00",
    ]


def test_a_time_repeated_in_berlin_fires_once() -> None:
    assert next_times("30 2 * * *", "2026-10-24 12:00", BERLIN, 2) == [
        "2026-10-25 02:30:00+02:00",
        "2026-10-26 02:30:00+01:00",
    ]


def test_an_interval_of_half_an_hour_follows_elapsed_time_in_berlin() -> None:
    assert next_times("*/30 * * * *", "2026-10-25 01:30", BERLIN, 5) == [
        "2026-10-25 02:00:00+02:00",
        "2026-10-25 02:30:00+02:00",
        "2026-10-25 02:00:00+01:00",
        "2026-10-25 02:30:00+01:00",
        "2026-10-25 03:00:00+01:00",
    ]
    assert next_times("*/30 * * * *", "2026-03-29 01:00", BERLIN, 2) == [
        "2026-03-29 01:30:00+01:00",
        "2026-03-29 03:00:00+02:00",
    ]


def test_a_time_skipped_in_new_york_fires_an_hour_later() -> None:
    assert next_times("30 2 * * *", "2026-03-07 12:00", NEW_YORK, 2) == [
        "2026-03-08 03:30:00-04:00",
        "2026-03-09 02:30:00-04:00",
    ]


def test_a_time_repeated_in_new_york_fires_once() -> None:
    assert next_times("30 1 * * *", "2026-10-31 12:00", NEW_YORK, 2) == [
        "2026-11-01 01:30:00-04:00",
        "2026-11-02 01:30:00-05:00",
    ]


def test_a_skipped_hour_moved_onto_a_listed_hour_fires_once() -> None:
    assert next_times("0 2,3 * * *", "2026-03-29 00:00", BERLIN, 2) == [
        "2026-03-29 03:00:00+02:00",
        "2026-03-30 02:00:00+02:00",
    ]


def test_noon_stays_noon_across_clock_changes() -> None:
    for start in ("2026-03-27 12:00", "2026-10-23 12:00"):
        for moment in next_times("0 12 * * *", start, BERLIN, 4):
            assert " 12:00:00" in moment


@pytest.mark.parametrize(
    ("zone", "pattern", "after", "expected"),
    [
        ("Africa/Cairo", "@daily", "2026-04-23 12:00", "2026-04-24 01:00:00+03:00"),
        ("America/Santiago", "@daily", "2026-09-05 12:00", "2026-09-06 01:00:00-03:00"),
        ("America/Havana", "@daily", "2026-03-07 12:00", "2026-03-08 01:00:00-04:00"),
        ("America/Havana", "30 0 * * *", "2026-03-07 12:00", "2026-03-08 01:30:00-04:00"),
        ("America/Havana", "@daily", "2026-11-01 00:00", "2026-11-02 00:00:00-05:00"),  # midnight is repeated
        ("Asia/Beirut", "@weekly", "2026-03-28 12:00", "2026-03-29 01:00:00+03:00"),
        ("Atlantic/Azores", "@daily", "2026-03-28 12:00", "2026-03-29 01:00:00+00:00"),
        ("America/Nuuk", "30 23 28 * *", "2026-03-28 12:00", "2026-03-29 00:30:00-01:00"),
        ("Australia/Lord_Howe", "15 2 * * *", "2026-10-03 12:00", "2026-10-04 02:45:00+11:00"),
        ("Pacific/Chatham", "45 2 * * *", "2026-09-26 12:00", "2026-09-27 03:45:00+13:45"),
        ("Antarctica/Troll", "15 1 * * *", "2026-03-28 12:00", "2026-03-29 03:15:00+02:00"),
        ("Pacific/Apia", "0 5 30 12 *", "2011-12-29 12:00", "2011-12-31 05:00:00+14:00"),  # a day is skipped
    ],
)
def test_a_skipped_time_moves_as_far_as_the_clocks_do(zone: str, pattern: str, after: str, expected: str) -> None:
    assert next_times(pattern, after, zone_of(zone)) == [expected.replace("+00:00", "")]


@pytest.mark.slow
def test_every_time_of_day_runs_once_a_day_around_each_clock_change_of_a_year_in_every_zone() -> None:
    changes = [(zone, change) for zone in every_zone() for change in clock_changes(zone, 2026)]
    assert len(changes) > 300
    for zone, change in changes:
        earlier, later = (datetime.fromtimestamp(second, zone) for second in (change - 1, change))
        low = min(earlier + timedelta(seconds=1), later).replace(tzinfo=None) - timedelta(hours=1)
        for quarter in range(16):
            minute = low + timedelta(minutes=15 * quarter)
            days = [minute + timedelta(days=day) for day in (-1, 0, 1)]
            # If the time is skipped, fold=0 gives the time by the clocks before the change; if repeated, the first one.
            expected = [int(day.replace(tzinfo=zone, fold=0).timestamp()) * 1000 for day in days]
            cron = Cron.parse(f"{minute.minute} {minute.hour} * * *")
            times = [expected[0] - 1]
            for _ in days:
                times.append(cron.next_ms(times[-1], zone) or 0)
            assert times[1:] == expected, (zone, cron.pattern)


@pytest.mark.slow
def test_a_pattern_for_every_hour_follows_elapsed_time_around_each_clock_change_in_every_zone() -> None:
    every_quarter = Cron.parse("*/15 * * * *")
    for zone in every_zone():
        for change in clock_changes(zone, 2026):
            for second in range(change - 7_200, change + 7_200, 900):
                assert every_quarter.next_ms((second - 1) * 1000, zone) == second * 1000, zone


def every_zone() -> list[tzinfo]:
    return [zone_of(name) for name in sorted(zoneinfo.available_timezones()) if name != "localtime"]


def clock_changes(zone: tzinfo, year: int) -> list[int]:
    """Return the epoch seconds of a year at which the zone's offset from UTC changes, to a quarter of an hour."""
    start = int(datetime(year, 1, 1, tzinfo=UTC).timestamp())

    def offset(second: int) -> timedelta | None:
        return datetime.fromtimestamp(second, zone).utcoffset()

    def first_change(low: int, high: int) -> list[int]:
        quarters = range(low + 900, high + 1, 900)
        return [second for second in quarters if offset(second) != offset(second - 900)]

    days = range(start, start + 365 * 86_400, 86_400)
    return [second for day in days if offset(day) != offset(day + 86_400) for second in first_change(day, day + 86_400)]


# --- properties of all patterns ---------------------------------------------------------------------------------------


@given(PATTERNS, MOMENTS, ZONES)
@settings(deadline=None)
def test_each_next_time_is_a_full_second_later_than_the_previous_time(pattern: str, now: int, zone: tzinfo) -> None:
    first = Cron.parse(pattern).next_ms(now, zone)
    assert first is not None
    assert first > now
    assert first % 1000 == 0
    second = Cron.parse(pattern).next_ms(first, zone)
    assert second is not None
    assert second > first


@given(PATTERNS, MOMENTS, ZONES, st.integers(0, YEAR_MS))
@settings(deadline=None)
def test_the_next_time_is_the_same_for_any_earlier_start(pattern: str, now: int, zone: tzinfo, ahead: int) -> None:
    cron = Cron.parse(pattern)
    first = cron.next_ms(now, zone)
    assert first is not None
    assert cron.next_ms(min(now + ahead, first - 1), zone) == first


@given(field(0, 59), field(0, 23), field(1, 31), MOMENTS)
@settings(deadline=None)
def test_no_matching_minute_is_missed_in_utc(minutes: str, hours: str, days: str, now: int) -> None:
    pattern = f"{minutes} {hours} {days} * *"
    fires_ms = Cron.parse(pattern).next_ms(now, UTC)
    assert fires_ms is not None
    matching = field_values(minutes, 0, 59), field_values(hours, 0, 23), field_values(days, 1, 31)
    minute = datetime.fromtimestamp(now // 60_000 * 60 + 60, UTC)
    for _ in range(3 * 1440):  # check three days minute by minute
        if minute.timestamp() * 1000 >= fires_ms:
            break
        assert not all(
            value in values for values, value in zip(matching, (minute.minute, minute.hour, minute.day), strict=True)
        )
        minute += timedelta(minutes=1)


def field_values(text: str, low: int, high: int) -> set[int]:
    """Return the values of a field, computed differently from bulltask."""
    values = set()
    for part in text.split(","):
        ends, _, step = part.partition("/")
        first, _, last = (f"{low}-{high}" if ends == "*" else ends).partition("-")
        top = int(last) if last else (high if step else int(first))
        values |= {value for value in range(low, high + 1) if value >= int(first) and value <= top} & {
            int(first) + times * int(step or 1) for times in range(61)
        }
    return values


# --- zones ------------------------------------------------------------------------------------------------------------


def test_a_time_zone_is_found_by_its_name_in_any_case_and_by_an_offset() -> None:
    assert str(zone_of("europe/berlin")) == "Europe/Berlin"
    assert zone_of("utc") is UTC
    assert zone_of("UTC-3:30").utcoffset(None) == timedelta(hours=-3, minutes=-30)


@pytest.mark.parametrize("name", ["Europe/Atlantis", "Europe", "../../etc/passwd", "", "UTC+99", "\0"])
def test_an_unknown_time_zone_is_rejected(name: str) -> None:
    with pytest.raises(ConfigError, match="unknown timezone"):
        zone_of(name)
