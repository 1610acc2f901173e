"""Iteration over a queue's jobs, page by page, while other clients use the queue."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

from bulltask.errors import ConfigError
from bulltask.jobs.stored_job import StoredJob
from bulltask.queue.add_options import check_positive
from bulltask.queue.context import QueueContext
from bulltask.queue.read import read_jobs, states_of
from bulltask.transport.operation import Operation, execute
from bulltask.transport.scripts.queue import PageCursor, page_after, state_size

__all__ = ["JobPages"]

# In the order in which jobs pass through them: a job that moves in the meantime is returned twice, not missed.
_ORDER: Final = ("waiting-children", "delayed", "prioritized", "wait", "paused", "active", "completed", "failed")
_REMEMBERED: Final = 10


class JobPages:
    """A position among the jobs in some states; each :meth:`next` reads a page.

    Args:
        context: The queue.
        states: The states to iterate over (default: all).
        size: Jobs per page.
        asc: In each state, begin with the job that runs next (or finished first); otherwise, end with it.

    Raises:
        ConfigError: A state is unknown, or ``size`` is below 1.
    """

    def __init__(self, context: QueueContext, states: Iterable[str], size: int, *, asc: bool) -> None:
        check_positive(size, "page_size")
        if not isinstance(asc, bool):
            raise ConfigError(f"asc must be true or false, not {asc!r:.200}")
        wanted = {"wait" if state == "waiting" else state for state in states_of(states)}
        self._context, self._size, self._asc = context, size, asc
        self._states = deque(state for state in _ORDER if state in wanted)
        self._cursor, self._left = PageCursor(), -1
        self._recent_pages: deque[frozenset[str]] = deque(maxlen=_REMEMBERED)

    def next(self) -> Operation[list[StoredJob] | None]:
        """Return the next jobs, ``None`` at the end; a page is empty if its jobs have just been removed."""
        while self._states:
            ids = yield from self._next_ids(self._states[0])
            if ids:
                return (yield from read_jobs(self._context, ids))
            self._states.popleft()
            self._cursor, self._left = PageCursor(), -1
            self._recent_pages.clear()
        return None

    def _next_ids(self, state: str) -> Operation[list[str]]:
        """Return ids that were not on any of the last pages; an empty list when the state has no more jobs."""
        if self._left < 0:
            # Bounded, so that the iteration ends even if jobs are added faster than it reads them.
            self._left = 2 * (yield from execute(state_size(self._context.keys, state))) + _REMEMBERED * self._size
        while self._left > 0:
            call = page_after(self._context.keys, state, self._cursor, self._size, asc=self._asc)
            ids, self._cursor = yield from execute(call)
            if not ids:
                return []
            self._left -= len(ids)
            # After a whole page of jobs has left the state, page_after() goes back, so that it misses none. Jobs that
            # have already been returned are skipped.
            new_ids = [job_id for job_id in ids if not any(job_id in page for page in self._recent_pages)]
            self._recent_pages.append(frozenset(ids))
            if new_ids:
                return new_ids
        return []
