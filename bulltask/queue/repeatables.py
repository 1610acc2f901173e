"""Repeatable jobs that BullMQ before 5.10 has stored; job schedulers have taken their place.

Their key in ``repeat`` is put together from what they are (name, id, end, time zone, rule), and the worker itself adds
the next job. Nothing makes new ones, but series that run since then must not end.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import tzinfo
from typing import Any

from bulltask import codec
from bulltask.errors import DecodeError
from bulltask.job import ActiveJob
from bulltask.repeat import Repeat, iteration_id
from bulltask.transport.keys import QueueKeys
from bulltask.transport.operation import Operation, ask
from bulltask.transport.scripts_add import RepeatedJob, add_repeated_job
from bulltask.transport.scripts_schedule import update_repeatable_job_millis

__all__ = ["FollowingRepeat", "add_next_repeat", "following_repeat"]


@dataclass(frozen=True, slots=True)
class FollowingRepeat:
    """What follows in a series, but for its key, which Redis knows.

    Attributes:
        next_ms: when it runs.
        hashed_key: its key as BullMQ would make it today.
        key: its key as it was made then.
        rule: ``opts.repeat`` of the next job.
    """

    next_ms: int
    hashed_key: str
    key: str
    rule: Mapping[str, Any]


def add_next_repeat(keys: QueueKeys, job: ActiveJob, now_ms: int, zone: tzinfo) -> Operation[None]:
    """Add the job that follows ``job``; nothing if it was the last one, or if the series was removed.

    Raises:
        BrokerError: Redis is away, or refuses; asking again is safe, because the moment makes the id.
        DecodeError, ConfigError: the rule cannot be read.
    """
    found = following_repeat(job, now_ms, zone)
    if found is None:
        return
    key = yield from ask(update_repeatable_job_millis(keys, found.next_ms, found.hashed_key, found.key))
    if key:
        yield from ask(add_repeated_job(keys, _job(job, found, key, now_ms), now_ms))


def following_repeat(job: ActiveJob, now_ms: int, zone: tzinfo) -> FollowingRepeat | None:
    """Return what follows ``job`` in its series, ``None`` if it was the last one.

    Raises:
        DecodeError, ConfigError: the rule cannot be read.
    """
    said = job.opts.get("repeat")
    if not isinstance(said, Mapping):
        raise DecodeError("it has no rule (opts.repeat)")
    rule = {name: value for name, value in said.items() if name not in {"cron", "immediately"}}
    if "pattern" not in rule and "cron" in said:
        rule["pattern"] = said["cron"]
    repeat = Repeat.from_wire(rule)
    if repeat.is_over(now_ms):
        return None
    previous = job.opts.get("prevMillis")
    after_ms = max(now_ms, previous if isinstance(previous, int) else 0)
    if repeat.every_ms is None:
        next_ms = repeat.next_ms(after_ms, zone)
    else:
        next_ms = after_ms // repeat.every_ms * repeat.every_ms + repeat.every_ms
    if next_ms is None:
        return None
    key = _key(job.name, rule, repeat)
    rule["count"] = repeat.count + 1
    return FollowingRepeat(next_ms, str(rule.get("key") or _md5(key)), key, rule)


def _job(job: ActiveJob, found: FollowingRepeat, key: str, now_ms: int) -> RepeatedJob:
    job_id = iteration_id(key if key.count(":") < 2 else _checksum(job, key), found.next_ms)
    options = {name: value for name, value in job.opts.items() if name != "repeatJobKey"}
    options |= {
        "repeat": found.rule,
        "jobId": job_id,
        "delay": max(0, found.next_ms - now_ms),
        "timestamp": now_ms,
        "prevMillis": found.next_ms,
    }
    return RepeatedJob(key, job_id, job.name, job.data, options)


def _key(name: str, rule: Mapping[str, Any], repeat: Repeat) -> str:
    end = "" if repeat.end_ms is None else repeat.end_ms
    suffix = repeat.every_ms if repeat.pattern is None else repeat.pattern
    return f"{name}:{rule.get('jobId') or ''}:{end}:{rule.get('tz') or ''}:{suffix}"


def _checksum(job: ActiveJob, key: str) -> str:
    """What stands for the key in the ids of its jobs; BullMQ takes an ``id`` of the data for the job's own."""
    data = codec.decode(job.data, what=f"data of job {job.id}")
    own_id = data.get("id") if isinstance(data, dict) else None
    return _md5(f"{job.name}{own_id or ''}{_md5(key)}")


def _md5(text: str) -> str:
    return hashlib.md5(text.encode("utf-8", "surrogateescape"), usedforsecurity=False).hexdigest()
