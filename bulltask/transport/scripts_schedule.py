"""The scripts of job schedulers; packing only (PROTOCOL 3.4)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgpack

from bulltask.lua import loader
from bulltask.transport.call import Call, script_call
from bulltask.transport.keys import QueueKeys
from bulltask.transport.replies import text

__all__ = ["Iteration", "update_job_scheduler"]


@dataclass(frozen=True, slots=True)
class Iteration:
    """A scheduler's next job.

    Attributes:
        next_ms: when it runs, by the pattern; ``None``: the script works it out from the interval.
        data: JSON.
        options: as stored.
    """

    next_ms: int | None
    data: bytes
    options: Mapping[str, Any]


def update_job_scheduler(
    keys: QueueKeys, scheduler_id: str, producer_id: str, iteration: Iteration, now_ms: int
) -> Call[str | None]:
    """``updateJobScheduler``: add the job that follows job ``producer_id``; the result is its id.

    Nothing happens, and the result is ``None``, when the scheduler is gone or has that job already: asking again is
    safe.
    """
    places = (
        keys.repeat,
        keys.delayed,
        keys.wait,
        keys.paused,
        keys.meta,
        keys.prioritized,
        keys.marker,
        keys.id,
        keys.events,
        keys.pc,
        keys.job(producer_id),
        keys.active,
    )
    args = (
        "" if iteration.next_ms is None else iteration.next_ms,
        scheduler_id,
        iteration.data,
        msgpack.packb(iteration.options),
        now_ms,
        keys.base,
        producer_id,
    )
    return script_call(loader.official("updateJobScheduler"), places, args, _id_or_none)


def _id_or_none(reply: Any) -> str | None:
    return None if reply is None else text(reply)
