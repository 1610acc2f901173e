"""Job schedulers, and Celery's names for schedules: ``from bulltask.schedules import crontab, schedule``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bulltask.schedules.crontabs import crontab
from bulltask.schedules.intervals import schedule

__all__ = ["crontab", "schedule"]

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
