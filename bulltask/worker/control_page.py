"""A page of shared memory with the supervisor's instructions for all children of a worker."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from bulltask.errors import ConfigError
from bulltask.transport.known_primary import PrimaryState

if sys.platform != "win32":
    import fcntl

__all__ = ["ControlPage"]

# Indexes of the page's 64-bit words.
_PAUSED, _HAS_PERMITS, _PERMITS, _STARTED, _FINISHING, _WATCHES, _PRIMARY = range(7)
_STOPPING = 2


class ControlPage:
    """The supervisor's instructions for all children, including children that start later.

    Args:
        memory: The page.
        lock_fd: A descriptor of the file that contains the page; the lock of its first byte makes changes of permits
            atomic.

    Attributes:
        has_permits: Whether the number of jobs is limited, so that a child needs a permit for each job.
    """

    def __init__(self, memory: memoryview, lock_fd: int | None) -> None:
        self._words, self._lock_fd = memory.cast("q"), lock_fd
        # Not read from shared memory for every job: it does not change after the first child has started.
        self.has_permits = bool(self._words[_HAS_PERMITS])

    @property
    def paused(self) -> bool:
        """True while children must not acquire jobs, also if the worker stops; running jobs continue."""
        return bool(self._words[_PAUSED])

    @paused.setter
    def paused(self, paused: bool) -> None:
        if not self.stopping:
            self._words[_PAUSED] = paused

    @property
    def stopping(self) -> bool:
        """True once the worker stops. A child whose task has replaced the handler of SIGTERM learns it only here."""
        return self._words[_PAUSED] == _STOPPING

    def stop(self) -> None:
        """Let no child acquire a job any more."""
        self._words[_PAUSED] = _STOPPING

    @property
    def finishing(self) -> bool:
        """True while the worker stops, but running jobs may take as long as they need."""
        return bool(self._words[_FINISHING])

    @finishing.setter
    def finishing(self, finishing: bool) -> None:
        self._words[_FINISHING] = finishing

    @property
    def watches(self) -> bool:
        """True while the supervisor checks often whether a job delays those that its child has prefetched."""
        return bool(self._words[_WATCHES])

    @watches.setter
    def watches(self, watches: bool) -> None:
        self._words[_WATCHES] = watches

    def primary(self) -> PrimaryState:
        """Return what the supervisor knows about the primary that sentinels monitor."""
        return PrimaryState(*self._words[_PRIMARY : _PRIMARY + 3])

    def set_primary(self, state: PrimaryState) -> None:
        """Pass what the supervisor knows to the children."""
        words = (state.epoch, state.failover_until_ms, state.known_ms)
        for offset, word in enumerate(words):
            self._words[_PRIMARY + offset] = word

    def limit_jobs(self, jobs: int) -> None:
        """Let all children together start at most ``jobs`` jobs; call this before the first child starts.

        Raises:
            ConfigError: This platform has no anonymous files, which permits need.
        """
        if self._lock_fd is None:
            raise ConfigError("--max-jobs needs memfd_create, which this platform does not have")
        self.has_permits = True
        self._words[_HAS_PERMITS], self._words[_PERMITS] = True, jobs

    @property
    def exhausted(self) -> bool:
        """True while no permit is left. A child whose fetch finds no job returns its permit."""
        return self.has_permits and self._words[_PERMITS] <= 0

    @property
    def jobs_started(self) -> int:
        """Number of jobs that were started with a permit."""
        return self._words[_STARTED]

    def take_permit(self) -> bool:
        """Take a permit before a fetch; return False if there is none."""
        with self._locked() as words:
            if words[_PERMITS] <= 0:
                return False
            words[_PERMITS] -= 1
            return True

    def settle_permit(self, *, used: bool) -> None:
        """Record whether the fetch has acquired a job; if it has not, give the permit back."""
        with self._locked() as words:
            words[_STARTED if used else _PERMITS] += 1

    @contextmanager
    def _locked(self) -> Iterator[memoryview[int]]:
        assert self._lock_fd is not None, "call limit_jobs() first"
        # The kernel releases the lock of a process that is killed.
        fcntl.lockf(self._lock_fd, fcntl.LOCK_EX, 1)
        try:
            yield self._words
        finally:
            fcntl.lockf(self._lock_fd, fcntl.LOCK_UN, 1)
