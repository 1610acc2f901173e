"""``BulltaskBackend``: a backend for Django's tasks API (``django.tasks``). bulltask's workers run the tasks.

The backend sends jobs and reads their results (:func:`_result_of`). For workers, it registers a task of bulltask for
each task of Django (:func:`_register`), which runs it and sends Django's signals.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import cached_property
from typing import Any, Final

from django.apps import apps
from django.conf import settings
from django.core import checks
from django.utils import timezone
from django.utils.module_loading import import_string

from bulltask.contrib.django.project import api, normalize_json, project_app
from bulltask.jobs import codec
from bulltask.jobs.errors import BulltaskError, Interrupt, Reject, SoftTimeLimitExceeded, TaskCancelled
from bulltask.jobs.job import BULLTASK_KEY, NewJob
from bulltask.jobs.names import JobState, check_queue_name
from bulltask.jobs.stored_job import StoredJob
from bulltask.registry.call import build_job
from bulltask.registry.context import Context
from bulltask.registry.options import CallOptions, TaskOptions
from bulltask.registry.request import current_job
from bulltask.registry.task import AnyTask, AsyncTask, Task
from bulltask.registry.tasks import SHARED

__all__ = ["BulltaskBackend"]

_base: Any = api("backends.base")
_tasks: Any = api("base")
_signals: Any = api("signals")
_exceptions: Any = api("exceptions")

_HEADER: Final = "django_task"
"""The header that stores the values set with Django's ``Task.using()``."""

_PRIORITY_OF_HIGHEST: Final = _tasks.TASK_MAX_PRIORITY + 1
_EXCEPTION: Final = re.compile(r"^([A-Za-z_][\w.]*)(?::|$)", re.MULTILINE)
_FRAME: Final = '  File "'

_registered: Final[dict[str, tuple[Any, AnyTask[..., Any]]]] = {}
"""Django's task, and bulltask's task that runs it, by path."""


class BulltaskBackend(_base.BaseTaskBackend):  # type: ignore[misc]
    """A backend for ``TASKS``: ``{"default": {"BACKEND": "bulltask.contrib.django.backend.BulltaskBackend"}}``.

    ``QUEUES`` lists the names of the queues that the project's workers process. An empty list allows any name.
    ``OPTIONS`` contains options of bulltask's tasks, such as ``{"max_retries": 5, "time_limit": 60}``, which apply to
    all tasks of this backend. A job's name is the path of its task: ``shop.tasks.send_receipt``.

    Django's priorities are converted to BullMQ's: 100 becomes 1 (the highest), 0 becomes 101, and -100 becomes 201.
    """

    supports_defer = True
    supports_async_task = True
    supports_get_result = True
    supports_priority = True

    def __init__(self, alias: str, params: Mapping[str, Any]) -> None:
        super().__init__(alias, params)
        SHARED.add_queues(self.queues)

    @cached_property
    def task_options(self) -> TaskOptions:
        """The options of this backend's tasks."""
        return TaskOptions.of(self.options)

    def validate_task(self, task: Any) -> None:
        """Check a task, and register it for workers: Django calls this for every task that is defined."""
        super().validate_task(task)
        _register(task, self.task_options)
        SHARED.add_queues([task.queue_name])  # for get_result(), if QUEUES is empty

    def enqueue(self, task: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Send a job, and return its ``TaskResult``.

        Raises:
            InvalidTask: This backend cannot run the task.
            TypeError, EncodeError, PayloadTooLargeError: The arguments are not JSON, or too large.
            BrokerError: Redis could not be reached, or returned an error.
        """
        result, job = self._prepare(task, args, kwargs)
        project_app()._send([job])
        _signals.task_enqueued.send_robust(type(self), task_result=result)
        return result

    async def aenqueue(self, task: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """:meth:`enqueue` for asyncio."""
        result, job = self._prepare(task, args, kwargs)
        await project_app()._asend([job])
        await _signals.task_enqueued.asend_robust(type(self), task_result=result)
        return result

    def get_result(self, result_id: str) -> Any:
        """Return the ``TaskResult`` of a job, from Redis.

        Raises:
            TaskResultDoesNotExist: The job does not exist, was removed (``result_expires``), or does not belong to a
                Django task.
            BulltaskError: The app is in eager mode.
            BrokerError: Redis could not be reached.
        """
        app = project_app()
        if app._config.always_eager:
            raise BulltaskError("eager mode (task_always_eager) has no results: use Django's ImmediateBackend in tests")
        queues = sorted(self.queues) or list(dict.fromkeys([app._config.default_queue, *app.tasks.queues]))
        name = app._results.queue_of(str(result_id), queues)
        if name is not None:
            queue = app.queue(name)
            job, state = queue.get_job(result_id), queue.get_job_state(result_id)
            if job is not None and (job.finished_ms is not None) != state.finished:
                job = queue.get_job(result_id)  # it has just finished
            if job is not None and (task := _find_task(job.name)) is not None:
                return _result_of(task, job.stored, state)
        raise _exceptions.TaskResultDoesNotExist(result_id)

    def check(self, **_kwargs: object) -> Iterable[checks.CheckMessage]:
        """Check the options and queue names."""
        problems = []
        try:
            _ = self.task_options
            for name in self.queues:
                check_queue_name(name)
        except (BulltaskError, TypeError) as exc:
            hint = f"See TASKS[{self.alias!r}] and BULLTASK in the settings."
            problems.append(checks.Error(str(exc), hint=hint, obj=self.alias, id="bulltask.E001"))
        return problems

    def _prepare(self, task: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, NewJob]:
        self.validate_task(task)
        app = project_app()
        run_after = task.run_after
        if run_after is not None and timezone.is_naive(run_after):
            run_after = timezone.make_aware(run_after)
        header = {
            "backend": self.alias,
            "priority": task.priority,
            "run_after": None if task.run_after is None else task.run_after.isoformat(),
        }
        call = CallOptions(
            queue=task.queue_name,
            priority=_PRIORITY_OF_HIGHEST - task.priority,
            eta=run_after,
            timestamp=app._now_ms() / 1000,
            headers={_HEADER: header},
        )
        data = {"args": normalize_json(list(args)), "kwargs": normalize_json(kwargs)}
        job = build_job(task.module_path, data, self.task_options, call, app._config)
        return _new_result(task, job.id, self.alias, enqueued_ms=job.timestamp_ms, **data), job


def _new_result(
    task: Any,
    result_id: str,
    alias: str,
    *,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    enqueued_ms: int | None,
) -> Any:
    """Return the result of a task that has not started; ``alias`` is its backend's, ``enqueued_ms`` epoch time."""
    return _tasks.TaskResult(
        task=task,
        id=result_id,
        status=_tasks.TaskResultStatus.READY,
        enqueued_at=_moment(enqueued_ms),
        started_at=None,
        last_attempted_at=None,
        finished_at=None,
        args=args,
        kwargs=kwargs,
        backend=alias,
        errors=[],
        worker_ids=[],
    )


def _with_header(task: Any, header: Mapping[str, Any], queue: str) -> Any:
    """Return a copy of a task with the values of ``Task.using()`` that a job was sent with.

    It does not call ``task.using()``, which would check the values again, because ``QUEUES`` may be different in this
    process.
    """
    run_after = header.get("run_after")
    return _change(
        copy.copy(task),
        queue_name=queue,
        backend=header.get("backend", task.backend),
        priority=header.get("priority", task.priority),
        run_after=None if run_after is None else datetime.fromisoformat(run_after),
    )


def _result_of(task: Any, stored: StoredJob, state: JobState) -> Any:
    """Return the result of a stored job of a task, which is given as defined, without ``Task.using()``."""
    data = stored.data if isinstance(stored.data, dict) else {}
    task = _with_header(task, _header(stored), stored.queue)
    result = _new_result(
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
        changes |= {"started_at": _moment(attempts[0][1]), "last_attempted_at": _moment(stored.processed_ms)}
    if state.finished:
        changes["finished_at"] = _moment(stored.finished_ms)
    if state is JobState.COMPLETED:
        changes["_return_value"] = stored.returnvalue
    return _change(result, **changes)


def _change(frozen: Any, **values: Any) -> Any:
    """Set attributes of a frozen dataclass of Django, and return it."""
    for name, value in values.items():
        object.__setattr__(frozen, name, value)
    return frozen


def _moment(epoch_ms: int | None) -> datetime | None:
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
    header = headers.get(_HEADER) if isinstance(headers, dict) else None
    return header if isinstance(header, dict) else {}


def _class_path(trace: str) -> str:
    """Return the path of the exception in a traceback: the name on the first line after the last frame."""
    found = _EXCEPTION.search(trace, trace.rfind(_FRAME) + 1)
    name = "Exception" if found is None else found[1]
    return name if "." in name else f"builtins.{name}"


def _register(task: Any, options: TaskOptions) -> AnyTask[..., Any]:
    """Return bulltask's task that runs a Django task, or a variant of it; register it for workers if it is new."""
    known = _registered.get(task.module_path)
    if known is not None and known[0].func is task.func:
        return known[1]
    is_async = inspect.iscoroutinefunction(task.func)
    function = _async_function(task) if is_async else _function(task)
    for attribute in ("__module__", "__name__", "__qualname__", "__doc__"):
        setattr(function, attribute, getattr(task.func, attribute))
    kind: type[AnyTask[..., Any]] = AsyncTask if is_async else Task
    created = kind(function, task.module_path, options, project_app, bind=True)
    SHARED.add(created)
    _registered[task.module_path] = task, created
    return created


def _find_task(path: str) -> Any:
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
    """An attempt to run a Django task, after others of which ``attempts`` has the worker and start time.

    ``result`` is the ``TaskResult`` that signals and the task's context contain, and ``data`` the job's data with this
    attempt recorded.
    """

    def __init__(
        self, task: Any, context: Context, args: list[Any], kwargs: Mapping[str, Any], attempts: Sequence[Any]
    ) -> None:
        request = context.request
        self._path = task.module_path
        header = request.headers.get(_HEADER, {})
        variant = _with_header(task, header, request.queue)
        now_ms = project_app()._now_ms()
        recorded = [*attempts, (request.hostname, now_ms)]
        self.result = _new_result(
            variant, request.id, variant.backend, args=args, kwargs=kwargs, enqueued_ms=request.timestamp_ms
        )
        lost = max(0, request.attempts_started - len(recorded))
        self.result.worker_ids.extend([*["unknown"] * lost, *(str(worker) for worker, _ in recorded)])
        self.data = {"args": args, "kwargs": kwargs, "attempts": recorded}
        _change(
            self.result,
            status=_tasks.TaskResultStatus.RUNNING,
            started_at=_moment(recorded[0][1]),
            last_attempted_at=_moment(now_ms),
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
        _change(self.result, _return_value=value)

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
        _change(self.result, status=status, finished_at=_moment(project_app()._now_ms()))

    def _will_retry(self, exc: BaseException) -> bool:
        job = current_job()
        if isinstance(exc, TaskCancelled | Reject) or job is None:
            return False
        if isinstance(exc, Interrupt) and not isinstance(exc, SoftTimeLimitExceeded):
            return True
        from bulltask.worker.outcomes import is_retried  # noqa: PLC0415 - only workers import it

        return is_retried(exc, job, _registered[self._path][1], project_app())
