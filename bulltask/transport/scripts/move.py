"""The scripts that move a job between states; packing only (PROTOCOL 3.2).

Every time is the server's, in milliseconds. A token proves that the caller holds the job's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

from bulltask.config.config import Config
from bulltask.errors import NoPendingChildrenError
from bulltask.jobs.codec import ON_SURROGATE
from bulltask.lua import loader, wrappers
from bulltask.transport.call import Call, script_call, to_msgpack
from bulltask.transport.keys import QueueKeys
from bulltask.transport.replies import Fetched, parse_fetched, raise_for, texts
from bulltask.value_class import value_class

__all__ = [
    "CRASHES",
    "FetchOptions",
    "FinishOptions",
    "find_by_token",
    "keep_lock",
    "lock_ends",
    "malformed_finish",
    "move_from_active_to_wait",
    "move_stalled_jobs_to_wait",
    "move_to_active",
    "move_to_delayed",
    "move_to_finished",
    "move_to_waiting_children",
    "quarantine",
    "renew_locks",
    "retry_job",
    "wake_next",
]

R = TypeVar("R")

CRASHES: Final = "bulltask:crashes"
"""A job's hash field of ours: so many children died while they had the job in hand."""

Fields = Sequence[str | bytes]
"""Hash fields to write with a move: name, value, name, value …"""

_SOUND: Final = 1


@value_class
class FetchOptions:
    """Who takes jobs.

    Attributes:
        token: locks them.
        lock_ms: how long, unless the lock is renewed.
        worker: the worker's name, written into each job it takes unless it is empty.
        limiter: BullMQ's ``limiter``, which counts where the queue has no global rate limit; ``None`` for none.
        data_points: how many minutes of BullMQ's metrics are kept; ``None``: jobs that end are not counted.
    """

    token: str
    lock_ms: int
    worker: str
    limiter: Mapping[str, int] | None = None
    data_points: int | None = None

    @classmethod
    def from_config(
        cls, config: Config, keys: QueueKeys, token: str, worker: str, lock_ms: int | None = None
    ) -> FetchOptions:
        """The claim of a worker with these settings to jobs of a queue; ``lock_ms`` if locks last otherwise."""
        lasts_ms = config.lock_ms if lock_ms is None else lock_ms
        return cls(token, lasts_ms, worker, config.limiter(keys.queue), config.metrics_max_data_points)


@value_class
class FinishOptions:
    """How a job ends.

    Attributes:
        completed: it completed; else it failed.
        value: the return value's JSON, or the failure's raw text.
        keep: BullMQ's ``keepJobs`` map; it must be there, or the script fails after the lock is gone.
        attempts: tries in all, as the job says; the script compares, for its ``retries-exhausted`` event.
        fields: written into the hash too.
    """

    completed: bool
    value: bytes
    keep: Mapping[str, int]
    attempts: int
    fields: Fields = ()


def move_to_active(keys: QueueKeys, claim: FetchOptions, now_ms: int) -> Call[Fetched]:
    """``moveToActive``: take the next job for ``claim``; promotes delayed jobs that are due."""
    places = (
        keys.wait,
        keys.active,
        keys.prioritized,
        keys.events,
        keys.stalled,
        keys.limiter,
        keys.delayed,
        keys.paused,
        keys.meta,
        keys.pc,
        keys.marker,
    )
    options = {"token": claim.token, "lockDuration": claim.lock_ms, "name": claim.worker or None}
    if claim.limiter is not None:
        options["limiter"] = claim.limiter
    return script_call(
        wrappers.guarded("moveToActive", "promoting"), places, (keys.base, now_ms, to_msgpack(options)), parse_fetched
    )


def move_to_finished(
    keys: QueueKeys, job_id: str, claim: FetchOptions, ending: FinishOptions, *, fetch_next: bool, now_ms: int
) -> Call[Fetched]:
    """``moveToFinished``: complete or fail the job, and take the next one in the same step if asked.

    Args:
        keys: the queue.
        job_id: the job; it is locked with the claim's token.
        claim: who had the job, and takes the next one.
        ending: how it ends.
        fetch_next: take the next job of this queue.
        now_ms: the server's time.
    """
    completed = ending.completed
    target, prop = ("completed", "returnvalue") if completed else ("failed", "failedReason")
    places = (
        keys.wait,
        keys.active,
        keys.prioritized,
        keys.events,
        keys.stalled,
        keys.limiter,
        keys.delayed,
        keys.paused,
        keys.meta,
        keys.pc,
        keys.completed if completed else keys.failed,
        keys.job(job_id),
        keys.metrics_completed if completed else keys.metrics_failed,
        keys.marker,
    )
    options = {
        "token": claim.token,
        "keepJobs": ending.keep,
        "lockDuration": claim.lock_ms,
        "attempts": ending.attempts,
        "maxMetricsSize": claim.data_points or "",  # "" is off; without the key a queue's second job fails in Lua
        "name": claim.worker or None,  # nil: not written
    }
    if claim.limiter is not None:
        options["limiter"] = claim.limiter
    packed = to_msgpack(options)
    args = (job_id, now_ms, prop, ending.value, target, int(fetch_next), keys.base, packed, _pack(ending.fields))

    def parse_reply(reply: Any) -> Fetched:
        raise_for(reply, job_id, keys.name)
        return parse_fetched(reply)

    return script_call(wrappers.guarded("moveToFinished", "promoting"), places, args, parse_reply)


def move_to_delayed(
    keys: QueueKeys, job_id: str, token: str, delay_ms: int, *, failure: Fields | None, now_ms: int
) -> Call[None]:
    """``moveToDelayed``: the job is due again in ``delay_ms``.

    Args:
        keys: the queue.
        job_id: the job.
        token: of its lock.
        delay_ms: from ``now_ms`` until it is due.
        failure: the fields of a failed attempt; ``None``: none was made, so none is counted.
        now_ms: the server's time.
    """
    places = (
        keys.marker,
        keys.active,
        keys.prioritized,
        keys.delayed,
        keys.job(job_id),
        keys.events,
        keys.meta,
        keys.stalled,
    )
    args = (keys.base, now_ms, job_id, token, delay_ms, "1" if failure is None else "0", _pack(failure or ()))
    return script_call(loader.official("moveToDelayed"), places, args, _refusal(keys, job_id))


def retry_job(keys: QueueKeys, job_id: str, token: str, *, lifo: bool, fields: Fields, now_ms: int) -> Call[None]:
    """``retryJob``: the job waits again at once; an attempt was made."""
    places = (
        keys.active,
        keys.wait,
        keys.paused,
        keys.job(job_id),
        keys.meta,
        keys.events,
        keys.delayed,
        keys.prioritized,
        keys.pc,
        keys.marker,
        keys.stalled,
    )
    args = (keys.base, now_ms, "RPUSH" if lifo else "LPUSH", job_id, token, _pack(fields))
    return script_call(wrappers.guarded("retryJob", "promoting"), places, args, _refusal(keys, job_id))


def move_from_active_to_wait(keys: QueueKeys, job_id: str, token: str) -> Call[None]:
    """``moveJobFromActiveToWait``: give the job back; it is the next to be taken and no attempt is counted."""
    places = (
        keys.active,
        keys.wait,
        keys.stalled,
        keys.paused,
        keys.meta,
        keys.limiter,
        keys.prioritized,
        keys.marker,
        keys.events,
    )
    args = (job_id, token, keys.job(job_id))
    return script_call(loader.official("moveJobFromActiveToWait"), places, args, _refusal(keys, job_id))


def move_to_waiting_children(keys: QueueKeys, job_id: str, token: str, now_ms: int) -> Call[None]:
    """``moveToWaitingChildren``: the job waits for its children and is run again then; no attempt is counted.

    Running the call raises ``NoPendingChildrenError`` when the job has no child to wait for (it is still active), and
    ``FailedChildrenError`` when the failure of a child fails the job.
    """
    places = (
        keys.active,
        keys.waiting_children,
        keys.job(job_id),
        keys.dependencies(job_id),
        keys.unsuccessful(job_id),
        keys.stalled,
        keys.events,
    )

    def parse_reply(reply: Any) -> None:
        raise_for(reply, job_id, keys.name)
        if reply == 1:
            raise NoPendingChildrenError(job_id, keys.name)

    args = (token, "", now_ms, job_id, keys.base)
    return script_call(loader.official("moveToWaitingChildren"), places, args, parse_reply)


def move_stalled_jobs_to_wait(keys: QueueKeys, max_stalled: int, interval_ms: int, now_ms: int) -> Call[list[str]]:
    """``moveStalledJobsToWait``: jobs whose lock ran out wait again; the result is their ids."""
    places = (
        keys.stalled,
        keys.wait,
        keys.active,
        keys.stalled_check,
        keys.meta,
        keys.paused,
        keys.marker,
        keys.events,
    )
    args = (max_stalled, keys.base, now_ms, interval_ms)
    return script_call(wrappers.guarded("moveStalledJobsToWait", "stalling"), places, args, texts)


def lock_ends(keys: QueueKeys, stalled: Sequence[str], interval_ms: int, now_ms: int) -> Call[list[int | None]]:
    """Own ``lockEnds``, after :func:`move_stalled_jobs_to_wait` with the same times: when the locks of the jobs that it
    found ran out, by the server's clock; ``None`` where a worker that is not bulltask's has made the check before."""

    def parse_reply(reply: Any) -> list[int | None]:
        return [None if end is None else int(end) for end in reply]

    places = (keys.lock_ends, keys.stalled, keys.stalled_check)
    return script_call(loader.own("lockEnds"), places, (keys.base, now_ms, 2 * interval_ms, *stalled), parse_reply)


def wake_next(keys: QueueKeys, move: Call[R]) -> Call[R]:
    """Own ``wakeNext`` around a call that moves a job out of ``active`` and takes no other: in a queue with a global
    maximum, a worker that was refused for it is woken in the same step."""
    assert move.script is not None
    return script_call(
        wrappers.waking(move.script), (keys.meta, keys.marker, *move.places), move.words, move.parse_reply
    )


def renew_locks(keys: QueueKeys, held: Sequence[tuple[str, str]], lock_ms: int) -> Call[list[str]]:
    """Own ``renewLocks``: renew the locks of ``held`` (token, job id), also those that ran out unless another worker
    has the job by now; the result is the ids whose lock is lost."""
    return _renewal(keys, held, lock_ms, texts)


def keep_lock(keys: QueueKeys, job_id: str, token: str, lock_ms: int) -> Call[bool]:
    """Own ``renewLocks`` for one job: renew its lock, or take it again if it ran out and no other worker has the job;
    the result is whether the job is locked with ``token`` now."""
    return _renewal(keys, [(token, job_id)], lock_ms, lambda lost: not lost)


def _renewal(
    keys: QueueKeys, held: Sequence[tuple[str, str]], lock_ms: int, parse_reply: Callable[[Any], R]
) -> Call[R]:
    pairs = [word for pair in held for word in pair]
    return script_call(loader.own("renewLocks"), (keys.stalled, keys.active), (keys.base, lock_ms, *pairs), parse_reply)


def find_by_token(keys: QueueKeys, tokens: Sequence[str]) -> Call[list[tuple[str, str]]]:
    """Own ``findByToken``: the active jobs locked with one of ``tokens``, as (token, job id)."""

    def parse_reply(reply: Any) -> list[tuple[str, str]]:
        words = texts(reply)
        return list(zip(words[::2], words[1::2], strict=True))

    return script_call(loader.own("findByToken"), (keys.active,), (keys.base, *tokens), parse_reply)


def _pack(fields: Fields) -> bytes | str:
    return to_msgpack(list(fields)) if fields else ""


def _refusal(keys: QueueKeys, job_id: str) -> Any:
    def parse_reply(reply: Any) -> None:
        raise_for(reply, job_id, keys.name)

    return parse_reply


def malformed_finish(problem: str, keep: Mapping[str, int]) -> FinishOptions:
    """How a job ends of which nothing is known but that it cannot be taken or settled."""
    reason = f"the job was set aside, because its hash is malformed: {problem}".encode("utf-8", ON_SURROGATE)
    return FinishOptions(False, reason, keep, 0, ["failedReason", reason])


def quarantine(keys: QueueKeys, finish: Call[Fetched], token: str, *, only_malformed: bool = False) -> Call[bool]:
    """Own ``setAside`` around a call of ``moveToFinished``: fail a job that nobody could take or end otherwise.

    Running the call raises ``LockMismatchError``, ``JobStateError`` or ``JobNotFoundError`` when there is none to end:
    another worker has the job, it waits or has ended, or it is gone.

    Args:
        keys: the queue.
        finish: fails the job; it must not take the next one.
        token: of the lock that the caller has, or had.
        only_malformed: leave a job alone whose hash is sound; the result is false then.
    """

    def parse_reply(reply: Any) -> bool:
        raise_for(reply, str(finish.words[0]), keys.name)
        return bool(reply != _SOUND)

    places = (keys.completed, keys.waiting_children, *finish.places)
    words = (token, "1" if only_malformed else "", *finish.words)
    return script_call(wrappers.ending("setAside"), places, words, parse_reply)
