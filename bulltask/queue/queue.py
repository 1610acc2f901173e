"""``Queue``: everything that can be done with a queue from outside its workers."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Self, Unpack

from bulltask.clock import Duration
from bulltask.jobs import codec
from bulltask.jobs.codec import Json
from bulltask.jobs.states import Revocation
from bulltask.queue import by_hand, operations, reading
from bulltask.queue.answers import RateLimit
from bulltask.queue.by_hand import Taking
from bulltask.queue.fields import record_of
from bulltask.queue.getters import QueueGetters
from bulltask.queue.job import Job
from bulltask.queue.options import AddOptions, BulkJob
from bulltask.queue.repeatables import Repeatables
from bulltask.queue.schedulers import JobSchedulers

__all__ = ["Queue"]


class Queue(QueueGetters):
    """A queue of BullMQ 5.62, for Python and Node workers alike; ``app.queue("emails")`` makes one.

    It connects when first used, and may be used by many threads. Every method raises ``BrokerError`` when Redis
    cannot be reached, and ``ConfigError`` for an argument that makes no sense. Names are those of BullMQ's ``Queue``;
    lengths of time are seconds or ``timedelta``.

    Arguments are those of :class:`bulltask.queue.base.QueueBase`.
    """

    # ---- adding and removing -------------------------------------------------------------------------------------

    def add(self, name: str, data: Json = None, **options: Unpack[AddOptions]) -> Job:
        """Add a job.

        Args:
            name: the job's name; a bulltask worker runs the task of that name.
            data: plain JSON. A bulltask task takes an object as its keyword arguments, an array as positional ones.
            options: see :class:`bulltask.queue.options.AddOptions`.

        Returns:
            The job as it was sent. Where an earlier job counts as the same, the id is that one's (as in Node).

        Raises:
            TypeError, ConfigError, InvalidNameError, EncodeError, PayloadTooLargeError: nothing was sent.
            ParentNotFoundError: the parent is gone.
            ParentConflictError: the job exists already and belongs to another parent that still waits.
        """
        return self.add_bulk([{"name": name, "data": data, "options": options}])[0]

    def add_bulk(self, jobs: Iterable[BulkJob]) -> list[Job]:
        """Add jobs in order, a thousand in a round trip: ``[{"name": …, "data": …, "options": {…}}, …]``.

        All are checked before the first one is sent. They are not added in one transaction.
        """
        checked = [self._link.build(job["name"], job.get("data"), job.get("options", {})) for job in jobs]
        self._link.connect()
        new = self._link.dated(checked)
        ids = self._link.broker.producer.send(new)
        return [Job(self._link, record_of(job, job_id)) for job, job_id in zip(new, ids, strict=True)]

    def remove(self, job_id: str, *, remove_children: bool = True) -> bool:
        """Remove a job wherever it is; false when it, or a child that would go too, is locked by a worker.

        Raises:
            SchedulerJobError: it is the next one of a job scheduler.
        """
        return self._link.run(operations.remove(self._link, job_id, children=remove_children))

    def revoke(self, job_id: str, *, terminate: bool = False) -> Revocation:
        """Have a job not run: it fails now, as ``revoked``, and is not retried.

        Args:
            job_id: the job.
            terminate: if it runs, have its worker end it; see :meth:`bulltask.result.AsyncResult.revoke`, also for
                what is returned. Without this a job that runs goes on.

        Raises:
            SchedulerJobError: it is the next one of a job scheduler: remove that instead.
        """
        return self._link.run(self._link.broker.revocation(self.name, job_id, terminate=terminate))

    def drain(self, *, delayed: bool = False) -> None:
        """Remove all jobs that wait, with or without a priority; active and finished ones stay.

        Args:
            delayed: the delayed ones too. The next jobs of job schedulers always stay.
        """
        self._link.run(operations.drain(self._link, delayed=delayed))

    def clean(self, grace: Duration, limit: int = 0, state: str = "completed") -> list[str]:
        """Remove jobs of one state that are older than ``grace``.

        Args:
            grace: since they ended, or since they were made for those that have not.
            limit: how many at the most; 0 for all.
            state: ``completed``, ``failed``, ``wait``, ``active`` (only those without a lock), ``paused``,
                ``delayed`` or ``prioritized``.

        Returns:
            The ids of the removed jobs.
        """
        return self._link.run(operations.clean(self._link, grace, limit, state))

    def obliterate(self, *, force: bool = False, count: int = 1000) -> None:
        """Pause the queue and remove it with all its jobs. There is no way back.

        Args:
            force: also when jobs are active.
            count: jobs in one call.

        Raises:
            QueueActiveError: jobs are active, and ``force`` is off; the queue is left paused.
            QueueNotPausedError: somebody resumed it meanwhile.
        """
        self._link.run(operations.obliterate(self._link, count, force=force))

    def retry_jobs(
        self, *, state: str = "failed", count: int = 1000, before_ms: int | None = None, revoked: bool = False
    ) -> None:
        """Let all finished jobs of a state wait again; their priorities are ignored (as in BullMQ 5).

        Revoked jobs are failed jobs, too. They stay failed unless you ask for them.

        Args:
            state: ``"failed"`` or ``"completed"``.
            count: jobs in one call.
            before_ms: only those that had ended at this time (epoch milliseconds); now if left out.
            revoked: retry revoked jobs, too.
        """
        self._link.run(operations.move_to_wait(self._link, state, count, before_ms, revoked=revoked))

    def promote_jobs(self, *, count: int = 1000) -> None:
        """Let all delayed jobs wait now, ``count`` in one call; their priorities are ignored (as in BullMQ 5)."""
        self._link.run(operations.move_to_wait(self._link, "delayed", count, None))

    # ---- pausing and limits --------------------------------------------------------------------------------------

    def pause(self) -> None:
        """Stop all workers of this queue from taking jobs; those that run go on."""
        self._link.run(operations.set_paused(self._link, paused=True))

    def resume(self) -> None:
        """End a pause.

        Unlike BullMQ 5's, this loses no job when clients of BullMQ 6 paused the queue or added to it meanwhile.
        """
        self._link.run(operations.set_paused(self._link, paused=False))

    def is_paused(self) -> bool:
        """True when the queue is paused."""
        return self._link.run(reading.is_paused(self._link))

    def is_maxed(self) -> bool:
        """True when as many jobs are active as the global concurrency allows."""
        return self._link.run(reading.is_maxed(self._link))

    def rate_limit(self, duration: Duration) -> None:
        """Take no job for so long; only honoured where a rate limit is set, globally or at the worker (BullMQ)."""
        self._link.run(operations.rate_limit(self._link, duration))

    def get_rate_limit_ttl(self, max_jobs: int = 0) -> float:
        """Seconds until a rate limit ends, 0 when there is none.

        Args:
            max_jobs: how many jobs the limit allows, where it is set at the workers.
        """
        return self._link.run(reading.get_rate_limit_ttl(self._link, max_jobs))

    def remove_rate_limit_key(self) -> bool:
        """End a rate limit now; false when there was none."""
        return self._link.run(operations.remove_rate_limit_key(self._link))

    def set_global_concurrency(self, concurrency: int) -> None:
        """Let at most so many jobs of this queue be active at once, over all workers."""
        self._link.run(operations.set_global_concurrency(self._link, concurrency))

    def get_global_concurrency(self) -> int | None:
        """How many jobs may be active at once; ``None``: no limit."""
        return self._link.run(reading.get_global_concurrency(self._link))

    def remove_global_concurrency(self) -> bool:
        """End that limit; false when there was none."""
        return self._link.run(operations.forget_meta(self._link, "concurrency"))

    def set_global_rate_limit(self, max: int, duration: Duration) -> None:  # noqa: A002 - BullMQ's word
        """Let at most ``max`` jobs of this queue be taken in ``duration``, over all workers."""
        self._link.run(operations.set_global_rate_limit(self._link, max, duration))

    def get_global_rate_limit(self) -> RateLimit | None:
        """The global rate limit; ``None``: there is none."""
        return self._link.run(reading.get_global_rate_limit(self._link))

    def remove_global_rate_limit(self) -> bool:
        """End the global rate limit; false when there was none."""
        return self._link.run(operations.forget_meta(self._link, "max", "duration"))

    # ---- by hand -------------------------------------------------------------------------------------------------

    def get_next_job(
        self, token: str, *, timeout: Duration | None = 0, lock_duration: Duration | None = None, worker: str = ""
    ) -> Job | None:
        """Take the next job by hand, as a worker would; ``None`` when there is none (Node's ``Worker.getNextJob``).

        A worker is the normal way to run jobs: it renews their locks, catches what their code raises and gives them
        back when it dies. Whoever takes a job by hand ends it with ``move_to_completed()``, ``move_to_failed()`` …,
        renews its lock with ``extend_lock()`` before it runs out, and fails a job that has a ``deferred_failure``
        with that text instead of running it.

        Args:
            token: locks the job; a text that nobody else uses, such as a UUID.
            timeout: how long to wait for a job; 0 not at all, ``None`` for ever.
            lock_duration: how long the lock lasts; the setting of that name (30 s) if left out.
            worker: the name that is noted as :attr:`Job.processed_by`.

        Raises:
            DecodeError, ConfigError: the rule of a scheduler's job cannot be read; the job is delayed.
            BrokerUnavailableError: a job may have been taken; it waits again when its lock has run out.
        """
        taking = Taking(self._link, token, timeout, lock_duration, worker)
        while (record := self._link.run(taking.attempt())) is None and (wait_ms := taking.wait_ms):
            if limited_ms := taking.limited_ms:
                threading.Event().wait(limited_ms / 1000)
            else:
                self._link.wait(taking.marker(wait_ms), wait_ms)
        return None if record is None else Job(self._link, record, token)

    def check_stalled(self, max_stalled_count: int | None = None) -> list[str]:
        """Let jobs wait again whose lock has run out, and return their ids; every worker does it by itself.

        A first call marks the jobs that are active, a later one finds those that nobody has renewed since. Only one
        call in ``stalled_interval`` (30 s) does anything, whoever makes it.

        Args:
            max_stalled_count: a job that stalls more often fails when it is taken next; the setting if left out.
        """
        return self._link.run(by_hand.check_stalled(self._link, max_stalled_count))

    # ---- the rest ------------------------------------------------------------------------------------------------

    @property
    def schedulers(self) -> JobSchedulers:
        """The queue's job schedulers: jobs at intervals and by cron patterns."""
        return JobSchedulers(self._link)

    @property
    def repeatables(self) -> Repeatables:
        """Repeatable jobs that BullMQ's older interface has made: to list and remove them."""
        return Repeatables(self._link)

    def wait_until_ready(self) -> None:
        """Connect now instead of at the first call, to hear at once of a server that cannot be reached."""
        self._link.connect()

    def remove_deprecated_priority_key(self) -> bool:
        """Remove a key of BullMQ 3, after all its clients are gone; false when there was none."""
        return self._link.run(operations.remove_deprecated_priority_key(self._link))

    def update_job_progress(self, job_id: str, progress: Json) -> None:
        """Store a job's progress and tell listeners.

        Raises:
            JobNotFoundError: there is no such job.
        """
        encoded = codec.encode(progress, what=f"progress of job {job_id}")
        self._link.run(operations.update_job_progress(self._link, job_id, encoded))

    def add_job_log(self, job_id: str, line: str, keep_logs: int | None = None) -> int:
        """Append a line to a job's log and return how many lines it has.

        Args:
            job_id: the job.
            line: the line.
            keep_logs: how many lines the log keeps, the newest ones; 0: all. Left out: the setting ``max_logs``.
        """
        return self._link.run(operations.add_job_log(self._link, job_id, line, keep_logs))

    def get_deduplication_job_id(self, deduplication_id: str) -> str | None:
        """Which job owns a deduplication id; ``None``: none."""
        return self._link.run(reading.get_deduplication_job_id(self._link, deduplication_id))

    def remove_deduplication_key(self, deduplication_id: str) -> bool:
        """Let another job of that deduplication id be added; false when nobody owned it."""
        return self._link.run(operations.remove_deduplication_key(self._link, deduplication_id))

    def get_meta(self) -> dict[str, str]:
        """What the queue's ``meta`` says: ``version``, ``opts.maxLenEvents``, ``concurrency``, ``paused`` …"""
        return self._link.run(reading.get_meta(self._link))

    def set_meta(self, values: Mapping[str, str | int]) -> None:
        """Store fields of ``meta``, such as ``{"opts.maxLenEvents": 50_000}``; not ``paused``."""
        self._link.run(operations.set_meta(self._link, values))

    def get_version(self) -> str | None:
        """Which client described the queue last: ``bullmq:5.62.0``."""
        return self.get_meta().get("version")

    def trim_events(self, max_length: int) -> int:
        """Cut the event stream to about ``max_length`` events and return how many were removed."""
        return self._link.run(operations.trim_events(self._link, max_length))

    def close(self) -> None:
        """Close idle connections (an app's stay open); the queue may be used again."""
        self._link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
