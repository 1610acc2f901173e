"""``AsyncQueue``: :class:`bulltask.queue.queue.Queue` for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Self, Unpack

from bulltask.clock import Duration
from bulltask.jobs import codec
from bulltask.jobs.codec import Json
from bulltask.jobs.states import Revocation
from bulltask.queue import by_hand, operations, reading
from bulltask.queue.agetters import AsyncQueueGetters
from bulltask.queue.ajob import AsyncJob
from bulltask.queue.answers import RateLimit
from bulltask.queue.by_hand import Taking
from bulltask.queue.fields import record_of
from bulltask.queue.options import AddOptions, BulkJob
from bulltask.queue.repeatables import AsyncRepeatables
from bulltask.queue.schedulers import AsyncJobSchedulers

__all__ = ["AsyncQueue"]


class AsyncQueue(AsyncQueueGetters):
    """:class:`bulltask.queue.queue.Queue` for asyncio; ``app.aqueue("emails")`` makes one.

    It may be used by many tasks and loops; the tasks of one loop share a connection. Outside an app, use it as
    ``async with AsyncQueue(…) as queue`` or call :meth:`close`.
    """

    # ---- adding and removing -------------------------------------------------------------------------------------

    async def add(self, name: str, data: Json = None, **options: Unpack[AddOptions]) -> AsyncJob:
        """As :meth:`bulltask.queue.queue.Queue.add`."""
        return (await self.add_bulk([{"name": name, "data": data, "options": options}]))[0]

    async def add_bulk(self, jobs: Iterable[BulkJob]) -> list[AsyncJob]:
        """As :meth:`bulltask.queue.queue.Queue.add_bulk`."""
        checked = [self._link.build(job["name"], job.get("data"), job.get("options", {})) for job in jobs]
        await self._link.aconnect()
        new = self._link.dated(checked)
        ids = await self._link.broker.producer.asend(new)
        return [AsyncJob(self._link, record_of(job, job_id)) for job, job_id in zip(new, ids, strict=True)]

    async def remove(self, job_id: str, *, remove_children: bool = True) -> bool:
        """As :meth:`bulltask.queue.queue.Queue.remove`."""
        return await self._link.arun(operations.remove(self._link, job_id, children=remove_children))

    async def revoke(self, job_id: str, *, terminate: bool = False) -> Revocation:
        """As :meth:`bulltask.queue.queue.Queue.revoke`."""
        return await self._link.arun(self._link.broker.revocation(self.name, job_id, terminate=terminate))

    async def drain(self, *, delayed: bool = False) -> None:
        """As :meth:`bulltask.queue.queue.Queue.drain`."""
        await self._link.arun(operations.drain(self._link, delayed=delayed))

    async def clean(self, grace: Duration, limit: int = 0, state: str = "completed") -> list[str]:
        """As :meth:`bulltask.queue.queue.Queue.clean`."""
        return await self._link.arun(operations.clean(self._link, grace, limit, state))

    async def obliterate(self, *, force: bool = False, count: int = 1000) -> None:
        """As :meth:`bulltask.queue.queue.Queue.obliterate`."""
        await self._link.arun(operations.obliterate(self._link, count, force=force))

    async def retry_jobs(
        self, *, state: str = "failed", count: int = 1000, before_ms: int | None = None, revoked: bool = False
    ) -> None:
        """As :meth:`bulltask.queue.queue.Queue.retry_jobs`."""
        await self._link.arun(operations.move_to_wait(self._link, state, count, before_ms, revoked=revoked))

    async def promote_jobs(self, *, count: int = 1000) -> None:
        """As :meth:`bulltask.queue.queue.Queue.promote_jobs`."""
        await self._link.arun(operations.move_to_wait(self._link, "delayed", count, None))

    # ---- pausing and limits --------------------------------------------------------------------------------------

    async def pause(self) -> None:
        """As :meth:`bulltask.queue.queue.Queue.pause`."""
        await self._link.arun(operations.set_paused(self._link, paused=True))

    async def resume(self) -> None:
        """As :meth:`bulltask.queue.queue.Queue.resume`."""
        await self._link.arun(operations.set_paused(self._link, paused=False))

    async def is_paused(self) -> bool:
        """As :meth:`bulltask.queue.queue.Queue.is_paused`."""
        return await self._link.arun(reading.is_paused(self._link))

    async def is_maxed(self) -> bool:
        """As :meth:`bulltask.queue.queue.Queue.is_maxed`."""
        return await self._link.arun(reading.is_maxed(self._link))

    async def rate_limit(self, duration: Duration) -> None:
        """As :meth:`bulltask.queue.queue.Queue.rate_limit`."""
        await self._link.arun(operations.rate_limit(self._link, duration))

    async def get_rate_limit_ttl(self, max_jobs: int = 0) -> float:
        """As :meth:`bulltask.queue.queue.Queue.get_rate_limit_ttl`."""
        return await self._link.arun(reading.get_rate_limit_ttl(self._link, max_jobs))

    async def remove_rate_limit_key(self) -> bool:
        """As :meth:`bulltask.queue.queue.Queue.remove_rate_limit_key`."""
        return await self._link.arun(operations.remove_rate_limit_key(self._link))

    async def set_global_concurrency(self, concurrency: int) -> None:
        """As :meth:`bulltask.queue.queue.Queue.set_global_concurrency`."""
        await self._link.arun(operations.set_global_concurrency(self._link, concurrency))

    async def get_global_concurrency(self) -> int | None:
        """As :meth:`bulltask.queue.queue.Queue.get_global_concurrency`."""
        return await self._link.arun(reading.get_global_concurrency(self._link))

    async def remove_global_concurrency(self) -> bool:
        """As :meth:`bulltask.queue.queue.Queue.remove_global_concurrency`."""
        return await self._link.arun(operations.forget_meta(self._link, "concurrency"))

    async def set_global_rate_limit(self, max: int, duration: Duration) -> None:  # noqa: A002 - BullMQ's word
        """As :meth:`bulltask.queue.queue.Queue.set_global_rate_limit`."""
        await self._link.arun(operations.set_global_rate_limit(self._link, max, duration))

    async def get_global_rate_limit(self) -> RateLimit | None:
        """As :meth:`bulltask.queue.queue.Queue.get_global_rate_limit`."""
        return await self._link.arun(reading.get_global_rate_limit(self._link))

    async def remove_global_rate_limit(self) -> bool:
        """As :meth:`bulltask.queue.queue.Queue.remove_global_rate_limit`."""
        return await self._link.arun(operations.forget_meta(self._link, "max", "duration"))

    # ---- by hand -------------------------------------------------------------------------------------------------

    async def get_next_job(
        self,
        token: str,
        *,
        timeout: Duration | None = 0,  # noqa: ASYNC109 - the same words as Queue
        lock_duration: Duration | None = None,
        worker: str = "",
    ) -> AsyncJob | None:
        """As :meth:`bulltask.queue.queue.Queue.get_next_job`."""
        taking = Taking(self._link, token, timeout, lock_duration, worker)
        while (record := await self._link.arun(taking.attempt())) is None and (wait_ms := taking.wait_ms):
            if limited_ms := taking.limited_ms:
                await asyncio.sleep(limited_ms / 1000)
            else:
                await self._link.await_(taking.marker(wait_ms), wait_ms)
        return None if record is None else AsyncJob(self._link, record, token)

    async def check_stalled(self, max_stalled_count: int | None = None) -> list[str]:
        """As :meth:`bulltask.queue.queue.Queue.check_stalled`."""
        return await self._link.arun(by_hand.check_stalled(self._link, max_stalled_count))

    # ---- the rest ------------------------------------------------------------------------------------------------

    @property
    def schedulers(self) -> AsyncJobSchedulers:
        """As :attr:`bulltask.queue.queue.Queue.schedulers`."""
        return AsyncJobSchedulers(self._link)

    @property
    def repeatables(self) -> AsyncRepeatables:
        """As :attr:`bulltask.queue.queue.Queue.repeatables`."""
        return AsyncRepeatables(self._link)

    async def wait_until_ready(self) -> None:
        """As :meth:`bulltask.queue.queue.Queue.wait_until_ready`."""
        await self._link.aconnect()

    async def remove_deprecated_priority_key(self) -> bool:
        """As :meth:`bulltask.queue.queue.Queue.remove_deprecated_priority_key`."""
        return await self._link.arun(operations.remove_deprecated_priority_key(self._link))

    async def update_job_progress(self, job_id: str, progress: Json) -> None:
        """As :meth:`bulltask.queue.queue.Queue.update_job_progress`."""
        encoded = codec.encode(progress, what=f"progress of job {job_id}")
        await self._link.arun(operations.update_job_progress(self._link, job_id, encoded))

    async def add_job_log(self, job_id: str, line: str, keep_logs: int | None = None) -> int:
        """As :meth:`bulltask.queue.queue.Queue.add_job_log`."""
        return await self._link.arun(operations.add_job_log(self._link, job_id, line, keep_logs))

    async def get_deduplication_job_id(self, deduplication_id: str) -> str | None:
        """As :meth:`bulltask.queue.queue.Queue.get_deduplication_job_id`."""
        return await self._link.arun(reading.get_deduplication_job_id(self._link, deduplication_id))

    async def remove_deduplication_key(self, deduplication_id: str) -> bool:
        """As :meth:`bulltask.queue.queue.Queue.remove_deduplication_key`."""
        return await self._link.arun(operations.remove_deduplication_key(self._link, deduplication_id))

    async def get_meta(self) -> dict[str, str]:
        """As :meth:`bulltask.queue.queue.Queue.get_meta`."""
        return await self._link.arun(reading.get_meta(self._link))

    async def set_meta(self, values: Mapping[str, str | int]) -> None:
        """As :meth:`bulltask.queue.queue.Queue.set_meta`."""
        await self._link.arun(operations.set_meta(self._link, values))

    async def get_version(self) -> str | None:
        """As :meth:`bulltask.queue.queue.Queue.get_version`."""
        return (await self.get_meta()).get("version")

    async def trim_events(self, max_length: int) -> int:
        """As :meth:`bulltask.queue.queue.Queue.trim_events`."""
        return await self._link.arun(operations.trim_events(self._link, max_length))

    async def close(self) -> None:
        """As :meth:`bulltask.queue.queue.Queue.close`."""
        await self._link.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
