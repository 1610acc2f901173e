# Generated from bulltask/queue/aio/repeatables.py by tools/generate_sync.py (make sync): do not edit.
"""``Repeatables``: list and remove a queue's repeatable jobs."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from bulltask.jobs.clock import Duration
from bulltask.queue.context import QueueContext, checked
from bulltask.queue.schedulers import Repeatable, list_repeatables, remove, remove_by_key, repeatable_key

__all__ = ["Repeatables"]


@checked
class Repeatables:
    """A queue's repeatable jobs, which :class:`bulltask.queue.sync.schedulers.JobSchedulers` have replaced.

    Repeatable jobs cannot be created: use ``queue.schedulers.upsert``. Workers continue to run existing repeatable
    jobs.
    """

    def __init__(self, context: QueueContext) -> None:
        self._context = context

    def list(self) -> Sequence[Repeatable]:
        """Return all repeatable jobs, in the order in which they run next; job schedulers are not included."""
        return self._context.run(list_repeatables(self._context.keys))

    def count(self) -> int:
        """Count the repeatable jobs."""
        return len(self.list())

    def remove(
        self,
        name: str,
        *,
        every: Duration | None = None,
        cron: str | None = None,
        tz: str | None = None,
        end: datetime | None = None,
        job_id: str | None = None,
    ) -> bool:
        """Remove the repeatable job with these options, and its next iteration if that is delayed.

        Args:
            name: Name of its jobs.
            every: Its interval, seconds or ``timedelta``.
            cron: Its pattern, exactly as it was given.
            tz, end, job_id: The options that it was created with.

        Returns:
            False if there is no such job.

        Raises:
            ConfigError: Neither or both of ``every`` and ``cron`` are given.
        """
        key = repeatable_key(name, every, cron, tz, end, job_id)
        return self._context.run(remove(self._context.keys, name, key, job_id))

    def remove_by_key(self, key: str) -> bool:
        """Remove the repeatable job with this key, and its next iteration if delayed; false if it does not exist."""
        return self._context.run(remove_by_key(self._context.keys, key))
