"""Calls to the scripts that move a job between states.

Times are in milliseconds, by the server's clock. A token proves that the caller holds the job's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

from bulltask.errors import NoPendingChildrenError
from bulltask.jobs.codec import ON_SURROGATE
from bulltask.lua import loader, wrappers
from bulltask.transport.call import Call, script_call, to_msgpack
from bulltask.transport.keys import QueueKeys
from bulltask.transport.replies import Fetched, error_parser, parse_fetched, raise_for, texts
from bulltask.transport.scripts.canvas import has_dependents
from bulltask.transport.scripts.fetch import FetchOptions
from bulltask.transport.scripts.packed_options import pack_finish
from bulltask.value_class import value_class

__all__ = [
    "CRASHES",
    "FinishOptions",
    "count_crash",
    "fail_malformed",
    "find_by_token",
    "lock_expiries",
    "malformed_finish",
    "move_from_active_to_wait",
    "move_stalled_jobs_to_wait",
    "move_to_delayed",
    "move_to_finished",
    "move_to_waiting_children",
    "release_unstarted",
    "renew_lock",
    "renew_locks",
    "retry_job",
    "wake_next",
]

R = TypeVar("R")

_CRASH_TOKENS_KEPT: Final = 10

CRASHES: Final = "bulltask:crashes"
"""The field of the job's hash that counts the children that died while running the job."""

_CHECKED_PER_CALL: Final = 500

_MAX_PACKED: Final = 100

Fields = Sequence[str | bytes]
"""Hash fields to write with a move: name, value, name, value …"""

_VALID: Final = 1  # the script's reply if the job's hash is valid


@value_class
class FinishOptions:
    """How a job finishes.

    Attributes:
        completed: True if it completed, False if it failed.
        value: The return value as JSON, or the error message as plain text.
        keep: BullMQ's ``keepJobs`` map. Required: without it the script fails after it has removed the lock.
        attempts: The job's maximum number of attempts, which the script compares for its ``retries-exhausted`` event.
        fields: Further hash fields to write.
    """

    completed: bool
    value: bytes
    keep: Mapping[str, int]
    attempts: int
    fields: Fields = ()


def move_to_finished(
    keys: QueueKeys, job_id: str, options: FetchOptions, finish: FinishOptions, *, fetch_next: bool, now_ms: int
) -> Call[Fetched]:
    """``moveToFinished``: complete or fail a job and, if requested, acquire the next one in the same step.

    Args:
        keys: The queue.
        job_id: The job, locked with the token of ``options``.
        options: The options of the worker that had the job, and of the next fetch.
        finish: How the job finishes.
        fetch_next: Acquire the next job in this queue.
        now_ms: The server's time.
    """
    completed = finish.completed
    target, prop = ("completed", "returnvalue") if completed else ("failed", "failedReason")
    script_keys = (
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
    kind = (finish.keep.get("age"), finish.keep.get("count"), finish.attempts)
    if (packed := options.packed_finishes.get(kind)) is None:
        packed = options.packed_finishes[kind] = pack_finish(
            options.token,
            options.lock_ms,
            options.worker,
            None if options.limiter is None else tuple(options.limiter.items()),
            options.data_points,
            tuple(finish.keep.items()),
            finish.attempts,
        )
        if len(options.packed_finishes) > _MAX_PACKED:
            options.packed_finishes.clear()
    args = (job_id, now_ms, prop, finish.value, target, int(fetch_next), keys.base, packed, _pack(finish.fields))

    def parse_reply(reply: Any) -> Fetched:
        raise_for(reply, job_id, keys.name)
        return parse_fetched(reply)

    return script_call(wrappers.with_guard("moveToFinished", "promotionGuard"), script_keys, args, parse_reply)


def move_to_delayed(
    keys: QueueKeys, job_id: str, token: str, delay_ms: int, *, failure: Fields | None, now_ms: int
) -> Call[None]:
    """``moveToDelayed``: delay an active job by ``delay_ms``.

    Args:
        keys: The queue.
        job_id: The job.
        token: The token of its lock.
        delay_ms: Milliseconds from ``now_ms`` until it is due.
        failure: Hash fields of the failed attempt; with ``None`` the attempt does not count.
        now_ms: The server's time.
    """
    script_keys = (
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
    return script_call(loader.official_script("moveToDelayed"), script_keys, args, error_parser(keys, job_id))


def retry_job(keys: QueueKeys, job_id: str, token: str, *, lifo: bool, fields: Fields, now_ms: int) -> Call[None]:
    """``retryJob``: move an active job back to the waiting list and count the attempt."""
    script_keys = (
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
    return script_call(wrappers.with_guard("retryJob", "promotionGuard"), script_keys, args, error_parser(keys, job_id))


def move_from_active_to_wait(keys: QueueKeys, job_id: str, token: str) -> Call[None]:
    """``moveJobFromActiveToWait``: release a job. It is the next to be acquired, and the attempt does not count."""
    script_keys = (
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
    return script_call(loader.official_script("moveJobFromActiveToWait"), script_keys, args, error_parser(keys, job_id))


def release_unstarted(keys: QueueKeys, job_id: str, token: str) -> Call[None]:
    """bulltask's ``releaseUnstarted``: release a prefetched job. Neither the attempt nor the start counts."""
    release = move_from_active_to_wait(keys, job_id, token)
    return script_call(wrappers.release_unstarted(), release.keys, release.argv, release.parse_reply)


def move_to_waiting_children(keys: QueueKeys, job_id: str, token: str, now_ms: int) -> Call[None]:
    """``moveToWaitingChildren``: make an active job wait for its child jobs. The attempt does not count.

    Running the call raises ``NoPendingChildrenError`` when the job has no child job to wait for (it is still active),
    and ``FailedChildrenError`` when a child job's failure fails the job.
    """
    script_keys = (
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
    return script_call(loader.official_script("moveToWaitingChildren"), script_keys, args, parse_reply)


def move_stalled_jobs_to_wait(
    keys: QueueKeys, max_stalled: int, interval_ms: int, now_ms: int, left: int | None = None
) -> Call[tuple[list[str], int]]:
    """bulltask's ``stalledPage`` with ``moveStalledJobsToWait``: recover the jobs whose lock has expired.

    One call checks 500 active jobs. Call it again, with the same time, until no jobs are left.

    Args:
        keys: The queue.
        max_stalled: A job that stalls more times than this fails.
        interval_ms: How long no other check may begin; after a check by a client with a longer interval, from now on.
        now_ms: The server's time.
        left: The number of jobs that the previous call has left; ``None`` begins a check.

    Returns:
        The ids of the recovered jobs, and how many jobs are left to check.
    """

    def parse_reply(reply: Any) -> tuple[list[str], int]:
        return texts(reply[0]), int(reply[1])

    script_keys = (
        keys.marked_stalled,
        *keys.temporary,
        keys.stalled,
        keys.wait,
        keys.active,
        keys.stalled_check,
        keys.meta,
        keys.paused,
        keys.marker,
        keys.events,
    )
    args = (max_stalled, keys.base, now_ms, interval_ms, "" if left is None else left, _CHECKED_PER_CALL)
    return script_call(wrappers.with_guard("moveStalledJobsToWait", "stalledPage"), script_keys, args, parse_reply)


def lock_expiries(keys: QueueKeys, stalled: Sequence[str], interval_ms: int, now_ms: int) -> Call[list[int | None]]:
    """bulltask's ``lockExpiries``: read when the locks of stalled jobs expired, by the server's clock.

    Call it after :func:`move_stalled_jobs_to_wait`, with the same times. An entry is ``None`` if a worker of another
    client made the previous check.
    """

    def parse_reply(reply: Any) -> list[int | None]:
        return [None if expiry is None else int(expiry) for expiry in reply]

    script_keys = (keys.lock_expiries, keys.stalled, keys.stalled_check)
    return script_call(
        loader.bulltask_script("lockExpiries"), script_keys, (keys.base, now_ms, 2 * interval_ms, *stalled), parse_reply
    )


def wake_next(keys: QueueKeys, move: Call[R]) -> Call[R]:
    """bulltask's ``wakeNext`` with a script that moves a job out of ``active`` and acquires no other job.

    In a queue with global concurrency it wakes, in the same step, a worker that received no job because of that limit.
    """
    assert move.script is not None
    return script_call(
        wrappers.with_wakeup(move.script), (keys.meta, keys.marker, *move.keys), move.argv, move.parse_reply
    )


def renew_locks(keys: QueueKeys, held: Sequence[tuple[str, str]], lock_ms: int) -> Call[list[str]]:
    """bulltask's ``renewLocks``: renew the locks of ``held`` (token, job id). Returns the ids whose lock is lost.

    An expired lock is reacquired unless another worker has the job.
    """
    return _renew_call(keys, held, lock_ms, texts)


def renew_lock(keys: QueueKeys, job_id: str, token: str, lock_ms: int) -> Call[bool]:
    """Renew or reacquire the lock of one job, as :func:`renew_locks` does. Returns False if the lock is lost."""
    return _renew_call(keys, [(token, job_id)], lock_ms, lambda lost: not lost)


def _renew_call(
    keys: QueueKeys, held: Sequence[tuple[str, str]], lock_ms: int, parse_reply: Callable[[Any], R]
) -> Call[R]:
    pairs = [word for pair in held for word in pair]
    return script_call(
        loader.bulltask_script("renewLocks"), (keys.stalled, keys.active), (keys.base, lock_ms, *pairs), parse_reply
    )


def count_crash(keys: QueueKeys, job_id: str, token: str) -> Call[int]:
    """bulltask's ``countCrash``: count the crash of the child with this token; return the job's number of crashes."""
    return script_call(loader.bulltask_script("countCrash"), (keys.job(job_id),), (token, _CRASH_TOKENS_KEPT), int)


def find_by_token(keys: QueueKeys, tokens: Sequence[str]) -> Call[list[tuple[str, str]]]:
    """bulltask's ``findByToken``: find the active jobs that are locked with one of ``tokens``, as (token, job id)."""

    def parse_reply(reply: Any) -> list[tuple[str, str]]:
        words = texts(reply)
        return list(zip(words[::2], words[1::2], strict=True))

    return script_call(loader.bulltask_script("findByToken"), (keys.active,), (keys.base, *tokens), parse_reply)


def _pack(fields: Fields) -> bytes | str:
    return to_msgpack(list(fields)) if fields else ""


def malformed_finish(problem: str, keep: Mapping[str, int]) -> FinishOptions:
    """Return the options that fail a job whose hash cannot be read."""
    reason = f"malformed job: {problem}".encode("utf-8", ON_SURROGATE)
    return FinishOptions(False, reason, keep, 0, ["failedReason", reason])


def fail_malformed(keys: QueueKeys, finish: Call[Fetched], token: str, *, only_malformed: bool = False) -> Call[bool]:
    """bulltask's ``failMalformed`` with ``moveToFinished``: fail a job that cannot be acquired or finished otherwise.

    Running the call raises ``LockMismatchError``, ``JobStateError`` or ``JobNotFoundError`` when there is nothing to
    do: another worker has the job, it is waiting or has finished, or it no longer exists.

    Args:
        keys: The queue.
        finish: The ``moveToFinished`` call; it must not fetch the next job.
        token: The token of the lock that the caller has, or had.
        only_malformed: Do nothing and return False if the job's hash is valid.
    """

    def parse_reply(reply: Any) -> bool:
        raise_for(reply, str(finish.argv[0]), keys.name)
        return bool(reply != _VALID)

    script_keys = (keys.completed, keys.waiting_children, *finish.keys)
    argv = (token, "1" if only_malformed else "", *finish.argv)
    script = wrappers.with_finish("failMalformed", fan_out=has_dependents(finish))
    return script_call(script, script_keys, argv, parse_reply)
