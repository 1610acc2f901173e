"""The order in which a worker fetches from its queues: in turn, so that a busy queue does not starve the others."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from bulltask.clock import ServerClock, mono_ms
from bulltask.jobs.numbers import MAX_NUMBER
from bulltask.transport.keys import QueueKeys
from bulltask.transport.replies import Fetched

__all__ = ["POLLED_BY_WORKER", "RoundRobin"]

_NEVER_MS: Final = 2**62
_BUSY_SHARE: Final = 10

EMPTY_POLL_MS: Final = 100
"""Interval at which an empty queue is polled while other queues are busy."""
POLLED_BY_WORKER: Final = 300
"""How many queues without a marker the idle children of a worker poll together in five seconds: each poll executes
about ten commands in Redis. If a worker has more queues, their turns take longer."""
_PERIOD_MS: Final = 5_000
MAX_LIMIT_MS: Final = 30_000
"""Maximum time until a rate-limited queue is polled again, as in Node.js workers."""


class RoundRobin:
    """The order in which queues are polled, and when an empty one is polled again.

    A child polls all queues at once only if they are few. If they are many, it polls those whose marker it has, those
    whose delayed job is due, and the others a few at a time, in turn: a queue without a marker has a job only if a
    marker was lost.

    Args:
        queues: The worker's queues in the given order.
        clock: The server's time, for the due times of delayed jobs.
        at_once: The maximum number of queues that are polled at once, and in five seconds without jobs.

    Attributes:
        polled: The indexes of the queues that were opened at the start, or by the last :meth:`reopen`.
    """

    def __init__(self, queues: Sequence[QueueKeys], clock: ServerClock, at_once: int | None = None) -> None:
        self.queues = queues
        self._clock = clock
        self._turn = 0
        self._closed_until_ms = [0] * len(queues)
        self._limited_until_ms = [0] * len(queues)
        self._due_at_ms = [0] * len(queues)
        self._at_once = at_once or len(queues)
        self._are_many = len(queues) > self._at_once
        self._open: set[int] = set()
        self.polled: Sequence[int] = range(len(queues))
        self._opened_ms, self._next_opened, self._next_poll_ms = 0, 0, 0
        if self._are_many:
            self._closed_until_ms = [_NEVER_MS] * len(queues)
            self._next_opened = random.randrange(len(queues))  # noqa: S311 - so that not all children poll the same queues
            self.polled = self._open_next(self._at_once)

    def candidates(self) -> Iterator[int]:
        """Yield the indexes of queues that may have a job, in the order of their turns."""
        now_ms, turn = mono_ms(), self._turn
        if not self._are_many:
            for step in range(len(self.queues)):
                index = (turn + step) % len(self.queues)
                if self._closed_until_ms[index] <= now_ms:
                    yield index
            return
        if now_ms >= self._next_poll_ms:  # not only while the child waits: it may be busy with other queues
            self._next_poll_ms = now_ms + EMPTY_POLL_MS
            self._open_due()
            self._open_next(max(1, self._at_once // _BUSY_SHARE))
        for index in sorted(self._open, key=lambda index: (index - turn) % len(self.queues)):
            if self._closed_until_ms[index] <= now_ms:
                yield index

    def acquired_from(self, index: int) -> None:
        """Record that a job from this queue was acquired, so it is the next queue's turn."""
        self._turn = (index + 1) % len(self.queues)

    def after(self, index: int) -> int:
        """Return the queue to fetch from after a job of queue ``index``; ``index`` if no other queue may have a job."""
        if len(self.queues) == 1:
            return index
        self.acquired_from(index)
        return next(self.candidates(), index)

    def may_stay(self, index: int) -> bool:
        """Whether the next fetch may be from the same queue: it has no limit now, and no other queue may have a job.

        The event loop's thread calls this; it changes nothing.
        """
        now_ms = mono_ms()
        if self._limited_until_ms[index] > now_ms:
            return False
        # tuple(), because the main thread changes the set
        others: Iterable[int] = tuple(self._open) if self._are_many else range(len(self.queues))
        if self._are_many and now_ms >= self._next_poll_ms:
            return False
        return all(other == index or self._closed_until_ms[other] > now_ms for other in others)

    def record_empty(self, index: int, fetched: Fetched) -> None:
        """Record that the queue had no job, and when to poll it again."""
        self._closed_until_ms[index] = _NEVER_MS if self._are_many else mono_ms() + EMPTY_POLL_MS
        self._open.discard(index)
        self._due_at_ms[index] = fetched.due_ms
        self.rate_limited(index, fetched.limited_ms)

    def rate_limited(self, index: int, limit_ms: int) -> None:
        """Record that the queue is rate-limited for ``limit_ms``; the event loop's thread calls this too."""
        # At most MAX_LIMIT_MS: a limit may be removed early, and only a fetch promotes delayed jobs.
        self._close(index, min(limit_ms, MAX_LIMIT_MS))

    def record_error(self, index: int, pause_ms: int) -> None:
        """Record that Redis returned an error reply to a fetch: do not poll the queue for ``pause_ms``."""
        self._close(index, pause_ms)
        self._due_at_ms[index] = 0  # a due time in the past would end every wait immediately

    def is_skipped(self, index: int) -> bool:
        """Whether the queue is not polled at the moment: it is rate-limited, or in a backoff after an error."""
        return self._limited_until_ms[index] > mono_ms()

    def record_marker(self, index: int, score_ms: float) -> None:
        """Record the queue's marker: a job is waiting now, or one is due at ``score_ms`` (server time)."""
        if score_ms <= self._clock.now_ms():
            self._reopen(index)
            if self._are_many:
                self._turn = index
        else:
            self._due_at_ms[index] = int(min(score_ms, MAX_NUMBER))  # a client may store any delay

    def reopen(self, also: Iterable[int] = ()) -> None:
        """Poll the queues again, because only a fetch promotes delayed jobs and replaces a lost marker.

        Args:
            also: Queues to poll even if they are many, and it is not their turn.
        """
        if not self._are_many:
            self._closed_until_ms = [until if until > mono_ms() else 0 for until in self._limited_until_ms]
            return
        # A wait may end early, when a delayed job is due.
        elapsed_ms = min(mono_ms() - self._opened_ms, _PERIOD_MS)
        self._open_due()
        self.polled = self._open_next(max(1, self._at_once * elapsed_ms // _PERIOD_MS))
        for index in also:
            self._reopen(index)

    def _open_next(self, count: int) -> Sequence[int]:
        self._opened_ms = mono_ms()
        indexes = [(self._next_opened + step) % len(self.queues) for step in range(count)]
        self._next_opened = (self._next_opened + count) % len(self.queues)
        for index in indexes:
            self._reopen(index)
        return indexes

    def _open_due(self) -> None:
        server_ms = self._clock.now_ms()
        for index, due_ms in enumerate(self._due_at_ms):
            if 0 < due_ms <= server_ms:
                self._reopen(index)

    def _reopen(self, index: int) -> None:
        self._closed_until_ms[index] = self._limited_until_ms[index]
        self._open.add(index)

    def waitable(self) -> list[int]:
        """Return the queues whose markers to wait for: those that are neither rate-limited nor in a backoff."""
        now_ms = mono_ms()
        return [index for index, until in enumerate(self._limited_until_ms) if until <= now_ms]

    def wait_ms(self, max_ms: int) -> int:
        """Return how long to wait for a marker: until a delayed job is due or a limit ends, at most ``max_ms``."""
        now_ms, server_ms = mono_ms(), self._clock.now_ms()
        waits = [due - server_ms for due in self._due_at_ms if due]
        waits += [until - now_ms for until in self._limited_until_ms if until > now_ms]
        return max(1, min([max_ms, *waits]))

    def _close(self, index: int, pause_ms: int) -> None:
        until_ms = mono_ms() + pause_ms
        self._limited_until_ms[index] = max(self._limited_until_ms[index], until_ms)
        self._closed_until_ms[index] = max(self._closed_until_ms[index], until_ms)
        if pause_ms > 0 and self._are_many:
            self._reopen(index)  # when the pause has ended
