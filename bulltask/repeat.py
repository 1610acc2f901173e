"""A job scheduler's rule: when its jobs run, as BullMQ stores it in each of them (``opts.repeat``, PROTOCOL 4.10)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, tzinfo
from typing import Any, Final

from bulltask.clock import to_epoch_ms, zone_of
from bulltask.cron import Cron
from bulltask.errors import DecodeError

__all__ = ["Repeat", "is_scheduler_id", "iteration_id", "iteration_options"]

_SCHEDULER_PARTS: Final = 4


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
        count: how many there were so far, the job that carries this included.
    """

    pattern: str | None = None
    every_ms: int | None = None
    tz: str | None = None
    start_ms: int | None = None
    end_ms: int | None = None
    limit: int | None = None
    count: int = 0

    @classmethod
    def from_wire(cls, wire: object) -> Repeat:
        """Read what BullMQ has stored.

        Raises:
            DecodeError: it is no rule; the message says what is wrong.
        """
        if not isinstance(wire, Mapping):
            raise DecodeError("it has no options of a scheduler (opts.repeat)")
        pattern, every = wire.get("pattern"), _number(wire, "every")
        if (pattern is None) == (every is None) or not isinstance(pattern, str | None):
            raise DecodeError("opts.repeat must have either a pattern or an interval (every)")
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


def iteration_id(scheduler_id: str, at_ms: int) -> str:
    """The id of the job of one iteration."""
    return f"repeat:{scheduler_id}:{at_ms}"


def is_scheduler_id(key: str) -> bool:
    """True for the id of a job scheduler; repeatable jobs of BullMQ 3 and older have keys with more colons."""
    return key.count(":") < _SCHEDULER_PARTS


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


def _number(wire: Mapping[str, Any], name: str) -> int | None:
    value = wire.get(name)
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise DecodeError(f"opts.repeat.{name} is no number: {value!r}")
    return int(value)


def _moment(wire: Mapping[str, Any], name: str) -> int | None:
    """Epoch milliseconds; repeatable jobs of the older kind may have a date as text."""
    value = wire.get(name)
    if not isinstance(value, str):
        return _number(wire, name)
    try:
        return to_epoch_ms(datetime.fromisoformat(value))
    except ValueError as exc:
        raise DecodeError(f"opts.repeat.{name} is no date: {value!r}") from exc
