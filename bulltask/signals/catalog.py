"""The signals. The comment of each lists its sender, its keyword arguments, and where its receivers are called."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from bulltask.signals.signal import ReceiverFlag, Signal

__all__ = [
    "NOT_AVAILABLE",
    "PUBLISH_SIGNALS",
    "TASK_SIGNALS",
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

PUBLISH_SIGNALS: Final = ReceiverFlag()
TASK_SIGNALS: Final = ReceiverFlag()

# ---- sending: in the process that sends; the sender is the task's name -----------------------------------------------

before_task_publish: Final = Signal("before_task_publish", PUBLISH_SIGNALS)
"""Before a job is sent: ``body``, ``exchange``, ``routing_key``, ``headers``, ``properties``, ``declare``,
``retry_policy``. ``headers`` has ``id`` and ``task`` and may be changed; the other arguments are copies."""

after_task_publish: Final = Signal("after_task_publish", PUBLISH_SIGNALS)
"""After Redis has stored a job: ``body``, ``exchange``, ``routing_key``, ``headers``."""

# ---- running: in the child that runs the job, in the task's context; the sender is the task --------------------------

task_received: Final = Signal("task_received", TASK_SIGNALS)
"""Directly before ``task_prerun``, because a worker takes a job only when it can run it: ``request``."""

task_prerun: Final = Signal("task_prerun", TASK_SIGNALS)
"""Before a task is called: ``task_id``, ``task``, ``args``, ``kwargs``."""

task_postrun: Final = Signal("task_postrun", TASK_SIGNALS)
"""After the outcome is stored, for every ``task_prerun``: ``task_id``, ``task``, ``args``, ``kwargs``, ``retval``,
``state`` (``SUCCESS``, ``FAILURE``, ``RETRY``, ``REVOKED``; ``IGNORED`` if the lock was lost)."""

task_success: Final = Signal("task_success", TASK_SIGNALS)
"""After the result is stored: ``result``."""

task_failure: Final = Signal("task_failure", TASK_SIGNALS)
"""After the failure is stored: ``task_id``, ``exception``, ``args``, ``kwargs``, ``traceback``, ``einfo``."""

task_retry: Final = Signal("task_retry", TASK_SIGNALS)
"""After the retry is stored: ``request``, ``reason`` (the exception), ``einfo``."""

task_revoked: Final = Signal("task_revoked", TASK_SIGNALS)
"""After a running job was revoked, or an expired one failed: ``request``, ``terminated``, ``signum``, ``expired``."""

# ---- a worker's processes --------------------------------------------------------------------------------------------

worker_init: Final = Signal("worker_init")
"""Before a worker starts, in its supervisor. The sender has ``hostname`` and ``app``."""

worker_ready: Final = Signal("worker_ready")
"""When the first child is ready, in the worker's hook process. The sender has ``hostname`` and ``app``."""

worker_shutting_down: Final = Signal("worker_shutting_down")
"""When the worker begins to stop, in its hook process: ``sig``, ``how`` (``Warm``, ``Cold``), ``exitcode``. The sender
is the worker id."""

worker_shutdown: Final = Signal("worker_shutdown")
"""When all children have exited, in the worker's hook process. The sender has ``hostname`` and ``app``."""

worker_process_init: Final = Signal("worker_process_init", is_async=True)
"""In each child, before its first job. The sender is ``None``. Coroutine functions run on the event loop of async
tasks."""

worker_process_shutdown: Final = Signal("worker_process_shutdown", is_async=True)
"""In each child that stops, after its last job: ``pid``, ``exitcode``. The sender is ``None``. Coroutine functions run
on the event loop of async tasks."""

setup_logging: Final = Signal("setup_logging")
"""Instead of configuring logging, in the worker's supervisor and in spawned children: ``loglevel``, ``logfile``,
``format``, ``colorize``. The sender is ``None``."""

_LISTENER: Final = "use @app.on({}) of bulltask.events"
NOT_AVAILABLE: Final[Mapping[str, str]] = {
    "after_setup_logger": "connect setup_logging, or add a handler to the root logger in the app's module",
    "after_setup_task_logger": "connect setup_logging, or add a handler to the root logger in the app's module",
    "beat_embedded_init": "there is no beat process",
    "beat_init": "there is no beat process",
    "celeryd_after_setup": "use worker_init",
    "celeryd_init": "use worker_init",
    "eventlet_pool_apply": "there is no eventlet pool",
    "eventlet_pool_postshutdown": "there is no eventlet pool",
    "eventlet_pool_preshutdown": "there is no eventlet pool",
    "eventlet_pool_started": "there is no eventlet pool",
    "heartbeat_sent": "workers send no heartbeat messages",
    "import_modules": "put the code in the app's module",
    "task_internal_error": "an unexpected error of bulltask ends the child, and its job runs again",
    "task_rejected": _LISTENER.format("MalformedJobFailed"),
    "task_sent": "use after_task_publish",
    "task_unknown": _LISTENER.format("JobIncompatible"),
    "trace": "use task_prerun and task_postrun",
    "user_preload_options": "an app cannot add options to bulltask's commands",
}
"""Celery's other signals, and what to use instead."""
