"""How many jobs a child prefetches, depending on how long the latest ones took."""

from __future__ import annotations

from typing import Final

from bulltask.worker.slots import LONG_MS

__all__ = ["FLUSH_MS", "PrefetchCount"]

FLUSH_MS: Final = 5
"""The jobs of one round trip should together take no longer than this. An outcome waits longer only if the next job is
unexpectedly long."""

_OVERLAP_MS: Final = 0.75 * LONG_MS
"""Of jobs up to this duration, one is prefetched. The supervisor would often release it if they took longer."""

_DECAY: Final = 0.8
"""After ten short jobs, a long one counts for a tenth of its duration."""
_LONGEST_MS: Final = 1_000.0


class PrefetchCount:
    """Decides how many jobs a child acquires in one round trip.

    One long job makes it acquire the next ones one at a time; it acquires several only after several short ones in a
    row. Of jobs that are too long to share a round trip, it prefetches one, which runs while Redis handles the outcome
    of the one before it.

    Args:
        maximum: The largest number; 0 and 1 turn prefetching off.
    """

    def __init__(self, maximum: int) -> None:
        self._maximum = max(1, maximum)
        self._slowest_ms = _LONGEST_MS

    @property
    def jobs(self) -> int:
        """How many jobs to acquire in one round trip."""
        if self._slowest_ms * 2 > FLUSH_MS:
            return min(self._maximum, 2 if self._slowest_ms <= _OVERLAP_MS else 1)
        return min(self._maximum, int(FLUSH_MS / self._slowest_ms) if self._slowest_ms else self._maximum)

    @property
    def expected_ms(self) -> float:
        """How long the next job may take: as long as the slowest of the latest ones."""
        return self._slowest_ms

    def record(self, duration_ms: float) -> None:
        """Record how long a job took; after a long one, the next jobs are acquired one at a time."""
        if duration_ms > LONG_MS:
            duration_ms = _LONGEST_MS
        slowest_ms = self._slowest_ms * _DECAY
        self._slowest_ms = min(max(duration_ms, slowest_ms), _LONGEST_MS)

    def record_long_job(self) -> None:
        """Prefetch no more, as after a long job: jobs that run alongside others, or in a batch, are not prefetched."""
        self._slowest_ms = _LONGEST_MS
