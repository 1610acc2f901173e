"""bulltask: Celery-style tasks for Python on BullMQ's queues in Redis.

Importing the package is cheap, because each name is imported on first use. Spark's Python processes need only a few
modules of bulltask, and do not have to import those for apps and workers.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from bulltask.app import App, Celery
    from bulltask.categories import ErrorCategory, categorize_error
    from bulltask.errors import (
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
    from bulltask.group_result import GroupResult
    from bulltask.hooks.middleware import Middleware
    from bulltask.jobs.states import JobState
    from bulltask.registry.batches import BatchJob
    from bulltask.registry.context import Context
    from bulltask.registry.current import current_app
    from bulltask.registry.current_job import get_logger as get_logger
    from bulltask.registry.current_job import get_task_logger
    from bulltask.registry.decorators import shared_task
    from bulltask.registry.request import Request
    from bulltask.registry.running import current_task
    from bulltask.registry.signature import Signature
    from bulltask.registry.stamping import StampingVisitor
    from bulltask.registry.task import AsyncTask, Task
    from bulltask.registry.workflows import chain, chord, group, signature
    from bulltask.registry.workflows import maybe_signature as maybe_signature
    from bulltask.registry.workflows import subtask as subtask
    from bulltask.result import AsyncResult, allow_join_result
    from bulltask.result_set import ResultSet
    from bulltask.schedules import crontab, schedule

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
    "AsyncResult": "bulltask.result",
    "AsyncTask": "bulltask.registry.task",
    "BatchJob": "bulltask.registry.batches",
    "BrokerError": "bulltask.errors",
    "BrokerUnavailableError": "bulltask.errors",
    "BulltaskError": "bulltask.errors",
    "Celery": "bulltask.app",
    "ConfigError": "bulltask.errors",
    "Context": "bulltask.registry.context",
    "ErrorCategory": "bulltask.categories",
    "GroupResult": "bulltask.group_result",
    "JobState": "bulltask.jobs.states",
    "Middleware": "bulltask.hooks.middleware",
    "PermanentError": "bulltask.errors",
    "Request": "bulltask.registry.request",
    "ResultSet": "bulltask.result_set",
    "ResultTimeoutError": "bulltask.errors",
    "Retry": "bulltask.errors",
    "Signature": "bulltask.registry.signature",
    "SoftTimeLimitExceeded": "bulltask.errors",
    "StampingVisitor": "bulltask.registry.stamping",
    "Task": "bulltask.registry.task",
    "TaskError": "bulltask.errors",
    "TaskCancelled": "bulltask.errors",
    "TaskRevokedError": "bulltask.errors",
    "TimeLimitExceeded": "bulltask.errors",
    "TransientError": "bulltask.errors",
    "allow_join_result": "bulltask.result",
    "categorize_error": "bulltask.categories",
    "chain": "bulltask.registry.workflows",
    "chord": "bulltask.registry.workflows",
    "crontab": "bulltask.schedules",
    "current_app": "bulltask.registry.current",
    "current_task": "bulltask.registry.running",
    "get_task_logger": "bulltask.registry.current_job",
    "group": "bulltask.registry.workflows",
    "schedule": "bulltask.schedules",
    "shared_task": "bulltask.registry.decorators",
    "signature": "bulltask.registry.workflows",
}
"""The module of each public name."""

_ALIASES: Final = {
    "get_logger": "bulltask.registry.current_job",
    "maybe_signature": "bulltask.registry.workflows",
    "subtask": "bulltask.registry.workflows",
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
