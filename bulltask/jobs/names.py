"""Names: the states of a job; the names of queues, tasks and jobs that BullMQ's clients accept; their form in Redis.

A function that checks a name raises ``InvalidNameError`` if it is not valid. At the end are the JSON forms of types
that JSON lacks, the strings that a Node.js developer would write.
"""

from __future__ import annotations

import base64
import enum
import re
import sys
from collections import deque
from collections.abc import Callable, Mapping
from datetime import date, datetime, time, timedelta
from enum import StrEnum
from pathlib import PurePath
from typing import Any, Final
from uuid import UUID

from bulltask.jobs.errors import InvalidNameError

__all__ = [
    "EVERY_QUEUE",
    "FAN_OUT",
    "MAX_NAME",
    "REVOKED",
    "STARMAP",
    "UNSEEN",
    "JobState",
    "Revocation",
    "address_of",
    "bullmq_name",
    "check_job_id",
    "check_job_name",
    "check_queue_name",
    "check_reference",
    "check_scheduler_id",
    "format_bytes",
    "format_datetime",
    "format_duration",
    "is_queue_key",
    "may_be_old_repeat_key",
    "name_in_app",
    "qualified_name",
    "to_plain",
]

REVOKED: Final = "revoked"
"""``failedReason`` of a revoked job, and the error category of that failure."""

_CELERY: Final[Mapping[str, frozenset[object]]] = {
    "waiting": frozenset({"PENDING"}),
    "prioritized": frozenset({"PENDING"}),
    "delayed": frozenset({"PENDING", "RETRY"}),
    "waiting-children": frozenset({"PENDING"}),
    "active": frozenset({"STARTED"}),
    "completed": frozenset({"SUCCESS"}),
    "failed": frozenset({"FAILURE"}),
    "unknown": frozenset({"PENDING"}),
}
"""Celery's names for each state."""


class JobState(StrEnum):
    """State of a job, as BullMQ's ``getState`` returns it; "paused" is a queue's flag, and "stalled" an event.

    A state also equals Celery's name for it: ``COMPLETED == "SUCCESS"``, ``FAILED == "FAILURE"``, ``ACTIVE ==
    "STARTED"``. ``DELAYED`` equals both ``"RETRY"`` and ``"PENDING"``; all other states equal ``"PENDING"``. The hash
    is that of BullMQ's name, so compare with tuples, not sets, of Celery's names.
    """

    WAITING = "waiting"
    PRIORITIZED = "prioritized"
    DELAYED = "delayed"
    WAITING_CHILDREN = "waiting-children"
    ACTIVE = "active"
    COMPLETED = "completed"
    FAILED = "failed"
    UNKNOWN = "unknown"

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) is True or (isinstance(other, str) and other in _CELERY[self.value])

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__

    @property
    def finished(self) -> bool:
        """True for ``COMPLETED`` and ``FAILED``."""
        return self in {JobState.COMPLETED, JobState.FAILED}


class Revocation(StrEnum):
    """Result of revoking a job."""

    REVOKED = "revoked"  # the job was not running; it has now failed
    RUNNING = "running"  # a worker has acquired the job, which continues, because terminate was not set
    TERMINATING = "terminating"  # the job is running, and its worker is stopping it
    FINISHED = "finished"  # the job had already completed or failed
    UNKNOWN = "unknown"  # the job does not exist


MAX_NAME: Final = 255

EVERY_QUEUE: Final = "*"
"""The key of a setting by queue that applies to all queues that are not listed."""

FAN_OUT: Final = "bulltask.fan_out"
"""The task of a fan-out job. It returns the result that it receives, for the job's dependents."""

STARMAP: Final = "bulltask.starmap"
"""The task of a job that makes several calls of another task, one after the other."""

UNSEEN: Final = (
    "\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e\u2060-\u206f\u2800\u3164"
    "\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
)
"""Characters, as in a regular expression's class, that cannot be seen, or that change the direction of text."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")
_INTEGER = re.compile(r"-?[1-9][0-9]*|0")

_QUEUE_KEYS: Final = frozenset(
    "active completed delay delayed events failed id limiter marker meta paused pc prioritized priority repeat stalled"
    " stalled-check wait waiting-children".split()
)
"""Ends of a queue's keys. A job with such an id would overwrite that key."""

_KEY_PREFIXES: Final = ("de:", "dn:", "metrics:")
"""First parts of a queue's other keys, such as ``de:{id}``, which have two colons like the ids of repeated jobs."""

_JOB_KEYS: Final = (":dependencies", ":failed", ":lock", ":logs", ":processed", ":unsuccessful")
"""Ends of the keys beside a job's hash."""

_ITERATION: Final = re.compile(r"repeat:[^:]+:\d+|repeat:.+:\d{12,}", re.DOTALL)
"""Ids of a scheduler's jobs, which end with their time; the other keys that begin like this are its own."""


def bullmq_name(queue: str, *, hash_tag: bool) -> str:
    """Return BullMQ's name for a queue: ``{emails}`` for ``emails``, unless it has braces or ``hash_tag`` is false.

    The braces put all keys of a queue into one cluster slot. In Node, use ``new Queue('{emails}')``.
    """
    return queue if not hash_tag or "{" in queue else f"{{{queue}}}"


def name_in_app(bullmq: str, *, hash_tag: bool) -> str:
    """Return the name that an app has for a queue, the inverse of :func:`bullmq_name`."""
    return bullmq[1:-1] if hash_tag and bullmq.startswith("{") and bullmq.endswith("}") else bullmq


def qualified_name(queue: str, prefix: str, *, hash_tag: bool) -> str:
    """Return a queue's qualified name as in Node: ``bull:{emails}`` for ``emails``.

    A name with a ``:`` is already qualified, because queue names contain none.
    """
    return queue if ":" in queue else f"{prefix}:{bullmq_name(queue, hash_tag=hash_tag)}"


def address_of(key: str, prefix: str) -> tuple[str, str, str]:
    """Return the prefix, BullMQ's queue name and the id from a job's full key.

    Queue names contain no ``:``, but ids may (those of job schedulers do), and so may prefixes. A prefix other than
    ``prefix`` is assumed to end at the first ``:``. (BullMQ 5.62 splits the key into three parts, and loses the rest of
    an id with a ``:``.)
    """
    head = prefix if key.startswith(f"{prefix}:") else key.partition(":")[0]
    name, _, job_id = key[len(head) + 1 :].partition(":")
    return head, name, job_id


def check_queue_name(name: str) -> str:
    """Return ``name`` if BullMQ's clients accept it as a queue name."""
    _check_text(name, "queue name")
    if ":" in name:
        raise InvalidNameError(
            f"queue name {name!r:.200} contains a ':', which separates the parts of BullMQ's keys; use '-' or '.'"
        )
    if name.count("{") != name.count("}") or name == "{}":
        raise InvalidNameError(f"queue name {name!r:.200} is empty or its braces do not match")
    return name


def check_job_name(name: str) -> str:
    """Return ``name`` if it is a valid task name."""
    return _check_text(name, "task name")


def check_job_id(job_id: str) -> str:
    """Return ``job_id`` if Node's client would accept it, too.

    These ids are invalid:

    * an empty string, and more than 255 characters;
    * an integer, like the ids of BullMQ's counter;
    * an id that starts with ``0:``, or contains control characters;
    * an id with a ``:``, unless it contains exactly two, like the ids of repeated jobs;
    * the name of one of the queue's keys. (Node does not check this, and overwrites the key.)
    """
    _check_text(job_id, "job_id")
    if _INTEGER.fullmatch(job_id):
        raise InvalidNameError(f"job_id {job_id!r:.200} is a number, like the ids of BullMQ's counter; add a letter")
    if job_id.startswith("0:") or job_id.count(":") not in {0, 2}:
        raise InvalidNameError(f"job_id {job_id!r:.200} contains a ':', BullMQ's separator in keys; use '-'")
    if is_queue_key(job_id):
        raise InvalidNameError(
            f"job_id {job_id!r:.200} is a name that BullMQ uses for the queue's own keys; add a prefix"
        )
    return job_id


def is_queue_key(job_id: str) -> bool:
    """Return whether ``job_id`` is a name that BullMQ uses for a queue's keys, or beside a job; no job may have it."""
    return (
        job_id in _QUEUE_KEYS
        or job_id.startswith(_KEY_PREFIXES)
        or job_id.endswith(_JOB_KEYS)
        or (job_id.startswith("repeat:") and _ITERATION.fullmatch(job_id) is None)
    )


def check_reference(job_id: str) -> str:
    """Return ``job_id`` if a job may have it, whichever client has chosen it.

    BullMQ's scripts would read, change or remove whatever is stored under the id.
    """
    if not isinstance(job_id, str) or not job_id:
        raise InvalidNameError(f"a job's id must be a non-empty string, not {job_id!r:.80}")
    if is_queue_key(job_id):
        raise InvalidNameError(f"{job_id!r:.80} is not the id of a job: BullMQ uses this name for the queue's own keys")
    return job_id


def check_scheduler_id(scheduler_id: str) -> str:
    """Return ``scheduler_id`` if it is a valid job scheduler id."""
    _check_text(scheduler_id, "scheduler id")
    if may_be_old_repeat_key(scheduler_id):
        raise InvalidNameError(
            f"scheduler id {scheduler_id!r:.200} contains more than three ':', and Node.js workers of BullMQ "
            "5.62 take such "
            "an id for that of a legacy repeatable job; use at most three"
        )
    return scheduler_id


def may_be_old_repeat_key(key: str) -> bool:
    """Return whether ``key`` has as many colons as the keys of repeatable jobs of BullMQ before 5.10.

    Ids of job schedulers that Node.js has created may have as many; the field ``ic`` of the hash tells them apart.
    """
    return key.count(":") >= 4


def _check_text(text: str, what: str) -> str:
    if not isinstance(text, str) or not text:
        raise InvalidNameError(f"{what} must be a non-empty string, not {text!r:.200}")
    if len(text) > MAX_NAME:
        raise InvalidNameError(f"{what} {text[:40]!r}… has {len(text)} characters; at most {MAX_NAME} are allowed")
    if _CONTROL.search(text):
        raise InvalidNameError(
            f"{what} {text!r:.200} contains control characters, or characters that UTF-8 cannot encode"
        )
    return text


# Type hints convert values to their JSON forms, and back (:mod:`bulltask.registry.types`). With the setting
# ``convert_untyped``, values without a hint are also written in these forms, but are not converted back.


def format_datetime(moment: datetime) -> str:
    """Return ISO 8601, with ``Z`` for UTC."""
    return moment.isoformat().replace("+00:00", "Z")  # as JavaScript writes it


def format_bytes(value: bytes) -> str:
    """Return base64."""
    return base64.b64encode(value).decode()


def format_duration(length: timedelta) -> str:
    """Return an ISO 8601 duration, without years and months."""
    sign, length = ("-", -length) if length < timedelta() else ("", length)
    minutes, seconds = divmod(length.seconds, 60)
    hours, minutes = divmod(minutes, 60)
    fraction = f".{length.microseconds:06}".rstrip("0") if length.microseconds else ""
    clock = "".join(f"{count}{unit}" for count, unit in ((hours, "H"), (minutes, "M")) if count)
    clock += f"{seconds}{fraction}S" if seconds or fraction else ""
    days = f"{length.days}D" if length.days else ""
    return f"{sign}P{days}{'T' if clock else ''}{clock}" if days or clock else "PT0S"


def to_plain(value: Any) -> Any:  # noqa: PLR0911 - a return for each kind
    """Return a value in which all values that have a JSON form here are in that form; other values are unchanged."""
    if isinstance(value, enum.Enum):
        return to_plain(value.value)
    if isinstance(value, str | int | float):
        return value
    if isinstance(value, dict):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, _ARRAYS):
        return [to_plain(item) for item in value]
    if hasattr(type(value), "__json__"):
        return to_plain(type(value).__json__(value))
    for kind, form in _FORMS:
        if isinstance(value, kind):
            return form(value)
    return str(value) if _is_decimal(value) and value.is_finite() else value


def _is_decimal(value: Any) -> bool:
    decimal = sys.modules.get("decimal")  # if nothing has imported it, there are none
    return decimal is not None and isinstance(value, decimal.Decimal)


_ARRAYS: Final = (list, tuple, set, frozenset, deque)
_FORMS: Final[tuple[tuple[type | tuple[type, ...], Callable[[Any], str]], ...]] = (
    (datetime, format_datetime),  # before date, its base class
    ((date, time), lambda value: value.isoformat()),
    (timedelta, format_duration),
    ((UUID, PurePath), str),
    ((bytes, bytearray, memoryview), format_bytes),
)
