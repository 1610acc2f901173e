"""Calls to the scripts that add jobs: :func:`add_job` chooses the script, as BullMQ does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, islice
from typing import Any, Final, Literal, cast

import msgpack

from bulltask.jobs.clock import value_class
from bulltask.jobs.job import NewJob
from bulltask.lua import loader, wrappers
from bulltask.lua.loader import Script
from bulltask.transport.call import (
    Call,
    OptionalCall,
    QueueKeys,
    command,
    known_queues,
    named_keys,
    nothing,
    raise_for,
    script_call,
    text,
    texts,
    to_msgpack,
)

__all__ = [
    "AddedJob",
    "IdempotentWrite",
    "RepeatedJob",
    "SendResult",
    "add_deferred_duplicate",
    "add_job",
    "add_jobs_once",
    "add_repeated_job",
    "added_job",
    "register_as_sender",
    "scan_added_ids",
    "write_queue_meta",
]


_JOB_ID: Final = msgpack.packb("jobId")

MAX_JOBS_PER_CALL: Final = 25
"""Maximum number of jobs that one call adds; adding that many keeps Redis busy for about a millisecond."""

_SCAN_COUNT: Final = 1_000

SendStatus = Literal["added", "duplicate"]


@value_class
class RepeatedJob:
    """A job whose stored options are known; ``key`` is its repeatable job's, a member of ``repeat``, or ``None``."""

    key: str | None
    id: str
    name: str
    data: bytes
    options: Mapping[str, Any]


def add_job(keys: QueueKeys, job: NewJob, now_ms: int) -> Call[str]:
    """Add a job with the script that BullMQ would choose: parent, else delayed, else prioritized, else standard.

    A parent waits for its child jobs, which are added after it in the same transaction. Returns the job's id; after
    deduplication, that of the existing job.
    """
    options = job.options
    if job.has_children:
        script = "addParentJob"
    elif options.delay_at(now_ms) > 0:
        script = "addDelayedJob"
    elif options.priority > 0:
        script = "addPrioritizedJob"
    else:
        script = "addStandardJob"
    # A missing parent, scheduler or deduplication id must be nil: for "" the scripts would create a set of that name,
    # or report a missing parent.
    parent, dedup = job.parent, options.deduplication_id
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
    return _add(script, keys, head, job.data, _pack_options(job, now_ms))


def add_repeated_job(keys: QueueKeys, job: RepeatedJob, now_ms: int) -> Call[str]:
    """Add the next iteration of a repeatable job, with the script that BullMQ would choose and unchanged options."""
    if job.options.get("delay"):
        script = "addDelayedJob"
    elif job.options.get("priority"):
        script = "addPrioritizedJob"
    else:
        script = "addStandardJob"
    head = [keys.base, job.id, job.name, now_ms, None, None, None, job.key, None]
    return _add(script, keys, head, job.data, to_msgpack(job.options))


_KEYS: Final = {
    "addDelayedJob": "marker meta id delayed completed events",
    "addParentJob": "meta id delayed waiting_children completed events",
    "addPrioritizedJob": "marker meta id prioritized delayed completed active events pc",
    "addStandardJob": "wait paused meta id completed delayed active events marker",
}
"""The keys of each script."""


def _add(script: str, keys: QueueKeys, head: list[Any], data: bytes, options: bytes) -> Call[str]:
    job_id: str = head[1]

    def parse_reply(reply: Any) -> str:
        raise_for(reply, job_id, keys.name)
        return text(reply)

    is_deduplicated = head[-1] is not None
    add = wrappers.with_guard(script, "deduplicationGuard") if is_deduplicated else loader.official_script(script)
    return script_call(add, named_keys(keys, _KEYS[script]), (msgpack.packb(head), data, options), parse_reply)


def _pack_options(job: NewJob, now_ms: int) -> bytes:
    """Return the packed ``opts``. Most jobs that are sent together have the same options, except for their id.

    Packing them for each job would take a fifth of bulltask's time in a DataFrame write.
    """
    packed = job.options.packed
    if packed is None or packed[0] not in {None, now_ms}:
        wire = job.options.to_wire(now_ms)
        packer = msgpack.Packer()
        entries = b"".join(msgpack.packb(part) for pair in wire.items() for part in pair)
        with_id = packer.pack_map_header(len(wire) + 1) + entries + _JOB_ID
        sent_ms = now_ms if job.options.has_times else None
        packed = sent_ms, packer.pack_map_header(len(wire)) + entries, with_id
        object.__setattr__(job.options, "packed", packed)
    _, plain, with_id = packed
    return with_id + msgpack.packb(job.id) if job.has_custom_id else plain


AddedJob = tuple[str, str, bytes, bytes, bytes]
"""A job that another script adds: the prefix of its queue's keys, the add script, and that script's arguments."""


def added_job(base: str, job_id: str, name: str, data: bytes, opts: Mapping[str, Any], now_ms: int) -> AddedJob:
    """Return a job without a parent that another script adds, with the script that BullMQ would choose.

    ``base`` is the prefix of the queue's keys; ``opts`` are the job's options as they are stored.
    """
    script = "delayed" if opts.get("delay") else "prioritized" if opts.get("priority") else "standard"
    head = [base, job_id, name, now_ms, None, None, None, None, None]
    return base, script, msgpack.packb(head), data, to_msgpack(opts)


def add_deferred_duplicate(keys: QueueKeys, dedup_id: str, finished_id: str, now_ms: int) -> Call[str]:
    """bulltask's ``addDeferred``: add the duplicate that a newer BullMQ deferred; its id or ``""``; repeatable."""
    script_keys = (
        keys.deferred(dedup_id),
        keys.deduplication(dedup_id),
        *named_keys(keys, "active wait paused prioritized pc delayed marker meta events"),
    )
    return script_call(loader.bulltask_script("addDeferred"), script_keys, (keys.base, finished_id, now_ms), text)


def write_queue_meta(keys: QueueKeys, version: str, max_events: int) -> list[Call[Any]]:
    """Write the protocol version and the event stream's maximum length into ``meta``, unless they are set."""
    return [
        command("HSETNX", keys.meta, "version", version),
        command("HSETNX", keys.meta, "opts.maxLenEvents", max_events),
    ]


def register_as_sender(queues: Sequence[QueueKeys], now_ms: int) -> Call[None]:
    """Return the call that registers queues that jobs are sent to; a user without the permission need not."""
    pairs = [word for keys in queues for word in (now_ms, keys.name)]
    return OptionalCall(("ZADD", known_queues(queues[0].prefix), *pairs), nothing)


@value_class
class IdempotentWrite:
    """Identifies a write, which adds nothing twice if retried; Redis keeps its jobs' ids for ``ttl_ms``."""

    write_id: str
    ttl_ms: int


@value_class
class SendResult:
    """The result for one job: the stored job's id; ``duplicate`` if it existed, or this write has added it."""

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
    """Scan the ids of jobs that a write has added: the next cursor (``0`` at the end), and some ids, even twice."""

    def parse_reply(reply: Any) -> tuple[str, list[str]]:
        return text(reply[0]), texts(reply[1])

    return command("SSCAN", keys.added_ids(write_id), cursor, "COUNT", _SCAN_COUNT, parse_reply=parse_reply)
