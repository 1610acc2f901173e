# Generated from bulltask/queue/aio/job.py by tools/generate_sync.py (make sync): do not edit.
"""``Job``: a job in a queue; and ``BulkChange``: a change of many jobs."""

from __future__ import annotations

from typing import Any, Final

from bulltask.jobs import codec
from bulltask.jobs.clock import Duration, to_ms
from bulltask.jobs.codec import Json
from bulltask.jobs.errors import BrokerError, ConfigError, JobNotFoundError, LockMismatchError
from bulltask.jobs.job import check_priority, check_together
from bulltask.jobs.names import JobState
from bulltask.queue import fields as read
from bulltask.queue import manual
from bulltask.queue.context import checked
from bulltask.queue.fields import ChildFailures, Dependencies, JobFields, JobLogs
from bulltask.queue.reasons import Explanation, explain_job, unreachable
from bulltask.queue.search import BulkChangeBase, Progress
from bulltask.transport.scripts import flow as flow_scripts
from bulltask.transport.scripts import job as scripts

__all__ = ["BulkChange", "Job"]

_OUTCOMES: Final = {"failed": "failed_reason", "completed": "returnvalue"}


@checked
class Job(JobFields):
    """A job in a queue: its fields as they were read, and methods to change it.

    A method that changes the job in Redis also updates the fields. Methods have the same names as in BullMQ's ``Job``.
    Every method raises ``BrokerError`` if Redis cannot be reached, ``ConfigError`` for an invalid argument, and a
    ``JobError`` that names the job and the queue if the operation is rejected: ``JobNotFoundError`` if the job no
    longer exists. Methods that need the lock raise ``ConfigError`` if its token is not known, and ``LockMissingError``
    or ``LockMismatchError`` if the lock has expired, or another client has the job.
    """

    __slots__ = ()

    def refresh(self) -> None:
        """Read all fields again; raises ``JobNotFoundError`` if the job no longer exists."""
        stored = self._context.run(scripts.read_job(self._context.keys, self.id))
        if stored is None:
            raise JobNotFoundError(self.id, self._context.keys.name)
        self.assign(stored)

    def update_data(self, data: Any) -> None:
        """Replace the data (plain JSON); a worker that acquires the job later receives the new data.

        Raises:
            EncodeError, PayloadTooLargeError: The data is not JSON, or is too large.
        """
        broker, what = self._context.broker, f"the data of job {self.id}"
        encoded = broker.payloads.dump_job_data(data, self.queue, self.name, what)
        check_together(encoded, self.opts, broker.config.max_payload, what)
        self._context.run(scripts.update_data(self._context.keys, self.id, encoded))
        self.change(data=codec.decode(encoded), data_text=encoded.decode())

    def update_progress(self, progress: Json) -> None:
        """Store the job's progress, which may be any JSON value, and emit a ``progress`` event."""
        encoded = codec.encode(progress, what=f"progress of job {self.id}")
        self._context.run(scripts.update_progress(self._context.keys, self.id, encoded))
        self.change(progress=codec.decode(encoded))

    def log(self, line: str) -> int:
        """Append a line to the job's log and return how many lines the log has.

        The log keeps the newest lines: as many as the job's ``keep_logs`` or the setting ``max_logs`` (1,000) allows.
        """
        default = self._context.broker.config.max_logs
        return self._context.run(scripts.add_log(self._context.keys, self.id, str(line), self.opts.get("kl"), default))

    def get_logs(self, start: int = 0, end: int = -1, *, asc: bool = True) -> JobLogs:
        """Return lines ``start`` to ``end`` (inclusive) of the log.

        Args:
            start: Index of the first line, from 0.
            end: Index of the last line, -1 for all.
            asc: Oldest first; otherwise newest first, and the indexes count from the newest line.
        """
        return self._context.run(read.get_job_logs(self._context, self.id, start, end, asc=asc))

    def clear_logs(self, keep: int = 0) -> None:
        """Remove all lines of the log except the newest ``keep``; raises ``ConfigError`` if that is negative."""
        if keep < 0:
            raise ConfigError(f"keep must be 0 or more, not {keep}")
        self._context.run(scripts.clear_logs(self._context.keys, self.id, keep))

    def get_state(self) -> JobState:
        """Return the job's current state, ``UNKNOWN`` if it no longer exists."""
        return self._context.run(scripts.get_state(self._context.keys, self.id))

    def explain(self) -> Explanation:
        """Return why the job does not run, with what proves it and what mends it; it has at least one reason.

        If Redis cannot be reached, that is the reason, and not an error.
        """
        try:
            return self._context.run(explain_job(self._context, self.id))
        except BrokerError as exc:
            return unreachable(self.queue, self.id, exc)

    def is_completed(self) -> bool:
        """True if the job is completed."""
        return self.get_state() is JobState.COMPLETED

    def is_failed(self) -> bool:
        """True if the job has failed and will not be retried."""
        return self.get_state() is JobState.FAILED

    def is_delayed(self) -> bool:
        """True if the job is delayed."""
        return self.get_state() is JobState.DELAYED

    def is_active(self) -> bool:
        """True if a worker has acquired the job."""
        return self.get_state() is JobState.ACTIVE

    def is_waiting(self) -> bool:
        """True if the job is waiting without a priority, even in a paused queue (as BullMQ's ``isWaiting``)."""
        return self.get_state() is JobState.WAITING

    def is_prioritized(self) -> bool:
        """True if the job is waiting with a priority."""
        return self.get_state() is JobState.PRIORITIZED

    def is_waiting_children(self) -> bool:
        """True if the job is waiting for its child jobs."""
        return self.get_state() is JobState.WAITING_CHILDREN

    def retry(
        self, state: str = "failed", *, reset_attempts_made: bool = False, reset_attempts_started: bool = False
    ) -> None:
        """Move the finished job back to waiting; its priority is ignored (as in BullMQ 5).

        Earlier attempts still count, unless they are reset: the next failure is final if no attempts are left.

        Args:
            state: The job's current state, ``"failed"`` or ``"completed"``.
            reset_attempts_made: Start counting attempts again, so that the job is retried like a new one (BullMQ 5.66).
            reset_attempts_started: Start counting starts again (``max_started_attempts``).

        Raises:
            ConfigError: ``state`` is invalid.
            JobStateError: The job is not in that state.
        """
        if state not in _OUTCOMES:
            raise ConfigError(f"state must be failed or completed, not {state!r:.200}")
        keys, lifo = self._context.keys, self.opts.get("lifo") is True
        call = scripts.reprocess_job(keys, self.id, state, has_parent=self.parent_key is not None, lifo=lifo)
        if reset_attempts_made or reset_attempts_started:
            call = scripts.reset_attempts(call, made=reset_attempts_made, started=reset_attempts_started)
        self._context.run(call)
        self.change(finished_ms=None, processed_ms=None, **{_OUTCOMES[state]: None})
        self.change(
            attempts_made=0 if reset_attempts_made else self.attempts_made,
            attempts_started=0 if reset_attempts_started else self.attempts_started,
        )

    def remove(self, *, children: bool = True) -> None:
        """Remove the job, in any state, and by default its child jobs, too.

        Raises:
            LockMismatchError: The job, or one of the children to remove, is active.
            SchedulerJobError: It is the next iteration of a job scheduler.
        """
        keys = self._context.keys
        if not self._context.run(scripts.remove_job(keys, self.id, children=children)):
            raise LockMismatchError(
                self.id, keys.name, "The job or one of its child jobs is active and cannot be removed."
            )

    def promote(self) -> None:
        """Move a delayed job to the waiting list; in any other state, a ``JobStateError``."""
        self._context.run(scripts.promote(self._context.keys, self.id))
        self.change(delay_ms=0)

    def change_delay(self, delay: Duration) -> None:
        """Make a delayed job due ``delay`` from now; in any other state, a ``JobStateError`` is raised."""
        delay_ms = to_ms(delay, "delay")
        self._context.connect()  # sets the clock
        call = scripts.change_delay(self._context.keys, self.id, delay_ms, self._context.now_ms())
        self._context.run(call)
        self.change(delay_ms=delay_ms)

    def change_priority(self, priority: int, *, lifo: bool = False) -> None:
        """Change the job's priority. A waiting job moves immediately; otherwise the priority is only stored.

        Args:
            priority: 0 for none, otherwise 1 (first) to 2,097,151 (last).
            lifo: Put the job before the other jobs with that priority, instead of after them.
        """
        wanted = check_priority(priority)
        self._context.run(scripts.change_priority(self._context.keys, self.id, wanted, lifo=lifo))
        self.change(priority=wanted)

    def extend_lock(self, token: str, duration: Duration) -> bool:
        """Renew the job's lock for ``duration``; false if it is not ``token``'s; raises ``ConfigError`` for 0."""
        lock_ms = to_ms(duration, "duration")
        if not lock_ms:
            raise ConfigError("duration must be longer than 0")
        return self._context.run(scripts.extend_lock(self._context.keys, self.id, token, lock_ms))

    def move_to_completed(self, value: Any, token: str | None = None, *, fetch_next: bool = False) -> Job | None:
        """Complete the job, which :meth:`Queue.get_next_job` acquired.

        Args:
            value: The return value, plain JSON.
            token: The token of its lock (default: the token used to acquire it).
            fetch_next: Acquire the next job in the same step, with the same token.

        Returns:
            The next job; ``None`` without ``fetch_next``, or if the queue has no job.

        Raises:
            EncodeError, PayloadTooLargeError: The value is not JSON, or is too large; the job is still active.
            PendingChildrenError, FailedChildrenError: It cannot complete because of its child jobs.
        """
        stored = self._context.run(manual.complete(self, value, token, fetch_next=fetch_next))
        return None if stored is None else Job(self._context, stored, self.token if token is None else token)

    def move_to_failed(
        self,
        error: BaseException | str,
        token: str | None = None,
        *,
        countdown: Duration | None = None,
        fetch_next: bool = False,
    ) -> Job | None:
        """End a failed attempt: as in Node, the job is retried while it has attempts left.

        It fails permanently at its last attempt, after :meth:`discard`, or with a ``PermanentError``. Unlike a worker,
        this method does not consider the error's category.

        Args:
            error: The reason. An exception is stored with its traceback. The exceptions ``Retry``, which
                ``self.retry()`` raises, and ``TransientError(retry_after=…)`` can set the delay of the retry.
            token: The token of its lock (default: the token used to acquire it).
            countdown: Seconds or ``timedelta`` before the next attempt, instead of the job's backoff and the
                error's delay; 0: immediately. The maximum number of attempts does not change.
            fetch_next: Acquire the next job in the same step, with the same token; ignored if the job is retried.

        Returns:
            The next job; ``None`` without ``fetch_next``, or if the queue has no job.

        Raises:
            DecodeError: The job's ``backoff`` is malformed.
        """
        stored = self._context.run(manual.fail(self, error, token, countdown=countdown, fetch_next=fetch_next))
        return None if stored is None else Job(self._context, stored, self.token if token is None else token)

    def move_to_delayed(self, delay: Duration, token: str | None = None) -> None:
        """Delay the job, which :meth:`Queue.get_next_job` acquired, by ``delay``; the attempt does not count."""
        self._context.run(manual.delay(self, delay, token))

    def move_to_wait(self, token: str | None = None) -> None:
        """Release the job, which :meth:`Queue.get_next_job` acquired, so that it is next in its queue.

        The attempt does not count.
        """
        self._context.run(manual.release(self, token))

    def move_to_waiting_children(self, token: str | None = None) -> bool:
        """Make the job wait for its pending child jobs; return false if none is pending.

        Raises:
            FailedChildrenError: A child has failed, and its failure fails this job.
        """
        return self._context.run(manual.wait_for_children(self, token))

    def get_children_values(self) -> dict[str, Any]:
        """Return the return values of completed children, by the full key of each child."""
        return self._context.run(flow_scripts.children_values(self._context.keys, self.id))

    def get_dependencies(self) -> Dependencies:
        """Return all children by outcome, read in one transaction.

        For a job with a large number of children, ``Queue.get_dependencies`` returns a page.
        """
        return self._context.run(read.get_dependencies(self._context, self.id))

    def get_dependencies_count(self, *kinds: str) -> dict[str, int]:
        """Count the children of each kind: ``processed``, ``unprocessed``, ``ignored``, ``failed`` (default: all).

        Raises ``ConfigError`` for any other kind.
        """
        wanted = list(dict.fromkeys(kinds)) or list(flow_scripts.DEPENDENCY_KINDS)
        for kind in wanted:
            if kind not in flow_scripts.DEPENDENCY_KINDS:
                raise ConfigError(f"kind must be one of {', '.join(flow_scripts.DEPENDENCY_KINDS)}, not {kind!r:.200}")
        return self._context.run(flow_scripts.get_dependency_counts(self._context.keys, self.id, wanted))

    def get_failed_children(self) -> ChildFailures:
        """Return the failed child jobs: those whose failure is ignored, with reasons, and those that fail this job."""
        return self._context.run(read.get_failed_children(self._context, self.id))

    def remove_child_dependency(self) -> bool:
        """Make the parent no longer wait for this job; false if there is no parent.

        The parent is ready to run if no other child is pending.

        Raises:
            ParentNotFoundError: The parent does not exist.
        """
        if self.parent_key is None:
            return False
        removed = self._context.run(flow_scripts.remove_child_dependency(self._context.keys, self.id, self.parent_key))
        if removed:
            self.change(parent=None, parent_key=None)
        return removed

    def remove_unprocessed_children(self) -> None:
        """Remove the children that have not finished; active children stay."""
        self._context.run(flow_scripts.remove_unprocessed_children(self._context.keys, self.id))

    def remove_deduplication_key(self) -> bool:
        """Free the job's deduplication id, so that another job with it can be added; false if it does not own it."""
        if self.deduplication_id is None:
            return False
        call = scripts.remove_deduplication_key(self._context.keys, self.deduplication_id, self.id)
        return self._context.run(call)

    def wait_until_finished(self, timeout: Duration | None = None) -> Any:
        """Wait for the job to finish and return its return value.

        Args:
            timeout: Seconds or ``timedelta``; ``None`` waits forever.

        Raises:
            ResultTimeoutError: The job did not finish in time; it keeps running.
            JobNotFoundError: The job no longer exists, and no event reports its outcome.
            Exception: The job failed: see :meth:`bulltask.result.AsyncResult.get`.
        """
        return self.result().get(timeout)


class BulkChange(BulkChangeBase):
    """A change of all jobs of a queue that match a filter; see :meth:`bulltask.queue.sync.queue.Queue.bulk`."""

    def find(self, progress: Progress | None = None) -> int:
        """Find the jobs that match now, and return their number; nothing is changed.

        ``progress(scanned, total)`` is called after each page.
        """
        return self._context.run(self._find(progress))

    def run(self, progress: Progress | None = None) -> int:
        """Change the jobs that :meth:`find` has found, 200 per round trip, and return how many were changed.

        Jobs for which the change is no longer possible are left alone; ``reasons`` and ``errors`` name them. If it is
        interrupted, call it again to continue; jobs that were just changed may then be among ``errors``.

        ``progress(changed, matched)`` is called after each round trip.
        """
        if not self._is_found:
            self.find()
        while jobs := self._next():
            self._note(jobs, self._context.run_together(self._changes(jobs)), progress)
        return self.done
