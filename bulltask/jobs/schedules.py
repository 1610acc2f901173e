"""Job schedulers: their repeat options and how Redis stores them; before them, Celery's ``schedule`` and ``crontab``.

The public path of Celery's names is ``bulltask.schedules``. An unknown option of a schedule raises ``TypeError``, an
invalid one raises ``ConfigError``, and one that is stored raises ``DecodeError``.
"""

from __future__ import annotations

import calendar
import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta, tzinfo
from reprlib import repr as _short
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypedDict, Unpack

from bulltask.jobs import codec
from bulltask.jobs.clock import Duration, to_epoch_ms, to_ms, value_class, zone_of
from bulltask.jobs.codec import int_field, json_field, mapping_field, number, text_field
from bulltask.jobs.cron import ALIASES, Cron
from bulltask.jobs.errors import ConfigError, DecodeError, warn_user
from bulltask.jobs.fields import whole

__all__ = ["crontab", "schedule"]


def schedule(run_every: float | timedelta, relative: bool = False) -> timedelta:
    """Return a beat entry's interval, like Celery's ``schedule``. An entry may also contain ``run_every`` itself.

    Args:
        run_every: Seconds or ``timedelta`` between jobs.
        relative: Must be false, because bulltask does not round intervals.

    Raises:
        ConfigError: ``relative`` is true.
    """
    if relative:
        raise ConfigError("relative intervals are not supported; use crontab(…)")
    return run_every if isinstance(run_every, timedelta) else timedelta(seconds=run_every)


FieldValue = int | str | Iterable[int]


class _Omitted(str):
    """``"*"`` as the default of a field, which ``"*"`` in a call is not."""

    __slots__ = ()


_OMITTED: Final = _Omitted("*")

_MONTHS: Final = tuple(name.lower() for name in calendar.month_name)
_WEEKDAYS: Final = ("sunday", "monday", "tuesday", "wednesday", "thursday", "friday", "saturday")
_WEEKS: Final = {frozenset(range(first, first + 7)): number for number, first in enumerate((1, 8, 15, 22), 1)}


class DueState(NamedTuple):
    """The result of ``crontab.is_due``: whether a run is due, and the seconds until the next one."""

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
        """Return whether a run is due, and the seconds until the next one, as Celery's ``is_due`` does."""
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


_SECOND_MS: Final = 1_000
_TEN_YEARS_MS: Final = 315_532_800_000


class Rule(TypedDict, total=False):
    """A job scheduler's schedule, with either ``every`` or ``cron``. ``None`` is the same as leaving an option out.

    Attributes:
        every: Seconds or ``timedelta`` between jobs. The first job runs immediately, or at ``start``.
        cron: A pattern of 5 fields, of 6 with seconds as the first field, or an alias such as ``@daily``.
        tz: The pattern's time zone, such as ``Europe/Berlin``; default: the setting ``timezone``.
        start: No job runs before this time; a naive ``datetime`` is UTC.
        end: No job runs after this time.
        limit: Maximum number of jobs.
        offset: With ``every``: each job runs this long after a multiple of ``every``, counted from 1 January 1970 UTC.
            It takes effect if the scheduler is new or its ``every`` changes.
        immediately: With ``cron``: run the first job immediately.
    """

    every: Duration | None
    cron: str | None
    tz: str | None
    start: datetime | None
    end: datetime | None
    limit: int | None
    offset: Duration | None
    immediately: bool


@value_class(kw_only=True, frozen=True)
class Repeat:
    """BullMQ's repeat options: a cron pattern or an interval; the other one is ``None``. :class:`Rule` describes them.

    Attributes:
        offset_ms: Offset from a multiple of the interval; ``None``: intervals count from the first job.
        count: Number of jobs so far, including the job that stores this value.
    """

    pattern: str | None = None
    every_ms: int | None = None
    tz: str | None = None
    start_ms: int | None = None
    end_ms: int | None = None
    limit: int | None = None
    offset_ms: int | None = None
    immediately: bool = False
    count: int = 0

    @classmethod
    def of(cls, **rule: Unpack[Rule]) -> Repeat:
        """Validate a user's schedule."""
        if unknown := sorted(set(rule) - set(Rule.__annotations__)):
            known = ", ".join(sorted(Rule.__annotations__))
            raise TypeError(f"unknown option {unknown[0]!r} of a job scheduler: use {known}")
        every, cron, tz, offset = rule.get("every"), rule.get("cron"), rule.get("tz"), rule.get("offset")
        start, end, limit, immediately = rule.get("start"), rule.get("end"), rule.get("limit"), rule.get("immediately")
        if (every is None) == (cron is None):
            raise ConfigError("a job scheduler needs either every= or cron=")
        if immediately and start is not None:
            raise ConfigError("use either immediately or start, not both")
        if limit is not None:
            whole(limit, "limit", low=1)
        start_ms = None if start is None else to_epoch_ms(start, "start")
        end_ms = None if end is None else to_epoch_ms(end, "end")
        if start_ms is not None and end_ms is not None and end_ms <= start_ms:
            raise ConfigError(f"end ({end}) must be later than start ({start})")
        times = _interval(every, offset, tz) if every is not None else _pattern(cron, offset, tz)
        return cls(**times, start_ms=start_ms, end_ms=end_ms, limit=limit, immediately=bool(immediately))

    @classmethod
    def from_wire(cls, wire: object) -> Repeat:
        """Read a job's ``opts.repeat``."""
        if not isinstance(wire, Mapping):
            raise DecodeError("the job has no repeat options (opts.repeat)")
        pattern, every = wire.get("pattern"), _wire_number(wire, "every")
        if (pattern is None) == (every is None) or not isinstance(pattern, str | None):
            raise DecodeError("opts.repeat must have either a pattern or an interval (every)")
        if every is not None and every < 1:
            raise DecodeError(f"opts.repeat.every must be 1 ms or more, not {_short(wire['every'])}")
        tz = wire.get("tz") or ("UTC" if wire.get("utc") is True else None)
        return cls(
            pattern=pattern,
            every_ms=every,
            tz=None if tz is None else str(tz),
            start_ms=_moment(wire, "startDate"),
            end_ms=_moment(wire, "endDate"),
            limit=_wire_number(wire, "limit"),
            count=_wire_number(wire, "count") or 0,
        )

    def to_wire(self) -> dict[str, Any]:
        """Return the options under BullMQ's names, without those that were not given."""
        named = {
            "pattern": self.pattern,
            "every": self.every_ms,
            "tz": self.tz,
            "startDate": self.start_ms,
            "endDate": self.end_ms,
            "limit": self.limit,
        }
        return {name: value for name, value in named.items() if value is not None}

    def is_over(self, now_ms: int) -> bool:
        """Return whether no more jobs follow, because ``limit`` or ``end_ms`` has been reached."""
        limit_reached = self.limit is not None and self.count >= self.limit
        return limit_reached or (self.end_ms is not None and now_ms > self.end_ms)

    def next_ms(self, after_ms: int, default_zone: tzinfo) -> int | None:
        """Return the next time that the pattern matches, ``None`` if it matches none before ``end_ms``.

        ``start_ms`` applies if it is later than ``after_ms``, and ``default_zone`` to a pattern without a time zone.
        """
        assert self.pattern is not None
        zone = default_zone if self.tz is None else zone_of(self.tz, "tz")
        time_ms = Cron.parse(self.pattern).next_ms(max(after_ms, self.start_ms or 0), zone)
        return None if time_ms is None or (self.end_ms is not None and time_ms > self.end_ms) else time_ms

    def previous_ms(self, before_ms: int, default_zone: tzinfo) -> int | None:
        """Return the time before ``before_ms``, one of the rule's times; ``None`` if there is none in ten years."""
        if self.every_ms is not None:
            return before_ms - self.every_ms
        low, high, step = before_ms - _SECOND_MS, before_ms, _SECOND_MS
        while (found := self._between(low, before_ms, default_zone)) is None:
            low, high, step = low - step, low, 2 * step
            if step > _TEN_YEARS_MS:
                return None
        while high - low > _SECOND_MS:  # there is a time after low, and none after high
            middle = (low + high) // 2
            later = self._between(middle, before_ms, default_zone)
            if later is None:
                high = middle
            else:
                low, found = middle, later
        return found

    def _between(self, after_ms: int, before_ms: int, default_zone: tzinfo) -> int | None:
        time_ms = self.next_ms(after_ms, default_zone)
        return time_ms if time_ms is not None and time_ms < before_ms else None


@value_class(kw_only=True, frozen=True)
class Scheduler:
    """A stored job scheduler. Times are epoch milliseconds: the server's, or if Node.js wrote them, its machine's.

    Attributes:
        name: Name of its jobs; a bulltask worker runs the task with that name.
        next_ms: Time of its next iteration.
        iterations: Number of jobs added so far, including the next one.
        every_ms, pattern, tz, start_ms, end_ms, limit, offset_ms: Its schedule, see :class:`Repeat`.
        data: Data of its jobs.
        opts: Options of its jobs under BullMQ's stored names.
        paused_ms: Since when it is paused: it adds no jobs, and ``next_ms`` is the time of the next one that it would
            have added. ``None`` if it is not paused.
        paused_by: Who has paused it.
    """

    id: str
    name: str
    next_ms: int
    iterations: int
    every_ms: int | None
    pattern: str | None
    tz: str | None
    start_ms: int | None
    end_ms: int | None
    limit: int | None
    offset_ms: int | None
    data: Any
    opts: Mapping[str, Any]
    paused_ms: int | None = None
    paused_by: str | None = None

    @property
    def next_job_id(self) -> str:
        """Id of the next iteration's job."""
        return iteration_id(self.id, self.next_ms)

    @property
    def rule(self) -> Repeat:
        """Its schedule."""
        return Repeat(
            pattern=self.pattern,
            every_ms=self.every_ms,
            tz=self.tz,
            start_ms=self.start_ms,
            end_ms=self.end_ms,
            limit=self.limit,
            offset_ms=self.offset_ms,
            count=self.iterations,
        )

    @classmethod
    def from_hash(cls, scheduler_id: str, flat: Sequence[bytes], next_ms: int) -> Scheduler:
        """Read the flat list of fields. Malformed fields count as missing, so that any scheduler can be shown."""
        raw = dict(zip(flat[::2], flat[1::2], strict=True))
        return cls(
            id=scheduler_id,
            name=codec.decode_text(raw.get(b"name")),
            next_ms=next_ms,
            iterations=int_field(raw, b"ic") or 0,
            every_ms=int_field(raw, b"every"),
            pattern=text_field(raw, b"pattern"),
            tz=text_field(raw, b"tz"),
            start_ms=int_field(raw, b"startDate"),
            end_ms=int_field(raw, b"endDate"),
            limit=int_field(raw, b"limit"),
            offset_ms=int_field(raw, b"offset"),
            data=json_field(raw, b"data") if b"data" in raw else {},  # the script leaves {} out
            opts=mapping_field(raw, b"opts") or {},
            paused_ms=int_field(raw, b"pausedAt"),
            paused_by=text_field(raw, b"pausedBy"),
        )


def iteration_id(scheduler_id: str, at_ms: int) -> str:
    """Return the id of an iteration's job."""
    return f"repeat:{scheduler_id}:{at_ms}"


def key_digest(key: str) -> str:
    """Return the MD5 of a repeatable job's key, which Bull and old versions of BullMQ use in job ids."""
    return hashlib.md5(key.encode("utf-8", "surrogateescape"), usedforsecurity=False).hexdigest()


def iteration_options(
    options: Mapping[str, Any], repeat: Mapping[str, Any], scheduler_id: str, next_ms: int | None, now_ms: int
) -> dict[str, Any]:
    """Return the options of the next iteration's job.

    Args:
        options: Options of the scheduler's template, or of the previous iteration's job.
        repeat: The stored repeat options, with the new job's ``count``.
        scheduler_id: The scheduler's id.
        next_ms: The next time that the pattern matches; for an interval the script computes it and sets ``delay``.
        now_ms: The server's time.
    """
    new = {**options, "repeat": {**repeat}, "timestamp": now_ms, "repeatJobKey": scheduler_id}
    new.pop("prevMillis", None)
    if next_ms is not None:
        new |= {"prevMillis": next_ms, "jobId": iteration_id(scheduler_id, next_ms)}
    return new


def _interval(every: Duration, offset: Duration | None, tz: str | None) -> dict[str, Any]:
    if tz is not None:
        raise ConfigError("tz can only be used with cron=, because an interval is the same in every time zone")
    every_ms = to_ms(every, "every")
    if every_ms < 1:
        raise ConfigError(f"every must be at least 0.001 s, not {every!r:.200}")
    offset_ms = None if offset is None else to_ms(offset, "offset")
    if offset_ms is not None and offset_ms >= every_ms:
        raise ConfigError(f"offset ({offset}) must be shorter than every ({every})")
    return {"every_ms": every_ms, "offset_ms": offset_ms}


def _pattern(cron: object, offset: Duration | None, tz: str | None) -> dict[str, Any]:
    if offset is not None:
        raise ConfigError("offset can only be used with every=, because a cron pattern contains its times")
    if not isinstance(cron, str):
        raise ConfigError(f"cron must be a pattern such as '0 3 * * *', not {cron!r:.200}")
    if cron not in ALIASES and len(cron.split()) not in {5, 6}:
        raise ConfigError(f"cron pattern {cron!r:.200} must have 5 fields, or 6 with seconds as the first field")
    Cron.parse(cron)
    if tz is not None:
        zone_of(tz, "tz")
    return {"pattern": cron, "tz": tz}


def _wire_number(wire: Mapping[str, Any], name: str) -> int | None:
    value = wire.get(name)
    if value is None:
        return None
    if (parsed := number(value)) is None:
        raise DecodeError(f"opts.repeat.{name} is not a number: {_short(value)}")
    return parsed


def _moment(wire: Mapping[str, Any], name: str) -> int | None:
    """Return epoch milliseconds; legacy repeatable jobs may have a date string."""
    value = wire.get(name)
    if not isinstance(value, str):
        return _wire_number(wire, name)
    try:
        return to_epoch_ms(datetime.fromisoformat(value))
    except ValueError as exc:
        raise DecodeError(f"opts.repeat.{name} is not a date: {_short(value)}") from exc


if not TYPE_CHECKING:  # type checkers would accept any name

    def __getattr__(name: str) -> object:
        """Explain which of Celery's schedules bulltask does not have."""
        if name == "solar":
            # An AttributeError would lose its message in "from bulltask.schedules import …".
            raise ImportError(
                "cannot import 'solar' from bulltask: solar schedules are not available, because Redis stores an "
                "interval or a cron pattern; schedule a daily task that sends the jobs of the day with eta="
            )
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
