"""The delay that a server requests (``Retry-After``)."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from bulltask.categories.chain import attribute, tree_of
from bulltask.categories.http import status_of
from bulltask.clock import to_ms
from bulltask.errors import ConfigError, TransientError

__all__ = ["retry_after_ms"]

_MAX_MS = 3_600_000  # with a longer delay, the job would seem to be lost


def retry_after_ms(exc: BaseException, *, now: datetime | int) -> int | None:
    """Return the minimum delay before the next attempt that the error requests.

    If the task set ``TransientError.retry_after``, that is the delay. Otherwise, it is the ``Retry-After`` header of a
    429 or 503 response (seconds or an HTTP date, at most 1 h) in an error of httpx, requests, aiohttp, urllib or a
    similar client. If there are several errors (causes, members of an ``ExceptionGroup``), the longest delay is used.

    Args:
        exc: The attempt's error.
        now: The current time, for HTTP dates: an aware ``datetime``, or epoch milliseconds.

    Returns:
        Milliseconds, 0 or more; ``None`` if there is no valid delay.
    """
    errors = list(tree_of(exc))
    now_ms = round(now.timestamp() * 1000) if isinstance(now, datetime) else now
    explicit = [ms for each in errors if (ms := _explicit_ms(each)) is not None]
    delays = explicit or [ms for each in errors if (ms := _header_ms(each, now_ms)) is not None]
    return max(delays, default=None)


def _explicit_ms(exc: BaseException) -> int | None:
    if not isinstance(exc, TransientError) or exc.retry_after is None:
        return None
    try:
        return to_ms(exc.retry_after)
    except ConfigError:
        return None  # raising would hide the attempt's error


def _header_ms(exc: BaseException, now_ms: int) -> int | None:
    if status_of(exc) not in {429, 503}:
        return None
    for holder in (attribute(exc, "response"), exc):
        get = attribute(attribute(holder, "headers"), "get")
        with suppress(Exception):  # an object that only looks like headers
            value = get("Retry-After") if callable(get) else None
            if isinstance(value, str):
                return _parse_ms(value.strip(), now_ms)
    return None


def _parse_ms(value: str, now_ms: int) -> int | None:
    if value.isascii() and value.isdigit():
        return min(int(value[:10]) * 1000, _MAX_MS)  # ten digits of seconds are more than three centuries
    try:
        moment = parsedate_to_datetime(value)
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
    aware = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
    return min(max(0, round(aware.timestamp() * 1000) - now_ms), _MAX_MS)
