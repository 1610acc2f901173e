"""What a process knows about the primary that sentinels monitor; all clients of a broker share it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol, TypeVar

from bulltask.clock import mono_ms
from bulltask.config.urls import Address

__all__ = ["CHECK_MS", "FAILOVER_MS", "KnownPrimary", "PrimaryState"]

T = TypeVar("T")
CHECK_MS: Final = 5_000
"""How often a process asks a sentinel while it uses Redis, in addition to the events that the sentinels send."""

FAILOVER_MS: Final = 5_000
"""How long calls wait for a failover that has begun. The sentinels may wait longer for a replica that hangs."""

_SILENT_MS: Final = 10_000
_FOLLOWED_MS: Final = 300
_OWN_CHECK_MS: Final = 100


class Events(Protocol):
    """:class:`~bulltask.transport.sentinel_events.SentinelEvents`."""

    def poll(self) -> Sequence[Address]:
        """Read the events that have arrived; return the sentinels that reported another primary."""

    def close(self) -> None:
        """Close the connections to the sentinels."""


@dataclass(frozen=True, slots=True)
class PrimaryState:
    """What a supervisor tells its children.

    Attributes:
        epoch: The newest configuration epoch; 0 if none is known yet.
        failover_until_ms: While a failover is in progress: how long it may take (``mono_ms``).
        known_ms: When the supervisor last read the sentinels' events (``mono_ms``).
    """

    epoch: int = 0
    failover_until_ms: int = 0
    known_ms: int = 0


class KnownPrimary:
    """The newest configuration epoch that a sentinel has reported, and the sentinel to ask next.

    The sentinels increment the epoch at each failover. A connection that was made at an earlier epoch leads to a server
    that is no longer the primary, even if it does not know this yet, as on the minority side of a network partition.
    A sentinel whose epoch is older is on that side, too.

    A failover begins before the epoch changes. What the old primary executes after the replica has been promoted is
    lost, so no call is made until the failover has ended.

    Thread-safe without a lock: each attribute is assigned as a whole, and an outdated value costs at most one more
    query.

    Attributes:
        check_ms: How often to ask a sentinel.
        events: The sentinels' events; ``None`` if they have not been read yet.
    """

    def __init__(self) -> None:
        self.check_ms = CHECK_MS
        self.events: Events | None = None
        self._state = PrimaryState()
        self._first = self._next = self._checked_ms = 0
        self._outdated: set[object] = set()
        self._silent_until_ms: dict[object, int] = {}
        self._read_state: Callable[[], PrimaryState] | None = None
        self._publish: Callable[[PrimaryState], object] | None = None
        self._publisher = 0

    @property
    def epoch(self) -> int:
        """The newest epoch; 0 if none is known yet."""
        return self._state.epoch if self._read_state is None else max(self._state.epoch, self._read_state().epoch)

    @property
    def is_failing_over(self) -> bool:
        """Whether a failover is in progress, so that no call should be made."""
        until_ms = self._state.failover_until_ms if self._read_state is None else self._read_state().failover_until_ms
        return until_ms > 0 and mono_ms() < until_ms

    @property
    def reads_events(self) -> bool:
        """Whether this process reads the sentinels' events, because it does not :meth:`follow` another one."""
        return self._read_state is None

    @property
    def is_published(self) -> bool:
        """Whether other processes follow this one, which therefore must not wait."""
        return self._publish is not None and os.getpid() == self._publisher

    def follow(self, read_state: Callable[[], PrimaryState]) -> None:
        """Take the state from another process, which reads the sentinels' events.

        This process asks a sentinel only when it connects, or if the other process has read no events for a while: it
        may be waiting for the old primary, too.
        """
        self._read_state = read_state

    def stop_checks(self) -> None:
        """Ask a sentinel only when a client connects, and read no more events: this process is about to end."""
        state = replace(self._state, known_ms=sys.maxsize)
        self.follow(lambda: state)

    def publish(self, write_state: Callable[[PrimaryState], object]) -> None:
        """Pass each change to other processes, which :meth:`follow` it; a fork of this process passes nothing on."""
        self._publish, self._publisher = write_state, os.getpid()
        self.record_events()

    def record(self, epoch: int) -> None:
        """Record the epoch in a sentinel's reply; another epoch ends a failover."""
        self._checked_ms = mono_ms()
        ended = epoch != self._state.epoch
        self._set(replace(self._state, epoch=epoch, failover_until_ms=0 if ended else self._state.failover_until_ms))

    def record_events(self) -> None:
        """Record that the sentinels' events have been read."""
        self._set(replace(self._state, known_ms=mono_ms()))

    def record_failover(self, *, in_progress: bool) -> None:
        """Record that a sentinel has begun a failover, or has aborted it."""
        self._set(replace(self._state, failover_until_ms=mono_ms() + FAILOVER_MS if in_progress else 0))

    def observe(self, epoch: int, sentinel: object, sentinels: int) -> None:
        """Record the epoch that one of the sentinels has reported in a check.

        If a majority reports an older epoch, the sentinels were set up again, and their epochs start again at 0: no
        failover happens without a majority.
        """
        if epoch >= self.epoch:
            self._outdated.clear()
        else:
            self._outdated.add(sentinel)
        if epoch > self.epoch or len(self._outdated) * 2 > sentinels:
            self._outdated.clear()
            self.record(epoch)

    def takes_check(self) -> bool:
        """Return whether a sentinel should be asked now, and record that it is."""
        now_ms = mono_ms()
        if self._read_state is None:
            is_due = now_ms - self._checked_ms >= self.check_ms
        else:
            is_due = now_ms - self._read_state().known_ms > _FOLLOWED_MS and now_ms - self._checked_ms > _OWN_CHECK_MS
        if is_due:
            self._checked_ms = now_ms
        return is_due

    def next_to_check(self, sentinels: Sequence[T]) -> T:
        """Return the sentinel to ask for the epoch: a different one each time, but not one that was just silent."""
        self._next += 1
        order = [sentinels[(self._next + step) % len(sentinels)] for step in range(len(sentinels))]
        chosen = next((it for it in order if not self.is_silent(it)), order[0])
        self._next = sentinels.index(chosen)
        return chosen

    def is_silent(self, sentinel: object) -> bool:
        """Whether a sentinel has just not replied, so that others should be asked first."""
        return mono_ms() < self._silent_until_ms.get(sentinel, 0)

    def record_silence(self, sentinel: object) -> None:
        """Record that a sentinel did not reply, so that waiting for it does not take a large part of the time."""
        self._silent_until_ms[sentinel] = mono_ms() + _SILENT_MS

    def in_order(self, sentinels: Sequence[T]) -> Iterator[T]:
        """Return the sentinels in the order in which to ask them."""
        first = self._first % len(sentinels)
        return iter([*sentinels[first:], *sentinels[:first]])

    def ask_next(self) -> None:
        """Begin with the next sentinel: this one did not reply, or its reply was not useful."""
        self._first += 1

    def close(self) -> None:
        """Close the connections to the sentinels; they are opened again when needed."""
        if self.events is not None:
            self.events.close()

    def _set(self, state: PrimaryState) -> None:
        self._state = state
        if self._publish is not None and self.is_published:
            self._publish(state)
