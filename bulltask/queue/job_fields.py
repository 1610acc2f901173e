"""``JobFields``: the base class of ``Job`` and ``AsyncJob``, with the fields of a job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bulltask.jobs import codec
from bulltask.jobs.job import NewJob
from bulltask.jobs.stored_job import StoredJob
from bulltask.queue.context import QueueContext
from bulltask.result import AsyncResult

__all__ = ["JobFields", "sent_job"]


class JobFields:
    """A job's fields as they were when it was read or added, with the changes made through this object's methods.

    Times are epoch milliseconds. Those that bulltask writes are the server's; Node.js writes its machine's.
    ``refresh()`` reads all fields again.
    """

    __slots__ = ("_context", "_discarded", "_stored", "_token")

    def __init__(self, context: QueueContext, stored: StoredJob, token: str = "") -> None:
        self._context, self._stored, self._token, self._discarded = context, stored, token, False

    @property
    def context(self) -> QueueContext:
        """The context of the job's queue."""
        return self._context

    @property
    def stored(self) -> StoredJob:
        """All fields as a :class:`StoredJob`."""
        return self._stored

    def change(self, **fields: Any) -> None:
        """Update the fields that an operation has changed in Redis."""
        self._stored = replace(self._stored, **fields)

    def assign(self, stored: StoredJob) -> None:
        """Replace all fields with newly read fields."""
        self._stored = stored

    @property
    def token(self) -> str:
        """The token of its lock, if ``get_next_job()`` acquired the job; ``""`` otherwise."""
        return self._token

    @property
    def is_discarded(self) -> bool:
        """True after :meth:`discard`."""
        return self._discarded

    def discard(self) -> None:
        """Make this object's ``move_to_failed()`` final, even if attempts are left; nothing is stored."""
        self._discarded = True

    @property
    def id(self) -> str:
        """The job's id."""
        return self._stored.id

    @property
    def queue(self) -> str:
        """The name of its queue in the app."""
        return self._stored.queue

    @property
    def key(self) -> str:
        """Full key of its hash; its parent refers to it by this key."""
        return self._context.keys.job(self._stored.id)

    @property
    def name(self) -> str:
        """Its name; bulltask's workers run the task with that name."""
        return self._stored.name

    @property
    def data(self) -> Any:
        """Its data; also ``None`` if it is malformed JSON: see :attr:`data_text`."""
        return self._stored.data

    @property
    def data_text(self) -> str:
        """Its data as stored."""
        return self._stored.data_text

    @property
    def opts(self) -> Mapping[str, Any]:
        """Its options under the names that BullMQ stores."""
        return self._stored.opts

    @property
    def attempts(self) -> int:
        """Maximum number of attempts; 0 and 1 both mean a single attempt."""
        attempts = self._stored.opts.get("attempts")
        return int(attempts) if isinstance(attempts, int | float) else 0

    @property
    def timestamp_ms(self) -> int:
        """When it was created."""
        return self._stored.timestamp_ms

    @property
    def delay_ms(self) -> int:
        """Its delay; 0 once it has been promoted."""
        return self._stored.delay_ms

    @property
    def priority(self) -> int:
        """Its priority, 0 for none."""
        return self._stored.priority

    @property
    def attempts_made(self) -> int:
        """Its attempts that count toward the maximum: they completed or failed."""
        return self._stored.attempts_made

    @property
    def attempts_started(self) -> int:
        """How many times a worker has acquired it."""
        return self._stored.attempts_started

    @property
    def stalled_count(self) -> int:
        """How many times it has stalled."""
        return self._stored.stalled_count

    @property
    def processed_ms(self) -> int | None:
        """When a worker last acquired it."""
        return self._stored.processed_ms

    @property
    def finished_ms(self) -> int | None:
        """When it finished."""
        return self._stored.finished_ms

    @property
    def processed_by(self) -> str | None:
        """Id of the worker that last acquired it, or the name of a Node.js worker."""
        return self._stored.processed_by

    @property
    def progress(self) -> Any:
        """Its last progress, from ``update_progress``."""
        return self._stored.progress

    @property
    def returnvalue(self) -> Any:
        """The return value of a completed job."""
        return self._stored.returnvalue

    @property
    def failed_reason(self) -> str | None:
        """Why the last attempt failed."""
        return self._stored.failed_reason

    @property
    def stacktrace(self) -> tuple[str, ...]:
        """One traceback for each failed attempt."""
        return self._stored.stacktrace

    @property
    def deferred_failure(self) -> str | None:
        """If set, the job will fail with this reason when it is next acquired."""
        return self._stored.deferred_failure

    @property
    def parent(self) -> Mapping[str, Any] | None:
        """Its parent's ``id`` and ``queueKey``, and how its failure affects the parent, as stored."""
        return self._stored.parent

    @property
    def parent_key(self) -> str | None:
        """Full key of its parent's hash."""
        return self._stored.parent_key

    @property
    def deduplication_id(self) -> str | None:
        """Its deduplication id."""
        return self._stored.deduplication_id

    @property
    def scheduler_id(self) -> str | None:
        """The job scheduler that added it."""
        return self._stored.scheduler_id

    @property
    def next_iteration_id(self) -> str | None:
        """The job that its scheduler added after it (Node's ``nextRepeatableJobId``)."""
        return self._stored.next_iteration_id

    def result(self) -> AsyncResult[Any]:
        """Return its result, as ``delay()`` would have returned it."""
        return AsyncResult(self.id, self.queue, self._context.broker.results, self.timestamp_ms)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} ({self.name}) of queue {self.queue}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, JobFields) and other.key == self.key

    def __hash__(self) -> int:
        return hash(self.key)


def sent_job(job: NewJob, job_id: str) -> StoredJob:
    """Return a job that was just sent as a stored job, without reading it; ``job_id`` is the id that Redis returned."""
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
