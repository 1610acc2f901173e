"""``Job``: one job of a queue, seen from outside its worker."""

from __future__ import annotations

from typing import Any

from bulltask.clock import Duration
from bulltask.jobs.codec import Json
from bulltask.jobs.states import JobState
from bulltask.queue import by_hand, reading
from bulltask.queue import job_operations as operations
from bulltask.queue.answers import ChildFailures, Dependencies, JobLogs
from bulltask.queue.fields import JobFields

__all__ = ["Job"]


class Job(JobFields):
    """A job of a queue: its fields as they were read, and what can be done with it.

    Every method raises ``BrokerError`` when Redis cannot be reached, ``ConfigError`` for an argument that makes no
    sense, and a ``JobError`` that names job and queue when the operation is refused: ``JobNotFoundError`` when the job
    is gone. Names are those of BullMQ's ``Job``.
    """

    __slots__ = ()

    def refresh(self) -> None:
        """Read all fields again.

        Raises:
            JobNotFoundError: the job is gone.
        """
        self._link.run(operations.refresh(self))

    def update_data(self, data: Any) -> None:
        """Replace the data (plain JSON); a worker that takes the job later sees the new one.

        Raises:
            EncodeError, PayloadTooLargeError: it cannot travel.
        """
        self._link.run(operations.set_data(self, data))

    def update_progress(self, progress: Json) -> None:
        """Store how far the job is and tell everybody who listens; any JSON."""
        self._link.run(operations.set_progress(self, progress))

    def log(self, line: str) -> int:
        """Append a line to the job's log and return how many lines it has.

        Of more lines than its ``keep_logs``, else than the setting ``max_logs`` (1,000), the oldest go.
        """
        return self._link.run(operations.log(self, line))

    def get_logs(self, start: int = 0, end: int = -1, *, asc: bool = True) -> JobLogs:
        """Lines ``start`` to ``end`` (both included, -1: the last) of the log.

        Args:
            start: first line, from 0.
            end: last line.
            asc: count from the oldest line; else from the newest, which then comes first.
        """
        return self._link.run(reading.get_job_logs(self._link, self.id, start, end, asc=asc))

    def clear_logs(self, keep: int = 0) -> None:
        """Remove all lines of the log but the newest ``keep``."""
        self._link.run(operations.clear_logs(self, keep))

    def get_state(self) -> JobState:
        """Where the job is now; ``UNKNOWN`` when it is gone."""
        return self._link.run(reading.get_job_state(self._link, self.id))

    def is_completed(self) -> bool:
        """True when it has ended well."""
        return self.get_state() is JobState.COMPLETED

    def is_failed(self) -> bool:
        """True when it has ended badly and for good."""
        return self.get_state() is JobState.FAILED

    def is_delayed(self) -> bool:
        """True when it is due later."""
        return self.get_state() is JobState.DELAYED

    def is_active(self) -> bool:
        """True when a worker has it."""
        return self.get_state() is JobState.ACTIVE

    def is_waiting(self) -> bool:
        """True when it waits without a priority, also in a paused queue (as BullMQ's ``isWaiting``)."""
        return self.get_state() is JobState.WAITING

    def is_prioritized(self) -> bool:
        """True when it waits with a priority."""
        return self.get_state() is JobState.PRIORITIZED

    def is_waiting_children(self) -> bool:
        """True when it waits for its children."""
        return self.get_state() is JobState.WAITING_CHILDREN

    def retry(self, state: str = "failed") -> None:
        """Let the finished job wait again, at once; a priority that it had is ignored (as in BullMQ 5).

        Attempts made so far stay counted, so the next failure is final unless attempts are left.

        Args:
            state: ``"failed"`` or ``"completed"``: where it is now.

        Raises:
            JobStateError: it is not there.
        """
        self._link.run(operations.retry(self, state))

    def remove(self, *, children: bool = True) -> None:
        """Remove the job wherever it is.

        Args:
            children: remove its children too.

        Raises:
            LockMismatchError: it, or one of these children, is active.
            SchedulerJobError: it is the next one of a job scheduler.
        """
        self._link.run(operations.remove(self, children=children))

    def promote(self) -> None:
        """Let a delayed job wait now.

        Raises:
            JobStateError: it is not delayed.
        """
        self._link.run(operations.promote(self))

    def change_delay(self, delay: Duration) -> None:
        """Let a delayed job be due ``delay`` (seconds or ``timedelta``) from now.

        Raises:
            JobStateError: it is not delayed.
        """
        self._link.run(operations.change_delay(self, delay))

    def change_priority(self, priority: int, *, lifo: bool = False) -> None:
        """Give the job another priority; one that waits moves, any other only remembers it.

        Args:
            priority: 0 for none, else 1 (first) to 2,097,151 (last).
            lifo: before the others of that priority; else behind them.
        """
        self._link.run(operations.change_priority(self, priority, lifo=lifo))

    def extend_lock(self, token: str, duration: Duration) -> bool:
        """Keep the job's lock for ``duration`` from now; false when it is not held with ``token``."""
        return self._link.run(operations.extend_lock(self, token, duration))

    def move_to_completed(self, value: Any, token: str | None = None, *, fetch_next: bool = False) -> Job | None:
        """Complete the job, which :meth:`Queue.get_next_job` took.

        Args:
            value: the return value, plain JSON.
            token: of its lock; the one with which it was taken if left out.
            fetch_next: take the next job in the same step, with the same token.

        Returns:
            The next job; ``None`` unless asked for, and when there is none.

        Raises:
            EncodeError, PayloadTooLargeError: the value cannot travel; the job is still active.
            ConfigError: no token is known.
            LockMissingError, LockMismatchError: the lock ran out, or somebody else has the job by now.
            PendingChildrenError, FailedChildrenError: it cannot complete because of its children.
        """
        record = self._link.run(by_hand.complete(self, value, token, fetch_next=fetch_next))
        return None if record is None else Job(self._link, record, self.token if token is None else token)

    def move_to_failed(
        self,
        error: BaseException | str,
        token: str | None = None,
        *,
        countdown: Duration | None = None,
        fetch_next: bool = False,
    ) -> Job | None:
        """End an attempt that failed: as in Node, the job is tried again while it has attempts left.

        It fails for good at its last attempt, after :meth:`discard`, and when the error is a ``PermanentError``. What
        a worker of bulltask asks besides (is the error a passing one?) is the caller's affair here.

        Args:
            error: the reason; an exception is stored with its traceback. ``Retry``, which ``self.retry()`` raises, and
                ``TransientError(retry_after=…)`` may say when the job is tried again.
            token: of its lock; the one with which it was taken if left out.
            countdown: seconds or ``timedelta`` before the next attempt, instead of the job's backoff and of what the
                error says; 0 is at once. It gives the job no further attempt.
            fetch_next: take the next job in the same step, with the same token; not while it is tried again.

        Returns:
            The next job; ``None`` unless asked for, and when there is none.

        Raises:
            DecodeError: its ``backoff`` cannot be read.
            ConfigError: no token is known, or ``countdown`` is no length of time.
            LockMissingError, LockMismatchError: the lock ran out, or somebody else has the job by now.
        """
        record = self._link.run(by_hand.fail(self, error, token, countdown=countdown, fetch_next=fetch_next))
        return None if record is None else Job(self._link, record, self.token if token is None else token)

    def move_to_delayed(self, delay: Duration, token: str | None = None) -> None:
        """Put the job off, which :meth:`Queue.get_next_job` took: due ``delay`` from now; no attempt is counted.

        Raises:
            ConfigError: no token is known.
            LockMissingError, LockMismatchError: the lock ran out, or somebody else has the job by now.
        """
        self._link.run(by_hand.delay(self, delay, token))

    def move_to_wait(self, token: str | None = None) -> None:
        """Give the job back, which :meth:`Queue.get_next_job` took: it is the next one; no attempt is counted.

        Raises:
            ConfigError: no token is known.
            LockMissingError, LockMismatchError: the lock ran out, or somebody else has the job by now.
        """
        self._link.run(by_hand.give_back(self, token))

    def move_to_waiting_children(self, token: str | None = None) -> bool:
        """Let the job, which :meth:`Queue.get_next_job` took, wait for its children; false when none is pending.

        Raises:
            FailedChildrenError: one has failed that fails its parent.
            ConfigError: no token is known.
            LockMissingError, LockMismatchError: the lock ran out, or somebody else has the job by now.
        """
        return self._link.run(by_hand.await_children(self, token))

    def get_children_values(self) -> dict[str, Any]:
        """The return values of the children that have completed, by the full key of each child's hash."""
        return self._link.run(operations.get_children_values(self))

    def get_dependencies(self) -> Dependencies:
        """All children by what became of them, at one moment.

        For a job with very many, ``Queue.get_dependencies`` reads a part.
        """
        return self._link.run(operations.get_dependencies(self))

    def get_dependencies_count(self, *kinds: str) -> dict[str, int]:
        """How many children there are of each kind: ``processed``, ``unprocessed``, ``ignored``, ``failed``."""
        return self._link.run(operations.get_dependencies_count(self, kinds))

    def get_failed_children(self) -> ChildFailures:
        """The children that failed: those whose failure is ignored, with reasons, and those that fail this job."""
        return self._link.run(operations.get_failed_children(self))

    def remove_child_dependency(self) -> bool:
        """End the parent's waiting for this job; it is released if this was the last child. False without a parent.

        Raises:
            ParentNotFoundError: the parent is gone.
        """
        return self._link.run(operations.remove_child_dependency(self))

    def remove_unprocessed_children(self) -> None:
        """Remove the children that have not ended; active ones are left."""
        self._link.run(operations.remove_unprocessed_children(self))

    def remove_deduplication_key(self) -> bool:
        """Let another job of the same deduplication id be added; false when this one does not own the id."""
        return self._link.run(operations.remove_deduplication_key(self))

    def wait_until_finished(self, timeout: Duration | None = None) -> Any:
        """Wait for the job to end and return its return value.

        Args:
            timeout: seconds or ``timedelta``; ``None`` waits for ever.

        Raises:
            ResultTimeoutError: it has not ended in time (it goes on).
            JobNotFoundError: it is gone, and no event says how it ended.
            Exception: it failed: as :meth:`bulltask.result.AsyncResult.get`.
        """
        return self.result().get(timeout)
