"""Calls that store the checkpoint of a running job, or other fields with a move."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from bulltask.lua import loader, wrappers
from bulltask.transport.call import Call, script_call
from bulltask.transport.keys import QueueKeys
from bulltask.transport.replies import raise_for

__all__ = ["move_with_fields", "store_checkpoint"]

R = TypeVar("R")


def store_checkpoint(keys: QueueKeys, job_id: str, token: str, checkpoint: str) -> Call[bool]:
    """bulltask's ``storeCheckpoint``: store a job's checkpoint; False if its lock has expired.

    Running the call raises ``LockMismatchError`` if another worker has the job, and ``JobNotFoundError`` if the job was
    removed.
    """

    def parse_reply(reply: Any) -> bool:
        raise_for(reply, job_id, keys.name)
        return bool(reply)

    script_keys = (keys.job(job_id), keys.lock(job_id))
    return script_call(loader.bulltask_script("storeCheckpoint"), script_keys, (token, checkpoint), parse_reply)


def move_with_fields(keys: QueueKeys, job_id: str, fields: Sequence[str], move: Call[R]) -> Call[R]:
    """bulltask's ``moveWithFields`` with a script that moves a job out of ``active`` without an outcome.

    Args:
        keys, job_id: The job.
        fields: Names and values of the fields that change with the move.
        move: The call of BullMQ's script.
    """
    assert move.script is not None
    return script_call(
        wrappers.with_fields(move.script),
        (keys.job(job_id), *move.keys),
        (len(fields), *fields, *move.argv),
        move.parse_reply,
    )
