"""bulltask's exceptions; their public path is :mod:`bulltask.errors`. First, what raises and explains them.

:func:`warn_user` warns at the user's line of code. A library that is not installed raises ``MissingExtraError`` when it
is needed, and names the extra that installs it. :func:`did_you_mean` suggests a name instead of a misspelled one.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence, Set
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeVar

__all__ = [
    "HIDDEN_VALUES",
    "RECOVERABLE",
    "AppNotFoundError",
    "BrokerAuthError",
    "BrokerConfigError",
    "BrokerError",
    "BrokerNotReadyError",
    "BrokerOutOfMemoryError",
    "BrokerUnavailableError",
    "BulltaskError",
    "ConfigError",
    "DecodeError",
    "DuplicateTaskError",
    "EncodeError",
    "EventLoopBlockedError",
    "EventsLostError",
    "FailedChildrenError",
    "Ignore",
    "Interrupt",
    "InvalidJobError",
    "InvalidNameError",
    "JobError",
    "JobExpiredError",
    "JobNotFoundError",
    "JobStateError",
    "LakeError",
    "LakeInUseError",
    "LockMismatchError",
    "LockMissingError",
    "MaxRetriesExceededError",
    "MigrationError",
    "MissingExtraError",
    "NoPendingChildrenError",
    "ParentConflictError",
    "ParentNotFoundError",
    "PayloadTooLargeError",
    "PendingChildrenError",
    "PermanentError",
    "QueueActiveError",
    "QueueError",
    "QueueNotPausedError",
    "RateLimitQueue",
    "Reject",
    "ReleaseJob",
    "RescheduleJob",
    "ResultTimeoutError",
    "Retry",
    "SchedulerBusyError",
    "SchedulerCollisionError",
    "SchedulerJobError",
    "ScriptIntegrityError",
    "SoftTimeLimitExceeded",
    "TaskCancelled",
    "TaskError",
    "TaskNotRegisteredError",
    "TaskRejectedError",
    "TaskRevokedError",
    "TimeLimitExceeded",
    "TransientError",
    "WaitForChildren",
    "WorkerShutdown",
    "did_you_mean",
    "incompatible",
]

_PACKAGE: Final = f"{Path(__file__).parents[1]}{os.sep}"


def warn_user(text: str) -> None:
    """Emit a ``UserWarning`` at the line of the user's code that called bulltask; Python shows each once per line."""
    frame, level = sys._getframe(), 1  # noqa: SLF001
    while frame.f_back is not None and frame.f_code.co_filename.startswith((_PACKAGE, "<")):  # "<": code of a dataclass
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)


SPARK: Final = frozenset({"deltalake", "numpy", "pyarrow", "pyspark", "py4j"})
"""Modules of the libraries in the extra ``spark``."""


def look_up(
    package: str, name: str, modules: Mapping[str, str], extra: str = "", libraries: Set[str] = frozenset()
) -> Any:
    """Import a public name of a package and return it; the package's ``__getattr__`` calls this.

    ``modules`` has the module of each public name, and ``extra`` installs the ``libraries`` that they need, if any.
    """
    if name not in modules:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(modules[name]), name)
    except ModuleNotFoundError as exc:
        if exc.name is None or exc.name.partition(".")[0] not in libraries:
            raise
        raise MissingExtraError(
            f"{package}.{name} needs {exc.name}, which is not installed: pip install 'bulltask[{extra}]'"
        ) from exc


def check_installed(module: str, extra: str, what: str) -> None:
    """Check that an optional dependency, which ``what`` needs, is installed, without importing it."""
    if importlib.util.find_spec(module) is None:
        raise MissingExtraError(f"{what} needs {module}, which is not installed: pip install 'bulltask[{extra}]'")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a suffix for an error message that suggests the closest of the ``known`` names, or ``""``."""
    match = nearest(name, known)
    return f"; did you mean {match!r}?" if match else ""


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return the closest of the ``known`` names, ``""`` if the similarity of all is below ``cutoff`` (0 to 1).

    What two dotted names have in common before a dot, such as a module, does not make them similar.
    """
    import difflib  # noqa: PLC0415 - only for a misspelled name

    for match in difflib.get_close_matches(name, list(known), cutoff=cutoff):
        start = next((at for at, (a, b) in enumerate(zip(name, match, strict=False)) if a != b), 0)
        start = name.rfind(".", 0, start) + 1
        if difflib.SequenceMatcher(None, match[start:], name[start:]).ratio() >= cutoff:
            return match
    return ""


class Interrupt(BaseException):
    """Ends an attempt early. A ``BaseException``, so that ``except Exception`` in a task does not catch it."""


class Retry(Interrupt):
    """Requests a retry of the job; raised by ``Context.retry()``.

    Attributes:
        delay_ms: Delay before the next attempt in milliseconds, ``None`` for the job's backoff.
        exc: The exception that the job fails with if no attempt is left.
        max_retries: Maximum number of retries; ``None`` for the maximum that is stored in the job.
        eta_ms: Epoch milliseconds before which the next attempt does not start, ``None`` for ``delay_ms``.
        expires: ``(in_ms, at_ms)``: the time after which the job is no longer retried, in milliseconds from now or in
            epoch milliseconds. At most one of them is set.
        arguments: The positional and keyword arguments of the next attempt, ``None`` for the same as now.
        data: These arguments as they are stored.
        queue: The queue of the next attempt, ``None`` for the same as now.
    """

    def __init__(  # noqa: PLR0913 - what a task can request
        self,
        *,
        delay_ms: int | None = None,
        exc: BaseException | None = None,
        max_retries: int | None = None,
        eta_ms: int | None = None,
        expires: tuple[int | None, int | None] = (None, None),
        arguments: tuple[tuple[Any, ...], dict[str, Any]] | None = None,
        data: bytes | None = None,
        queue: str | None = None,
    ) -> None:
        super().__init__("the task requested a retry")
        self.delay_ms = delay_ms
        self.exc = exc
        self.max_retries = max_retries
        self.eta_ms = eta_ms
        self.expires = expires
        self.arguments = arguments
        self.data = data
        self.queue = queue

    def expires_at(self, now_ms: int) -> int | None:
        """Return the job's new expiry in epoch milliseconds, ``None`` if it does not change."""
        in_ms, at_ms = self.expires
        return at_ms if in_ms is None else now_ms + in_ms


class RescheduleJob(Interrupt):
    """Reschedules the job, without counting the attempt (BullMQ's ``DelayedError``).

    Args:
        delay: Seconds or ``timedelta`` until the job runs again.
    """

    def __init__(self, delay: float | timedelta) -> None:
        super().__init__("the task rescheduled its job")
        self.delay = delay


class ReleaseJob(Interrupt):
    """Releases the job: it is next in its queue, and the attempt does not count (BullMQ's ``WaitingError``).

    The loop of a checkpointed task raises it when the worker stops.

    Args:
        reason: Why, for the worker's log.
    """

    def __init__(self, reason: str = "its task released it") -> None:
        super().__init__("the task released its job")
        self.reason = reason


class RateLimitQueue(Interrupt):
    """Releases the job and rate-limits the queue, without counting the attempt.

    It is BullMQ's ``worker.rateLimit(ms)`` with ``RateLimitError``. If the queue has a global rate limit, all workers
    stop acquiring its jobs. Otherwise, only the workers with a ``limiter`` stop, and the child that ran the task.

    Args:
        duration: How long they stop: seconds or ``timedelta``.
    """

    def __init__(self, duration: float | timedelta) -> None:
        super().__init__("the task rate-limited its queue")
        self.duration = duration


class Ignore(Interrupt):
    """Ends the job in the state that its task set last (Celery's ``Ignore``).

    If the task called ``self.update_state(state=…, meta=…)`` in this attempt, the last ``state`` has this effect:

    * ``FAILURE`` fails the job without a retry. The reason is ``meta``: a string, or ``exc_message`` in Celery's form
      of an exception, ``{"exc_type": "ValueError", "exc_message": "no such customer"}``. ``get()`` then raises that
      exception if its class is loaded, else ``TaskError``. ``exc_module`` is the module of a class that is not built
      in.
    * ``REVOKED`` fails the job with the reason ``revoked``.
    * ``SUCCESS`` completes the job with the result ``meta``.

    In all other cases, the job completes without a result, and ``get()`` returns ``None``. (In Celery, the task would
    stay in its last state, and everything that waits for it would wait forever.)
    """


class Reject(Interrupt):
    """Fails the job without a retry, or releases it (Celery's ``Reject``).

    Args:
        reason: The failed job's ``failedReason``; or an exception, which ``get()`` then raises.
        requeue: Release the job instead, as :class:`ReleaseJob` does.
    """

    def __init__(self, reason: object = None, requeue: bool = False) -> None:
        super().__init__("the task rejected its job" if reason is None else str(reason))
        self.reason = reason
        self.requeue = requeue


class WaitForChildren(Interrupt):
    """Runs the job again when its pending child jobs have finished, without counting the attempt.

    BullMQ's ``WaitingChildrenError``. A job without pending child jobs runs again immediately. If a child job with
    ``fail_parent_on_failure`` has failed, the job fails.

    Attributes:
        replaced: Whether the task has replaced itself with a canvas, whose result becomes the job's result.
    """

    def __init__(self, *, replaced: bool = False) -> None:
        super().__init__("the task is waiting for child jobs")
        self.replaced = replaced


class SoftTimeLimitExceeded(Interrupt):
    """Raised inside a sync task that exceeds its ``soft_time_limit``, so that it can clean up.

    If the task catches it, the attempt ends as usual: with the value that the task then returns, or the exception that
    it raises. If the task does not catch it, the job is retried as after a transient error.

    An async task is cancelled instead (``asyncio.CancelledError``). Unless the task suppresses the cancellation, the
    attempt then ends with ``SoftTimeLimitExceeded``.
    """


class TaskCancelled(Interrupt):
    """Raised inside a running sync task when its job is revoked, so that the task can clean up.

    The job fails with "revoked", even if the task catches the exception and returns. An async task is cancelled
    instead (``asyncio.CancelledError``).
    """


class WorkerShutdown(ReleaseJob):
    """Raised inside a running sync task shortly before its worker kills it, so that the task can clean up.

    The setting ``shutdown_notice`` is the time that is left. The job is then next in its queue, and the attempt does
    not count. If the task catches the exception and returns, its value is the job's result.

    An async task is cancelled instead (``asyncio.CancelledError``).

    Args:
        reason: Why, for the worker's log.
    """

    def __init__(self, reason: str = "its worker is stopping") -> None:
        super().__init__(reason)
        self.args = (reason,)


class BulltaskError(Exception):
    """Base class of all bulltask errors.

    A message says what happened, to which job or queue, and what to do; by default, it is the docstring's first line.
    """

    def __init__(self, *args: object) -> None:
        if not args and self.__doc__:
            args = (self.__doc__.strip().splitlines()[0],)
        super().__init__(*args)


E = TypeVar("E", bound=Exception)


def incompatible(error: E) -> E:
    """Mark a :class:`DecodeError` or :class:`InvalidJobError`: another worker may be able to run the job."""
    error.is_incompatible = True  # type: ignore[attr-defined]
    return error


HIDDEN_VALUES = "the value is hidden, because the app encrypts payloads"
"""Part of messages, instead of a value that must not be stored or logged in plain text."""


class ConfigError(BulltaskError, ValueError):
    """A setting or an argument of a call is invalid: an unknown name, or an invalid value."""


class AppNotFoundError(BulltaskError):
    """The application was not found."""


class DuplicateTaskError(BulltaskError):
    """Two functions have the same task name."""


class TaskNotRegisteredError(BulltaskError, LookupError):
    """No task with this name is registered in this app."""


class EncodeError(BulltaskError, TypeError):
    """A value cannot be represented in JSON."""


class DecodeError(BulltaskError, ValueError):
    """Stored data is malformed, or does not have the expected type.

    Attributes:
        is_incompatible: Whether another worker may be able to read it, which has a key, setting or code that this
            process does not have.
    """

    is_incompatible = False


class PayloadTooLargeError(BulltaskError, ValueError):
    """A call or a result exceeds the size limit."""


class InvalidNameError(BulltaskError, ValueError):
    """A queue name, task name or job id is invalid."""


class BrokerError(BulltaskError):
    """Redis, or the connection to it, failed."""

    node: str | None = None  # host:port of the node of a Redis Cluster that failed, if other nodes may be available


class BrokerUnavailableError(BrokerError, ConnectionError):
    """Redis cannot be reached, or sends no reply before the timeout.

    Attributes:
        refused: Whether the host refused the connection, because nothing is listening on the port.
        wrong_protocol: Whether a server replied, but not in Redis' protocol.
    """

    refused = False
    wrong_protocol = False


class BrokerAuthError(BrokerError):
    """Authentication failed, a command is not permitted, or a TLS certificate is not trusted."""

    in_script = False  # True: a script was stopped at a command or key that the user may not use
    handshake_failed = False  # True: the authentication or the TLS handshake failed; False: one command was denied


class BrokerNotReadyError(BrokerError):
    """Redis is reachable, but cannot execute commands right now."""


class BrokerOutOfMemoryError(BrokerError):
    """Redis has reached maxmemory and is not allowed to evict keys."""


class BrokerConfigError(BrokerError):
    """The broker URL names a server that bulltask cannot use, or a database that does not exist."""


RECOVERABLE = (BrokerUnavailableError, BrokerNotReadyError, BrokerOutOfMemoryError, BrokerAuthError, BrokerConfigError)
"""Broker errors that are temporary or that an operator can fix: the same call may succeed later."""


class ScriptIntegrityError(BulltaskError):
    """A Lua script in the bulltask package was modified: reinstall bulltask."""


class JobError(BulltaskError):
    """A script rejected an operation on a job.

    Attributes:
        job_id: The job's id.
        queue: The queue's name in BullMQ: ``{emails}``.
    """

    def __init__(self, job_id: str = "", queue: str = "", detail: str = "") -> None:
        self.job_id = job_id
        self.queue = queue
        reason = (self.__doc__ or "").strip().splitlines()[0]
        where = f"job {job_id} in queue {queue}: " if job_id else ""
        super().__init__(f"{where}{reason}{' ' + detail if detail else ''}")


class JobNotFoundError(JobError):
    """The job does not exist (removed, or never added)."""


class LockMissingError(JobError):
    """The job has no lock: it was not renewed in time, or the job has already finished."""


class JobStateError(JobError):
    """The job is not in the state that this operation requires; its get_state() returns the current one."""


class PendingChildrenError(JobError):
    """The job still has pending child jobs."""


class ParentNotFoundError(JobError):
    """The parent job does not exist."""


class LockMismatchError(JobError):
    """Another worker holds the job's lock. Only that worker can finish or move the job."""


class ParentConflictError(JobError):
    """The job already belongs to another parent. A job can have only one parent: add a job with another id."""


class SchedulerJobError(JobError):
    """The job is the next iteration of a job scheduler: remove the scheduler instead."""


class FailedChildrenError(JobError):
    """The job has failed child jobs and cannot complete."""


class SchedulerCollisionError(JobError):
    """The job that the scheduler would add already exists: remove that job first."""


class SchedulerBusyError(JobError):
    """Jobs already exist for the scheduler's current and next times: try again after one of them has run."""


class NoPendingChildrenError(JobError):
    """The job has no pending child jobs to wait for."""


class QueueError(BulltaskError):
    """A script rejected an operation on a whole queue.

    Attributes:
        queue: The queue's name in BullMQ: ``{emails}``.
    """

    def __init__(self, queue: str = "") -> None:
        self.queue = queue
        reason = (self.__doc__ or "").strip().splitlines()[0]
        super().__init__(f"queue {queue}: {reason}" if queue else reason)


class QueueNotPausedError(QueueError):
    """The queue is not paused; it must stay paused while it is obliterated."""


class QueueActiveError(QueueError):
    """The queue has active jobs; stop its workers first, or use force=True."""


class MigrationError(QueueError):
    """A Bull queue cannot be migrated and was not changed; the message says why, and what to do."""

    def __init__(self, message: str, queue: str = "") -> None:
        super().__init__()
        self.queue = queue
        self.args = (message,)


class MissingExtraError(BulltaskError, ImportError):
    """An optional dependency is not installed; the message shows the command that installs it."""


class EventsLostError(BulltaskError):
    """Events were trimmed from a queue's stream before Spark read them; the message says how many, and what to do."""


class LakeError(BulltaskError):
    """A data lake does not exist or cannot be read; the message names the directory or file."""


class LakeInUseError(LakeError):
    """Another process is writing to the lake; in a file system, the message names it."""


class TaskError(BulltaskError):
    """A task failed in a worker.

    Raised by ``AsyncResult.get()`` when the original exception cannot be rebuilt in this process.

    Attributes:
        job_id: The job that failed.
        reason: Its ``failedReason``.
        remote_traceback: The traceback of the last failed attempt as text, ``""`` if none was stored.
    """

    _shows_traceback = True

    def __init__(self, reason: str, *, job_id: str = "", remote_traceback: str = "") -> None:
        self.reason = reason
        self.job_id = job_id
        self.remote_traceback = remote_traceback
        text = f"job {job_id}: {reason}" if job_id else reason
        super().__init__(
            f"{text}\n\n{remote_traceback.rstrip()}" if remote_traceback and self._shows_traceback else text
        )


class TaskRejectedError(TaskError, Reject):
    """The task rejected the job with ``Reject``; raised by ``AsyncResult.get()``.

    It is also a :class:`Reject`, so that ``except Reject`` catches it, as in Celery.
    """

    reason: str
    requeue = False
    _shows_traceback = False


class TaskRevokedError(TaskError):
    """The job was revoked before it completed; raised by ``AsyncResult.get()``."""

    _shows_traceback = False  # which shows only where a running task was interrupted


class ResultTimeoutError(BulltaskError, TimeoutError):
    """The result did not arrive in time."""


class TransientError(BulltaskError):
    """The attempt failed for a temporary reason: retry the job.

    Args:
        message: What failed.
        retry_after: Minimum delay before the next attempt (seconds or ``timedelta``); the job's backoff applies
            if it is longer.
    """

    retry_after: float | timedelta | None = None
    """Also a class attribute, because ``AsyncResult`` rebuilds exceptions without calling ``__init__``."""

    def __init__(self, *args: object, retry_after: float | timedelta | None = None) -> None:
        super().__init__(*args)
        self.retry_after = retry_after


class PermanentError(BulltaskError):
    """The job can never succeed: fail it immediately, without further attempts."""


class JobExpiredError(PermanentError, TaskRevokedError):
    """The job expired before a worker started it; as in Celery, ``except TaskRevokedError`` catches it."""

    def __init__(
        self,
        reason: str = "The job expired before a worker started it",
        *,
        job_id: str = "",
        remote_traceback: str = "",
    ) -> None:
        TaskRevokedError.__init__(self, reason, job_id=job_id, remote_traceback=remote_traceback)


class InvalidJobError(PermanentError):
    """The job cannot run: its arguments or stored fields are invalid.

    Attributes:
        is_incompatible: Whether another worker may be able to run it, such as one with a newer version of the app.
    """

    is_incompatible = False


class MaxRetriesExceededError(PermanentError):
    """The task requested a retry, but no retry is left; raised by ``self.retry()`` without ``exc``, as in Celery.

    Attributes:
        task_args, task_kwargs: The arguments of the call.
    """

    task_args: Sequence[Any] = ()
    task_kwargs: Mapping[str, Any] = MappingProxyType({})


class TimeLimitExceeded(BulltaskError):
    """The task exceeded its time_limit and was stopped."""


class EventLoopBlockedError(BulltaskError):
    """The async task blocked the event loop that it shares with others, so that they could not be cancelled."""


for _class in list(globals().values()):
    if isinstance(_class, type) and issubclass(_class, BaseException) and _class.__module__ == __name__:
        _class.__module__ = "bulltask.errors"  # tracebacks, and failures in Redis, show the public name
del _class
