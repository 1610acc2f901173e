"""What ends an attempt from inside, by the task's own wish or by the worker's.

A part of the tree of :mod:`bulltask.errors`, imported from there.
"""

from __future__ import annotations

from datetime import timedelta

__all__ = [
    "DelayJob",
    "Interrupt",
    "RateLimited",
    "Retry",
    "SoftTimeLimitExceeded",
    "TaskRevoked",
    "WaitForChildren",
    "WaitJob",
]


class Interrupt(BaseException):
    """Ends an attempt from inside; a ``BaseException`` so that ``except Exception`` in a task lets it pass."""


class Retry(Interrupt):
    """Asks the worker to try the job again; raised by ``Context.retry()``.

    Attributes:
        delay_ms: delay before the next attempt in milliseconds, ``None`` for the job's own backoff.
        exc: the exception that is reported when no attempt is left.
        max_retries: how many retries this call allows, ``None`` for what the job says.
    """

    def __init__(
        self, *, delay_ms: int | None = None, exc: BaseException | None = None, max_retries: int | None = None
    ) -> None:
        super().__init__("the task asked for a retry")
        self.delay_ms, self.exc, self.max_retries = delay_ms, exc, max_retries


class DelayJob(Interrupt):
    """Ends this run of the job and has it run again later, without counting an attempt (BullMQ's ``DelayedError``).

    Args:
        delay: seconds or ``timedelta`` until it is due again.
    """

    def __init__(self, delay: float | timedelta) -> None:
        super().__init__("the task asked to be run again later")
        self.delay = delay


class WaitJob(Interrupt):
    """Ends this run of the job and gives it back: it is the next to be taken, and no attempt is counted.

    BullMQ's ``WaitingError``.
    """

    def __init__(self) -> None:
        super().__init__("the task gave the job back")


class RateLimited(Interrupt):
    """Ends this run of the job, gives it back, and has nobody take jobs of its queue for some time.

    The job is the next to be taken then, and no attempt is counted. Node's ``worker.rateLimit(ms)`` and
    ``RateLimitError``. Workers keep such a limit where the queue has a rate limit or they have a ``limiter``; the
    child that ran the task keeps it in any case.

    Args:
        duration: seconds or ``timedelta``.
    """

    def __init__(self, duration: float | timedelta) -> None:
        super().__init__("the task rate-limited its queue")
        self.duration = duration


class WaitForChildren(Interrupt):
    """Ends this run of the job and has it run again when its pending children have ended; no attempt is counted.

    BullMQ's ``WaitingChildrenError``. A job without pending children is run again at once; one with a child whose
    failure fails the parent fails.
    """

    def __init__(self) -> None:
        super().__init__("the task waits for the job's children")


class SoftTimeLimitExceeded(Interrupt):
    """Raised inside a sync task that runs longer than its ``soft_time_limit``, so that it can clean up.

    It may catch this, end with another exception or even return: then that counts. A job whose task lets it pass is
    tried again like after any passing error. An async task is cancelled instead (``asyncio.CancelledError``); if it
    lets that pass, its attempt ends with this.
    """


class TaskRevoked(Interrupt):
    """Raised inside a sync task whose job was revoked while it runs; the job fails, whatever the task does then.

    An async task is cancelled instead (``asyncio.CancelledError``).
    """
