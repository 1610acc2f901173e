"""Sends the progress, log lines and data that a bound task reports to Redis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bulltask.jobs.child_results import REPLACEMENT_FIELD
from bulltask.jobs.flow import PlannedJob
from bulltask.jobs.job import JobRef, RunningJob
from bulltask.jobs.options import check_together
from bulltask.queue.aio.flow import AsyncFlowProducer
from bulltask.queue.sync.flow import FlowProducer
from bulltask.registry.ancestry import origin_of_replacement
from bulltask.registry.canvas import Canvas
from bulltask.registry.canvas_plan import plan_replacement
from bulltask.registry.job_client import JobCommand
from bulltask.transport.broker import Broker
from bulltask.transport.call import Call, command
from bulltask.transport.client_types import AnyAsyncClient
from bulltask.transport.scripts.checkpoint import store_checkpoint
from bulltask.transport.scripts.flow import child_failure, children_values
from bulltask.transport.scripts.incompatible import incompatible_since
from bulltask.transport.scripts.job import add_log, update_data, update_progress

__all__ = ["RedisJobClient"]


class RedisJobClient:
    """Executes commands for one running job; implements ``registry.job_client.JobClient``.

    Args:
        job: The job.
        broker: Sends canvases. Its pool provides the sync clients, because a task may call its context's methods in
            threads that it starts.
        aclient: Returns the async client of the child's event loop.
    """

    def __init__(self, job: RunningJob, broker: Broker, aclient: Callable[[], AnyAsyncClient]) -> None:
        self._job, self._broker, self._aclient = job, broker, aclient
        self._keys, self._pool, self._config = broker.keys(job.queue), broker.pool, broker.config

    def send(self, command: JobCommand, value: bytes | str = b"") -> Any:
        """Execute a command on a connection from the pool."""
        return self._pool.run(self._call(command, value))

    async def asend(self, command: JobCommand, value: bytes | str = b"") -> Any:
        """Execute a command on the child's event loop."""
        return await self._aclient().run(self._call(command, value))

    def store_checkpoint(self, token: str, checkpoint: str, progress: bytes | None) -> bool:
        """Store the job's checkpoint and progress on a connection from the pool."""
        is_stored = self._pool.run(store_checkpoint(self._keys, self._job.id, token, checkpoint))
        if is_stored and progress is not None:
            self.send("progress", progress)
        return is_stored

    async def astore_checkpoint(self, token: str, checkpoint: str, progress: bytes | None) -> bool:
        """Store the job's checkpoint and progress on the child's event loop."""
        is_stored = await self._aclient().run(store_checkpoint(self._keys, self._job.id, token, checkpoint))
        if is_stored and progress is not None:
            await self.asend("progress", progress)
        return is_stored

    def replace(self, canvas: Canvas[Any, Any], *, retries: int = 0) -> None:
        """Add a canvas as child jobs of the job; the canvas's result becomes the job's result."""
        roots, mark = self._replacement(canvas, retries)
        FlowProducer(broker=lambda: self._broker).add_planned(roots, [mark])

    async def areplace(self, canvas: Canvas[Any, Any], *, retries: int = 0) -> None:
        """:meth:`replace` for asyncio."""
        roots, mark = self._replacement(canvas, retries)
        await AsyncFlowProducer(broker=lambda: self._broker).add_planned(roots, [mark])

    def _replacement(self, canvas: Canvas[Any, Any], retries: int) -> tuple[list[PlannedJob], Call[Any]]:
        ref = JobRef(self._job.queue, self._job.id)
        origin = origin_of_replacement(self._job)
        roots, replacement = plan_replacement(canvas, self._config, ref, origin, retries=retries)
        return roots, command("HSET", self._keys.job(self._job.id), REPLACEMENT_FIELD, replacement.to_json())

    def _call(self, name: JobCommand, value: Any) -> Call[Any]:  # noqa: PLR0911 - one for each command
        keys, job = self._keys, self._job
        match name:
            case "progress":
                return update_progress(keys, job.id, value)
            case "log":
                return add_log(keys, job.id, value, job.opts.get("kl"), self._config.max_logs)
            case "data":
                check_together(value, job.opts, self._config.max_payload, f"the data of job {job.id}")
                return update_data(keys, job.id, value)
            case "children_values":
                return children_values(keys, job.id)
            case "pending_children":
                return command("SCARD", keys.dependencies(job.id), parse_reply=int)
            case "incompatible_since":
                return incompatible_since(keys, job.id)
            case "child_failure":
                return child_failure(value, keys.prefix, hash_tag=self._config.queue_hash_tag)
