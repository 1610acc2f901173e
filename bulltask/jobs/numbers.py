"""Stored numbers. They are clamped when they are read, so that later code cannot overflow.

Node stores ``Number.MAX_VALUE`` as ``1.7976931348623157e+308``. As a Python integer, this number has 309 digits, and
overflows in msgpack, in shared memory and in divisions.
"""

from __future__ import annotations

import math
from typing import Final

__all__ = ["MAX_NUMBER", "counter", "field_number", "number"]

MAX_NUMBER: Final = 2**53 - 1
"""Largest absolute value; larger numbers are clamped to it."""

_EXACT_DIGITS: Final = 15  # of a number that needs no clamping
_MAX_DIGITS: Final = 19  # of the largest integer that Redis supports


def number(value: object) -> int | None:
    """Return a finite number from decoded JSON as an integer within ±(2^53-1), ``None`` for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if isinstance(value, float) and not math.isfinite(value):  # 1e999 is legal JSON
        return None
    whole = int(value)
    return whole if -MAX_NUMBER <= whole <= MAX_NUMBER else _clamped(whole)


def field_number(raw: bytes | str) -> int:
    """Return the number in a hash field, within ±(2^53-1); Lua writes some numbers with an exponent.

    Raises:
        ValueError: It is not a finite number.
    """
    if raw.isdigit() and len(raw) <= _EXACT_DIGITS:  # almost every number
        return int(raw)
    read = float(raw)
    if not math.isfinite(read):
        raise ValueError(f"not a finite number: {raw[:40]!r}")
    whole = int(read)
    return whole if -MAX_NUMBER <= whole <= MAX_NUMBER else _clamped(whole)


def counter(raw: bytes) -> int:
    """Return the number in a hash field that Redis can increment (``HINCRBY``): no ``+`` sign, no leading zeros.

    Raises:
        ValueError: Redis could not increment it.
    """
    if len(raw) == 1 and raw.isdigit():  # almost every counter
        return int(raw)
    digits = raw.removeprefix(b"-")
    if not (digits.isdigit() and len(digits) <= _MAX_DIGITS) or (raw[:1] == b"0" and raw != b"0") or raw[:2] == b"-0":
        raise ValueError(f"not a counter: {raw[:40]!r}")
    value = int(raw)
    if not -(2**63) <= value < 2**63 - 1:
        raise ValueError(f"a counter at its maximum: {raw[:40]!r}")
    return value if -MAX_NUMBER <= value <= MAX_NUMBER else _clamped(value)


def _clamped(value: int) -> int:
    return max(-MAX_NUMBER, min(value, MAX_NUMBER))
