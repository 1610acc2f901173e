"""Parsers of the settings in :mod:`bulltask.config.config`: one for each kind of value, simple kinds first.

A parser takes a value (a string from the environment or the command line, any object from code) and the setting's name.
It returns the value of the field of ``Config``, or raises ``ConfigError``. The documentation of the settings shows the
text after "must be" in the error.
"""

from __future__ import annotations

import binascii
import fnmatch
import importlib
import json
import re
from base64 import b64decode
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from math import inf
from typing import Any, Final, NamedTuple, TypeVar

from bulltask.config.process import usable_cores
from bulltask.config.urls import HIDDEN, SecretUrl
from bulltask.jobs.clock import to_ms, value_class, zone_of
from bulltask.jobs.errors import ConfigError, InvalidNameError, did_you_mean
from bulltask.jobs.fields import KEEP_ALL, keep_option
from bulltask.jobs.names import EVERY_QUEUE, MAX_NAME, check_queue_name
from bulltask.jobs.payloads import CLOUDPICKLE, JSON, KEY_BYTES, ZLIB, ZSTD, SecretKey

__all__ = [
    "JOB_BUCKETS",
    "SECRET_FILES",
    "Annotations",
    "Autoscale",
    "Limits",
    "Parse",
    "Routes",
    "TaskRate",
    "accepted_serializers",
    "autoscale",
    "buckets",
    "choice",
    "compression",
    "cores",
    "duration",
    "entries",
    "flag",
    "integer",
    "jitter_fraction",
    "key_prefix",
    "keys_by_queue",
    "max_reconnects",
    "memory",
    "optional",
    "parse_annotations",
    "parse_names",
    "plain_text",
    "queue_name",
    "queue_names",
    "rate_limits",
    "retention",
    "routes",
    "serializer",
    "signing_keys",
    "spark_settings",
    "task_rate",
    "time_zone",
    "worker_name",
    "worker_pool",
    "wrap_secrets",
]

Parse = Callable[[Any, str], Any]


def integer(low: int, high: int | None = None) -> Parse:
    """Return a parser for integers from ``low`` to ``high``, inclusive."""
    bounds = f"from {low} to {high}" if high else f"of {low} or more"

    def parse(value: Any, name: str) -> int:
        try:
            number = int(value) if isinstance(value, str) else value
        except ValueError:
            number = None
        if not isinstance(number, int) or isinstance(number, bool) or number < low or (high and number > high):
            raise ConfigError(f"{name} must be an integer {bounds}, not {value!r:.200}")
        return number

    return parse


def duration(low_ms: int = 0) -> Parse:
    """Return a parser for durations (seconds or ``timedelta``) of at least ``low_ms``; it returns milliseconds."""

    def parse(value: Any, name: str) -> int:
        try:
            length = float(value) if isinstance(value, str) else value
        except ValueError as exc:
            raise ConfigError(f"{name} must be a number of seconds or a timedelta, not {value!r:.200}") from exc
        if (ms := to_ms(length, name)) < low_ms:
            raise ConfigError(f"{name} must be at least {low_ms / 1000:g} s, not {value!r:.200}")
        return ms

    return parse


def choice(*allowed: str) -> Parse:
    """Return a parser for one of the ``allowed`` words."""

    def parse(value: Any, name: str) -> str:
        text = str(value).lower()
        if text not in allowed:
            raise ConfigError(
                f"{name} must be one of {', '.join(allowed)}, not {value!r:.200}{did_you_mean(text, allowed)}"
            )
        return text

    return parse


BOOLEAN_WORDS: Final = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
"""Words for true and false."""


def flag(value: Any, name: str) -> bool:
    """Return a boolean, given as ``bool`` or as a word."""
    parsed = value if isinstance(value, bool) else {**BOOLEAN_WORDS, "1": True, "0": False}.get(str(value).lower())
    if parsed is None:
        raise ConfigError(f"{name} must be true or false, not {value!r:.200}")
    return parsed


def optional(parse: Parse) -> Parse:
    """Return a parser that also accepts ``None``, ``"none"`` and ``""``, and passes anything else to ``parse``."""
    return lambda value, name: None if value is None or str(value).lower() in {"", "none"} else parse(value, name)


JOB_BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
"""Default bounds of the wait and run times of jobs, in seconds."""
_MAX_BUCKETS: Final = 50


def buckets(value: Any, name: str) -> tuple[float, ...]:
    """Return the bounds of a histogram in seconds, from a list of numbers or a comma-separated string."""
    try:
        bounds = tuple(float(part) for part in (value.split(",") if isinstance(value, str) else value))
    except (TypeError, ValueError):
        bounds = ()
    if not 0 < len(bounds) <= _MAX_BUCKETS or bounds[0] <= 0 or bounds[-1] == inf or not _is_increasing(bounds):
        raise ConfigError(
            f"{name} must be up to {_MAX_BUCKETS} increasing numbers of seconds, such as 0.1,1,60, not {value!r:.200}"
        )
    return bounds


def _is_increasing(numbers: Sequence[float]) -> bool:
    return all(low < high for low, high in pairwise(numbers))


def plain_text(value: Any, name: str) -> str:
    """Return a non-empty string without control characters, and without characters that UTF-8 cannot encode."""
    if not isinstance(value, str) or not value or any(ord(char) < 32 for char in value):
        raise ConfigError(f"{name} must be a string without control characters, not {value!r:.200}")
    if any("\ud800" <= char <= "\udfff" for char in value):
        raise ConfigError(
            f"{name} {value!r:.200} has characters that Python could not decode: set LC_ALL=C.UTF-8 or PYTHONUTF8=1, "
            f"or use only ASCII characters"
        )
    return value


def parse_names(value: Any, name: str) -> tuple[str, ...]:
    """Return the names in a list or a comma-separated string."""
    if isinstance(value, str):
        return tuple(plain_text(part.strip(), name) for part in value.split(",") if part.strip())
    if not isinstance(value, Iterable):
        raise ConfigError(f"{name} must be a list of names, not {value!r:.200}")
    return tuple(plain_text(part, name) for part in value)


def entries(value: Any, name: str) -> Mapping[str, Any] | None:
    """Return a dictionary of entries by name; the entries are checked when they are used."""
    if value is None:
        return None
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ConfigError(f"{name} must be a dictionary of entries by name, not {value!r:.200}")
    return dict(value)


def queue_name(value: Any, name: str) -> str:
    """Return a valid queue name."""
    try:
        return check_queue_name(value)
    except InvalidNameError as exc:
        raise ConfigError(f"{name} must be the name of a queue, not {value!r:.100}: {exc}") from exc


def queue_names(value: Any, name: str) -> tuple[str, ...]:
    """Return queue names, from names, dictionary keys or objects with a ``name`` such as ``kombu.Queue``."""
    if value is not None and not isinstance(value, str | Iterable):
        raise ConfigError(f"{name} must be a list of queue names, not {value!r:.200}")
    parts = value if isinstance(value, str) else [getattr(part, "name", part) for part in value or ()]
    return tuple(queue_name(part, name) for part in (parse_names(parts, name) if isinstance(parts, str) else parts))


def key_prefix(value: Any, name: str) -> str:
    """Return a valid prefix of keys, which is not that of bulltask's own keys.

    The queue ``q`` of the prefix ``bulltask`` would share its keys with bulltask's keys for the queue ``q`` of the
    prefix ``bull``.
    """
    prefix = plain_text(value, name)
    if prefix.partition(":")[0] == "bulltask":
        raise ConfigError(f"{name} must not be bulltask or begin with bulltask:, bulltask's prefix for its own keys")
    return prefix


def worker_name(value: Any, name: str) -> str:
    """Return a name that Redis accepts as a connection name, or ``""``."""
    if value is None or value == "":
        return ""
    if len(plain_text(value, name)) > MAX_NAME:
        raise ConfigError(f"{name} must have at most {MAX_NAME} characters, not {len(value)}: {value[:40]!r}…")
    if any(char.isspace() for char in value):
        raise ConfigError(
            f"{name} must not contain spaces, because Redis shows it as a connection's name: {value!r:.200}"
        )
    return str(value)


def time_zone(value: Any, name: str) -> str:
    """Return the name of a time zone that this machine supports; ``None`` is UTC, and a ``ZoneInfo`` has a name."""
    zone = "UTC" if value is None else getattr(value, "key", value)
    zone_of(zone, name)
    return str(zone)


def cores(value: Any, name: str) -> int:
    """Return a number of processes; ``None`` and ``"auto"`` mean one per usable core."""
    if value is None or value == "auto":
        return usable_cores()
    return int(integer(1, 1_000)(value, name))


def worker_pool(value: Any, name: str) -> str:
    """Return the pool of a worker, by Celery's name."""
    text = str(value).lower()
    if text in {"prefork", "processes"}:
        return "prefork"
    if text != "threads":
        hint = {
            "gevent": ": write async def tasks, which run concurrently in every pool, or use threads",
            "eventlet": ": write async def tasks, which run concurrently in every pool, or use threads",
            "solo": ": use prefork with -c 1",
        }.get(text, "")
        raise ConfigError(f"{name} must be prefork or threads, not {value!r:.200}{hint}")
    return text


class Autoscale(NamedTuple):
    """The limits of the number of children."""

    maximum: int
    minimum: int


def autoscale(value: Any, name: str) -> Autoscale:
    """Return the limits of the number of children from ``"10,3"``, ``(10, 3)`` or ``10``, which means ``"10,1"``."""
    parts = value.split(",") if isinstance(value, str) else value if isinstance(value, tuple | list) else [value]
    try:
        maximum, minimum = (integer(1, 1_000)(part, name) for part in (parts if len(parts) > 1 else [*parts, 1]))
    except (ConfigError, ValueError) as exc:
        raise ConfigError(
            f"{name} must be MAX,MIN as in '10,3', from 1 to 1000, not {value!r:.200}"
            + (
                ": the minimum is 1, because one child process always waits for jobs"
                if str(parts[-1:]).strip(" [(',)]") == "0"
                else ""
            )
        ) from exc
    if minimum > maximum:
        raise ConfigError(f"{name} must be MAX,MIN with the maximum first, not {value!r:.200}")
    return Autoscale(maximum, minimum)


_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?) ?([KMG]?)(?:i?B)?", re.ASCII | re.IGNORECASE)
_UNITS_KIB: Final = {"": 1, "K": 1, "M": 1024, "G": 1024 * 1024}
_MIN_MEMORY_KIB: Final = 16 * 1024
_MAX_MEMORY_KIB: Final = 2**50


def memory(value: Any, name: str) -> int:
    """Return a size in KiB from a number of KiB, as in Celery, or a number with a unit: ``"512M"``, ``"1.5GiB"``."""
    match = _SIZE.fullmatch(str(value).strip())
    if match is None or isinstance(value, bool):
        raise ConfigError(f"{name} must be a number of KiB or a size such as '512M' or '2G', not {value!r:.200}")
    size_kib = int(min(float(match[1]) * _UNITS_KIB[match[2].upper()], _MAX_MEMORY_KIB))
    if size_kib < _MIN_MEMORY_KIB:
        # No Python process is that small, so the number is probably in MiB.
        raise ConfigError(
            f"{name} must be at least 16 MiB: {value!r:.200} means {size_kib} KiB; write '512M' for 512 MiB"
        )
    return size_kib


def max_reconnects(value: Any, name: str) -> int | None:
    """Return a number of attempts, ``None`` for no limit; 0 also means no limit, as in Celery."""
    number: int | None = optional(integer(0))(value, name)
    return number or None


def spark_settings(value: Any, name: str) -> Mapping[str, str]:
    """Return Spark settings by name, from a dictionary or a JSON object as a string."""
    try:
        settings = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        settings = None
    # Messages show no values, because they may be passwords.
    if not isinstance(settings, Mapping):
        raise ConfigError(f"{name} must be a dictionary or a JSON object as a string, not {type(value).__name__}")
    for key, item in settings.items():
        if not str(key).startswith("spark."):
            raise ConfigError(f"{name} must contain only settings that begin with 'spark.', not {key!r:.200}")
        if not isinstance(item, str | int | float):
            raise ConfigError(f"{key} in {name} must be a string, a number, true or false, not {type(item).__name__}")
    return {key: str(item).lower() if isinstance(item, bool) else str(item) for key, item in settings.items()}


def jitter_fraction(value: Any, name: str) -> float:
    """Return the random fraction of a delay: a boolean (true is 0.2) or a number from 0 to 1."""
    parsed = value if isinstance(value, bool) else BOOLEAN_WORDS.get(str(value).lower())
    if parsed is not None:
        return 0.2 if parsed else 0.0
    try:
        fraction = float(value)
    except (TypeError, ValueError, OverflowError):
        fraction = -1.0
    if not 0 <= fraction <= 1:
        raise ConfigError(f"{name} must be true, false or a number from 0 to 1, not {value!r:.200}")
    return fraction


def retention(value: Any, name: str) -> Mapping[str, int]:
    """Return BullMQ's ``keepJobs`` map for a worker's option: a :data:`bulltask.jobs.fields.KeepJobs`, or its text."""
    parsed = _parse_retention(value) if isinstance(value, str) else value
    if isinstance(parsed, bool):
        return {"count": 0} if parsed else KEEP_ALL
    if isinstance(parsed, int) and parsed >= 0:
        parsed = {"count": parsed}
    if isinstance(parsed, Mapping) and isinstance(stored := keep_option(parsed, name), dict):
        return stored
    raise ConfigError(
        f"{name} must be true, false, a number of jobs, or {{'age': seconds, 'count': n}}, not {value!r:.200}"
    )


def _parse_retention(text: str) -> Any:
    """Parse a boolean word, a number, or ``age=3600,count=1000``; return ``None`` for anything else."""
    word = text.strip().lower()
    if word in BOOLEAN_WORDS:
        return BOOLEAN_WORDS[word]
    try:
        if "=" not in word:
            return int(word)
        pairs = [part.partition("=") for part in word.split(",")]
        return {key.strip(): float(given) if key.strip() == "age" else int(given) for key, _, given in pairs}
    except ValueError:
        return None


_MAX_JOBS: Final = 2**53 - 1
_UNIT_S: Final = {"ms": 0.001, "s": 1, "m": 60, "h": 3_600, "d": 86_400}
_TASK_RATE: Final = re.compile(r"(\d{1,16}(?:\.\d{1,9})?)(?:\s*/\s*(\d{1,9}(?:\.\d{1,9})?)?\s*(ms|s|m|h|d))?", re.ASCII)
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

    def __str__(self) -> str:
        """Return the rate as a setting has it: ``10/s``, or ``5/30s``; of a longer period than 100 s, jobs per hour."""
        period_s = self.tolerance_ms / 10 if self.tolerance_ms < _MAX_TOLERANCE_MS else 3_600
        jobs = (period_s * 1000 + self.tolerance_ms) / self.interval_ms
        units: dict[float, str] = {1: "s", 60: "m", 3_600: "h"}
        return f"{jobs:.6g}/{units.get(period_s, f'{period_s:g}s')}"


def task_rate(value: Any, name: str) -> TaskRate | None:
    """Return the rate limit of a task, ``None`` for no limit.

    It is given as a number of jobs per second, or a string such as ``"10/s"``, ``"100/m"``, ``"1000/h"`` or
    ``"5/30s"``. 0 and ``None`` mean no limit.
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


Limits = Mapping[str, Mapping[str, int] | None]
"""BullMQ's ``limiter`` (``max`` jobs in ``duration`` milliseconds) by the queue's name in the app."""

_PARTS: Final = {"max", "duration"}
_RATE: Final = re.compile(r"(\d{1,16})\s*/\s*(\d{1,9}(?:\.\d{1,9})?)?\s*(ms|s|m|h|d)", re.ASCII)


def rate_limits(value: Any, name: str) -> Limits:
    """Return the rate limit of each queue.

    The value is one limit for every queue, or a mapping from queue to limit, in which ``"*"`` means all other queues
    and ``None`` no limit. A limit is ``{"max": 100, "duration": 60}`` (seconds or ``timedelta``) or a string as in
    Celery, such as ``"100/m"`` or ``"100/30s"``. A string may also have limits by queue:
    ``"emails=100/m, bulk=none, 5/s"``.
    """
    limits = _by_queue(value, name) if isinstance(value, str) else _of_mapping(value, name)
    for queue in limits.keys() - {EVERY_QUEUE}:
        queue_name(queue, f"a key of {name}")
    return limits


def _of_mapping(value: Any, name: str) -> Limits:
    if not isinstance(value, Mapping):
        raise _invalid(value, name)
    # A limit among the values means that the keys are names of queues, even ``max``.
    has_limits = any(isinstance(part, Mapping) or (isinstance(part, str) and "/" in part) for part in value.values())
    if value.keys() & _PARTS and not has_limits:
        return {EVERY_QUEUE: _limit(value, name)}
    if not value or not all(isinstance(queue, str) and queue for queue in value):
        raise _invalid(value, name)
    return {queue: _limit(limit, f"{name}[{queue!r:.200}]") for queue, limit in value.items()}


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


Route = Mapping[str, Any]
"""A route: ``queue``, and any other option of a call."""

_Router = Callable[..., Any]
_FUNCTION: Final = re.compile(r"\w+(\.\w+)*[.:]\w+")
_AMQP_OPTIONS: Final = ("exchange", "exchange_type", "routing_key", "delivery_mode")


@value_class
class _Table:
    """A router with task names and patterns; a name takes precedence over a pattern."""

    names: Mapping[str, Route]
    patterns: Sequence[tuple[re.Pattern[str], Route]]

    def find(self, task: str) -> Route | None:
        if task in self.names:
            return self.names[task]
        return next((route for pattern, route in self.patterns if pattern.match(task)), None)


@value_class
class Routes:
    """The queues of jobs for which neither the call nor the task sets a queue; the first router with a route wins.

    ``calls_functions`` says whether a route may depend on the arguments of a call.
    """

    routers: Sequence[_Table | _Router]
    calls_functions: bool

    def find(self, task: str, data: Any, options: Mapping[str, Any]) -> Route:
        """Return the route of a call, ``{}`` if there is none; functions also get its arguments and options."""
        for router in self.routers:
            if isinstance(router, _Table):
                route = router.find(task)
            else:
                args, kwargs = ((), data) if isinstance(data, Mapping) else (data or (), {})
                given = (
                    router.route_for_task(task, args, kwargs)
                    if hasattr(router, "route_for_task")
                    else router(task, args, kwargs, options, task=None)
                )
                route = _route(given, f"task_routes for {task}")
            if route:
                return route
        return {}

    def queues(self, tasks: Iterable[str]) -> list[str]:
        """Return the queues of these tasks according to the tables; those of functions depend on the calls."""
        tables = [router for router in self.routers if isinstance(router, _Table)]
        found = (next(filter(None, (table.find(task) for table in tables)), {}) for task in tasks)
        return list(dict.fromkeys(route["queue"] for route in found if "queue" in route))


def routes(value: Any, name: str) -> Routes | None:
    """Return the routers of ``task_routes``, or ``None`` if there are none.

    The value is one of the following, or a list of them: a dictionary of routes by task name or pattern (``"feed.*"``,
    or a compiled regular expression); a list of pairs of these; a function
    ``(name, args, kwargs, options, task=None, **_)`` that returns a route or ``None``; a function's name. A route is a
    queue's name, or a dictionary with ``queue`` and other options.
    """
    if value is None or value in ((), [], {}):
        return None
    parts = value if isinstance(value, list | tuple) and not _is_pairs(value) else [value]
    routers = [_router(part, name) for part in parts]
    return Routes(routers, any(not isinstance(router, _Table) for router in routers))


def _router(value: Any, name: str) -> _Table | _Router:
    if isinstance(value, Mapping) or _is_pairs(value):
        names, patterns = {}, []
        for key, given in value.items() if isinstance(value, Mapping) else value:
            route = _route(given, f"{name}[{getattr(key, 'pattern', key)!r:.200}]")
            if isinstance(key, re.Pattern):
                patterns.append((key, route))
            elif not isinstance(key, str):
                raise ConfigError(f"{name} must have task names or patterns as keys, not {key!r:.200}")
            elif "*" in key:
                patterns.append((re.compile(fnmatch.translate(key)), route))
            else:
                names[key] = route
        return _Table(names, patterns)
    if isinstance(value, str) and _FUNCTION.fullmatch(value):
        return _LazyFunction(value)
    if callable(value) or hasattr(value, "route_for_task"):
        router: _Router = value
        return router
    raise ConfigError(f"{name} must be a dictionary of routes, a list of pairs or a function, not {value!r:.200}")


def _is_pairs(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(
        isinstance(pair, list | tuple) and len(pair) == 2 and isinstance(pair[0], str | re.Pattern) for pair in value
    )


def _route(value: Any, what: str) -> Route:
    """Return a route from its forms; ``{}`` from ``None``."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        value = {"queue": value}
    route = {key: part for key, part in value.items() if key not in _AMQP_OPTIONS}
    if "queue" in route:
        route["queue"] = queue_name(getattr(route["queue"], "name", route["queue"]), f"queue in {what}")
    elif len(route) < len(value):
        raise ConfigError(f"{what} has no queue; Redis has no exchanges or routing keys, so name the queue")
    return route


class _LazyFunction:
    """A function that is imported when it is first called, because the settings are often read before it exists."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._function: _Router | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> object:
        if self._function is None:
            module_name, _, attribute = self._path.replace(":", ".").rpartition(".")
            try:
                self._function = getattr(importlib.import_module(module_name), attribute)
            except (ImportError, AttributeError, ValueError) as exc:
                raise ConfigError(f"task_routes names {self._path!r:.200}, which cannot be imported: {exc}") from exc
        return self._function(*args, **kwargs)


Annotations = Sequence[Any]
"""Dictionaries of options by task name, or objects with Celery's method ``annotate``."""


def parse_annotations(value: Any, name: str) -> Annotations | None:
    """Return the parts of ``task_annotations``, or ``None`` if there are none.

    The value is a dictionary ``{"shop.tasks.pay": {"time_limit": 30}, "*": {"max_retries": 5}}``, an object whose
    methods ``annotate(task)`` and ``annotate_any()`` return options or ``None``, or a list of these.
    """
    if value is None or value in ((), [], {}):
        return None
    parts = list(value) if isinstance(value, list | tuple) else [value]
    for part in parts:
        if not isinstance(part, Mapping) and not hasattr(part, "annotate"):
            raise ConfigError(
                f"{name} must be a dictionary of options by task name, or a list of them, not {part!r:.200}"
            )
        for task, options in part.items() if isinstance(part, Mapping) else ():
            if not isinstance(options, Mapping):
                raise ConfigError(
                    f"{name}[{task!r:.200}] must be a dictionary of the task's options, not {options!r:.200}"
                )
    return parts


_PICKLES: Final = ("pickle", "application/x-python-serialize", "application/x-pickle")


def serializer(value: Any, name: str) -> str:
    """Return the name of a serializer."""
    if value == "application/json":
        return JSON
    if value not in (JSON, CLOUDPICKLE):
        hint = "; cloudpickle supports everything that pickle does, and is signed" if value in _PICKLES else ""
        raise ConfigError(f"{name} must be json or cloudpickle, not {value!r:.200}{hint}")
    return str(value)


def compression(value: Any, name: str) -> str:
    """Return the name of a compression method; Celery's ``gzip`` is ``zlib``."""
    if value not in (ZLIB, ZSTD, "gzip"):
        raise ConfigError(f"{name} must be zlib or zstd, not {value!r:.200}")
    return ZLIB if value == "gzip" else str(value)


def accepted_serializers(value: Any, name: str) -> tuple[str, ...]:
    """Return the names of serializers, of which json is one."""
    names = tuple(dict.fromkeys(serializer(item, f"an item of {name}") for item in parse_names(value, name)))
    if JSON not in names:
        raise ConfigError(
            f"{name} must be a list that contains json, because Node.js and canvases use it, not {value!r:.200}"
        )
    return names


T = TypeVar("T")
_ID: Final = re.compile(r"[\w.-]{1,64}", re.ASCII)
_WHAT: Final = f"{KEY_BYTES} random bytes in base64"
_URL_SAFE: Final = str.maketrans("-_", "+/")
_HOW: Final = "make one with: python -c \"import secrets; print('k1:' + secrets.token_urlsafe(32))\""


def signing_keys(value: Any, name: str) -> tuple[SecretKey, ...]:
    """Return the keys in a list, or in a string with spaces or commas between them; the first is used for writing.

    A key is an id, and 32 bytes in base64: ``"k1:NmQ0…"``.
    """
    return _parse_keys(_signing_keys, value, name)


def keys_by_queue(value: Any, name: str) -> Mapping[str, tuple[SecretKey, ...]]:
    """Return the keys of each queue, from a mapping or a JSON string; ``"*"`` stands for all other queues.

    The payloads of a queue without keys are not encrypted.
    """
    return _parse_keys(_keys_by_queue, value, name)


def _parse_keys(parse: Callable[[Any, str], T], value: Any, name: str) -> T:
    """Parse keys, and raise errors here, because the local variables of the functions below contain the keys."""
    secret = value if isinstance(value, SecretKeys) else SecretKeys(value)
    del value
    try:
        return parse(secret.get_secret_value(), name)
    except ConfigError as exc:
        message = str(exc)
    raise ConfigError(message)


def _signing_keys(value: Any, name: str) -> tuple[SecretKey, ...]:
    texts = value.replace(",", " ").split() if isinstance(value, str) else () if value is None else value
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise ConfigError(f"{name} must be a list of keys, `id:base64`, not {type(value).__name__}")
    keys = tuple(_key(text, name) for text in texts)
    if len({key.id for key in keys}) < len(keys):
        raise ConfigError(f"{name} has two keys with the same id; give each key its own")
    return keys


def _keys_by_queue(value: Any, name: str) -> Mapping[str, tuple[SecretKey, ...]]:
    try:
        by_queue = json.loads(value) if isinstance(value, str) else {} if value is None else value
    except ValueError:
        by_queue = None
    if not isinstance(by_queue, Mapping) or not all(isinstance(queue, str) for queue in by_queue):
        raise ConfigError(f"{name} must be a dictionary of keys by queue, or a JSON object, not {type(value).__name__}")
    for queue in by_queue.keys() - {EVERY_QUEUE}:
        if ":" in queue:  # it may be a secret key: do not show it
            raise ConfigError(f"a key of {name} must be the name of a queue, which contains no ':'")
        queue_name(queue, f"a key of {name}")
    return {queue: _signing_keys(keys, f"{name}[{queue!r:.200}]") for queue, keys in by_queue.items()}


def _key(text: str, name: str) -> SecretKey:
    key_id, colon, encoded = text.partition(":")
    if not colon or not _ID.fullmatch(key_id):
        raise ConfigError(f"each key in {name} must be an id of letters, digits, _ . or -, then a colon and {_WHAT}")
    try:
        secret = b64decode(encoded.translate(_URL_SAFE) + "=" * (-len(encoded) % 4), validate=True)
    except (ValueError, binascii.Error):
        secret = b""
    if len(secret) != KEY_BYTES:
        raise ConfigError(f"key {key_id!r:.200} in {name} must be {_WHAT}; {_HOW}")
    return SecretKey(key_id, secret)


_URLS: Final = ("broker_url", "broker", "result_backend", "backend")
_KEYS: Final = ("payload_signing_keys", "payload_encryption_keys")
SECRET_FILES: Final = ("broker_url", *_KEYS)
"""Settings that can come from a file, which the environment variable with the suffix ``_FILE`` names."""


class SecretKeys:
    """Keys as the user wrote them; only :meth:`get_secret_value` shows them."""

    __slots__ = ("_value",)

    def __init__(self, value: object) -> None:
        self._value = value

    def get_secret_value(self) -> Any:
        """Return the keys as the user wrote them."""
        return self._value

    def __repr__(self) -> str:
        return repr(HIDDEN)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SecretKeys) and self._value == other._value

    __hash__ = None  # type: ignore[assignment]  # the value may be a list


def wrap_secrets(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with the broker URL, Celery's URL for results, and keys wrapped."""
    wrapped = dict(settings)
    for name, value in settings.items():
        if name in _URLS and isinstance(value, str):
            wrapped[name] = SecretUrl(value)
        elif name in _KEYS and value is not None and not isinstance(value, SecretKeys):
            wrapped[name] = SecretKeys(value)
    return wrapped
