"""Services of the supervisor for jobs that a child cannot finish: it died, was killed, or its current job takes long.

Begin with :class:`Recovery` (dead children) and :class:`Takeover` (prefetched jobs).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, Final

from bulltask.config.config import Config
from bulltask.jobs import codec
from bulltask.jobs.clock import ServerClock, mono_ms, value_class
from bulltask.jobs.errors import (
    RECOVERABLE,
    BrokerAuthError,
    BrokerError,
    BrokerUnavailableError,
    BulltaskError,
    DecodeError,
    EventLoopBlockedError,
    JobError,
    TaskCancelled,
)
from bulltask.jobs.fields import TimeLimits
from bulltask.jobs.job import RunningJob
from bulltask.jobs.names import REVOKED
from bulltask.observe.bus import Bus
from bulltask.observe.counters import MetricsBlock, NotedAttempt, failure_counter
from bulltask.observe.events import CrashLimitReached, JobFailed, JobRecovered, JobReleased, JobRetried, JobRevoked
from bulltask.transport.call import Call, Fetched, FetchedJob, NoJob, QueueKeys, SyncClient, command, parse_fetched
from bulltask.transport.scripts.add import add_deferred_duplicate
from bulltask.transport.scripts.job import add_log, finish_revoked, job_fields
from bulltask.transport.scripts.move import (
    FetchOptions,
    FinishOptions,
    count_crash,
    fail_malformed,
    find_by_token,
    finish_with_errbacks,
    move_from_active_to_wait,
    move_to_delayed,
    move_to_finished,
    release_unstarted,
    renew_locks,
    retry_job,
    with_dependents,
)
from bulltask.worker.broker_backoff import (
    MalformedJobHandler,
    QueueBackoff,
    ReconnectBackoff,
    errback_jobs,
    parent_waits,
    should_fail,
    with_parent_waits,
)
from bulltask.worker.slots import IDLE_MS, LONG_MS, CancelReason, ChildBlock, ControlPage, Slot, SlotState, SlotView

__all__ = ["EndedAttempt", "FailureRecorder", "JobsOfDeadChild", "KilledAttempt", "Recovery", "Takeover", "next_job"]


@value_class
class KilledAttempt:
    """An attempt that was cancelled by killing its child.

    Attributes:
        job_id: ``""`` if it is too long for a slot.
        will_retry: Whether the job is retried; the child has decided it, with the task's limit.
        blocked_ms: How long it had blocked the event loop, so that others could not be cancelled; 0 if it had not.
    """

    token: str
    attempt: int
    job_id: str
    reason: CancelReason
    hard_ms: int
    will_retry: bool
    since_ms: int
    blocked_ms: int = 0

    @classmethod
    def of(cls, view: SlotView, blocked_ms: int = 0) -> KilledAttempt:
        """Return the slot's current attempt."""
        deadlines = view.deadlines
        reason, ids = view.cancel_reason, (view.token, view.attempt, view.job_id)
        will_retry = deadlines.will_retry and reason is CancelReason.HARD_LIMIT and not blocked_ms
        return cls(*ids, reason, deadlines.hard_ms, will_retry, view.since_ms, blocked_ms)

    def matches(self, job_id: str) -> bool:
        """Whether this may be an attempt of the job."""
        return self.job_id in {job_id, ""}


class FailureRecorder:
    """Records that an attempt failed because its child was killed.

    Whether the job is retried, the child has decided when the attempt started, because the task's options and the app's
    categories are user code, which the supervisor does not run. Nor does it call a custom backoff function; the job's
    options contain an exponential backoff for this case.
    """

    def __init__(
        self, client: SyncClient, clock: ServerClock, config: Config, bus: Bus, counts: MetricsBlock | None = None
    ) -> None:
        self._counts = counts
        self._client = client
        self._clock = clock
        self._config = config
        self._bus = bus

    def record_killed(self, keys: QueueKeys, job_id: str, killed_attempt: KilledAttempt) -> None:
        """Fail the killed attempt of a job that is still locked with its token (else ``JobError``); emit the event."""
        job = self._read(keys, job_id)
        exc: BaseException = TaskCancelled("revoked")
        category = reason = REVOKED
        if killed_attempt.blocked_ms:
            seconds = killed_attempt.blocked_ms / 1000
            exc = EventLoopBlockedError(
                f"task {job.name or '?'} blocked the event loop of its child for {seconds:.1f} s, so that other jobs "
                "could not be cancelled, and its child was killed"
            )
            category, reason = "permanent", str(exc)
        elif killed_attempt.reason is not CancelReason.REVOKED:
            exc = TimeLimits(hard_ms=killed_attempt.hard_ms).hard_exceeded(job.name or "?", killed=True)
            category, reason = "transient", str(exc)
        # In the format of a Python traceback, from which a client can rebuild the exception.
        trace = f"Traceback (most recent call last):\n{type(exc).__module__}.{type(exc).__qualname__}: {exc}\n"
        attempts_made, duration_ms = job.attempts_made + 1, float(mono_ms() - killed_attempt.since_ms)
        delay_ms = _delay_ms(job, attempts_made) if killed_attempt.will_retry else None
        if delay_ms is None:
            self.fail(keys, killed_attempt.token, job, reason, trace)
            self._count(keys.queue, job.name, failure_counter(category, exhausted=False), duration_ms)
            self._bus.emit(
                JobFailed(job_id, keys.queue, job.name, duration_ms, reason, category, attempts_made, trace, exc)
            )
            return
        fields, now_ms, token = job.failure_fields(reason, trace), self._clock.now_ms(), killed_attempt.token
        if delay_ms:
            self._client.run(move_to_delayed(keys, job_id, token, delay_ms, failure=fields, now_ms=now_ms))
        else:
            self._client.run(retry_job(keys, job_id, token, lifo=job.lifo, fields=fields, now_ms=now_ms))
        self._count(keys.queue, job.name, "retried", duration_ms)
        self._bus.emit(
            JobRetried(job_id, keys.queue, job.name, duration_ms, reason, category, attempts_made, delay_ms, exc)
        )

    def _count(self, queue: str, task: str, counter: str, duration_ms: float) -> None:
        if self._counts is not None:
            self._counts.ended(None, queue, task, counter, duration_ms)

    def fail(self, keys: QueueKeys, token: str, job: RunningJob | str, reason: str, trace: str = "") -> None:
        """Fail a job, given as an object or by its id, that is locked with ``token``."""
        if isinstance(job, str):
            job = self._read(keys, job)
        now_ms, revoked = self._clock.now_ms(), reason == REVOKED
        call = self._failure(keys, token, job, reason, trace, now_ms)
        errbacks = [] if revoked or job.malformed else errback_jobs(job, reason, trace, self._config, now_ms)
        try:
            if job.malformed:
                self._client.run(fail_malformed(keys, call, token))
            elif revoked:
                self._client.run(finish_revoked(keys, call))
            else:
                self._client.run(finish_with_errbacks(call, errbacks) if errbacks else call)
        except BrokerAuthError as exc:
            if not exc.in_script or not job.parent_key:
                raise
            reason, trace = with_parent_waits(reason, trace, parent_waits(job, exc))
            failure = fail_malformed(keys, self._failure(keys, token, job, reason, trace, now_ms), token)
            self._client.run(finish_with_errbacks(failure, errbacks) if errbacks else failure)
        if job.deduplication_id:  # BullMQ 5.72 and newer may defer a duplicate until this job has finished
            self._client.run(add_deferred_duplicate(keys, job.deduplication_id, job.id, now_ms))

    def _failure(
        self, keys: QueueKeys, token: str, job: RunningJob, reason: str, trace: str, now_ms: int
    ) -> Call[Fetched]:
        keep = job.keep("removeOnFail", self._config.keep_failed)
        fields = job.failure_fields(reason, trace)
        if not trace:
            del fields[2:]  # keep the tracebacks of earlier attempts
        finish = FinishOptions(False, fields[1].encode(), keep, job.attempts_in_queue, fields)
        options = FetchOptions.from_config(self._config, keys, token, "")
        call = move_to_finished(keys, job.id, options, finish, fetch_next=False, now_ms=now_ms)
        return with_dependents(keys, job, call, None, now_ms)

    def _read(self, keys: QueueKeys, job_id: str) -> RunningJob:
        call: Call[list[bytes]] = command("HGETALL", keys.job(job_id))
        fields = self._client.run(call)
        return RunningJob.read(keys.queue, job_id, fields)


def _delay_ms(job: RunningJob, attempts_made: int) -> int | None:
    """Return the delay of a retry; ``None`` if the job, or its backoff, is malformed."""
    if job.malformed:
        return None
    try:
        return job.retry_delay_ms(attempts_made)
    except DecodeError:
        return None


_LATE_MS: Final = 500
"""How long after a dead child's jobs were finished the supervisor searches for more."""

_NONE: Final[Mapping[str, KilledAttempt]] = MappingProxyType({})
_UNSTARTED: Final = "its child process died before the job started"
_UNWRITTEN: Final = "its child process died, and Redis rejected the job's outcome"


@value_class
class EndedAttempt:
    """An attempt that a dead child was about to count, if Redis has stored its outcome.

    Attributes:
        is_stored: Whether this is certain, because the slot had another job; otherwise, Redis is asked.
        job_id: ``""`` if it is too long for a slot.
    """

    noted: NotedAttempt
    is_stored: bool
    token: str
    queue_index: int
    job_id: str


@value_class
class JobsOfDeadChild:
    """The jobs of a dead child.

    Attributes:
        tokens: Tokens of the child's slots that were not free. A job locked with one of them belonged to this child.
        running: The tokens whose job was running; the other jobs were being acquired or finished.
        intentional: The supervisor stopped or killed the child, so no crash is counted.
        killed_attempts: The attempts that were cancelled by killing the child, by token; they have failed.
        jobs: The jobs whose id is known, as (queue index, token, job id).
        unstarted: The tokens of jobs that the child had prefetched.
        outcomes: For each token whose job had ended, the call that writes its outcome. Redis may have executed it.
        ended: The attempts that the child has not counted.
        pid: Its process id.
    """

    tokens: tuple[str, ...]
    running: frozenset[str]
    died_ms: int
    exit_reason: str
    intentional: bool
    killed_attempts: Mapping[str, KilledAttempt] = field(default_factory=dict)
    jobs: tuple[tuple[int, str, str], ...] = ()
    unstarted: frozenset[str] = frozenset()
    outcomes: Mapping[str, bytes] = field(default_factory=dict)
    ended: tuple[EndedAttempt, ...] = ()
    pid: int = 0

    def has_started(self, token: str, job_id: str) -> bool:
        """Whether the child may have started the job: it was not prefetched, or fetched by another job's last call."""
        known = {known_token: known_id for _, known_token, known_id in self.jobs}
        return token not in self.unstarted and known.get(token, job_id) == job_id

    def may_have_crashed(self, token: str, job_id: str) -> bool:
        """Whether the job may have been running, and so may be the cause of the crash."""
        return token not in self.outcomes and self.has_started(token, job_id)


@dataclass(slots=True)
class _PendingRecovery:
    """A dead child's jobs that have not been finished yet.

    Attributes:
        queues: Indexes of the queues that may still have some of the jobs.
        concurrent: How many jobs the child was running when it died; some may have been finished since.
        unwritten: The calls that write outcomes, by token, until Redis has replied.
        announced: The ids of jobs whose recovery was reported, although it may have to be tried again.
        logged: The ids of jobs whose log has a line about this crash.
    """

    dead: JobsOfDeadChild
    queues: set[int]
    unwritten: Mapping[str, bytes]
    concurrent: int = 0
    announced: set[str] = field(default_factory=set)
    logged: set[str] = field(default_factory=set)

    @property
    def readable(self) -> set[int]:
        """The queues in which all of the child's outcomes are written; in others, ended jobs would be released."""
        return self.queues - {index for index, token, _ in self.dead.jobs if token in self.unwritten}


class Recovery:
    """Recovers the jobs of dead children immediately, so that they need not wait for the stalled check.

    A job is released and is next in its queue; the attempt does not count. A job fails after ``max_crashes`` crashes,
    provided it was the only job running in the last child, or after several more (:mod:`bulltask.worker.broker_backoff`
    explains why). If the child was killed to end an attempt (time limit, revocation), that attempt fails, the
    child's other jobs are released, and no crash is counted. A job with a revocation request fails: it would start
    again before a worker reads the request.

    If Redis is unavailable, the jobs are recovered later. Locks that expire in the meantime are reacquired first. The
    exception is the lock of a job whose id is unknown because the child had not read it: the stalled check of any
    worker recovers that job. Error replies for one queue do not block the other queues; when that queue's locks have
    expired, its jobs are left to the stalled check.
    """

    interval_ms = 500

    def __init__(  # noqa: PLR0913, PLR0917 - one for each part that it connects
        self,
        queues: Sequence[QueueKeys],
        client: SyncClient,
        clock: ServerClock,
        config: Config,
        bus: Bus,
        backoff: ReconnectBackoff,
        counts: MetricsBlock | None = None,
    ) -> None:
        self._counts = counts
        self._uncounted: dict[tuple[str, str], EndedAttempt] = {}
        self._queues = queues
        self._client = client
        self._clock = clock
        self._config = config
        self._bus = bus
        self._backoff = backoff
        self._queue_backoff = QueueBackoff(queues, bus, config)
        self._failures = FailureRecorder(client, clock, config, bus, counts)
        self._malformed = MalformedJobHandler(clock, config, bus)
        self._pending: list[_PendingRecovery] = []
        self._finished: list[tuple[int, tuple[str, ...]]] = []

    @property
    def pending(self) -> int:
        """Number of dead children whose jobs are not finished yet."""
        return len(self._pending)

    def recover(self, dead: JobsOfDeadChild) -> None:
        """Recover the jobs of a dead child now, or later if Redis is unavailable."""
        for attempt in dead.ended:
            if attempt.is_stored:
                self._count(attempt)
            else:
                self._uncounted[attempt.token, attempt.job_id] = attempt
        if dead.tokens:
            self._pending.append(_PendingRecovery(dead, set(range(len(self._queues))), dead.outcomes))
            self.tick(mono_ms(), 0)

    def tick(self, _now_ms: int, _missed: int, /) -> None:
        """Recover the remaining jobs."""
        if not (self._pending or self._finished or self._uncounted):
            return
        try:
            for pending in tuple(self._pending):
                self._finish(pending)
                if not pending.queues or mono_ms() - pending.dead.died_ms > self._config.lock_ms:
                    self._pending.remove(pending)
                    self._finished.append((mono_ms(), pending.dead.tokens))
            self._count_ended()
            self._release_late_jobs()
        except BrokerError as exc:
            self._backoff.record_failure(exc)
        else:
            self._backoff.reset()

    def _finish(self, pending: _PendingRecovery) -> None:
        tokens = pending.dead.tokens
        self._write_outcomes(pending)
        jobs_by_queue: dict[int, list[tuple[str, str]]] = {}
        for index in pending.readable:
            known = [(token, job_id) for queue, token, job_id in pending.dead.jobs if queue == index]
            with self._queue_backoff.recording(index):
                if known:
                    self._client.run(renew_locks(self._queues[index], known, self._config.lock_ms))
                jobs_by_queue[index] = self._fail_revoked(
                    self._queues[index],
                    self._client.run(find_by_token(self._queues[index], tokens)),
                    pending.dead.killed_attempts,
                )
        # The maximum, because after an outage only one of several jobs may be left. If a queue cannot be read, every
        # token counts as a job.
        is_complete = jobs_by_queue.keys() == pending.queues
        found = [pair for jobs in jobs_by_queue.values() for pair in jobs if pending.dead.may_have_crashed(*pair)]
        count = len(found) if is_complete else len(tokens)
        pending.concurrent = max(pending.concurrent, count)
        for index, jobs in jobs_by_queue.items():
            with self._queue_backoff.recording(index):
                for token, job_id in jobs:
                    with self._finishing(self._queues[index], token, job_id):
                        self._finish_job(self._queues[index], token, job_id, pending)
                pending.queues.discard(index)
                self._queue_backoff.reset(index)

    def _write_outcomes(self, pending: _PendingRecovery) -> None:
        """Write the outcomes that the child had stored. After an error reply, the job is released and runs again."""
        tokens, packed = list(pending.unwritten), list(pending.unwritten.values())
        replies = self._client.send_packed(packed) if packed else ()
        pending.unwritten = {
            token: call
            for token, call, reply in zip(tokens, packed, replies, strict=True)
            if isinstance(reply, BrokerUnavailableError)  # of one node of a cluster
        }

    def _count_ended(self) -> None:
        """Count the attempts whose outcomes Redis has stored, although their children have not counted them.

        The jobs of the others are released or failed by now, unless that is pending.
        """
        pending = {token for each in self._pending for token in each.dead.tokens}
        ended = [each for each in self._uncounted.values() if each.token not in pending]
        calls: list[Call[list[bytes | None]]] = [
            command("HMGET", self._queues[each.queue_index].job(each.job_id), "name", "atm") for each in ended
        ]
        for attempt, reply in zip(ended, self._client.try_many(calls) if calls else (), strict=True):
            if isinstance(reply, BrokerUnavailableError):  # of one node of a cluster
                continue
            del self._uncounted[attempt.token, attempt.job_id]
            if isinstance(reply, BulltaskError):
                continue
            name, made = reply
            # A job without a hash was removed when it ended, by its retention.
            if name is None or ((made or b"0").isdigit() and int(made or b"0") >= attempt.noted.attempts_made):
                self._count(attempt)

    def _count(self, attempt: EndedAttempt) -> None:
        noted = attempt.noted
        if self._counts is not None:
            self._counts.ended(None, noted.queue, noted.task, noted.counter, noted.seconds * 1000)

    def _release_late_jobs(self) -> None:
        """Search once more for jobs of children whose jobs are finished.

        A call that the child sent before it died may be executed after the first search: it uses another connection.
        A job that such a call acquires would otherwise wait until its lock expires.
        """
        due = [finished for finished in self._finished if mono_ms() - finished[0] >= _LATE_MS]
        if not due:
            return
        tokens = [token for _, of_child in due for token in of_child]
        for index, keys in enumerate(self._queues):
            with self._queue_backoff.recording(index):
                for token, job_id in self._fail_revoked(keys, self._client.run(find_by_token(keys, tokens))):
                    with self._finishing(keys, token, job_id):
                        self._release(keys, job_id, release_unstarted(keys, job_id, token), _UNSTARTED)
        self._finished = self._finished[len(due) :]

    def _fail_revoked(
        self, keys: QueueKeys, jobs: Sequence[tuple[str, str]], killed: Mapping[str, KilledAttempt] = _NONE
    ) -> list[tuple[str, str]]:
        """Fail the jobs (tokens and ids) that have a revocation request, except killed attempts; return the others."""
        remaining: list[tuple[str, str]] = []
        calls: list[Call[bytes | None]] = [command("ZSCORE", keys.revoked, job_id) for _, job_id in jobs]
        for (token, job_id), requested in zip(jobs, self._client.run_many(calls) if calls else (), strict=True):
            if token in killed or requested is None:
                remaining.append((token, job_id))
                continue
            with self._finishing(keys, token, job_id):
                self._failures.fail(keys, token, job_id, REVOKED)
                self._bus.emit(JobRevoked(job_id, keys.queue))
        return remaining

    @contextmanager
    def _finishing(self, keys: QueueKeys, token: str, job_id: str) -> Iterator[None]:
        """Finish a job; if its hash is malformed, fail it, so that it does not block other jobs."""
        # JobError: the lock is lost, or the job was finished just before the child died.
        with suppress(JobError):
            try:
                yield
            except (JobError, *RECOVERABLE):
                raise
            except Exception as exc:
                if not self._malformed.fail_if_malformed(self._client.run, keys, token, job_id, exc):
                    raise
            # The attempt has not ended, or has ended otherwise.
            self._uncounted.pop((token, job_id), None)
            self._uncounted.pop((token, ""), None)
            # Wake waiting workers: BullMQ's scripts add no marker for a prioritized job, nor in a queue that has
            # reached its global concurrency. Not in the same round trip, because a script that is not loaded yet would
            # run after this command.
            self._client.run(command("ZADD", keys.marker, 0, "0"))

    def _release(self, keys: QueueKeys, job_id: str, release: Call[None], reason: str) -> None:
        released, names = self._client.try_many([release, job_fields(keys, job_id, ["name"])])
        if isinstance(released, BulltaskError):
            raise released
        task = codec.decode_text(names[0]) if isinstance(names, list) else ""
        self._bus.emit(JobReleased(job_id, keys.queue, task, reason))

    def _finish_job(self, keys: QueueKeys, token: str, job_id: str, pending: _PendingRecovery) -> None:
        dead, max_crashes = pending.dead, self._config.max_crashes
        killed_attempt = dead.killed_attempts.get(token)
        if killed_attempt is not None and killed_attempt.matches(job_id):
            self._failures.record_killed(keys, job_id, killed_attempt)
            return
        if not dead.may_have_crashed(token, job_id):
            if dead.has_started(token, job_id):
                self._release(keys, job_id, move_from_active_to_wait(keys, job_id, token), _UNWRITTEN)
            else:
                self._release(keys, job_id, release_unstarted(keys, job_id, token), _UNSTARTED)
            return
        crashes = 0 if dead.intentional else self._client.run(count_crash(keys, job_id, token))
        if crashes and job_id not in pending.logged:
            self._log_crash(keys, job_id, dead, crashes)
            pending.logged.add(job_id)
        running = token in dead.running
        if crashes and should_fail(crashes, max_crashes, concurrent=pending.concurrent, running=running):
            reason = (
                f"the child process running this job died ({dead.exit_reason}); this was crash {crashes} of this "
                f"job (max_crashes={max_crashes})"
            )
            self._failures.fail(keys, token, job_id, reason)
            self._bus.emit(CrashLimitReached(job_id, keys.queue, crashes, reason))
            return
        release = move_from_active_to_wait(keys, job_id, token)
        if dead.intentional:
            self._release(keys, job_id, release, "its child was stopped before the job ended")
        else:
            # Before the job can start again, so that this line precedes "Job started" in the log.
            if crashes and job_id not in pending.announced:  # 0: its hash does not exist, or is malformed
                self._bus.emit(JobRecovered(job_id, keys.queue, crashes, mono_ms() - dead.died_ms))
                pending.announced.add(job_id)
            self._client.run(release)

    def _log_crash(self, keys: QueueKeys, job_id: str, dead: JobsOfDeadChild, crashes: int) -> None:
        """Add a line to the job's log, which is best effort."""
        at = datetime.fromtimestamp(self._clock.now_ms() / 1000, UTC)
        line = f"{at:%Y-%m-%d %H:%M:%S} UTC: child process {dead.pid} died ({dead.exit_reason}) while it had this job"
        line += f" (crash {crashes})" if crashes > 1 else ""
        with suppress(BulltaskError):
            (opts,) = self._client.run(job_fields(keys, job_id, ["opts"]))
            keep = (codec.mapping_field({b"opts": opts or b"{}"}, b"opts") or {}).get("kl")
            self._client.run(add_log(keys, job_id, line, keep, self._config.max_logs))


_INTERVAL_MS: Final = 20
_LINGER_MS: Final = 2_000
"""How long the supervisor keeps watching after the last child has stopped prefetching."""

_WAITING: Final = {SlotState.PREFETCHED, SlotState.ENDED}


def next_job(reply: Any) -> Fetched | BrokerError | None:
    """Return the job that the call of a stored outcome has fetched, an error, or ``None`` for an error code."""
    if isinstance(reply, BrokerError):
        return reply
    try:
        return None if isinstance(reply, int) and reply < 0 else parse_fetched(reply)
    except (TypeError, ValueError) as exc:
        return BrokerUnavailableError(f"Redis sent a reply that does not belong to the call: {exc}")


class Takeover:
    """Releases the jobs that a child has prefetched, and writes its outcomes, while a job keeps the child busy.

    It runs in the supervisor, so it also works while the job holds the GIL. Children prefetch only while this service
    watches them, which it does while their jobs are short.
    """

    def __init__(
        self,
        children: Callable[[], Iterable[tuple[ChildBlock, Sequence[Slot]]]],
        control: ControlPage,
        queues: Sequence[QueueKeys],
        client: SyncClient,
        backoff: ReconnectBackoff,
    ) -> None:
        self._children = children
        self._control = control
        self._queues = queues
        self._client = client
        self._backoff = backoff
        self._last_wanted_ms = 0

    @property
    def interval_ms(self) -> int:
        """Milliseconds between ticks; short while children prefetch, or ask for it with a signal."""
        is_needed = self._control.watches or any(block.prefetches for block, _ in self._children())
        return _INTERVAL_MS if is_needed else IDLE_MS

    def tick(self, now_ms: int, _missed: int, /) -> None:
        """Take over the jobs of the children that have been running one job for too long."""
        children = tuple(self._children())
        if any(block.prefetches for block, _ in children):
            self._control.watches = True
            self._last_wanted_ms = now_ms
        elif self._control.watches and now_ms - self._last_wanted_ms > _LINGER_MS:
            self._stop_watching([block for block, _ in children])
        if not self._control.watches or self._backoff.is_active:
            return
        for block, slots in children:
            if _is_delayed(block, slots, now_ms) and block.try_lock():
                try:
                    if _is_delayed(block, slots, mono_ms()):
                        self._take_over(slots)
                finally:
                    block.unlock()

    def _stop_watching(self, blocks: Sequence[ChildBlock]) -> None:
        self._control.watches = False
        for block in blocks:
            if block.try_lock():
                block.unlock()
        # A child sets `prefetches`, takes the lock, and reads `watches`; this method clears `watches`, takes the lock,
        # and reads `prefetches`. So at least one side sees what the other has written.
        self._control.watches = any(block.prefetches for block in blocks)

    def _take_over(self, slots: Sequence[Slot]) -> None:
        try:
            slots = sorted(slots, key=lambda slot: slot.order)
            unexecuted = self._release_fetched([slot for slot in slots if slot.is_sent])
            self._write_outcomes(unexecuted + [slot for slot in slots if slot.state == SlotState.ENDED])
            prefetched = [slot for slot in slots if slot.state == SlotState.PREFETCHED]
            self._release([(slot, slot.read().job_id) for slot in prefetched], SlotState.FREE)
        except BrokerError as exc:
            self._backoff.record_failure(exc)

    def _release_fetched(self, slots: Sequence[Slot]) -> list[Slot]:
        """Release the jobs that sent calls have fetched; return the slots whose call Redis has not executed yet.

        The child has sent a call, and does not read the reply until its current job has ended. The token locks the next
        job if Redis has executed the call, or still the job that has ended if it has not.
        """
        fetched, pending = [], []
        views = [(slot, slot.read()) for slot in slots]
        for index in {view.queue_index for _, view in views}:
            of_queue = [(slot, view.job_id) for slot, view in views if view.queue_index == index]
            locked = dict(self._client.run(find_by_token(self._queues[index], [slot.token for slot, _ in of_queue])))
            for slot, ended_id in of_queue:
                job_id = locked.get(slot.token)
                if job_id is None:
                    slot.enter(SlotState.RELEASED, mono_ms())
                elif job_id == ended_id:
                    pending.append(slot)
                else:
                    fetched.append((slot, job_id))
        self._release(fetched, SlotState.RELEASED)
        return pending

    def _write_outcomes(self, slots: Sequence[Slot]) -> None:
        """Write the outcomes that the child has stored; jobs that the same calls have fetched are released."""
        if not slots:
            return
        try:
            replies = self._client.send_packed([slot.outcome for slot in slots])
        except BrokerUnavailableError:
            for slot in slots:
                slot.enter(SlotState.NO_REPLY, mono_ms())
            raise
        unstarted = []
        for slot, job in zip(slots, map(next_job, replies), strict=True):
            if isinstance(job, BrokerUnavailableError):  # of one node of a cluster, or the reply was damaged
                slot.enter(SlotState.NO_REPLY, mono_ms())
            if not isinstance(job, FetchedJob | NoJob):
                continue  # the child makes the call again, and handles the error
            slot.enter(SlotState.WRITTEN, mono_ms())
            if isinstance(job, FetchedJob):
                unstarted.append((slot, job.job_id))
        self._release(unstarted, SlotState.WRITTEN)

    def _release(self, jobs: Sequence[tuple[Slot, str]], after: SlotState) -> None:
        """Release jobs, the last one first, so that they keep their order; set their slots to the state ``after``.

        The state is ``RELEASING`` meanwhile, because the child must not start a job that Redis may have released. It
        remains if there is no reply; the child then looks for the job.
        """
        jobs = jobs[::-1]
        for slot, _ in jobs:
            slot.enter(SlotState.RELEASING, mono_ms())
        calls = [release_unstarted(self._queues[slot.read().queue_index], job_id, slot.token) for slot, job_id in jobs]
        for (slot, _), reply in zip(jobs, self._client.try_many(calls) if calls else (), strict=True):
            if not isinstance(reply, BrokerError):  # a JobError means that the lock is lost
                slot.enter(after, mono_ms())


def _is_delayed(block: ChildBlock, slots: Sequence[Slot], now_ms: int) -> bool:
    """Whether one job has been running for too long, and others wait for it."""
    since_ms = block.running_since_ms
    return 0 < since_ms <= now_ms - LONG_MS and any(slot.state in _WAITING or slot.is_sent for slot in slots)
