"""Job schedulers: the rule by which their jobs run, and what Redis holds of them (PROTOCOL 4.10)."""

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
from bulltask.schedule.cron import ALIASES, Cron

__all__ = ["Repeat", "Rule", "Scheduler", "iteration_id", "iteration_options", "key_digest"]


class Rule(TypedDict, total=False):
    """When a scheduler's jobs run, as a user says it: either ``every`` or ``cron``. ``None`` is as good as nothing.

    Attributes:
        every: seconds or ``timedelta`` between jobs. The first one runs at once, or at ``start``.
        cron: a pattern of 5 fields, of 6 with the seconds in front, or an alias such as ``@daily``.
        tz: whose clock the pattern means, such as ``Europe/Berlin``; the setting ``timezone`` if left out.
        start: nothing runs before; a naive moment is UTC.
        end: nothing is scheduled after.
        limit: how many jobs in all.
        offset: with ``every``: run this long after each multiple of it, counted from 1 January 1970 UTC. It counts
            when the scheduler is new or its ``every`` changes.
        immediately: with ``cron``: run the first job now.
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
    """When the jobs of a scheduler run: by a pattern, or one interval after the other.

    Attributes:
        pattern: a cron pattern, ``None`` for an interval.
        every_ms: the interval, ``None`` for a pattern.
        tz: the pattern's time zone by name, ``None`` where nobody said one.
        start_ms: epoch milliseconds before which nothing runs.
        end_ms: epoch milliseconds after which nothing more is scheduled.
        limit: how many jobs there are in all.
        offset_ms: how far from a multiple of the interval they run; ``None``: from when the first one does.
        immediately: the first job of a pattern runs at once.
        count: how many jobs there were so far, the one that carries this included.
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
        """Check what a user said.

        Raises:
            ConfigError: something is wrong, or does not go together.
        """
        _check_rule(rule)
        every, cron, tz, offset = rule.get("every"), rule.get("cron"), rule.get("tz"), rule.get("offset")
        start, end, limit, immediately = rule.get("start"), rule.get("end"), rule.get("limit"), rule.get("immediately")
        if (every is None) == (cron is None):
            raise ConfigError("a job scheduler needs either every= or cron=")
        if immediately and start is not None:
            raise ConfigError("immediately and start contradict each other; give one of them")
        if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
            raise ConfigError(f"limit must be an integer of 1 or more, not {limit!r}")
        start_ms = None if start is None else to_epoch_ms(start, "start")
        end_ms = None if end is None else to_epoch_ms(end, "end")
        if start_ms is not None and end_ms is not None and end_ms <= start_ms:
            raise ConfigError(f"end ({end}) must be later than start ({start})")
        times = _interval(every, offset, tz) if every is not None else _pattern(cron, offset, tz)
        return cls(**times, start_ms=start_ms, end_ms=end_ms, limit=limit, immediately=bool(immediately))

    @classmethod
    def from_wire(cls, wire: object) -> Repeat:
        """Read ``opts.repeat`` of a job.

        Raises:
            DecodeError: it is no rule; the message says what is wrong.
        """
        if not isinstance(wire, Mapping):
            raise DecodeError("it has no options of a scheduler (opts.repeat)")
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
        """The rule under BullMQ's names, as scheduler and job both have it; what nobody said is left out."""
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
        """True when no further job follows: there were enough of them, or the end has passed."""
        enough = self.limit is not None and self.count >= self.limit
        return enough or (self.end_ms is not None and now_ms > self.end_ms)

    def next_ms(self, after_ms: int, default_zone: tzinfo) -> int | None:
        """When a pattern fires next, ``None`` if it does not before the end.

        Args:
            after_ms: epoch milliseconds; the start counts if it is later.
            default_zone: for a pattern without a time zone.

        Raises:
            ConfigError: the pattern or the time zone is none.
        """
        assert self.pattern is not None
        zone = default_zone if self.tz is None else zone_of(self.tz, "tz")
        found = Cron.parse(self.pattern).next_ms(max(after_ms, self.start_ms or 0), zone)
        return None if found is None or (self.end_ms is not None and found > self.end_ms) else found


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduler:
    """A job scheduler as Redis holds it. Moments are epoch milliseconds of the server.

    Attributes:
        id: its id.
        name: of its jobs; a bulltask worker runs the task of that name.
        next_ms: when its next job runs.
        iterations: how many jobs it has made, the next one included.
        every_ms, pattern, tz, start_ms, end_ms, limit, offset_ms: its rule, see :class:`Repeat`.
        data: the data of its jobs.
        opts: their options under BullMQ's stored names.
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
        """The id of its next job."""
        return iteration_id(self.id, self.next_ms)

    @classmethod
    def from_hash(cls, scheduler_id: str, flat: Sequence[bytes], next_ms: int) -> Scheduler:
        """Read the flat field list of its hash; what is malformed is read as missing, so that any can be shown."""
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
    """Find unknown names in a rule.

    Raises:
        TypeError: there is one; the message lists the known ones.
    """
    known = Rule.__annotations__
    if unknown := sorted(set(rule) - set(known)):
        raise TypeError(f"unknown option {unknown[0]!r} of a job scheduler; known are {', '.join(sorted(known))}")


def iteration_id(scheduler_id: str, at_ms: int) -> str:
    """The id of the job of one iteration."""
    return f"repeat:{scheduler_id}:{at_ms}"


def key_digest(key: str) -> str:
    """What Bull, and BullMQ before it had job schedulers, write for the key of a repeatable job in ids: its MD5."""
    return hashlib.md5(key.encode("utf-8", "surrogateescape"), usedforsecurity=False).hexdigest()


def iteration_options(
    options: Mapping[str, Any], repeat: Mapping[str, Any], scheduler_id: str, next_ms: int | None, now_ms: int
) -> dict[str, Any]:
    """Return the options of the next iteration's job.

    Args:
        options: of the scheduler's template, or of the job of the iteration before.
        repeat: the rule as stored, ``count`` being that of the new job.
        scheduler_id: the scheduler.
        next_ms: when a pattern fires next; the script itself knows that of an interval, and fills ``delay`` in.
        now_ms: the server's time.
    """
    new = {**options, "repeat": {**repeat}, "timestamp": now_ms, "repeatJobKey": scheduler_id}
    new.pop("prevMillis", None)
    if next_ms is not None:
        new |= {"prevMillis": next_ms, "jobId": iteration_id(scheduler_id, next_ms)}
    return new


def _interval(every: Duration, offset: Duration | None, tz: str | None) -> dict[str, Any]:
    if tz is not None:
        raise ConfigError("tz belongs to cron=; an interval is the same everywhere")
    every_ms = to_ms(every, "every")
    if every_ms < 1:
        raise ConfigError(f"every must be at least a millisecond, not {every!r}")
    offset_ms = None if offset is None else to_ms(offset, "offset")
    if offset_ms is not None and offset_ms >= every_ms:
        raise ConfigError(f"offset ({offset}) must be shorter than every ({every})")
    return {"every_ms": every_ms, "offset_ms": offset_ms}


def _pattern(cron: object, offset: Duration | None, tz: str | None) -> dict[str, Any]:
    if offset is not None:
        raise ConfigError("offset belongs to every=; a pattern says itself when it fires")
    if not isinstance(cron, str):
        raise ConfigError(f"cron must be a pattern such as '0 3 * * *', not {cron!r}")
    if cron not in ALIASES and len(cron.split()) not in {5, 6}:
        raise ConfigError(f"cron pattern {cron!r} must have 5 fields, or 6 with seconds in front")
    Cron.parse(cron)
    if tz is not None:
        zone_of(tz, "tz")
    return {"pattern": cron, "tz": tz}


def _number(wire: Mapping[str, Any], name: str) -> int | None:
    value = wire.get(name)
    if value is None:
        return None
    if (found := number(value)) is None:
        raise DecodeError(f"opts.repeat.{name} is no number: {_short(value)}")
    return found


def _moment(wire: Mapping[str, Any], name: str) -> int | None:
    """Epoch milliseconds; repeatable jobs of the older kind may have a date as text."""
    value = wire.get(name)
    if not isinstance(value, str):
        return _number(wire, name)
    try:
        return to_epoch_ms(datetime.fromisoformat(value))
    except ValueError as exc:
        raise DecodeError(f"opts.repeat.{name} is no date: {_short(value)}") from exc


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
