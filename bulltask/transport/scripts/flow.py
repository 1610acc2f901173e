"""Calls that check a flow before it is added, and read a stored flow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from bulltask.jobs import codec
from bulltask.jobs.clock import value_class
from bulltask.jobs.errors import DecodeError
from bulltask.jobs.fields import ERROR_FIELD
from bulltask.jobs.names import address_of, name_in_app
from bulltask.jobs.stored_job import FAILED_JOB_FIELD, FailedJob
from bulltask.lua import loader
from bulltask.transport.call import (
    Arg,
    Call,
    QueueKeys,
    by_name,
    command,
    nothing,
    result_parser,
    script_call,
    text,
    texts,
)

__all__ = [
    "DEPENDENCY_KINDS",
    "KINDS",
    "Children",
    "ExistingJob",
    "add_dependency",
    "all_dependencies",
    "child_failure",
    "children",
    "children_values",
    "existing_job",
    "get_dependency_counts",
    "ignored_failures",
    "is_cluster",
    "key_exists",
    "paginate",
    "remove_child_dependency",
    "remove_unprocessed_children",
    "unsuccessful_children",
    "unsuccessful_page",
]

KINDS: Final = ("processed", "unprocessed", "failed", "ignored")
"""States of a child job, in the order in which Node's ``getFlow`` lists them."""

Children = tuple[tuple[str, int], list[str], int]
"""The cursor to continue with (``"0"`` at the end), full keys of child jobs, and their total number."""

DEPENDENCY_KINDS: Final = ("processed", "unprocessed", "ignored", "failed")


@value_class
class ExistingJob:
    """Whether a job with a chosen id exists, and the full key of the parent that is waiting for it, or ``""``."""

    exists: bool
    parent_key: str


def existing_job(keys: QueueKeys, job_id: str) -> list[Call[Any]]:
    """Return two calls: read the job's :class:`ExistingJob`, and whether it has completed."""

    def parse_reply(reply: Any) -> ExistingJob:
        name, parent_key = reply
        return ExistingJob(name is not None, "" if parent_key is None else text(parent_key))

    return [
        command("HMGET", keys.job(job_id), "name", "parentKey", parse_reply=parse_reply),
        command("ZSCORE", keys.completed, job_id, parse_reply=lambda reply: reply is not None),
    ]


def add_dependency(keys: QueueKeys, job_id: str, other: QueueKeys, other_id: str) -> Call[bool]:
    """Make a job that was added as a parent also wait for a job that is not its child.

    BullMQ's scripts do not remove this dependency: when a job finishes, they notify only its own parent. See
    :func:`bulltask.transport.scripts.move.with_dependents`.
    """
    return command("SADD", keys.dependencies(job_id), other.job(other_id), parse_reply=bool)


def key_exists(key: str) -> Call[bool]:
    """Return True if the key exists."""
    return command("EXISTS", key, parse_reply=bool)


def was_added(keys: QueueKeys, job_id: str, since_ms: int) -> Call[bool]:
    """Return True if the event stream shows that the job was added at or after ``since_ms``; it may be gone already."""

    def parse_reply(reply: Any) -> bool:
        raw_id = job_id.encode("utf-8", "surrogateescape")
        entries = (dict(zip(flat[::2], flat[1::2], strict=True)) for _, flat in reply)
        return any(fields.get(b"event") == b"added" and fields.get(b"jobId") == raw_id for fields in entries)

    return command("XRANGE", keys.events, max(0, since_ms), "+", parse_reply=parse_reply)


def is_cluster() -> Call[bool]:
    """Return True if the server is a node of a Redis Cluster."""
    return command("INFO", "cluster", parse_reply=lambda reply: b"cluster_enabled:1" in reply)


def children(keys: QueueKeys, job_id: str, kind: str, max_children: int, cursor: tuple[str, int]) -> Call[Children]:
    """Read up to ``max_children`` child jobs of a job that are in one of the states :data:`KINDS`."""
    if kind == "failed":
        return command(
            "ZRANGE",
            keys.unsuccessful(job_id),
            0,
            max_children - 1,
            parse_reply=lambda reply: (("0", 0), texts(reply), len(reply)),
        )
    script_keys = {
        "processed": keys.processed(job_id),
        "unprocessed": keys.dependencies(job_id),
        "ignored": keys.ignored(job_id),
    }
    page = paginate(script_keys[kind], 0, max_children - 1, cursor)

    def parse_reply(reply: Any) -> Children:
        following, items, total = page.parse_reply(reply)
        return following, [text(item[0] if isinstance(item, list) else item) for item in items], total

    return Call(page.args, parse_reply, page.script)


def remove_child_dependency(keys: QueueKeys, job_id: str, parent_key: str) -> Call[bool]:
    """``removeChildDependency``: the parent no longer waits for this job. Returns False if it did not wait for it."""
    args = (keys.job(job_id), parent_key)
    parse_reply = result_parser(keys, job_id, lambda reply: int(reply) == 0)
    return script_call(loader.official_script("removeChildDependency"), (keys.base,), args, parse_reply)


def remove_unprocessed_children(keys: QueueKeys, job_id: str) -> Call[None]:
    """``removeUnprocessedChildren``: remove the job's child jobs that are neither finished nor locked."""
    args = (keys.base, job_id)
    return script_call(
        loader.official_script("removeUnprocessedChildren"), (keys.job(job_id), keys.meta), args, nothing
    )


def get_dependency_counts(keys: QueueKeys, job_id: str, kinds: Sequence[str]) -> Call[dict[str, int]]:
    """``getDependencyCounts``: count the job's child jobs by kind."""

    def parse_reply(reply: Any) -> dict[str, int]:
        return {kind: int(count) for kind, count in zip(kinds, reply, strict=True)}

    script_keys = (keys.processed(job_id), keys.dependencies(job_id), keys.ignored(job_id), keys.unsuccessful(job_id))
    return script_call(loader.official_script("getDependencyCounts"), script_keys, tuple(kinds), parse_reply)


def children_values(keys: QueueKeys, job_id: str) -> Call[dict[str, Any]]:
    """Read the return values of the job's completed child jobs, by their full key."""
    return command("HGETALL", keys.processed(job_id), parse_reply=_values)


def child_failure(key: str, prefix: str, *, hash_tag: bool) -> Call[tuple[str, str, FailedJob, str] | None]:
    """Read why a child job failed: the reason, the last traceback, the job that failed first, the stored exception.

    The result is ``None`` if the job was removed. ``hash_tag`` says whether queue names have braces in Redis only.
    """

    def parse_reply(reply: Any) -> tuple[str, str, FailedJob, str] | None:
        name, reason, stacktrace, first, error = reply
        if reason is None:
            return None
        traces = codec.decode(stacktrace or b"[]")
        trace = traces[-1] if isinstance(traces, list) and traces and isinstance(traces[-1], str) else ""
        _, queue, job_id = address_of(key, prefix)
        queue = name_in_app(queue, hash_tag=hash_tag)
        failed = None if first is None else FailedJob.from_json(text(first))
        failed = failed or FailedJob(job_id, codec.decode_text(name), queue)
        return codec.decode_text(reason), trace, failed, codec.decode_text(error)

    fields = ("name", "failedReason", "stacktrace", FAILED_JOB_FIELD, ERROR_FIELD)
    return command("HMGET", key, *fields, parse_reply=parse_reply)


def ignored_failures(keys: QueueKeys, job_id: str) -> Call[dict[str, str]]:
    """Read the failure reasons for the child jobs whose failure is ignored, by their full key."""
    return command("HGETALL", keys.ignored(job_id), parse_reply=_reasons)


def unsuccessful_children(keys: QueueKeys, job_id: str) -> Call[list[str]]:
    """List the full keys of the child jobs whose failure fails the job."""
    return command("ZRANGE", keys.unsuccessful(job_id), 0, -1, parse_reply=texts)


def unsuccessful_page(keys: QueueKeys, job_id: str, start: int, end: int) -> list[Call[Any]]:
    """Return two calls: read :func:`unsuccessful_children` from ``start`` to ``end``; count all of them."""
    key = keys.unsuccessful(job_id)
    return [command("ZRANGE", key, start, end, parse_reply=texts), command("ZCARD", key, parse_reply=int)]


def all_dependencies(keys: QueueKeys, job_id: str) -> list[Call[Any]]:
    """Return the calls of a transaction whose last result contains the child jobs of all four kinds, each once."""

    def parse_reply(reply: Any) -> tuple[dict[str, Any], list[str], dict[str, str], list[str]]:
        processed, unprocessed, ignored, failed = reply
        return _values(processed), texts(unprocessed), _reasons(ignored), texts(failed)

    return [
        command("MULTI"),
        command("HGETALL", keys.processed(job_id)),
        command("SMEMBERS", keys.dependencies(job_id)),
        command("HGETALL", keys.ignored(job_id)),
        command("ZRANGE", keys.unsuccessful(job_id), 0, -1),
        command("EXEC", parse_reply=parse_reply),
    ]


def paginate(key: str, start: int, end: int, cursor: tuple[str, int]) -> Call[tuple[tuple[str, int], list[Any], int]]:
    """``paginate``: read members of a set or hash from ``start`` to ``end``.

    Returns the cursor to continue with (``"0"`` at the end), the members (of a hash: name and value), and how many
    there are.
    """

    def parse_reply(reply: Any) -> tuple[tuple[str, int], list[Any], int]:
        # For a key that does not exist the script omits the last part.
        following, offset, items, total = reply[:4]
        return (text(following), int(offset)), list(items), int(total)

    args: tuple[Arg, ...] = (start, end, cursor[0], cursor[1], 5)
    return script_call(loader.official_script("paginate"), (key,), args, parse_reply)


def _values(reply: Any) -> dict[str, Any]:
    return {key: _value(key, value) for key, value in by_name(reply).items()}


def _value(key: str, value: bytes) -> Any:
    try:
        return codec.decode(value, what=f"return value of child job {key}")
    except DecodeError:
        return codec.decode_text(value)


def _reasons(reply: Any) -> dict[str, str]:
    return {key: codec.decode_text(value) for key, value in by_name(reply).items()}
