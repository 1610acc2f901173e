"""Sends the progress, log lines and data that a bound task reports to Redis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bulltask.config.config import Config
from bulltask.jobs.job import RunningJob
from bulltask.jobs.options import check_together
from bulltask.registry.context import JobCommand
from bulltask.transport.async_client import AsyncClient
from bulltask.transport.call import Call
from bulltask.transport.client import ClientPool
from bulltask.transport.keys import QueueKeys
from bulltask.transport.scripts.flow import child_failure, children_values
from bulltask.transport.scripts.job import add_log, update_data, update_progress

__all__ = ["RedisJobClient"]


class RedisJobClient:
    """Executes commands on one running job; implements ``registry.context.JobClient``.

    Args:
        job: The job.
        keys: Its queue.
        pool: Sync clients; a task may call its context's methods in threads that it starts.
        aclient: Returns the async client of the child's event loop.
        config: The limits of a job's size and of its log.
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

    def send(self, command: JobCommand, value: bytes | str = b"") -> Any:
        """Execute a command on a connection from the pool."""
        return self._pool.run(self._call(command, value))

    async def asend(self, command: JobCommand, value: bytes | str = b"") -> Any:
        """Execute a command on the child's event loop."""
        return await self._aclient().run(self._call(command, value))

    def _call(self, command: JobCommand, value: Any) -> Call[Any]:
        keys, job = self._keys, self._job
        match command:
            case "progress":
                return update_progress(keys, job.id, value)
            case "log":
                return add_log(keys, job.id, value, job.opts.get("kl"), self._config.max_logs)
            case "data":
                check_together(value, job.opts, self._config.max_payload, f"the data of job {job.id}")
                return update_data(keys, job.id, value)
            case "children_values":
                return children_values(keys, job.id)
            case "child_failure":
                return child_failure(value, keys.prefix, hash_tag=self._config.queue_hash_tag)
