"""Calls to the scripts with which workers acquire, finish, retry, reschedule and release jobs.

Times are in milliseconds, by the server's clock. A token proves that the caller holds the job's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from functools import lru_cache
from typing import Any, Final, TypeVar

from bulltask.config.config import Config
from bulltask.config.parsers import TaskRate
from bulltask.jobs import codec
from bulltask.jobs.clock import value_class
from bulltask.jobs.codec import ON_SURROGATE
from bulltask.jobs.errors import DecodeError, NoPendingChildrenError
from bulltask.jobs.job import INCOMPATIBLE_FIELD, RunningJob
from bulltask.jobs.names import FAN_OUT, address_of
from bulltask.lua import loader, wrappers
from bulltask.transport.call import (
    Call,
    Fetched,
    QueueKeys,
    command,
    error_parser,
    named_keys,
    parse_fetched,
    raise_for,
    result_parser,
    script_call,
    text,
    texts,
    to_msgpack,
)
from bulltask.transport.scripts.add import AddedJob

__all__ = [
    "CRASHES",
    "MAX_DELAY_MS",
    "FetchOptions",
    "FinishOptions",
    "collect_batch",
    "count_crash",
    "delay_incompatible",
    "fail_malformed",
    "fetch_ahead",
    "fetch_now",
    "find_by_token",
    "finish_with_errbacks",
    "has_dependents",
    "incompatible_since",
    "lock_expiries",
    "malformed_finish",
    "move_from_active_to_wait",
    "move_stalled_jobs_to_wait",
    "move_to_active",
    "move_to_delayed",
    "move_to_finished",
    "move_to_waiting_children",
    "move_with_fields",
    "promote_incompatible",
    "release_unstarted",
    "renew_lock",
    "renew_locks",
    "retry_job",
    "start_or_throttle",
    "store_checkpoint",
    "wake_next",
    "with_dependents",
]


@value_class
class FetchOptions:
    """How a worker acquires jobs.

    Attributes:
        token: Value of the lock.
        lock_ms: How long a lock lasts unless it is renewed.
        worker: The worker id, written into each job that it acquires; ``""`` for none.
        limiter: BullMQ's ``limiter``, which applies if the queue has no global rate limit.
        data_points: Minutes of BullMQ's metrics to keep; ``None`` turns the metrics off.
        packed_finishes: The packed options of ``moveToFinished``, which are the same for most jobs of a slot.
    """

    token: str
    lock_ms: int
    worker: str
    limiter: Mapping[str, int] | None = None
    data_points: int | None = None
    packed_finishes: dict[object, bytes] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def from_config(
        cls, config: Config, keys: QueueKeys, token: str, worker: str, lock_ms: int | None = None
    ) -> FetchOptions:
        """Return the options of a worker with these settings; ``lock_ms`` overrides the setting."""
        lock_ms = config.lock_ms if lock_ms is None else lock_ms
        return cls(token, lock_ms, worker, config.limiter(keys.queue), config.metrics_max_data_points)


def move_to_active(keys: QueueKeys, options: FetchOptions, now_ms: int) -> Call[Fetched]:
    """``moveToActive``: promote delayed jobs that are due, then acquire the next job."""
    script_keys = named_keys(keys, "wait active prioritized events stalled limiter delayed paused meta pc marker")
    limiter = None if options.limiter is None else tuple(options.limiter.items())
    packed = _pack_fetch(options.token, options.lock_ms, options.worker, limiter)
    return script_call(
        wrappers.with_guard("moveToActive", "promotionGuard"), script_keys, (keys.base, now_ms, packed), parse_fetched
    )


def collect_batch(keys: QueueKeys, options: Sequence[FetchOptions], task: str, now_ms: int) -> Call[list[Fetched]]:
    """bulltask's ``collectBatch``: acquire jobs of one task, each with its options, until another task is next."""
    first, *others = (move_to_active(keys, job_options, now_ms) for job_options in options)
    packed = (first.argv[2], *(call.argv[2] for call in others))

    return script_call(
        wrappers.fetching("collectBatch"), first.keys, (*first.argv[:2], task, *packed), _parse_all_fetched
    )


def fetch_ahead(keys: QueueKeys, options: Sequence[FetchOptions], now_ms: int) -> Call[list[Fetched]]:
    """bulltask's ``fetchAhead``: acquire several jobs, each with its options, unless all workers share a limit."""
    first, *others = (move_to_active(keys, job_options, now_ms) for job_options in options)
    packed = (first.argv[2], *(call.argv[2] for call in others))
    return script_call(wrappers.fetching("fetchAhead"), first.keys, (*first.argv[:2], *packed), _parse_all_fetched)


def fetch_now(keys: QueueKeys, options: FetchOptions) -> Call[Fetched]:
    """bulltask's ``fetchNow`` with ``moveToActive``: acquire the next job, at the server's time."""
    fetch = move_to_active(keys, options, 0)
    return script_call(wrappers.fetching("fetchNow"), fetch.keys, (fetch.argv[0], fetch.argv[2]), parse_fetched)


@lru_cache(maxsize=500)
def _pack_fetch(token: str, lock_ms: int, worker: str, limiter: tuple[tuple[str, int], ...] | None) -> bytes:
    """Return the options of ``moveToActive``, which are the same in all fetches of a slot.

    Packing them for each job would take 5% of a job's instructions, with those of ``moveToFinished``.
    """
    wire: dict[str, object] = {"token": token, "lockDuration": lock_ms, "name": worker or None}
    if limiter is not None:
        wire["limiter"] = dict(limiter)
    return to_msgpack(wire)


def _parse_all_fetched(reply: Any) -> list[Fetched]:
    return [parse_fetched(each) for each in reply]


R = TypeVar("R")


def finish_with_errbacks(finish: Call[R], jobs: Sequence[AddedJob]) -> Call[R]:
    """bulltask's ``finishWithErrbacks``: with a call that fails a job, and fetches no other, add error callbacks."""
    added = to_msgpack([list(job) for job in jobs])
    assert finish.script is not None
    return script_call(wrappers.with_errbacks(finish.script), finish.keys, (added, *finish.argv), finish.parse_reply)


def with_dependents(
    keys: QueueKeys, job: RunningJob, call: Call[Fetched], result: bytes | None, now_ms: int
) -> Call[Fetched]:
    """bulltask's ``finishFanOut`` with ``moveToFinished``: finish a fan-out job and start its dependents atomically.

    For any other job, ``call``, which must not fetch the next job, is returned. The dependents receive ``result``, as
    JSON; with ``None``, the job fails, and so do they.
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


def store_checkpoint(keys: QueueKeys, job_id: str, token: str, checkpoint: str) -> Call[bool]:
    """bulltask's ``storeCheckpoint``: store a job's checkpoint; False if its lock has expired.

    The parser raises ``LockMismatchError`` if another worker has the job, and ``JobNotFoundError`` if it was removed.
    """
    script_keys = (keys.job(job_id), keys.lock(job_id))
    parse_reply = result_parser(keys, job_id, bool)
    return script_call(loader.bulltask_script("storeCheckpoint"), script_keys, (token, checkpoint), parse_reply)


def move_with_fields(keys: QueueKeys, job_id: str, fields: Sequence[str], move: Call[R]) -> Call[R]:
    """bulltask's ``moveWithFields``: also write fields (name, value …) with a script that moves a job."""
    assert move.script is not None
    return script_call(
        wrappers.with_fields(move.script),
        (keys.job(job_id), *move.keys),
        (len(fields), *fields, *move.argv),
        move.parse_reply,
    )


def start_or_throttle(keys: QueueKeys, job: RunningJob, token: str, rate: TaskRate, now_ms: int) -> Call[int]:
    """bulltask's ``startOrThrottle`` with ``moveToDelayed``: start a job, or delay it because of its task's rate limit.

    The result is 0 if the job may start, else the milliseconds until it is due again. A job that has started before, or
    has the option ``lifo``, goes before the throttled jobs.
    """
    skips_line = job.lifo or job.attempts_started > 1
    script_keys = (
        keys.next_start(job.name),
        keys.throttled(job.name),
        *named_keys(keys, "wait marker active prioritized delayed"),
        keys.job(job.id),
        *named_keys(keys, "events meta stalled"),
    )
    interval, tolerance = f"{rate.interval_ms:.6f}", f"{rate.tolerance_ms:.6f}"
    args = (interval, tolerance, "1" if skips_line else "", job.name, keys.base, now_ms, job.id, token)
    parse_reply = result_parser(keys, job.id, int)
    return wake_next(keys, script_call(wrappers.with_delay("startOrThrottle"), script_keys, args, parse_reply))


MAX_DELAY_MS: Final = 60_000
"""The longest delay before an incompatible job is tried again."""

_CHECKED_PER_CALL: Final = 500


def incompatible_since(keys: QueueKeys, job_id: str) -> Call[str]:
    """Read the field that says since when no worker could run the job; ``""`` for none."""

    def parse_reply(reply: Any) -> str:
        return "" if reply is None else text(reply)

    return command("HGET", keys.job(job_id), INCOMPATIBLE_FIELD, parse_reply=parse_reply)


def delay_incompatible(keys: QueueKeys, job_id: str, move: Call[None], reason: str, since: str) -> Call[None]:
    """bulltask's ``delayIncompatible`` with ``moveToDelayed``: delay a job that this worker cannot run, for a reason.

    ``since`` is the field that says since when no worker could run it.
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

    One call checks 500 jobs, after the first ``skipped``. The result is how many jobs are due now, and how many the
    next call skips; ``None`` if all were checked.
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


_CRASH_TOKENS_KEPT: Final = 10

CRASHES: Final = "bulltask:crashes"
"""The field of the job's hash that counts the children that died while running the job."""


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
        attempts: The job's maximum number of attempts in this queue, which the script compares for its
            ``retries-exhausted`` event.
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

    The job is locked with the token of ``options``, which are those of the worker and of the next fetch.
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
    fields = to_msgpack(list(finish.fields)) if finish.fields else ""
    args = (job_id, now_ms, prop, finish.value, target, int(fetch_next), keys.base, packed, fields)

    def parse_reply(reply: Any) -> Fetched:
        if not isinstance(reply, list):
            raise_for(reply, job_id, keys.name)
        return parse_fetched(reply)

    return script_call(wrappers.with_guard("moveToFinished", "promotionGuard"), script_keys, args, parse_reply)


def pack_finish(  # noqa: PLR0913, PLR0917 - hashable parts of two sets of options
    token: str,
    lock_ms: int,
    worker: str,
    limiter: tuple[tuple[str, int], ...] | None,
    data_points: int | None,
    keep: tuple[tuple[str, int], ...],
    attempts: int,
) -> bytes:
    """Return the options of ``moveToFinished``."""
    wire: dict[str, object] = {
        "token": token,
        "keepJobs": dict(keep),
        "lockDuration": lock_ms,
        "attempts": attempts,
        "maxMetricsSize": data_points or "",  # "" means off; without it, the second job's call fails
        "name": worker or None,  # nil is not written
    }
    if limiter is not None:
        wire["limiter"] = dict(limiter)
    return to_msgpack(wire)


def move_to_delayed(
    keys: QueueKeys, job_id: str, token: str, delay_ms: int, *, failure: Fields | None, now_ms: int
) -> Call[None]:
    """``moveToDelayed``: delay an active job; without the fields of a ``failure``, the attempt does not count."""
    script_keys = (
        *named_keys(keys, "marker active prioritized delayed"),
        keys.job(job_id),
        *named_keys(keys, "events meta stalled"),
    )
    args = (keys.base, now_ms, job_id, token, delay_ms, "1" if failure is None else "0", _pack(failure or ()))
    return script_call(loader.official_script("moveToDelayed"), script_keys, args, error_parser(keys, job_id))


def retry_job(keys: QueueKeys, job_id: str, token: str, *, lifo: bool, fields: Fields, now_ms: int) -> Call[None]:
    """``retryJob``: move an active job back to the waiting list and count the attempt."""
    script_keys = (
        *named_keys(keys, "active wait paused"),
        keys.job(job_id),
        *named_keys(keys, "meta events delayed prioritized pc marker stalled"),
    )
    args = (keys.base, now_ms, "RPUSH" if lifo else "LPUSH", job_id, token, _pack(fields))
    return script_call(wrappers.with_guard("retryJob", "promotionGuard"), script_keys, args, error_parser(keys, job_id))


def move_from_active_to_wait(keys: QueueKeys, job_id: str, token: str) -> Call[None]:
    """``moveJobFromActiveToWait``: release a job. It is the next to be acquired, and the attempt does not count."""
    script_keys = named_keys(keys, "active wait stalled paused meta limiter prioritized marker events")
    args = (job_id, token, keys.job(job_id))
    return script_call(loader.official_script("moveJobFromActiveToWait"), script_keys, args, error_parser(keys, job_id))


def release_unstarted(keys: QueueKeys, job_id: str, token: str) -> Call[None]:
    """bulltask's ``releaseUnstarted``: release a prefetched job. Neither the attempt nor the start counts."""
    release = move_from_active_to_wait(keys, job_id, token)
    return script_call(wrappers.release_unstarted(), release.keys, release.argv, release.parse_reply)


def move_to_waiting_children(keys: QueueKeys, job_id: str, token: str, now_ms: int) -> Call[None]:
    """``moveToWaitingChildren``: make an active job wait for its child jobs. The attempt does not count.

    The parser raises ``NoPendingChildrenError`` when the job has no child job to wait for (it is still active), and
    ``FailedChildrenError`` when a child job's failure fails the job.
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

    One call checks 500 active jobs; it returns the ids of the recovered jobs, and how many jobs are left to check. Call
    it again, with the same time and the number ``left``, until none is; ``None`` begins a check.

    Args:
        keys: The queue.
        max_stalled: A job that stalls more times than this fails.
        interval_ms: How long no other check may begin; after a check by a client with a longer interval, from now on.
        now_ms: The server's time.
        left: See above.
    """

    def parse_reply(reply: Any) -> tuple[list[str], int]:
        return texts(reply[0]), int(reply[1])

    script_keys = (
        keys.marked_stalled,
        *keys.temporary,
        *named_keys(keys, "stalled wait active stalled_check meta paused marker events"),
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
    """bulltask's ``renewLocks``: renew or reacquire locks (token, job id); the result is the ids of lost ones."""
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

    With ``only_malformed``, do nothing and return False if the job's hash is valid. The caller has, or had, a lock with
    the token; ``finish`` must not fetch the next job. The parser raises ``LockMismatchError``, ``JobStateError`` or
    ``JobNotFoundError`` when there is nothing to do: another worker has the job, it is waiting or has finished, or it
    no longer exists.
    """

    def parse_reply(reply: Any) -> bool:
        raise_for(reply, str(finish.argv[0]), keys.name)
        return bool(reply != _VALID)

    script_keys = (keys.completed, keys.waiting_children, *finish.keys)
    argv = (token, "1" if only_malformed else "", *finish.argv)
    script = wrappers.with_finish("failMalformed", fan_out=has_dependents(finish))
    return script_call(script, script_keys, argv, parse_reply)
