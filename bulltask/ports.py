"""Protocols between tasks, results and their implementations.

They are in a layer below both their users and their implementations. Thus, a task does not import ``App``, and a result
does not import the transport.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from bulltask.config.config import Config
from bulltask.jobs.flow import PlannedJob
from bulltask.jobs.job import JobRef, NewJob
from bulltask.jobs.states import JobState, Revocation
from bulltask.jobs.stored_job import Finished, StoredCall, StoredSnapshot
from bulltask.payloads.payload_codec import PayloadCodec

__all__ = ["DataFrameMapper", "EagerRunner", "OutboxRelay", "ResultReader", "Sender"]


class ResultReader(Protocol):
    """Reads jobs, waits for their outcomes, and revokes jobs."""

    @property
    def payloads(self) -> PayloadCodec:
        """Reads results and exceptions from their stored form."""
        ...

    def snapshot(self, ref: JobRef) -> StoredSnapshot:
        """Return the job's current state and outcome."""
        ...

    async def asnapshot(self, ref: JobRef) -> StoredSnapshot:
        """:meth:`snapshot` for asyncio."""
        ...

    def call(self, ref: JobRef) -> StoredCall | None:
        """Return the job's name and arguments, and when it finished; ``None`` if it does not exist."""
        ...

    def finished_states(self, refs: Sequence[JobRef]) -> list[JobState | None]:
        """Return the state of each job that is completed, failed or unknown to Redis; ``None`` for unfinished jobs.

        It makes one round trip per thousand jobs.
        """
        ...

    def queue_of(self, job_id: str, queues: Sequence[str]) -> str | None:
        """Return the first of the queues that has a job with this id, ``None`` if none has; in one round trip."""
        ...

    def forget(self, ref: JobRef) -> None:
        """Remove the job.

        Raises:
            LockMismatchError: It is running.
        """
        ...

    async def aforget(self, ref: JobRef) -> None:
        """:meth:`forget` for asyncio."""
        ...

    def save_group(self, queue: str, group_id: str, members: str, keep_ms: int | None) -> None:
        """Store the references (queue and id) of a group's members.

        Args:
            queue: Any queue of the app; the group is stored under the same prefix.
            group_id: The group's id.
            members: The references, as JSON.
            keep_ms: How long they are kept, ``None`` for no limit.
        """
        ...

    def load_group(self, queue: str, group_id: str) -> str | None:
        """Return what :meth:`save_group` stored; ``None`` if there is no such group, or it has expired."""
        ...

    def forget_group(self, queue: str, group_id: str) -> None:
        """Remove what :meth:`save_group` stored."""
        ...

    def wait(self, ref: JobRef, timeout_ms: int | None, sent_ms: int | None) -> Finished:
        """Wait until the job has finished.

        Args:
            ref: The job.
            timeout_ms: Maximum wait; ``None`` waits forever.
            sent_ms: When it was sent (server time in epoch milliseconds), ``None`` if unknown. With this time, the
                outcome of a job that was removed as soon as it finished is read from the event stream.

        Raises:
            ResultTimeoutError: It did not finish in time.
            JobNotFoundError: The job does not exist, and no event contains its outcome.
        """
        ...

    async def await_finished(self, ref: JobRef, timeout_ms: int | None, sent_ms: int | None) -> Finished:
        """:meth:`wait` for asyncio."""
        ...

    def revoke(self, ref: JobRef, *, terminate: bool) -> Revocation:
        """Revoke the job; with ``terminate``, its worker cancels a running attempt."""
        ...

    async def arevoke(self, ref: JobRef, *, terminate: bool) -> Revocation:
        """:meth:`revoke` for asyncio."""
        ...


class EagerRunner(Protocol):
    """Runs jobs in this process, without Redis; :class:`bulltask.worker.eager.EagerRunner` implements it."""

    @property
    def results(self) -> ResultReader:
        """Reads the outcomes of the jobs that have run."""
        ...

    def run(self, roots: Sequence[PlannedJob]) -> None:
        """Run trees of jobs, children first."""
        ...

    async def arun(self, roots: Sequence[PlannedJob]) -> None:
        """:meth:`run` for asyncio."""
        ...


class Sender(Protocol):
    """Sends jobs and reads their results; ``App`` implements it."""

    @property
    def config(self) -> Config:
        """The settings, frozen."""
        ...

    @property
    def typed(self) -> bool | None:
        """The setting ``task_typed``: whether type hints are enforced."""
        ...

    @property
    def serializer(self) -> str:
        """The setting ``task_serializer``."""
        ...

    @property
    def results(self) -> ResultReader:
        """Reads jobs and waits for their outcome."""
        ...

    def now_ms(self) -> int:
        """Return the server's time in epoch milliseconds (this machine's before the first connection)."""
        ...

    @property
    def overrides_send_task(self) -> bool:
        """Whether a subclass, or a patch, has replaced ``send_task``."""
        ...

    def send(self, jobs: Sequence[NewJob]) -> list[str]:
        """Store the jobs and return their ids once Redis has acknowledged all of them.

        If a job is deduplicated, the existing job's id is returned.
        """
        ...

    async def asend(self, jobs: Sequence[NewJob]) -> list[str]:
        """:meth:`send` for asyncio."""
        ...

    def send_canvas(self, canvas: Any) -> Any:
        """Store all jobs of a canvas, or none, and return the handle of its result."""
        ...

    async def asend_canvas(self, canvas: Any) -> Any:
        """:meth:`send_canvas` for asyncio."""
        ...

    def apply_canvas(self, canvas: Any, *, throw: bool | None) -> Any:
        """Run all jobs of a canvas in this process, and return the handle of its result."""
        ...


class OutboxRelay(Protocol):
    """Sends the rows of a transactional outbox; :class:`bulltask.outbox.base.OutboxBase` implements it."""

    def run_relay(self, wait: Callable[[float], bool], logger: Any) -> None:
        """Send rows until ``wait`` returns true.

        Args:
            wait: Waits for a number of seconds between two reads of the table; returns whether to stop.
            logger: Logs errors.
        """
        ...

    def backlog(self) -> Any:
        """Return a :class:`bulltask.outbox.store.Backlog`."""
        ...

    def after_fork(self) -> None:
        """Drop the database connections that this process has inherited."""
        ...


class DataFrameMapper(Protocol):
    """Calls a task for every distinct row of a DataFrame; :func:`bulltask.spark.map_dataframe` implements it."""

    def __call__(self, task: Any, df: Any, columns: Any, /, **options: Any) -> Any:
        """Return the rows with the outcome of their jobs."""
        ...
