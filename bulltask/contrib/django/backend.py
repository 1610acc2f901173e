"""``BulltaskBackend``: a backend for Django's tasks API (``django.tasks``). bulltask's workers run the tasks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, Final

from django.core import checks
from django.utils import timezone

from bulltask.contrib.django.project import project_app
from bulltask.contrib.django.stored_tasks import HEADER, new_result, result_of
from bulltask.contrib.django.task_runs import find_task, register
from bulltask.contrib.django.tasks_api import api, normalize_json
from bulltask.jobs.errors import BulltaskError
from bulltask.jobs.job import NewJob
from bulltask.jobs.names import check_queue_name
from bulltask.registry.call import build_job
from bulltask.registry.options import CallOptions, TaskOptions
from bulltask.registry.tasks import SHARED

__all__ = ["BulltaskBackend"]

_base: Any = api("backends.base")
_tasks: Any = api("base")
_signals: Any = api("signals")
_exceptions: Any = api("exceptions")

_PRIORITY_OF_HIGHEST: Final = _tasks.TASK_MAX_PRIORITY + 1


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
        """The options of this backend's tasks.

        Raises:
            TypeError, ConfigError: ``OPTIONS`` are invalid.
        """
        return TaskOptions.of(self.options)

    def validate_task(self, task: Any) -> None:
        """Check a task, and register it for workers: Django calls this for every task that is defined."""
        super().validate_task(task)
        register(task, self.task_options)
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
            if job is not None and (task := find_task(job.name)) is not None:
                return result_of(task, job.stored, state)
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
            headers={HEADER: header},
        )
        data = {"args": normalize_json(list(args)), "kwargs": normalize_json(kwargs)}
        job = build_job(task.module_path, data, self.task_options, call, app._config)
        return new_result(task, job.id, self.alias, enqueued_ms=job.timestamp_ms, **data), job
