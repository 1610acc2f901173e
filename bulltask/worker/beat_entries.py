"""Reads and checks the entries of ``beat_schedule``, which have Celery's format."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Final

from bulltask.app import App
from bulltask.config.parsers import time_zone
from bulltask.errors import BulltaskError, ConfigError, did_you_mean
from bulltask.jobs.job import NewJob
from bulltask.jobs.names import check_scheduler_id
from bulltask.payloads.payload_codec import PayloadCodec
from bulltask.registry.arguments import check_args, check_kwargs
from bulltask.registry.call_options import CallOptions
from bulltask.registry.task import AnyTask
from bulltask.schedules.crontabs import crontab
from bulltask.schedules.repeat import Repeat

__all__ = ["BeatEntry", "entry_problems", "read_entries", "unregistered_tasks"]

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


def entry_problems(app: App) -> list[str]:
    """Return what is wrong with the entries of ``beat_schedule``, without freezing the app's settings.

    An entry may still be invalid together with other settings: :func:`read_entries`.
    """
    schedule, problems = app.conf.beat_schedule, []
    for name, entry in (schedule or {}).items():
        try:
            _check_entry(name, entry)
            _parse_rule(entry, time_zone(app.conf.timezone, "timezone"))
            task, args, kwargs, options = _parse_call(entry)
            CallOptions.of(options)
            if (registered := app.tasks.get(task)) is not None:
                registered.arguments.bind(args, kwargs)
        except (BulltaskError, TypeError, ValueError) as exc:
            problems.append(f"beat_schedule[{name!r}]: {exc}")
    return problems


def unregistered_tasks(app: App) -> dict[str, str]:
    """Return the entries of ``beat_schedule`` whose task the app does not have, with the task's name."""
    entries = (app.conf.beat_schedule or {}).items()
    names = {name: _task_name(entry.get("task")) for name, entry in entries if isinstance(entry, Mapping)}
    return {name: task for name, task in names.items() if isinstance(task, str) and app.tasks.get(task) is None}


def _parse_entry(app: App, name: str, entry: object) -> BeatEntry:
    try:
        _check_entry(name, entry)
        assert isinstance(entry, Mapping)
        rule, job = _parse_rule(entry, app.config.timezone), app.build_job(*_parse_call(entry))
        return BeatEntry(name, rule, job, PayloadCodec(app.config).fingerprint(job))
    except (BulltaskError, TypeError, ValueError) as exc:
        raise ConfigError(f"beat_schedule[{name!r}]: {exc}") from exc


def _check_entry(name: str, entry: object) -> None:
    check_scheduler_id(name)
    if not isinstance(entry, Mapping):
        raise ConfigError(f"an entry must be a dictionary, not {entry!r}")
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


def _task_name(task: object) -> object:
    return task.name if isinstance(task, AnyTask) else task


def _parse_call(entry: Mapping[str, Any]) -> tuple[str, tuple[Any, ...], dict[str, Any], Mapping[str, Any]]:
    """Return the task's name, the arguments and the options."""
    task, options = entry["task"], entry.get("options") or {}
    name = _task_name(task)
    if not isinstance(name, str):
        raise ConfigError(f"task must be the name of a task, not {task!r}")
    if not isinstance(options, Mapping):
        raise ConfigError(f"options must be a dictionary, not {options!r}")
    for option in _INVALID_OPTIONS:
        if options.get(option) is not None:
            raise ConfigError(f"the option {option} cannot be used for scheduled jobs")
    return name, tuple(check_args(entry.get("args"), name)), dict(check_kwargs(entry.get("kwargs"), name)), options
