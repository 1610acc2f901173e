"""Convert a job's hash from Bull's layout to BullMQ's, without access to Redis."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from bulltask.errors import DecodeError
from bulltask.jobs import codec
from bulltask.jobs.job import MAX_PRIORITY
from bulltask.migrate.bull_job import BullJob

__all__ = ["DEFAULT_NAME", "NOTES", "Conversion", "convert"]

DEFAULT_NAME: Final = "__default__"
"""The name of jobs that were added to Bull without a name."""

_DROPPED: Final = ("attemptsMade", "stalledCounter", "retriedOn", "attempts", "id", "lockAcquired")
_NOT_KEPT: Final = ("timestamp", "repeat", "prevMillis", "debounce")

_dumps = json.JSONEncoder(separators=(",", ":")).encode

NOTES: Final[Mapping[str, str]] = {
    "timeout": "have a timeout, which BullMQ does not support: it stays in their options without effect",
    "exponential": "use exponential backoff: BullMQ waits 1, 2, 4 … times the delay, Bull 1, 3, 7 … times",
    "custom backoff": "use a custom backoff strategy: workers must have it",
    "parsing": "use preventParsingData, which BullMQ does not support: workers get parsed data",
    "priority": f"have a priority outside BullMQ's range: it is limited to 0 to {MAX_PRIORITY:,}",
    "unnamed": "have no name: they get __default__, or the name of default_name (--default-name)",
    "progress": "have progress that is not JSON: it is dropped",
}
"""Notes about migrated jobs, printed after the number of jobs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """The changes that turn a Bull job's hash into a BullMQ job's.

    Attributes:
        fields: The new and changed fields.
        dropped: The names of removed fields.
        opts: The options as stored.
        priority: BullMQ's priority.
        finished: When the job finished, in epoch milliseconds as text; ``""`` if it has not.
        notes: The keys of :data:`NOTES` that apply.
    """

    fields: Mapping[str, bytes]
    dropped: tuple[str, ...]
    opts: Mapping[str, Any]
    priority: int
    finished: str
    notes: frozenset[str]


def convert(job: BullJob, state: str, default_name: str = DEFAULT_NAME) -> Conversion:
    """Return the changes to a job's hash.

    Args:
        job: The Bull job.
        state: Its new state: ``waiting``, ``delayed``, ``completed``, ``failed`` or ``recovered``.
        default_name: The name for jobs that were added without one.

    Raises:
        DecodeError: The job's data or options are not JSON, so no worker can read it.
    """
    notes: set[str] = set()
    codec.decode(job.fields.get("data"), what="its data")
    priority = _priority(job, notes)
    opts = _options(job, priority, notes)
    fields = _fields(job, state, default_name, notes)
    finished = fields.get("finishedOn", job.fields.get("finishedOn", b"")).decode("utf-8", "replace")
    fields["priority"] = str(priority).encode()
    fields["opts"] = _dumps(opts).encode()
    dropped = [name for name in _DROPPED if name in job.fields]
    dropped += [name for name in _empty_fields(job, state, notes) if name not in fields]
    return Conversion(
        fields=fields, dropped=tuple(dropped), opts=opts, priority=priority, finished=finished, notes=frozenset(notes)
    )


def _options(job: BullJob, priority: int, notes: set[str]) -> dict[str, Any]:
    given = {name: value for name, value in job.opts.items() if value is not None}
    opts = {name: value for name, value in given.items() if name not in _NOT_KEPT}
    # Bull 1 and 2 store the attempts in the hash; the default is one.
    opts["attempts"] = max(1, _whole(given.get("attempts"), job.number("attempts") or 1))
    for name in ("delay", "stackTraceLimit"):  # 0 means unset in Bull; BullMQ would keep no traces
        if not opts.get(name):
            opts.pop(name, None)
    if "priority" in opts:
        opts["priority"] = priority
    if "backoff" in opts:
        _backoff(opts, notes)
    if isinstance(debounce := given.get("debounce"), dict) and debounce.get("id"):
        opts["de"] = {name: debounce[name] for name in ("id", "ttl") if debounce.get(name)}
    if opts.get("timeout"):
        notes.add("timeout")
    if opts.get("preventParsingData"):
        notes.add("parsing")
    return opts


def _backoff(opts: dict[str, Any], notes: set[str]) -> None:
    backoff = opts["backoff"]
    if not isinstance(backoff, dict):
        backoff = {"type": "fixed", "delay": _whole(backoff, 0)}
    opts["backoff"] = backoff
    if backoff.get("type") == "exponential":
        notes.add("exponential")
    elif backoff.get("type") != "fixed":
        notes.add("custom backoff")


def _priority(job: BullJob, notes: set[str]) -> int:
    """Return BullMQ's priority, limited to BullMQ's range: Bull accepts any number."""
    given = job.opts.get("priority") or job.number("priority")
    whole = _whole(given, 0)
    priority = min(max(whole, 0), MAX_PRIORITY)
    if priority != given and given:
        notes.add("priority")
    return priority


def _fields(job: BullJob, state: str, default_name: str, notes: set[str]) -> dict[str, bytes]:
    fields: dict[str, bytes] = {}
    if job.fields.get("name", DEFAULT_NAME.encode()) == DEFAULT_NAME.encode():
        fields["name"] = default_name.encode()
        notes.add("unnamed")
    if "data" not in job.fields:
        fields["data"] = b"{}"
    # BullMQ also counts the attempt that succeeds.
    if attempts_made := job.number("attemptsMade") + (state == "completed"):
        fields["atm"] = fields["ats"] = str(attempts_made).encode()
    if stalled := job.number("stalledCounter"):
        fields["stc"] = str(stalled).encode()
    added = job.fields.get("timestamp") or str(_whole(job.opts.get("timestamp"), 0)).encode()
    fields["timestamp"] = added
    fields["delay"] = str(_delay_ms(job, state)).encode()
    if state in {"completed", "failed"}:
        fields.update(_outcome_fields(job, state, added))
    return fields


def _outcome_fields(job: BullJob, state: str, added: bytes) -> dict[str, bytes]:
    score = str(int(float(job.score))).encode() if job.score else b""
    fields = {"finishedOn": job.fields.get("finishedOn") or score or job.fields.get("processedOn") or added}
    if state == "completed" and "returnvalue" not in job.fields:
        fields["returnvalue"] = b"null"
    if state == "failed" and not job.fields.get("failedReason"):
        fields["failedReason"] = _reason(job)
    return fields


def _delay_ms(job: BullJob, state: str) -> int:
    """Return the delay; for a job that waits for a retry, Bull stores only the due time, as its score."""
    if state != "delayed" or job.number("delay") > 0:
        return max(0, job.number("delay"))
    return max(0, job.due_ms() - (job.number("processedOn") or job.number("timestamp")))


def _reason(job: BullJob) -> bytes:
    """Return the first line of the last stack trace as the failure reason, because Bull 1 stores no reason."""
    try:
        traces = codec.decode(job.fields.get("stacktrace"))
    except DecodeError:
        traces = None
    last = traces[-1] if isinstance(traces, list) and traces and isinstance(traces[-1], str) else "Unknown reason"
    return last.split("\n")[0].removeprefix("Error: ").encode(errors="replace")


def _empty_fields(job: BullJob, state: str, notes: set[str]) -> list[str]:
    """Return the names of empty fields, which BullMQ does not store."""
    names = []
    if job.fields.get("stacktrace") in {b"null", b"[]", b""}:
        names.append("stacktrace")
    if state != "completed" and job.fields.get("returnvalue") in {b"null", b""}:
        names.append("returnvalue")
    if state != "failed" and job.fields.get("failedReason") == b"":
        names.append("failedReason")
    try:
        codec.decode(job.fields.get("progress"))
    except DecodeError:
        names.append("progress")
        notes.add("progress")
    return names


def _whole(value: object, otherwise: int) -> int:
    """Return a number as an integer. Another program wrote it, possibly as a string."""
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return otherwise
    return int(number) if math.isfinite(number) else otherwise
