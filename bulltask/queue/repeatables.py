"""Repeatable jobs, which BullMQ had before 5.10 and Node's ``queue.add(…, {repeat})`` still makes.

Job schedulers have taken their place. Their key in ``repeat`` is put together from what they are (name, id, end, time
zone, rule), and the worker itself adds the next job. Nothing here makes new ones, but series that run must not end,
and whoever has some must be able to end them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, tzinfo
from typing import Any, Final

from bulltask.clock import Duration, to_epoch_ms, to_ms
from bulltask.errors import ConfigError, DecodeError
from bulltask.jobs import codec
from bulltask.jobs.job import RunningJob
from bulltask.queue.link import Link
from bulltask.schedule.repeat import Repeat, iteration_id, key_digest
from bulltask.transport.keys import QueueKeys
from bulltask.transport.operation import Operation, execute
from bulltask.transport.scripts.add import RepeatedJob, add_repeated_job
from bulltask.transport.scripts.schedule import (
    list_schedulers,
    read_repeatable,
    remove_repeatable,
    update_repeatable_job_millis,
)

__all__ = ["AsyncRepeatables", "FollowingRepeat", "Repeatable", "Repeatables", "add_next_repeat", "following_repeat"]

_PARTS: Final = 5  # of a key of the oldest form


@dataclass(frozen=True, slots=True)
class Repeatable:
    """A repeatable job as Redis knows it.

    Attributes:
        key: by which it is removed.
        name: of its jobs.
        next_ms: when it runs next, epoch milliseconds.
        pattern: its cron pattern; ``None`` for an interval.
        every_ms: its interval.
        tz: the pattern's time zone.
        end_ms: nothing runs after.
        id: the job id with which it was made; known only from keys of the oldest form.
    """

    key: str
    name: str
    next_ms: int
    pattern: str | None = None
    every_ms: int | None = None
    tz: str | None = None
    end_ms: int | None = None
    id: str | None = None


class Repeatables:
    """The repeatable jobs of a queue; :class:`bulltask.queue.schedulers.JobSchedulers` have taken their place.

    There is no way to make new ones: use ``queue.schedulers.upsert``. Those that are there go on in every worker.

    Args:
        link: the queue's way to Redis.
    """

    def __init__(self, link: Link) -> None:
        self._link = link

    def list(self) -> Sequence[Repeatable]:
        """Return all repeatable jobs, the one that runs next first; job schedulers are not among them."""
        return self._link.run(_list(self._link.keys))

    def count(self) -> int:
        """How many there are."""
        return len(self.list())

    def remove(
        self,
        name: str,
        *,
        every: Duration | None = None,
        cron: str | None = None,
        tz: str | None = None,
        end: datetime | None = None,
        job_id: str | None = None,
    ) -> bool:
        """Remove a repeatable job, and its next job while that is delayed, by what it was made of.

        Args:
            name: of its jobs.
            every: seconds or ``timedelta``: its interval.
            cron: its pattern, to the letter.
            tz, end, job_id: as it was made.

        Returns:
            False when there is none.

        Raises:
            ConfigError: neither or both of ``every`` and ``cron`` are given.
        """
        return self._link.run(_remove(self._link.keys, name, _made_of(name, every, cron, tz, end, job_id), job_id))

    def remove_by_key(self, key: str) -> bool:
        """Remove a repeatable job, and its next job while that is delayed; false when there is none of that key."""
        return self._link.run(_remove_by_key(self._link.keys, key))


class AsyncRepeatables:
    """:class:`Repeatables` for asyncio; the methods are the same."""

    def __init__(self, link: Link) -> None:
        self._link = link

    async def list(self) -> Sequence[Repeatable]:
        """See :meth:`Repeatables.list`."""
        return await self._link.arun(_list(self._link.keys))

    async def count(self) -> int:
        """See :meth:`Repeatables.count`."""
        return len(await self.list())

    async def remove(
        self,
        name: str,
        *,
        every: Duration | None = None,
        cron: str | None = None,
        tz: str | None = None,
        end: datetime | None = None,
        job_id: str | None = None,
    ) -> bool:
        """See :meth:`Repeatables.remove`."""
        made_of = _made_of(name, every, cron, tz, end, job_id)
        return await self._link.arun(_remove(self._link.keys, name, made_of, job_id))

    async def remove_by_key(self, key: str) -> bool:
        """See :meth:`Repeatables.remove_by_key`."""
        return await self._link.arun(_remove_by_key(self._link.keys, key))


def _list(keys: QueueKeys) -> Operation[list[Repeatable]]:
    rows = yield from execute(list_schedulers(keys, 0, -1, asc=True))
    hashes: list[dict[str, str]] = (yield [read_repeatable(keys, key) for key, _ in rows]) if rows else []
    # "ic" counts the iterations of a job scheduler.
    return [_repeatable(key, ms, said) for (key, ms), said in zip(rows, hashes, strict=True) if "ic" not in said]


def _repeatable(key: str, next_ms: int, said: Mapping[str, str]) -> Repeatable:
    job_id = None
    if not said and key.count(":") >= _PARTS - 1:
        name, job_id, end, tz, rule = key.split(":", _PARTS - 1)
        said = {"name": name, "endDate": end, "tz": tz, ("every" if rule.isdecimal() else "pattern"): rule}
    end, every = said.get("endDate", ""), said.get("every", "")
    return Repeatable(
        key=key,
        name=said.get("name", ""),
        next_ms=next_ms,
        pattern=said.get("pattern") or None,
        every_ms=int(every) if every.isdecimal() else None,
        tz=said.get("tz") or None,
        end_ms=int(end) if end.isdecimal() else None,
        id=job_id or None,
    )


def _made_of(
    name: str, every: Duration | None, cron: str | None, tz: str | None, end: datetime | None, job_id: str | None
) -> str:
    if (every is None) == (cron is None):
        raise ConfigError("a repeatable job has either every= or cron=")
    end_ms = None if end is None else to_epoch_ms(end, "end")
    return _old_key(name, job_id, end_ms, tz, cron if every is None else to_ms(every, "every"))


def _remove(keys: QueueKeys, name: str, made_of: str, job_id: str | None) -> Operation[bool]:
    return (
        yield from execute(remove_repeatable(keys, _old_id(name, job_id or "", made_of), made_of, key_digest(made_of)))
    )


def _remove_by_key(keys: QueueKeys, key: str) -> Operation[bool]:
    if not _is_of_the_oldest_form(key):
        return (yield from execute(remove_repeatable(keys, "", "", key)))
    name, job_id, *_ = key.split(":")
    return (yield from execute(remove_repeatable(keys, _old_id(name, job_id, key), key, key)))


def _old_id(name: str, job_id: str, key: str) -> str:
    """The ids of the jobs of a key of the oldest form, without their moment."""
    return f"repeat:{_checksum(name, job_id, key)}:"


def _is_of_the_oldest_form(key: str) -> bool:
    return key.count(":") >= 2  # as Node tells them apart


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


def add_next_repeat(keys: QueueKeys, job: RunningJob, now_ms: int, zone: tzinfo) -> Operation[None]:
    """Add the job that follows ``job``; nothing if it was the last one, or if the series was removed.

    Raises:
        BrokerError: Redis is away, or refuses; asking again is safe, because the moment makes the id.
        DecodeError, ConfigError: the rule cannot be read.
    """
    found = following_repeat(job, now_ms, zone)
    if found is None:
        return
    key = yield from execute(update_repeatable_job_millis(keys, found.next_ms, found.hashed_key, found.key))
    if key:
        yield from execute(add_repeated_job(keys, _job(job, found, key, now_ms), now_ms))


def following_repeat(job: RunningJob, now_ms: int, zone: tzinfo) -> FollowingRepeat | None:
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
    return FollowingRepeat(next_ms, str(rule.get("key") or key_digest(key)), key, rule)


def _job(job: RunningJob, found: FollowingRepeat, key: str, now_ms: int) -> RepeatedJob:
    part = _checksum(job.name, _own_id(job), key) if _is_of_the_oldest_form(key) else key
    job_id = iteration_id(part, found.next_ms)
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
    suffix = repeat.every_ms if repeat.pattern is None else repeat.pattern
    return _old_key(name, rule.get("jobId"), repeat.end_ms, rule.get("tz"), suffix)


def _old_key(name: str, job_id: object, end_ms: int | None, tz: object, rule: object) -> str:
    """A key of the oldest form."""
    return f"{name}:{job_id or ''}:{'' if end_ms is None else end_ms}:{tz or ''}:{rule}"


def _own_id(job: RunningJob) -> object:
    """What BullMQ takes for the job's own id: an ``id`` of its data."""
    data = codec.decode(job.data, what=f"data of job {job.id}")
    return data.get("id") if isinstance(data, dict) else None


def _checksum(name: str, job_id: object, key: str) -> str:
    """What stands for a key of the oldest form in the ids of its jobs."""
    return key_digest(f"{name}{job_id or ''}{key_digest(key)}")
