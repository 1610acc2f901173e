"""Calls that finish a job of a canvas and do more in the same step."""

from __future__ import annotations

from collections.abc import Sequence

from bulltask.lua import wrappers
from bulltask.transport.call import Call, script_call, to_msgpack
from bulltask.transport.keys import QueueKeys
from bulltask.transport.replies import Fetched

__all__ = ["finish_fan_out", "finish_with_errbacks"]


def finish_with_errbacks(finish: Call[Fetched], jobs: Sequence[tuple[str, bytes, bytes, bytes]]) -> Call[Fetched]:
    """bulltask's ``finishWithErrbacks``: fail a job and add its error callbacks in one step.

    Args:
        finish: The call of ``moveToFinished``; it must not fetch the next job.
        jobs: For each job, the prefix of its queue's keys, and the arguments of ``addStandardJob``.
    """
    added = to_msgpack([list(job) for job in jobs])
    return script_call(wrappers.with_errbacks(), finish.keys, (added, *finish.argv), finish.parse_reply)


def finish_fan_out(
    keys: QueueKeys,
    job_id: str,
    finish: Call[Fetched],
    followers: Sequence[tuple[str, str]],
    result: bytes | None,
    now_ms: int,
) -> Call[Fetched]:
    """bulltask's ``finishFanOut`` with ``moveToFinished``: finish a fan-out job and start its followers in one step.

    Args:
        keys: The queue.
        job_id: The fan-out job.
        finish: The call of ``moveToFinished``; it must not fetch the next job.
        followers: Qualified queue names and ids.
        result: The result that they receive, as JSON; ``None`` if the job fails, so that they fail, too.
        now_ms: The server's time.
    """
    completed = result is not None
    fan_out = to_msgpack([keys.job(job_id), completed, result or b"", now_ms, [list(it) for it in followers]])
    return script_call(wrappers.with_finish("finishFanOut"), finish.keys, (fan_out, *finish.argv), finish.parse_reply)
