"""Taking and ending jobs without a worker: operations of ``Queue`` and ``Job``, each written once.

What they write is what a worker writes; what they do not do is a worker's care: renew locks, catch what the code
raises, look for stalled jobs.
"""

from __future__ import annotations

from datetime import tzinfo
from typing import Any, Final

from bulltask.categories import ErrorCategory, explicit_category, retry_after_ms
from bulltask.clock import Duration, mono_ms, to_ms, zone_of
from bulltask.errors import ConfigError, NoPendingChildrenError, Retry
from bulltask.jobs import codec
from bulltask.jobs.failures import reason_of, trace_text
from bulltask.jobs.job import RunningJob
from bulltask.jobs.names import MAX_NAME
from bulltask.jobs.stored_job import StoredJob
from bulltask.queue.fields import JobFields
from bulltask.queue.following import NOT_ADDED, add_following, pause_ms
from bulltask.queue.link import Link
from bulltask.transport.call import Call, command
from bulltask.transport.operation import Operation, execute
from bulltask.transport.replies import Fetched, text
from bulltask.transport.scripts.add import add_kept_job
from bulltask.transport.scripts.move import (
    FetchOptions,
    FinishOptions,
    move_from_active_to_wait,
    move_stalled_jobs_to_wait,
    move_to_active,
    move_to_delayed,
    move_to_finished,
    move_to_waiting_children,
    retry_job,
)

__all__ = ["Taking", "await_children", "check_stalled", "complete", "delay", "fail", "give_back"]

_NO_LOCK: Final = "0"  # BullMQ's scripts take it as: do not look
_LONGEST_BLOCK_MS: Final = 5_000  # a lost marker is healed by asking again


class Taking:
    """Responsible for one wait for a job.

    Args:
        link: the queue.
        token: locks the job.
        timeout: how long to wait for one; 0: not at all, ``None``: for ever.
        lock: how long the lock lasts; ``None``: the setting ``lock_duration``.
        worker: the name that is noted in the job, ``""`` for none.

    Raises:
        ConfigError: the token is empty, or a length of time is wrong.
    """

    def __init__(self, link: Link, token: str, timeout: Duration | None, lock: Duration | None, worker: str) -> None:
        if token in {"", _NO_LOCK}:
            raise ConfigError("a job is locked with a token: a text that nobody else uses, and not '0'")
        lock_ms = None if lock is None else to_ms(lock, "lock_duration")
        if lock_ms == 0:
            raise ConfigError("lock_duration must be longer than 0")
        if len(worker) > MAX_NAME:
            raise ConfigError(f"the name of a worker has at most {MAX_NAME} characters, not {len(worker)}")
        self._link, self._claim = link, FetchOptions.from_config(link.broker.config, link.keys, token, worker, lock_ms)
        self._deadline_ms = None if timeout is None else mono_ms() + to_ms(timeout, "timeout")
        self._due_ms = self._limited_ms = 0
        self._popped: tuple[str, str] | None = None

    def attempt(self) -> Operation[StoredJob | None]:
        """Take the next job, if there is one."""
        keys, now_ms = self._link.keys, self._link.now_ms()
        fetched = yield from execute(move_to_active(keys, self._claim, now_ms))
        self._limited_ms = fetched.limited_ms
        self._due_ms = max(1, fetched.due_ms - now_ms) if fetched.due_ms else 0
        if not fetched.job_id and self._popped is not None and self.wait_ms <= 0:
            yield from execute(
                command("ZADD", keys.marker, *self._popped)
            )  # no worker will take the job that it announced
        return (yield from _picked(self._link, fetched, self._claim))

    @property
    def wait_ms(self) -> int:
        """Milliseconds to wait for a marker before the next attempt; 0: the time is over."""
        left_ms = _LONGEST_BLOCK_MS if self._deadline_ms is None else self._deadline_ms - mono_ms()
        reasons = [limit for limit in (left_ms, self._due_ms, _LONGEST_BLOCK_MS) if limit]
        return max(0, min(reasons)) if left_ms > 0 else 0

    @property
    def limited_ms(self) -> int:
        """Milliseconds in which no job may be taken: waiting for a marker would be in vain."""
        return min(self._limited_ms, self.wait_ms)

    def marker(self, wait_ms: int) -> Call[None]:
        """The call that waits until a job is announced."""

        def parse_reply(reply: Any) -> None:
            if reply is not None:
                self._popped = (text(reply[2]), text(reply[1]))

        return command("BZPOPMIN", self._link.keys.marker, f"{wait_ms / 1000:.3f}", parse_reply=parse_reply)


def _picked(link: Link, fetched: Fetched, claim: FetchOptions) -> Operation[StoredJob | None]:
    """The fields of a job that was taken; the next one of its series is added first, as every worker does."""
    if not fetched.job_id:
        return None
    keys, queue = link.keys, link.queue
    record = StoredJob.from_hash(queue, fetched.job_id, list(fetched.fields))
    if record.scheduler_id is None and "repeat" not in record.opts:
        return record
    now_ms, zone = link.now_ms(), zone_of(link.broker.config.timezone)
    try:
        yield from _follow(link, fetched, now_ms, zone)
    except NOT_ADDED:
        delay_ms = pause_ms(record.attempts_started)
        yield from execute(move_to_delayed(keys, record.id, claim.token, delay_ms, failure=None, now_ms=now_ms))
        raise
    return record


def _follow(link: Link, fetched: Fetched, now_ms: int, zone: tzinfo) -> Operation[None]:
    job = RunningJob.from_hash(link.queue, fetched.job_id, fetched.fields)
    yield from add_following(link.keys, job, now_ms, zone)


def complete(job: JobFields, value: Any, token: str | None, *, fetch_next: bool) -> Operation[StoredJob | None]:
    """Complete a job; the result is the next one."""
    limit = job.link.broker.config.max_payload
    encoded = codec.encode(value, what=f"return value of job {job.id}", limit=limit)
    active = _active(job)
    keep = active.keep("removeOnComplete", job.link.broker.config.keep_completed)
    ending = FinishOptions(True, encoded, keep, active.attempts)
    found = yield from _finish(job, active, ending, token, fetch_next=fetch_next)
    job.change(returnvalue=codec.decode(encoded))
    return found


def fail(
    job: JobFields, error: BaseException | str, token: str | None, *, countdown: Duration | None, fetch_next: bool
) -> Operation[StoredJob | None]:
    """End an attempt that failed; the result is the next job."""
    chosen_ms = None if countdown is None else to_ms(countdown, "countdown")
    active, now_ms, claim = _active(job), job.link.now_ms(), _claim(job, token)
    made, attempts = active.attempts_made + 1, active.attempts
    if isinstance(error, Retry):  # code that is a task elsewhere has said self.retry()
        chosen_ms = error.delay_ms if chosen_ms is None else chosen_ms
        attempts = attempts if error.max_retries is None else min(attempts, error.max_retries + 1)
        error = error.exc or error
    fields = active.failure_fields(*_said(error))
    if made >= attempts or job.is_discarded or _is_permanent(error):
        keep = active.keep("removeOnFail", job.link.broker.config.keep_failed)
        ending = FinishOptions(False, fields[1].encode(), keep, active.attempts, fields)
        found = yield from _finish(job, active, ending, token, fetch_next=fetch_next)
    else:
        found, keys = None, job.link.keys
        delay_ms = _retry_delay_ms(active, error, now_ms) if chosen_ms is None else chosen_ms
        if delay_ms:
            call = move_to_delayed(keys, job.id, claim.token, delay_ms, failure=fields, now_ms=now_ms)
        else:
            call = retry_job(keys, job.id, claim.token, lifo=active.lifo, fields=fields, now_ms=now_ms)
        yield from execute(call)
        job.change(attempts_made=made, delay_ms=delay_ms)
    job.change(failed_reason=fields[1], stacktrace=tuple(codec.decode(fields[3])))
    return found


def delay(job: JobFields, wait: Duration, token: str | None) -> Operation[None]:
    """Put a job off."""
    delay_ms, now_ms, claim = to_ms(wait, "delay"), job.link.now_ms(), _claim(job, token)
    keys = job.link.keys
    yield from execute(move_to_delayed(keys, job.id, claim.token, delay_ms, failure=None, now_ms=now_ms))
    job.change(delay_ms=delay_ms)


def give_back(job: JobFields, token: str | None) -> Operation[None]:
    """Give a job back."""
    yield from execute(move_from_active_to_wait(job.link.keys, job.id, _claim(job, token).token))


def await_children(job: JobFields, token: str | None) -> Operation[bool]:
    """Let a job wait for its children; false when none is pending."""
    link, claim = job.link, _claim(job, token)
    try:
        yield from execute(move_to_waiting_children(link.keys, job.id, claim.token, link.now_ms()))
    except NoPendingChildrenError:
        return False
    return True


def check_stalled(link: Link, most: int | None) -> Operation[list[str]]:
    """Let jobs whose lock has run out wait again; the result is their ids."""
    config = link.broker.config
    if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < 0):
        raise ConfigError(f"max_stalled_count must be 0 or more, not {most!r}")
    allowed = config.max_stalled_count if most is None else most
    call = move_stalled_jobs_to_wait(link.keys, allowed, config.stalled_interval_ms, link.now_ms())
    return (yield from execute(call))


def _finish(
    job: JobFields, active: RunningJob, ending: FinishOptions, token: str | None, *, fetch_next: bool
) -> Operation[StoredJob | None]:
    link, claim = job.link, _claim(job, token)
    now_ms = link.now_ms()
    call = move_to_finished(link.keys, job.id, claim, ending, fetch_next=fetch_next, now_ms=now_ms)
    fetched = yield from execute(call)
    if dedup_id := active.deduplication_id:  # BullMQ 5.72 and newer may have put another job aside until now
        yield from execute(add_kept_job(link.keys, dedup_id, job.id, now_ms))
    job.change(finished_ms=now_ms, attempts_made=job.attempts_made + 1)
    return (yield from _picked(link, fetched, claim))


def _claim(job: JobFields, token: str | None) -> FetchOptions:
    """By which token the job is held; the next one is taken with the same, under the same name."""
    said = job.token if token is None else token
    if not said:
        raise ConfigError(f"job {job.id} was not taken by get_next_job(): say the token of its lock")
    return FetchOptions.from_config(job.link.broker.config, job.link.keys, said, job.processed_by or "")


def _active(job: JobFields) -> RunningJob:
    """The job as a worker sees it."""
    known = job.record
    return RunningJob(
        queue=known.queue,
        id=known.id,
        name=known.name,
        data=known.data_text.encode(),
        opts=known.opts,
        timestamp_ms=known.timestamp_ms,
        priority=known.priority,
        attempts_made=known.attempts_made,
        attempts_started=known.attempts_started,
        deferred_failure=known.deferred_failure or "",
        scheduler_id=known.scheduler_id or "",
        stacktrace=codec.encode(list(known.stacktrace)),
    )


def _retry_delay_ms(active: RunningJob, error: BaseException | str, now_ms: int) -> int:
    """The job's own backoff, or what the error asks for where that is longer; as in a worker."""
    asked_ms = retry_after_ms(error, now=now_ms) if isinstance(error, BaseException) else None
    return max(active.retry_delay_ms(active.attempts_made + 1), asked_ms or 0)


def _said(error: BaseException | str) -> tuple[str, str]:
    """Reason and traceback of a failure."""
    if isinstance(error, str):
        return error, ""
    return reason_of(error), trace_text(error, error.__traceback__)


def _is_permanent(error: BaseException | str) -> bool:
    return isinstance(error, BaseException) and explicit_category(error) is ErrorCategory.PERMANENT
