"""The days and queues of a report."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from typing import Final

from bulltask.jobs.errors import ConfigError

__all__ = ["MINUTE", "Period", "Span"]

MINUTE: Final = timedelta(minutes=1)
_MAX_DAYS: Final = 366
_DAY: Final = timedelta(days=1)

Span = tuple[datetime, datetime]
"""A start and an end, which is not included."""


@dataclass(frozen=True, slots=True)
class Period:
    """Whole days (UTC) and queues.

    Attributes:
        first: The first day.
        last: The last day, which is included.
        queues: Names of queues; empty for all.

    Raises:
        ConfigError: The last day is before the first, or there are more than 366 days.
    """

    first: date
    last: date
    queues: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.last < self.first:
            raise ConfigError(f"{self.first}..{self.last} ends before it begins: write the earlier day first")
        if (self.last - self.first).days >= _MAX_DAYS:
            raise ConfigError(f"{self.first}..{self.last} has more than {_MAX_DAYS} days: choose fewer days")

    @property
    def days(self) -> list[date]:
        """All days, in order."""
        return [self.first + _DAY * offset for offset in range((self.last - self.first).days + 1)]

    @property
    def span(self) -> Span:
        """The start and end; the end is not included."""
        return datetime.combine(self.first, time(), UTC), datetime.combine(self.last + _DAY, time(), UTC)

    @property
    def title(self) -> str:
        """``22 November 2026``, or ``20 November to 22 November 2026``."""
        last = f"{self.last.day} {self.last:%B %Y}"
        if self.first == self.last:
            return last
        year = f" {self.first:%Y}" if self.first.year != self.last.year else ""
        return f"{self.first.day} {self.first:%B}{year} to {last}"

    def __str__(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}..{self.last}"
