"""Exceptions that end an attempt early, raised by the task itself or by its worker.

Import them from :mod:`bulltask.errors`.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

__all__ = [
    "Ignore",
    "Interrupt",
    "RateLimitQueue",
    "Reject",
    "ReleaseJob",
    "RescheduleJob",
    "Retry",
    "SoftTimeLimitExceeded",
    "TaskCancelled",
    "WaitForChildren",
    "WorkerShutdown",
]


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
        self.reason, self.requeue = reason, requeue


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
