"""Validate the arguments of a search: filters, times, the cursor of the next page."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import UTC, date, datetime, timedelta
from typing import Any, Final, NamedTuple, Self, TypedDict

from bulltask.jobs.errors import ConfigError, did_you_mean

__all__ = ["MAX_LIMIT", "STATES", "JobFilter", "JobQuery", "SearchPosition", "check_limit", "moment"]

MAX_LIMIT: Final = 1_000
"""The maximum number of jobs in a page."""

STATES: Final = (
    "completed", "failed", "removed", "waiting", "active", "delayed", "prioritized", "waiting-children", "unknown",
)  # fmt: skip
"""The states in ``silver.jobs``."""


class JobFilter(TypedDict, total=False):
    """The filters of a search. Omitted filters and ``None`` match all jobs.

    Keys:
        id: The job's id.
        name: The task's name.
        state: ``completed``, ``failed``, ``removed``; or ``waiting``, ``active``, ``delayed``, ``waiting-children``,
            the last state of an open job that timed out.
        queue: The queue, without BullMQ's braces.
        since: Jobs that finished at this time or later: a ``datetime`` (UTC if it is naive) or a ``date``. For
            jobs that have not finished, the time of their last event counts.
        until: Jobs that finished before this time.
        text: A substring of the failure reason, ignoring case.
        error_fingerprint: The fingerprint of the failure, as in ``silver.jobs.error_fingerprint``.
    """

    id: str | None
    name: str | None
    state: str | None
    queue: str | None
    since: datetime | date | None
    until: datetime | date | None
    text: str | None
    error_fingerprint: str | None


class SearchPosition(NamedTuple):
    """A job's position in the search order, which is descending."""

    seen_us: int
    queue: str
    job_id: str
    incarnation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobQuery:
    """A validated filter; see :class:`JobFilter`."""

    id: str | None = None
    name: str | None = None
    state: str | None = None
    queue: str | None = None
    since: datetime | None = None
    until: datetime | None = None
    text: str | None = None
    error_fingerprint: str | None = None

    @classmethod
    def of(cls, where: Mapping[str, Any]) -> Self:
        """Validate the filters of a search.

        Raises:
            TypeError: A filter does not exist.
            ConfigError: A filter is invalid.
        """
        names = [field.name for field in fields(cls)]
        for name, value in where.items():
            if name not in names:
                raise TypeError(f"jobs cannot be searched by {name!r}{did_you_mean(name, names)}")
            if name not in {"since", "until"} and value is not None and not (isinstance(value, str) and value):
                raise ConfigError(f"{name} must be a non-empty string, not {value!r}")
        if (state := where.get("state")) is not None and state not in STATES:
            raise ConfigError(f"unknown state {state!r}{did_you_mean(state, STATES)}")
        times = {name: moment(where.get(name), name) for name in ("since", "until")}
        if times["since"] and times["until"] and times["since"] >= times["until"]:
            raise ConfigError(f"since ({times['since']}) must be before until ({times['until']})")
        return cls(**{**where, **times})

    def includes(self, day: date) -> bool:
        """Whether jobs of this day (``dt``) can match."""
        early = self.since is not None and day < self.since.date()
        late = self.until is not None and day > (self.until - timedelta(microseconds=1)).date()
        return not (early or late)

    def cursor(self, position: SearchPosition) -> str:
        """Return the cursor of the next page."""
        parts = json.dumps([*position, self._checksum], separators=(",", ":"))
        return base64.urlsafe_b64encode(parts.encode()).decode().rstrip("=")

    def position(self, cursor: str) -> SearchPosition:
        """Parse a cursor.

        Raises:
            ConfigError: The cursor is invalid or from another search.
        """
        try:
            parts = json.loads(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
            seen_us, queue, job_id, incarnation, checksum = parts
            position = SearchPosition(int(seen_us), str(queue), str(job_id), str(incarnation))
        except (ValueError, TypeError, OverflowError, RecursionError) as exc:
            raise ConfigError(
                f"invalid cursor {cursor!r:.100}: use the cursor of the previous page, or no cursor for the first page"
            ) from exc
        if checksum != self._checksum:
            raise ConfigError("the cursor is from another search: use the filters of the page that returned it")
        return position

    @property
    def _checksum(self) -> int:
        """A checksum of the filters. Times are omitted, because "an hour ago" is a different time on each page."""
        filters = (self.id, self.name, self.state, self.queue, self.text, self.error_fingerprint)
        return zlib.crc32(repr(filters).encode())


def check_limit(limit: int) -> int:
    """Check and return a page length.

    Raises:
        ConfigError: The length is not between 1 and :data:`MAX_LIMIT`.
    """
    if not isinstance(limit, int) or isinstance(limit, bool) or not 1 <= limit <= MAX_LIMIT:
        raise ConfigError(f"limit must be from 1 to {MAX_LIMIT:,}, not {limit!r}")
    return limit


def moment(value: Any, name: str) -> datetime | None:
    """Return a time in UTC.

    Raises:
        ConfigError: The value is neither a ``datetime`` nor a ``date``.
    """
    if value is None:
        return None
    if isinstance(value, datetime):
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)
    if isinstance(value, date):
        return datetime(value.year, value.month, value.day, tzinfo=UTC)
    raise ConfigError(f"{name} must be a datetime or a date, not {value!r}")
