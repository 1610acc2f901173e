"""The setting ``limiter``: rate limits as users write them, translated to BullMQ's form."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from bulltask.clock import to_ms
from bulltask.config.parsers import queue_name
from bulltask.errors import ConfigError

__all__ = ["EVERY_QUEUE", "Limits", "rate_limits"]

EVERY_QUEUE: Final = "*"
"""The key of the limit for all queues that are not listed."""

Limits = Mapping[str, Mapping[str, int] | None]
"""BullMQ's ``limiter`` (``max`` jobs in ``duration`` milliseconds) by the queue's name in the app."""

_MAX_JOBS: Final = 2**53 - 1
_PARTS: Final = {"max", "duration"}
_RATE: Final = re.compile(r"(\d{1,16})\s*/\s*(\d{1,9}(?:\.\d{1,9})?)?\s*(ms|s|m|h|d)", re.ASCII)
_UNIT_S: Final = {"ms": 0.001, "s": 1, "m": 60, "h": 3_600, "d": 86_400}


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
    return {queue: _limit(limit, f"{name}[{queue!r}]") for queue, limit in value.items()}


def _is_limit(part: Any) -> bool:
    """Return whether a value is a limit, so that its key ``max`` or ``duration`` is the name of a queue."""
    return isinstance(part, Mapping) or (isinstance(part, str) and "/" in part)


def _by_queue(text: str, name: str) -> Limits:
    limits: dict[str, Mapping[str, int] | None] = {}
    for part in text.split(","):
        queue, _, limit = (word.strip() for word in part.rpartition("="))
        if (queue or EVERY_QUEUE) in limits:
            raise ConfigError(f"{name} must have one limit per queue, not two for {queue or 'every queue'}: {text!r}")
        limits[queue or EVERY_QUEUE] = _limit(limit, f"{name}[{queue!r}]" if queue else name)
    return limits


def _limit(value: Any, name: str) -> Mapping[str, int] | None:
    if value is None or (isinstance(value, str) and value.lower() == "none"):
        return None
    if isinstance(value, Mapping):
        if value.keys() != _PARTS:
            raise ConfigError(f"{name} must contain exactly max and duration, not {dict(value)!r}")
        return _check_limit(value["max"], value["duration"], name)
    if not isinstance(value, str) or (rate := _RATE.fullmatch(value)) is None:
        raise _invalid(value, name)
    return _check_limit(int(rate[1]), float(rate[2] or 1) * _UNIT_S[rate[3]], name)


def _check_limit(max_jobs: Any, duration: Any, name: str) -> Mapping[str, int]:
    if not isinstance(max_jobs, int) or isinstance(max_jobs, bool) or not 1 <= max_jobs <= _MAX_JOBS:
        raise ConfigError(f"{name}.max must be an integer from 1 to {_MAX_JOBS}, not {max_jobs!r}")
    if not (duration_ms := to_ms(duration, f"{name}.duration")):
        raise ConfigError(f"{name}.duration must be at least 0.001 s, not {duration!r}")
    return {"max": max_jobs, "duration": duration_ms}


def _invalid(value: Any, name: str) -> ConfigError:
    return ConfigError(f"{name} must be a rate such as '100/m' or {{'max': 100, 'duration': 60}}, not {value!r}")
