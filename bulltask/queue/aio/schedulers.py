"""``AsyncJobSchedulers``: create, list, pause and remove a queue's job schedulers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from bulltask.jobs.clock import zone_of
from bulltask.jobs.codec import Json
from bulltask.jobs.names import check_reference
from bulltask.jobs.schedules import Rule, Scheduler
from bulltask.queue.aio.job import AsyncJob
from bulltask.queue.context import AddOptions, checked
from bulltask.queue.schedulers import (
    SchedulersBase,
    find_scheduler,
    list_all_schedulers,
    list_paused,
    pause_scheduler,
    remove_scheduler,
    resume_scheduler,
    run_now,
)
from bulltask.transport.call import command

__all__ = ["AsyncJobSchedulers"]


@checked
class AsyncJobSchedulers(SchedulersBase):
    """A queue's job schedulers. A scheduler adds a job at every interval, or whenever a cron pattern matches.

    The worker that acquires a scheduler's job, in Python or Node.js, adds the next iteration. If no worker is running
    while several iterations are due, only one of them runs, as soon as a worker has started; the others are skipped.
    """

    async def upsert(
        self,
        scheduler_id: str,
        *,
        name: str | None = None,
        data: Json = None,
        options: AddOptions | None = None,
        **rule: Unpack[Rule],
    ) -> Scheduler | None:
        """Create a scheduler, or update the scheduler with this id (Node's ``upsertJobScheduler``).

        A changed rule or template applies from the next iteration on; a job that is running is not affected. A paused
        scheduler stays paused.

        Args:
            scheduler_id: The scheduler's id, unique in the queue.
            name: Name of its jobs; a bulltask worker runs the task with that name (default: the scheduler's id).
            data: Data of its jobs (default: ``{}``).
            options: Options of its jobs, as for ``Queue.add``, except ``job_id``, ``delay``, ``timestamp``,
                ``deduplication`` and ``parent``. ``expires`` counts from each job's scheduled time.
            rule: ``every=300``, ``cron="0 3 * * mon-fri", tz="Europe/Berlin"`` …: see
                :class:`bulltask.jobs.schedules.Rule`.

        Returns:
            The scheduler; ``None`` if there is no further iteration, because the pattern matches none before ``end``.

        Raises:
            ConfigError, InvalidNameError, TypeError, EncodeError, PayloadTooLargeError: Nothing was changed.
            SchedulerCollisionError: A job for the next time exists and cannot be replaced, because it has already run.
            SchedulerBusyError: Jobs for the next two times of an interval exist and cannot be replaced.
        """
        return await self._context.arun(self._upsert(scheduler_id, rule, name, data, options))

    async def get(self, scheduler_id: str) -> Scheduler | None:
        """Return a scheduler, paused or not; ``None`` if there is no scheduler with this id."""
        return await self._context.arun(find_scheduler(self._context.keys, scheduler_id))

    async def list(self, start: int = 0, end: int = -1, *, asc: bool = False) -> Sequence[Scheduler]:
        """Return schedulers in the order of their next iterations, without those that are paused.

        Args:
            start, end: First and last index, from 0; negative indexes count from the end.
            asc: Begin with the scheduler whose job is due next; otherwise, end with it.
        """
        return await self._context.arun(list_all_schedulers(self._context.keys, start, end, asc=asc))

    async def list_paused(self) -> Sequence[Scheduler]:
        """Return the paused schedulers."""
        return await self._context.arun(list_paused(self._context.keys))

    async def pause(self, scheduler_id: str, *, by: str = "") -> Scheduler | None:
        """Pause a scheduler: it adds no jobs until it is resumed. A waiting or running job stays.

        Clients of BullMQ, which has no pause, do not see the scheduler meanwhile; if one adds it again, it is no longer
        paused.

        ``by`` is who pauses it (default: the app and this host). Return the scheduler; ``None`` if it does not exist.

        Raises:
            ConfigError: It is a repeatable job of BullMQ before 5.16.
        """
        await self._context.aconnect()
        return await self._context.arun(pause_scheduler(self._context, scheduler_id, by))

    async def resume(self, scheduler_id: str) -> Scheduler | None:
        """Resume a scheduler. Its next job runs at the next of its regular times; those that were missed are skipped.

        Return the scheduler, also if it was not paused; ``None`` if it does not exist.

        Raises:
            SchedulerCollisionError, SchedulerBusyError: As for :meth:`upsert`; it stays paused.
            ConfigError, DecodeError: Its stored rule is malformed; it stays paused.
        """
        await self._context.aconnect()
        zone = zone_of(self._context.broker.config.timezone)
        operation = resume_scheduler(self._context.keys, scheduler_id, self._context.now_ms(), zone)
        return await self._context.arun(operation)

    async def run_now(self, scheduler_id: str) -> AsyncJob | None:
        """Add a job with the scheduler's name, data and options that runs now; its iterations run at their times.

        Return the job, which does not belong to the scheduler; ``None`` if there is no scheduler with this id.
        :meth:`AsyncJob.promote` of the next iteration would move that iteration instead: it would not run at its time.
        """
        await self._context.aconnect()
        operation = run_now(self._context.keys, check_reference(scheduler_id), self._context.now_ms())
        stored = await self._context.arun(operation)
        return None if stored is None else AsyncJob(self._context, stored)

    async def remove(self, scheduler_id: str) -> bool:
        """Remove a scheduler and its next iteration; false if it does not exist. A waiting or running job stays."""
        return await self._context.arun(remove_scheduler(self._context.keys, scheduler_id))

    async def count(self) -> int:
        """Count the queue's schedulers, without those that are paused."""
        return await self._context.arun(command("ZCARD", self._context.keys.repeat, parse_reply=int))
