"""Operations that read a queue, with several calls if necessary."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from bulltask.errors import ConfigError, DecodeError
from bulltask.jobs import codec
from bulltask.jobs.stored_job import StoredJob
from bulltask.queue.context import QueueContext
from bulltask.queue.responses import ChildFailures, ClientInfo, Dependencies, DependencyPage, JobLogs
from bulltask.transport.operation import Operation, execute
from bulltask.transport.replies import text
from bulltask.transport.scripts import flow as flow_scripts
from bulltask.transport.scripts import queue as queue_scripts
from bulltask.transport.scripts.job import get_logs, read_job

__all__ = [
    "ALL_STATES",
    "get_clients",
    "get_dependencies",
    "get_dependency_page",
    "get_failed_children",
    "get_job_counts",
    "get_job_ids",
    "get_job_logs",
    "get_jobs",
    "read_jobs",
    "states_of",
]

ALL_STATES: Final[tuple[str, ...]] = (
    "active",
    "completed",
    "delayed",
    "failed",
    "paused",
    "prioritized",
    "waiting",
    "waiting-children",
)
_JOBS_PER_ROUND_TRIP: Final = 500
_IDS_PER_CALL: Final = 5_000


def states_of(names: Iterable[str]) -> list[str]:
    """Return the named states, each once; without names, all. ``waiting`` includes ``paused`` (as in Node).

    Raises:
        ConfigError: A state is unknown.
    """
    states: dict[str, None] = {}
    for state in [names] if isinstance(names, str) else names:
        if state not in ALL_STATES and state != "wait":
            raise ConfigError(f"unknown state {state!r:.200}; use {', '.join(ALL_STATES)}")
        states[str(state)] = None
    if "waiting" in states:
        states["paused"] = None
    return list(states) or list(ALL_STATES)


def read_jobs(context: QueueContext, ids: Sequence[str]) -> Operation[list[StoredJob]]:
    """Read jobs by their ids, in that order; removed jobs are left out."""
    keys, jobs = context.keys, list[StoredJob]()
    for start in range(0, len(ids), _JOBS_PER_ROUND_TRIP):
        calls = [read_job(keys, job_id) for job_id in ids[start : start + _JOBS_PER_ROUND_TRIP]]
        jobs += [stored for stored in (yield calls) if stored is not None]
    return jobs


def get_job_ids(
    context: QueueContext, states: Iterable[str], start: int, end: int, *, asc: bool
) -> Operation[list[str]]:
    """Read the ids of jobs ``start`` to ``end`` in each state, a page at a time if there are many."""
    found: dict[str, list[str]] = {_key_of(state): [] for state in states_of(states)}
    is_paged = start >= 0 and end >= -1
    # Jobs leave the first places of an ascending order, so a later page would miss some; the descending order grows
    # there, so that a later page repeats some.
    is_reversed = asc and (start, end) == (0, -1)
    left = list(found)
    while left:
        last = start + _IDS_PER_CALL - 1
        if not is_paged or 0 <= end < last:
            last = end
        call = queue_scripts.get_ranges(context.keys, left, start, last, asc=asc and not is_reversed)
        pages = yield from execute(call)
        for state, ids in zip(left, pages, strict=True):
            found[state] += ids
        start = last + 1
        has_more = is_paged and (end == -1 or start <= end)
        left = [state for state, ids in zip(left, pages, strict=True) if has_more and len(ids) == _IDS_PER_CALL]
    return list(dict.fromkeys(job for ids in found.values() for job in (reversed(ids) if is_reversed else ids)))


def get_jobs(
    context: QueueContext, states: Iterable[str], start: int, end: int, *, asc: bool
) -> Operation[list[StoredJob]]:
    """Read jobs ``start`` to ``end`` in each state."""
    ids = yield from get_job_ids(context, states, start, end, asc=asc)
    return (yield from read_jobs(context, ids))


def get_job_counts(context: QueueContext, states: Iterable[str]) -> Operation[dict[str, int]]:
    """Count the jobs in each state."""
    names = states_of(states)
    counts = yield from execute(queue_scripts.get_counts(context.keys, [_key_of(state) for state in names]))
    return dict(zip(names, counts.values(), strict=True))


def get_job_logs(context: QueueContext, job_id: str, start: int, end: int, *, asc: bool) -> Operation[JobLogs]:
    """Read lines of a job's log."""
    lines, count = yield get_logs(context.keys, job_id, start, end, asc=asc)
    return JobLogs(tuple(lines), count)


def get_clients(context: QueueContext, *, events: bool) -> Operation[list[ClientInfo]]:
    """List the connections of workers, or of event readers."""
    name = context.keys.client_name()
    marker = f"{name}:w:"
    rows = yield from execute(
        queue_scripts.list_clients(f"{name}:qe") if events else queue_scripts.list_clients(name, marker)
    )
    return [
        ClientInfo(
            row.name[len(marker) :] if row.name.startswith(marker) else "",
            row.name,
            row.address,
            int(row.fields.get("age", 0)),
            int(row.fields.get("idle", 0)),
            row.fields,
        )
        for row in rows
    ]


def get_dependencies(context: QueueContext, parent_id: str) -> Operation[Dependencies]:
    """Read all children of a job, in one transaction."""
    processed, unprocessed, ignored, failed = (yield flow_scripts.all_dependencies(context.keys, parent_id))[-1]
    return Dependencies(processed, tuple(unprocessed), ignored, tuple(failed))


def get_failed_children(context: QueueContext, parent_id: str) -> Operation[ChildFailures]:
    """Read a job's failed child jobs, ignored or not."""
    keys = context.keys
    ignored, failed = yield [
        flow_scripts.ignored_failures(keys, parent_id),
        flow_scripts.unsuccessful_children(keys, parent_id),
    ]
    return ChildFailures(ignored, tuple(failed))


def get_dependency_page(
    context: QueueContext, parent_id: str, kind: str, start: int, end: int
) -> Operation[DependencyPage]:
    """Read a job's child jobs ``start`` to ``end``: failed jobs in order of failure, others in Redis' order."""
    keys = context.keys
    if kind == "failed":
        failed, total = yield flow_scripts.unsuccessful_page(keys, parent_id, start, end)
        return DependencyPage(dict.fromkeys(failed), total)
    collections = {"processed": keys.processed, "pending": keys.dependencies, "ignored": keys.ignored}
    if kind not in collections:
        raise ConfigError(f"kind must be processed, pending, ignored or failed, not {kind!r:.200}")
    items, cursor, total = dict[str, Any](), ("0", 0), 0
    while True:
        call = flow_scripts.paginate(collections[kind](parent_id), start + len(items), end, cursor)
        cursor, part, total = yield from execute(call)
        items.update(_child(item, is_json=kind == "processed") for item in part)
        if cursor[0] == "0" or (0 <= end < start + len(items)):
            return DependencyPage(items, total)


def _key_of(state: str) -> str:
    return "wait" if state == "waiting" else state


def _child(item: Any, *, is_json: bool) -> tuple[str, Any]:
    if not isinstance(item, list):
        return text(item), None
    key, value = item
    if not is_json:
        return text(key), codec.decode_text(value)
    try:
        return text(key), codec.decode(value)
    except DecodeError:
        return text(key), codec.decode_text(value)
