"""Recovers the jobs of dead children."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from bulltask.clock import ServerClock, mono_ms
from bulltask.config.config import Config
from bulltask.errors import RECOVERABLE, BrokerError, BrokerUnavailableError, BulltaskError, JobError
from bulltask.events import Bus, CrashLimitReached, JobRecovered, JobReleased, JobRevoked
from bulltask.jobs import codec
from bulltask.jobs.states import REVOKED
from bulltask.transport.call import Call, command
from bulltask.transport.client_types import SyncClient
from bulltask.transport.keys import QueueKeys
from bulltask.transport.scripts.job import job_fields
from bulltask.transport.scripts.move import (
    count_crash,
    find_by_token,
    move_from_active_to_wait,
    release_unstarted,
    renew_locks,
)
from bulltask.worker.broker_backoff import QueueBackoff, ReconnectBackoff
from bulltask.worker.malformed import MalformedJobHandler
from bulltask.worker.quarantine import should_fail
from bulltask.worker.supervisor.killed_attempts import FailureRecorder, KilledAttempt

__all__ = ["JobsOfDeadChild", "Recovery"]

_LATE_MS: Final = 500
"""How long after a dead child's jobs were settled the supervisor searches for more."""

_NONE: Final[Mapping[str, KilledAttempt]] = MappingProxyType({})
_UNSTARTED: Final = "its child process died before the job started"
_UNWRITTEN: Final = "its child process died, and Redis rejected the job's outcome"


@dataclass(frozen=True, slots=True)
class JobsOfDeadChild:
    """The jobs of a dead child.

    Attributes:
        tokens: Tokens of the child's slots that were not free. A job locked with one of them belonged to this child.
        running: The tokens whose job was running; the other jobs were being acquired or settled.
        died_ms: When the supervisor noticed that the child was dead (monotonic time).
        exit_reason: ``SIGKILL``, ``exit code 1`` …
        intentional: The supervisor stopped or killed the child, so no crash is counted.
        killed_attempts: The attempts that were cancelled by killing the child, by token; they have failed.
        jobs: The jobs whose id is known, as (queue index, token, job id).
        unstarted: The tokens of jobs that the child had prefetched.
        outcomes: For each token whose job had ended, the call that writes its outcome. Redis may have executed it.
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

    def has_started(self, token: str, job_id: str) -> bool:
        """Whether the child may have started the job: it was not prefetched, or fetched by another job's last call."""
        known = {known_token: known_id for _, known_token, known_id in self.jobs}
        return token not in self.unstarted and known.get(token, job_id) == job_id

    def may_have_crashed(self, token: str, job_id: str) -> bool:
        """Whether the job may have been running, and so may be the cause of the crash."""
        return token not in self.outcomes and self.has_started(token, job_id)


@dataclass(slots=True)
class _PendingRecovery:
    """A dead child's jobs that have not been settled yet.

    Attributes:
        queues: Indexes of the queues that may still have some of the jobs.
        concurrent: How many jobs the child was running when it died; some may have been settled since.
        unwritten: For each token whose job had ended, the call that writes its outcome, until Redis has replied.
        announced: The ids of jobs whose recovery was reported, although it may have to be tried again.
    """

    dead: JobsOfDeadChild
    queues: set[int]
    unwritten: Mapping[str, bytes]
    concurrent: int = 0
    announced: set[str] = field(default_factory=set)

    @property
    def readable(self) -> set[int]:
        """The queues in which all of the child's outcomes are written; in others, ended jobs would be released."""
        return self.queues - {index for index, token, _ in self.dead.jobs if token in self.unwritten}


class Recovery:
    """Recovers the jobs of dead children immediately, so that they need not wait for the stalled check.

    A job is released and is next in its queue; the attempt does not count. A job fails after ``max_crashes`` crashes,
    provided it was the only job running in the last child, or after several more (:mod:`bulltask.worker.quarantine`
    explains why). If the child was killed to end an attempt (time limit, revocation), that attempt fails, the
    child's other jobs are released, and no crash is counted. A job with a revocation request fails: it would start
    again before a worker reads the request.

    If Redis is unavailable, the jobs are recovered later. Locks that expire in the meantime are reacquired first. The
    exception is the lock of a job whose id is unknown because the child had not read it: the stalled check of any
    worker recovers that job. Error replies for one queue do not block the other queues; when that queue's locks have
    expired, its jobs are left to the stalled check.

    Args:
        queues, client, clock, config, bus, backoff: As in :class:`Heartbeat`.
    """

    interval_ms = 500

    def __init__(
        self,
        queues: Sequence[QueueKeys],
        client: SyncClient,
        clock: ServerClock,
        config: Config,
        bus: Bus,
        backoff: ReconnectBackoff,
    ) -> None:
        self._queues, self._client, self._clock, self._config = queues, client, clock, config
        self._bus, self._backoff, self._queue_backoff = bus, backoff, QueueBackoff(queues, bus, config)
        self._failures = FailureRecorder(client, clock, config, bus)
        self._malformed = MalformedJobHandler(client, clock, config, bus)
        self._pending: list[_PendingRecovery] = []
        self._settled: list[tuple[int, tuple[str, ...]]] = []

    @property
    def pending(self) -> int:
        """Number of dead children whose jobs are not settled yet."""
        return len(self._pending)

    def recover(self, dead: JobsOfDeadChild) -> None:
        """Recover the jobs of a dead child now, or later if Redis is unavailable."""
        if dead.tokens:
            self._pending.append(_PendingRecovery(dead, set(range(len(self._queues))), dead.outcomes))
            self.tick(mono_ms(), 0)

    def tick(self, _now_ms: int, _missed: int, /) -> None:
        """Recover the remaining jobs."""
        if not (self._pending or self._settled):
            return
        try:
            for pending in tuple(self._pending):
                self._settle(pending)
                if not pending.queues or mono_ms() - pending.dead.died_ms > self._config.lock_ms:
                    self._pending.remove(pending)
                    self._settled.append((mono_ms(), pending.dead.tokens))
            self._release_late_jobs()
        except BrokerError as exc:
            self._backoff.record_failure(exc)
        else:
            self._backoff.reset()

    def _settle(self, pending: _PendingRecovery) -> None:
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
                    with self._settling(self._queues[index], token, job_id):
                        self._settle_job(self._queues[index], token, job_id, pending)
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

    def _release_late_jobs(self) -> None:
        """Search once more for jobs of children whose jobs are settled.

        A call that the child sent before it died may be executed after the first search: it uses another connection.
        A job that such a call acquires would otherwise wait until its lock expires.
        """
        due = [settled for settled in self._settled if mono_ms() - settled[0] >= _LATE_MS]
        if not due:
            return
        tokens = [token for _, of_child in due for token in of_child]
        for index, keys in enumerate(self._queues):
            with self._queue_backoff.recording(index):
                for token, job_id in self._fail_revoked(keys, self._client.run(find_by_token(keys, tokens))):
                    with self._settling(keys, token, job_id):
                        self._release(keys, job_id, release_unstarted(keys, job_id, token), _UNSTARTED)
        self._settled = self._settled[len(due) :]

    def _fail_revoked(
        self, keys: QueueKeys, jobs: Sequence[tuple[str, str]], killed: Mapping[str, KilledAttempt] = _NONE
    ) -> list[tuple[str, str]]:
        """Fail the jobs that have a revocation request, and return the others.

        Args:
            keys: The queue.
            jobs: Tokens and ids.
            killed: The attempts, by token, whose failure is recorded in any case.
        """
        remaining: list[tuple[str, str]] = []
        calls: list[Call[bytes | None]] = [command("ZSCORE", keys.revoked, job_id) for _, job_id in jobs]
        for (token, job_id), requested in zip(jobs, self._client.run_many(calls) if calls else (), strict=True):
            if token in killed or requested is None:
                remaining.append((token, job_id))
                continue
            with self._settling(keys, token, job_id):
                self._failures.fail(keys, token, job_id, REVOKED)
                self._bus.emit(JobRevoked(job_id, keys.queue))
        return remaining

    @contextmanager
    def _settling(self, keys: QueueKeys, token: str, job_id: str) -> Iterator[None]:
        """Settle a job; if its hash is malformed, fail it, so that it does not block other jobs."""
        # JobError: the lock is lost, or the job was settled just before the child died.
        with suppress(JobError):
            try:
                yield
            except (JobError, *RECOVERABLE):
                raise
            except Exception as exc:
                if not self._malformed.fail_if_malformed(keys, token, job_id, exc):
                    raise
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

    def _settle_job(self, keys: QueueKeys, token: str, job_id: str, pending: _PendingRecovery) -> None:
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
