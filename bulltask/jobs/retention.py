"""Which finished jobs stay, in the words of users and in BullMQ's (PROTOCOL 4.7)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from bulltask.clock import to_ms
from bulltask.errors import ConfigError
from bulltask.jobs.numbers import MOST, number

__all__ = ["KEEP_ALL", "KeepJobs", "keep_option", "stored_keep"]

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


def _whole(value: Any, name: str, *, low: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= MOST:
        raise ConfigError(f"{name} must be a whole number of {low} or more, not {value!r}")
    return value
