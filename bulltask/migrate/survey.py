"""Reading a queue of Bull: its keys, its jobs page by page, who works on it. Nothing is changed here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from bulltask.errors import BrokerAuthError
from bulltask.migrate.bull_job import BullJob
from bulltask.migrate.recognise import PLACES, Facts
from bulltask.transport.call import Call, command
from bulltask.transport.client import Client
from bulltask.transport.keys import BullKeys, QueueKeys
from bulltask.transport.scripts.bull import ScoredIds, key_type, page_of, read_hash, share_a_slot, size_of
from bulltask.transport.scripts.flow import is_cluster
from bulltask.transport.scripts.queue import get_counts, get_meta, list_clients
from bulltask.transport.scripts.schedule import list_schedulers

__all__ = ["AT_ONCE", "across_slots", "all_jobs", "count_target", "kind_of", "read_facts", "read_jobs"]

AT_ONCE: Final = 200
"""Jobs in one round trip."""

_TYPED: Final = (
    *PLACES,
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


def kind_of(facts: Facts, place: str) -> str:
    """The Redis type of a place: by Bull's version, sets or sorted sets."""
    return facts.types[place] if facts.types[place] == "set" else _KINDS.get(place, "zset")


def across_slots(client: Client, source: BullKeys, target: QueueKeys) -> bool:
    """True on a Redis Cluster where no script may touch both queues."""
    if share_a_slot(source, target):
        return False
    try:
        return client.run(is_cluster())
    except BrokerAuthError:  # INFO is forbidden: the scripts themselves will tell
        return False


def read_facts(client: Client, keys: BullKeys) -> Facts:
    """Read what can be seen without the jobs."""
    found = client.run_many([key_type(keys.base + suffix) for suffix in _TYPED])
    types = dict(zip(_TYPED, found, strict=True))
    sizes = [size_of(keys.base + place, types[place]) for place in PLACES]
    meta = client.run(get_meta(keys)) if types["meta"] == "hash" else {}
    if "data" in meta:
        meta = {}  # a job of Bull whose id is "meta"
    return Facts(
        types=types,
        sizes=dict(zip(PLACES, client.run_many(sizes), strict=True)),
        meta=meta,
        repeats=_repeats(client, keys) if types["repeat"] == "zset" else (),
        workers=_workers(client, keys),
    )


def all_jobs(client: Client, keys: BullKeys, facts: Facts) -> Iterator[tuple[str, list[BullJob]]]:
    """Walk through all jobs: the name of each place, with a page of its jobs."""
    for place in PLACES:
        first = 0
        while page := client.run(page_of(keys.base + place, kind_of(facts, place), first, AT_ONCE)):
            for start in range(0, len(page), AT_ONCE):  # the page of a set is all of it
                yield place, read_jobs(client, keys, place, page[start : start + AT_ONCE])
            first += len(page)


def read_jobs(client: Client, keys: BullKeys, place: str, page: ScoredIds) -> list[BullJob]:
    """Read jobs by their ids; one without a hash has no fields."""
    calls: list[Call[Any]] = [read_hash(keys.job(job_id)) for job_id, _ in page]
    calls += [command("EXISTS", keys.lock(job_id), parse_reply=bool) for job_id, _ in page]
    answers = client.run_many(calls)
    hashes, locks = answers[: len(page)], answers[len(page) :]
    return [
        BullJob(id=job_id, place=place, score=score, fields=fields, locked=locked)
        for (job_id, score), fields, locked in zip(page, hashes, locks, strict=True)
    ]


def count_target(client: Client, keys: QueueKeys) -> int:
    """How many jobs BullMQ finds."""
    return sum(client.run(get_counts(keys, _STATES)).values())


def _repeats(client: Client, keys: BullKeys) -> list[tuple[str, int]]:
    """Bull's repeatable jobs: BullMQ's schedulers, in the same sorted set, have a hash each."""
    rows = client.run(list_schedulers(keys, 0, -1, asc=True))
    hashes = client.run_many([command("EXISTS", keys.scheduler(key), parse_reply=bool) for key, _ in rows])
    return [row for row, is_scheduler in zip(rows, hashes, strict=True) if not is_scheduler]


def _workers(client: Client, keys: BullKeys) -> Sequence[str] | None:
    """Bull's workers, and BullMQ's of the same name, call their connections so; senders do not."""
    name = keys.client_name()
    try:
        return [f"{row.name} at {row.address}" for row in client.run(list_clients(name, f"{name}:w:"))]
    except BrokerAuthError:  # CLIENT LIST is forbidden
        return None
