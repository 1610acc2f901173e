"""``AsyncJob``: :class:`bulltask.queue.job.Job` for asyncio."""

from __future__ import annotations

from typing import Any

from bulltask.clock import Duration
from bulltask.jobs.codec import Json
from bulltask.jobs.states import JobState
from bulltask.queue import by_hand, reading
from bulltask.queue import job_operations as operations
from bulltask.queue.answers import ChildFailures, Dependencies, JobLogs
from bulltask.queue.fields import JobFields

__all__ = ["AsyncJob"]


class AsyncJob(JobFields):
    """:class:`bulltask.queue.job.Job` for asyncio."""

    __slots__ = ()

    async def refresh(self) -> None:
        """As :meth:`bulltask.queue.job.Job.refresh`."""
        await self._link.arun(operations.refresh(self))

    async def update_data(self, data: Any) -> None:
        """As :meth:`bulltask.queue.job.Job.update_data`."""
        await self._link.arun(operations.set_data(self, data))

    async def update_progress(self, progress: Json) -> None:
        """As :meth:`bulltask.queue.job.Job.update_progress`."""
        await self._link.arun(operations.set_progress(self, progress))

    async def log(self, line: str) -> int:
        """As :meth:`bulltask.queue.job.Job.log`."""
        return await self._link.arun(operations.log(self, line))

    async def get_logs(self, start: int = 0, end: int = -1, *, asc: bool = True) -> JobLogs:
        """As :meth:`bulltask.queue.job.Job.get_logs`."""
        return await self._link.arun(reading.get_job_logs(self._link, self.id, start, end, asc=asc))

    async def clear_logs(self, keep: int = 0) -> None:
        """As :meth:`bulltask.queue.job.Job.clear_logs`."""
        await self._link.arun(operations.clear_logs(self, keep))

    async def get_state(self) -> JobState:
        """As :meth:`bulltask.queue.job.Job.get_state`."""
        return await self._link.arun(reading.get_job_state(self._link, self.id))

    async def is_completed(self) -> bool:
        """As :meth:`bulltask.queue.job.Job.is_completed`."""
        return await self.get_state() is JobState.COMPLETED

    async def is_failed(self) -> bool:
        """As :meth:`bulltask.queue.job.Job.is_failed`."""
        return await self.get_state() is JobState.FAILED

    async def is_delayed(self) -> bool:
        """As :meth:`bulltask.queue.job.Job.is_delayed`."""
        return await self.get_state() is JobState.DELAYED

    async def is_active(self) -> bool:
        """As :meth:`bulltask.queue.job.Job.is_active`."""
        return await self.get_state() is JobState.ACTIVE

    async def is_waiting(self) -> bool:
        """As :meth:`bulltask.queue.job.Job.is_waiting`."""
        return await self.get_state() is JobState.WAITING

    async def is_prioritized(self) -> bool:
        """As :meth:`bulltask.queue.job.Job.is_prioritized`."""
        return await self.get_state() is JobState.PRIORITIZED

    async def is_waiting_children(self) -> bool:
        """As :meth:`bulltask.queue.job.Job.is_waiting_children`."""
        return await self.get_state() is JobState.WAITING_CHILDREN

    async def retry(self, state: str = "failed") -> None:
        """As :meth:`bulltask.queue.job.Job.retry`."""
        await self._link.arun(operations.retry(self, state))

    async def remove(self, *, children: bool = True) -> None:
        """As :meth:`bulltask.queue.job.Job.remove`."""
        await self._link.arun(operations.remove(self, children=children))

    async def promote(self) -> None:
        """As :meth:`bulltask.queue.job.Job.promote`."""
        await self._link.arun(operations.promote(self))

    async def change_delay(self, delay: Duration) -> None:
        """As :meth:`bulltask.queue.job.Job.change_delay`."""
        await self._link.arun(operations.change_delay(self, delay))

    async def change_priority(self, priority: int, *, lifo: bool = False) -> None:
        """As :meth:`bulltask.queue.job.Job.change_priority`."""
        await self._link.arun(operations.change_priority(self, priority, lifo=lifo))

    async def extend_lock(self, token: str, duration: Duration) -> bool:
        """As :meth:`bulltask.queue.job.Job.extend_lock`."""
        return await self._link.arun(operations.extend_lock(self, token, duration))

    async def move_to_completed(
        self, value: Any, token: str | None = None, *, fetch_next: bool = False
    ) -> AsyncJob | None:
        """As :meth:`bulltask.queue.job.Job.move_to_completed`."""
        record = await self._link.arun(by_hand.complete(self, value, token, fetch_next=fetch_next))
        return None if record is None else AsyncJob(self._link, record, self.token if token is None else token)

    async def move_to_failed(
        self,
        error: BaseException | str,
        token: str | None = None,
        *,
        countdown: Duration | None = None,
        fetch_next: bool = False,
    ) -> AsyncJob | None:
        """As :meth:`bulltask.queue.job.Job.move_to_failed`."""
        record = await self._link.arun(by_hand.fail(self, error, token, countdown=countdown, fetch_next=fetch_next))
        return None if record is None else AsyncJob(self._link, record, self.token if token is None else token)

    async def move_to_delayed(self, delay: Duration, token: str | None = None) -> None:
        """As :meth:`bulltask.queue.job.Job.move_to_delayed`."""
        await self._link.arun(by_hand.delay(self, delay, token))

    async def move_to_wait(self, token: str | None = None) -> None:
        """As :meth:`bulltask.queue.job.Job.move_to_wait`."""
        await self._link.arun(by_hand.give_back(self, token))

    async def move_to_waiting_children(self, token: str | None = None) -> bool:
        """As :meth:`bulltask.queue.job.Job.move_to_waiting_children`."""
        return await self._link.arun(by_hand.await_children(self, token))

    async def get_children_values(self) -> dict[str, Any]:
        """As :meth:`bulltask.queue.job.Job.get_children_values`."""
        return await self._link.arun(operations.get_children_values(self))

    async def get_dependencies(self) -> Dependencies:
        """As :meth:`bulltask.queue.job.Job.get_dependencies`."""
        return await self._link.arun(operations.get_dependencies(self))

    async def get_dependencies_count(self, *kinds: str) -> dict[str, int]:
        """As :meth:`bulltask.queue.job.Job.get_dependencies_count`."""
        return await self._link.arun(operations.get_dependencies_count(self, kinds))

    async def get_failed_children(self) -> ChildFailures:
        """As :meth:`bulltask.queue.job.Job.get_failed_children`."""
        return await self._link.arun(operations.get_failed_children(self))

    async def remove_child_dependency(self) -> bool:
        """As :meth:`bulltask.queue.job.Job.remove_child_dependency`."""
        return await self._link.arun(operations.remove_child_dependency(self))

    async def remove_unprocessed_children(self) -> None:
        """As :meth:`bulltask.queue.job.Job.remove_unprocessed_children`."""
        await self._link.arun(operations.remove_unprocessed_children(self))

    async def remove_deduplication_key(self) -> bool:
        """As :meth:`bulltask.queue.job.Job.remove_deduplication_key`."""
        return await self._link.arun(operations.remove_deduplication_key(self))

    async def wait_until_finished(self, timeout: Duration | None = None) -> Any:  # noqa: ASYNC109 - the same words as Job
        """As :meth:`bulltask.queue.job.Job.wait_until_finished`."""
        return await self.result().aget(timeout)
