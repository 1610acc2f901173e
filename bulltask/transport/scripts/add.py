"""Calls to the scripts that add a job."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, islice
from typing import Any, Final, Literal, cast

import msgpack

from bulltask.jobs.clock import value_class
from bulltask.jobs.job import JobOptions, NewJob
from bulltask.lua import loader, wrappers
from bulltask.lua.loader import Script
from bulltask.transport.call import Call, QueueKeys, command, raise_for, script_call, text, texts, to_msgpack

__all__ = [
    "MAX_JOBS_PER_CALL",
    "AddedJob",
    "IdempotentWrite",
    "RepeatedJob",
    "SendResult",
    "add_deferred_duplicate",
    "add_delayed_job",
    "add_job",
    "add_jobs_once",
    "add_parent_job",
    "add_prioritized_job",
    "add_repeated_job",
    "add_standard_job",
    "added_job",
    "pack_fetch",
    "pack_finish",
    "scan_added_ids",
    "write_queue_meta",
]


# The options of BullMQ's scripts that acquire and finish jobs, in packed form.
#
# Packing them would take 5% of a job's instructions, so ``pack_fetch`` is cached, and its caller caches
# ``pack_finish``. The parameters are parts of ``FetchOptions`` and ``FinishOptions``.


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


# Calls to the scripts that add a job.


_JOB_ID: Final = msgpack.packb("jobId")


MAX_JOBS_PER_CALL: Final = 25
"""Maximum number of jobs that one call adds; adding that many keeps Redis busy for about a millisecond."""

_SCAN_COUNT: Final = 1_000

SendStatus = Literal["added", "duplicate"]


@dataclass(frozen=True, slots=True)
class RepeatedJob:
    """A job whose stored options are known: of a repeatable job, which BullMQ had before job schedulers, or of none.

    Attributes:
        key: The key of the repeatable job, a member of the queue's ``repeat`` set; ``None`` for no repeatable job.
        data: JSON.
        options: The options as they are stored.
    """

    key: str | None
    id: str
    name: str
    data: bytes
    options: Mapping[str, Any]


def add_standard_job(keys: QueueKeys, job: NewJob, now_ms: int) -> Call[str]:
    """``addStandardJob``: add a job to ``wait`` (or ``paused``). Returns its id."""
    return _add("addStandardJob", _for_standard(keys), keys, job, now_ms)


def add_delayed_job(keys: QueueKeys, job: NewJob, now_ms: int) -> Call[str]:
    """``addDelayedJob``: add a job that is due ``delay_ms`` after ``now_ms``."""
    return _add("addDelayedJob", _for_delayed(keys), keys, job, now_ms)


def add_prioritized_job(keys: QueueKeys, job: NewJob, now_ms: int) -> Call[str]:
    """``addPrioritizedJob``: add a job with a priority."""
    return _add("addPrioritizedJob", _for_prioritized(keys), keys, job, now_ms)


def add_parent_job(keys: QueueKeys, job: NewJob, now_ms: int) -> Call[str]:
    """``addParentJob``: add a job that waits for its child jobs, which are added after it in the same transaction."""
    script_keys = (keys.meta, keys.id, keys.delayed, keys.waiting_children, keys.completed, keys.events)
    return _add("addParentJob", script_keys, keys, job, now_ms)


def add_job(keys: QueueKeys, job: NewJob, now_ms: int) -> Call[str]:
    """Add a job with the script that BullMQ would choose: parent, else delayed, else prioritized, else standard."""
    if job.has_children:
        return add_parent_job(keys, job, now_ms)
    if job.options.delay_at(now_ms) > 0:
        return add_delayed_job(keys, job, now_ms)
    if job.options.priority > 0:
        return add_prioritized_job(keys, job, now_ms)
    return add_standard_job(keys, job, now_ms)


def add_repeated_job(keys: QueueKeys, job: RepeatedJob, now_ms: int) -> Call[str]:
    """Add the next iteration of a repeatable job, with the script that BullMQ would choose and unchanged options."""
    if job.options.get("delay"):
        script, script_keys = "addDelayedJob", _for_delayed(keys)
    elif job.options.get("priority"):
        script, script_keys = "addPrioritizedJob", _for_prioritized(keys)
    else:
        script, script_keys = "addStandardJob", _for_standard(keys)
    head = [keys.base, job.id, job.name, now_ms, None, None, None, job.key, None]
    return _call(script, script_keys, keys, job.id, (head, job.data, to_msgpack(job.options)))


AddedJob = tuple[str, str, bytes, bytes, bytes]
"""A job that another script adds: the prefix of its queue's keys, the add script, and that script's arguments."""


def added_job(base: str, job_id: str, name: str, data: bytes, opts: Mapping[str, Any], now_ms: int) -> AddedJob:
    """Return a job without a parent that another script adds, with the script that BullMQ would choose.

    Args:
        base: The prefix of the queue's keys.
        job_id, name, data: The job.
        opts: Its options as they are stored.
        now_ms: The server's time.
    """
    script = "delayed" if opts.get("delay") else "prioritized" if opts.get("priority") else "standard"
    head = [base, job_id, name, now_ms, None, None, None, None, None]
    return base, script, msgpack.packb(head), data, to_msgpack(opts)


def add_deferred_duplicate(keys: QueueKeys, dedup_id: str, finished_id: str, now_ms: int) -> Call[str]:
    """bulltask's ``addDeferred``: add the duplicate that a newer BullMQ deferred until ``finished_id`` finished.

    Returns its id, ``""`` if there is none. Safe to call again.
    """
    script_keys = (
        keys.deferred(dedup_id),
        keys.deduplication(dedup_id),
        keys.active,
        keys.wait,
        keys.paused,
        keys.prioritized,
        keys.pc,
        keys.delayed,
        keys.marker,
        keys.meta,
        keys.events,
    )
    return script_call(loader.bulltask_script("addDeferred"), script_keys, (keys.base, finished_id, now_ms), text)


def write_queue_meta(keys: QueueKeys, version: str, max_events: int) -> list[Call[Any]]:
    """Write the protocol version and the event stream's maximum length into ``meta``, unless they are set."""
    return [
        command("HSETNX", keys.meta, "version", version),
        command("HSETNX", keys.meta, "opts.maxLenEvents", max_events),
    ]


def _add(script: str, script_keys: tuple[str, ...], keys: QueueKeys, job: NewJob, now_ms: int) -> Call[str]:
    # A missing parent, scheduler or deduplication id must be nil: for "" the scripts would create a set of that name,
    # or report a missing parent.
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

    return _call(script, script_keys, keys, job.id, (head, job.data, _packed_options.of(job, now_ms)))


def _call(
    script: str, script_keys: tuple[str, ...], keys: QueueKeys, job_id: str, parts: tuple[list[Any], bytes, bytes]
) -> Call[str]:
    def parse_reply(reply: Any) -> str:
        raise_for(reply, job_id, keys.name)
        return text(reply)

    head, data, options = parts
    is_deduplicated = head[-1] is not None
    add = wrappers.with_guard(script, "deduplicationGuard") if is_deduplicated else loader.official_script(script)
    return script_call(add, script_keys, (msgpack.packb(head), data, options), parse_reply)


class _PackedOptions:
    """Caches the packed ``opts``: most jobs that are sent together have the same options, except for their id.

    Without the cache, packing would take a fifth of bulltask's time in a DataFrame write.
    """

    def __init__(self) -> None:
        self._last: tuple[JobOptions | None, int | None, bytes, bytes] = (None, None, b"", b"")

    def of(self, job: NewJob, now_ms: int) -> bytes:
        options, packed_at_ms, plain, open_map = self._last  # read once, because other threads send too
        if options is not job.options or packed_at_ms not in {None, now_ms}:
            plain, open_map = _pack_map(job.options.to_wire(now_ms))
            self._last = (job.options, now_ms if job.options.has_times else None, plain, open_map)
        return open_map + msgpack.packb(job.id) if job.has_custom_id else plain


_packed_options: Final = _PackedOptions()


def _pack_map(wire: Mapping[str, object]) -> tuple[bytes, bytes]:
    """Pack a map, and the same map with an additional key ``jobId``, whose value the caller appends."""
    packer = msgpack.Packer()
    entries = b"".join(msgpack.packb(part) for pair in wire.items() for part in pair)
    return packer.pack_map_header(len(wire)) + entries, packer.pack_map_header(len(wire) + 1) + entries + _JOB_ID


def _for_standard(keys: QueueKeys) -> tuple[str, ...]:
    return (
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


def _for_delayed(keys: QueueKeys) -> tuple[str, ...]:
    return (keys.marker, keys.meta, keys.id, keys.delayed, keys.completed, keys.events)


def _for_prioritized(keys: QueueKeys) -> tuple[str, ...]:
    return (
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


@value_class
class IdempotentWrite:
    """Identifies the write that adds jobs, so that a retried write adds nothing twice.

    Attributes:
        write_id: The id of the write; it is the same when the write is retried.
        ttl_ms: How long Redis keeps the ids of the added jobs after the write's last job.
    """

    write_id: str
    ttl_ms: int


@value_class
class SendResult:
    """The result of sending one job of a write.

    Attributes:
        id: The id of the stored job; after deduplication it differs from the id that was sent.
        status: ``added``; ``duplicate`` if the job already exists or this write has added it before.
    """

    id: str
    status: SendStatus


def add_jobs_once(
    keys: QueueKeys, jobs: Sequence[NewJob], now_ms: int, write: IdempotentWrite
) -> Iterator[Call[list[SendResult]]]:
    """bulltask's ``addOnce`` with BullMQ's add script: add jobs, except for those that the write has added before.

    Adjacent jobs with the same script share a call, up to :data:`MAX_JOBS_PER_CALL`: starting a script takes a fifth of
    the time needed to add a job. The results of the calls are in the order of the jobs.
    """
    plain = ((job, add_job(keys, job, now_ms)) for job in jobs)
    for script, group in groupby(plain, key=lambda pair: pair[1].script):
        assert script is not None
        while part := list(islice(group, MAX_JOBS_PER_CALL)):
            yield _add_once(keys, script, part, write)


def _add_once(
    keys: QueueKeys, add: Script, plain: Sequence[tuple[NewJob, Call[str]]], write: IdempotentWrite
) -> Call[list[SendResult]]:
    first = add.key_count + 1
    is_deduplicated = plain[0][0].options.deduplication_id is not None
    script, script_keys = wrappers.add_once(add.name, deduplicated=is_deduplicated), plain[0][1].args[1:first]

    def parse_reply(replies: Any) -> list[SendResult]:
        sent = []
        for (job, _), reply in zip(plain, replies, strict=True):
            raise_for(reply, job.id, keys.name)
            sent.append(SendResult(text(reply[0]), cast(SendStatus, text(reply[1]))))
        return sent

    words = [word for job, call in plain for word in (job.id, keys.job(job.id), *call.args[first:])]
    return Call(
        (script.key_count, keys.added_ids(write.write_id), *script_keys, write.ttl_ms, *words), parse_reply, script
    )


def scan_added_ids(keys: QueueKeys, write_id: str, cursor: str) -> Call[tuple[str, list[str]]]:
    """Scan the ids of jobs that a write has added. Returns the next cursor, ``0`` at the end, and some ids.

    The same id may come twice.
    """

    def parse_reply(reply: Any) -> tuple[str, list[str]]:
        return text(reply[0]), texts(reply[1])

    return command("SSCAN", keys.added_ids(write_id), cursor, "COUNT", _SCAN_COUNT, parse_reply=parse_reply)
