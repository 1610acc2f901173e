"""MessagePack for BullMQ's scripts, also of what another program has stored."""

from __future__ import annotations

import sys
from typing import Final

import msgpack

from bulltask.errors import EncodeError
from bulltask.jobs.codec import ON_SURROGATE

__all__ = ["pack"]

_LARGEST: Final = sys.float_info.max


def pack(value: object) -> bytes:
    """Return ``value`` as MessagePack.

    Integers of more than 64 bits become floats, as they are in Node. Bytes become a text: the type that MessagePack has
    for them is none that Redis reads.

    Raises:
        EncodeError: it cannot be written, for it is nested too deeply.
    """
    try:
        packed: bytes = msgpack.packb(value, default=_as_float, unicode_errors=ON_SURROGATE, use_bin_type=False)
    except (ValueError, TypeError, OverflowError, RecursionError) as exc:
        raise EncodeError(f"options cannot be packed for Redis: {exc}") from exc
    return packed


def _as_float(value: object) -> float:
    if not isinstance(value, int):
        raise TypeError(f"a value of type {type(value).__name__}")
    return float(max(-_LARGEST, min(value, _LARGEST)))
