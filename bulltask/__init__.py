"""bulltask: Celery-style tasks for Python over BullMQ's Redis protocol."""

from __future__ import annotations

from bulltask.app import App, shared_task
from bulltask.categories import ErrorCategory, categorize_error
from bulltask.errors import (
    BrokerError,
    BrokerUnavailable,
    BulltaskError,
    ConfigError,
    PermanentError,
    ResultTimeout,
    Retry,
    TaskError,
    TransientError,
)
from bulltask.registry.context import Context, Request
from bulltask.registry.task import AsyncTask, Signature, Task
from bulltask.result import AsyncResult
from bulltask.states import JobState

__all__ = [
    # making and sending tasks
    "App",
    "AsyncResult",
    "AsyncTask",
    "Context",
    "JobState",
    "Request",
    "Signature",
    "Task",
    "shared_task",
    # errors that tasks raise
    "PermanentError",
    "Retry",
    "TransientError",
    # errors that senders and readers meet
    "BrokerError",
    "BrokerUnavailable",
    "BulltaskError",
    "ConfigError",
    "ResultTimeout",
    "TaskError",
    # what is retried
    "ErrorCategory",
    "categorize_error",
]
