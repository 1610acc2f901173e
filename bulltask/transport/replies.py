"""Parses script replies: a negative number is an error code and becomes an exception."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from bulltask.errors import (
    BrokerError,
    FailedChildrenError,
    JobError,
    JobNotFoundError,
    JobStateError,
    LockMismatchError,
    LockMissingError,
    ParentConflictError,
    ParentNotFoundError,
    PendingChildrenError,
    SchedulerBusyError,
    SchedulerCollisionError,
    SchedulerJobError,
)
from bulltask.transport.keys import QueueKeys
from bulltask.value_class import value_class

__all__ = ["NO_JOB", "Fetched", "error_parser", "parse_fetched", "raise_for", "text", "texts"]

JOB_ERRORS: Final[Mapping[int, type[JobError]]] = {
    -1: JobNotFoundError,
    -2: LockMissingError,
    -3: JobStateError,
    -4: PendingChildrenError,
    -5: ParentNotFoundError,
    -6: LockMismatchError,
    -7: ParentConflictError,
    -8: SchedulerJobError,
    -9: FailedChildrenError,
    -10: SchedulerCollisionError,
    -11: SchedulerBusyError,
}


@value_class
class Fetched:
    """Result of a fetch: a job, or the reason why there is none.

    Attributes:
        job_id: The job's id, ``""`` for none.
        fields: The job's hash as a flat list of names and values.
        limited_ms: Time until the queue's rate limit ends.
        due_ms: When the next delayed job is due (server time); 0 if there is none.
    """

    job_id: str = ""
    fields: Sequence[bytes] = ()
    limited_ms: int = 0
    due_ms: int = 0


NO_JOB: Final = Fetched()


def parse_fetched(reply: Any) -> Fetched:
    """Parse the four-element reply from ``moveToActive``, or from ``moveToFinished`` when it fetches the next job.

    Raises:
        ValueError, TypeError: It is not such a reply.
    """
    if not isinstance(reply, list):
        return NO_JOB
    fields, job_id, limited_ms, due_ms = reply
    if fields:
        if not isinstance(job_id, bytes | int) or not _is_hash(fields):
            raise ValueError(f"not a job: {reply!r:.100}")
        return Fetched(text(job_id), fields)
    if limited_ms or due_ms:
        return Fetched(limited_ms=max(0, int(limited_ms)), due_ms=max(0, int(float(due_ms))))
    return NO_JOB


def _is_hash(fields: Any) -> bool:
    return isinstance(fields, list) and not len(fields) % 2 and set(map(type, fields)) == {bytes}


def raise_for(reply: Any, job_id: str, queue: str) -> None:
    """Raise the error for a negative error code; do nothing for any other reply.

    Raises:
        JobError: The subclass for the code.
        BrokerError: The code is unknown.
    """
    if isinstance(reply, int) and reply < 0:
        kind = JOB_ERRORS.get(reply)
        if kind is None:
            raise BrokerError(f"a script returned the unknown code {reply} for job {job_id} in queue {queue}")
        raise kind(job_id, queue)


def error_parser(keys: QueueKeys, job_id: str) -> Callable[[Any], None]:
    """Return the parser for scripts that return only an error code."""

    def parse_reply(reply: Any) -> None:
        raise_for(reply, job_id, keys.name)

    return parse_reply


def text(raw: bytes | str | int) -> str:
    """Return an id as text; scripts return bulk strings, or numbers for ids that are numbers."""
    return raw.decode("utf-8", "surrogateescape") if isinstance(raw, bytes) else str(raw)


def texts(reply: Any) -> list[str]:
    """Return several ids, each converted by :func:`text`; a script may return nil instead of an empty list."""
    return [text(item) for item in reply or ()]
