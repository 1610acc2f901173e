"""The active faults of a flaky proxy, and their counters."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

from bulltask.jobs import clock as loop_timers

__all__ = ["MATCH_BYTES", "AfterLoss", "CommandFilter", "Counters", "Faults", "InjectedReply"]

AfterLoss = Literal["reset", "freeze"]
MATCH_BYTES = 4_096
PIECES_PER_SECOND = 20  # at a limited bandwidth, data is written in pieces that take a twentieth of a second


class InjectedReply(bytes):
    """A reply that the proxy sends instead of the server."""


class Counters:
    """Counters that a test can wait for."""

    def __init__(self) -> None:
        self._values = {"connections": 0, "dropped": 0, "injected": 0}
        self._changed = threading.Condition()

    def __getitem__(self, name: str) -> int:
        return self._values[name]

    def add(self, name: str) -> None:
        """Increment a counter and wake up waiting threads."""
        with self._changed:
            self._values[name] += 1
            self._changed.notify_all()

    def wait_for(self, condition: Callable[[], bool], timeout_ms: int) -> None:
        """Wait until ``condition()`` is true; it is checked after each change.

        Raises:
            TimeoutError: It did not become true in time.
        """
        with self._changed:
            if not self._changed.wait_for(condition, timeout_ms / 1000):
                raise TimeoutError(f"still not true after {timeout_ms} ms; the flaky proxy has counted {self._values}")


@dataclass
class CommandFilter:
    """The commands that a fault affects: every n-th command that contains ``match``, up to ``left`` commands.

    Attributes:
        left: How many more commands are affected; default: none.
        every: Affect only every n-th command.
        probability: Probability of affecting each of them.
        match: Text that the command's first 4 KiB must contain, ignoring case.
        rng: Random number generator for ``probability``.
        seen: Number of commands that matched so far.
    """

    left: int = 0
    every: int = 1
    probability: float = 1.0
    match: str = ""
    rng: random.Random = field(default_factory=random.Random)
    seen: int = 0

    def matches(self, command: bytes) -> bool:
        """Return whether the fault affects this command; call it once for each command."""
        if self.left <= 0 or self.match.lower().encode() not in command[:MATCH_BYTES].lower():
            return False
        self.seen += 1
        if self.seen % self.every or self.rng.random() >= self.probability:
            return False
        self.left -= 1
        return True


class Faults:
    """The active faults; used in the proxy's thread only."""

    def __init__(self) -> None:
        self.open = asyncio.Event()  # cleared: blackhole
        self._cleared = asyncio.Event()
        self.then: AfterLoss = "reset"
        self.clear()

    def clear(self) -> None:
        """End all faults, and wake up waiting connections."""
        self.latency_ms = 0
        self.bandwidth = 0
        self.slice = 0
        self.replies_only = False
        self.drop = CommandFilter()
        self.cut = CommandFilter()
        self.cut_bytes = 0
        self.error = CommandFilter()
        self.error_reply = InjectedReply()
        self.open.set()
        self._cleared.set()
        self._cleared = asyncio.Event()

    def lose_replies(self, commands: CommandFilter, then: AfterLoss) -> None:
        """Lose the replies to the given commands."""
        self.drop = commands
        self.then = then

    def cut_replies(self, commands: CommandFilter, n_bytes: int) -> None:
        """Pass only ``n_bytes`` of each reply to the given commands."""
        self.cut = commands
        self.cut_bytes = n_bytes

    def answer(self, commands: CommandFilter, reply: InjectedReply) -> None:
        """Answer the given commands with ``reply``."""
        self.error = commands
        self.error_reply = reply

    async def delay(self, read_at: float) -> None:
        """Wait until bytes that were read at ``read_at`` (the loop's clock, seconds) may be passed on."""
        await self._pause(read_at + self.latency_ms / 1000 - asyncio.get_running_loop().time())
        await self.open.wait()

    def throttle(self, bandwidth: int, replies_only: bool) -> None:
        """Limit the bytes per second."""
        self.bandwidth = bandwidth
        self.replies_only = replies_only

    def chunk_size(self, size: int, *, reply: bool) -> int:
        """Return how many of ``size`` bytes to write in one call."""
        limit = max(1, self.bandwidth // PIECES_PER_SECOND) if self._slow(reply) else size
        return min(size, limit, self.slice or size)

    def _slow(self, reply: bool) -> bool:
        return self.bandwidth > 0 and (reply or not self.replies_only)

    async def pace(self, size: int, *, reply: bool) -> None:
        """Wait for the time that the ``size`` bytes just written take at the limited bandwidth."""
        if self._slow(reply):
            await self._pause(size / self.bandwidth)
        elif self.slice:
            await asyncio.sleep(0)  # let the reader receive this piece alone
        await self.open.wait()

    async def _pause(self, seconds: float) -> None:
        if seconds > 0:
            with suppress(TimeoutError):
                async with loop_timers.timeout(seconds):
                    await self._cleared.wait()
