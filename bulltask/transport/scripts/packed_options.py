"""The options of BullMQ's scripts that acquire and finish jobs, in packed form.

Packing them would take 5% of a job's instructions, so ``pack_fetch`` is cached, and its caller caches ``pack_finish``.
The parameters are parts of ``FetchOptions`` and ``FinishOptions``.
"""

from __future__ import annotations

from functools import lru_cache

from bulltask.transport.call import to_msgpack

__all__ = ["pack_fetch", "pack_finish"]


@lru_cache(maxsize=500)
def pack_fetch(token: str, lock_ms: int, worker: str, limiter: tuple[tuple[str, int], ...] | None) -> bytes:
    """Return the options of ``moveToActive``, which are the same in all fetches of a slot."""
    wire: dict[str, object] = {"token": token, "lockDuration": lock_ms, "name": worker or None}
    if limiter is not None:
        wire["limiter"] = dict(limiter)
    return to_msgpack(wire)


def pack_finish(  # noqa: PLR0913, PLR0917 - hashable parts of two sets of options
    token: str,
    lock_ms: int,
    worker: str,
    limiter: tuple[tuple[str, int], ...] | None,
    data_points: int | None,
    keep: tuple[tuple[str, int], ...],
    attempts: int,
) -> bytes:
    """Return the options of ``moveToFinished``."""
    wire: dict[str, object] = {
        "token": token,
        "keepJobs": dict(keep),
        "lockDuration": lock_ms,
        "attempts": attempts,
        "maxMetricsSize": data_points or "",  # "" means off; without it, the second job's call fails
        "name": worker or None,  # nil is not written
    }
    if limiter is not None:
        wire["limiter"] = dict(limiter)
    return to_msgpack(wire)
