"""The order in which a worker fetches from its queues: in turn, so that a busy queue does not starve the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from bulltask.clock import ServerClock, mono_ms
from bulltask.jobs.numbers import MAX_NUMBER
from bulltask.transport.keys import QueueKeys
from bulltask.transport.replies import Fetched

__all__ = ["RoundRobin"]

EMPTY_POLL_MS: Final = 100
"""Interval at which an empty queue is polled while other queues are busy."""
MAX_LIMIT_MS: Final = 30_000
"""Maximum time until a rate-limited queue is polled again, as in Node.js workers."""


class RoundRobin:
    """The order in which queues are polled, and when an empty one is polled again.

    Args:
        queues: The worker's queues in the given order.
        clock: The server's time, for the due times of delayed jobs.
    """

    def __init__(self, queues: Sequence[QueueKeys], clock: ServerClock) -> None:
        self.queues = queues
        self._clock = clock
        self._turn = 0
        self._closed_until_ms = [0] * len(queues)
        self._limited_until_ms = [0] * len(queues)
        self._due_at_ms = [0] * len(queues)

    def candidates(self) -> Iterator[int]:
        """Yield the indexes of queues that may have a job, in the order of their turns."""
        now_ms = mono_ms()
        for step in range(len(self.queues)):
            index = (self._turn + step) % len(self.queues)
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
        return self._limited_until_ms[index] <= now_ms and (
            len(self.queues) == 1
            or all(until > now_ms for other, until in enumerate(self._closed_until_ms) if other != index)
        )

    def record_empty(self, index: int, fetched: Fetched) -> None:
        """Record that the queue had no job, and when to poll it again."""
        self._closed_until_ms[index] = mono_ms() + EMPTY_POLL_MS
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
            self._closed_until_ms[index] = self._limited_until_ms[index]
        else:
            self._due_at_ms[index] = int(min(score_ms, MAX_NUMBER))  # a client may store any delay

    def reopen_all(self) -> None:
        """Poll every queue again, because only a fetch promotes delayed jobs and replaces a lost marker."""
        self._closed_until_ms = [until if until > mono_ms() else 0 for until in self._limited_until_ms]

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
