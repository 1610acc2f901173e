"""The scripts that act on one job from outside a worker, or read it; packing only (PROTOCOL 3.3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from bulltask.errors import DecodeError
from bulltask.jobs import codec
from bulltask.jobs.record import JobRecord
from bulltask.lua import loader
from bulltask.transport.call import Arg, Call, command, script_call
from bulltask.transport.keys import QueueKeys
from bulltask.transport.replies import raise_for, text, texts

__all__ = [
    "DEPENDENCY_KINDS",
    "all_dependencies",
    "change_delay",
    "change_priority",
    "children_values",
    "clear_logs",
    "extend_lock",
    "get_dependency_counts",
    "get_logs",
    "ignored_failures",
    "paginate",
    "promote",
    "read_job",
    "remove_child_dependency",
    "remove_deduplication_key",
    "remove_unprocessed_children",
    "reprocess_job",
    "retry_child",
    "unsuccessful_children",
    "unsuccessful_page",
    "update_data",
]

DEPENDENCY_KINDS: Final = ("processed", "unprocessed", "ignored", "failed")


def read_job(keys: QueueKeys, job_id: str) -> Call[JobRecord | None]:
    """The job's hash, ``None`` when there is none."""

    def judge(reply: Any) -> JobRecord | None:
        return JobRecord.from_hash(keys.queue, job_id, reply) if reply else None

    return command("HGETALL", keys.job(job_id), judge=judge)


def update_data(keys: QueueKeys, job_id: str, data: bytes) -> Call[None]:
    """``updateData``: replace the job's data (JSON)."""
    return script_call(loader.official("updateData"), (keys.job(job_id),), (data,), _refusal(keys, job_id))


def promote(keys: QueueKeys, job_id: str) -> Call[None]:
    """``promote``: a delayed job waits now."""
    places = (
        keys.delayed,
        keys.wait,
        keys.paused,
        keys.meta,
        keys.prioritized,
        keys.active,
        keys.pc,
        keys.events,
        keys.marker,
    )
    return script_call(loader.official("promote"), places, (keys.base, job_id), _refusal(keys, job_id))


def change_delay(keys: QueueKeys, job_id: str, delay_ms: int, now_ms: int) -> Call[None]:
    """``changeDelay``: a delayed job is due ``delay_ms`` after ``now_ms``."""
    places = (keys.delayed, keys.meta, keys.marker, keys.events)
    args = (delay_ms, now_ms, job_id, keys.job(job_id))
    return script_call(loader.official("changeDelay"), places, args, _refusal(keys, job_id))


def change_priority(keys: QueueKeys, job_id: str, priority: int, *, lifo: bool) -> Call[None]:
    """``changePriority``: store another priority, and move the job if it waits; ``lifo``: first of its class."""
    places = (keys.wait, keys.paused, keys.meta, keys.prioritized, keys.active, keys.pc, keys.marker)
    args = (priority, keys.base, job_id, int(lifo))
    return script_call(loader.official("changePriority"), places, args, _refusal(keys, job_id))


def reprocess_job(keys: QueueKeys, job_id: str, state: str, *, lifo: bool) -> Call[None]:
    """``reprocessJob``: a job that ended as ``state`` waits again."""
    outcome = "failedReason" if state == "failed" else "returnvalue"
    args = (job_id, _push(lifo=lifo), outcome, state)
    return script_call(loader.official("reprocessJob"), _retry_keys(keys, job_id, state), args, _refusal(keys, job_id))


def retry_child(keys: QueueKeys, job_id: str, *, lifo: bool) -> Call[None]:
    """Own ``retryChild``: :func:`reprocess_job` for a failed job that has a parent."""
    args = (job_id, _push(lifo=lifo))
    return script_call(loader.own("retryChild"), _retry_keys(keys, job_id, "failed"), args, _refusal(keys, job_id))


def _push(*, lifo: bool) -> str:
    return "RPUSH" if lifo else "LPUSH"


def _retry_keys(keys: QueueKeys, job_id: str, state: str) -> tuple[str, ...]:
    return (
        keys.job(job_id),
        keys.events,
        keys.base + state,
        keys.wait,
        keys.meta,
        keys.paused,
        keys.active,
        keys.marker,
    )


def extend_lock(keys: QueueKeys, job_id: str, token: str, lock_ms: int) -> Call[bool]:
    """``extendLock``: keep the lock for ``lock_ms`` from now; false when it is not held with ``token``."""
    args = (token, lock_ms, job_id)
    return script_call(loader.official("extendLock"), (keys.lock(job_id), keys.stalled), args, _is_one)


def remove_child_dependency(keys: QueueKeys, job_id: str, parent_key: str) -> Call[bool]:
    """``removeChildDependency``: the parent waits for this job no more; false when it did not."""

    def judge(reply: Any) -> bool:
        raise_for(reply, job_id, keys.name)
        return int(reply) == 0

    args = (keys.job(job_id), parent_key)
    return script_call(loader.official("removeChildDependency"), (keys.base,), args, judge)


def remove_unprocessed_children(keys: QueueKeys, job_id: str) -> Call[None]:
    """``removeUnprocessedChildren``: remove the job's children that are neither finished nor locked."""
    args = (keys.base, job_id)
    return script_call(
        loader.official("removeUnprocessedChildren"), (keys.job(job_id), keys.meta), args, lambda _: None
    )


def remove_deduplication_key(keys: QueueKeys, dedup_id: str, job_id: str) -> Call[bool]:
    """``removeDeduplicationKey``: free the id if this job owns it; false when it does not."""
    return script_call(loader.official("removeDeduplicationKey"), (keys.deduplication(dedup_id),), (job_id,), _is_one)


def get_logs(keys: QueueKeys, job_id: str, start: int, end: int, *, asc: bool) -> list[Call[Any]]:
    """Two calls: lines ``start`` to ``end`` of the job's log, from its beginning or its end; how many there are."""

    def judge(reply: Any) -> list[str]:
        lines = [codec.decode_text(line) for line in reply]
        return lines if asc else lines[::-1]

    first, last = (start, end) if asc else (-(end + 1), -(start + 1))
    return [
        command("LRANGE", keys.logs(job_id), first, last, judge=judge),
        command("LLEN", keys.logs(job_id), judge=int),
    ]


def clear_logs(keys: QueueKeys, job_id: str, keep: int) -> Call[None]:
    """Remove the job's log lines but the newest ``keep``."""
    if keep:
        return command("LTRIM", keys.logs(job_id), -keep, -1, judge=lambda _: None)
    return command("DEL", keys.logs(job_id), judge=lambda _: None)


def get_dependency_counts(keys: QueueKeys, job_id: str, kinds: Sequence[str]) -> Call[dict[str, int]]:
    """``getDependencyCounts``: how many children of each of ``kinds`` the job has."""

    def judge(reply: Any) -> dict[str, int]:
        return {kind: int(count) for kind, count in zip(kinds, reply, strict=True)}

    places = (keys.processed(job_id), keys.dependencies(job_id), keys.ignored(job_id), keys.unsuccessful(job_id))
    return script_call(loader.official("getDependencyCounts"), places, tuple(kinds), judge)


def children_values(keys: QueueKeys, job_id: str) -> Call[dict[str, Any]]:
    """The return values of the job's completed children, by their full key."""
    return command("HGETALL", keys.processed(job_id), judge=_values)


def ignored_failures(keys: QueueKeys, job_id: str) -> Call[dict[str, str]]:
    """Why children failed whose failure is ignored, by their full key."""
    return command("HGETALL", keys.ignored(job_id), judge=_reasons)


def unsuccessful_children(keys: QueueKeys, job_id: str) -> Call[list[str]]:
    """Full keys of the children whose failure fails the job."""
    return command("ZRANGE", keys.unsuccessful(job_id), 0, -1, judge=texts)


def unsuccessful_page(keys: QueueKeys, job_id: str, start: int, end: int) -> list[Call[Any]]:
    """Two calls: :func:`unsuccessful_children` from ``start`` to ``end``; how many there are in all."""
    key = keys.unsuccessful(job_id)
    return [command("ZRANGE", key, start, end, judge=texts), command("ZCARD", key, judge=int)]


def all_dependencies(keys: QueueKeys, job_id: str) -> list[Call[Any]]:
    """Calls whose last result is a tuple of all four kinds, at one moment: a child that ends meanwhile is in one."""

    def judge(reply: Any) -> tuple[dict[str, Any], list[str], dict[str, str], list[str]]:
        processed, unprocessed, ignored, failed = reply
        return _values(processed), texts(unprocessed), _reasons(ignored), texts(failed)

    return [
        command("MULTI"),
        command("HGETALL", keys.processed(job_id)),
        command("SMEMBERS", keys.dependencies(job_id)),
        command("HGETALL", keys.ignored(job_id)),
        command("ZRANGE", keys.unsuccessful(job_id), 0, -1),
        command("EXEC", judge=judge),
    ]


def paginate(key: str, start: int, end: int, cursor: tuple[str, int]) -> Call[tuple[tuple[str, int], list[Any], int]]:
    """``paginate``: members of a set or hash from ``start`` to ``end``.

    The result is the cursor to go on with (``"0"``: this was all), the members (of a hash: name and value), and how
    many there are in all.
    """

    def judge(reply: Any) -> tuple[tuple[str, int], list[Any], int]:
        # For a key that does not exist the script leaves the last part out.
        following, offset, items, total = reply[:4]
        return (text(following), int(offset)), list(items), int(total)

    args: tuple[Arg, ...] = (start, end, cursor[0], cursor[1], 5)
    return script_call(loader.official("paginate"), (key,), args, judge)


def _values(reply: Any) -> dict[str, Any]:
    return {key: _value(key, value) for key, value in _pairs(reply)}


def _value(key: str, value: bytes) -> Any:
    try:
        return codec.decode(value, what=f"return value of child {key}")
    except DecodeError:
        return codec.decode_text(value)


def _reasons(reply: Any) -> dict[str, str]:
    return {key: codec.decode_text(value) for key, value in _pairs(reply)}


def _pairs(reply: Any) -> list[tuple[str, bytes]]:
    return [(text(key), value) for key, value in zip(reply[::2], reply[1::2], strict=True)]


def _is_one(reply: Any) -> bool:
    return int(reply) == 1


def _refusal(keys: QueueKeys, job_id: str) -> Any:
    def judge(reply: Any) -> None:
        raise_for(reply, job_id, keys.name)

    return judge
