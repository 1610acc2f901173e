"""bulltask: Celery-style tasks for Python over BullMQ's Redis protocol."""

from __future__ import annotations

from bulltask.app import App, shared_task
from bulltask.categories import ErrorCategory, categorize_error
from bulltask.crontabs import crontab
from bulltask.errors import (
    BrokerError,
    BrokerUnavailable,
    BulltaskError,
    ConfigError,
    PermanentError,
    ResultTimeout,
    Retry,
    SoftTimeLimitExceeded,
    TaskError,
    TaskRevoked,
    TaskRevokedError,
    TimeLimitExceeded,
    TransientError,
)
from bulltask.registry.context import Context, Request
from bulltask.registry.task import AsyncTask, Signature, Task
from bulltask.result import AsyncResult
from bulltask.states import JobState

__all__ = [
    "App",
    "AsyncResult",
    "AsyncTask",
    "BrokerError",
    "BrokerUnavailable",
    "BulltaskError",
    "ConfigError",
    "Context",
    "ErrorCategory",
    "JobState",
    "PermanentError",
    "Request",
    "ResultTimeout",
    "Retry",
    "Signature",
    "SoftTimeLimitExceeded",
    "Task",
    "TaskError",
    "TaskRevoked",
    "TaskRevokedError",
    "TimeLimitExceeded",
    "TransientError",
    "categorize_error",
    "crontab",
    "shared_task",
]
