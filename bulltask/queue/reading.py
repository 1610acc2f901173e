"""What asks about a queue: operations of :class:`bulltask.queue.queue.Queue`, each written once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal

from bulltask.errors import ConfigError, DecodeError
from bulltask.jobs import codec
from bulltask.jobs.states import JobState
from bulltask.jobs.stored_job import StoredJob
from bulltask.queue.answers import ClientInfo, DependencyPage, JobCounts, JobLogs, Metrics, RateLimit
from bulltask.queue.link import Link
from bulltask.transport.call import command
from bulltask.transport.operation import Operation, execute
from bulltask.transport.replies import text
from bulltask.transport.scripts import queue as queue_scripts
from bulltask.transport.scripts.flow import paginate, unsuccessful_page
from bulltask.transport.scripts.job import get_logs, get_state, read_job
from bulltask.transport.scripts.queue import get_counts

__all__ = [
    "ALL_STATES",
    "State",
    "count",
    "get_clients",
    "get_counts_of",
    "get_counts_per_priority",
    "get_deduplication_job_id",
    "get_dependencies",
    "get_global_concurrency",
    "get_global_rate_limit",
    "get_job",
    "get_job_ids",
    "get_job_logs",
    "get_job_state",
    "get_jobs",
    "get_meta",
    "get_metrics",
    "get_rate_limit_ttl",
    "is_maxed",
    "is_paused",
    "job_counts",
    "prometheus_text",
    "read_records",
    "states_of",
]

State = Literal[
    "waiting", "wait", "paused", "prioritized", "delayed", "waiting-children", "active", "completed", "failed"
]
"""Where jobs can be; ``waiting`` and ``wait`` are the same."""

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

READ_AT_ONCE: Final = 500
"""Hashes of jobs in one round trip."""


def states_of(said: Iterable[str]) -> list[str]:
    """Return the states that are meant, each once: none said means all, ``waiting`` means ``paused`` too (as in Node).

    Raises:
        ConfigError: there is no such state.
    """
    found: dict[str, None] = {}
    for state in [said] if isinstance(said, str) else said:
        if state not in ALL_STATES and state != "wait":
            raise ConfigError(f"there is no state {state!r}; there are {', '.join(ALL_STATES)}")
        found[str(state)] = None
    if "waiting" in found:
        found["paused"] = None
    return list(found) or list(ALL_STATES)


def get_job(link: Link, job_id: str) -> Operation[StoredJob | None]:
    """A job by its id."""
    return (yield from execute(read_job(link.keys, job_id)))


def read_records(link: Link, ids: Sequence[str]) -> Operation[list[StoredJob]]:
    """Jobs by their ids, in that order; those that are gone are left out."""
    keys, found = link.keys, list[StoredJob]()
    for start in range(0, len(ids), READ_AT_ONCE):
        calls = [read_job(keys, job_id) for job_id in ids[start : start + READ_AT_ONCE]]
        found += [record for record in (yield calls) if record is not None]
    return found


def get_job_ids(link: Link, states: Iterable[str], start: int, end: int, *, asc: bool) -> Operation[list[str]]:
    """Ids ``start`` to ``end`` of each state."""
    names = [_key_of(state) for state in states_of(states)]
    return (yield from execute(queue_scripts.get_ranges(link.keys, names, start, end, asc=asc)))


def get_jobs(link: Link, states: Iterable[str], start: int, end: int, *, asc: bool) -> Operation[list[StoredJob]]:
    """Jobs ``start`` to ``end`` of each state."""
    ids = yield from get_job_ids(link, states, start, end, asc=asc)
    return (yield from read_records(link, ids))


def get_counts_of(link: Link, states: Iterable[str]) -> Operation[dict[str, int]]:
    """How many jobs are in each state."""
    names = states_of(states)
    counts = yield from execute(get_counts(link.keys, [_key_of(state) for state in names]))
    return dict(zip(names, counts.values(), strict=True))


def count(link: Link) -> Operation[int]:
    """How many jobs were not taken yet."""
    counts = yield from get_counts_of(link, ("waiting", "paused", "delayed", "prioritized", "waiting-children"))
    return sum(counts.values())


def job_counts(link: Link) -> Operation[JobCounts]:
    """The five figures of seed 003."""
    counts = yield from get_counts_of(link, ())
    return JobCounts(
        waiting=counts["waiting"] + counts["paused"] + counts["prioritized"],
        active=counts["active"],
        completed=counts["completed"],
        failed=counts["failed"],
        delayed=counts["delayed"],
    )


def get_counts_per_priority(link: Link, priorities: Sequence[int]) -> Operation[dict[int, int]]:
    """How many jobs wait with each priority."""
    wanted = list(dict.fromkeys(priorities))
    if not wanted:
        return {}
    return (yield from execute(queue_scripts.get_counts_per_priority(link.keys, wanted)))


def get_job_state(link: Link, job_id: str) -> Operation[JobState]:
    """Where a job is."""
    return (yield from execute(get_state(link.keys, job_id)))


def get_job_logs(link: Link, job_id: str, start: int, end: int, *, asc: bool) -> Operation[JobLogs]:
    """Lines of a job's log."""
    lines, count = yield get_logs(link.keys, job_id, start, end, asc=asc)
    return JobLogs(tuple(lines), count)


def get_metrics(link: Link, kind: str, start: int, end: int) -> Operation[Metrics]:
    """How many jobs ended."""
    if kind not in {"completed", "failed"}:
        raise ConfigError(f"there are metrics of completed and failed jobs, not of {kind!r}")
    said = yield from execute(queue_scripts.get_metrics(link.keys, kind, start, end))
    return Metrics(said.count, said.previous_ms, said.previous_count, said.data, said.points)


def get_clients(link: Link, *, events: bool) -> Operation[list[ClientInfo]]:
    """Connections of workers, or of event listeners."""
    name = link.keys.client_name()
    marker = f"{name}:w:"
    wanted = queue_scripts.list_clients(f"{name}:qe") if events else queue_scripts.list_clients(name, marker)
    rows = yield from execute(wanted)
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


def get_meta(link: Link) -> Operation[dict[str, str]]:
    """All fields of ``meta``."""
    return (yield from execute(queue_scripts.get_meta(link.keys)))


def is_paused(link: Link) -> Operation[bool]:
    """Whether ``meta`` has the field; its value does not matter."""
    return (yield from execute(command("HEXISTS", link.keys.meta, "paused", parse_reply=bool)))


def is_maxed(link: Link) -> Operation[bool]:
    """Whether the global concurrency is used up."""
    return (yield from execute(queue_scripts.is_maxed(link.keys)))


def get_global_concurrency(link: Link) -> Operation[int | None]:
    """How many jobs may be active at once."""
    said: bytes | None = yield from execute(command("HGET", link.keys.meta, "concurrency"))
    return int(float(said)) if said else None


def get_global_rate_limit(link: Link) -> Operation[RateLimit | None]:
    """How many jobs may be taken in which time."""
    said: list[bytes | None] = yield from execute(command("HMGET", link.keys.meta, "max", "duration"))
    most, duration_ms = said
    return RateLimit(int(float(most)), float(duration_ms) / 1000) if most and duration_ms else None


def get_rate_limit_ttl(link: Link, max_jobs: int) -> Operation[float]:
    """Seconds until the queue's rate limit ends; 0 when there is none."""
    return max(0, (yield from execute(queue_scripts.get_rate_limit_ttl(link.keys, max_jobs)))) / 1000


def get_deduplication_job_id(link: Link, dedup_id: str) -> Operation[str | None]:
    """Which job owns a deduplication id."""
    owner: bytes | None = yield from execute(command("GET", link.keys.deduplication(dedup_id)))
    return None if owner is None else text(owner)


def get_dependencies(link: Link, parent_id: str, kind: str, start: int, end: int) -> Operation[DependencyPage]:
    """Children ``start`` to ``end`` of a job, in Redis' own order; those that fail it: in that of their failing."""
    keys = link.keys
    if kind == "failed":
        failed, total = yield unsuccessful_page(keys, parent_id, start, end)
        return DependencyPage(dict.fromkeys(failed), total)
    places = {"processed": keys.processed, "pending": keys.dependencies, "ignored": keys.ignored}
    if kind not in places:
        raise ConfigError(f"kind must be processed, pending, ignored or failed, not {kind!r}")
    items, cursor, total = dict[str, Any](), ("0", 0), 0
    while True:
        call = paginate(places[kind](parent_id), start + len(items), end, cursor)
        cursor, part, total = yield from execute(call)
        items.update(_child(item, is_json=kind == "processed") for item in part)
        if cursor[0] == "0" or (0 <= end < start + len(items)):
            return DependencyPage(items, total)


def prometheus_text(link: Link, labels: Mapping[str, str]) -> Operation[str]:
    """The counts of all states in Prometheus' text format, under Node's name of the metric."""
    counts = yield from get_counts_of(link, ())
    more = "".join(f', {name}="{value}"' for name, value in labels.items())
    lines = [
        f'bullmq_job_count{{queue="{link.keys.name}", state="{state}"{more}}} {count}'
        for state, count in counts.items()
    ]
    head = ["# HELP bullmq_job_count Number of jobs in the queue by state", "# TYPE bullmq_job_count gauge"]
    return "\n".join([*head, *lines])


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
