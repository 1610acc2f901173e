"""Runs Django's tasks in a worker."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from django.apps import apps
from django.utils.module_loading import import_string

from bulltask.contrib.django.project import project_app
from bulltask.contrib.django.stored_tasks import HEADER, change, moment, new_result, with_header
from bulltask.contrib.django.tasks_api import api, normalize_json
from bulltask.jobs.errors import BulltaskError, Interrupt, Reject, SoftTimeLimitExceeded, TaskCancelled
from bulltask.registry.context import Context
from bulltask.registry.options import TaskOptions
from bulltask.registry.request import current_job
from bulltask.registry.task import AnyTask, AsyncTask, Task
from bulltask.registry.tasks import add_shared

__all__ = ["find_task", "register"]

_tasks: Any = api("base")
_signals: Any = api("signals")

_registered: Final[dict[str, tuple[Any, AnyTask[..., Any]]]] = {}
"""Django's task, and bulltask's task that runs it, by path."""


def register(task: Any, options: TaskOptions) -> AnyTask[..., Any]:
    """Return bulltask's task that runs a Django task; register it for workers if it is new.

    Args:
        task: The Django task, or a variant of it.
        options: The options of its backend.

    Raises:
        DuplicateTaskError: Another task is registered under the path.
    """
    known = _registered.get(task.module_path)
    if known is not None and known[0].func is task.func:
        return known[1]
    is_async = inspect.iscoroutinefunction(task.func)
    function = _async_function(task) if is_async else _function(task)
    for attribute in ("__module__", "__name__", "__qualname__", "__doc__"):
        setattr(function, attribute, getattr(task.func, attribute))
    kind: type[AnyTask[..., Any]] = AsyncTask if is_async else Task
    created = kind(function, task.module_path, options, project_app, bind=True)
    add_shared(created)
    _registered[task.module_path] = task, created
    return created


def find_task(path: str) -> Any:
    """Return the Django task with this path, ``None`` if there is none.

    Any client with access to Redis may have written the path, so a module is imported only if it is part of an
    installed app.
    """
    if path in _registered:
        return _registered[path][0]
    if not any(path.startswith(f"{config.name}.") for config in apps.get_app_configs()):
        return None
    try:
        task = import_string(path)
    except ImportError:
        return None
    return task if isinstance(task, _tasks.Task) and task.module_path == path else None


def _function(task: Any) -> Callable[..., Any]:
    def run(context: Context, args: list[Any], kwargs: dict[str, Any], attempts: Sequence[Any] = ()) -> Any:
        attempt = _Attempt(task, context, args, kwargs, attempts)
        _signals.task_started.send_robust(attempt.sender, task_result=attempt.result)
        try:
            value = normalize_json(task.func(*attempt.arguments, **attempt.result.kwargs))
        except BaseException as exc:
            if attempt.failed(exc):
                _signals.task_finished.send_robust(attempt.sender, task_result=attempt.result)
            else:
                with suppress(BulltaskError):  # if this fails, the record lacks this attempt
                    context.update_data(attempt.data)
            raise
        attempt.succeeded(value)
        _signals.task_finished.send_robust(attempt.sender, task_result=attempt.result)
        return value

    return run


def _async_function(task: Any) -> Callable[..., Any]:
    async def run(context: Context, args: list[Any], kwargs: dict[str, Any], attempts: Sequence[Any] = ()) -> Any:
        attempt = _Attempt(task, context, args, kwargs, attempts)
        await _signals.task_started.asend_robust(attempt.sender, task_result=attempt.result)
        try:
            value = normalize_json(await task.func(*attempt.arguments, **attempt.result.kwargs))
        except BaseException as exc:
            if attempt.failed(exc):
                await _signals.task_finished.asend_robust(attempt.sender, task_result=attempt.result)
            else:
                with suppress(BulltaskError):
                    await context.aupdate_data(attempt.data)
            raise
        attempt.succeeded(value)
        await _signals.task_finished.asend_robust(attempt.sender, task_result=attempt.result)
        return value

    return run


class _Attempt:
    """An attempt to run a Django task.

    Args:
        task: The task as defined, without ``Task.using()``.
        context: The job's context.
        args, kwargs: The arguments.
        attempts: The worker and start time of each earlier failed attempt.

    Attributes:
        result: The ``TaskResult`` that signals and the task's context contain.
        data: The job's data with this attempt recorded.
    """

    def __init__(
        self, task: Any, context: Context, args: list[Any], kwargs: Mapping[str, Any], attempts: Sequence[Any]
    ) -> None:
        request = context.request
        self._path = task.module_path
        header = request.headers.get(HEADER, {})
        variant = with_header(task, header, request.queue)
        now_ms = project_app()._now_ms()
        recorded = [*attempts, (request.hostname, now_ms)]
        self.result = new_result(
            variant, request.id, variant.backend, args=args, kwargs=kwargs, enqueued_ms=request.timestamp_ms
        )
        lost = max(0, request.attempts_started - len(recorded))
        self.result.worker_ids.extend([*["unknown"] * lost, *(str(worker) for worker, _ in recorded)])
        self.data = {"args": args, "kwargs": kwargs, "attempts": recorded}
        change(
            self.result,
            status=_tasks.TaskResultStatus.RUNNING,
            started_at=moment(recorded[0][1]),
            last_attempted_at=moment(now_ms),
        )

    @property
    def sender(self) -> Any:
        """The sender of Django's signals: the class of the backend."""
        return type(self.result.task.get_backend())

    @property
    def arguments(self) -> list[Any]:
        """The positional arguments of the function."""
        result = self.result
        return [_tasks.TaskContext(task_result=result), *result.args] if result.task.takes_context else result.args

    def succeeded(self, value: Any) -> None:
        """Record the return value."""
        self._finish(_tasks.TaskResultStatus.SUCCESSFUL)
        change(self.result, _return_value=value)

    def failed(self, exc: BaseException) -> bool:
        """If the job fails with the exception, record it and return true; if the job runs again, return false."""
        if self._will_retry(exc):
            return False
        from bulltask.worker.outcomes import trace_of  # noqa: PLC0415 - only workers import it

        path = f"{type(exc).__module__}.{type(exc).__qualname__}"
        self.result.errors.append(_tasks.TaskError(exception_class_path=path, traceback=trace_of(exc)))
        self._finish(_tasks.TaskResultStatus.FAILED)
        return True

    def _finish(self, status: Any) -> None:
        change(self.result, status=status, finished_at=moment(project_app()._now_ms()))

    def _will_retry(self, exc: BaseException) -> bool:
        job = current_job()
        if isinstance(exc, TaskCancelled | Reject) or job is None:
            return False
        if isinstance(exc, Interrupt) and not isinstance(exc, SoftTimeLimitExceeded):
            return True
        from bulltask.worker.outcomes import is_retried  # noqa: PLC0415 - only workers import it

        return is_retried(exc, job, _registered[self._path][1], project_app())
