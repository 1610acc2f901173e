"""What tasks and results need from rooms above: :class:`Sender` (an app), :class:`ResultReader` (the transport) …

Thus, a task does not import ``App``, and a result does not import the transport. Here are also the warnings for tasks
that wait for the results of other jobs. Meanwhile, such a task occupies a slot of its worker, and if all running jobs
do so, no slot is left for the jobs that they wait for. Celery raises ``RuntimeError`` instead; bulltask does not,
because waiting is safe if another worker runs the other job.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol, TypedDict

from bulltask.config.config import Config
from bulltask.jobs.errors import warn_user
from bulltask.jobs.job import JobRef, NewJob, PlannedJob
from bulltask.jobs.names import JobState, Revocation
from bulltask.jobs.payloads import PayloadCodec
from bulltask.jobs.stored_job import Finished, StoredCall, StoredSnapshot

__all__ = [
    "EagerRunner",
    "OutboxRelay",
    "ResultReader",
    "Sender",
    "WaitOptions",
    "allow_join_result",
    "warn_about_wait",
    "warn_in_tasks",
]


_allowed: ContextVar[bool] = ContextVar("bulltask_waits_allowed", default=False)
_running_task: Callable[[], str] | None = None
_warned: set[str] = set()


class WaitOptions(TypedDict, total=False):
    """Options of Celery's ``get`` that have no effect here.

    bulltask waits for an event instead of polling (``interval``), results are no messages that are acknowledged
    (``no_ack``), and a step of a canvas always fails if a step before it has failed (``follow_parents``).
    ``on_message`` causes a warning that says what to use instead.
    """

    interval: float
    no_ack: bool
    follow_parents: bool
    on_message: Callable[[Any], object] | None


@contextmanager
def allow_join_result() -> Iterator[None]:
    """Let a task wait for the results of other jobs without a warning (Celery's function).

    ``with allow_join_result(): result.get(timeout=10)``. Outside a worker, it has no effect.
    """
    token = _allowed.set(True)
    try:
        yield
    finally:
        _allowed.reset(token)


def warn_in_tasks(running_task: Callable[[], str]) -> None:
    """Turn on the warning in this process, a child; ``running_task`` names the caller's task, ``""`` for none."""
    global _running_task  # noqa: PLW0603 - it belongs to the process
    _running_task = running_task


def warn_about_wait(ref: JobRef) -> None:
    """Warn, once per task, if a task is about to wait for this job's result and has not turned off the warning."""
    if _allowed.get():
        return
    task = "" if _running_task is None else _running_task()
    if task and task not in _warned:
        _warned.add(task)
        warn_user(
            f"task {task} waits for the result of job {ref.id} in queue {ref.queue}, and occupies a slot of its "
            "worker. If all running jobs wait like this, the jobs that they wait for never start. Use a canvas, such "
            "as a.s() | b.s(), or `await result` in an async task. If other workers run those jobs, in a "
            "separate queue, get(disable_sync_subtasks=False) or allow_join_result() turns off this warning"
        )
    elif not task and _is_in_coroutine():
        warn_user(
            f"get() blocks the event loop while it waits for the result of job {ref.id} in queue {ref.queue}: nothing "
            "else runs on it. Use `await result`, or `await result.aget(timeout=…)`"
        )


def _is_in_coroutine() -> bool:
    """Return whether an ``async def`` function has made this call; notebooks run each of their cells in one."""
    asyncio = sys.modules.get("asyncio")
    if asyncio is None or asyncio._get_running_loop() is None or "ipykernel" in sys.modules:  # noqa: SLF001 - as in get_running_loop()
        return False
    frame = sys._getframe(1)  # noqa: SLF001
    while frame.f_back is not None and not frame.f_code.co_flags & inspect.CO_COROUTINE:
        frame = frame.f_back
    return frame.f_back is not None


class ResultReader(Protocol):
    """Reads jobs, waits for their outcomes, and revokes jobs."""

    @property
    def payloads(self) -> PayloadCodec:
        """Reads results and exceptions from their stored form."""

    def snapshot(self, ref: JobRef) -> StoredSnapshot:
        """Return the job's current state and outcome."""

    async def asnapshot(self, ref: JobRef) -> StoredSnapshot:
        """:meth:`snapshot` for asyncio."""

    def call(self, ref: JobRef) -> StoredCall | None:
        """Return the job's name and arguments, and when it finished; ``None`` if it does not exist."""

    def finished_states(self, refs: Sequence[JobRef]) -> list[JobState | None]:
        """Return how each job finished, or ``None``, in one round trip per thousand jobs; ``UNKNOWN`` if it is gone."""

    def queue_of(self, job_id: str, queues: Sequence[str]) -> str | None:
        """Return the first of the queues that has a job with this id, ``None`` if none has; in one round trip."""

    def forget(self, ref: JobRef) -> None:
        """Remove the job; ``LockMismatchError`` if it is running."""

    async def aforget(self, ref: JobRef) -> None:
        """:meth:`forget` for asyncio."""

    def save_group(self, queue: str, group_id: str, members: str, keep_ms: int | None) -> None:
        """Store the references (queue and id, as JSON) of a group's members under the prefix of a queue of the app."""

    def load_group(self, queue: str, group_id: str) -> str | None:
        """Return what :meth:`save_group` stored; ``None`` if there is no such group, or it has expired."""

    def forget_group(self, queue: str, group_id: str) -> None:
        """Remove what :meth:`save_group` stored."""

    def wait(self, ref: JobRef, timeout_ms: int | None, sent_ms: int | None) -> Finished:
        """Wait until the job has finished, or raise ``ResultTimeoutError``.

        If it was sent at ``sent_ms`` (server time), the outcome of a job that was removed as soon as it finished is
        read from the event stream. Otherwise, ``JobNotFoundError`` is raised.
        """

    async def await_finished(self, ref: JobRef, timeout_ms: int | None, sent_ms: int | None) -> Finished:
        """:meth:`wait` for asyncio."""

    def revoke(self, ref: JobRef, *, terminate: bool) -> Revocation:
        """Revoke the job; with ``terminate``, its worker cancels a running attempt."""

    async def arevoke(self, ref: JobRef, *, terminate: bool) -> Revocation:
        """:meth:`revoke` for asyncio."""


class EagerRunner(Protocol):
    """Runs jobs in this process, without Redis; :class:`bulltask.worker.in_process.EagerRunner` implements it."""

    @property
    def results(self) -> ResultReader:
        """Reads the outcomes of the jobs that have run."""

    def run(self, roots: Sequence[PlannedJob]) -> None:
        """Run trees of jobs, children first."""

    async def arun(self, roots: Sequence[PlannedJob]) -> None:
        """:meth:`run` for asyncio."""


class Sender(Protocol):
    """Sends jobs and reads their results; ``App`` implements it."""

    @property
    def _config(self) -> Config:
        """The settings, frozen."""

    @property
    def _typed(self) -> bool | None:
        """The setting ``task_typed``: whether type hints are enforced."""

    @property
    def _serializer(self) -> str:
        """The setting ``task_serializer``."""

    @property
    def _results(self) -> ResultReader:
        """Reads jobs and waits for their outcome."""

    def _now_ms(self) -> int:
        """Return the server's time in epoch milliseconds (this machine's before the first connection)."""

    @property
    def _overrides_send_task(self) -> bool:
        """Whether a subclass, or a patch, has replaced ``send_task``."""

    def _send(self, jobs: Sequence[NewJob]) -> list[str]:
        """Store the jobs, and return their ids, or those of existing jobs, once Redis has acknowledged all of them."""

    async def _asend(self, jobs: Sequence[NewJob]) -> list[str]:
        """:meth:`_send` for asyncio."""

    def _send_canvas(self, canvas: Any) -> Any:
        """Store all jobs of a canvas, or none, and return the handle of its result."""

    async def _asend_canvas(self, canvas: Any) -> Any:
        """:meth:`_send_canvas` for asyncio."""

    def _apply_canvas(self, canvas: Any, *, throw: bool | None) -> Any:
        """Run all jobs of a canvas in this process, and return the handle of its result."""


class OutboxRelay(Protocol):
    """Sends the rows of a transactional outbox; :class:`bulltask.outbox.outbox.OutboxBase` implements it."""

    def run_relay(self, wait: Callable[[float], bool], logger: Any) -> None:
        """Send rows until ``wait``, which waits for some seconds between two reads of the table, returns true."""

    def backlog(self) -> Any:
        """Return a :class:`bulltask.outbox.outbox.Backlog`."""

    def after_fork(self) -> None:
        """Drop the database connections that this process has inherited."""
