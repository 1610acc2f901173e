"""Every exception of bulltask, in one tree.

::

    BulltaskError
    ├── ConfigError            a setting has a wrong name or value            (also a ValueError)
    ├── AppNotFound            ``-A`` did not lead to an App
    ├── DuplicateTask          two functions claim one task name
    ├── UnknownTask            no task of that name is registered             (also a LookupError)
    ├── EncodeError            a value cannot travel as plain JSON            (also a TypeError)
    ├── DecodeError            a stored text is not what the protocol says    (also a ValueError)
    ├── PayloadTooLarge        the JSON of a call or a result is over the limit (also a ValueError)
    ├── InvalidName            a queue name, task name or job id is refused   (also a ValueError)
    ├── BrokerError            Redis or the way to it
    │   ├── BrokerUnavailable  nothing answers, or not in time                (also a ConnectionError)
    │   ├── BrokerAuthError    wrong password, or a command the ACL forbids
    │   ├── BrokerNotReady     it answers, but cannot serve now: LOADING, READONLY, MISCONF …
    │   ├── BrokerFull         maxmemory is reached and nothing may be evicted
    │   └── BrokerMisconfigured  a cluster's node, a Sentinel, a database that is not there
    ├── ScriptIntegrityError   a Lua script of the installed package is not the one that was shipped
    ├── JobError               a script refused an operation on one job
    │   ├── JobNotFound        -1
    │   ├── LockMissing        -2
    │   ├── JobNotInState      -3
    │   ├── PendingChildren    -4
    │   ├── ParentNotFound     -5
    │   ├── LockMismatch       -6
    │   ├── ParentConflict     -7
    │   ├── SchedulerJob       -8
    │   ├── FailedChildren     -9
    │   ├── SchedulerCollision -10
    │   ├── SchedulerBusy      -11
    │   └── NothingPending     moveToWaitingChildren found no child to wait for
    ├── QueueError             an operation on a whole queue was refused
    │   ├── QueueNotPaused     obliterate: somebody resumed it meanwhile
    │   ├── QueueActive        obliterate: jobs are being worked on
    │   └── MigrationRefused   migrate-bull: nothing was changed
    ├── MissingExtra           a part that is installed separately is not there (also an ImportError)
    ├── EventsLost             Spark: events were trimmed before they were read
    ├── LakeError              a lake of the data pipeline is not there, or cannot be read
    │   └── LakeInUse          another stream feeds it
    ├── TaskError              a task failed elsewhere; its own exception cannot be rebuilt here
    │   └── TaskRevokedError   the job was revoked
    ├── ResultTimeout          the result did not come in time                (also a TimeoutError)
    ├── TransientError         raised by a task: try again later
    ├── PermanentError         raised by a task: do not try again
    │   ├── ExpiredError       the job was picked up after its ``expires``
    │   └── JobRefusedError    the job can never run here: wrong arguments, malformed, refused
    ├── TimeLimitExceeded      the task ran longer than its ``time_limit``
    └── WorkerLostError        the child that ran the job died

    Interrupt (a BaseException: ``except Exception`` in a task does not swallow it)
    ├── Retry                  what ``self.retry()`` raises
    ├── DelayJob               run the job again later; no attempt is counted
    ├── WaitJob                give the job back; no attempt is counted
    ├── RateLimited            the same, and its queue gives no jobs for some time
    ├── WaitForChildren        run the job again when its children have ended
    ├── SoftTimeLimitExceeded  the task runs longer than its ``soft_time_limit``
    └── TaskRevoked            the job was revoked while it runs

The message of an error says what happened, to which job or queue, and what to do. An error raised without
arguments takes the first line of its class's docstring as its message.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from datetime import timedelta

from bulltask.errors.interrupts import (
    DelayJob,
    Interrupt,
    RateLimited,
    Retry,
    SoftTimeLimitExceeded,
    TaskRevoked,
    WaitForChildren,
    WaitJob,
)

__all__ = [
    "REPAIRABLE",
    "AppNotFound",
    "BrokerAuthError",
    "BrokerError",
    "BrokerFull",
    "BrokerMisconfigured",
    "BrokerNotReady",
    "BrokerUnavailable",
    "BulltaskError",
    "ConfigError",
    "DecodeError",
    "DelayJob",
    "DuplicateTask",
    "EncodeError",
    "EventsLost",
    "ExpiredError",
    "FailedChildren",
    "Interrupt",
    "InvalidName",
    "JobError",
    "JobNotFound",
    "JobNotInState",
    "JobRefusedError",
    "LakeError",
    "LakeInUse",
    "LockMismatch",
    "LockMissing",
    "MigrationRefused",
    "MissingExtra",
    "NothingPending",
    "ParentConflict",
    "ParentNotFound",
    "PayloadTooLarge",
    "PendingChildren",
    "PermanentError",
    "QueueActive",
    "QueueError",
    "QueueNotPaused",
    "RateLimited",
    "ResultTimeout",
    "Retry",
    "SchedulerBusy",
    "SchedulerCollision",
    "SchedulerJob",
    "ScriptIntegrityError",
    "SoftTimeLimitExceeded",
    "TaskError",
    "TaskRevoked",
    "TaskRevokedError",
    "TimeLimitExceeded",
    "TransientError",
    "UnknownTask",
    "WaitForChildren",
    "WaitJob",
    "WorkerLostError",
    "did_you_mean",
]


class BulltaskError(Exception):
    """Something went wrong in bulltask."""

    def __init__(self, *args: object) -> None:
        if not args and self.__doc__:
            args = (self.__doc__.strip().splitlines()[0],)
        super().__init__(*args)


class ConfigError(BulltaskError, ValueError):
    """A setting has a wrong name or value."""


class AppNotFound(BulltaskError):
    """The given application could not be found."""


class DuplicateTask(BulltaskError):
    """Two functions claim the same task name."""


class UnknownTask(BulltaskError, LookupError):
    """No task of that name is registered in this app."""


class EncodeError(BulltaskError, TypeError):
    """A value cannot travel as plain JSON."""


class DecodeError(BulltaskError, ValueError):
    """A stored text is not what the protocol says it is."""


class PayloadTooLarge(BulltaskError, ValueError):
    """The JSON of a call or a result is over the limit."""


class InvalidName(BulltaskError, ValueError):
    """A queue name, task name or job id is refused."""


class BrokerError(BulltaskError):
    """Redis, or the way to it, failed."""


class BrokerUnavailable(BrokerError, ConnectionError):
    """Nothing answers at the broker URL, or not in time.

    Attributes:
        refused: the machine answered that nothing listens there; asking again soon costs nobody anything.
        answered: something answers there, but not in Redis' protocol.
    """

    refused = False
    answered = False


class BrokerAuthError(BrokerError):
    """Redis refused the user, the password, the certificate, or a command; or has a certificate nobody trusts here."""

    login = False  # True: nobody is let in at all; it was not one command that was refused


class BrokerNotReady(BrokerError):
    """Redis answers but cannot serve this command now."""


class BrokerFull(BrokerError):
    """Redis has reached maxmemory and may not evict anything."""


class BrokerMisconfigured(BrokerError):
    """The broker URL leads to a server that bulltask cannot use, or to a database that is not there."""


REPAIRABLE = (BrokerUnavailable, BrokerNotReady, BrokerFull, BrokerAuthError, BrokerMisconfigured)
"""Broker errors that pass, or that an operator cures, while the same call stays right; others come from the call."""


class ScriptIntegrityError(BulltaskError):
    """A Lua script of the installed package is not the one that was shipped. Waiting does not help."""


class JobError(BulltaskError):
    """A script refused an operation on a job.

    Attributes:
        job_id: the job's id.
        queue: the queue's name as BullMQ spells it.
    """

    def __init__(self, job_id: str = "", queue: str = "", detail: str = "") -> None:
        self.job_id, self.queue = job_id, queue
        reason = (self.__doc__ or "").strip().splitlines()[0]
        where = f"job {job_id} in queue {queue}: " if job_id else ""
        super().__init__(f"{where}{reason}{' ' + detail if detail else ''}")


class JobNotFound(JobError):
    """The job does not exist (removed, or never added)."""


class LockMissing(JobError):
    """The job's lock is gone: it was not renewed in time, or the job was already settled."""


class JobNotInState(JobError):
    """The job is not in the state that the operation needs."""


class PendingChildren(JobError):
    """The job still has pending children."""


class ParentNotFound(JobError):
    """The parent job does not exist."""


class LockMismatch(JobError):
    """The job's lock is held by another worker."""


class ParentConflict(JobError):
    """The job already belongs to another living parent."""


class SchedulerJob(JobError):
    """The job is the next iteration of a job scheduler: remove the scheduler instead."""


class FailedChildren(JobError):
    """The job has failed children and cannot complete."""


class SchedulerCollision(JobError):
    """The iteration that the scheduler would add exists already."""


class SchedulerBusy(JobError):
    """The scheduler's current slot and its next one both have a job already."""


class NothingPending(JobError):
    """The job has no pending children to wait for."""


class QueueError(BulltaskError):
    """A script refused an operation on a whole queue.

    Attributes:
        queue: the queue's name as BullMQ spells it.
    """

    def __init__(self, queue: str = "") -> None:
        self.queue = queue
        reason = (self.__doc__ or "").strip().splitlines()[0]
        super().__init__(f"queue {queue}: {reason}" if queue else reason)


class QueueNotPaused(QueueError):
    """The queue is not paused (any more); it must be while it is obliterated."""


class QueueActive(QueueError):
    """Jobs of the queue are being worked on; stop the workers first, or use force=True."""


class MigrationRefused(QueueError):
    """A queue of Bull is not migrated, and nothing was changed; the message says why and what to do."""

    def __init__(self, message: str, queue: str = "") -> None:
        super().__init__()
        self.queue, self.args = queue, (message,)


class MissingExtra(BulltaskError, ImportError):
    """A part of bulltask that is installed separately is not there; the message says how to install it."""


class EventsLost(BulltaskError):
    """Events were trimmed from a queue's stream before Spark read them; the message says how many, and what to do."""


class LakeError(BulltaskError):
    """A lake of the data pipeline is not there or cannot be read; the message names the directory or the file."""


class LakeInUse(LakeError):
    """A lake is fed by one stream at a time; the message says which process feeds it."""


class TaskError(BulltaskError):
    """A task failed in a worker.

    Raised by ``AsyncResult.get()`` when the original exception cannot be rebuilt in this process.

    Attributes:
        job_id: the job that failed.
        reason: its ``failedReason``.
        remote_traceback: the traceback text of the last failed attempt, ``""`` when none was stored.
    """

    def __init__(self, reason: str, *, job_id: str = "", remote_traceback: str = "") -> None:
        self.reason, self.job_id, self.remote_traceback = reason, job_id, remote_traceback
        text = f"job {job_id}: {reason}" if job_id else reason
        super().__init__(f"{text}\n\n{remote_traceback.rstrip()}" if remote_traceback else text)


class TaskRevokedError(TaskError):
    """The job was revoked before it had completed (Celery's name); raised by ``AsyncResult.get()``."""


class ResultTimeout(BulltaskError, TimeoutError):
    """The result did not come in time."""


class TransientError(BulltaskError):
    """The attempt failed for a passing reason: try the job again.

    Args:
        message: what failed.
        retry_after: the least delay before the next attempt (seconds or ``timedelta``); the job's own backoff is
            used when it is longer.
    """

    retry_after: float | timedelta | None = None
    """Also of one that was made without ``__init__``: an ``AsyncResult`` that fails does so."""

    def __init__(self, *args: object, retry_after: float | timedelta | None = None) -> None:
        super().__init__(*args)
        self.retry_after = retry_after


class PermanentError(BulltaskError):
    """The job can never succeed: fail it at once, whatever attempts are left."""


class ExpiredError(PermanentError):
    """The job was picked up after its ``expires``."""


class JobRefusedError(PermanentError):
    """The job cannot run here: its arguments or its stored fields are wrong."""


class TimeLimitExceeded(BulltaskError):
    """The task ran longer than its ``time_limit`` and was ended."""


class WorkerLostError(BulltaskError):
    """The child process that ran the job died."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the end of a message: which of the ``known`` names was probably meant."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
