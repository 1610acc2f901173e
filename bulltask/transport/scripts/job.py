"""Calls that read a job, change it from outside a worker, or revoke it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from bulltask.config.config import Config
from bulltask.jobs import codec
from bulltask.jobs.clock import value_class
from bulltask.jobs.codec import counter
from bulltask.jobs.errors import DecodeError
from bulltask.jobs.fields import ERROR_FIELD
from bulltask.jobs.job import RunningJob
from bulltask.jobs.names import REVOKED, JobState, Revocation
from bulltask.jobs.stored_job import Finished, StoredJob, StoredSnapshot
from bulltask.lua import loader, wrappers
from bulltask.transport.call import (
    Call,
    Fetched,
    QueueKeys,
    as_is,
    command,
    error_parser,
    named_keys,
    nothing,
    raise_for,
    result_parser,
    script_call,
    text,
    texts,
)
from bulltask.transport.scripts.move import (
    FetchOptions,
    FinishOptions,
    has_dependents,
    move_to_finished,
    with_dependents,
)

__all__ = [
    "RevocationRequests",
    "add_log",
    "change_delay",
    "change_priority",
    "clear_logs",
    "extend_lock",
    "finish_revoked",
    "get_logs",
    "get_state",
    "is_finished",
    "job_fields",
    "promote",
    "read_fields",
    "read_job",
    "remove_deduplication_key",
    "remove_job",
    "reprocess_job",
    "reset_attempts",
    "revocation_requests",
    "revoke",
    "snapshot",
    "update_data",
    "update_progress",
]

_MAX_LINES = 10**9  # Lua formats numbers above 10**14 in a way that LTRIM rejects

_FIELDS = ("returnvalue", "failedReason", "stacktrace", "progress", "atm", ERROR_FIELD)

_MAX_REQUESTS: Final = 10_000
"""Maximum number of revocation requests in a queue."""

_MAX_CHECKED: Final = 1_000
"""Maximum number of requests that one call checks; checking that many keeps Redis busy for 4 ms."""

_REQUEST_TTL_MS: Final = 86_400_000
"""How long a revocation request is valid."""

_NO_LOCK: Final = "0"  # BullMQ's scripts then do not check the lock


def read_job(keys: QueueKeys, job_id: str) -> Call[StoredJob | None]:
    """Read the job's hash; ``None`` if there is none."""

    def parse_reply(reply: Any) -> StoredJob | None:
        return StoredJob.from_hash(keys.queue, job_id, reply) if reply else None

    return command("HGETALL", keys.job(job_id), parse_reply=parse_reply)


def update_data(keys: QueueKeys, job_id: str, data: bytes) -> Call[None]:
    """``updateData``: replace the job's data (JSON)."""
    return script_call(loader.official_script("updateData"), (keys.job(job_id),), (data,), error_parser(keys, job_id))


def promote(keys: QueueKeys, job_id: str) -> Call[None]:
    """``promote``: move a delayed job to the waiting jobs."""
    script_keys = named_keys(keys, "delayed wait paused meta prioritized active pc events marker")
    return script_call(loader.official_script("promote"), script_keys, (keys.base, job_id), error_parser(keys, job_id))


def change_delay(keys: QueueKeys, job_id: str, delay_ms: int, now_ms: int) -> Call[None]:
    """``changeDelay``: make a delayed job due ``delay_ms`` after ``now_ms``."""
    script_keys = (keys.delayed, keys.meta, keys.marker, keys.events)
    args = (delay_ms, now_ms, job_id, keys.job(job_id))
    return script_call(loader.official_script("changeDelay"), script_keys, args, error_parser(keys, job_id))


def change_priority(keys: QueueKeys, job_id: str, priority: int, *, lifo: bool) -> Call[None]:
    """``changePriority``: change the priority; a waiting job moves, with ``lifo`` before others with that priority."""
    script_keys = (keys.wait, keys.paused, keys.meta, keys.prioritized, keys.active, keys.pc, keys.marker)
    args = (priority, keys.base, job_id, int(lifo))
    return script_call(loader.official_script("changePriority"), script_keys, args, error_parser(keys, job_id))


def reprocess_job(keys: QueueKeys, job_id: str, state: str, *, has_parent: bool, lifo: bool) -> Call[None]:
    """``reprocessJob``: move a job that finished as ``state`` back to the waiting jobs.

    A failed job that has a parent needs bulltask's ``retryChild``.
    """
    args: tuple[str, ...] = (job_id, _push(lifo=lifo))
    if state == "failed" and has_parent:
        script = loader.bulltask_script("retryChild")
    else:
        script = loader.official_script("reprocessJob")
        args += ("failedReason" if state == "failed" else "returnvalue", state)
    return script_call(script, _retry_keys(keys, job_id, state), args, error_parser(keys, job_id))


def reset_attempts(retry: Call[None], *, made: bool, started: bool) -> Call[None]:
    """bulltask's ``resetAttempts`` with a call that retries a job: also set its counters of attempts to 0."""
    assert retry.script is not None
    args = (int(made), int(started), *retry.argv)
    return script_call(wrappers.with_reset(retry.script), retry.keys, args, retry.parse_reply)


def _push(*, lifo: bool) -> str:
    return "RPUSH" if lifo else "LPUSH"


def _retry_keys(keys: QueueKeys, job_id: str, state: str) -> tuple[str, ...]:
    others = named_keys(keys, "wait meta paused active marker")
    return (keys.job(job_id), keys.events, keys.base + state, *others)


def extend_lock(keys: QueueKeys, job_id: str, token: str, lock_ms: int) -> Call[bool]:
    """``extendLock``: renew the lock for ``lock_ms`` from now; False if it is not held with ``token``."""
    args = (token, lock_ms, job_id)
    return script_call(loader.official_script("extendLock"), (keys.lock(job_id), keys.stalled), args, _is_one)


def remove_deduplication_key(keys: QueueKeys, dedup_id: str, job_id: str) -> Call[bool]:
    """``removeDeduplicationKey``: remove the deduplication id if this job owns it; False if it does not."""
    return script_call(
        loader.official_script("removeDeduplicationKey"), (keys.deduplication(dedup_id),), (job_id,), _is_one
    )


def get_logs(keys: QueueKeys, job_id: str, start: int, end: int, *, asc: bool) -> list[Call[Any]]:
    """Return two calls: read lines ``start`` to ``end`` of the job's log, from its beginning or its end; count all."""

    def parse_reply(reply: Any) -> list[str]:
        lines = [codec.decode_text(line) for line in reply]
        return lines if asc else lines[::-1]

    first, last = (start, end) if asc else (-(end + 1), -(start + 1))
    return [
        command("LRANGE", keys.logs(job_id), first, last, parse_reply=parse_reply),
        command("LLEN", keys.logs(job_id), parse_reply=int),
    ]


def clear_logs(keys: QueueKeys, job_id: str, keep: int) -> Call[None]:
    """Remove the job's log lines except for the newest ``keep``."""
    if keep:
        return command("LTRIM", keys.logs(job_id), -keep, -1, parse_reply=nothing)
    return command("DEL", keys.logs(job_id), parse_reply=nothing)


def _is_one(reply: Any) -> bool:
    return int(reply) == 1


def update_progress(keys: QueueKeys, job_id: str, progress: bytes) -> Call[None]:
    """``updateProgress``: store the progress (JSON) and emit an event."""

    script_keys = (keys.job(job_id), keys.events, keys.meta)
    parse_reply = error_parser(keys, job_id)
    return script_call(loader.official_script("updateProgress"), script_keys, (job_id, progress), parse_reply)


def add_log(keys: QueueKeys, job_id: str, line: str, keep: object, default: int | None) -> Call[int]:
    """``addLog``: append a line to the job's log. Returns the number of lines.

    ``keep`` is the maximum from the job's ``opts.kl``, which may be any value; if it is not a valid number, ``default``
    applies. 0 and ``None`` keep all lines.
    """
    kept = min(keep, _MAX_LINES) if type(keep) is int and keep >= 0 else default
    script_keys = (keys.job(job_id), keys.logs(job_id))
    parse_reply = result_parser(keys, job_id, int)
    return script_call(loader.official_script("addLog"), script_keys, (job_id, line, kept or ""), parse_reply)


def get_state(keys: QueueKeys, job_id: str) -> Call[JobState]:
    """``getStateV2``: read the job's state."""
    script_keys = named_keys(keys, "completed failed delayed active wait paused waiting_children prioritized")

    def parse_reply(reply: Any) -> JobState:
        try:
            return JobState(reply.decode())
        except ValueError:
            return JobState.UNKNOWN

    return script_call(loader.official_script("getStateV2"), script_keys, (job_id,), parse_reply)


def read_fields(keys: QueueKeys, job_id: str) -> Call[list[bytes | None]]:
    """Read the fields of the job's hash that :func:`snapshot` needs."""
    return command("HMGET", keys.job(job_id), *_FIELDS)


def snapshot(state: JobState, fields: Sequence[bytes | None]) -> StoredSnapshot:
    """Combine the results of :func:`get_state` and :func:`read_fields`."""
    returnvalue, reason, stacktrace, progress, attempts_made, error = fields
    return StoredSnapshot(
        state=state,
        returnvalue=None if returnvalue is None else codec.decode_text(returnvalue),
        failed_reason=codec.decode_text(reason),
        stacktrace=_traces(stacktrace),
        progress=_progress(progress),
        attempts_made=_count(attempts_made),
        error=codec.decode_text(error),
    )


def _progress(stored: bytes | None) -> Any:
    """Return the progress; ``None`` if another client has stored NaN, for example, so that the rest can be read."""
    try:
        return codec.decode(stored)
    except DecodeError:
        return None


def is_finished(keys: QueueKeys, job_id: str) -> Call[Finished | None]:
    """``isFinished``: read how the job finished, with its result or error; ``None`` if it has not.

    Running the call raises ``JobNotFoundError`` when Redis has no such job, or no longer has it.
    """

    def parse_reply(reply: Any) -> Finished | None:
        code = int(reply[0])
        raise_for(code, job_id, keys.name)
        return Finished(code == 1, codec.decode_text(reply[1])) if code else None

    script_keys = (keys.completed, keys.failed, keys.job(job_id))
    return script_call(loader.official_script("isFinished"), script_keys, (job_id, "1"), parse_reply)


def finished_state(keys: QueueKeys, job_id: str) -> Call[JobState | None]:
    """``isFinished``: read whether the job has completed, failed or does not exist; ``None`` if it has not finished."""
    states = {1: JobState.COMPLETED, 2: JobState.FAILED, -1: JobState.UNKNOWN}
    script_keys = (keys.completed, keys.failed, keys.job(job_id))
    return script_call(
        loader.official_script("isFinished"), script_keys, (job_id, ""), lambda reply: states.get(int(reply))
    )


def _count(raw: bytes | None) -> int:
    try:
        return counter(raw or b"0")
    except ValueError:
        return 0


def _traces(raw: bytes | None) -> tuple[str, ...]:
    try:
        found = codec.decode(raw)
    except DecodeError:
        return ()
    return tuple(text for text in found if isinstance(text, str)) if isinstance(found, list) else ()


def remove_job(keys: QueueKeys, job_id: str, *, children: bool) -> Call[bool]:
    """``removeJob``: remove a job, with its child jobs if requested; False if it, or one of them, is locked."""
    args = (job_id, int(children), keys.base)
    parse_reply = result_parser(keys, job_id, bool)
    return script_call(loader.official_script("removeJob"), (keys.job(job_id), keys.repeat), args, parse_reply)


def job_fields(keys: QueueKeys, job_id: str, names: Sequence[str]) -> Call[list[bytes | None]]:
    """Read some fields of a job's hash; all ``None`` if there is no such job."""
    return Call(("HMGET", keys.job(job_id), *names), as_is, cached=len(names))


@value_class
class RevocationRequests:
    """Unfinished jobs with a revocation request, with a lock or without; the next call skips ``next_skipped``."""

    locked: list[str]
    unlocked: list[str]
    next_skipped: int = 0


def revoke(keys: QueueKeys, job: RunningJob, config: Config, now_ms: int, *, terminate: bool) -> Call[Revocation]:
    """bulltask's ``revoke`` with ``moveToFinished``: fail a job that is not running.

    With ``terminate``, request the cancellation of a running job. Only the job's options are used, and for a fan-out
    job its name and data.
    """
    keep = job.keep("removeOnFail", config.keep_failed)
    options = FinishOptions(False, REVOKED.encode(), keep, job.attempts_in_queue, ["failedReason", REVOKED])
    fetch_options = FetchOptions.from_config(config, keys, _NO_LOCK, "")
    finish = move_to_finished(keys, job.id, fetch_options, options, fetch_next=False, now_ms=now_ms)
    finish = with_dependents(keys, job, finish, None, now_ms)
    parse_reply = result_parser(keys, job.id, lambda reply: Revocation(text(reply)))
    script_keys = (keys.revoked, keys.waiting_children, keys.completed, keys.repeat, *finish.keys)
    argv = (int(terminate), now_ms, _MAX_REQUESTS, *finish.argv)
    return script_call(wrappers.with_finish("revoke", fan_out=has_dependents(finish)), script_keys, argv, parse_reply)


def finish_revoked(keys: QueueKeys, finish: Call[Fetched]) -> Call[Fetched]:
    """bulltask's ``finishRevoked``: also remove the revocation request of a job that ``finish`` finishes."""
    script = wrappers.with_finish("finishRevoked", fan_out=has_dependents(finish))
    return script_call(script, (keys.revoked, *finish.keys), finish.argv, finish.parse_reply)


def revocation_requests(keys: QueueKeys, now_ms: int, skipped: int = 0) -> Call[RevocationRequests | None]:
    """bulltask's ``revocationRequests``: read the unfinished jobs with a request, and remove obsolete requests.

    The result is ``None`` if there are no requests. One call checks a limited number of requests, oldest first, after
    the first ``skipped``.
    """

    def parse_reply(reply: Any) -> RevocationRequests | None:
        return None if reply is None else RevocationRequests(texts(reply[0]), texts(reply[1]), int(reply[2]))

    script_keys = (keys.revoked, keys.completed, keys.failed)
    argv = (keys.base, now_ms - _REQUEST_TTL_MS, _MAX_REQUESTS, skipped, _MAX_CHECKED)
    return script_call(loader.bulltask_script("revocationRequests"), script_keys, argv, parse_reply)
