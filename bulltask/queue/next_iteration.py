"""The next iteration of a job scheduler. The worker that acquires one of the scheduler's jobs adds it.

If it is missing all the same, a supervisor adds it: :func:`restore_iterations`.
"""

from __future__ import annotations

from datetime import tzinfo
from typing import Any, Final

from bulltask.errors import BulltaskError, JobError
from bulltask.jobs.job import RunningJob
from bulltask.jobs.names import may_be_old_repeat_key
from bulltask.queue.repeatables import add_next_repeat
from bulltask.schedules.repeat import Repeat, iteration_options
from bulltask.transport.call import Call
from bulltask.transport.keys import QueueKeys
from bulltask.transport.operation import Operation, execute
from bulltask.transport.scripts.schedule import (
    Iteration,
    StoredScheduler,
    add_job_scheduler,
    has_job_scheduler,
    read_iteration,
    read_stored_scheduler,
    scan_schedulers,
    update_job_scheduler,
)

__all__ = [
    "SCHEDULING_ERRORS",
    "add_next_iteration",
    "next_iteration",
    "restore_iterations",
    "scheduling_retry_delay_ms",
]

SCHEDULING_ERRORS: Final = (BulltaskError, ValueError, OverflowError)
"""Errors of :func:`add_next_iteration`; the last two are for a time that a clock or msgpack cannot represent."""

_PAUSE_UNIT_MS: Final = 1_000
_MAX_PAUSE_MS: Final = 300_000
_MAX_OVERDUE: Final = 50
"""How many of the overdue iterations that are stored are examined in a call; most of them are waiting or active."""


def scheduling_retry_delay_ms(attempts_started: int) -> int:
    """Return how long a job is delayed if its next iteration could not be added: 2 s, 4 s … 5 min, as in Node.

    If the job ran instead, its scheduler would add no further jobs.
    """
    return min(_PAUSE_UNIT_MS << min(max(0, attempts_started), 10), _MAX_PAUSE_MS)


def add_next_iteration(keys: QueueKeys, job: RunningJob, now_ms: int, zone: tzinfo) -> Operation[None]:
    """Add the iteration after ``job``, unless that was the last one or its scheduler was removed.

    Args:
        keys: The queue.
        job: Added by a job scheduler, or a repeatable job of BullMQ before 5.10.
        now_ms: The server's time.
        zone: For a pattern without a time zone.

    Raises:
        BrokerError: Redis cannot be reached or returns an error; it is safe to retry.
        DecodeError, ConfigError: Its rule is malformed.
    """
    key = job.scheduler_id
    if not key or (may_be_old_repeat_key(key) and not (yield from execute(has_job_scheduler(keys, key)))):
        yield from add_next_repeat(keys, job, now_ms, zone)
        return
    iteration = next_iteration(job, now_ms, zone)
    if iteration is not None:
        yield from execute(update_job_scheduler(keys, key, job.id, iteration, now_ms))


def next_iteration(job: RunningJob, now_ms: int, zone: tzinfo) -> Iteration | None:
    """Return the iteration after ``job``, ``None`` if that was the last one.

    Args:
        job: Added by a job scheduler.
        now_ms: The server's time.
        zone: For a pattern without a time zone.

    Raises:
        DecodeError, ConfigError: Its rule is malformed.
    """
    stored = job.opts.get("repeat")
    repeat = Repeat.from_wire(stored)
    if repeat.is_over(now_ms):
        return None
    next_ms = None
    if repeat.pattern is not None:
        previous = job.opts.get("prevMillis")
        # Without max(), a clock that is behind the one that scheduled this job would give the same time again.
        next_ms = repeat.next_ms(max(now_ms, previous if isinstance(previous, int) else 0), zone)
        if next_ms is None:
            return None
    rule = {**job.opts["repeat"], "count": repeat.count + 1}
    return Iteration(next_ms, job.data, iteration_options(job.opts, rule, job.scheduler_id, next_ms, now_ms))


def restore_iterations(keys: QueueKeys, cursor: str, now_ms: int, zone: tzinfo) -> Operation[tuple[str, list[str]]]:
    """Add the next iterations that are missing, so that their schedules continue; check about a thousand schedulers.

    Args:
        keys: The queue.
        cursor: ``0``, or what the last call returned.
        now_ms: The server's time.
        zone: For a pattern without a time zone.

    Returns:
        The cursor of the next call, ``0`` at the end, and the ids of the schedulers whose iteration was missing.
    """
    cursor, rows = yield from execute(scan_schedulers(keys, cursor))
    states: list[str] = (yield [call for row in rows for call in read_iteration(keys, *row)]) if rows else []
    suspects, overdue = dict[tuple[str, int], str](), list[tuple[str, int]]()
    for row, state, delayed in zip(rows, states[::2], states[1::2], strict=True):
        if state != "stored":
            suspects[row] = state
        elif not delayed:
            overdue.append(row)
    suspects |= dict.fromkeys(sorted(overdue, key=lambda row: -row[1])[:_MAX_OVERDUE], "stored")
    if not suspects:
        return cursor, []
    stored: list[StoredScheduler | None] = yield [read_stored_scheduler(keys, *row) for row in suspects]
    calls = [
        call
        for scheduler, state in zip(stored, suspects.values(), strict=True)
        if scheduler is not None and (call := _restoring_call(keys, scheduler, state, now_ms, zone)) is not None
    ]
    restored = (yield calls) if calls else []
    return cursor, [scheduler_id for scheduler_id in restored if scheduler_id]


def _restoring_call(
    keys: QueueKeys, stored: StoredScheduler, state: str, now_ms: int, zone: tzinfo
) -> Call[str] | None:
    """Return the call that adds a missing iteration, and returns the scheduler's id, ``""`` if nothing was missing.

    ``None`` if no iteration follows, or if the scheduler is malformed.
    """
    old, finished = stored.scheduler, state == "finished"
    rule = Repeat(
        pattern=old.pattern,
        every_ms=old.every_ms,
        tz=old.tz,
        start_ms=old.start_ms,
        end_ms=old.end_ms,
        limit=old.limit,
        offset_ms=old.offset_ms,
        count=old.iterations,
    )
    after_ms = max(now_ms, old.next_ms) if finished else now_ms
    try:
        if (rule.pattern is None) == (rule.every_ms is None) or rule.is_over(now_ms):
            return None
        next_ms = None if rule.pattern is None else rule.next_ms(after_ms, zone)
    except SCHEDULING_ERRORS:
        return None
    if next_ms is None and (rule.every_ms is None or (rule.end_ms is not None and after_ms > rule.end_ms)):
        return None
    count = old.iterations + finished
    options = iteration_options(old.opts, {**rule.to_wire(), "count": count}, old.id, next_ms, now_ms)
    iteration = Iteration(next_ms, stored.data, options, missing_ms=old.next_ms)
    call = add_job_scheduler(keys, old.id, rule, (old.name, old.opts), iteration, now_ms)

    def parse_reply(reply: Any) -> str:
        try:
            return old.id if call.parse_reply(reply)[0] else ""
        except JobError:
            return ""  # the next times are taken by jobs that have run; the schedule can be restored later

    return Call(call.args, parse_reply, call.script)
