"""The entries of ``beat_schedule``: Celery's shape, checked before anything is started."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Final

from bulltask.app import App
from bulltask.errors import BulltaskError, ConfigError, did_you_mean
from bulltask.jobs.job import NewJob
from bulltask.jobs.names import check_scheduler_id
from bulltask.registry.task import AnyTask
from bulltask.schedule.crontabs import crontab
from bulltask.schedule.repeat import Repeat

__all__ = ["BeatEntry", "read_entries"]

_KNOWN: Final = ("task", "schedule", "args", "kwargs", "options", "relative")
_REFUSED: Final = ("countdown", "eta", "job_id", "timestamp", "deduplication", "parent")


@dataclass(frozen=True, slots=True)
class BeatEntry:
    """One entry, checked.

    Attributes:
        name: its key, and the id of its job scheduler.
        rule: when its jobs run.
        job: the template of its jobs, and their queue.
    """

    name: str
    rule: Repeat
    job: NewJob

    @property
    def digest(self) -> str:
        """A short text that differs when the entry, or a setting that it depends on, says something else."""
        said = [self.job.name, self.job.data.decode(), self.rule.to_wire(), self.job.options.to_template()]
        return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:16]


def read_entries(app: App) -> list[BeatEntry] | None:
    """Return the entries of ``app.conf.beat_schedule``, ``None`` where it was never set.

    Raises:
        ConfigError: an entry is wrong; the message names it.
    """
    said = app.config.beat_schedule
    return None if said is None else [_entry(app, name, entry) for name, entry in said.items()]


def _entry(app: App, name: str, said: object) -> BeatEntry:
    try:
        check_scheduler_id(name)
        if not isinstance(said, Mapping):
            raise ConfigError(f"it must be a dictionary, not {said!r}")
        _check_names(said)
        return BeatEntry(name, _rule(said, app.config.timezone), _job(app, said))
    except (BulltaskError, TypeError, ValueError) as exc:
        raise ConfigError(f"beat_schedule[{name!r}]: {exc}") from exc


def _check_names(said: Mapping[Any, Any]) -> None:
    for key in said:
        if key not in _KNOWN:
            raise ConfigError(f"unknown key {key!r}{did_you_mean(str(key), _KNOWN)}")
    for key in ("task", "schedule"):
        if key not in said:
            raise ConfigError(f"the key {key!r} is missing")
    if said.get("relative"):
        raise ConfigError("relative intervals do not exist here; say the moments with crontab(…)")


def _rule(said: Mapping[str, Any], timezone: str) -> Repeat:
    schedule = said["schedule"]
    if isinstance(schedule, crontab):
        schedule = schedule.pattern
    if isinstance(schedule, str):
        # The time zone is said in any case: Node.js would take that of its own machine.
        return replace(Repeat.of(cron=schedule), tz=timezone)
    if isinstance(schedule, int | float | timedelta) and not isinstance(schedule, bool):
        return Repeat.of(every=schedule)
    raise ConfigError(f"schedule must be crontab(…), a timedelta, seconds or a cron pattern, not {schedule!r}")


def _job(app: App, said: Mapping[str, Any]) -> NewJob:
    task, options = said["task"], said.get("options") or {}
    name = task.name if isinstance(task, AnyTask) else task
    if not isinstance(name, str):
        raise ConfigError(f"task must be the name of a task, not {task!r}")
    if not isinstance(options, Mapping):
        raise ConfigError(f"options must be a dictionary, not {options!r}")
    for option in _REFUSED:
        if options.get(option) is not None:
            raise ConfigError(f"the option {option} makes no sense for a job that is made again and again")
    return app.build_job(name, tuple(said.get("args") or ()), dict(said.get("kwargs") or {}), options)
