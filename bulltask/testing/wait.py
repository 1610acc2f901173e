"""Waits for a condition by polling, for conditions without an event."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from bulltask.clock import mono_s

__all__ = ["wait_until"]

T = TypeVar("T")


def wait_until(condition: Callable[[], T], timeout: float = 10.0, what: str = "the condition") -> T:
    """Evaluate ``condition`` every 10 ms until its result is true, and return that result.

    Prefer an event if there is one: ``wait()`` for a process, ``BLPOP`` for a list, ``XREAD BLOCK`` for a stream.

    Args:
        condition: Called without arguments; an exception is not caught.
        timeout: Seconds.
        what: Name of the condition, for the error.

    Raises:
        TimeoutError: It did not become true; the message shows ``what`` and the last result.
    """
    deadline = mono_s() + timeout
    timer = threading.Event()
    while not (result := condition()):
        if mono_s() >= deadline:
            raise TimeoutError(f"timed out after {timeout:g} s waiting for {what} (last result: {result!r})")
        timer.wait(0.01)
    return result
