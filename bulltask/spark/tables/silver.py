"""``silver.attempts`` and ``silver.jobs`` of one batch, and what is left to the next one.

The events of a batch are told together with those of the jobs that were open before it (the carry). An attempt is
written in the batch in which it is decided how it ended, a job in the batch in which it is done, so nothing is written
twice; what became of a job that is retried by hand later is a new row of the same key, which knows more.

An event of a job that is neither new nor in the carry has a past: that of a job that is done and was retried by hand,
that was given up, or of which events are lost. The past is looked up, and the job is told whole.

A batch is bounded, so all of this is done with arrays, in the process that runs the batch. Open jobs of which it says
nothing are passed on as they are. Nothing here reads or writes: tables of Arrow in, tables of Arrow out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bulltask.spark.lifecycle.arrays import Bools, Lives, Told, in_order, is_one_of, job_numbers, life_events, tell
from bulltask.spark.lifecycle.arrow_rows import attempts_of, jobs_of
from bulltask.spark.lifecycle.fold import FINISHED

__all__ = ["LookUp", "Silver", "silver_of_batch"]

LookUp = Callable[[pa.Table], pa.Table | None]
"""Finds the events, of all batches before, of jobs (``queue``, ``job_id``); ``None`` when there is none."""


@dataclass(frozen=True, slots=True)
class Silver:
    """What a batch tells.

    Attributes:
        attempts: new rows of ``silver.attempts``, with their partitions ``dt`` and ``queue``.
        jobs: new rows of ``silver.jobs``, with the same.
        carry: the events of jobs that are still open, with the columns `LIFE`.
    """

    attempts: pa.Table
    jobs: pa.Table
    carry: pa.Table


def silver_of_batch(new: pa.Table, carry: pa.Table | None, look_up: LookUp, give_up_ms: int) -> Silver:
    """Tell what a batch adds.

    Args:
        new: the batch's events, as in ``bronze.events``.
        carry: what the batch before left; ``None`` for the first.
        look_up: finds what was before.
        give_up_ms: a job without an event since then is given up.
    """
    lives, untouched = _lives(life_events(new), carry, give_up_ms)
    told = tell(_with_past(lives, look_up))
    is_attempt, is_job, is_open = _judge(told, give_up_ms)
    goes_on = told.lives.table.take(told.lives.order[is_open])
    return Silver(
        _by_day(attempts_of(told, is_attempt), "ended_at"),
        _by_day(jobs_of(told, is_job), "finished_at"),
        goes_on if untouched is None else pa.concat_tables([untouched, goes_on]),
    )


def _lives(events: pa.Table, carry: pa.Table | None, give_up_ms: int) -> tuple[Lives, pa.Table | None]:
    """Put the events in order with those of the same jobs in the carry; return the others of it as they are."""
    count = events.num_rows
    if carry is None:
        return in_order(events, job_numbers(events), np.ones(count, bool)), None
    whole = pa.concat_tables([events, carry.select(events.column_names).cast(events.schema)])
    jobs, is_new = job_numbers(whole), np.arange(whole.num_rows) < count
    # The batch's jobs come up first, so they have the first numbers.
    chosen = jobs <= np.max(jobs[:count], initial=-1)
    if give_up_ms:
        last_ms, ms = np.zeros(np.max(jobs, initial=-1) + 1, np.int64), whole["event_ms"].to_numpy()
        np.maximum.at(last_ms, jobs, ms)
        chosen |= last_ms[jobs] < give_up_ms
    return in_order(whole.filter(chosen), jobs[chosen], is_new[chosen]), whole.filter(~chosen)


def _with_past(lives: Lives, look_up: LookUp) -> Lives:
    """Add what was before to jobs that are all new to the batch but do not begin in it."""
    count = lives.table.num_rows
    starts = np.flatnonzero(lives.first == np.arange(count))
    if not count:
        return lives
    is_late = np.logical_and.reduceat(lives.is_new[:-1], starts) & ~is_one_of(lives.kind[starts], ("added",))
    keys = lives.table.select(["queue", "job_id"]).take(lives.order[starts[is_late]])
    past = look_up(keys) if keys.num_rows else None
    if past is None:
        return lives
    whole = pa.concat_tables([lives.table, life_events(past).cast(lives.table.schema)])
    is_new = np.zeros(whole.num_rows, bool)
    is_new[lives.order] = lives.is_new[:-1]
    return in_order(whole, job_numbers(whole), is_new)


def _judge(told: Told, give_up_ms: int) -> tuple[Bools, Bools, Bools]:
    """Judge with which events something is to be done.

    Returns:
        Where an attempt begins of which the outcome is decided now; where a life ends now; what is of a life that goes
        on.
    """
    lives = told.lives
    kind, last = lives.kind[:-1], lives.last
    is_removed, was_finished = is_one_of(kind, ("removed",)), is_one_of(lives.kind[told.kept], FINISHED)
    goes_on = (told.added == told.added[last]) & ~(was_finished | is_removed)[last]
    is_old = lives.ms[last] < give_up_ms
    given_up = goes_on & is_old
    decided = np.where(told.decider >= 0, lives.is_new[told.decider], given_up)
    # Whether the life ends in this batch, so that it has not been told before.
    is_told_now = np.select(
        [was_finished, is_removed, lives.next >= 0],
        [lives.is_new[told.kept], lives.is_new[:-1], lives.is_new[lives.next]],
        given_up,
    )
    return told.begins & decided, told.is_last & is_told_now, goes_on & ~is_old


def _by_day(rows: pa.Table, ended_at: str) -> pa.Table:
    """Add the partition ``dt``: the day, UTC, in which it ended, or of what is known last."""
    day: Any = pc.coalesce(rows[ended_at], rows["as_of"]).cast(pa.date32())
    return rows.append_column("dt", day.cast(pa.string()))
