"""What a search of the lake is given, checked: filters, times, the cursor of the next page."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import UTC, date, datetime, timedelta
from typing import Any, Final, NamedTuple, Self, TypedDict

from bulltask.errors import ConfigError, did_you_mean

__all__ = ["MOST", "STATES", "JobFilter", "JobQuery", "Position", "check_limit", "moment"]

MOST: Final = 1_000
"""Jobs in a page, at the most."""

STATES: Final = (
    "completed", "failed", "removed", "waiting", "active", "delayed", "prioritized", "waiting-children", "unknown",
)  # fmt: skip
"""What ``silver.jobs`` can say of a job."""


class JobFilter(TypedDict, total=False):
    """What a search may ask for; what is left out or ``None`` does not matter.

    Keys:
        id: the job's id.
        name: the task's name.
        state: ``completed``, ``failed``, ``removed``; or ``waiting``, ``active``, ``delayed``, ``waiting-children``:
            as last seen of a job that the pipeline has given up.
        queue: the queue, spelled as everywhere in bulltask.
        since: done at this time or later; a ``datetime`` (UTC if it names no zone) or a ``date``. Of a job that was
            never done, when it was last seen.
        until: done before this time.
        text: a part of the reason why it failed, in any case of letters.
        error_key: what failures of one kind have in common: ``silver.jobs.error_key``.
    """

    id: str | None
    name: str | None
    state: str | None
    queue: str | None
    since: datetime | date | None
    until: datetime | date | None
    text: str | None
    error_key: str | None


class Position(NamedTuple):
    """A job's place in the order of searches, which goes from the highest to the lowest."""

    seen_us: int
    queue: str
    job_id: str
    life: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobQuery:
    """A filter, checked; see :class:`JobFilter`."""

    id: str | None = None
    name: str | None = None
    state: str | None = None
    queue: str | None = None
    since: datetime | None = None
    until: datetime | None = None
    text: str | None = None
    error_key: str | None = None

    @classmethod
    def of(cls, where: Mapping[str, Any]) -> Self:
        """Check what a search was given.

        Raises:
            TypeError: there is no such filter.
            ConfigError: a filter makes no sense.
        """
        names = [field.name for field in fields(cls)]
        for name, value in where.items():
            if name not in names:
                raise TypeError(f"jobs cannot be searched by {name!r}{did_you_mean(name, names)}")
            if name not in {"since", "until"} and value is not None and not (isinstance(value, str) and value):
                raise ConfigError(f"{name} must be a non-empty string, not {value!r}")
        if (state := where.get("state")) is not None and state not in STATES:
            raise ConfigError(f"there is no state {state!r}{did_you_mean(state, STATES)}")
        times = {name: moment(where.get(name), name) for name in ("since", "until")}
        if times["since"] and times["until"] and times["since"] >= times["until"]:
            raise ConfigError(f"since ({times['since']}) must be before until ({times['until']})")
        return cls(**{**where, **times})

    def holds(self, day: date) -> bool:
        """Whether jobs of this ``dt`` may be asked for."""
        early = self.since is not None and day < self.since.date()
        late = self.until is not None and day > (self.until - timedelta(microseconds=1)).date()
        return not (early or late)

    def cursor(self, position: Position) -> str:
        """Return where the next page of this search begins."""
        said = json.dumps([*position, self._mark], separators=(",", ":"))
        return base64.urlsafe_b64encode(said.encode()).decode().rstrip("=")

    def position(self, cursor: str) -> Position:
        """Read such a cursor.

        Raises:
            ConfigError: it is none, or one of another search.
        """
        try:
            said = json.loads(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
            seen_us, queue, job_id, life, mark = said
            position = Position(int(seen_us), str(queue), str(job_id), str(life))
        except (ValueError, TypeError) as exc:
            raise ConfigError(f"{cursor!r} is no cursor; take that of the page before, or none for the first") from exc
        if mark != self._mark:
            raise ConfigError("the cursor is of another search; give it with the same filters as the page it came from")
        return position

    @property
    def _mark(self) -> int:
        """Tells searches apart. Times do not count: those who say "an hour ago" mean another moment on each page."""
        said = (self.id, self.name, self.state, self.queue, self.text, self.error_key)
        return zlib.crc32(repr(said).encode())


def check_limit(limit: int) -> int:
    """Return a page's length if it is one.

    Raises:
        ConfigError: it is not from 1 to :data:`MOST`.
    """
    if not isinstance(limit, int) or isinstance(limit, bool) or not 1 <= limit <= MOST:
        raise ConfigError(f"limit must be from 1 to {MOST:,}, not {limit!r}")
    return limit


def moment(value: Any, name: str) -> datetime | None:
    """Return a time in UTC.

    Raises:
        ConfigError: it is neither ``datetime`` nor ``date``.
    """
    if value is None:
        return None
    if isinstance(value, datetime):
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)
    if isinstance(value, date):
        return datetime(value.year, value.month, value.day, tzinfo=UTC)
    raise ConfigError(f"{name} must be a datetime or a date, not {value!r}")
