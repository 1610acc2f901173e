"""Read a Bull queue without changing it: its keys, its jobs page by page, its workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from bulltask.errors import BrokerAuthError
from bulltask.migrate.bull_job import BullJob
from bulltask.migrate.detection import JOB_KEYS, QueueInfo
from bulltask.queue.schedulers import all_rows
from bulltask.transport.call import Call, command
from bulltask.transport.client_types import SyncClient
from bulltask.transport.keys import BullKeys, QueueKeys
from bulltask.transport.operation import run_sync
from bulltask.transport.scripts.bull import ScoredIds, in_same_slot, key_type, page_of, read_hash, size_of
from bulltask.transport.scripts.flow import is_cluster
from bulltask.transport.scripts.queue import get_counts, get_meta, list_clients

__all__ = ["PAGE_SIZE", "across_slots", "count_target", "inspect_queue", "iter_jobs", "key_type_of", "read_jobs"]

PAGE_SIZE: Final = 200
"""Jobs per round trip."""

_TYPED: Final = (
    *JOB_KEYS,
    "priority",
    "meta-paused",
    "meta",
    "events",
    "marker",
    "prioritized",
    "pc",
    "waiting-children",
    "repeat",
)
_STATES: Final = ("wait", "paused", "prioritized", "delayed", "active", "completed", "failed", "waiting-children")
_KINDS: Final = {"wait": "list", "paused": "list", "active": "list"}


def key_type_of(info: QueueInfo, suffix: str) -> str:
    """Return the Redis type of a key that contains jobs; for finished jobs, it depends on Bull's version."""
    return info.types[suffix] if info.types[suffix] == "set" else _KINDS.get(suffix, "zset")


def across_slots(client: SyncClient, source: BullKeys, target: QueueKeys) -> bool:
    """Return whether the server is a Redis Cluster and no script can access both queues."""
    if in_same_slot(source, target):
        return False
    try:
        return client.run(is_cluster())
    except BrokerAuthError:  # INFO is not permitted: the scripts will fail on a cluster
        return False


def inspect_queue(client: SyncClient, keys: BullKeys) -> QueueInfo:
    """Return what is known about a queue without reading its jobs."""
    key_types = client.run_many([key_type(keys.base + suffix) for suffix in _TYPED])
    types = dict(zip(_TYPED, key_types, strict=True))
    sizes = [size_of(keys.base + suffix, types[suffix]) for suffix in JOB_KEYS]
    meta = client.run(get_meta(keys)) if types["meta"] == "hash" else {}
    if "data" in meta:
        meta = {}  # a Bull job with the id "meta"
    return QueueInfo(
        types=types,
        sizes=dict(zip(JOB_KEYS, client.run_many(sizes), strict=True)),
        meta=meta,
        repeats=_repeats(client, keys) if types["repeat"] == "zset" else (),
        workers=_workers(client, keys),
    )


def iter_jobs(client: SyncClient, keys: BullKeys, info: QueueInfo) -> Iterator[tuple[str, list[BullJob]]]:
    """Iterate over all jobs; yield each page of jobs with the suffix of its key."""
    for suffix in JOB_KEYS:
        first = 0
        while page := client.run(page_of(keys.base + suffix, key_type_of(info, suffix), first, PAGE_SIZE)):
            for start in range(0, len(page), PAGE_SIZE):  # a set is read as a single page
                yield suffix, read_jobs(client, keys, suffix, page[start : start + PAGE_SIZE])
            first += len(page)


def read_jobs(client: SyncClient, keys: BullKeys, suffix: str, page: ScoredIds) -> list[BullJob]:
    """Read jobs by id; a job without a hash has no fields."""
    calls: list[Call[Any]] = [read_hash(keys.job(job_id)) for job_id, _ in page]
    calls += [command("EXISTS", keys.lock(job_id), parse_reply=bool) for job_id, _ in page]
    replies = client.run_many(calls)
    hashes, locks = replies[: len(page)], replies[len(page) :]
    return [
        BullJob(id=job_id, key_suffix=suffix, score=score, fields=fields, locked=locked)
        for (job_id, score), fields, locked in zip(page, hashes, locks, strict=True)
    ]


def count_target(client: SyncClient, keys: QueueKeys) -> int:
    """Return the number of jobs in the target queue."""
    return sum(client.run(get_counts(keys, _STATES)).values())


def _repeats(client: SyncClient, keys: BullKeys) -> list[tuple[str, int]]:
    """Return Bull's repeatable jobs, which have no hash, unlike BullMQ's schedulers in the same sorted set."""
    rows = run_sync(client, all_rows(keys))
    hashes = client.run_many([command("EXISTS", keys.scheduler(key), parse_reply=bool) for key, _ in rows])
    return [row for row, is_scheduler in zip(rows, hashes, strict=True) if not is_scheduler]


def _workers(client: SyncClient, keys: BullKeys) -> Sequence[str] | None:
    """Return the workers, recognized by the names of their connections; senders' connections have no name."""
    name = keys.client_name()
    try:
        return [f"{row.name} at {row.address}" for row in client.run(list_clients(name, f"{name}:w:"))]
    except BrokerAuthError:  # CLIENT LIST is not permitted
        return None
