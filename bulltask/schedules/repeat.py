"""Job schedulers: their repeat options, and how Redis stores them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, tzinfo
from reprlib import repr as _short
from typing import Any, TypedDict, Unpack

from bulltask.clock import Duration, to_epoch_ms, to_ms, zone_of
from bulltask.errors import ConfigError, DecodeError
from bulltask.jobs import codec
from bulltask.jobs.numbers import field_number, number
from bulltask.schedules.cron import ALIASES, Cron

__all__ = ["Repeat", "Rule", "Scheduler", "iteration_id", "iteration_options", "key_digest"]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeat:
    """BullMQ's repeat options: a cron pattern or an interval.

    Attributes:
        pattern: A cron pattern, ``None`` for an interval.
        every_ms: The interval, ``None`` for a pattern.
        tz: The pattern's time zone by name, ``None`` if not given.
        start_ms: Epoch milliseconds before which no job runs.
        end_ms: Epoch milliseconds after which no job runs.
        limit: Maximum number of jobs.
        offset_ms: Offset from a multiple of the interval; ``None``: intervals count from the first job.
        immediately: The first job of a pattern runs immediately.
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
        """Validate a user's schedule.

        Raises:
            ConfigError: An option is invalid, or options cannot be combined.
        """
        _check_rule(rule)
        every, cron, tz, offset = rule.get("every"), rule.get("cron"), rule.get("tz"), rule.get("offset")
        start, end, limit, immediately = rule.get("start"), rule.get("end"), rule.get("limit"), rule.get("immediately")
        if (every is None) == (cron is None):
            raise ConfigError("a job scheduler needs either every= or cron=")
        if immediately and start is not None:
            raise ConfigError("use either immediately or start, not both")
        if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
            raise ConfigError(f"limit must be an integer of 1 or more, not {limit!r:.200}")
        start_ms = None if start is None else to_epoch_ms(start, "start")
        end_ms = None if end is None else to_epoch_ms(end, "end")
        if start_ms is not None and end_ms is not None and end_ms <= start_ms:
            raise ConfigError(f"end ({end}) must be later than start ({start})")
        times = _interval(every, offset, tz) if every is not None else _pattern(cron, offset, tz)
        return cls(**times, start_ms=start_ms, end_ms=end_ms, limit=limit, immediately=bool(immediately))

    @classmethod
    def from_wire(cls, wire: object) -> Repeat:
        """Read a job's ``opts.repeat``.

        Raises:
            DecodeError: It is invalid; the message gives the reason.
        """
        if not isinstance(wire, Mapping):
            raise DecodeError("the job has no repeat options (opts.repeat)")
        pattern, every = wire.get("pattern"), _number(wire, "every")
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
            limit=_number(wire, "limit"),
            count=_number(wire, "count") or 0,
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

        Args:
            after_ms: Epoch milliseconds; ``start_ms`` applies if it is later.
            default_zone: The time zone of a pattern without one.

        Raises:
            ConfigError: The pattern or the time zone is invalid.
        """
        assert self.pattern is not None
        zone = default_zone if self.tz is None else zone_of(self.tz, "tz")
        time_ms = Cron.parse(self.pattern).next_ms(max(after_ms, self.start_ms or 0), zone)
        return None if time_ms is None or (self.end_ms is not None and time_ms > self.end_ms) else time_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduler:
    """A stored job scheduler. Times are epoch milliseconds: the server's, or if Node.js wrote them, its machine's.

    Attributes:
        id: The scheduler's id.
        name: Name of its jobs; a bulltask worker runs the task with that name.
        next_ms: Time of its next iteration.
        iterations: Number of jobs added so far, including the next one.
        every_ms, pattern, tz, start_ms, end_ms, limit, offset_ms: Its schedule, see :class:`Repeat`.
        data: Data of its jobs.
        opts: Options of its jobs under BullMQ's stored names.
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

    @property
    def next_job_id(self) -> str:
        """Id of the next iteration's job."""
        return iteration_id(self.id, self.next_ms)

    @classmethod
    def from_hash(cls, scheduler_id: str, flat: Sequence[bytes], next_ms: int) -> Scheduler:
        """Read the flat list of fields. Malformed fields count as missing, so that any scheduler can be shown."""
        names = (codec.decode_text(name) for name in flat[::2])
        raw = dict(zip(names, map(codec.decode_text, flat[1::2]), strict=True))
        opts = _json(raw, "opts")
        return cls(
            id=scheduler_id,
            name=raw.get("name", ""),
            next_ms=next_ms,
            iterations=_int(raw, "ic") or 0,
            every_ms=_int(raw, "every"),
            pattern=raw.get("pattern"),
            tz=raw.get("tz"),
            start_ms=_int(raw, "startDate"),
            end_ms=_int(raw, "endDate"),
            limit=_int(raw, "limit"),
            offset_ms=_int(raw, "offset"),
            data=_json(raw, "data") if "data" in raw else {},  # the script leaves {} out
            opts=opts if isinstance(opts, dict) else {},
        )


def _check_rule(rule: Rule) -> None:
    """Reject a schedule's unknown options.

    Raises:
        TypeError: An option is unknown; the message lists the known options.
    """
    known = Rule.__annotations__
    if unknown := sorted(set(rule) - set(known)):
        raise TypeError(f"unknown option {unknown[0]!r} of a job scheduler: use {', '.join(sorted(known))}")


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


def _number(wire: Mapping[str, Any], name: str) -> int | None:
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
        return _number(wire, name)
    try:
        return to_epoch_ms(datetime.fromisoformat(value))
    except ValueError as exc:
        raise DecodeError(f"opts.repeat.{name} is not a date: {_short(value)}") from exc


def _int(raw: Mapping[str, str], name: str) -> int | None:
    try:
        return field_number(raw[name])
    except (KeyError, ValueError):
        return None


def _json(raw: Mapping[str, str], name: str) -> Any:
    try:
        return codec.decode(raw.get(name))
    except DecodeError:
        return None
