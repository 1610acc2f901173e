"""What a process knows about the primary that sentinels monitor; all clients of a broker share it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeVar

from bulltask.clock import mono_ms

__all__ = ["CHECK_MS", "KnownPrimary"]

T = TypeVar("T")
CHECK_MS: Final = 5_000
"""How often a process that is not a child of a worker asks a sentinel, while it uses Redis."""

_SILENT_MS: Final = 10_000


class KnownPrimary:
    """The newest configuration epoch that a sentinel has reported, and the sentinel to ask next.

    The sentinels increment the epoch at each failover. A connection that was made at an earlier epoch leads to a server
    that is no longer the primary, even if it does not know this yet, as on the minority side of a network partition.
    A sentinel whose epoch is older is on that side, too.

    Thread-safe without a lock: each attribute is assigned as a whole, and an outdated value costs at most one more
    query.
    """

    def __init__(self) -> None:
        self._epoch = self._first = self._next = self._checked_ms = 0
        self._outdated: set[object] = set()
        self._silent_until_ms: dict[object, int] = {}
        self._read_epoch: Callable[[], int] | None = None
        self._publish: Callable[[int], object] | None = None

    @property
    def epoch(self) -> int:
        """The newest epoch; 0 if none is known yet."""
        return self._epoch if self._read_epoch is None else self._read_epoch()

    def follow(self, read_epoch: Callable[[], int]) -> None:
        """Take the epoch from another process, which asks the sentinels; this process asks only when it connects."""
        self._read_epoch = read_epoch

    def publish(self, write_epoch: Callable[[int], object]) -> None:
        """Pass each epoch to other processes, which :meth:`follow` it."""
        self._publish = write_epoch

    def record(self, epoch: int) -> None:
        """Record the epoch in a sentinel's reply."""
        self._epoch, self._checked_ms = epoch, mono_ms()
        if self._publish is not None:
            self._publish(epoch)

    def observe(self, epoch: int, sentinel: object, sentinels: int) -> None:
        """Record the epoch that one of the sentinels has reported in a check.

        If a majority reports an older epoch, the sentinels were set up again, and their epochs start again at 0: no
        failover happens without a majority.
        """
        if epoch >= self._epoch:
            self._outdated.clear()
        else:
            self._outdated.add(sentinel)
        if epoch > self._epoch or len(self._outdated) * 2 > sentinels:
            self._outdated.clear()
            self.record(epoch)

    def takes_check(self) -> bool:
        """Return whether a sentinel should be asked now, and record that it is."""
        if self._read_epoch is not None or (now_ms := mono_ms()) - self._checked_ms < CHECK_MS:
            return False
        self._checked_ms = now_ms
        return True

    def next_to_check(self, sentinels: Sequence[T]) -> T:
        """Return the sentinel to ask for the epoch: a different one each time, but not one that was just silent."""
        self._next += 1
        order = [sentinels[(self._next + step) % len(sentinels)] for step in range(len(sentinels))]
        chosen = next((it for it in order if mono_ms() >= self._silent_until_ms.get(it, 0)), order[0])
        self._next = sentinels.index(chosen)
        return chosen

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
