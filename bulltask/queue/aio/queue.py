"""``AsyncQueue``: add, manage and read a queue's jobs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Self, Unpack

from bulltask.jobs import codec
from bulltask.jobs.clock import Duration, to_ms
from bulltask.jobs.codec import Json
from bulltask.jobs.errors import BrokerError, ConfigError
from bulltask.jobs.names import JobState, Revocation, check_reference
from bulltask.queue import fields as read
from bulltask.queue import manual
from bulltask.queue.aio.job import AsyncBulkChange, AsyncJob
from bulltask.queue.aio.repeatables import AsyncRepeatables
from bulltask.queue.aio.schedulers import AsyncJobSchedulers
from bulltask.queue.context import AddOptions, BulkJob, QueueBase, check_bulk_jobs, check_positive, checked
from bulltask.queue.fields import (
    ClientInfo,
    DependencyPage,
    JobLogs,
    JobPages,
    Metrics,
    QueueSummary,
    RateLimit,
    sent_job,
)
from bulltask.queue.manual import Acquisition
from bulltask.queue.reasons import Explanation, explain_job, explain_queue, unreachable
from bulltask.queue.search import (
    SCANNED,
    FailureGroups,
    FoundJobs,
    JobFilter,
    Progress,
    as_states,
    find_jobs,
    group_failures,
)
from bulltask.transport.call import command, text
from bulltask.transport.scripts import queue as scripts
from bulltask.transport.scripts.job import add_log, get_state, read_job, remove_job, update_progress
from bulltask.transport.workers import WorkerState, read_workers

__all__ = ["AsyncQueue"]


@checked
class AsyncQueue(QueueBase):
    """A queue in BullMQ 5.62's format, shared with workers in Python and Node.js; created by ``app.aqueue("emails")``.

    It connects on first use. Many tasks and event loops may use it; the tasks of one loop share a connection.
    Without an app, use ``async with AsyncQueue(…) as queue`` or call :meth:`close`.

    Methods have the same names as in BullMQ's ``Queue``. Durations are seconds or ``timedelta``. Every method raises
    ``BrokerError`` if Redis cannot be reached, and ``ConfigError`` for an invalid argument.

    For the arguments, see :class:`bulltask.queue.context.QueueBase`.
    """

    # ---- adding and removing -------------------------------------------------------------------------------------

    async def add(self, name: str, data: Json = None, **options: Unpack[AddOptions]) -> AsyncJob:
        """Add a job.

        Args:
            name: The job's name; a bulltask worker runs the task with that name.
            data: Plain JSON. A bulltask task takes an object as its keyword arguments, an array as positional
                arguments.
            options: See :class:`bulltask.queue.context.AddOptions`.

        Returns:
            The job as it was sent. If it is deduplicated, it has the existing job's id (as in Node).

        Raises:
            TypeError, ConfigError, InvalidNameError, EncodeError, PayloadTooLargeError: Nothing was sent.
            ParentNotFoundError: The parent does not exist.
            ParentConflictError: The job exists already and belongs to another parent that is still waiting for it.
        """
        jobs = await self.add_bulk([{"name": name, "data": data, "options": options}])
        return jobs[0]

    async def add_bulk(self, jobs: Iterable[BulkJob]) -> list[AsyncJob]:
        """Add jobs in order, up to a thousand per round trip: ``[{"name": …, "data": …, "options": {…}}, …]``.

        All jobs are checked before the first one is sent. They are not added in one transaction.

        Raises:
            TypeError: A job has no name or an unknown key, or an option is unknown.
            EncodeError, PayloadTooLargeError, InvalidNameError, ConfigError: A job's data, name or option is invalid.
        """
        bulk = check_bulk_jobs(jobs)
        checked = [self._context.build(job["name"], job.get("data"), job.get("options", {})) for job in bulk]
        await self._context.aconnect()
        new = self._context.with_timestamps(checked)
        ids = await self._context.broker.producer.asend(new)
        return [AsyncJob(self._context, sent_job(job, job_id)) for job, job_id in zip(new, ids, strict=True)]

    async def remove(self, job_id: str, *, remove_children: bool = True) -> bool:
        """Remove a job in any state; false if the job, or a child that would be removed with it, is locked by a worker.

        Raises:
            SchedulerJobError: It is the next iteration of a job scheduler.
        """
        return await self._context.arun(
            remove_job(self._context.keys, check_reference(job_id), children=remove_children)
        )

    async def revoke(self, job_id: str, *, terminate: bool = False) -> Revocation:
        """Prevent a job from running: it fails now, as ``revoked``, and is not retried.

        Args:
            job_id: The job.
            terminate: If the job is running, cancel it. Without this a running job continues.

        Returns:
            The outcome; :meth:`bulltask.result.AsyncResult.revoke` lists the possible outcomes.

        Raises:
            SchedulerJobError: It is the next iteration of a job scheduler: remove the scheduler instead.
        """
        check_reference(job_id)
        return await self._context.arun(self._context.broker.revocation(self.name, job_id, terminate=terminate))

    async def drain(self, *, delayed: bool = False) -> None:
        """Remove all waiting jobs, with or without a priority, and the delayed ones if requested.

        Active and finished jobs stay, and so do the next jobs of job schedulers.
        """
        await self._context.arun(read.drain(self._context, delayed=delayed))

    async def clean(self, grace: Duration, limit: int = 0, state: str = "completed") -> list[str]:
        """Remove jobs of one state that are older than ``grace``.

        Args:
            grace: Minimum age, counted from when the job finished, or from its creation if it has not finished.
            limit: Maximum number of jobs; 0 for all.
            state: ``completed``, ``failed``, ``waiting``, ``active`` (only jobs without a lock), ``paused``,
                ``delayed`` or ``prioritized``.

        Returns:
            The ids of the removed jobs.
        """
        return await self._context.arun(read.clean(self._context, grace, limit, state))

    async def obliterate(self, *, force: bool = False, count: int = 1000) -> None:
        """Pause the queue and remove it with all its jobs. This cannot be undone.

        Args:
            force: Obliterate the queue even if jobs are active.
            count: Jobs per call, at most 100.

        Raises:
            QueueActiveError: Jobs are active, and ``force`` is false; the queue stays paused.
            QueueNotPausedError: Another client has resumed the queue.
        """
        await self._context.arun(read.obliterate(self._context, count, force=force))

    async def retry_jobs(
        self, *, state: str = "failed", count: int = 1000, before_ms: int | None = None, revoked: bool = False
    ) -> None:
        """Move all finished jobs in one state back to waiting; their priorities are ignored (as in BullMQ 5).

        Revoked jobs are failed jobs, too. They stay failed unless ``revoked`` is true.

        Args:
            state: ``"failed"`` or ``"completed"``.
            count: Jobs per call, at most 100.
            before_ms: Only jobs that finished before this time (epoch milliseconds; default: all).
            revoked: Retry revoked jobs, too.
        """
        await self._context.arun(read.move_to_wait(self._context, state, count, before_ms, revoked=revoked))

    async def promote_jobs(self, *, count: int = 1000) -> None:
        """Promote all delayed jobs, ``count`` (at most 100) per call; their priorities are ignored (as in BullMQ 5)."""
        await self._context.arun(read.move_to_wait(self._context, "delayed", count, None))

    def bulk(  # noqa: PLR0913 - each is a condition
        self,
        action: str,
        *,
        states: Iterable[str] | str = (),
        task: str | None = None,
        error: str | None = None,
        error_fingerprint: str | None = None,
        text: str | None = None,
        older_than: Duration | None = None,
        newer_than: Duration | None = None,
        limit: int | None = None,
        scan: int | None = None,
        terminate: bool = False,
    ) -> AsyncBulkChange:
        """Prepare a change of all jobs that satisfy some conditions, as ``bulltask jobs`` makes it.

        Its ``find()`` counts the jobs, and its ``run()`` changes exactly these.

        Args:
            action: ``retry`` (failed jobs; with ``states="completed"``, completed ones), ``promote``, ``remove`` or
                ``revoke``.
            states: Only jobs in these states; ``remove`` needs one. ``waiting`` are all that could run now.
            task: Only jobs of this task.
            error: Only jobs whose last attempt failed with a reason that contains this. ``retry`` leaves revoked jobs
                failed, unless this names their error.
            error_fingerprint: Only jobs with this error, as in ``FailureGroup.error``.
            text: Only jobs with this in their id, task, data as stored, or error.
            older_than, newer_than: Only jobs that finished, or were added, longer ago, or since then.
            limit: Maximum number of jobs, the newest finished ones (default: all).
            scan: Maximum number of jobs to read (default: all).
            terminate: With ``revoke``: cancel running jobs, too.
        """
        wanted = JobFilter(
            states=as_states(states), task=task, error=error, error_fingerprint=error_fingerprint, text=text
        )
        ages, limits = (older_than, newer_than), (limit, scan)
        return AsyncBulkChange(self._context, action, wanted, ages, limits, terminate=terminate)

    # ---- pausing and limits --------------------------------------------------------------------------------------

    async def pause(self, *, by: str = "") -> None:
        """Pause the queue: its workers acquire no further jobs. Running jobs continue.

        ``by`` is who pauses it, which ``bulltask queues`` and ``bulltask why`` show (default: the app and this host).
        """
        await self._context.arun(read.set_paused(self._context, paused=True, by=by))

    async def resume(self) -> None:
        """Resume the queue.

        Unlike BullMQ 5, this method loses no jobs if BullMQ 6 clients have paused the queue, or have added jobs while
        it was paused.
        """
        await self._context.arun(read.set_paused(self._context, paused=False))

    async def is_paused(self) -> bool:
        """True if the queue is paused."""
        return await self._context.arun(command("HEXISTS", self._context.keys.meta, "paused", parse_reply=bool))

    async def is_maxed(self) -> bool:
        """True if as many jobs are active as the global concurrency allows."""
        return await self._context.arun(scripts.is_maxed(self._context.keys))

    async def rate_limit(self, duration: Duration) -> None:
        """Stop workers from acquiring jobs for ``duration``.

        It applies to all workers if the queue has a global rate limit, otherwise to those with a ``limiter``.
        """
        duration_ms = to_ms(duration, "duration")
        if duration_ms:
            await self._context.arun(scripts.limit_now(self._context.keys, duration_ms))

    async def get_rate_limit_ttl(self, max_jobs: int = 0) -> float:
        """Return the seconds until the current rate limit ends, 0 if the queue is not limited.

        If the queue has no global rate limit, ``max_jobs`` is the number of jobs in the workers' ``limiter``.
        """
        ttl_ms = await self._context.arun(scripts.get_rate_limit_ttl(self._context.keys, max_jobs))
        return max(0, ttl_ms) / 1000

    async def remove_rate_limit_key(self) -> bool:
        """End the current rate limit now; false if the queue was not limited."""
        return await self._context.arun(command("DEL", self._context.keys.limiter, parse_reply=bool))

    async def set_global_concurrency(self, concurrency: int) -> None:
        """Set how many of this queue's jobs may be active at a time, across all workers."""
        await self.set_meta({"concurrency": check_positive(concurrency, "concurrency")})

    async def get_global_concurrency(self) -> int | None:
        """Return how many jobs may be active at a time; ``None``: no limit."""
        stored: bytes | None = await self._context.arun(command("HGET", self._context.keys.meta, "concurrency"))
        return int(float(stored)) if stored else None

    async def remove_global_concurrency(self) -> bool:
        """Remove the global concurrency; false if it was not set."""
        return await self._context.arun(command("HDEL", self._context.keys.meta, "concurrency", parse_reply=bool))

    async def set_global_rate_limit(self, max: int, duration: Duration) -> None:  # noqa: A002 - BullMQ's word
        """Limit how many of this queue's jobs are acquired, across all workers: at most ``max`` per ``duration``."""
        duration_ms = check_positive(to_ms(duration, "duration"), "duration")
        await self.set_meta({"max": check_positive(max, "max"), "duration": duration_ms})

    async def get_global_rate_limit(self) -> RateLimit | None:
        """Return the global rate limit, ``None`` if it is not set."""
        stored: list[bytes | None] = await self._context.arun(
            command("HMGET", self._context.keys.meta, "max", "duration")
        )
        max_jobs, duration_ms = stored
        return RateLimit(int(float(max_jobs)), float(duration_ms) / 1000) if max_jobs and duration_ms else None

    async def remove_global_rate_limit(self) -> bool:
        """Remove the global rate limit; false if it was not set."""
        return await self._context.arun(command("HDEL", self._context.keys.meta, "max", "duration", parse_reply=bool))

    # ---- reading jobs, counts and connections --------------------------------------------------------------------

    async def get_job(self, job_id: str) -> AsyncJob | None:
        """Return a job, ``None`` if there is no job with this id."""
        stored = await self._context.arun(read_job(self._context.keys, check_reference(job_id)))
        return None if stored is None else AsyncJob(self._context, stored)

    async def get_jobs(
        self, states: Iterable[str] | str = (), start: int = 0, end: int = -1, *, asc: bool = False
    ) -> list[AsyncJob]:
        """Return jobs ``start`` to ``end`` (inclusive) in each state.

        Many jobs are read with several calls, so that none of them blocks Redis.

        Args:
            states: ``waiting`` (includes ``paused``), ``paused``, ``prioritized``, ``delayed``,
                ``waiting-children``, ``active``, ``completed``, ``failed`` (default: all).
            start: Index of the first job in each state, from 0.
            end: Index of the last job in each state, -1 for all. For large numbers of jobs use :meth:`iter_jobs`.
            asc: Oldest first.
        """
        jobs = await self._context.arun(read.get_jobs(self._context, states, start, end, asc=asc))
        return [AsyncJob(self._context, stored) for stored in jobs]

    async def get_job_ids(
        self, states: Iterable[str] | str = (), start: int = 0, end: int = -1, *, asc: bool = False
    ) -> list[str]:
        """Return the ids of the jobs that :meth:`get_jobs` returns; it takes the same arguments."""
        return await self._context.arun(read.get_job_ids(self._context, states, start, end, asc=asc))

    async def iter_jobs(
        self, states: Iterable[str] | str = (), *, asc: bool = True, page_size: int = 1000
    ) -> AsyncIterator[AsyncJob]:
        """Iterate over any number of jobs, a page at a time, while other clients use the queue.

        A job that stays in its state is returned exactly once, and a job that moves to a later state at least once. A
        job that is added, removed, or moved to an earlier state during the iteration may be missing. If a whole page of
        jobs leaves its state between two reads, some jobs may be returned twice.

        The iteration ends even if jobs are added faster than it reads.

        Args:
            states: As in :meth:`get_jobs`. They are read in the order in which jobs pass through them.
            asc: In each state, begin with the job that runs next (or finished first); otherwise, end with it.
            page_size: Maximum number of jobs in memory at a time.
        """
        pages = JobPages(self._context, states, page_size, asc=asc)
        while (page := await self._context.arun(pages.next())) is not None:
            for stored in page:
                yield AsyncJob(self._context, stored)

    async def search(  # noqa: PLR0913 - each is a condition
        self,
        *,
        states: Iterable[str] | str = (),
        task: str | None = None,
        error: str | None = None,
        error_fingerprint: str | None = None,
        text: str | None = None,
        older_than: Duration | None = None,
        newer_than: Duration | None = None,
        limit: int = 50,
        scan: int = SCANNED,
        cursor: str | None = None,
    ) -> FoundJobs:
        """Find jobs that satisfy some conditions, a page at a time, as ``bulltask jobs`` does.

        Args:
            states, task, error, error_fingerprint, text, older_than, newer_than: As in :meth:`bulk`.
            limit: Maximum number of jobs to return.
            scan: About how many jobs to read at most; Redis has no index of jobs.
            cursor: ``FoundJobs.cursor`` of the previous page, which had the same conditions. The next page begins where
                that one ended, also if jobs were added or removed meanwhile.

        Raises:
            ConfigError: A condition or the cursor is invalid.
        """
        wanted = JobFilter(
            states=as_states(states), task=task, error=error, error_fingerprint=error_fingerprint, text=text
        )
        limits = check_positive(limit, "limit"), check_positive(scan, "scan")
        return await self._context.arun(find_jobs(self._context, wanted, (older_than, newer_than), limits, cursor))

    async def group_failures(
        self,
        *,
        task: str | None = None,
        error: str | None = None,
        newer_than: Duration | None = None,
        scan: int = SCANNED,
        progress: Progress | None = None,
    ) -> FailureGroups:
        """Group the failed jobs by task and error, as ``bulltask failures`` does.

        Args:
            task: Only jobs of this task.
            error: Only jobs that failed with a reason that contains this.
            newer_than: Only jobs that failed since then.
            scan: Maximum number of failed jobs to read, newest first.
            progress: ``progress(scanned, total)`` is called after each page.
        """
        wanted = JobFilter(states=("failed",), task=task, error=error)
        check_positive(scan, "scan")
        return await self._context.arun(group_failures(self._context, wanted, newer_than, scan, progress))

    async def get_job_counts(self, *states: str) -> dict[str, int]:
        """Count the jobs in each of ``states`` (default: all eight)."""
        return await self._context.arun(read.get_job_counts(self._context, states))

    async def get_summary(self) -> QueueSummary:
        """Count the jobs in five groups; ``waiting`` includes prioritized jobs and those of a paused queue.

        :meth:`get_job_counts` counts the jobs in each of BullMQ's states.
        """
        counts = await self.get_job_counts()
        return QueueSummary(
            waiting=counts["waiting"] + counts["paused"] + counts["prioritized"],
            active=counts["active"],
            completed=counts["completed"],
            failed=counts["failed"],
            delayed=counts["delayed"],
        )

    async def count(self) -> int:
        """Count the jobs that are waiting, paused, prioritized, delayed or waiting for child jobs."""
        counts = await self.get_job_counts("waiting", "paused", "delayed", "prioritized", "waiting-children")
        return sum(counts.values())

    async def get_counts_per_priority(self, priorities: Sequence[int]) -> dict[int, int]:
        """Count the waiting jobs with each priority; 0 means without a priority."""
        wanted = list(dict.fromkeys(priorities))
        if not wanted:
            return {}
        return await self._context.arun(scripts.get_counts_per_priority(self._context.keys, wanted))

    async def get_job_state(self, job_id: str) -> JobState:
        """Return a job's state, ``UNKNOWN`` if there is no job with this id."""
        return await self._context.arun(get_state(self._context.keys, check_reference(job_id)))

    async def get_job_logs(self, job_id: str, start: int = 0, end: int = -1, *, asc: bool = True) -> JobLogs:
        """Return lines of a job's log; see :meth:`bulltask.queue.aio.job.AsyncJob.get_logs`."""
        return await self._context.arun(read.get_job_logs(self._context, check_reference(job_id), start, end, asc=asc))

    async def get_metrics(self, kind: str, start: int = 0, end: int = -1) -> Metrics:
        """Return how many jobs completed or failed per minute.

        Args:
            kind: ``completed`` or ``failed``.
            start: First minute, from 0, the newest.
            end: Last minute, -1 for all.

        Raises:
            ConfigError: ``kind`` is unknown.
        """
        if kind not in {"completed", "failed"}:
            raise ConfigError(f"kind must be completed or failed, not {kind!r:.200}")
        return await self._context.arun(scripts.get_metrics(self._context.keys, kind, start, end))

    async def get_workers(self) -> list[ClientInfo]:
        """Return the connected workers, in Python and Node; one entry per connection."""
        return await self._context.arun(read.get_clients(self._context, events=False))

    async def get_worker_states(self) -> dict[str, WorkerState | None]:
        """Return what this queue's workers report about themselves, by their ids: children, jobs, memory, limits.

        Unlike :meth:`get_workers`, it has only workers of bulltask, and a worker that has died is gone after 15 s. A
        state is ``None`` if the worker is alive, but its state is missing.
        """
        await self._context.aconnect()
        states = await self._context.arun(read_workers([self._context.keys], self._context.now_ms()))
        return states[0]

    async def get_workers_count(self) -> int:
        """Count the connected workers."""
        return len(await self.get_workers())

    async def get_queue_events(self) -> list[ClientInfo]:
        """Return the connections of ``QueueEvents`` objects."""
        return await self._context.arun(read.get_clients(self._context, events=True))

    async def explain(self, job_id: str | None = None) -> Explanation:
        """Return why the queue's jobs do not run; with ``job_id``, why this job does not.

        The explanation has at least one reason. If Redis cannot be reached, that is the reason, and not an error.
        """
        context = self._context
        work = explain_queue(context) if job_id is None else explain_job(context, check_reference(job_id))
        try:
            return await context.arun(work)
        except BrokerError as exc:
            return unreachable(self.name, job_id, exc)

    async def get_dependencies(self, parent_id: str, kind: str, start: int = 0, end: int = -1) -> DependencyPage:
        """Return a job's children ``start`` to ``end``.

        Args:
            parent_id: The job.
            kind: ``"processed"``: completed, with return values; ``"pending"``: not finished; ``"ignored"``: failed,
                with reasons, and the parent ignores it; ``"failed"``: failed, and the parent fails with it.
            start: Index of the first child, from 0, in Redis' order.
            end: Index of the last child, -1 for all.
        """
        return await self._context.arun(
            read.get_dependency_page(self._context, check_reference(parent_id), kind, start, end)
        )

    async def export_prometheus_metrics(self, labels: Mapping[str, str] | None = None) -> str:
        """Return the counts of all states in Prometheus' text format, as Node exports them, with these labels."""
        counts = await self.get_job_counts()
        more = "".join(f', {name}="{value}"' for name, value in (labels or {}).items())
        lines = [
            f'bullmq_job_count{{queue="{self._context.keys.name}", state="{state}"{more}}} {count}'
            for state, count in counts.items()
        ]
        head = ["# HELP bullmq_job_count Number of jobs in the queue by state", "# TYPE bullmq_job_count gauge"]
        return "\n".join([*head, *lines])

    async def get_waiting(self, start: int = 0, end: int = -1) -> list[AsyncJob]:
        """Return waiting jobs without a priority, the next job first."""
        return await self.get_jobs("waiting", start, end, asc=True)

    async def get_active(self, start: int = 0, end: int = -1) -> list[AsyncJob]:
        """Return active jobs, the oldest first."""
        return await self.get_jobs("active", start, end, asc=True)

    async def get_delayed(self, start: int = 0, end: int = -1) -> list[AsyncJob]:
        """Return delayed jobs, the next job first."""
        return await self.get_jobs("delayed", start, end, asc=True)

    async def get_prioritized(self, start: int = 0, end: int = -1) -> list[AsyncJob]:
        """Return waiting jobs with a priority, the next job first."""
        return await self.get_jobs("prioritized", start, end, asc=True)

    async def get_completed(self, start: int = 0, end: int = -1) -> list[AsyncJob]:
        """Return completed jobs, the newest first."""
        return await self.get_jobs("completed", start, end, asc=False)

    async def get_failed(self, start: int = 0, end: int = -1) -> list[AsyncJob]:
        """Return failed jobs, the newest first."""
        return await self.get_jobs("failed", start, end, asc=False)

    async def get_waiting_children(self, start: int = 0, end: int = -1) -> list[AsyncJob]:
        """Return jobs that are waiting for their child jobs, the oldest first."""
        return await self.get_jobs("waiting-children", start, end, asc=True)

    async def get_waiting_count(self) -> int:
        """Count the waiting jobs without a priority."""
        return await self.get_job_count_by_types("waiting")

    async def get_active_count(self) -> int:
        """Count the active jobs."""
        return await self.get_job_count_by_types("active")

    async def get_delayed_count(self) -> int:
        """Count the delayed jobs."""
        return await self.get_job_count_by_types("delayed")

    async def get_prioritized_count(self) -> int:
        """Count the waiting jobs with a priority."""
        return await self.get_job_count_by_types("prioritized")

    async def get_completed_count(self) -> int:
        """Count the completed jobs."""
        return await self.get_job_count_by_types("completed")

    async def get_failed_count(self) -> int:
        """Count the failed jobs."""
        return await self.get_job_count_by_types("failed")

    async def get_waiting_children_count(self) -> int:
        """Count the jobs that are waiting for their child jobs."""
        return await self.get_job_count_by_types("waiting-children")

    async def get_job_count_by_types(self, *states: str) -> int:
        """Count the jobs in all of ``states`` together (default: all eight)."""
        counts = await self.get_job_counts(*states)
        return sum(counts.values())

    # ---- processing jobs manually --------------------------------------------------------------------------------

    async def get_next_job(
        self,
        token: str,
        *,
        timeout: Duration | None = 0,
        lock_duration: Duration | None = None,
        worker: str = "",
    ) -> AsyncJob | None:
        """Acquire the next job without a worker; ``None`` if the queue has no job (Node's ``Worker.getNextJob``).

        A worker is the normal way to run jobs: it renews their locks, handles the exceptions of tasks, and releases
        jobs when it stops. If you process jobs manually, your code must:

        * end each job with ``move_to_completed()``, ``move_to_failed()`` …;
        * renew its lock with ``extend_lock()`` before it expires.

        A job that must not run, because it stalled too often or a child job has failed it, fails, and the next one is
        acquired.

        Args:
            token: Locks the job; a unique string, such as a UUID.
            timeout: How long to wait for a job; 0: do not wait, ``None``: wait forever.
            lock_duration: How long the lock lasts (default: the setting ``lock_duration``, 30 s).
            worker: The name that is stored as :attr:`AsyncJob.processed_by`.

        Raises:
            DecodeError, ConfigError: A scheduler's job has a malformed rule; the job is delayed.
            BrokerUnavailableError: A job may have been acquired. It is moved back to waiting after its lock expires.
        """
        acquisition = Acquisition(self._context, token, timeout, lock_duration, worker)
        while (stored := await self._context.arun(acquisition.try_once())) is None and (wait_ms := acquisition.wait_ms):
            if limited_ms := acquisition.limited_ms:
                await self._context.asleep(limited_ms / 1000)
            else:
                await self._context.arun_blocking(acquisition.marker(wait_ms), wait_ms)
        return None if stored is None else AsyncJob(self._context, stored, token)

    async def check_stalled(self, max_stalled_count: int | None = None) -> list[str]:
        """Move stalled jobs back to waiting and return their ids; workers do this automatically.

        The first call marks the active jobs; a later call finds marked jobs whose lock has not been renewed since. Only
        one call per ``stalled_interval`` (30 s) has an effect, whichever client makes it.

        Args:
            max_stalled_count: A job that stalls more times than this fails when it is next acquired; default:
                the setting.
        """
        return await self._context.arun(manual.check_stalled(self._context, max_stalled_count))

    # ---- schedulers, metadata, connection ------------------------------------------------------------------------

    @property
    def schedulers(self) -> AsyncJobSchedulers:
        """The queue's job schedulers, which add jobs at an interval or by a cron pattern."""
        return AsyncJobSchedulers(self._context)

    @property
    def repeatables(self) -> AsyncRepeatables:
        """The queue's repeatable jobs, created with BullMQ's legacy API: list and remove them."""
        return AsyncRepeatables(self._context)

    async def wait_until_ready(self) -> None:
        """Connect now instead of at the first call, so that an unreachable server is noticed early."""
        await self._context.aconnect()

    async def remove_deprecated_priority_key(self) -> bool:
        """Remove a key that only BullMQ 3 clients use; false if it did not exist."""
        return await self._context.arun(command("DEL", self._context.keys.deprecated_priority, parse_reply=bool))

    async def update_job_progress(self, job_id: str, progress: Json) -> None:
        """Store a job's progress and emit a ``progress`` event; ``JobNotFoundError`` if the job does not exist."""
        encoded = codec.encode(progress, what=f"progress of job {job_id}")
        await self._context.arun(update_progress(self._context.keys, check_reference(job_id), encoded))

    async def add_job_log(self, job_id: str, line: str, keep_logs: int | None = None) -> int:
        """Append a line to a job's log and return how many lines the log has.

        Args:
            job_id: The job.
            line: The line.
            keep_logs: Maximum number of lines, of which the newest are kept; 0: no limit (default: the setting
                ``max_logs``).
        """
        default = self._context.broker.config.max_logs
        return await self._context.arun(add_log(self._context.keys, check_reference(job_id), line, keep_logs, default))

    async def get_deduplication_job_id(self, deduplication_id: str) -> str | None:
        """Return the id of the job that owns a deduplication id, ``None`` if no job does."""
        owner: bytes | None = await self._context.arun(
            command("GET", self._context.keys.deduplication(deduplication_id))
        )
        return None if owner is None else text(owner)

    async def remove_deduplication_key(self, deduplication_id: str) -> bool:
        """Free a deduplication id, so that another job with it can be added; false if no job owned it."""
        key = self._context.keys.deduplication(deduplication_id)
        return await self._context.arun(command("DEL", key, parse_reply=bool))

    async def get_meta(self) -> dict[str, str]:
        """Return the queue's ``meta``: ``version``, ``opts.maxLenEvents``, ``concurrency``, ``paused`` …"""
        return await self._context.arun(scripts.get_meta(self._context.keys))

    async def set_meta(self, values: Mapping[str, str | int]) -> None:
        """Store fields of ``meta``, such as ``{"opts.maxLenEvents": 50_000}``.

        Raises ``ConfigError`` for ``paused``, because pausing also moves jobs: use :meth:`pause`.
        """
        if "paused" in values:
            raise ConfigError("set_meta() cannot pause a queue; use pause() and resume()")
        if values:
            words = [word for pair in values.items() for word in pair]
            await self._context.arun(command("HSET", self._context.keys.meta, *words))

    async def get_version(self) -> str | None:
        """Return the version of the client that wrote ``meta``: ``bullmq:5.62.0``."""
        meta = await self.get_meta()
        return meta.get("version")

    async def trim_events(self, max_length: int) -> int:
        """Trim the event stream to about ``max_length`` events and return how many were removed."""
        return await self._context.arun(
            command("XTRIM", self._context.keys.events, "MAXLEN", "~", max_length, parse_reply=int)
        )

    async def close(self) -> None:
        """Close idle connections, unless an app owns them. The queue may be used again."""
        await self._context.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
