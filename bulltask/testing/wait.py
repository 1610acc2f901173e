"""Wait for a condition that has no event."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

__all__ = ["wait_until"]

Found = TypeVar("Found")


def wait_until(condition: Callable[[], Found], timeout: float = 10.0, what: str = "the condition") -> Found:
    """Ask ``condition`` every 10 ms until its answer is true, and return that answer.

    For the few things that have no event to wait for. Whatever has one (a process: ``wait()``, a list: ``BLPOP``, a
    stream: ``XREAD BLOCK``) is better waited for.

    Args:
        condition: called without arguments; what it raises ends the wait.
        timeout: seconds.
        what: names what is awaited, for the error.

    Raises:
        TimeoutError: it never was true; the message names ``what`` and the last answer.
    """
    deadline = time.monotonic() + timeout
    never = threading.Event()
    while not (answer := condition()):
        if time.monotonic() >= deadline:
            raise TimeoutError(f"{what} did not happen within {timeout:g} s (last answer: {answer!r})")
        never.wait(0.01)
    return answer
