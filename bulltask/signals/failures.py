"""Logs the exceptions of hooks: receivers of signals, and methods of middleware."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

__all__ = ["report_failure"]

_logger = logging.getLogger("bulltask.hooks")
_failures: Counter[tuple[str, str]] = Counter()


def report_failure(hook: Any, on: str, exc: BaseException) -> None:
    """Log the 1st, 2nd, 4th, 8th … failure of a hook, so that a broken hook does not flood the log.

    Args:
        hook: The function or method.
        on: The signal's name, or the middleware's method.
        exc: The exception that it raised.
    """
    name = f"{getattr(hook, '__module__', '?')}.{getattr(hook, '__qualname__', type(hook).__name__)}"
    _failures[name, on] += 1
    count = _failures[name, on]
    if count & (count - 1) == 0:
        _logger.error("Hook failed", extra={"hook": name, "on": on, "failures": count}, exc_info=exc)
