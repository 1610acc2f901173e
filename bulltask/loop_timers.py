"""Timers of an event loop that take real time, also while a test has stopped the loop's clock.

freezegun stops ``time.monotonic()``, by which an event loop decides when its own timers are due: ``asyncio.sleep()``
and ``asyncio.timeout()`` would never end, or end early when the test moves its clock.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Final

from bulltask.clock import mono_s

__all__ = ["LoopTimer", "sleep", "timeout"]

_DRIFT_S: Final = 1.0
"""An event loop whose clock differs by more does not use the monotonic clock."""
_EARLY_S: Final = 0.001


class LoopTimer:
    """Calls a function on the running event loop after some seconds, as ``loop.call_later()`` does.

    Args:
        seconds: Delay; with zero or less, the function is called in the loop's next iteration.
        callback: Called without arguments.

    Attributes:
        due_s: When it calls the function (``mono_s``).
    """

    def __init__(self, seconds: float, callback: Callable[[], object]) -> None:
        self._loop = asyncio.get_running_loop()
        self.due_s = mono_s() + seconds
        self._callback = callback
        self._cancelled = False
        self._timer: asyncio.Handle | threading.Timer
        if seconds > _EARLY_S:
            self._wait(seconds)
        else:
            self._timer = self._loop.call_soon(self._check)

    def cancel(self) -> None:
        """Do not call the function, unless that has already happened."""
        self._cancelled = True
        self._timer.cancel()

    def _check(self) -> None:
        left_s = self.due_s - mono_s()
        if self._cancelled:
            return
        if left_s > _EARLY_S:  # a test has moved the loop's clock
            self._wait(left_s)
        else:
            self._callback()

    def _wait(self, seconds: float) -> None:
        is_test = "freezegun" in sys.modules  # which may stop the clock later, too
        if not is_test and abs(self._loop.time() - mono_s()) < _DRIFT_S:
            self._timer = self._loop.call_later(seconds, self._check)
        else:
            self._timer = timer = threading.Timer(seconds, self._wake_up)
            timer.daemon = True
            timer.start()

    def _wake_up(self) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._check)


@asynccontextmanager
async def timeout(seconds: float | None) -> AsyncIterator[None]:
    """Raise ``TimeoutError`` if the block takes longer than ``seconds``, as ``asyncio.timeout()`` does."""
    async with asyncio.timeout(None) as scope:
        if seconds is None:
            yield
            return
        timer = LoopTimer(seconds, lambda: scope.reschedule(asyncio.get_running_loop().time()))
        try:
            yield
        finally:
            timer.cancel()


async def sleep(seconds: float) -> None:
    """Wait, as ``asyncio.sleep()`` does."""
    if seconds <= 0:
        await asyncio.sleep(0)
        return
    done = asyncio.Event()
    timer = LoopTimer(seconds, done.set)
    try:
        await done.wait()
    finally:
        timer.cancel()
