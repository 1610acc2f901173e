"""What metrics say about queues: how many jobs they contain, and how late these are (:func:`read_queues`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from bulltask.jobs import codec
from bulltask.jobs.clock import value_class
from bulltask.jobs.errors import DecodeError
from bulltask.transport.call import Call, QueueKeys, command, text
from bulltask.transport.discovery import TIME
from bulltask.transport.operation import Operation, execute
from bulltask.transport.scripts.queue import get_counts

__all__ = ["STATES", "QueueReading", "read_queues"]


STATES: Final = ("wait", "active", "completed", "failed", "delayed", "prioritized", "waiting-children", "paused")

_SCORES: Final = 0x1000
"""How many scores the delayed set has for a millisecond."""
_NEXT: Final = 5
"""How many of the jobs that are next are read: a retried or recovered job may be before the oldest one."""
_QUEUES: Final = 100
"""How many queues are read in one round trip."""


@value_class(kw_only=True)
class QueueReading:
    """What a queue contains.

    Attributes:
        jobs: How many jobs are in each state.
        oldest_ms: How long the oldest of the jobs that are next has been waiting for its first attempt; 0 if none is.
        due: How many delayed jobs are due, but still delayed: no worker has asked for a job since.
        scheduler_lag_ms: How long the next job of a scheduler is overdue.
        is_paused: Whether the queue is paused.
        workers: How many bulltask workers process it.
    """

    jobs: Mapping[str, int]
    oldest_ms: int = 0
    due: int = 0
    scheduler_lag_ms: int = 0
    is_paused: bool = False
    workers: int = 0


def read_queues(queues: Sequence[QueueKeys]) -> Operation[dict[str, QueueReading]]:
    """Return the operation that reads queues, by their names in the app.

    It reads a few jobs of each queue, so the cost does not depend on how many it contains.
    """
    readings: dict[str, QueueReading] = {}
    now_ms = int((yield from execute(TIME)))
    for start in range(0, len(queues), _QUEUES):
        chunk = queues[start : start + _QUEUES]
        results = yield [call for keys in chunk for call in _calls(keys, now_ms)]
        width = len(results) // len(chunk)
        rows = [results[at : at + width] for at in range(0, len(results), width)]
        ids = [(keys, job_id) for keys, row in zip(chunk, rows, strict=True) for job_id in (*row[1], *row[2], *row[3])]
        waits = dict[str, int]()
        if ids:
            hashes = yield [command("HMGET", keys.job(job_id), "timestamp", "opts", "atm") for keys, job_id in ids]
            for (keys, _), stored in zip(ids, hashes, strict=True):
                waits[keys.base] = max(waits.get(keys.base, 0), _waited_ms(stored, now_ms))
        for keys, row in zip(chunk, rows, strict=True):
            counts, _, _, _, first_due, due, first_run, is_paused, workers = row
            readings[keys.queue] = QueueReading(
                jobs=counts,
                oldest_ms=max(waits.get(keys.base, 0), _overdue_ms(first_due, _SCORES, now_ms)),
                due=due,
                scheduler_lag_ms=_overdue_ms(first_run, 1, now_ms),
                is_paused=bool(is_paused),
                workers=workers,
            )
    return readings


def _calls(keys: QueueKeys, now_ms: int) -> Iterator[Call[Any]]:
    yield get_counts(keys, STATES)
    yield command("LRANGE", keys.wait, -_NEXT, -1, parse_reply=_texts)
    yield command("LRANGE", keys.paused, -_NEXT, -1, parse_reply=_texts)
    yield command("ZRANGE", keys.prioritized, 0, _NEXT - 1, parse_reply=_texts)
    yield command("ZRANGE", keys.delayed, 0, 0, "WITHSCORES")
    yield command("ZCOUNT", keys.delayed, 0, _SCORES * (now_ms + 1) - 1)
    yield command("ZRANGE", keys.repeat, 0, 0, "WITHSCORES")
    yield command("HEXISTS", keys.meta, "paused")
    yield command("ZCOUNT", keys.workers, f"({now_ms}", "+inf")


def _texts(reply: Any) -> list[str]:
    return [text(job_id) for job_id in reply if job_id and not text(job_id).startswith("0:")]  # BullMQ 4's markers


def _overdue_ms(first: Sequence[Any], scores_per_ms: int, now_ms: int) -> int:
    """Return how long ago the first member of a sorted set was due."""
    return max(0, int(now_ms - float(first[1]) / scores_per_ms)) if first else 0


def _waited_ms(stored: Sequence[bytes | None], now_ms: int) -> int:
    """Return how long a job has been waiting; 0 if it has been attempted, since nothing says when it was due again."""
    created, opts, attempts = stored
    try:
        if not created or int(attempts or 0):
            return 0
        delay = codec.decode_object(opts or b"{}", what="the options of a job").get("delay")
        return max(0, now_ms - int(created) - (int(delay) if isinstance(delay, int | float) else 0))
    except (DecodeError, ValueError, OverflowError):  # a malformed job
        return 0
