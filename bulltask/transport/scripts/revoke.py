"""The scripts that end revoked jobs, and the marks of those that run; packing only (ADR 25)."""

from __future__ import annotations

from typing import Any, Final

from bulltask.config.config import Config
from bulltask.jobs.job import ActiveJob
from bulltask.jobs.states import REVOKED, Revocation
from bulltask.lua import loader
from bulltask.transport.call import Call, script_call
from bulltask.transport.keys import QueueKeys
from bulltask.transport.replies import Fetched, raise_for, text, texts
from bulltask.transport.scripts.move import Claim, Ending, move_to_finished
from bulltask.value_class import value_class

__all__ = ["Marks", "end_revoked", "open_marks", "revoke"]

_MARKS: Final = 10_000
"""So many marks a queue has at the most."""

_LOOKED_AT: Final = 1_000
"""So many of them a worker looks at in one call: Redis does nothing else for 4 ms."""

_MARKED_MS: Final = 86_400_000
"""How long a mark is heeded."""

_NO_LOCK: Final = "0"  # BullMQ's scripts take it as: do not look


@value_class
class Marks:
    """Jobs that are to be ended and have not ended.

    Attributes:
        held: ids of those that somebody has a lock of: they run.
        free: of the others.
        following: how many marks to pass over in the next call; 0 when all were looked at.
    """

    held: list[str]
    free: list[str]
    following: int = 0


def revoke(keys: QueueKeys, job: ActiveJob, config: Config, now_ms: int, *, terminate: bool) -> Call[Revocation]:
    """Own ``revoke`` before ``moveToFinished``: end a job that does not run; mark one that does, if ``terminate``.

    Args:
        keys: the queue.
        job: as far as its options go.
        config: says what is kept of jobs that fail, and whether they are counted.
        now_ms: the server's time.
        terminate: a run is ended, too.
    """
    keep = job.keep("removeOnFail", config.keep_failed)
    ending = Ending(False, REVOKED.encode(), keep, job.attempts, ["failedReason", REVOKED])
    claim = Claim.of(config, keys, _NO_LOCK, "")
    finish = move_to_finished(keys, job.id, claim, ending, fetch_next=False, now_ms=now_ms)

    def judge(reply: Any) -> Revocation:
        raise_for(reply, job.id, keys.name)
        return Revocation(text(reply))

    own = (keys.revoked, keys.waiting_children, keys.completed, keys.repeat)
    words = (int(terminate), now_ms, _MARKS, *finish.words)
    return script_call(loader.ending("revoke"), (*own, *finish.places), words, judge)


def end_revoked(keys: QueueKeys, finish: Call[Fetched]) -> Call[Fetched]:
    """Own ``endRevoked`` around a call of ``moveToFinished``: the job's mark goes in the same step.

    Args:
        keys: the queue.
        finish: ends the job; it must not take the next one.
    """
    return script_call(loader.ending("endRevoked"), (keys.revoked, *finish.places), finish.words, finish.judge)


def open_marks(keys: QueueKeys, now_ms: int, skipped: int = 0) -> Call[Marks | None]:
    """Own ``openMarks``: the marked jobs that have not ended, ``None`` for none; marks that are of no use go.

    It looks at some marks, from the oldest one on, after ``skipped`` of them.
    """

    def judge(reply: Any) -> Marks | None:
        return None if reply is None else Marks(texts(reply[0]), texts(reply[1]), int(reply[2]))

    places = (keys.revoked, keys.completed, keys.failed)
    words = (keys.base, now_ms - _MARKED_MS, _MARKS, skipped, _LOOKED_AT)
    return script_call(loader.own("openMarks"), places, words, judge)
