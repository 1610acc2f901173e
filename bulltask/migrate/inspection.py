"""What a migration reads of a Bull queue, and what it reports.

:func:`inspect_queue` and :func:`iter_jobs` read a queue without changing it; :func:`detect_layout` tells Bull's queues
from BullMQ's. :class:`MigrationPlan` and :class:`MigrationReport` are the results.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any, Final

from bulltask.jobs import codec
from bulltask.jobs.errors import BrokerAuthError, DecodeError
from bulltask.jobs.job import BULLTASK_KEY
from bulltask.jobs.schedules import Repeat
from bulltask.queue.schedulers import all_rows
from bulltask.transport.call import BullKeys, Call, QueueKeys, SyncClient, command
from bulltask.transport.operation import run_sync
from bulltask.transport.scripts.flow import is_cluster
from bulltask.transport.scripts.queue import (
    ScoredIds,
    get_counts,
    get_meta,
    in_same_slot,
    key_type,
    list_clients,
    page_of,
    read_hash,
    size_of,
)

__all__ = [
    "JOB_KEYS",
    "PAGE_SIZE",
    "BullJob",
    "BullRepeatable",
    "JobOrigin",
    "MigrationOutcome",
    "MigrationPlan",
    "MigrationReport",
    "QueueInfo",
    "QueueLayout",
    "SkipReason",
    "across_slots",
    "count_target",
    "detect_layout",
    "inspect_queue",
    "iter_jobs",
    "key_type_of",
    "read_jobs",
]

_ONLY_BULLMQ = frozenset({"atm", "ats", "stc", "rjk", "parentKey", "parent", "pb", "defa", "nrjid"})
_ONLY_BULLMQ_OPTS = frozenset(
    {"repeatJobKey", "de", "kl", "fpof", "cpof", "idof", "rdof", "tm", "omc", "parent", BULLTASK_KEY}
)


class JobOrigin(Enum):
    """The library whose layout a job's hash has."""

    BULL = "Bull"
    BULL_1 = "Bull 1 or 2"
    BULLMQ = "BullMQ"
    EITHER = "either"
    UNREADABLE = "unreadable"


@dataclass(frozen=True, kw_only=True)
class BullJob:
    """A job's hash, read without validation.

    Attributes:
        key_suffix: The suffix of the key that contains the job: ``wait``, ``delayed`` …
        score: The job's score under that key; ``""`` in lists and sets.
    """

    id: str
    key_suffix: str
    score: str
    fields: Mapping[str, bytes]
    locked: bool = False

    @cached_property
    def opts(self) -> Mapping[str, Any]:
        """The job's options.

        Raises:
            DecodeError: The options are not a JSON object.
        """
        value = codec.decode(self.fields.get("opts", b"{}"), what="the text of its options")
        if not isinstance(value, dict):
            raise DecodeError("its options are not a JSON object")
        return value

    @property
    def repeat(self) -> Mapping[str, Any] | None:
        """The repeat options, if this is the next iteration of a repeatable job."""
        try:
            value = self.opts.get("repeat")
        except DecodeError:
            return None
        return value if isinstance(value, dict) else None

    @cached_property
    def origin(self) -> JobOrigin:
        """The library that added the job, as far as the hash shows.

        Bull 3 and 4 write ``timestamp`` and ``delay`` into the options of every job. BullMQ does so only if the sender
        sets both, and a migrated job no longer has ``timestamp``. Jobs of Bull 1 and 2 have no name, but they have
        the field ``attemptsMade`` from the start.
        """
        if _ONLY_BULLMQ & self.fields.keys():
            return JobOrigin.BULLMQ
        if "name" not in self.fields and "attemptsMade" in self.fields:
            return JobOrigin.BULL_1
        if "retriedOn" in self.fields:
            return JobOrigin.BULL
        try:
            opts = self.opts
        except DecodeError:
            return JobOrigin.UNREADABLE
        if _ONLY_BULLMQ_OPTS & opts.keys() or "pattern" in (self.repeat or {}):
            return JobOrigin.BULLMQ
        return JobOrigin.BULL if {"timestamp", "delay", "attempts"} <= opts.keys() else JobOrigin.EITHER

    def number(self, name: str) -> int:
        """Return a field as an integer; 0 if it is not a number."""
        try:
            return int(float(self.fields.get(name, b"0")))
        except (ValueError, OverflowError):
            return 0

    def due_ms(self) -> int:
        """Return when a delayed job is due, in epoch milliseconds; its score is 4096 times that, as in BullMQ."""
        return int(float(self.score)) // 4096


_MAX_LISTED = 5


class SkipReason(Enum):
    """Why a job is skipped; the values are printed after the number of jobs."""

    ACTIVE = (
        "active: stop Bull's workers and wait until they have exited. If the workers have died, use recover_active "
        "(--recover-active)"
    )
    LOCKED = "locked by a worker: stop Bull's workers, and run the migration again 30 seconds later"
    MALFORMED = "malformed: no worker could read them"
    NO_HASH = "an id without a job"
    ID_TAKEN = "their id exists in the target queue: use id_prefix (--id-prefix) to change their ids"
    RESERVED = "their id is the name of a BullMQ key: use id_prefix (--id-prefix) to change their ids"
    BULLMQ = "BullMQ's jobs, or already migrated"
    NOT_SELECTED = "in a state that was not selected, or beyond the limit"
    CHANGING = "changed each time they were read: another program is modifying the queue"


@dataclass(slots=True)
class MigrationOutcome:
    """The number of migrated and skipped jobs.

    Attributes:
        moved: The number of migrated jobs by new state: ``waiting``, ``delayed``, ``completed``, ``failed``,
            ``recovered``.
        skipped: The ids of skipped jobs by reason.
        notes: The number of migrated jobs by note, a key of ``convert.NOTES``.
        details: The errors of the first few malformed jobs.
    """

    moved: Counter[str] = field(default_factory=Counter)
    skipped: dict[SkipReason, list[str]] = field(default_factory=dict)
    notes: Counter[str] = field(default_factory=Counter)
    details: list[str] = field(default_factory=list)

    def skip(self, reason: SkipReason, job_id: str, detail: str = "") -> None:
        """Count a skipped job."""
        self.skipped.setdefault(reason, []).append(job_id)
        if detail and len(self.details) < _MAX_LISTED:
            self.details.append(f"job {job_id}: {detail}")

    def skip_all(self, reason: SkipReason, ids: Sequence[str]) -> None:
        """Count several jobs that are skipped for the same reason."""
        if ids:
            self.skipped.setdefault(reason, []).extend(ids)

    def add(self, other: MigrationOutcome) -> None:
        """Add the counts of another outcome."""
        self.moved.update(other.moved)
        self.notes.update(other.notes)
        for reason, ids in other.skipped.items():
            self.skip_all(reason, ids)
        self.details = [*self.details, *other.details][:_MAX_LISTED]

    def reset_skipped(self) -> None:
        """Reset the skipped jobs before another pass, which counts them again."""
        self.skipped.clear()
        self.details.clear()

    @property
    def total_moved(self) -> int:
        """The number of jobs that were migrated, or would be."""
        return self.moved.total()

    @property
    def total_skipped(self) -> int:
        """The number of Bull's jobs that were skipped; BullMQ's jobs do not count."""
        return sum(len(ids) for reason, ids in self.skipped.items() if reason is not SkipReason.BULLMQ)


@dataclass(frozen=True, slots=True, kw_only=True)
class BullRepeatable:
    """A repeatable Bull job, and the job scheduler that replaces it.

    Attributes:
        key: Bull's key.
        rule: The schedule of its jobs; ``None`` if it is unknown.
        job_id: The id of its next job; ``""`` if there is none.
        key_suffix: The suffix of the key that contains that job.
        next_ms: The time of its next run, in epoch milliseconds.
        problem: Why it is skipped; ``""`` if it is not.
        manual: The Python call that creates the scheduler, if the job is skipped.
    """

    key: str
    scheduler_id: str
    rule: Repeat | None
    job_id: str
    key_suffix: str
    next_ms: int
    problem: str = ""
    manual: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationPlan:
    """What a migration would do.

    Attributes:
        source, target: The queues' keys with prefix: ``bull:emails``.
        in_place: Whether both have the same keys.
        layout: The detected layout of the source.
        info: What is known about the source without its jobs.
        outcome: Jobs that would be migrated or skipped, without regard to a limit.
        repeatables: The repeatable jobs and their schedulers.
        blockers: The reasons why the queue cannot be migrated, one sentence each; empty if it can.
        warnings: Notes for the user, one sentence each.
        pauses: Whether the target will be paused because the source is.
    """

    source: str
    target: str
    in_place: bool
    layout: QueueLayout
    info: QueueInfo
    outcome: MigrationOutcome
    repeatables: Sequence[BullRepeatable]
    blockers: Sequence[str]
    warnings: Sequence[str]
    pauses: bool

    @property
    def bull_only(self) -> bool:
        """Whether jobs are skipped unless they are certainly Bull's, because the queue also has BullMQ's jobs."""
        return self.in_place or self.layout is QueueLayout.MIXED

    @property
    def total(self) -> int:
        """The number of jobs in the source queue."""
        return sum(self.info.sizes.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationReport:
    """The result of a migration.

    Attributes:
        outcome: The migrated jobs, and the skipped jobs by reason.
        schedulers: The ids of the job schedulers that replace repeatable jobs.
        repeatables_skipped: The repeatable jobs that were skipped.
        before, after: The number of jobs under each key of Bull's queue. In place, these are also the keys of BullMQ's
            queue.
        target_before, target_after: The total number of jobs in the target queue.
    """

    outcome: MigrationOutcome
    schedulers: Sequence[str]
    repeatables_skipped: Sequence[BullRepeatable]
    before: Mapping[str, int]
    after: Mapping[str, int]
    target_before: int
    target_after: int

    @property
    def complete(self) -> bool:
        """Whether no job was skipped."""
        return not self.outcome.total_skipped and not self.repeatables_skipped


JOB_KEYS: Final = ("delayed", "paused", "wait", "active", "failed", "completed")
"""Suffixes of the keys that contain Bull's jobs, in the order of migration: the most urgent jobs first."""

_BULLMQ_KEYS: Final[Mapping[str, str]] = {
    "events": "stream",
    "marker": "zset",
    "prioritized": "zset",
    "pc": "string",
    "waiting-children": "zset",
}
"""Keys that only BullMQ has, with their types, because a Bull job's id may be one of these names."""


class QueueLayout(Enum):
    """The detected layout; the values are shown to users."""

    EMPTY = "no jobs"
    BULL = "Bull 3 or 4"
    BULL_1 = "Bull 1 or 2"
    BULLMQ = "BullMQ"
    MIXED = "Bull and BullMQ, mixed"


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueInfo:
    """What is known about a queue without reading its jobs.

    Attributes:
        types: The Redis type of each key by suffix, ``none`` for a missing key.
        sizes: The number of jobs under each of :data:`JOB_KEYS`.
        meta: The hash ``meta``.
        repeats: The keys of Bull's repeatable jobs, with the time of the next run in epoch milliseconds.
        workers: The names of connections that look like workers; ``None`` if CLIENT LIST is not permitted.
    """

    types: Mapping[str, str]
    sizes: Mapping[str, int]
    meta: Mapping[str, str]
    repeats: Sequence[tuple[str, int]]
    workers: Sequence[str] | None

    @property
    def paused(self) -> bool:
        """Whether Bull has paused the queue; late versions of Bull also set BullMQ's flag."""
        return self.types["meta-paused"] != "none" or "paused" in self.meta

    @property
    def has_sets(self) -> bool:
        """Whether finished jobs are in unordered sets, as before Bull 3."""
        return "set" in {self.types["completed"], self.types["failed"]}


def detect_layout(info: QueueInfo, origins: Counter[JobOrigin]) -> QueueLayout:
    """Return the layout of a queue, from its keys and the number of its jobs by origin."""
    if not any(info.sizes.values()) and not info.repeats and not _is_bullmq(info):
        return QueueLayout.EMPTY
    bullmq = _is_bullmq(info) or bool(origins[JobOrigin.BULLMQ])
    bull_1 = info.has_sets or bool(origins[JobOrigin.BULL_1])
    bull = bull_1 or bool(origins[JobOrigin.BULL]) or info.types["priority"] == "zset"
    if bullmq:
        return QueueLayout.MIXED if bull else QueueLayout.BULLMQ
    return QueueLayout.BULL_1 if bull_1 else QueueLayout.BULL


def _is_bullmq(info: QueueInfo) -> bool:
    # Late versions of Bull write a single field of meta, `paused`.
    return any(info.types[key] == kind for key, kind in _BULLMQ_KEYS.items()) or bool(info.meta.keys() - {"paused"})


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
        rows = client.run(list_clients(name, f"{name}:w:", database=client.database))
    except BrokerAuthError:  # CLIENT LIST is not permitted
        return None
    return [f"{row.name} at {row.address}" for row in rows]
