"""The scripts that read a job or a queue, and the two that a running job writes with; packing only (PROTOCOL 3.3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bulltask.errors import DecodeError
from bulltask.jobs import codec
from bulltask.jobs.numbers import counter
from bulltask.jobs.record import Finished, JobSnapshot
from bulltask.jobs.states import JobState
from bulltask.lua import loader
from bulltask.transport.call import Call, command, script_call
from bulltask.transport.keys import QueueKeys
from bulltask.transport.replies import raise_for

__all__ = ["add_log", "get_counts", "get_state", "is_finished", "read_fields", "snapshot", "update_progress"]

_MOST_LINES = 10**9  # Lua writes larger numbers than 10**14 in a way that LTRIM refuses
_FIELDS = ("returnvalue", "failedReason", "stacktrace", "progress", "atm")


def update_progress(keys: QueueKeys, job_id: str, progress: bytes) -> Call[None]:
    """``updateProgress``: store the progress (JSON) and tell listeners."""

    def judge(reply: Any) -> None:
        raise_for(reply, job_id, keys.name)

    places = (keys.job(job_id), keys.events, keys.meta)
    return script_call(loader.official("updateProgress"), places, (job_id, progress), judge)


def add_log(keys: QueueKeys, job_id: str, line: str, keep: object, default: int | None) -> Call[int]:
    """``addLog``: append a line to the job's log; the result is how many lines it has.

    Args:
        keys: the job's queue.
        job_id: the job.
        line: the line.
        keep: how many lines are kept, as a job's ``opts.kl`` says it, which may be anything; 0: all.
        default: how many where ``keep`` is no such number; ``None``: all.
    """
    kept = min(keep, _MOST_LINES) if type(keep) is int and keep >= 0 else default

    def judge(reply: Any) -> int:
        raise_for(reply, job_id, keys.name)
        return int(reply)

    places = (keys.job(job_id), keys.logs(job_id))
    return script_call(loader.official("addLog"), places, (job_id, line, kept or ""), judge)


def get_state(keys: QueueKeys, job_id: str) -> Call[JobState]:
    """``getStateV2``: where the job is."""
    places = (
        keys.completed,
        keys.failed,
        keys.delayed,
        keys.active,
        keys.wait,
        keys.paused,
        keys.waiting_children,
        keys.prioritized,
    )

    def judge(reply: Any) -> JobState:
        try:
            return JobState(reply.decode())
        except ValueError:
            return JobState.UNKNOWN

    return script_call(loader.official("getStateV2"), places, (job_id,), judge)


def read_fields(keys: QueueKeys, job_id: str) -> Call[list[bytes | None]]:
    """The fields of the job's hash that :func:`snapshot` reads."""
    return command("HMGET", keys.job(job_id), *_FIELDS)


def snapshot(job_id: str, state: JobState, fields: Sequence[bytes | None]) -> JobSnapshot:
    """Put the replies of :func:`get_state` and :func:`read_fields` together."""
    returnvalue, reason, stacktrace, progress, made = fields
    return JobSnapshot(
        state=state,
        returnvalue=None if returnvalue is None else codec.decode_text(returnvalue),
        failed_reason=codec.decode_text(reason),
        stacktrace=_traces(stacktrace),
        progress=codec.decode(progress, what=f"progress of job {job_id}"),
        attempts_made=_count(made),
    )


def is_finished(keys: QueueKeys, job_id: str) -> Call[Finished | None]:
    """``isFinished`` with its value: how the job ended, ``None`` while it has not.

    The judge raises ``JobNotFoundError`` when Redis has no such job (any more).
    """

    def judge(reply: Any) -> Finished | None:
        code = int(reply[0])
        raise_for(code, job_id, keys.name)
        return Finished(code == 1, codec.decode_text(reply[1])) if code else None

    places = (keys.completed, keys.failed, keys.job(job_id))
    return script_call(loader.official("isFinished"), places, (job_id, "1"), judge)


def get_counts(keys: QueueKeys, states: Sequence[str]) -> Call[dict[str, int]]:
    """``getCounts``: how many jobs are in each of ``states`` (``wait``, ``active``, ``completed`` …)."""

    def judge(reply: Any) -> dict[str, int]:
        return {state: int(count) for state, count in zip(states, reply, strict=True)}

    return script_call(loader.official("getCounts"), (keys.base,), tuple(states), judge)


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
