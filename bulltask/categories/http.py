"""HTTP errors of httpx, requests, urllib and aiohttp: the status says what the type does not."""

from __future__ import annotations

from bulltask.categories.category import PERMANENT, TRANSIENT, ErrorCategory
from bulltask.categories.chain import attribute

__all__ = ["by_response", "by_status_error", "by_url_error", "status_of"]


def status_of(exc: BaseException) -> int | None:
    """Return the HTTP status that an error of an HTTP client reports, wherever that client keeps it."""
    own = (attribute(exc, name) for name in ("status_code", "status", "code"))
    return _first_status(attribute(attribute(exc, "response"), "status_code"), *own)


def by_status_error(exc: BaseException) -> ErrorCategory | None:
    """Judge the error that a client raises for a status; ``None`` when it carries none."""
    # aiohttp gives an answer that is no HTTP the status 400, which no server ever said.
    if type(exc.__cause__).__module__ == "aiohttp.http_exceptions":
        return TRANSIENT
    return _by_status(status_of(exc))


def by_response(exc: BaseException) -> ErrorCategory | None:
    """Judge an error of a client nobody knows here, if it has a ``response.status_code`` or a ``status_code``.

    ``status`` and ``code`` are not looked at: too many things that have nothing to do with HTTP have one.
    """
    own = attribute(exc, "status_code")
    return _by_status(_first_status(attribute(attribute(exc, "response"), "status_code"), own))


def by_url_error(exc: BaseException) -> ErrorCategory | None:
    """Judge urllib's ``URLError``: wrong addresses are permanent, the way to right ones may be blocked."""
    reason = attribute(exc, "reason")
    if isinstance(reason, BaseException):
        return None  # it is the next one of the chain and judged there
    return PERMANENT if str(reason).startswith(("unknown url type", "no host given")) else TRANSIENT


def _first_status(*found: object) -> int | None:
    return next((each for each in found if isinstance(each, int) and 100 <= each <= 599), None)


def _by_status(status: int | None) -> ErrorCategory | None:
    if status is None or status < 300:
        return None
    # 408 and 425 are the server's words for "too slow" and "too early": 4xx by number, not by meaning.
    return TRANSIENT if status >= 500 or status in {408, 425, 429} else PERMANENT
