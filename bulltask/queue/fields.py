"""What is known of a job: the fields of its hash, with types."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bulltask.jobs import codec
from bulltask.jobs.job import NewJob
from bulltask.jobs.stored_job import StoredJob
from bulltask.queue.link import Link
from bulltask.result import AsyncResult

__all__ = ["JobFields", "record_of"]


class JobFields:
    """A job as it was when it was read or added; what the methods of ``Job`` change is changed here too.

    Times are epoch milliseconds of the server. ``refresh()`` reads everything again.
    """

    __slots__ = ("_discarded", "_link", "_record", "_token")

    def __init__(self, link: Link, record: StoredJob, token: str = "") -> None:
        self._link, self._record, self._token, self._discarded = link, record, token, False

    @property
    def link(self) -> Link:
        """The queue's way to Redis."""
        return self._link

    @property
    def record(self) -> StoredJob:
        """All fields as one value."""
        return self._record

    def change(self, **fields: Any) -> None:
        """Note what an operation has changed in Redis."""
        self._record = replace(self._record, **fields)

    def become(self, record: StoredJob) -> None:
        """Take what was read anew."""
        self._record = record

    @property
    def token(self) -> str:
        """The token of its lock, if ``get_next_job()`` took it; ``""`` otherwise."""
        return self._token

    @property
    def is_discarded(self) -> bool:
        """True after :meth:`discard`."""
        return self._discarded

    def discard(self) -> None:
        """Let ``move_to_failed()`` of this object be final, whatever attempts are left; nothing is stored."""
        self._discarded = True

    @property
    def id(self) -> str:
        """The job's id."""
        return self._record.id

    @property
    def queue(self) -> str:
        """Its queue as the user spells it."""
        return self._record.queue

    @property
    def key(self) -> str:
        """Full key of its hash, by which its parent knows it."""
        return self._link.keys.job(self._record.id)

    @property
    def name(self) -> str:
        """Its name; for bulltask's workers the task's."""
        return self._record.name

    @property
    def data(self) -> Any:
        """Its data; ``None`` also for malformed JSON, whose text is in :attr:`data_text`."""
        return self._record.data

    @property
    def data_text(self) -> str:
        """Its data as stored."""
        return self._record.data_text

    @property
    def opts(self) -> Mapping[str, Any]:
        """Its options under BullMQ's stored names (PROTOCOL 2.2)."""
        return self._record.opts

    @property
    def attempts(self) -> int:
        """Tries in all that it may have; 0 and 1 both mean a single one."""
        said = self._record.opts.get("attempts")
        return int(said) if isinstance(said, int | float) else 0

    @property
    def timestamp_ms(self) -> int:
        """When it was made."""
        return self._record.timestamp_ms

    @property
    def delay_ms(self) -> int:
        """Its delay; 0 once it was promoted."""
        return self._record.delay_ms

    @property
    def priority(self) -> int:
        """Its priority, 0 for none."""
        return self._record.priority

    @property
    def attempts_made(self) -> int:
        """Finished tries."""
        return self._record.attempts_made

    @property
    def attempts_started(self) -> int:
        """How often a worker took it."""
        return self._record.attempts_started

    @property
    def stalled_count(self) -> int:
        """How often its lock ran out."""
        return self._record.stalled_count

    @property
    def processed_ms(self) -> int | None:
        """When a worker took it last."""
        return self._record.processed_ms

    @property
    def finished_ms(self) -> int | None:
        """When it ended."""
        return self._record.finished_ms

    @property
    def processed_by(self) -> str | None:
        """Name of the worker that took it last."""
        return self._record.processed_by

    @property
    def progress(self) -> Any:
        """What was last reported with ``update_progress``."""
        return self._record.progress

    @property
    def returnvalue(self) -> Any:
        """The return value of a completed job."""
        return self._record.returnvalue

    @property
    def failed_reason(self) -> str | None:
        """Why the last attempt failed."""
        return self._record.failed_reason

    @property
    def stacktrace(self) -> tuple[str, ...]:
        """One traceback for each failed attempt."""
        return self._record.stacktrace

    @property
    def deferred_failure(self) -> str | None:
        """Text with which it will fail when it is taken next."""
        return self._record.deferred_failure

    @property
    def parent(self) -> Mapping[str, Any] | None:
        """Its parent's ``id`` and ``queueKey``, and what its failure means to it, as stored."""
        return self._record.parent

    @property
    def parent_key(self) -> str | None:
        """Full key of its parent's hash."""
        return self._record.parent_key

    @property
    def deduplication_id(self) -> str | None:
        """The id under which it is deduplicated."""
        return self._record.deduplication_id

    @property
    def scheduler_id(self) -> str | None:
        """The job scheduler that made it."""
        return self._record.scheduler_id

    @property
    def next_iteration_id(self) -> str | None:
        """The job that its scheduler has made after it (Node's ``nextRepeatableJobId``)."""
        return self._record.next_iteration_id

    def result(self) -> AsyncResult[Any]:
        """The handle that ``delay()`` would have returned."""
        return AsyncResult(self.id, self.queue, self._link.broker.results, self.timestamp_ms)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} ({self.name}) of queue {self.queue}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, JobFields) and other.key == self.key

    def __hash__(self) -> int:
        return hash(self.key)


def record_of(job: NewJob, job_id: str) -> StoredJob:
    """Return the fields of a dated job that was just added, without asking Redis; ``job_id`` is what it answered."""
    parent, now_ms = job.parent, job.timestamp_ms or 0
    return StoredJob(
        queue=job.queue,
        id=job_id,
        name=job.name,
        data_text=job.data.decode(),
        data=codec.decode(job.data),
        opts=job.opts(now_ms),
        timestamp_ms=now_ms,
        delay_ms=max(0, job.options.delay_at(now_ms)),
        priority=job.options.priority,
        attempts_made=0,
        attempts_started=0,
        stalled_count=0,
        processed_ms=None,
        finished_ms=None,
        processed_by=None,
        progress=None,
        returnvalue=None,
        failed_reason=None,
        stacktrace=(),
        deferred_failure=None,
        parent=None if parent is None else parent.data,
        parent_key=None if parent is None else parent.key,
        deduplication_id=job.options.deduplication_id,
        scheduler_id=None,
        next_iteration_id=None,
    )
