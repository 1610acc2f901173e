"""The job that the current code runs for, so that log lines can name it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextvars import Context, ContextVar
from typing import Any, Final

from bulltask.jobs.job import RunningJob

__all__ = [
    "current_job",
    "enter_job",
    "get_logger",
    "get_task_logger",
    "in_started_thread",
    "job_in",
    "share_with_structlog",
    "share_with_threads",
]

_OWN_THREADS: Final = "bulltask"  # such as the thread of the event loop

_current: ContextVar[RunningJob | None] = ContextVar("bulltask_job", default=None)
# structlog's merge_contextvars reads every context variable whose name has this prefix (STRUCTLOG_KEY_PREFIX).
_STRUCTLOG_ID: ContextVar[str] = ContextVar("structlog_job_id")
_STRUCTLOG_TASK: ContextVar[str] = ContextVar("structlog_task")
_shared_with_structlog = False


def current_job() -> RunningJob | None:
    """Return the job that this code runs for, ``None`` outside a job.

    It is a context variable: ``asyncio.to_thread`` and asyncio tasks inherit it. A ``threading.Thread`` does not, but
    while a sync task is the only one that its process is running, the thread's code belongs to that job.
    """
    job = _current.get()
    return in_started_thread(_current) if job is None else job


_only_context: Callable[[], Context | None] | None = None


def share_with_threads(context: Callable[[], Context | None]) -> None:
    """Let threads without a context find the job of the only task that is running; ``context`` returns its context."""
    global _only_context  # noqa: PLW0603 - a child has one set of running tasks
    _only_context = context


def in_started_thread(variable: ContextVar[Any]) -> Any:
    """Return a variable's value in the only task that is running, if this thread has none of its own."""
    context = None if _only_context is None else _only_context()
    if context is None or threading.current_thread().name.startswith(_OWN_THREADS):
        return None
    return context.get(variable)


def job_in(context: Context) -> RunningJob | None:
    """Return the job that code in this context runs for."""
    return context.get(_current)


def enter_job(job: RunningJob) -> None:
    """Make ``job`` the current one in this context; the caller discards the context afterwards."""
    _current.set(job)
    if _shared_with_structlog:
        _STRUCTLOG_ID.set(job.id)
        _STRUCTLOG_TASK.set(job.name)


def share_with_structlog() -> None:
    """Let ``structlog.contextvars.merge_contextvars`` add the job to log lines, for apps that configure structlog."""
    global _shared_with_structlog  # noqa: PLW0603 - like structlog's configuration, it belongs to the process
    _shared_with_structlog = True


def get_task_logger(name: str) -> logging.Logger:
    """Return the logger for a module's tasks (Celery's function): ``logger = get_task_logger(__name__)``.

    It is ``logging.getLogger(name)``. In a worker, each line that a task logs, through any logger, contains the job's
    id and the task's name.

    Args:
        name: The logger's name, usually ``__name__``.
    """
    return logging.getLogger(name)


get_logger = logging.getLogger
"""Celery's name for the function that returns any other logger."""
