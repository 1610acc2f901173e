"""How many jobs a child prefetches, depending on how long the latest ones took."""

from __future__ import annotations

from typing import Final

__all__ = ["FLUSH_MS", "Pace"]

FLUSH_MS: Final = 5
"""The jobs of one round trip should together take no longer than this. An outcome waits longer only if the next job is
unexpectedly long."""

_DECAY: Final = 0.8
"""After ten short jobs, a long one counts for a tenth of its duration."""
_LONGEST_MS: Final = 1_000.0


class Pace:
    """Decides how many jobs a child acquires in one round trip.

    One long job makes it acquire the next ones one at a time; it acquires several only after several short ones in a
    row.

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
            return 1
        return min(self._maximum, int(FLUSH_MS / self._slowest_ms) if self._slowest_ms else self._maximum)

    def record(self, duration_ms: float) -> None:
        """Record how long a job took."""
        slowest_ms = self._slowest_ms * _DECAY
        self._slowest_ms = min(max(duration_ms, slowest_ms), _LONGEST_MS)

    def record_long_job(self) -> None:
        """Prefetch no more, as after a long job: jobs that run alongside others, or in a batch, are not prefetched."""
        self._slowest_ms = _LONGEST_MS
