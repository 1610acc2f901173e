"""Processing jobs manually, without a worker: operations of ``Queue`` and ``Job``.

They write the same data as a worker. They do not renew locks, catch exceptions in your code, or check for stalled jobs.
"""

from __future__ import annotations

from typing import Any, Final

from bulltask.jobs import codec
from bulltask.jobs.categories import ErrorCategory, explicit_category, retry_after_ms
from bulltask.jobs.clock import Duration, mono_ms, to_ms, zone_of
from bulltask.jobs.errors import ConfigError, NoPendingChildrenError, Retry
from bulltask.jobs.fields import reason_of, trace_text
from bulltask.jobs.job import JobRef, RunningJob, StoredOptions
from bulltask.jobs.names import FAN_OUT, MAX_NAME
from bulltask.jobs.payloads import PayloadFormat
from bulltask.jobs.stored_job import StoredJob
from bulltask.queue.context import QueueContext
from bulltask.queue.fields import JobFields
from bulltask.queue.schedulers import SCHEDULING_ERRORS, add_next_iteration, scheduling_retry_delay_ms
from bulltask.transport.call import NO_JOB, Call, Fetched, FetchedJob, NoJob, command, text
from bulltask.transport.operation import Operation, execute
from bulltask.transport.scripts import move as scripts
from bulltask.transport.scripts.add import add_deferred_duplicate
from bulltask.transport.scripts.move import FetchOptions, FinishOptions, move_to_active, with_dependents

__all__ = ["Acquisition", "check_stalled", "complete", "delay", "fail", "release", "wait_for_children"]

_NO_LOCK: Final = "0"  # with this token, BullMQ's scripts do not check the lock
_MAX_BLOCK_MS: Final = 5_000  # then check again, in case a marker was lost


class Acquisition:
    """Acquires a queue's next job, with a timeout; the arguments are those of ``get_next_job``."""

    def __init__(
        self, context: QueueContext, token: str, timeout: Duration | None, lock: Duration | None, worker: str
    ) -> None:
        if token in {"", _NO_LOCK}:
            raise ConfigError("invalid token: use a unique string other than '0'")
        lock_ms = None if lock is None else to_ms(lock, "lock_duration")
        if lock_ms == 0:
            raise ConfigError("lock_duration must be longer than 0")
        if len(worker) > MAX_NAME:
            raise ConfigError(f"a worker's name must have at most {MAX_NAME} characters, not {len(worker)}")
        self._context = context
        self._fetch = FetchOptions.from_config(context.broker.config, context.keys, token, worker, lock_ms)
        self._deadline_ms = None if timeout is None else mono_ms() + to_ms(timeout, "timeout")
        self._due_ms = self._limited_ms = 0
        self._popped: tuple[str, str] | None = None

    def try_once(self) -> Operation[StoredJob | None]:
        """Acquire the next job, if there is one."""
        keys, now_ms = self._context.keys, self._context.now_ms()
        fetched = yield from execute(move_to_active(keys, self._fetch, now_ms))
        no_job = fetched if isinstance(fetched, NoJob) else NO_JOB
        self._limited_ms = no_job.limited_ms
        self._due_ms = max(1, no_job.due_ms - now_ms) if no_job.due_ms else 0
        if no_job is fetched and self._popped is not None and self.wait_ms <= 0:
            # Another client may acquire this marker's job.
            yield from execute(command("ZADD", keys.marker, *self._popped))
        return (yield from _to_stored_job(self._context, fetched, self._fetch))

    @property
    def wait_ms(self) -> int:
        """Milliseconds to wait for a marker before checking again; 0: the timeout has expired."""
        left_ms = _MAX_BLOCK_MS if self._deadline_ms is None else self._deadline_ms - mono_ms()
        reasons = [limit for limit in (left_ms, self._due_ms, _MAX_BLOCK_MS) if limit]
        return max(0, min(reasons)) if left_ms > 0 else 0

    @property
    def limited_ms(self) -> int:
        """Milliseconds until a rate limit ends; a marker does not shorten this wait."""
        return min(self._limited_ms, self.wait_ms)

    def marker(self, wait_ms: int) -> Call[None]:
        """Return the call that waits for the queue's marker."""

        def parse_reply(reply: Any) -> None:
            if reply is not None:
                self._popped = (text(reply[2]), text(reply[1]))

        return command("BZPOPMIN", self._context.keys.marker, f"{wait_ms / 1000:.3f}", parse_reply=parse_reply)


def _to_stored_job(context: QueueContext, fetched: Fetched, fetch: FetchOptions) -> Operation[StoredJob | None]:
    """Return the acquired job, as a worker would run it.

    If a scheduler added it, its next iteration is added first. A job that must not run, because it stalled too often or
    a child job has failed it, fails, and the next job is acquired instead.
    """
    while isinstance(fetched, FetchedJob):
        stored = StoredJob.from_hash(context.queue, fetched.job_id, list(fetched.fields))
        if stored.scheduler_id is not None or "repeat" in stored.opts:
            yield from _add_next_iteration(context, stored, fetched, fetch)
        if stored.deferred_failure is None:
            return stored
        fetched = yield from _fail_deferred(context, stored, fetch)
    return None


def _add_next_iteration(
    context: QueueContext, stored: StoredJob, fetched: FetchedJob, fetch: FetchOptions
) -> Operation[None]:
    keys, now_ms, zone = context.keys, context.now_ms(), zone_of(context.broker.config.timezone)
    try:
        running = RunningJob.from_hash(context.queue, stored.id, fetched.fields)
        yield from add_next_iteration(keys, running, now_ms, zone)
    except SCHEDULING_ERRORS:
        delay_ms = scheduling_retry_delay_ms(stored.attempts_started)
        yield from execute(scripts.move_to_delayed(keys, stored.id, fetch.token, delay_ms, failure=None, now_ms=now_ms))
        raise


def _fail_deferred(context: QueueContext, stored: StoredJob, fetch: FetchOptions) -> Operation[Fetched]:
    """Fail a job with its deferred failure; return what the same call has acquired."""
    running = _running(stored)
    fields = running.failure_fields(running.deferred_failure, "")
    keep = running.keep("removeOnFail", context.broker.config.keep_failed)
    finish = FinishOptions(False, fields[1].encode(), keep, running.attempts_in_queue, fields)
    return (yield from _finish_and_fetch(context, running, fetch, finish, fetch_next=True))


def complete(job: JobFields, value: Any, token: str | None, *, fetch_next: bool) -> Operation[StoredJob | None]:
    """Complete a job and return the next job."""
    ref, what = JobRef(job.queue, job.id), f"return value of job {job.id}"
    encoded = job.context.broker.payloads.dump_result(value, ref, PayloadFormat(), what)
    running = _running(job.stored)
    keep = running.keep("removeOnComplete", job.context.broker.config.keep_completed)
    finish = FinishOptions(True, encoded, keep, running.attempts_in_queue)
    next_job = yield from _finish(job, running, finish, token, fetch_next=fetch_next)
    job.change(returnvalue=codec.decode(encoded))
    return next_job


def fail(
    job: JobFields, error: BaseException | str, token: str | None, *, countdown: Duration | None, fetch_next: bool
) -> Operation[StoredJob | None]:
    """End a failed attempt and return the next job."""
    countdown_ms = None if countdown is None else to_ms(countdown, "countdown")
    running, now_ms, fetch = _running(job.stored), job.context.now_ms(), _fetch_options(job, token)
    attempts_made, attempts = running.attempts_made + 1, running.attempts
    if isinstance(error, Retry):  # raised by self.retry() in code that is also a task
        countdown_ms = error.delay_ms if countdown_ms is None else countdown_ms
        attempts = running.max_attempts(error.max_retries)
        error = error.exc or error
    fields = running.failure_fields(*_reason_and_trace(error))
    if attempts_made >= attempts or job.is_discarded or _is_permanent(error):
        keep = running.keep("removeOnFail", job.context.broker.config.keep_failed)
        finish = FinishOptions(False, fields[1].encode(), keep, running.attempts_in_queue, fields)
        next_job = yield from _finish(job, running, finish, token, fetch_next=fetch_next)
    else:
        next_job, keys = None, job.context.keys
        delay_ms = _retry_delay_ms(running, error, now_ms) if countdown_ms is None else countdown_ms
        if delay_ms:
            call = scripts.move_to_delayed(keys, job.id, fetch.token, delay_ms, failure=fields, now_ms=now_ms)
        else:
            call = scripts.retry_job(keys, job.id, fetch.token, lifo=running.lifo, fields=fields, now_ms=now_ms)
        yield from execute(call)
        job.change(attempts_made=job.attempts_made + 1, delay_ms=delay_ms)
    job.change(failed_reason=fields[1], stacktrace=tuple(codec.decode(fields[3])))
    return next_job


def delay(job: JobFields, wait: Duration, token: str | None) -> Operation[None]:
    """Delay a job."""
    delay_ms, now_ms, fetch = to_ms(wait, "delay"), job.context.now_ms(), _fetch_options(job, token)
    keys = job.context.keys
    yield from execute(scripts.move_to_delayed(keys, job.id, fetch.token, delay_ms, failure=None, now_ms=now_ms))
    job.change(delay_ms=delay_ms)


def release(job: JobFields, token: str | None) -> Operation[None]:
    """Release a job."""
    yield from execute(scripts.move_from_active_to_wait(job.context.keys, job.id, _fetch_options(job, token).token))


def wait_for_children(job: JobFields, token: str | None) -> Operation[bool]:
    """Make a job wait for its child jobs; return false if none is pending."""
    context, fetch = job.context, _fetch_options(job, token)
    try:
        yield from execute(scripts.move_to_waiting_children(context.keys, job.id, fetch.token, context.now_ms()))
    except NoPendingChildrenError:
        return False
    return True


def check_stalled(context: QueueContext, max_stalled_count: int | None) -> Operation[list[str]]:
    """Move jobs whose lock has expired back to waiting and return their ids."""
    config = context.broker.config
    limit = config.max_stalled_count if max_stalled_count is None else max_stalled_count
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 0:
        raise ConfigError(f"max_stalled_count must be 0 or more, not {limit!r:.200}")
    now_ms, released, left = context.now_ms(), list[str](), None
    while left != 0:
        part, left = yield from execute(
            scripts.move_stalled_jobs_to_wait(context.keys, limit, config.stalled_interval_ms, now_ms, left)
        )
        released += part
    return released


def _finish(
    job: JobFields, running: RunningJob, finish: FinishOptions, token: str | None, *, fetch_next: bool
) -> Operation[StoredJob | None]:
    context, fetch = job.context, _fetch_options(job, token)
    now_ms = context.now_ms()
    fetched = yield from _finish_and_fetch(context, running, fetch, finish, fetch_next=fetch_next)
    job.change(finished_ms=now_ms, attempts_made=job.attempts_made + 1)
    return (yield from _to_stored_job(context, fetched, fetch))


def _finish_and_fetch(
    context: QueueContext, running: RunningJob, fetch: FetchOptions, finish: FinishOptions, *, fetch_next: bool
) -> Operation[Fetched]:
    now_ms, keys = context.now_ms(), context.keys
    fetch_next = fetch_next and running.name != FAN_OUT
    call = scripts.move_to_finished(keys, running.id, fetch, finish, fetch_next=fetch_next, now_ms=now_ms)
    call = with_dependents(keys, running, call, finish.value if finish.completed else None, now_ms)
    fetched = yield from execute(call)
    if dedup_id := running.deduplication_id:  # BullMQ 5.72 and newer may have deferred a duplicate until now
        yield from execute(add_deferred_duplicate(keys, dedup_id, running.id, now_ms))
    return fetched


def _fetch_options(job: JobFields, token: str | None) -> FetchOptions:
    """Return options with the job's token and worker; the next job is acquired with them, too."""
    lock_token = job.token if token is None else token
    if not lock_token:
        raise ConfigError(f"job {job.id} was not acquired by get_next_job(): pass the token of its lock")
    return FetchOptions.from_config(job.context.broker.config, job.context.keys, lock_token, job.processed_by or "")


def _running(stored: StoredJob) -> RunningJob:
    """Return the job in the form that workers use."""
    opts = StoredOptions(stored.opts)
    return RunningJob(
        queue=stored.queue,
        id=stored.id,
        name=stored.name,
        data=stored.data_text.encode(),
        opts=opts,
        timestamp_ms=stored.timestamp_ms,
        priority=stored.priority,
        attempts_made=stored.attempts_made + opts.retries_before,
        attempts_started=stored.attempts_started + opts.retries_before,
        deferred_failure=stored.deferred_failure or "",
        scheduler_id=stored.scheduler_id or "",
        stacktrace=codec.encode(list(stored.stacktrace)),
    )


def _retry_delay_ms(running: RunningJob, error: BaseException | str, now_ms: int) -> int:
    """Return the job's backoff, or the error's ``retry_after`` if that is longer; as in a worker."""
    retry_after = retry_after_ms(error, now=now_ms) if isinstance(error, BaseException) else None
    return max(running.retry_delay_ms(running.attempts_made + 1), retry_after or 0)


def _reason_and_trace(error: BaseException | str) -> tuple[str, str]:
    """Return a failure's reason and traceback."""
    if isinstance(error, str):
        return error, ""
    return reason_of(error), trace_text(error, error.__traceback__)


def _is_permanent(error: BaseException | str) -> bool:
    return isinstance(error, BaseException) and explicit_category(error) is ErrorCategory.PERMANENT
