"""The names of all keys in Redis. No other module builds them."""

from __future__ import annotations

import base64
from typing import Final

__all__ = ["BullKeys", "QueueKeys", "beat_queues", "guard_key", "queue_consumers", "saved_group", "schedule_versions"]

_BULLTASK_ROOT: Final = "bulltask"


def beat_queues(prefix: str, app: str) -> str:
    """Return the key of a set: the queues in which an app's ``beat_schedule`` has created job schedulers."""
    return f"{_BULLTASK_ROOT}:beat:{prefix}:{app}"


def schedule_versions(prefix: str, app: str) -> str:
    """Return the key of a hash: the workers of an app, and the version of its schedule that each of them runs."""
    return f"{_BULLTASK_ROOT}:schedule-versions:{prefix}:{app}"


def queue_consumers(prefix: str, app: str) -> str:
    """Return the key of a hash: the workers of an app with their queues, and when each queue last had a worker."""
    return f"{_BULLTASK_ROOT}:queue-consumers:{prefix}:{app}"


def saved_group(prefix: str, group_id: str) -> str:
    """Return the key of a saved group result: the addresses of its members."""
    return f"{_BULLTASK_ROOT}:group:{prefix}:{group_id}"


def guard_key(key: str) -> str | None:
    """Return a key in the same slot of a Redis Cluster that never exists; ``None`` if ``key`` has no hash tag.

    It starts as ``key`` does, so that a user who may access ``key`` may access it, too.
    """
    start = key.find("{")
    end = key.find("}", start + 1)
    if start < 0 or end <= start + 1:
        return None
    colon = key.find(":", end)
    return f"{key if colon < 0 else key[:colon]}::guard"  # no job has an id that starts with a colon


class QueueKeys:
    """The keys of one queue.

    Args:
        prefix: BullMQ's prefix, ``bull`` by default.
        name: The queue's name in BullMQ, with the hash tag.
        queue: The queue's name in the app, for messages, logs and metrics.
    """

    __slots__ = (
        "active",
        "base",
        "bulltask_base",
        "completed",
        "delayed",
        "events",
        "failed",
        "id",
        "incompatible",
        "limiter",
        "lock_expiries",
        "marked_stalled",
        "marker",
        "meta",
        "metrics_completed",
        "metrics_failed",
        "name",
        "paused",
        "pc",
        "prefix",
        "prioritized",
        "probe",
        "queue",
        "repeat",
        "replicated",
        "revoked",
        "schedulers_checked",
        "stalled",
        "stalled_check",
        "temporary",
        "wait",
        "waiting_children",
    )

    def __init__(self, prefix: str, name: str, queue: str = "") -> None:
        self.prefix, self.name, self.queue = prefix, name, queue or name
        self.base = base = f"{prefix}:{name}:"
        self.wait = f"{base}wait"
        self.paused = f"{base}paused"
        self.active = f"{base}active"
        self.prioritized = f"{base}prioritized"
        self.pc = f"{base}pc"
        self.delayed = f"{base}delayed"
        self.waiting_children = f"{base}waiting-children"
        self.completed = f"{base}completed"
        self.failed = f"{base}failed"
        self.stalled = f"{base}stalled"
        self.stalled_check = f"{base}stalled-check"
        self.limiter = f"{base}limiter"
        self.marker = f"{base}marker"
        self.meta = f"{base}meta"
        self.events = f"{base}events"
        self.id = f"{base}id"
        self.repeat = f"{base}repeat"
        self.metrics_completed = f"{base}metrics:completed"
        self.metrics_failed = f"{base}metrics:failed"
        # bulltask's keys do not start with BullMQ's prefix, because BullMQ's `removeOrphanedJobs` deletes
        # unknown keys with it.
        self.bulltask_base = f"{_BULLTASK_ROOT}:{name}:" if prefix == "bull" else f"{_BULLTASK_ROOT}:{prefix}:{name}:"
        self.revoked = f"{self.bulltask_base}revoked"
        self.incompatible = f"{self.bulltask_base}incompatible"  # ids of waiting jobs, by when they are due
        self.lock_expiries = f"{self.bulltask_base}lock-expiries"  # when locks expire, by job id
        self.probe = f"{self.bulltask_base}probe"  # never exists
        self.replicated = f"{self.bulltask_base}replicated"  # exists for a millisecond
        self.schedulers_checked = f"{self.bulltask_base}schedulers-checked"  # exists until the next check is due
        self.marked_stalled = f"{self.bulltask_base}marked-stalled"
        # These exist only while a script runs.
        self.temporary = tuple(f"{self.bulltask_base}temporary{number}" for number in range(3))

    def job(self, job_id: str) -> str:
        """The job's hash."""
        return self.base + job_id

    def logs(self, job_id: str) -> str:
        """The job's log lines."""
        return f"{self.base}{job_id}:logs"

    def lock(self, job_id: str) -> str:
        """The job's lock."""
        return f"{self.base}{job_id}:lock"

    def dependencies(self, job_id: str) -> str:
        """Full keys of the job's pending child jobs."""
        return f"{self.base}{job_id}:dependencies"

    def processed(self, job_id: str) -> str:
        """Return values of the job's completed child jobs, by their full key."""
        return f"{self.base}{job_id}:processed"

    def ignored(self, job_id: str) -> str:
        """Failure reasons for the job's failed child jobs whose failure is ignored, by their full key."""
        return f"{self.base}{job_id}:failed"

    def unsuccessful(self, job_id: str) -> str:
        """Full keys of the job's failed child jobs whose failure fails the job."""
        return f"{self.base}{job_id}:unsuccessful"

    def scheduler(self, scheduler_id: str) -> str:
        """A job scheduler: its rule and its template."""
        return f"{self.repeat}:{scheduler_id}"

    def deduplication(self, dedup_id: str) -> str:
        """The id of the job that owns a deduplication id."""
        return f"{self.base}de:{dedup_id}"

    def deferred(self, dedup_id: str) -> str:
        """The duplicate that BullMQ 5.72 and newer defer until the owner of a deduplication id has finished."""
        return f"{self.base}dn:{dedup_id}"

    @property
    def deprecated_priority(self) -> str:
        """A key that BullMQ 3 had in addition to ``wait``."""
        return f"{self.base}priority"

    @property
    def task_rates(self) -> str:
        """The rate limits of tasks, and the workers that have stored them (bulltask's own hash, which expires)."""
        return f"{self.bulltask_base}task-rates"

    def next_start(self, task: str) -> str:
        """When the next job of a task with a rate limit may start (bulltask's own key, which expires)."""
        return f"{self.bulltask_base}next-start:{task}"

    def throttled(self, task: str) -> str:
        """Ids of a task's jobs that its rate limit delays, in their order (bulltask's own set, which expires)."""
        return f"{self.bulltask_base}throttled:{task}"

    def added_ids(self, write_id: str) -> str:
        """Ids of the jobs that a DataFrame write or an outbox has added (bulltask's own set, which expires)."""
        return f"{self.bulltask_base}added:{write_id}"

    def client_name(self, worker: str = "") -> str:
        """The connection name that identifies a worker to Node's ``getWorkers()`` and to dashboards."""
        encoded = base64.b64encode(self.name.encode()).decode()
        return f"{self.prefix}:{encoded}:w:{worker}" if worker else f"{self.prefix}:{encoded}"

    def __repr__(self) -> str:
        return f"<QueueKeys {self.base}>"


class BullKeys(QueueKeys):
    """A queue's keys in Bull 1 to 4, BullMQ's predecessor; most names are BullMQ's, but the layout differs.

    Args:
        prefix: Bull's prefix, ``bull`` by default.
        name: The queue's name in Bull.
    """

    __slots__ = ("limiter_index", "meta_paused", "priority")

    def __init__(self, prefix: str, name: str) -> None:
        super().__init__(prefix, name)
        self.meta_paused = f"{self.base}meta-paused"
        self.priority = f"{self.base}priority"
        self.limiter_index = f"{self.base}limiter:index"
