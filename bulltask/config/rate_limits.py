"""Parses rate limits: of queues (the setting ``limiter``), which are translated to BullMQ's form, and of tasks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from bulltask.clock import to_ms
from bulltask.config.parsers import queue_name
from bulltask.errors import ConfigError
from bulltask.jobs.names import EVERY_QUEUE
from bulltask.value_class import value_class

__all__ = ["Limits", "TaskRate", "rate_limits", "task_rate"]

Limits = Mapping[str, Mapping[str, int] | None]
"""BullMQ's ``limiter`` (``max`` jobs in ``duration`` milliseconds) by the queue's name in the app."""

_MAX_JOBS: Final = 2**53 - 1
_PARTS: Final = {"max", "duration"}
_RATE: Final = re.compile(r"(\d{1,16})\s*/\s*(\d{1,9}(?:\.\d{1,9})?)?\s*(ms|s|m|h|d)", re.ASCII)
_TASK_RATE: Final = re.compile(r"(\d{1,16}(?:\.\d{1,9})?)(?:\s*/\s*(\d{1,9}(?:\.\d{1,9})?)?\s*(ms|s|m|h|d))?", re.ASCII)
_UNIT_S: Final = {"ms": 0.001, "s": 1, "m": 60, "h": 3_600, "d": 86_400}
_MAX_INTERVAL_MS: Final = 365 * 86_400_000
_MIN_INTERVAL_MS: Final = 0.001
_MAX_TOLERANCE_MS: Final = 1_000


@value_class
class TaskRate:
    """How often jobs of a task may start.

    Attributes:
        interval_ms: Average time between two starts.
        tolerance_ms: By how much the starts after a late one may be early: 1% of the limit's period, at most 1 s. To
            compensate, each interval is longer by ``tolerance_ms / jobs``, so that no period exceeds the limit.
    """

    interval_ms: float
    tolerance_ms: float

    @classmethod
    def of(cls, jobs: float, period_ms: float) -> TaskRate:
        """Return the rate of ``jobs`` per period; 0.5 jobs a minute is treated as one job in two minutes."""
        if jobs < 1:
            jobs, period_ms = 1, period_ms / jobs
        tolerance_ms = min(period_ms / 100, _MAX_TOLERANCE_MS)
        return cls((period_ms + tolerance_ms) / jobs, tolerance_ms)


def task_rate(value: Any, name: str) -> TaskRate | None:
    """Return the rate limit of a task, ``None`` for no limit.

    Args:
        value: A number of jobs per second, or a string such as ``"10/s"``, ``"100/m"``, ``"1000/h"`` or ``"5/30s"``. 0
            and ``None`` mean no limit.
        name: Name of the option or setting, for the message.

    Raises:
        ConfigError: The value is invalid.
    """
    jobs, period_s = value, 1.0
    if isinstance(value, str) and (rate := _TASK_RATE.fullmatch(value.strip())) is not None:
        jobs, period_s = float(rate[1]), float(rate[2] or 1) * _UNIT_S[rate[3] or "s"]
    if value is None or (jobs == 0 and not isinstance(jobs, bool)):
        return None
    if not isinstance(jobs, int | float) or isinstance(jobs, bool) or not 0 < jobs <= _MAX_JOBS or not period_s:
        raise ConfigError(
            f"{name} must be a number of jobs per second, or a rate such as '100/m', '10/s' or '5/30s', "
            f"not {value!r:.200}"
        )
    rate_ms = period_s * 1000 / jobs
    if not _MIN_INTERVAL_MS <= rate_ms <= _MAX_INTERVAL_MS:
        raise ConfigError(
            f"{name} must be between 1 job per 365 days and 1,000,000 jobs per second, not {value!r:.200}"
        )
    return TaskRate.of(jobs, period_s * 1000)


def rate_limits(value: Any, name: str) -> Limits:
    """Return the rate limit of each queue.

    Args:
        value: One limit for every queue, or a mapping from queue to limit, in which ``"*"`` means all other queues and
            ``None`` no limit. A limit is ``{"max": 100, "duration": 60}`` (seconds or ``timedelta``) or a string as in
            Celery, such as ``"100/m"`` or ``"100/30s"``. A string may also have limits by queue:
            ``"emails=100/m, bulk=none, 5/s"``.
        name: Name of the setting, for the message.

    Raises:
        ConfigError: The value is invalid.
    """
    limits = _by_queue(value, name) if isinstance(value, str) else _of_mapping(value, name)
    for queue in limits.keys() - {EVERY_QUEUE}:
        queue_name(queue, f"a key of {name}")
    return limits


def _of_mapping(value: Any, name: str) -> Limits:
    if not isinstance(value, Mapping):
        raise _invalid(value, name)
    if value.keys() & _PARTS and not any(_is_limit(part) for part in value.values()):
        return {EVERY_QUEUE: _limit(value, name)}
    if not value or not all(isinstance(queue, str) and queue for queue in value):
        raise _invalid(value, name)
    return {queue: _limit(limit, f"{name}[{queue!r:.200}]") for queue, limit in value.items()}


def _is_limit(part: Any) -> bool:
    """Return whether a value is a limit. If so, the key that it belongs to is a queue's name, even ``max``."""
    return isinstance(part, Mapping) or (isinstance(part, str) and "/" in part)


def _by_queue(text: str, name: str) -> Limits:
    limits: dict[str, Mapping[str, int] | None] = {}
    for part in text.split(","):
        queue, _, limit = (word.strip() for word in part.rpartition("="))
        if (queue or EVERY_QUEUE) in limits:
            raise ConfigError(
                f"{name} must have one limit per queue, not two for {queue or 'every queue'}: {text!r:.200}"
            )
        limits[queue or EVERY_QUEUE] = _limit(limit, f"{name}[{queue!r:.200}]" if queue else name)
    return limits


def _limit(value: Any, name: str) -> Mapping[str, int] | None:
    if value is None or (isinstance(value, str) and value.lower() == "none"):
        return None
    if isinstance(value, Mapping):
        if value.keys() != _PARTS:
            raise ConfigError(f"{name} must contain exactly max and duration, not {dict(value)!r:.200}")
        return _check_limit(value["max"], value["duration"], name)
    if not isinstance(value, str) or (rate := _RATE.fullmatch(value)) is None:
        raise _invalid(value, name)
    return _check_limit(int(rate[1]), float(rate[2] or 1) * _UNIT_S[rate[3]], name)


def _check_limit(max_jobs: Any, duration: Any, name: str) -> Mapping[str, int]:
    if not isinstance(max_jobs, int) or isinstance(max_jobs, bool) or not 1 <= max_jobs <= _MAX_JOBS:
        raise ConfigError(f"{name}.max must be an integer from 1 to {_MAX_JOBS}, not {max_jobs!r:.200}")
    if not (duration_ms := to_ms(duration, f"{name}.duration")):
        raise ConfigError(f"{name}.duration must be at least 0.001 s, not {duration!r:.200}")
    return {"max": max_jobs, "duration": duration_ms}


def _invalid(value: Any, name: str) -> ConfigError:
    return ConfigError(
        f"{name} must be a rate such as '100/m' or {{'max': 100, 'duration': 60}}, or rates by queue, "
        f"not {value!r:.200}"
    )
