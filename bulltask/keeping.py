"""Which finished jobs stay, in the words of users and in BullMQ's (PROTOCOL 4.7)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from bulltask.clock import to_ms
from bulltask.errors import ConfigError
from bulltask.foreign import MOST, number
from bulltask.parsers import WORDS

__all__ = ["KEEP_ALL", "KeepJobs", "keep_option", "keep_setting", "stored_keep"]

KeepJobs = bool | int | Mapping[str, Any]
"""``True``: remove at once; ``False``: keep; a number: keep so many; ``{"age": 3600, "count": 1000}``: keep both."""

KEEP_ALL: Final[Mapping[str, int]] = {"count": -1}


def keep_option(value: Any, name: str) -> bool | int | dict[str, int]:
    """Return what is stored in a job as ``removeOnComplete`` or ``removeOnFail``.

    Raises:
        ConfigError: it is no :data:`KeepJobs`; the message calls it ``name``.
    """
    if isinstance(value, bool):
        return value
    if not isinstance(value, Mapping):
        return _whole(value, name, low=-1)
    if unknown := sorted(set(value) - {"age", "count"}):
        raise ConfigError(f"{name} does not know {unknown[0]!r}; it knows age, count")
    wire: dict[str, int] = {}
    if value.get("age") is not None:
        wire["age"] = -(-to_ms(value["age"], f"the age of {name}") // 1000)  # BullMQ counts whole seconds here
    if value.get("count") is not None:
        wire["count"] = _whole(value["count"], f"the count of {name}", low=0)
    return wire


def keep_setting(value: Any, name: str) -> Mapping[str, int]:
    """Return BullMQ's ``keepJobs`` map for a worker's option: :data:`KeepJobs`, or a text that says the same.

    Raises:
        ConfigError: it is something else; the message calls it ``name``.
    """
    meant = _read(value) if isinstance(value, str) else value
    if isinstance(meant, bool):
        return {"count": 0} if meant else KEEP_ALL
    if isinstance(meant, int) and meant >= 0:
        return {"count": _whole(meant, name, low=0)}
    if isinstance(meant, Mapping) and isinstance(stored := keep_option(meant, name), dict):
        return stored
    raise ConfigError(f"{name} must be true, false, how many stay, or {{'age': seconds, 'count': n}}, not {value!r}")


def stored_keep(wanted: object) -> Mapping[str, int] | None:
    """Return BullMQ's ``keepJobs`` map for what a job says as ``removeOnComplete`` or ``removeOnFail``.

    A bound that is no number bounds nothing: Node keeps such jobs, too.

    Args:
        wanted: the stored option, which another program may have written.

    Returns:
        ``None`` where it says nothing.
    """
    if isinstance(wanted, Mapping):
        return {key: bound for key in ("count", "age") if (bound := number(wanted.get(key))) is not None}
    if isinstance(wanted, bool):
        return {"count": 0} if wanted else KEEP_ALL
    most = number(wanted)
    return None if most is None else {"count": most}


def _read(text: str) -> Any:
    """A word, a number, or ``age=3600,count=1000``; ``None`` for anything else."""
    word = text.strip().lower()
    if word in WORDS:
        return WORDS[word]
    try:
        if "=" not in word:
            return int(word)
        pairs = [part.partition("=") for part in word.split(",")]
        return {key.strip(): float(given) if key.strip() == "age" else int(given) for key, _, given in pairs}
    except ValueError:
        return None


def _whole(value: Any, name: str, *, low: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= MOST:
        raise ConfigError(f"{name} must be a whole number of {low} or more, not {value!r}")
    return value
