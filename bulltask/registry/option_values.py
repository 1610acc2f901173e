"""Values of options: checks and conversions to milliseconds."""

from __future__ import annotations

from datetime import datetime
from typing import Final

from bulltask.clock import Duration, to_epoch_ms, to_ms
from bulltask.errors import ConfigError

__all__ = ["UNLIMITED_RETRIES", "check_max_retries", "expiry_ms", "is_exception", "keep_ms"]

UNLIMITED_RETRIES: Final = 2**31 - 2
"""The number of retries for ``max_retries=None``: the largest that BullMQ supports."""


def is_exception(kind: object) -> bool:
    """Return whether ``kind`` is an exception class."""
    return isinstance(kind, type) and issubclass(kind, BaseException)


def check_max_retries(value: int) -> int:
    """Return a valid number of retries.

    Raises:
        ConfigError: It is invalid.
    """
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= UNLIMITED_RETRIES:
        raise ConfigError(f"max_retries must be an integer of 0 or more, not {value!r:.200}")
    return value


def keep_ms(expires: Duration | None, default_ms: int | None) -> int | None:
    """Return how long a finished job is kept."""
    return default_ms if expires is None else to_ms(expires, "result_expires")


def expiry_ms(expires: Duration | datetime | None) -> tuple[int | None, int | None]:
    """Return ``(expires_in_ms, expires_ms)``: counted from the send, or epoch milliseconds; at most one is set."""
    if expires is None:
        return None, None
    if isinstance(expires, datetime):
        return None, to_epoch_ms(expires, "expires")
    return to_ms(expires, "expires"), None
