"""What a worker does about errors that are not its task's: of Redis, of malformed jobs, and of jobs that crash it.

:class:`ReconnectBackoff` and :class:`QueueBackoff` delay the next attempt, :class:`MalformedJobHandler` fails jobs that
cannot be read, and :func:`max_concurrent` separates a job that crashes children from others. :func:`errback_jobs` are
the error callbacks of a job that fails.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

from bulltask.config.config import Config
from bulltask.jobs.backoff import reconnect_delay_ms
from bulltask.jobs.clock import ServerClock, mono_ms
from bulltask.jobs.codec import counter
from bulltask.jobs.errors import (
    BrokerAuthError,
    BrokerConfigError,
    BrokerError,
    BrokerNotReadyError,
    BrokerOutOfMemoryError,
    BrokerUnavailableError,
    BulltaskError,
    InvalidJobError,
    JobError,
)
from bulltask.jobs.fields import KEEP_ALL
from bulltask.jobs.job import RunningJob, new_job_id
from bulltask.jobs.names import REVOKED, name_in_app
from bulltask.jobs.payloads import PayloadCodec
from bulltask.jobs.stored_job import OF_CHORD, Errback, FailedJob, read_errbacks
from bulltask.observe.bus import Bus
from bulltask.observe.events import (
    MalformedJobFailed,
    RedisDisconnected,
    RedisErrorReply,
    RedisReconnected,
    RedisReconnecting,
    RedisRecovered,
)
from bulltask.registry.request import ancestry
from bulltask.transport.call import Call, QueueKeys
from bulltask.transport.scripts.add import AddedJob, added_job
from bulltask.transport.scripts.move import CRASHES, FetchOptions, fail_malformed, malformed_finish, move_to_finished

__all__ = [
    "ALONE",
    "CRASHES_FIELD",
    "EXTRA_CRASHES",
    "SMALL_GROUP",
    "MalformedJobHandler",
    "QueueBackoff",
    "ReconnectBackoff",
    "called_errbacks",
    "errback_data",
    "errback_jobs",
    "errback_queue",
    "max_concurrent",
    "parent_waits",
    "should_fail",
    "with_parent_waits",
]


MAX_CHEAP_DELAY_MS: Final = 1_000
_SERVER_ERRORS = (BrokerUnavailableError, BrokerNotReadyError, BrokerOutOfMemoryError, BrokerConfigError)


class ReconnectBackoff:
    """The backoff of one process while Redis is unreachable, or replies to every command with an error."""

    def __init__(self, bus: Bus, config: Config) -> None:
        self._bus = bus
        self._config = config
        self._attempt = 0
        self.is_active = False
        self._attempts_by_kind: Counter[tuple[bool, bool]] = Counter()
        self._reported: set[str] = set()
        self._since_ms = self._until_ms = 0
        self._lost = False

    def record_failure(self, exc: BrokerError) -> int:
        """Record a failure; return how many milliseconds to wait before the next attempt.

        Each distinct error is reported once per outage, even if another was reported in between. For example, a Redis
        that was unreachable may reject the password when it is available again.

        The delay doubles up to ``broker_reconnect_delay_max`` if Redis is unreachable, and up to ``run_retry_delay``
        after error replies. By default, a worker resumes within 5 s after Redis is available again, however long the
        outage lasted. If the connection is refused, or the error reply is temporary (``LOADING``, ``READONLY``,
        ``MISCONF`` …), an attempt is cheap, and the delay is at most a second. Each kind of error starts with a short
        delay, because a failover begins with error replies, and a connection that breaks afterwards shows that the
        situation has changed.
        """
        lost = isinstance(exc, BrokerUnavailableError)
        if self._attempt == 0:
            self._since_ms = mono_ms()
        self._report(exc)
        self._attempt += 1
        self.is_active = True
        if self._lost:
            self._bus.emit(RedisReconnecting(self._attempt))
        quick = isinstance(exc, BrokerNotReadyError) or (isinstance(exc, BrokerUnavailableError) and exc.refused)
        self._attempts_by_kind[lost, quick] += 1
        max_ms = self._config.reconnect_delay_max_ms if lost else self._config.run_retry_delay_ms
        return reconnect_delay_ms(
            self._attempts_by_kind[lost, quick],
            first_ms=self._config.reconnect_delay_ms,
            cap_ms=min(MAX_CHEAP_DELAY_MS, max_ms) if quick else max_ms,
        )

    def record_shared_failure(self, exc: BrokerError) -> int:
        """:meth:`record_failure` for jobs that share a connection: simultaneous failures count as one."""
        now_ms = mono_ms()
        if now_ms >= self._until_ms:
            self._until_ms = now_ms + self.record_failure(exc)
        return self._until_ms - now_ms

    def _report(self, exc: BrokerError) -> None:
        message = str(exc).partition(" script: ")[0]  # the same error from different scripts is reported once
        if isinstance(exc, BrokerUnavailableError):
            # A Redis restart causes several connection errors, but only one is reported. A reply from a program that is
            # not Redis is reported as well.
            if not self._lost or (exc.wrong_protocol and message not in self._reported):
                self._bus.emit(RedisDisconnected(str(exc)))
            self._lost = True
        elif message not in self._reported:
            self._bus.emit(RedisErrorReply("", str(exc)))
        self._reported.add(message)

    @property
    def failing_since_ms(self) -> int:
        """When the outage began (monotonic time); 0 if there is none."""
        return self._since_ms if self.is_active else 0

    @property
    def is_exhausted(self) -> bool:
        """True after more attempts than ``broker_connection_max_retries``."""
        max_retries = self._config.connection_retries
        return max_retries is not None and self._attempt > max_retries

    def reset(self) -> None:
        """Record that a command succeeded; this ends an outage."""
        if self._attempt:
            duration_ms = mono_ms() - self._since_ms
            if self._lost:
                self._bus.emit(RedisReconnected(self._attempt, duration_ms))
            else:
                self._bus.emit(RedisRecovered("", self._attempt, duration_ms))
            self._attempt = 0
            self.is_active = False
            self._until_ms = 0
            self._lost = False
            self._attempts_by_kind.clear()
            self._reported.clear()


@dataclass(slots=True)
class _QueueState:
    since_ms: int
    attempt: int = 0
    reported: set[str] = field(default_factory=set)


class QueueBackoff:
    """The backoff of individual queues whose commands fail with error replies; the worker's other queues continue."""

    def __init__(self, queues: Sequence[QueueKeys], bus: Bus, config: Config) -> None:
        self._queues = queues
        self._bus = bus
        self._config = config
        self._failing: dict[int, _QueueState] = {}

    @staticmethod
    def affects_queue(exc: BrokerError) -> bool:
        """Whether an error affects one queue; False if Redis is unreachable, or returns this error for every queue.

        An error of one node of a cluster affects only the queues on that node.
        """
        if exc.node is not None:
            return True
        return not (isinstance(exc, _SERVER_ERRORS) or (isinstance(exc, BrokerAuthError) and exc.handshake_failed))

    @contextmanager
    def recording(self, index: int) -> Iterator[None]:
        """Record an error of queue ``index`` that is raised in the block; one of the whole server is raised again."""
        try:
            yield
        except BrokerError as exc:
            if not self.affects_queue(exc):
                raise
            self.record_failure(index, exc)

    def record_failure(self, index: int, exc: BrokerError) -> int:
        """Record an error of queue ``index``; return how many milliseconds to wait before the next attempt."""
        if (state := self._failing.get(index)) is None:
            state = self._failing[index] = _QueueState(mono_ms())
        if str(exc) not in state.reported:
            state.reported.add(str(exc))
            self._bus.emit(RedisErrorReply(self._queues[index].queue, str(exc)))
        state.attempt += 1
        # An unreachable node of a cluster is soon replaced, so the delay stays short.
        cap_ms = self._config.run_retry_delay_ms if exc.node is None else MAX_CHEAP_DELAY_MS
        return reconnect_delay_ms(state.attempt, first_ms=self._config.reconnect_delay_ms, cap_ms=cap_ms)

    def reset(self, index: int) -> None:
        """Record that a command for queue ``index`` succeeded."""
        if self._failing and (state := self._failing.pop(index, None)) is not None:
            duration_ms = mono_ms() - state.since_ms
            self._bus.emit(RedisRecovered(self._queues[index].queue, state.attempt, duration_ms))


def parent_waits(job: RunningJob, exc: BulltaskError) -> str:
    """Return the part of a job's reason that says that its parent is not informed, because of ``exc``."""
    return f"its parent {job.parent_key} still waits for it: {exc}; then retry this job"


def with_parent_waits(reason: str, trace: str, waits: str) -> tuple[str, str]:
    """Return a failure's reason and trace with the result of :func:`parent_waits`, which may be empty.

    By its reason, clients recognize a revoked job.
    """
    if not waits:
        return reason, trace
    return (reason, f"{trace}{waits}\n") if reason == REVOKED else (f"{reason} ({waits})", trace)


_Run = Callable[[Call[Any]], Any]
"""Makes a call and returns its result."""


class MalformedJobHandler:
    """Fails jobs that cannot be acquired or recovered because their hash is malformed."""

    def __init__(self, clock: ServerClock, config: Config, bus: Bus) -> None:
        self._clock = clock
        self._config = config
        self._bus = bus
        self._keep = config.keep_failed or KEEP_ALL

    def call(self, keys: QueueKeys, token: str, job_id: str, exc: Exception) -> Call[bool]:
        """Return the call that fails the job locked with ``token`` if its hash caused ``exc``, and emits the event.

        It returns False, and changes nothing, if the hash is well-formed: the queue has caused the error reply.
        """
        is_reply = isinstance(exc, BrokerError)
        finish_options = malformed_finish(str(exc) if is_reply else f"{type(exc).__name__}: {exc}", self._keep)
        options, now_ms = FetchOptions.from_config(self._config, keys, token, ""), self._clock.now_ms()
        finish = move_to_finished(keys, job_id, options, finish_options, fetch_next=False, now_ms=now_ms)
        call = fail_malformed(keys, finish, token, only_malformed=is_reply)

        def parse_reply(reply: Any) -> bool:
            if failed := call.parse_reply(reply):
                self._bus.emit(MalformedJobFailed(job_id, keys.queue, finish_options.value.decode("utf-8", "replace")))
            return failed

        return replace(call, parse_reply=parse_reply)

    def fail_if_malformed(self, run: _Run, keys: QueueKeys, token: str, job_id: str, exc: Exception) -> bool:
        """Make that call."""
        try:
            return bool(run(self.call(keys, token, job_id, exc)))
        except JobError:  # the job has finished, or another worker has it: it no longer blocks this worker
            return True

    def release(self, run: _Run, keys: QueueKeys, token: str, job_id: str, release: Call[Any]) -> None:
        """Make the call that releases a job, or fail the job if it is malformed.

        Otherwise, it would keep the token of a free slot, and the supervisor would renew its lock forever.
        """
        try:
            run(release)
        except BrokerError as exc:
            is_reply = QueueBackoff.affects_queue(exc) and exc.node is None
            if not (is_reply and self.fail_if_malformed(run, keys, token, job_id, exc)):
                raise


# Crash quarantine: separates a job that crashes children (a poison pill) from the other jobs of those children.
#
# Up to a hundred jobs share a child; at most one of them is sync, except with the thread pool. When the child crashes,
# the job that caused the crash is unknown. If the crash counted against every job, one poison pill would fail a hundred
# other jobs. Therefore, all these jobs are quarantined: each is retried with only a few others and, after a second
# crash, alone. A job fails only after a crash in which it was alone in its child: the second or the third, by default.
# A job that is never alone, because the child processes that acquire it crash while they do so, fails after
# ``EXTRA_CRASHES`` more.
#
# The number of crashes is stored in the job's hash (``bulltask:crashes``), because another worker may acquire the job
# next. Reading it needs no additional command, because a fetch returns all fields of a job.


SMALL_GROUP: Final = 10
"""Maximum number of jobs in a child while it is running a job that has crashed once, this job included. Most isolated
crashes are caused by an operator or the kernel, so running every such job alone would be needlessly slow."""

ALONE: Final = 1

EXTRA_CRASHES: Final = 3
"""How many crashes beyond ``max_crashes`` it takes to fail a job that was being acquired or finished.

A job that crashes children in these steps (for example, because reading it exhausts the memory) may do so before the
child can wait for its other jobs. It would then never run alone and never fail, so it fails after this many additional
crashes, which are unlikely to have another cause.
"""

CRASHES_FIELD: Final = CRASHES.encode()


def max_concurrent(fields: Sequence[bytes], max_crashes: int) -> int:
    """Return how many jobs a child may run in total while it runs a job with these fields of its hash; 0: no limit."""
    if CRASHES_FIELD not in fields:  # almost every job
        return 0
    crashes = dict(zip(fields[::2], fields[1::2], strict=False)).get(CRASHES_FIELD)
    if crashes is None:  # the name was found as a value
        return 0
    try:
        return ALONE if counter(crashes) >= min(2, max_crashes) else SMALL_GROUP
    except ValueError:  # not a number
        return ALONE


def should_fail(crashes: int, max_crashes: int, *, concurrent: int, running: bool) -> bool:
    """Return whether a job fails after a crash, its ``crashes``-th.

    ``concurrent`` counts the jobs that the child had, this one included; it was not ``running`` if the child was
    acquiring or finishing it.
    """
    if concurrent == ALONE:
        return crashes >= max_crashes
    return not running and crashes >= max_crashes + EXTRA_CRASHES


def called_errbacks(job: RunningJob, failed_job: FailedJob | None) -> Sequence[tuple[Errback, FailedJob]]:
    """Return the error callbacks of a job that fails, and the job that each of them describes.

    ``failed_job`` is the job whose failure causes this one to fail, if it is a different job. If it is a step before
    this one, the callbacks of this call are not called, but those of its chain. If it is the canvas with which the
    job's task has replaced itself, all of them are called.
    """
    if "errbacks" not in job.canvas:
        return ()
    try:
        errbacks = read_errbacks(job.canvas["errbacks"])
    except InvalidJobError:
        return ()  # another client has replaced the options
    own = FailedJob(job.id, job.name, job.queue)
    in_header = failed_job is not None and not job.replacement
    return [
        (it, own if failed_job is None or (in_header and it.cascades == OF_CHORD) else failed_job)
        for it in errbacks
        if it.cascades or failed_job is None or job.replacement
    ]


def errback_jobs(
    job: RunningJob, reason: str, trace: str, config: Config, now_ms: int, failed_job: FailedJob | None = None
) -> list[AddedJob]:
    """Return the jobs to add when a job fails, as arguments of ``finish_with_errbacks``."""
    errbacks = called_errbacks(job, failed_job)
    if not errbacks:
        return []
    root_id = ancestry(job)["root_id"]
    return [
        added_job(
            f"{errback.queue}:",
            new_job_id(),
            errback.task,
            errback_data(errback, failed, reason, trace, config),
            errback.opts_of(failed, root_id, now_ms),
            now_ms,
        )
        for errback, failed in errbacks
    ]


def errback_queue(errback: Errback, config: Config) -> str:
    """Return the name of an error callback's queue in the app."""
    return name_in_app(errback.queue.removeprefix(f"{config.prefix}:"), hash_tag=config.queue_hash_tag)


def errback_data(errback: Errback, failed: FailedJob, reason: str, trace: str, config: Config) -> bytes:
    """Return the data of an error callback's job as it is stored."""

    def with_failure(own: Any) -> Any:
        return errback.data_of(own, failed, reason, trace)

    try:
        queue = errback_queue(errback, config)
        return PayloadCodec(config).change_arguments(errback.data, queue, errback.task, with_failure)
    except BulltaskError:
        # Add the callback anyway: if its arguments cannot be read here, its own job fails with an error that says so.
        return json.dumps(errback.data).encode()
