"""Retention of finished jobs, as users write it and as BullMQ stores it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from bulltask.clock import to_ms
from bulltask.errors import ConfigError
from bulltask.jobs.numbers import MAX_NUMBER, number

__all__ = ["KEEP_ALL", "KEEP_FAILED", "KeepJobs", "keep_option", "keep_to_wire", "stored_keep"]

KeepJobs = bool | int | Mapping[str, Any]
"""``True``: remove immediately; ``False``: keep all; ``n``: keep the newest ``n``; ``{"age": seconds, "count": n}``."""

KEEP_ALL: Final[Mapping[str, int]] = {"count": -1}

KEEP_FAILED: Final[Mapping[str, int]] = {"age": 7 * 86_400, "count": 100_000}
"""How long failed jobs are kept by default. BullMQ keeps them forever; a hundred thousand take about 600 MB."""


def keep_option(value: Any, name: str) -> bool | int | dict[str, int]:
    """Return the stored value of ``removeOnComplete`` or ``removeOnFail``.

    Raises:
        ConfigError: ``value`` is not a :data:`KeepJobs`; ``name`` identifies it in the message.
    """
    if isinstance(value, bool):
        return value
    if not isinstance(value, Mapping):
        return _whole(value, name, low=-1)
    if unknown := sorted(set(value) - {"age", "count"}):
        raise ConfigError(f"{name} has no key {unknown[0]!r:.200}; use age, count")
    wire: dict[str, int] = {}
    if value.get("age") is not None:
        wire["age"] = -(-to_ms(value["age"], f"{name}.age") // 1000)  # BullMQ counts whole seconds here
    if value.get("count") is not None:
        wire["count"] = _whole(value["count"], f"{name}.count", low=0)
    return wire


def stored_keep(option: object) -> Mapping[str, int] | None:
    """Return BullMQ's ``keepJobs`` map for a stored ``removeOnComplete`` or ``removeOnFail``.

    A limit that is not a number is ignored, as in Node.

    Args:
        option: The stored option, which any client may have written.

    Returns:
        ``None`` if the job has no such option.
    """
    if isinstance(option, dict):  # not Mapping, whose check takes longer
        return {key: bound for key in ("count", "age") if (bound := number(option.get(key))) is not None}
    if isinstance(option, bool):
        return {"count": 0} if option else KEEP_ALL
    count = number(option)
    return None if count is None else {"count": count}


def _whole(value: Any, name: str, *, low: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= MAX_NUMBER:
        raise ConfigError(f"{name} must be an integer of {low} or more, not {value!r:.200}")
    return value


def keep_to_wire(keep_ms: int) -> object:
    """Return ``keepJobs`` for a duration; BullMQ counts ``age`` in whole seconds, and zero keeps no job."""
    return {"age": max(1, keep_ms // 1000)} if keep_ms else True
