"""Calls that finish a job of a canvas, and atomically do more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from bulltask.errors import DecodeError
from bulltask.jobs import codec
from bulltask.jobs.job import RunningJob
from bulltask.jobs.names import FAN_OUT, address_of
from bulltask.lua import wrappers
from bulltask.transport.call import Call, script_call, to_msgpack
from bulltask.transport.keys import QueueKeys
from bulltask.transport.replies import Fetched
from bulltask.transport.scripts.add import AddedJob

__all__ = ["finish_with_errbacks", "has_dependents", "with_dependents"]

R = TypeVar("R")


def finish_with_errbacks(finish: Call[R], jobs: Sequence[AddedJob]) -> Call[R]:
    """bulltask's ``finishWithErrbacks``: fail a job and add its error callbacks atomically.

    Args:
        finish: The call of ``moveToFinished`` or ``failMalformed``; it must not fetch the next job.
        jobs: The jobs.
    """
    added = to_msgpack([list(job) for job in jobs])
    assert finish.script is not None
    return script_call(wrappers.with_errbacks(finish.script), finish.keys, (added, *finish.argv), finish.parse_reply)


def with_dependents(
    keys: QueueKeys, job: RunningJob, call: Call[Fetched], result: bytes | None, now_ms: int
) -> Call[Fetched]:
    """bulltask's ``finishFanOut`` with ``moveToFinished``: finish a fan-out job and start its dependents atomically.

    Args:
        keys: The queue.
        job: The job; for any job except a fan-out job, ``call`` is returned.
        call: The call of ``moveToFinished`` for it; it must not fetch the next job.
        result: The result that the dependents receive, as JSON; ``None`` if the job fails, so that they fail, too.
        now_ms: The server's time.
    """
    if job.name != FAN_OUT or not job.sent_by_bulltask:
        return call
    try:
        dependents = [address_of(key, keys.prefix) for key in codec.decode(job.data)["dependents"]]
    except (DecodeError, LookupError, TypeError, AttributeError):
        return call  # another client has replaced the data
    addresses = [(f"{prefix}:{name}", job_id) for prefix, name, job_id in dependents]
    fan_out = to_msgpack([keys.job(job.id), result is not None, result or b"", now_ms, addresses])
    return script_call(wrappers.with_finish("finishFanOut"), call.keys, (*call.argv, fan_out), call.parse_reply)


def has_dependents(finish: Call[Fetched]) -> bool:
    """Return whether a call from :func:`with_dependents` starts or fails dependents."""
    return finish.script == wrappers.with_finish("finishFanOut")
