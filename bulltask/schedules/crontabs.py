"""``crontab``: Celery's schedule, translated to a cron pattern that BullMQ's workers support."""

from __future__ import annotations

import calendar
import re
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple

from bulltask.errors import ConfigError
from bulltask.schedules.cron import Cron
from bulltask.user_warnings import warn_user

__all__ = ["crontab"]

FieldValue = int | str | Iterable[int]


class _Omitted(str):
    """``"*"`` as the default of a field, which ``"*"`` in a call is not."""

    __slots__ = ()


_OMITTED: Final = _Omitted("*")

_MONTHS: Final = tuple(name.lower() for name in calendar.month_name)
_WEEKDAYS: Final = ("sunday", "monday", "tuesday", "wednesday", "thursday", "friday", "saturday")
_WEEKS: Final = {frozenset(range(first, first + 7)): number for number, first in enumerate((1, 8, 15, 22), 1)}


class DueState(NamedTuple):
    """The result of ``crontab.is_due``.

    Attributes:
        is_due: Whether a run is due.
        next: The seconds until the next run.
    """

    is_due: bool
    next: float


class crontab:
    """A beat entry's schedule, like Celery's ``crontab``.

    Each field takes a number, a string (``"*"``, ``"*/15"``, ``"1-5"``, ``"22-4"``, ``"1,15"``, ``"mon-fri"``,
    ``"sunday"``, ``"3-59/5"``) or an iterable of numbers.

    Args:
        minute: 0 to 59. Omitting it next to a field that is restricted causes a warning, because ``crontab(hour=3)``
            runs 60 times a night.
        hour: 0 to 23; the same applies.
        day_of_week: 0 (Sunday) to 6, or names; 7 is Sunday too.
        day_of_month: 1 to 31.
        month_of_year: 1 to 12, or names.
        nowfun: Returns the current time, for :meth:`is_due`; default: this machine's clock.
        app: Ignored.

    As in Celery, ``day_of_week`` and ``day_of_month`` must both match. A cron pattern matches if either of them does.
    Therefore, the only accepted combination is one weekday in one week of the month (``"mon"`` and ``"1-7"``: the first
    Monday).

    Raises:
        ConfigError: A field is malformed, or both day fields are restricted in another way.
    """

    __slots__ = ("_now", "pattern")

    def __init__(  # noqa: PLR0913 - the order is that of Celery 5
        self,
        minute: FieldValue = _OMITTED,
        hour: FieldValue = _OMITTED,
        day_of_week: FieldValue = "*",
        day_of_month: FieldValue = "*",
        month_of_year: FieldValue = "*",
        *,
        nowfun: Callable[[], datetime] | None = None,
        app: object = None,  # noqa: ARG002 - as in Celery
    ) -> None:
        self._now = nowfun or (lambda: datetime.now(UTC))
        minutes = _values("minute", minute, 0, 59)
        hours = _values("hour", hour, 0, 23)
        weekdays = frozenset(day % 7 for day in _values("day_of_week", day_of_week, 0, 7, _WEEKDAYS))
        days = _values("day_of_month", day_of_month, 1, 31)
        months = _values("month_of_year", month_of_year, 1, 12, _MONTHS)
        by_date, by_weekday = _text(days, 1, 31), _text(weekdays, 0, 6)
        if by_date != "*" and by_weekday != "*":
            by_date, by_weekday = _nth_weekday(days, weekdays)
        _check_omitted(minute, hour, hours, by_date != "*" or by_weekday != "*" or len(months) < 12)
        self.pattern = f"{_text(minutes, 0, 59)} {_text(hours, 0, 23)} {by_date} {_text(months, 1, 12)} {by_weekday}"
        """The cron pattern of five fields."""

    def remaining_estimate(self, last_run_at: datetime) -> timedelta:
        """Return the time from now until the first run after ``last_run_at``; negative if it is overdue.

        The pattern applies in the time zone of ``last_run_at``; a naive ``datetime`` is UTC.
        """
        last = last_run_at if last_run_at.tzinfo else last_run_at.replace(tzinfo=UTC)
        next_ms = Cron.parse(self.pattern).next_ms(int(last.timestamp() * 1000), last.tzinfo or UTC)
        if next_ms is None:
            return timedelta.max
        return datetime.fromtimestamp(next_ms / 1000, UTC) - self._moment()

    def is_due(self, last_run_at: datetime) -> DueState:
        """Return whether a run is due, and the seconds until the next one, as Celery's ``is_due`` does.

        Args:
            last_run_at: When it has run last; see :meth:`remaining_estimate`.
        """
        left = self.remaining_estimate(last_run_at).total_seconds()
        if left > 0:
            return DueState(False, left)
        now = self._moment().astimezone(last_run_at.tzinfo or UTC)
        return DueState(True, self.remaining_estimate(now).total_seconds())

    def _moment(self) -> datetime:
        now = self._now()
        return now if now.tzinfo else now.replace(tzinfo=UTC)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, crontab) and other.pattern == self.pattern

    def __hash__(self) -> int:
        return hash(self.pattern)

    def __repr__(self) -> str:
        return f"<crontab {self.pattern}>"


def _check_omitted(minute: FieldValue, hour: FieldValue, hours: frozenset[int], days_restricted: bool) -> None:
    """Warn about a smaller field that was probably forgotten: ``crontab(hour=3)`` runs 60 times a night."""
    if minute is _OMITTED and (len(hours) < 24 or days_restricted):
        when = "hour" if len(hours) < 24 else "day"
        warn_user(
            f"crontab without minute runs every minute of each {when} that matches: pass minute=0 to run at the full "
            "hour, or minute='*' if you want every minute"
        )
    elif hour is _OMITTED and days_restricted:
        warn_user(
            "crontab without hour runs every hour of each day that matches: pass hour=0 to run once, at midnight, or "
            "hour='*' if you want every hour"
        )


def _nth_weekday(days: frozenset[int], weekdays: frozenset[int]) -> tuple[str, str]:
    """Return the fields for the n-th weekday of a month, the only combination that a cron pattern supports."""
    week = _WEEKS.get(days)
    if week is None or len(weekdays) != 1:
        raise ConfigError(
            f"crontab with day_of_month ({_text(days, 1, 31)}) and day_of_week ({_text(weekdays, 0, 6)}) means days "
            "that match both, as in Celery, which a cron pattern can only express for one weekday of one week "
            "(day_of_week='mon', day_of_month='1-7'). Add an entry for each such weekday and week, or restrict only "
            "day_of_month, and let the task return on other weekdays"
        )
    return "*", f"{min(weekdays)}#{week}"


def _values(name: str, value: FieldValue, low: int, high: int, names: tuple[str, ...] = ()) -> frozenset[int]:
    if isinstance(value, bool) or not isinstance(value, int | str | Iterable):
        raise ConfigError(f"crontab: {name} must be a number, a string or an iterable of numbers, not {value!r:.200}")
    if isinstance(value, str):
        # "*" means weekdays 0 to 6: with 7, which is also Sunday, "*/2" would be a different set of days.
        parts = [_span(name, part.strip(), low, high, 6 if high == 7 else high, names) for part in value.split(",")]
        return frozenset().union(*parts)
    values = frozenset([value] if isinstance(value, int) else value)
    if not values or not all(isinstance(value, int) and low <= value <= high for value in values):
        raise ConfigError(f"crontab: {name} must be numbers from {low} to {high}, not {value!r:.200}")
    return values


def _span(name: str, part: str, low: int, high: int, last: int, names: tuple[str, ...]) -> frozenset[int]:
    """Return the values of ``*``, ``3``, ``mon``, ``1-5`` or ``fri-mon``, with or without ``/step``."""
    match = re.fullmatch(r"(\*|\w+)(?:-(\w+))?(?:/(\d+))?", part)
    if match is None or (match[1] == "*" and match[2]) or (match[3] and int(match[3]) < 1):
        raise ConfigError(f"crontab: {name} must be *, */n, n, n-m or n-m/k, not {part!r:.200}")
    step = int(match[3] or 1)
    if match[1] == "*":
        return frozenset(range(low, last + 1, step))
    first = _number(name, match[1], low, high, names)
    if match[2] is None:
        return frozenset(range(first, last + 1, step)) if match[3] else frozenset([first])
    end = _number(name, match[2], low, high, names)
    if first <= end:
        return frozenset(range(first, end + 1, step))
    wrapped = [*range(first, last + 1), *range(low, end + 1)]  # 22-4, fri-mon
    return frozenset(wrapped[::step])


def _number(name: str, text: str, low: int, high: int, names: tuple[str, ...]) -> int:
    if text.isdecimal():
        value = int(text)
    else:
        value = next((index for index, full in enumerate(names) if len(text) > 2 and full.startswith(text.lower())), -1)
    if not low <= value <= high:
        raise ConfigError(
            f"crontab: {name} {text!r:.200} is not within {low}-{high}{' and not a name' if names else ''}"
        )
    return value


def _text(values: frozenset[int], low: int, high: int) -> str:
    """Return the shortest form: ``*``, ``*/5``, ``1-5`` or a list."""
    whole = range(low, high + 1)
    for step in range(1, (high - low) // 2 + 1):
        if values == frozenset(whole[::step]):
            return "*" if step == 1 else f"*/{step}"
    first, last = min(values), max(values)
    if len(values) > 2 and len(values) == last - first + 1:
        return f"{first}-{last}"
    return ",".join(str(value) for value in sorted(values))
