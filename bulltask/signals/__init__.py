"""Celery's signals, under Celery's names and with its keyword arguments.

.. code-block:: python

    from bulltask.signals import task_failure

    @task_failure.connect
    def report(sender, task_id, exception, **kwargs): ...

A receiver is called with keyword arguments: ``signal``, ``sender``, and those that are listed with each signal in
:mod:`bulltask.signals.catalog`. An exception that it raises is logged and has no other effect.
"""

from __future__ import annotations

from bulltask.signals.catalog import (
    NOT_AVAILABLE,
    after_task_publish,
    before_task_publish,
    setup_logging,
    task_failure,
    task_postrun,
    task_prerun,
    task_received,
    task_retry,
    task_revoked,
    task_success,
    worker_init,
    worker_process_init,
    worker_process_shutdown,
    worker_ready,
    worker_shutdown,
    worker_shutting_down,
)
from bulltask.signals.exception_info import ExceptionInfo
from bulltask.signals.signal import Signal

__all__ = [
    "ExceptionInfo",
    "Signal",
    "after_task_publish",
    "before_task_publish",
    "setup_logging",
    "task_failure",
    "task_postrun",
    "task_prerun",
    "task_received",
    "task_retry",
    "task_revoked",
    "task_success",
    "worker_init",
    "worker_process_init",
    "worker_process_shutdown",
    "worker_ready",
    "worker_shutdown",
    "worker_shutting_down",
]


def __getattr__(name: str) -> object:
    """Explain which of Celery's signals bulltask does not have."""
    if name in NOT_AVAILABLE:
        # An AttributeError would lose its message in "from bulltask.signals import …".
        raise ImportError(f"cannot import Celery's signal {name!r} from {__name__}: {NOT_AVAILABLE[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
