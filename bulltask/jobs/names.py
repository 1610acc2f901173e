"""Names of queues, tasks and jobs: which names BullMQ's clients accept, and their form in Redis."""

from __future__ import annotations

import re
from typing import Final

from bulltask.errors import InvalidNameError

__all__ = [
    "EVERY_QUEUE",
    "FAN_OUT",
    "MAX_NAME",
    "STARMAP",
    "address_of",
    "bullmq_name",
    "check_job_id",
    "check_job_name",
    "check_queue_name",
    "check_reference",
    "check_scheduler_id",
    "is_queue_key",
    "may_be_old_repeat_key",
    "name_in_app",
    "qualified_name",
]

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
    """Return ``name`` if BullMQ's clients accept it as a queue name.

    Raises:
        InvalidNameError: It is empty, longer than 255 characters, or contains a ``:`` or control characters.
    """
    _check_text(name, "queue name")
    if ":" in name:
        raise InvalidNameError(
            f"queue name {name!r:.200} contains a ':', which separates the parts of BullMQ's keys; use '-' or '.'"
        )
    if name.count("{") != name.count("}") or name == "{}":
        raise InvalidNameError(f"queue name {name!r:.200} is empty or its braces do not match")
    return name


def check_job_name(name: str) -> str:
    """Return ``name`` if it is a valid task name.

    Raises:
        InvalidNameError: It is empty, longer than 255 characters, or contains control characters.
    """
    return _check_text(name, "task name")


def check_job_id(job_id: str) -> str:
    """Return ``job_id`` if Node's client would accept it, too.

    These ids are invalid:

    * an empty string, and more than 255 characters;
    * an integer, like the ids of BullMQ's counter;
    * an id that starts with ``0:``, or contains control characters;
    * an id with a ``:``, unless it contains exactly two, like the ids of repeated jobs;
    * the name of one of the queue's keys. (Node does not check this, and overwrites the key.)

    Raises:
        InvalidNameError: The id is invalid.
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

    Raises:
        InvalidNameError: It is not a string, is empty, or is the name of one of the queue's own keys.
    """
    if not isinstance(job_id, str) or not job_id:
        raise InvalidNameError(f"a job's id must be a non-empty string, not {job_id!r:.80}")
    if is_queue_key(job_id):
        raise InvalidNameError(f"{job_id!r:.80} is not the id of a job: BullMQ uses this name for the queue's own keys")
    return job_id


def check_scheduler_id(scheduler_id: str) -> str:
    """Return ``scheduler_id`` if it is a valid job scheduler id.

    Raises:
        InvalidNameError: It is empty, longer than 255 characters, or contains control characters or more than three
            ``:``.
    """
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
