"""The scripts that add a job; packing only (PROTOCOL 3.1)."""

from __future__ import annotations

from typing import Any

import msgpack

from bulltask.job import NewJob
from bulltask.lua import loader
from bulltask.transport.call import Call, command, script_call
from bulltask.transport.keys import QueueKeys
from bulltask.transport.replies import raise_for, text

__all__ = [
    "add_delayed_job",
    "add_job",
    "add_parent_job",
    "add_prioritized_job",
    "add_standard_job",
    "describe_queue",
]


def add_standard_job(keys: QueueKeys, job: NewJob, now_ms: int) -> Call[str]:
    """``addStandardJob``: the job goes to ``wait`` (or ``paused``); the result is the id."""
    places = (
        keys.wait,
        keys.paused,
        keys.meta,
        keys.id,
        keys.completed,
        keys.delayed,
        keys.active,
        keys.events,
        keys.marker,
    )
    return _add("addStandardJob", places, keys, job, now_ms)


def add_delayed_job(keys: QueueKeys, job: NewJob, now_ms: int) -> Call[str]:
    """``addDelayedJob``: the job is due ``delay_ms`` after ``now_ms``."""
    places = (keys.marker, keys.meta, keys.id, keys.delayed, keys.completed, keys.events)
    return _add("addDelayedJob", places, keys, job, now_ms)


def add_prioritized_job(keys: QueueKeys, job: NewJob, now_ms: int) -> Call[str]:
    """``addPrioritizedJob``: the job waits among those with a priority."""
    places = (
        keys.marker,
        keys.meta,
        keys.id,
        keys.prioritized,
        keys.delayed,
        keys.completed,
        keys.active,
        keys.events,
        keys.pc,
    )
    return _add("addPrioritizedJob", places, keys, job, now_ms)


def add_parent_job(keys: QueueKeys, job: NewJob, now_ms: int) -> Call[str]:
    """``addParentJob``: the job waits for the children that are added after it, in the same transaction."""
    places = (keys.meta, keys.id, keys.delayed, keys.waiting_children, keys.completed, keys.events)
    return _add("addParentJob", places, keys, job, now_ms)


def add_job(keys: QueueKeys, job: NewJob, now_ms: int) -> Call[str]:
    """BullMQ's choice of script: parent, else delayed, else prioritized, else standard (PROTOCOL 3.1)."""
    if job.has_children:
        return add_parent_job(keys, job, now_ms)
    if job.options.delay_at(now_ms) > 0:
        return add_delayed_job(keys, job, now_ms)
    if job.options.priority > 0:
        return add_prioritized_job(keys, job, now_ms)
    return add_standard_job(keys, job, now_ms)


def describe_queue(keys: QueueKeys, version: str, max_events: int) -> list[Call[Any]]:
    """Say in ``meta`` which protocol the queue speaks and how long its event stream may grow, unless it says so."""
    return [
        command("HSETNX", keys.meta, "version", version),
        command("HSETNX", keys.meta, "opts.maxLenEvents", max_events),
    ]


def _add(script: str, places: tuple[str, ...], keys: QueueKeys, job: NewJob, now_ms: int) -> Call[str]:
    # Absent parent, scheduler and deduplication fields are nil, never "": an empty text creates a set named "" or is
    # taken for a missing parent (PROTOCOL 3.1).
    parent, dedup = job.parent, job.options.deduplication_id
    head = [
        keys.base,
        job.id,
        job.name,
        now_ms if job.timestamp_ms is None else job.timestamp_ms,
        None if parent is None else parent.key,
        None if parent is None else f"{parent.key}:dependencies",
        None if parent is None else dict(parent.data),
        None,
        None if dedup is None else keys.deduplication(dedup),
    ]

    def judge(reply: Any) -> str:
        raise_for(reply, job.id, keys.name)
        return text(reply)

    args = (msgpack.packb(head), job.data, msgpack.packb(job.options.to_wire(job.id, now_ms)))
    return script_call(loader.official(script), places, args, judge)
