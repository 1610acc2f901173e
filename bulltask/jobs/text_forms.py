"""The JSON forms of types that JSON lacks: the strings that a Node.js developer would write.

Type hints convert to these forms and back (:mod:`bulltask.typed`). With the setting ``convert_untyped``, values without
a hint are also written in these forms, but are not converted back.
"""

from __future__ import annotations

import base64
import enum
from collections import deque
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import PurePath
from typing import Any, Final
from uuid import UUID

__all__ = ["format_bytes", "format_datetime", "format_duration", "to_plain"]


def format_datetime(moment: datetime) -> str:
    """Return ISO 8601, with ``Z`` for UTC."""
    return moment.isoformat().replace("+00:00", "Z")  # as JavaScript writes it


def format_bytes(value: bytes) -> str:
    """Return base64."""
    return base64.b64encode(value).decode()


def format_duration(length: timedelta) -> str:
    """Return an ISO 8601 duration, without years and months."""
    sign, length = ("-", -length) if length < timedelta() else ("", length)
    minutes, seconds = divmod(length.seconds, 60)
    hours, minutes = divmod(minutes, 60)
    fraction = f".{length.microseconds:06}".rstrip("0") if length.microseconds else ""
    clock = "".join(f"{count}{unit}" for count, unit in ((hours, "H"), (minutes, "M")) if count)
    clock += f"{seconds}{fraction}S" if seconds or fraction else ""
    days = f"{length.days}D" if length.days else ""
    return f"{sign}P{days}{'T' if clock else ''}{clock}" if days or clock else "PT0S"


def to_plain(value: Any) -> Any:  # noqa: PLR0911 - a return for each kind
    """Return a value in which all values that have a JSON form here are in that form; other values are unchanged."""
    if isinstance(value, enum.Enum):
        return to_plain(value.value)
    if isinstance(value, str | int | float):
        return value
    if isinstance(value, dict):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, _ARRAYS):
        return [to_plain(item) for item in value]
    if hasattr(type(value), "__json__"):
        return to_plain(type(value).__json__(value))
    for kind, form in _FORMS:
        if isinstance(value, kind):
            return form(value)
    return value


_ARRAYS: Final = (list, tuple, set, frozenset, deque)
_FORMS: Final[tuple[tuple[type | tuple[type, ...], Callable[[Any], str]], ...]] = (
    (datetime, format_datetime),  # before date, its base class
    ((date, time), lambda value: value.isoformat()),
    (timedelta, format_duration),
    ((UUID, PurePath), str),
    (Decimal, lambda value: str(value) if value.is_finite() else value),
    ((bytes, bytearray, memoryview), format_bytes),
)
