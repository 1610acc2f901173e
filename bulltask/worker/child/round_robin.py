"""Which of a worker's queues is asked next: each in turn, so that a full one does not starve the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from bulltask.clock import ServerClock, mono_ms
from bulltask.jobs.numbers import MOST
from bulltask.transport.keys import QueueKeys
from bulltask.transport.replies import Fetched

__all__ = ["RoundRobin"]

PROBE_MS: Final = 100
"""While other queues are busy, an empty one is asked again this often."""
LONGEST_LIMIT_MS: Final = 30_000
"""A rate-limited queue is asked again after so long at most, as Node's worker does."""


class RoundRobin:
    """Responsible for the order in which queues are asked, and for when an empty one may be asked again.

    Args:
        queues: the worker's queues in the order given.
        clock: the server's time, in which delayed jobs are due.
    """

    def __init__(self, queues: Sequence[QueueKeys], clock: ServerClock) -> None:
        self.queues = queues
        self._clock = clock
        self._turn = 0
        self._closed_until_ms = [0] * len(queues)
        self._limited_until_ms = [0] * len(queues)
        self._due_at_ms = [0] * len(queues)

    def candidates(self) -> Iterator[int]:
        """The queues that may have a job, the one whose turn it is first."""
        now_ms = mono_ms()
        for step in range(len(self.queues)):
            index = (self._turn + step) % len(self.queues)
            if self._closed_until_ms[index] <= now_ms:
                yield index

    def acquired_from(self, index: int) -> None:
        """A job came from this queue: the next one has its turn."""
        self._turn = (index + 1) % len(self.queues)

    def after(self, index: int) -> int:
        """The queue to ask together with finishing a job of queue ``index``; itself if no other may have a job."""
        if len(self.queues) == 1:
            return index
        self.acquired_from(index)
        return next(self.candidates(), index)

    def empty(self, index: int, fetched: Fetched) -> None:
        """The queue had no job; remember until when that is certain."""
        self._closed_until_ms[index] = mono_ms() + PROBE_MS
        self._due_at_ms[index] = fetched.due_ms
        self.limited(index, fetched.limited_ms)

    def limited(self, index: int, limit_ms: int) -> None:
        """The queue gives no jobs for so long; the event loop's thread says so, too."""
        # Not for longer: a limit may be lifted before its time, and only asking promotes delayed jobs.
        self._close(index, min(limit_ms, LONGEST_LIMIT_MS))

    def refused(self, index: int, pause_ms: int) -> None:
        """Redis did not say whether the queue has a job, but answered with an error: leave it alone for so long."""
        self._close(index, pause_ms)
        self._due_at_ms[index] = 0  # a moment that has passed meanwhile would end every wait at once

    def marked(self, index: int, score_ms: float) -> None:
        """The queue's marker was taken: a job waits now, or one is due at ``score_ms`` (server time)."""
        if score_ms <= self._clock.now_ms():
            self._closed_until_ms[index] = self._limited_until_ms[index]
        else:
            self._due_at_ms[index] = int(min(score_ms, MOST))  # a delay may be so long that it has no end

    def open_all(self) -> None:
        """Ask every queue again; only asking promotes delayed jobs and heals a lost marker."""
        self._closed_until_ms = [until if until > mono_ms() else 0 for until in self._limited_until_ms]

    def waitable(self) -> list[int]:
        """The queues whose markers are worth waiting for: a rate-limited one has jobs that must not run yet."""
        now_ms = mono_ms()
        return [index for index, until in enumerate(self._limited_until_ms) if until <= now_ms]

    def wait_ms(self, longest_ms: int) -> int:
        """How long to wait for a marker: until the next delayed job or the end of a limit, at most ``longest_ms``."""
        now_ms, server_ms = mono_ms(), self._clock.now_ms()
        waits = [due - server_ms for due in self._due_at_ms if due]
        waits += [until - now_ms for until in self._limited_until_ms if until > now_ms]
        return max(1, min([longest_ms, *waits]))

    def _close(self, index: int, pause_ms: int) -> None:
        until_ms = mono_ms() + pause_ms
        self._limited_until_ms[index] = max(self._limited_until_ms[index], until_ms)
        self._closed_until_ms[index] = max(self._closed_until_ms[index], until_ms)
