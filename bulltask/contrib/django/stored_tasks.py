"""Turns jobs into Django's ``TaskResult``."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from django.conf import settings
from django.utils import timezone

from bulltask.contrib.django.tasks_api import api
from bulltask.jobs import codec
from bulltask.jobs.fields import BULLTASK_KEY
from bulltask.jobs.names import JobState
from bulltask.jobs.stored_job import StoredJob

__all__ = ["HEADER", "change", "moment", "new_result", "result_of", "with_header"]

HEADER: Final = "django_task"
"""The header that stores the values set with Django's ``Task.using()``."""

_tasks: Any = api("base")
_EXCEPTION: Final = re.compile(r"^([A-Za-z_][\w.]*)(?::|$)", re.MULTILINE)
_FRAME: Final = '  File "'


def new_result(
    task: Any,
    result_id: str,
    alias: str,
    *,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    enqueued_ms: int | None,
) -> Any:
    """Return the result of a task that has not started.

    Args:
        task: The Django task.
        result_id: The job's id.
        alias: The backend's alias.
        args, kwargs: The arguments.
        enqueued_ms: When the job was added, epoch milliseconds.
    """
    return _tasks.TaskResult(
        task=task,
        id=result_id,
        status=_tasks.TaskResultStatus.READY,
        enqueued_at=moment(enqueued_ms),
        started_at=None,
        last_attempted_at=None,
        finished_at=None,
        args=args,
        kwargs=kwargs,
        backend=alias,
        errors=[],
        worker_ids=[],
    )


def with_header(task: Any, header: Mapping[str, Any], queue: str) -> Any:
    """Return a copy of a task with the values of ``Task.using()`` that a job was sent with.

    It does not call ``task.using()``, which would check the values again, because ``QUEUES`` may be different in this
    process.

    Args:
        task: The task as defined, without ``Task.using()``.
        header: The job's header.
        queue: The job's queue.
    """
    run_after = header.get("run_after")
    variant = copy.copy(task)
    return change(
        variant,
        queue_name=queue,
        backend=header.get("backend", task.backend),
        priority=header.get("priority", task.priority),
        run_after=None if run_after is None else datetime.fromisoformat(run_after),
    )


def result_of(task: Any, stored: StoredJob, state: JobState) -> Any:
    """Return the result of a stored job.

    Args:
        task: The task as defined, without ``Task.using()``.
        stored: The job.
        state: Its state.
    """
    data = stored.data if isinstance(stored.data, dict) else {}
    task = with_header(task, _header(stored), stored.queue)
    result = new_result(
        task,
        stored.id,
        task.backend,
        args=data.get("args", []),
        kwargs=data.get("kwargs", {}),
        enqueued_ms=stored.timestamp_ms,
    )
    attempts = [*data.get("attempts", []), (stored.processed_by, stored.processed_ms)][: stored.attempts_started]
    lost = stored.attempts_started - len(attempts)  # their processes were killed
    result.worker_ids.extend([*(str(worker) for worker, _ in attempts), *["unknown"] * lost])
    result.errors.extend(
        _tasks.TaskError(exception_class_path=_class_path(trace), traceback=trace) for trace in stored.stacktrace
    )
    changes: dict[str, Any] = {"status": _status(state)}
    if attempts:
        changes |= {"started_at": moment(attempts[0][1]), "last_attempted_at": moment(stored.processed_ms)}
    if state.finished:
        changes["finished_at"] = moment(stored.finished_ms)
    if state is JobState.COMPLETED:
        changes["_return_value"] = stored.returnvalue
    return change(result, **changes)


def change(frozen: Any, **values: Any) -> Any:
    """Set attributes of a frozen dataclass of Django, and return it."""
    for name, value in values.items():
        object.__setattr__(frozen, name, value)
    return frozen


def moment(epoch_ms: int | None) -> datetime | None:
    """Return a time as Django represents it: without a time zone if ``USE_TZ`` is false."""
    if epoch_ms is None:
        return None
    aware = datetime.fromtimestamp(epoch_ms / 1000, UTC)
    return aware if settings.USE_TZ else timezone.make_naive(aware)


def _status(state: JobState) -> Any:
    statuses = _tasks.TaskResultStatus
    if state is JobState.COMPLETED:
        return statuses.SUCCESSFUL
    if state is JobState.FAILED:
        return statuses.FAILED
    return statuses.RUNNING if state is JobState.ACTIVE else statuses.READY


def _header(stored: StoredJob) -> Mapping[str, Any]:
    options = stored.opts.get(BULLTASK_KEY)
    text = options.get("headers") if isinstance(options, dict) else None
    headers = codec.decode(text) if isinstance(text, str) else {}
    header = headers.get(HEADER) if isinstance(headers, dict) else None
    return header if isinstance(header, dict) else {}


def _class_path(trace: str) -> str:
    """Return the path of the exception in a traceback: the name on the first line after the last frame."""
    found = _EXCEPTION.search(trace, trace.rfind(_FRAME) + 1)
    name = "Exception" if found is None else found[1]
    return name if "." in name else f"builtins.{name}"
