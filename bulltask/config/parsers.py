"""Parsers of settings: a parser, or a function that returns a parser, for each kind of value.

A parser takes the value (a string from the environment or the command line, any object from code) and the setting's
name for the message. It returns the field's value in :class:`bulltask.config.config.Config`, or raises ``ConfigError``.
The documentation of the settings contains the text after "must be" in this message.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple

from bulltask.clock import to_ms, zone_of
from bulltask.errors import ConfigError, InvalidNameError, did_you_mean
from bulltask.jobs.names import MAX_NAME, check_queue_name
from bulltask.jobs.retention import KEEP_ALL, keep_option
from bulltask.process import usable_cores

__all__ = [
    "BOOLEAN_WORDS",
    "Autoscale",
    "Parse",
    "autoscale",
    "choice",
    "cores",
    "duration",
    "entries",
    "flag",
    "integer",
    "jitter_fraction",
    "key_prefix",
    "max_reconnects",
    "memory",
    "optional",
    "parse_names",
    "plain_text",
    "queue_name",
    "retention",
    "spark_settings",
    "time_zone",
    "worker_name",
    "worker_pool",
]

_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?) ?([KMG]?)(?:i?B)?", re.ASCII | re.IGNORECASE)
_UNITS_KIB: Final = {"": 1, "K": 1, "M": 1024, "G": 1024 * 1024}
_MIN_MEMORY_KIB: Final = 16 * 1024
_MAX_MEMORY_KIB: Final = 2**50
BOOLEAN_WORDS: Final = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
"""Words for true and false."""
Parse = Callable[[Any, str], Any]


class Autoscale(NamedTuple):
    """The limits of the number of children."""

    maximum: int
    minimum: int


def integer(low: int, high: int | None = None) -> Parse:
    """Return a parser for integers from ``low`` to ``high``, inclusive."""

    def parse(value: Any, name: str) -> int:
        try:
            number = int(value) if isinstance(value, str) else value
        except ValueError:
            number = None
        if not isinstance(number, int) or isinstance(number, bool) or number < low or (high and number > high):
            raise ConfigError(f"{name} must be an integer {_span(low, high)}, not {value!r:.200}")
        return number

    return parse


def _span(low: int, high: int | None) -> str:
    return f"from {low} to {high}" if high else f"of {low} or more"


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


def worker_pool(value: Any, name: str) -> str:
    """Return the pool of a worker, by Celery's name.

    Raises:
        ConfigError: The value is invalid; ``name`` identifies it in the message.
    """
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


def autoscale(value: Any, name: str) -> Autoscale:
    """Return the limits of the number of children from ``"10,3"``, ``(10, 3)`` or ``10``, which means ``"10,1"``.

    Raises:
        ConfigError: The value is invalid; ``name`` identifies it in the message.
    """
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


def memory(value: Any, name: str) -> int:
    """Return a size in KiB from a number of KiB, as in Celery, or from a number with a unit: ``"512M"``, ``"1.5GiB"``.

    Raises:
        ConfigError: The value is invalid; ``name`` identifies it in the message.
    """
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


def optional(parse: Parse) -> Parse:
    """Return a parser that also accepts ``None``, ``"none"`` and ``""``, and passes anything else to ``parse``."""
    return lambda value, name: None if value is None or str(value).lower() in {"", "none"} else parse(value, name)


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


def flag(value: Any, name: str) -> bool:
    """Return a boolean, given as ``bool`` or as a word.

    Raises:
        ConfigError: The value is invalid; ``name`` identifies it in the message.
    """
    parsed = value if isinstance(value, bool) else {**BOOLEAN_WORDS, "1": True, "0": False}.get(str(value).lower())
    if parsed is None:
        raise ConfigError(f"{name} must be true or false, not {value!r:.200}")
    return parsed


def plain_text(value: Any, name: str) -> str:
    """Return a non-empty string without control characters, and without characters that UTF-8 cannot encode.

    Raises:
        ConfigError: The value is invalid; ``name`` identifies it in the message.
    """
    if not isinstance(value, str) or not value or any(ord(char) < 32 for char in value):
        raise ConfigError(f"{name} must be a string without control characters, not {value!r:.200}")
    if any("\ud800" <= char <= "\udfff" for char in value):
        raise ConfigError(
            f"{name} {value!r:.200} has characters that Python could not decode: set LC_ALL=C.UTF-8 or PYTHONUTF8=1, "
            f"or use only ASCII characters"
        )
    return value


def key_prefix(value: Any, name: str) -> str:
    """Return a valid prefix of keys.

    Raises:
        ConfigError: It is invalid, or the one of bulltask's own keys: the queue ``q`` of the prefix ``bulltask`` would
            share its keys with bulltask's keys for the queue ``q`` of the prefix ``bull``.
    """
    prefix = plain_text(value, name)
    if prefix.partition(":")[0] == "bulltask":
        raise ConfigError(f"{name} must not be bulltask or begin with bulltask:, bulltask's prefix for its own keys")
    return prefix


def queue_name(value: Any, name: str) -> str:
    """Return a valid queue name.

    Raises:
        ConfigError: The value is invalid; ``name`` identifies it in the message.
    """
    try:
        return check_queue_name(value)
    except InvalidNameError as exc:
        raise ConfigError(f"{name} must be the name of a queue, not {value!r:.100}: {exc}") from exc


def worker_name(value: Any, name: str) -> str:
    """Return a name that Redis accepts as a connection name, or ``""``.

    Raises:
        ConfigError: The value is invalid; ``name`` identifies it in the message.
    """
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


def max_reconnects(value: Any, name: str) -> int | None:
    """Return a number of attempts, ``None`` for no limit; 0 also means no limit, as in Celery."""
    number: int | None = optional(integer(0))(value, name)
    return number or None


def entries(value: Any, name: str) -> Mapping[str, Any] | None:
    """Return a dictionary of entries by name; the entries are checked when they are used.

    Raises:
        ConfigError: The value is invalid; ``name`` identifies it in the message.
    """
    if value is None:
        return None
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ConfigError(f"{name} must be a dictionary of entries by name, not {value!r:.200}")
    return dict(value)


def spark_settings(value: Any, name: str) -> Mapping[str, str]:
    """Return Spark settings by name, from a dictionary or a JSON object as a string.

    Raises:
        ConfigError: The value is invalid; ``name`` identifies it in the message.
    """
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
    """Return the random fraction of a delay: a boolean (true is 0.2) or a number from 0 to 1.

    Raises:
        ConfigError: The value is invalid; ``name`` identifies it in the message.
    """
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


def parse_names(value: Any, name: str) -> tuple[str, ...]:
    """Return the names in a list or a comma-separated string.

    Raises:
        ConfigError: The value is invalid; ``name`` identifies it in the message.
    """
    if isinstance(value, str):
        return tuple(plain_text(part.strip(), name) for part in value.split(",") if part.strip())
    if not isinstance(value, Iterable):
        raise ConfigError(f"{name} must be a list of names, not {value!r:.200}")
    return tuple(plain_text(part, name) for part in value)


def cores(value: Any, name: str) -> int:
    """Return a number of processes; ``None`` and ``"auto"`` mean one per usable core."""
    if value is None or value == "auto":
        return usable_cores()
    return int(integer(1, 1_000)(value, name))


def retention(value: Any, name: str) -> Mapping[str, int]:
    """Return BullMQ's ``keepJobs`` map for a worker's option.

    Args:
        value: :data:`bulltask.jobs.retention.KeepJobs`, or a string that represents it.
        name: Name of the setting, for the message.

    Raises:
        ConfigError: The value is invalid; ``name`` identifies it in the message.
    """
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
