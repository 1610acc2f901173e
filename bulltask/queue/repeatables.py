"""Repeatable jobs, BullMQ's predecessor of job schedulers (5.16); Node's ``queue.add(…, {repeat})`` creates them.

The key of a repeatable job consists of its options (name, id, end, time zone, rule). The worker that acquires an
iteration adds the next one.

bulltask cannot create repeatable jobs, but its workers run existing ones, and users can list and remove them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, tzinfo
from typing import Any, Final

from bulltask.clock import Duration, to_epoch_ms, to_ms
from bulltask.errors import ConfigError, DecodeError
from bulltask.jobs import codec
from bulltask.jobs.job import RunningJob
from bulltask.queue.schedulers import all_rows
from bulltask.schedules.repeat import Repeat, iteration_id, key_digest
from bulltask.transport.keys import QueueKeys
from bulltask.transport.operation import Operation, execute
from bulltask.transport.scripts.add import RepeatedJob, add_repeated_job
from bulltask.transport.scripts.schedule import (
    read_repeatable,
    remove_repeatable,
    update_repeatable_job_millis,
)

__all__ = [
    "NextRepeat",
    "Repeatable",
    "add_next_repeat",
    "list_all",
    "next_repeat",
    "remove",
    "remove_by_key",
    "repeatable_key",
]

_PARTS: Final = 5  # of a key in the oldest format


@dataclass(frozen=True, slots=True)
class Repeatable:
    """A repeatable job as it is stored.

    Attributes:
        key: Identifies it; used to remove it.
        name: Name of its jobs.
        next_ms: When it runs next, epoch milliseconds.
        pattern: Its cron pattern; ``None`` for an interval.
        every_ms: Its interval.
        tz: The pattern's time zone.
        end_ms: No job runs after this time.
        id: The job id that it was created with; only keys in the oldest format contain it.
    """

    key: str
    name: str
    next_ms: int
    pattern: str | None = None
    every_ms: int | None = None
    tz: str | None = None
    end_ms: int | None = None
    id: str | None = None


def list_all(keys: QueueKeys) -> Operation[list[Repeatable]]:
    """Read all repeatable jobs, in the order in which they run next."""
    rows = yield from all_rows(keys)
    hashes: list[dict[str, str]] = (yield [read_repeatable(keys, key) for key, _ in rows]) if rows else []
    # Only job schedulers have "ic", the count of their iterations.
    return [_repeatable(key, ms, stored) for (key, ms), stored in zip(rows, hashes, strict=True) if "ic" not in stored]


def _repeatable(key: str, next_ms: int, stored: Mapping[str, str]) -> Repeatable:
    job_id = None
    if not stored and key.count(":") >= _PARTS - 1:
        name, job_id, end, tz, rule = key.split(":", _PARTS - 1)
        stored = {"name": name, "endDate": end, "tz": tz, ("every" if rule.isdecimal() else "pattern"): rule}
    end, every = stored.get("endDate", ""), stored.get("every", "")
    return Repeatable(
        key=key,
        name=stored.get("name", ""),
        next_ms=next_ms,
        pattern=stored.get("pattern") or None,
        every_ms=int(every) if every.isdecimal() else None,
        tz=stored.get("tz") or None,
        end_ms=int(end) if end.isdecimal() else None,
        id=job_id or None,
    )


def repeatable_key(
    name: str, every: Duration | None, cron: str | None, tz: str | None, end: datetime | None, job_id: str | None
) -> str:
    """Return the key, in the oldest format, of the repeatable job with these options.

    Raises:
        ConfigError: Neither or both of ``every`` and ``cron`` are given.
    """
    if (every is None) == (cron is None):
        raise ConfigError("a repeatable job needs either every= or cron=")
    end_ms = None if end is None else to_epoch_ms(end, "end")
    return _old_key(name, job_id, end_ms, tz, cron if every is None else to_ms(every, "every"))


def remove(keys: QueueKeys, name: str, key: str, job_id: str | None) -> Operation[bool]:
    """Remove the repeatable job with a :func:`repeatable_key`; return false if it does not exist."""
    return (yield from execute(remove_repeatable(keys, _old_id(name, job_id or "", key), key, key_digest(key))))


def remove_by_key(keys: QueueKeys, key: str) -> Operation[bool]:
    """Remove the repeatable job with this key; return false if it does not exist."""
    if not _has_oldest_format(key):
        return (yield from execute(remove_repeatable(keys, "", "", key)))
    name, job_id, *_ = key.split(":")
    return (yield from execute(remove_repeatable(keys, _old_id(name, job_id, key), key, key)))


def _old_id(name: str, job_id: str, key: str) -> str:
    """Return the prefix of the job ids for a key in the oldest format; only their time is missing."""
    return f"repeat:{_checksum(name, job_id, key)}:"


def _has_oldest_format(key: str) -> bool:
    return key.count(":") >= 2  # the same check as in Node


@dataclass(frozen=True, slots=True)
class NextRepeat:
    """The next iteration of a repeatable job, without its key, which is read from Redis.

    Attributes:
        next_ms: When it runs.
        hashed_key: Its key in BullMQ's current format.
        key: Its key in the oldest format.
        rule: ``opts.repeat`` of the next iteration.
    """

    next_ms: int
    hashed_key: str
    key: str
    rule: Mapping[str, Any]


def add_next_repeat(keys: QueueKeys, job: RunningJob, now_ms: int, zone: tzinfo) -> Operation[None]:
    """Add the iteration after ``job``, unless that was the last one or the repeatable job was removed.

    Raises:
        BrokerError: Redis cannot be reached or returns an error. It is safe to retry: the id depends only on the time.
        DecodeError, ConfigError: The rule is malformed.
    """
    following = next_repeat(job, now_ms, zone)
    if following is None:
        return
    key = yield from execute(update_repeatable_job_millis(keys, following.next_ms, following.hashed_key, following.key))
    if key:
        yield from execute(add_repeated_job(keys, _job(job, following, key, now_ms), now_ms))


def next_repeat(job: RunningJob, now_ms: int, zone: tzinfo) -> NextRepeat | None:
    """Return the iteration after ``job``, ``None`` if that was the last one.

    Raises:
        DecodeError, ConfigError: The rule is malformed.
    """
    stored = job.opts.get("repeat")
    if not isinstance(stored, Mapping):
        raise DecodeError("it has no rule (opts.repeat)")
    rule = {name: value for name, value in stored.items() if name not in {"cron", "immediately"}}
    if "pattern" not in rule and "cron" in stored:
        rule["pattern"] = stored["cron"]
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
    return NextRepeat(next_ms, str(rule.get("key") or key_digest(key)), key, rule)


def _job(job: RunningJob, following: NextRepeat, key: str, now_ms: int) -> RepeatedJob:
    part = _checksum(job.name, _data_id(job), key) if _has_oldest_format(key) else key
    job_id = iteration_id(part, following.next_ms)
    options = {name: value for name, value in job.opts.items() if name != "repeatJobKey"}
    options |= {
        "repeat": following.rule,
        "jobId": job_id,
        "delay": max(0, following.next_ms - now_ms),
        "timestamp": now_ms,
        "prevMillis": following.next_ms,
    }
    return RepeatedJob(key, job_id, job.name, job.data, options)


def _key(name: str, rule: Mapping[str, Any], repeat: Repeat) -> str:
    suffix = repeat.every_ms if repeat.pattern is None else repeat.pattern
    return _old_key(name, rule.get("jobId"), repeat.end_ms, rule.get("tz"), suffix)


def _old_key(name: str, job_id: object, end_ms: int | None, tz: object, rule: object) -> str:
    """Return a key in the oldest format."""
    return f"{name}:{job_id or ''}:{'' if end_ms is None else end_ms}:{tz or ''}:{rule}"


def _data_id(job: RunningJob) -> object:
    """Return the id in the job's data, from which BullMQ computes the key."""
    data = codec.decode(job.data, what=f"data of job {job.id}")
    return data.get("id") if isinstance(data, dict) else None


def _checksum(name: str, job_id: object, key: str) -> str:
    """Return the part of a job id that identifies a key in the oldest format."""
    return key_digest(f"{name}{job_id or ''}{key_digest(key)}")
