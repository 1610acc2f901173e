"""What a bound task says about its job, on its way to Redis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bulltask.config.config import Config
from bulltask.jobs.job import RunningJob
from bulltask.jobs.options import check_together
from bulltask.transport.async_client import AsyncClient
from bulltask.transport.call import Call
from bulltask.transport.client import ClientPool
from bulltask.transport.keys import QueueKeys
from bulltask.transport.scripts.flow import children_values
from bulltask.transport.scripts.job import add_log, update_data, update_progress

__all__ = ["JobReporter"]


class JobReporter:
    """Responsible for progress and log lines of one job; implements ``registry.context.Reporter``.

    Args:
        job: the job.
        keys: its queue.
        pool: sync clients: a task may report from threads of its own.
        aclient: gives the async client of the child's event loop.
        config: how large a job may be, and how many lines its log keeps where the job does not say.
    """

    def __init__(
        self,
        job: RunningJob,
        keys: QueueKeys,
        pool: ClientPool,
        aclient: Callable[[], AsyncClient],
        config: Config,
    ) -> None:
        self._job, self._keys, self._pool, self._aclient, self._config = job, keys, pool, aclient, config

    def update_progress(self, progress: bytes) -> None:
        """Store the progress (JSON) and tell listeners."""
        self._pool.run(update_progress(self._keys, self._job.id, progress))

    async def aupdate_progress(self, progress: bytes) -> None:
        """:meth:`update_progress` on the child's event loop."""
        await self._aclient().run(update_progress(self._keys, self._job.id, progress))

    def log(self, line: str) -> None:
        """Append a line to the job's log."""
        self._pool.run(self._log_call(line))

    async def alog(self, line: str) -> None:
        """:meth:`log` on the child's event loop."""
        await self._aclient().run(self._log_call(line))

    def update_data(self, data: bytes) -> None:
        """Replace the job's data."""
        self._pool.run(self._data_call(data))

    async def aupdate_data(self, data: bytes) -> None:
        """:meth:`update_data` on the child's event loop."""
        await self._aclient().run(self._data_call(data))

    def children_values(self) -> dict[str, Any]:
        """Return values of the job's children that have completed."""
        return self._pool.run(children_values(self._keys, self._job.id))

    async def achildren_values(self) -> dict[str, Any]:
        """:meth:`children_values` on the child's event loop."""
        return await self._aclient().run(children_values(self._keys, self._job.id))

    def _data_call(self, data: bytes) -> Call[None]:
        check_together(data, self._job.opts, self._config.max_payload, f"the data of job {self._job.id}")
        return update_data(self._keys, self._job.id, data)

    def _log_call(self, line: str) -> Call[int]:
        return add_log(self._keys, self._job.id, line, self._job.opts.get("kl"), self._config.max_logs)
