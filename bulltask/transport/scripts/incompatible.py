"""Calls for jobs that wait for another worker, because those that have acquired them cannot run them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from bulltask.jobs.job import INCOMPATIBLE_FIELD
from bulltask.lua import loader, wrappers
from bulltask.transport.call import Call, command, script_call
from bulltask.transport.keys import QueueKeys
from bulltask.transport.replies import text

__all__ = ["MAX_DELAY_MS", "delay_incompatible", "incompatible_since", "promote_incompatible"]

MAX_DELAY_MS: Final = 60_000
"""The longest delay before an incompatible job is tried again."""

_CHECKED_PER_CALL: Final = 500


def incompatible_since(keys: QueueKeys, job_id: str) -> Call[str]:
    """Read the field that says since when no worker could run the job; ``""`` for none."""

    def parse_reply(reply: Any) -> str:
        return "" if reply is None else text(reply)

    return command("HGET", keys.job(job_id), INCOMPATIBLE_FIELD, parse_reply=parse_reply)


def delay_incompatible(keys: QueueKeys, job_id: str, move: Call[None], reason: str, since: str) -> Call[None]:
    """bulltask's ``delayIncompatible``: delay a job that this worker cannot run.

    Args:
        keys, job_id: The job.
        move: The call of ``moveToDelayed``.
        reason: Why the worker cannot run it.
        since: The field that says since when no worker could run it.
    """
    fields = ("failedReason", reason, INCOMPATIBLE_FIELD, since)
    script_keys = (keys.job(job_id), keys.incompatible, *move.keys)
    return script_call(
        wrappers.delay_incompatible(), script_keys, (MAX_DELAY_MS, len(fields), *fields, *move.argv), move.parse_reply
    )


def promote_incompatible(
    keys: QueueKeys, tasks: Sequence[str], skipped: int, now_ms: int
) -> Call[tuple[int, int | None]]:
    """bulltask's ``promoteIncompatible``: make jobs of these tasks due that wait for another worker.

    One call checks 500 jobs, after the first ``skipped``.

    Returns:
        How many jobs are due now, and how many the next call skips; ``None`` if all were checked.
    """

    def parse_reply(reply: Any) -> tuple[int, int | None]:
        due, rest = int(reply[0]), int(reply[1])
        return due, None if rest < 0 else rest

    return script_call(
        loader.bulltask_script("promoteIncompatible"),
        (keys.incompatible, keys.delayed, keys.marker, keys.meta),
        (keys.base, now_ms, skipped, _CHECKED_PER_CALL, *tasks),
        parse_reply,
    )
