"""A walk through all jobs of a queue's states, page by page, while others go on using the queue."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

from bulltask.errors import ConfigError
from bulltask.jobs.stored_job import StoredJob
from bulltask.queue.link import Link
from bulltask.queue.reading import read_records, states_of
from bulltask.transport.operation import Operation, execute
from bulltask.transport.scripts.queue import PageCursor, page_after, state_size

__all__ = ["Walk"]

# The way that a job goes: one that moves on during the walk is met again rather than missed.
_ORDER: Final = ("waiting-children", "delayed", "prioritized", "wait", "paused", "active", "completed", "failed")
_REMEMBERED: Final = 10


class Walk:
    """Responsible for the place where a walk stands; each :meth:`page` is one operation.

    Args:
        link: the queue.
        states: the states to walk through; none means all.
        size: jobs a page.
        asc: within a state, the one that is next in turn (or ended first) comes first; else last.

    Raises:
        ConfigError: there is no such state, or ``size`` is below 1.
    """

    def __init__(self, link: Link, states: Iterable[str], size: int, *, asc: bool) -> None:
        if size < 1:
            raise ConfigError(f"page_size must be 1 or more, not {size}")
        wanted = {"wait" if state == "waiting" else state for state in states_of(states)}
        self._link, self._size, self._asc = link, size, asc
        self._states = deque(state for state in _ORDER if state in wanted)
        self._place, self._left = PageCursor(), -1
        self._seen: deque[frozenset[str]] = deque(maxlen=_REMEMBERED)

    def page(self) -> Operation[list[StoredJob] | None]:
        """The next jobs, ``None`` at the end; a page may be empty because its jobs have just gone."""
        while self._states:
            ids = yield from self._next_ids(self._states[0])
            if ids:
                return (yield from read_records(self._link, ids))
            self._states.popleft()
            self._place, self._left = PageCursor(), -1
            self._seen.clear()
        return None

    def _next_ids(self, state: str) -> Operation[list[str]]:
        """Ids that were not on one of the last pages; none at the state's end."""
        if self._left < 0:
            # Jobs that come while we walk may be met, but a queue that grows faster than we walk must not keep us.
            self._left = 2 * (yield from execute(state_size(self._link.keys, state))) + _REMEMBERED * self._size
        while self._left > 0:
            call = page_after(self._link.keys, state, self._place, self._size, asc=self._asc)
            found, self._place = yield from execute(call)
            if not found:
                return []
            self._left -= len(found)
            # Where a whole page had gone the walk goes back to where it can be sure to miss nothing.
            fresh = [job_id for job_id in found if not any(job_id in page for page in self._seen)]
            self._seen.append(frozenset(found))
            if fresh:
                return fresh
        return []
