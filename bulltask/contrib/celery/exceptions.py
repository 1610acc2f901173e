"""Celery's names for exceptions, for code that imports them from ``celery.exceptions``; the public path is
``bulltask.exceptions``.

An exception without an equivalent cannot be imported; the error says what to use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from bulltask.jobs.errors import (
    BrokerError,
    BulltaskError,
    ConfigError,
    DuplicateTaskError,
    Ignore,
    Interrupt,
    InvalidJobError,
    MaxRetriesExceededError,
    Reject,
    ResultTimeoutError,
    Retry,
    SoftTimeLimitExceeded,
    TaskNotRegisteredError,
    TaskRevokedError,
    TimeLimitExceeded,
)

__all__ = [
    "AlreadyRegistered",
    "BackendError",
    "BackendGetMetaError",
    "CeleryError",
    "Ignore",
    "ImproperlyConfigured",
    "InvalidTaskError",
    "MaxRetriesExceededError",
    "NotRegistered",
    "OperationalError",
    "Reject",
    "Retry",
    "SoftTimeLimitExceeded",
    "TaskPredicate",
    "TaskRevokedError",
    "TimeLimitExceeded",
    "TimeoutError",
]

AlreadyRegistered = DuplicateTaskError
BackendError = BrokerError
BackendGetMetaError = BrokerError
CeleryError = BulltaskError
ImproperlyConfigured = ConfigError
InvalidTaskError = InvalidJobError
NotRegistered = TaskNotRegisteredError
OperationalError = BrokerError
TaskPredicate = Interrupt
TimeoutError = ResultTimeoutError  # noqa: A001 - Celery's name

_USER_WARNING: Final = "bulltask's warnings have the category UserWarning"
_SHUTDOWN: Final = "send the worker's process a signal: TERM for a warm shutdown, QUIT for a cold one"
_NOT_AVAILABLE: Final = {
    "AlwaysEagerIgnored": _USER_WARNING,
    "BackendStoreError": "a worker keeps trying to store an outcome until Redis accepts it",
    "CDeprecationWarning": _USER_WARNING,
    "CPendingDeprecationWarning": _USER_WARNING,
    "CeleryCommandException": "use click.ClickException",
    "CeleryWarning": _USER_WARNING,
    "ChordError": "the result of a chord raises the exception of the member that failed",
    "DuplicateNodenameWarning": "several workers may have the same name",
    "DuplicateTaskNameWarning": "a second function with the same task name raises bulltask.errors.DuplicateTaskError",
    "FixupWarning": _USER_WARNING,
    "IncompleteStream": "bulltask does not raise it",
    "NotConfigured": _USER_WARNING,
    "QueueNotFound": "a queue needs no declaration: it exists when it has a job",
    "SecurityError": "a pickle without a valid signature raises bulltask.errors.DecodeError",
    "SecurityWarning": _USER_WARNING,
    "TaskError": "use CeleryError, or the exceptions that get() raises: TimeoutError, TaskRevokedError, and "
    "bulltask.TaskError if the task's own exception cannot be rebuilt",
    "Terminated": "use TaskRevokedError, which get() raises, or bulltask.TaskCancelled, which a running task receives",
    "WorkerLostError": "a job whose child process died runs again; after max_crashes crashes it fails, and get() "
    "raises bulltask.TaskError",
    "WorkerShutdown": _SHUTDOWN,
    "WorkerTerminate": _SHUTDOWN,
    "reraise": "use raise exception.with_traceback(traceback)",
}
"""Celery's exceptions that bulltask does not have, with the reason or what to use instead."""

if not TYPE_CHECKING:  # type checkers would accept any name

    def __getattr__(name: str) -> object:
        """Explain which of Celery's exceptions bulltask does not have."""
        if name in _NOT_AVAILABLE:
            # An AttributeError would lose its message in "from bulltask.exceptions import …".
            raise ImportError(f"cannot import Celery's {name!r} from bulltask.exceptions: {_NOT_AVAILABLE[name]}")
        raise AttributeError(f"module 'bulltask.exceptions' has no attribute {name!r}")
