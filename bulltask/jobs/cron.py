"""Computes the next time that a cron pattern matches, as ``cron-parser`` 4.9 does, which BullMQ 5.62 uses.

An invalid pattern raises ``ConfigError``, which names the invalid part.
"""

from __future__ import annotations

import calendar
import re
from bisect import bisect_left
from collections.abc import Iterator
from datetime import date, datetime, timedelta, tzinfo
from functools import lru_cache
from typing import Final

from bulltask.jobs.clock import value_class
from bulltask.jobs.errors import ConfigError

__all__ = ["ALIASES", "Cron"]

ALIASES: Final = {
    "@yearly": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@hourly": "0 * * * *",
}

_DAYS_AHEAD: Final = 11_000
"""Number of days to search: 29 February falls on a given weekday within 28 years."""

_MONTHS: Final = tuple(name.lower() for name in calendar.month_abbr)
_WEEKDAYS: Final = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
_MONTH_DAYS: Final = (0, 31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
_HOUR: Final = 3600
_DAY: Final = 24 * _HOUR


@value_class
class _Kind:
    """A field of a pattern: its name, bounds, value names, and the syntax for "the last"."""

    name: str
    low: int
    high: int
    names: tuple[str, ...] = ()
    wild: tuple[str, ...] = ("*",)
    last: str = "(?!)"


_KINDS: Final = (
    _Kind("second", 0, 59),
    _Kind("minute", 0, 59),
    _Kind("hour", 0, 23),
    _Kind("day of month", 1, 31, wild=("*", "?"), last="()L"),
    _Kind("month", 1, 12, names=_MONTHS),
    _Kind("day of week", 0, 7, names=_WEEKDAYS, wild=("*", "?"), last="([0-7])L"),
)
_DEFAULTS: Final = ("0", "*", "*", "*", "*", "*")


@value_class
class _Field:
    """The sorted values of one field.

    Attributes:
        count: Number of values in the pattern, repetitions included: cron-parser uses it to decide whether a field
            restricts anything.
        last: Values with ``L``: weekdays, or 0 for the day of the month.
    """

    values: tuple[int, ...]
    count: int
    last: frozenset[int]

    def __contains__(self, value: int) -> bool:
        return value in self.values

    def at_or_after(self, value: int) -> int | None:
        """Return the smallest of the values that are at least ``value``."""
        index = bisect_left(self.values, value)
        return self.values[index] if index < len(self.values) else None


@value_class(frozen=True)
class Cron:
    """A parsed pattern; use :meth:`parse`. ``nth`` is the number after ``#``: the n-th such weekday, 0 for all."""

    pattern: str
    seconds: _Field
    minutes: _Field
    hours: _Field
    days: _Field
    months: _Field
    weekdays: _Field
    nth: int

    @staticmethod
    @lru_cache(256)
    def parse(pattern: str) -> Cron:
        """Parse a pattern of 5 fields, of 6 with seconds as the first field, or an alias such as ``@daily``.

        Fewer than 5 fields are read as in cron-parser: missing fields at the front mean "every", and second 0.
        """
        words = ALIASES.get(pattern, pattern).split()
        if not 1 <= len(words) <= 6:
            raise ConfigError(f"cron pattern {pattern!r:.200} must have 5 fields, or 6 with seconds as the first field")
        texts = [*_DEFAULTS[: 6 - len(words)], *words]
        try:
            texts[5], nth = _nth(texts[5])
            second, minute, hour, day, month, weekday = map(_field, _KINDS, texts)
            return Cron(pattern, second, minute, hour, _drop_impossible_days(day, month), month, weekday, nth)
        except ValueError as exc:
            raise ConfigError(f"cron pattern {pattern!r:.200}: {exc}") from None

    def next_ms(self, after_ms: int, zone: tzinfo) -> int | None:
        """Return the first time after ``after_ms`` (epoch milliseconds) at which the pattern matches in a time zone.

        ``None``: it never matches (the 31st of February).
        """
        earliest = after_ms // 1000 + 1
        # The day before, too: if clocks skip its last hour (Nuuk), its jobs run after midnight.
        first = datetime.fromtimestamp(earliest, zone).date() - timedelta(days=1)
        for day in self._days_from(first):
            time_s = self._on_day(day, zone, earliest)
            if time_s is not None:
                return time_s * 1000
        return None

    def _days_from(self, day: date) -> Iterator[date]:
        end = day + timedelta(days=_DAYS_AHEAD)
        while day < end:
            if day.month not in self.months:
                day = (day.replace(day=28) + timedelta(days=4)).replace(day=1)
                continue
            if self._matches_day(day):
                yield day
            day += timedelta(days=1)

    def _matches_day(self, day: date) -> bool:
        weekday = day.isoweekday() % 7
        left = calendar.monthrange(day.year, day.month)[1] - day.day  # days remaining in this month
        by_date = day.day in self.days or (bool(self.days.last) and left == 0)
        by_weekday = weekday in self.weekdays or (weekday in self.weekdays.last and left < 7)
        any_date = self.days.count >= _MONTH_DAYS[day.month]
        any_weekday = self.weekdays.count == 8
        if self.nth and (day.day + 6) // 7 != self.nth:
            return False
        if any_weekday:
            return by_date
        # Both are restricted: either match suffices, as in Unix cron.
        return by_weekday if any_date and by_date else by_date or by_weekday

    def _on_day(self, day: date, zone: tzinfo, earliest: int) -> int | None:
        """Return the first time at or after ``earliest`` (epoch seconds) that the calendar assigns to ``day``."""
        midnight = calendar.timegm(day.timetuple())  # local times count in seconds from the epoch, as if in UTC
        before = _offset(datetime(day.year, day.month, day.day, tzinfo=zone))
        after = _offset(datetime(day.year, day.month, day.day, tzinfo=zone) + timedelta(days=1))
        if before == after:
            local = self._at_or_after(earliest + before - midnight)
            return None if local is None else midnight + local - before
        change = _change(midnight - before, midnight + _DAY - after, before, zone)
        # Local times below ``until`` are those of the clocks before the change, and from ``since`` on, those after it.
        if self.hours.count == 24:
            until, since = change + before, change + after
        else:  # skipped times move, and repeated times match once
            until = since = change + max(before, after)
        old = self._at_or_after(earliest + before - midnight)
        new = self._at_or_after(max(earliest + after, since) - midnight)
        times = [midnight + old - before] if old is not None and midnight + old < until else []
        return min([*times, midnight + new - after] if new is not None else times, default=None)

    def _at_or_after(self, second_of_day: int) -> int | None:
        """Return the first time of a day that the pattern lists, at or after another one, in seconds from midnight."""
        if second_of_day >= _DAY:
            return None
        minutes, second = divmod(max(0, second_of_day), 60)
        hour, minute = divmod(minutes, 60)
        if hour in self.hours:
            if minute in self.minutes and (at_second := self.seconds.at_or_after(second)) is not None:
                return hour * _HOUR + minute * 60 + at_second
            if (at_minute := self.minutes.at_or_after(minute + 1)) is not None:
                return hour * _HOUR + at_minute * 60 + self.seconds.values[0]
        at_hour = self.hours.at_or_after(hour + 1)
        return None if at_hour is None else at_hour * _HOUR + self.minutes.values[0] * 60 + self.seconds.values[0]


def _offset(moment: datetime) -> int:
    """Return how far local time is ahead of UTC, in seconds; before the change if clocks skip or repeat this time."""
    offset = moment.utcoffset()
    assert offset is not None
    return int(offset.total_seconds())


def _change(low: int, high: int, before: int, zone: tzinfo) -> int:
    """Return when the clocks change, between two times in epoch seconds."""
    while low < high:
        middle = (low + high) // 2
        if _offset(datetime.fromtimestamp(middle, zone)) == before:
            low = middle + 1
        else:
            high = middle
    return low


def _nth(text: str) -> tuple[str, int]:
    """Split a day of week into the weekday and the number after ``#``."""
    weekday, hash_mark, number = text.partition("#")
    if not hash_mark:
        return text, 0
    if re.search("[,/-]", weekday) or not re.fullmatch("[1-5]", number):
        raise ValueError(f"day of week {text!r:.200} must be one weekday and a number from 1 to 5, such as 1#2")
    return weekday, int(number)


def _field(kind: _Kind, text: str) -> _Field:
    if kind.names:
        text = re.sub("[A-Za-z]{3}", lambda match: str(_index_of_name(kind, match[0])), text)
    if "*" in text and "?" in text:
        raise ValueError(f"{kind.name} {text!r:.200} has both * and ?, which Node.js rejects")
    values: list[int] = []
    last: list[int] = []
    for part in text.split(","):
        if (match := re.fullmatch(kind.last, part)) is not None:
            last.append(int(match[1] or 0) % 7)
        else:
            values += _span(kind, part)
    return _Field(tuple(sorted(set(values))), len(values) + len(last), frozenset(last))


def _index_of_name(kind: _Kind, name: str) -> int:
    if name.lower() not in kind.names:
        raise ValueError(f"{name!r:.200} is not a valid {kind.name}")
    return kind.names.index(name.lower())


def _span(kind: _Kind, part: str) -> list[int]:
    """Return the values of ``*``, ``5`` or ``1-5``, with or without ``/step``; ``5/10`` starts at 5."""
    range_text, slash, step = part.partition("/")
    if range_text in kind.wild:
        range_text = f"{kind.low}-{kind.high}"
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", range_text)
    if match is None or (slash and not re.fullmatch("0*[1-9][0-9]*", step)):
        raise ValueError(f"{part!r:.200} is not a valid {kind.name}")
    low = int(match[1])
    single = match[2] is None and not slash
    high = low if single else int(match[2] or kind.high)
    if not kind.low <= low <= high <= kind.high:
        raise ValueError(f"{kind.name} {part!r:.200} is not within {kind.low}-{kind.high}")
    if kind.high != 7:
        return list(range(low, high + 1, int(step or 1)))
    if single:
        return [low % 7]
    # 7 is Sunday, like 0, and cron-parser includes it if a range ends there, regardless of the step.
    days = list(range(low, high + 1, int(step or 1)))
    return days if high % 7 or 0 in days else [0, *days]


def _drop_impossible_days(days: _Field, months: _Field) -> _Field:
    """Drop days that do not exist in the pattern's month, if it has only one month."""
    if months.count != 1:
        return days
    last_day = _MONTH_DAYS[months.values[0]]
    if days.values and days.values[0] > last_day:
        raise ValueError(f"month {months.values[0]} has no day {days.values[0]}")
    beyond = sum(value > last_day for value in days.values)
    return _Field(tuple(value for value in days.values if value <= last_day), days.count - beyond, days.last)
