"""Celery's names for exceptions, for code that imports them from ``celery.exceptions``; see :mod:`bulltask.errors`."""

from __future__ import annotations

from bulltask.errors import (
    BrokerError,
    BulltaskError,
    ConfigError,
    Ignore,
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
    "CeleryError",
    "Ignore",
    "ImproperlyConfigured",
    "MaxRetriesExceededError",
    "NotRegistered",
    "OperationalError",
    "Reject",
    "Retry",
    "SoftTimeLimitExceeded",
    "TaskRevokedError",
    "TimeLimitExceeded",
    "TimeoutError",
]

CeleryError = BulltaskError
ImproperlyConfigured = ConfigError
NotRegistered = TaskNotRegisteredError
OperationalError = BrokerError
TimeoutError = ResultTimeoutError  # noqa: A001 - Celery's name
