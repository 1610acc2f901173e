"""``schedule``: Celery's interval between the jobs of a beat entry."""

from __future__ import annotations

from datetime import timedelta

from bulltask.errors import ConfigError

__all__ = ["schedule"]


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
