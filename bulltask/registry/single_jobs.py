"""The jobs of single calls, which are sent without a transaction."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

from bulltask.jobs.job import NewJob
from bulltask.ports import Sender
from bulltask.registry.callee import Callee
from bulltask.registry.signature import Signature, is_call
from bulltask.result import AsyncResult

if TYPE_CHECKING:  # it imports tasks, which use this module
    from bulltask.registry.tasks import Tasks

__all__ = ["handle", "handles", "is_single", "job_of"]

_Call = Signature[Any, Any] | NewJob


def is_single(canvas: object) -> TypeGuard[Signature[Any, Any]]:
    """Return whether a canvas is one call without callbacks."""
    return is_call(canvas) and not (canvas.links or canvas.errbacks)


def job_of(call: _Call) -> NewJob:
    """Return the job of a single call.

    Raises:
        TypeError: It is a chain, a group, or something else.
    """
    if is_call(call):
        return call.job()
    if not isinstance(call, NewJob):
        raise TypeError(f"send_many sends signatures of single calls, not {call!r:.200}; use its method apply_async")
    return call


def handle(task: Callee, sender: Sender, job: NewJob, job_id: str) -> AsyncResult[Any]:
    """Return the handle of a job of ``task`` that was sent, and is stored under ``job_id``."""
    result = AsyncResult(job_id, job.queue, sender.results, sender.now_ms(), task.result_decoder)
    own = getattr(task, "options", None)
    if (own is not None and own.ignore_result) if (ignored := job.options.ignore_result) is None else ignored:
        result.mark_ignored()
    return result


def handles(
    sender: Sender, tasks: Tasks, jobs: Sequence[tuple[_Call, NewJob]], ids: Iterable[str]
) -> list[AsyncResult[Any]]:
    """Return the handles of jobs that were sent.

    Args:
        sender: The app.
        tasks: Its tasks, whose hints determine the types of the results of jobs without a signature.
        jobs: The calls, and their jobs.
        ids: The ids under which they are stored.
    """
    results, now_ms = sender.results, sender.now_ms()
    sent: list[AsyncResult[Any]] = []
    for (call, job), job_id in zip(jobs, ids, strict=True):
        task: Callee | None = call.task if is_call(call) else tasks.get(job.name)
        sent.append(AsyncResult(job_id, job.queue, results, now_ms, None if task is None else task.result_decoder))
    return sent
