"""The script that fails a job which BullMQ's scripts cannot take or end; packing only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from bulltask.jobs.codec import ON_SURROGATE
from bulltask.lua import loader
from bulltask.transport.call import Call, script_call
from bulltask.transport.keys import QueueKeys
from bulltask.transport.replies import Fetched, raise_for
from bulltask.transport.scripts.move import Ending

__all__ = ["malformed", "set_aside"]

_SOUND: Final = 1


def malformed(problem: str, keep: Mapping[str, int]) -> Ending:
    """How a job ends of which nothing is known but that it cannot be taken or settled."""
    reason = f"the job was set aside, because its hash is malformed: {problem}".encode("utf-8", ON_SURROGATE)
    return Ending(False, reason, keep, 0, ["failedReason", reason])


def set_aside(keys: QueueKeys, finish: Call[Fetched], token: str, *, only_malformed: bool = False) -> Call[bool]:
    """Own ``setAside`` around a call of ``moveToFinished``: fail a job that nobody could take or end otherwise.

    The judge raises ``LockMismatchError``, ``JobStateError`` or ``JobNotFoundError`` when another
    worker has the job, it waits or has ended, or it is gone.

    Args:
        keys: the queue.
        finish: fails the job; it must not take the next one.
        token: of the lock that the caller has, or had.
        only_malformed: leave a job alone whose hash is sound; the result is false then.
    """

    def judge(reply: Any) -> bool:
        raise_for(reply, str(finish.words[0]), keys.name)
        return bool(reply != _SOUND)

    places = (keys.completed, keys.waiting_children, *finish.places)
    words = (token, "1" if only_malformed else "", *finish.words)
    return script_call(loader.ending("setAside"), places, words, judge)
