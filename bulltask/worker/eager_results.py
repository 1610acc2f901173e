"""The results of jobs that ran in this process."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from bulltask.clock import wall_ms
from bulltask.errors import JobNotFoundError
from bulltask.jobs import codec
from bulltask.jobs.errbacks import FailedJob
from bulltask.jobs.job import JobRef, RunningJob
from bulltask.jobs.states import JobState, Revocation
from bulltask.jobs.stored_job import Finished, StoredCall, StoredSnapshot
from bulltask.payloads.payload_codec import PayloadCodec
from bulltask.worker.child.outcomes import FailedOutcome

__all__ = ["EagerResults"]


@dataclass(frozen=True, slots=True)
class _Entry:
    snapshot: StoredSnapshot
    call: StoredCall
    failed_job: FailedJob | None = None


_UNKNOWN = StoredSnapshot(JobState.UNKNOWN, None, "", (), None, 0)


class EagerResults:
    """Stores outcomes as JSON; implements ``ports.ResultReader``, like :class:`bulltask.transport.results.Results`.

    Args:
        payloads: Reads results and exceptions from their stored form.
        limit: How many of the newest outcomes are kept, ``None`` for all.
    """

    def __init__(self, payloads: PayloadCodec, limit: int | None = None) -> None:
        self.payloads = payloads
        self._entries: dict[JobRef, _Entry] = {}
        self._groups: dict[str, str] = {}
        self._limit, self._lock = limit, threading.Lock()

    # ---- written while jobs run ----

    def complete(self, job: RunningJob, value: bytes) -> None:
        """Store a return value."""
        self._store(job, JobState.COMPLETED, returnvalue=value.decode(), attempts_made=job.attempts_made + 1)

    def fail(self, job: RunningJob, reason: str, traces: tuple[str, ...], outcome: FailedOutcome) -> None:
        """Store a failure."""
        made = job.attempts_made + 1
        self._store(
            job,
            JobState.FAILED,
            outcome.failed_job,
            error=outcome.error,
            failed_reason=reason,
            stacktrace=traces,
            attempts_made=made,
            returnvalue=None,
        )

    def set_progress(self, job: RunningJob, progress: Any) -> None:
        """Store the job's progress."""
        self._store(job, JobState.ACTIVE, progress=progress)

    # ---- read by the jobs that follow ----

    def has(self, ref: JobRef) -> bool:
        """Return whether a job has run."""
        return ref in self._entries

    def completed(self, ref: JobRef) -> bool:
        """Return whether a job has completed."""
        return self.snapshot(ref).state is JobState.COMPLETED

    def value(self, ref: JobRef) -> Any:
        """Return the return value of a completed job."""
        return codec.decode(self.snapshot(ref).returnvalue)

    def failure(self, ref: JobRef) -> tuple[str, str, FailedJob, str]:
        """Return the reason and traceback of a failed job, the job that failed first, and the stored exception."""
        entry = self._entries[ref]
        traces = entry.snapshot.stacktrace
        return (
            entry.snapshot.failed_reason,
            traces[-1] if traces else "",
            entry.failed_job or FailedJob(ref.id, "", ref.queue),
            entry.snapshot.error,
        )

    # ---- ports.ResultReader ----

    def snapshot(self, ref: JobRef) -> StoredSnapshot:
        """Return the job's state and outcome."""
        entry = self._entries.get(ref)
        return _UNKNOWN if entry is None else entry.snapshot

    async def asnapshot(self, ref: JobRef) -> StoredSnapshot:
        """:meth:`snapshot` for asyncio."""
        return self.snapshot(ref)

    def call(self, ref: JobRef) -> StoredCall | None:
        """Return the job's name and arguments, and when it finished."""
        entry = self._entries.get(ref)
        return None if entry is None else entry.call

    def finished_states(self, refs: Sequence[JobRef]) -> list[JobState | None]:
        """Return the state of each job."""
        return [self.snapshot(ref).state for ref in refs]

    def wait(self, ref: JobRef, timeout_ms: int | None, sent_ms: int | None) -> Finished:  # noqa: ARG002 - nothing to wait for
        """Return the outcome of a job.

        Raises:
            JobNotFoundError: It has not run here.
        """
        snapshot = self.snapshot(ref)
        if not snapshot.state.finished:
            _not_found(ref)
        completed = snapshot.state is JobState.COMPLETED
        return Finished(completed, (snapshot.returnvalue or "null") if completed else snapshot.failed_reason)

    async def await_finished(self, ref: JobRef, timeout_ms: int | None, sent_ms: int | None) -> Finished:
        """:meth:`wait` for asyncio."""
        return self.wait(ref, timeout_ms, sent_ms)

    def revoke(self, ref: JobRef, *, terminate: bool) -> Revocation:  # noqa: ARG002 - it has already run
        """Return ``FINISHED``, or ``UNKNOWN`` for a job that has not run here."""
        return Revocation.FINISHED if self.has(ref) else Revocation.UNKNOWN

    async def arevoke(self, ref: JobRef, *, terminate: bool) -> Revocation:
        """:meth:`revoke` for asyncio."""
        return self.revoke(ref, terminate=terminate)

    def queue_of(self, job_id: str, queues: Sequence[str]) -> str | None:
        """Return the first of the queues in which a job with this id has run."""
        return next((queue for queue in queues if self.has(JobRef(queue, job_id))), None)

    def forget(self, ref: JobRef) -> None:
        """Remove the outcome of a job."""
        self._entries.pop(ref, None)

    async def aforget(self, ref: JobRef) -> None:
        """:meth:`forget` for asyncio."""
        self.forget(ref)

    def save_group(self, queue: str, group_id: str, members: str, keep_ms: int | None) -> None:  # noqa: ARG002
        """Store the addresses of a group's members, in this process."""
        self._groups[group_id] = members

    def load_group(self, queue: str, group_id: str) -> str | None:  # noqa: ARG002
        """Return what :meth:`save_group` stored."""
        return self._groups.get(group_id)

    def forget_group(self, queue: str, group_id: str) -> None:  # noqa: ARG002
        """Remove what :meth:`save_group` stored."""
        self._groups.pop(group_id, None)

    def _store(self, job: RunningJob, state: JobState, failed_job: FailedJob | None = None, **fields: Any) -> None:
        ref = JobRef(job.queue, job.id)
        call = StoredCall(job.name, job.data, wall_ms() if state.finished else None)
        with self._lock:  # a web server runs jobs in several threads
            self._entries[ref] = _Entry(replace(self.snapshot(ref), state=state, **fields), call, failed_job)
            if self._limit is not None and len(self._entries) > self._limit:
                del self._entries[next(iter(self._entries))]


def _not_found(ref: JobRef) -> NoReturn:
    raise JobNotFoundError(f"job {ref.id} of queue {ref.queue} has not run in this process (eager mode)")
