"""Reads and checks the entries of ``beat_schedule``, which have Celery's format."""

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
from bulltask.payloads.payload_codec import PayloadCodec
from bulltask.registry.arguments import check_args, check_kwargs
from bulltask.registry.task import AnyTask
from bulltask.schedules.crontabs import crontab
from bulltask.schedules.repeat import Repeat

__all__ = ["BeatEntry", "read_entries"]

_KEYS: Final = ("task", "schedule", "args", "kwargs", "options", "relative")
_INVALID_OPTIONS: Final = ("countdown", "eta", "job_id", "timestamp", "deduplication", "parent")


@dataclass(frozen=True, slots=True)
class BeatEntry:
    """A valid entry of ``beat_schedule``.

    Attributes:
        name: The key of the entry, which is the id of its job scheduler.
        rule: When its jobs run.
        job: The template of its jobs, with their queue.
        data: A string that changes only when the template's data changes, even if the encrypted data is never the same.
    """

    name: str
    rule: Repeat
    job: NewJob
    data: str

    @property
    def digest(self) -> str:
        """A short hash that changes with the entry and the settings that it depends on."""
        content = [self.job.name, self.data, self.rule.to_wire(), self.job.options.to_template()]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def read_entries(app: App) -> list[BeatEntry] | None:
    """Return the entries of ``app.conf.beat_schedule`` and ``app.add_periodic_task``, ``None`` if there are none.

    Raises:
        ConfigError: An entry is invalid; the message names it.
    """
    app.set_up_periodic_tasks()
    schedule = app.config.beat_schedule
    if schedule is None and not app.periodic_tasks:
        return None
    return [_parse_entry(app, name, entry) for name, entry in {**(schedule or {}), **app.periodic_tasks}.items()]


def _parse_entry(app: App, name: str, entry: object) -> BeatEntry:
    try:
        check_scheduler_id(name)
        if not isinstance(entry, Mapping):
            raise ConfigError(f"an entry must be a dictionary, not {entry!r}")
        _check_keys(entry)
        rule, job = _parse_rule(entry, app.config.timezone), _build_job(app, entry)
        return BeatEntry(name, rule, job, PayloadCodec(app.config).fingerprint(job))
    except (BulltaskError, TypeError, ValueError) as exc:
        raise ConfigError(f"beat_schedule[{name!r}]: {exc}") from exc


def _check_keys(entry: Mapping[Any, Any]) -> None:
    for key in entry:
        if key not in _KEYS:
            raise ConfigError(f"unknown key {key!r}{did_you_mean(str(key), _KEYS)}")
    for key in ("task", "schedule"):
        if key not in entry:
            raise ConfigError(f"the key {key!r} is missing")
    if entry.get("relative"):
        raise ConfigError("relative intervals are not supported; use crontab(…)")


def _parse_rule(entry: Mapping[str, Any], timezone: str) -> Repeat:
    schedule = entry["schedule"]
    if isinstance(schedule, crontab):
        schedule = schedule.pattern
    if isinstance(schedule, str):
        # The time zone is always stored, because otherwise Node.js would use its machine's.
        return replace(Repeat.of(cron=schedule), tz=timezone)
    if isinstance(schedule, int | float | timedelta) and not isinstance(schedule, bool):
        return Repeat.of(every=schedule)
    raise ConfigError(f"schedule must be crontab(…), a timedelta, seconds or a cron pattern, not {schedule!r}")


def _build_job(app: App, entry: Mapping[str, Any]) -> NewJob:
    task, options = entry["task"], entry.get("options") or {}
    name = task.name if isinstance(task, AnyTask) else task
    if not isinstance(name, str):
        raise ConfigError(f"task must be the name of a task, not {task!r}")
    if not isinstance(options, Mapping):
        raise ConfigError(f"options must be a dictionary, not {options!r}")
    for option in _INVALID_OPTIONS:
        if options.get(option) is not None:
            raise ConfigError(f"the option {option} cannot be used for scheduled jobs")
    return app.build_job(
        name, tuple(check_args(entry.get("args"), name)), dict(check_kwargs(entry.get("kwargs"), name)), options
    )
