"""bulltask: Celery-style tasks for Python on BullMQ's queues in Redis.

Importing the package is cheap, because each name is imported on first use. Spark's Python processes need only a few
modules of bulltask, and do not have to import those for apps and workers.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from bulltask.app import App, Celery
    from bulltask.jobs.categories import ErrorCategory, categorize_error
    from bulltask.jobs.errors import (
        BrokerError,
        BrokerUnavailableError,
        BulltaskError,
        ConfigError,
        PermanentError,
        ResultTimeoutError,
        Retry,
        SoftTimeLimitExceeded,
        TaskCancelled,
        TaskError,
        TaskRevokedError,
        TimeLimitExceeded,
        TransientError,
    )
    from bulltask.jobs.names import JobState
    from bulltask.jobs.schedules import crontab, schedule
    from bulltask.observe.hooks import Middleware
    from bulltask.registry.batches import BatchJob
    from bulltask.registry.canvas import Signature, chain, chord, group, signature
    from bulltask.registry.canvas import maybe_signature as maybe_signature
    from bulltask.registry.canvas import subtask as subtask
    from bulltask.registry.context import Context, current_task
    from bulltask.registry.protocols import allow_join_result
    from bulltask.registry.request import Request, current_app, get_task_logger
    from bulltask.registry.request import get_logger as get_logger
    from bulltask.registry.results import AsyncResult, GroupResult, ResultSet
    from bulltask.registry.stamping import StampingVisitor
    from bulltask.registry.task import AsyncTask, Task
    from bulltask.registry.tasks import shared_task

__all__ = [
    "App",
    "AsyncResult",
    "AsyncTask",
    "BatchJob",
    "BrokerError",
    "BrokerUnavailableError",
    "BulltaskError",
    "Celery",
    "ConfigError",
    "Context",
    "ErrorCategory",
    "GroupResult",
    "JobState",
    "Middleware",
    "PermanentError",
    "Request",
    "ResultSet",
    "ResultTimeoutError",
    "Retry",
    "Signature",
    "SoftTimeLimitExceeded",
    "StampingVisitor",
    "Task",
    "TaskCancelled",
    "TaskError",
    "TaskRevokedError",
    "TimeLimitExceeded",
    "TransientError",
    "allow_join_result",
    "categorize_error",
    "chain",
    "chord",
    "crontab",
    "current_app",
    "current_task",
    "get_task_logger",
    "group",
    "schedule",
    "shared_task",
    "signature",
]

_MODULES: Final = {
    "App": "bulltask.app",
    "AsyncResult": "bulltask.registry.results",
    "AsyncTask": "bulltask.registry.task",
    "BatchJob": "bulltask.registry.batches",
    "BrokerError": "bulltask.jobs.errors",
    "BrokerUnavailableError": "bulltask.jobs.errors",
    "BulltaskError": "bulltask.jobs.errors",
    "Celery": "bulltask.app",
    "ConfigError": "bulltask.jobs.errors",
    "Context": "bulltask.registry.context",
    "ErrorCategory": "bulltask.jobs.categories",
    "GroupResult": "bulltask.registry.results",
    "JobState": "bulltask.jobs.names",
    "Middleware": "bulltask.observe.hooks",
    "PermanentError": "bulltask.jobs.errors",
    "Request": "bulltask.registry.request",
    "ResultSet": "bulltask.registry.results",
    "ResultTimeoutError": "bulltask.jobs.errors",
    "Retry": "bulltask.jobs.errors",
    "Signature": "bulltask.registry.canvas",
    "SoftTimeLimitExceeded": "bulltask.jobs.errors",
    "StampingVisitor": "bulltask.registry.stamping",
    "Task": "bulltask.registry.task",
    "TaskError": "bulltask.jobs.errors",
    "TaskCancelled": "bulltask.jobs.errors",
    "TaskRevokedError": "bulltask.jobs.errors",
    "TimeLimitExceeded": "bulltask.jobs.errors",
    "TransientError": "bulltask.jobs.errors",
    "allow_join_result": "bulltask.registry.protocols",
    "categorize_error": "bulltask.jobs.categories",
    "chain": "bulltask.registry.canvas",
    "chord": "bulltask.registry.canvas",
    "crontab": "bulltask.jobs.schedules",
    "current_app": "bulltask.registry.request",
    "current_task": "bulltask.registry.context",
    "get_task_logger": "bulltask.registry.request",
    "group": "bulltask.registry.canvas",
    "schedule": "bulltask.jobs.schedules",
    "shared_task": "bulltask.registry.tasks",
    "signature": "bulltask.registry.canvas",
}
"""The module of each public name."""

_ALIASES: Final = {
    "get_logger": "bulltask.registry.request",
    "maybe_signature": "bulltask.registry.canvas",
    "subtask": "bulltask.registry.canvas",
}
"""Celery's names for what has another public name: importable, so that a project runs unchanged."""

_NOT_AVAILABLE: Final = {
    "EagerResult": "apply() returns an AsyncResult",
    "chunks": "use task.chunks(…)",
    "utils": "use bulltask.get_task_logger; for uuid(), use Python's uuid module, as in str(uuid.uuid4())",
    "uuid": "use Python's uuid module, as in task_id=str(uuid.uuid4())",
    "xmap": "use task.map(…)",
    "xstarmap": "use task.starmap(…)",
}
"""Celery's names that bulltask does not have, with the reason or what to use instead."""

if not TYPE_CHECKING:  # type checkers would accept any name

    def __getattr__(name: str) -> object:
        """Import a public name, or a module such as ``bulltask.errors``, on first use."""
        if module := _MODULES.get(name) or _ALIASES.get(name):
            value = getattr(importlib.import_module(module), name)
        elif name in _NOT_AVAILABLE:
            # An AttributeError would lose its message in "from bulltask import …".
            raise ImportError(f"cannot import {name!r} from bulltask: {_NOT_AVAILABLE[name]}")
        elif name.startswith("_") or importlib.util.find_spec(f"{__name__}.{name}") is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        else:
            value = importlib.import_module(f"{__name__}.{name}")
        globals()[name] = value  # not looked up again
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
