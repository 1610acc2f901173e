"""HTTP errors from httpx, requests, urllib and aiohttp, by their status code."""

from __future__ import annotations

from bulltask.categories.category import PERMANENT, TRANSIENT, ErrorCategory
from bulltask.categories.chain import attribute

__all__ = ["by_response", "by_status_error", "by_url_error", "status_of"]


def status_of(exc: BaseException) -> int | None:
    """Return the HTTP status code of an HTTP client's error, ``None`` if it has none."""
    values = (attribute(exc, name) for name in ("status_code", "status", "code"))
    return _first_status(attribute(attribute(exc, "response"), "status_code"), *values)


def by_status_error(exc: BaseException) -> ErrorCategory | None:
    """Return the category of a status error; ``None`` if it has no status."""
    # aiohttp sets status 400 for a response that is not HTTP, even though no server has sent that status.
    if type(exc.__cause__).__module__ == "aiohttp.http_exceptions":
        return TRANSIENT
    return _by_status(status_of(exc))


def by_response(exc: BaseException) -> ErrorCategory | None:
    """Return an unknown client's error category, by ``response.status_code`` or ``status_code``.

    ``status`` and ``code`` are not used, because errors that are unrelated to HTTP have these attributes, too.
    """
    status_code = attribute(exc, "status_code")
    return _by_status(_first_status(attribute(attribute(exc, "response"), "status_code"), status_code))


def by_url_error(exc: BaseException) -> ErrorCategory | None:
    """Return the category of urllib's ``URLError``: invalid URLs are permanent, unreachable hosts are transient."""
    reason = attribute(exc, "reason")
    if isinstance(reason, BaseException):
        return None  # the cause is next in the chain
    return PERMANENT if str(reason).startswith(("unknown url type", "no host given")) else TRANSIENT


def _first_status(*values: object) -> int | None:
    return next((value for value in values if isinstance(value, int) and 100 <= value <= 599), None)


def _by_status(status: int | None) -> ErrorCategory | None:
    if status is None or status < 300:
        return None
    # 408 (timeout) and 425 (too early) are temporary, even though they are 4xx.
    return TRANSIENT if status >= 500 or status in {408, 425, 429} else PERMANENT
