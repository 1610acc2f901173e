"""``AsyncControl`` and ``AsyncInspect``: give orders to live workers, and ask them, as in Celery."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, overload

from bulltask.jobs.clock import Duration
from bulltask.jobs.errors import warn_user
from bulltask.jobs.names import Revocation
from bulltask.queue.context import checked
from bulltask.queue.control import (
    POLL_S,
    Answers,
    ControlBase,
    Destination,
    InspectBase,
    JobIds,
    Replies,
    check_routing,
)

__all__ = ["AsyncControl", "AsyncInspect"]


@checked
class AsyncControl(ControlBase):
    """Orders to the live workers that use the app's server; created by ``app.acontrol``.

    The supervisor of each worker executes an order within a second, also while all its children are busy, and at most
    once. The arguments that several methods have:

    * ``destination``: workers' names or ids, ids without the process id, or patterns of ids such as ``web-*``; default:
      all workers.
    * ``reply``: Wait for the replies, and return them as a list: ``[{"web-1@host-7-0f3a9b": {"ok": "…"}}]``. Otherwise,
      the order waits in Redis for up to a minute until its worker takes it, and the result is ``None``.
    * ``timeout``: How long to wait for replies. Then the order is withdrawn from the workers that have not taken it.

    :meth:`order` also returns who has not answered.
    """

    async def order(
        self,
        name: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        destination: Destination = None,
        timeout: Duration = 2,
    ) -> Answers:
        """Give an order, such as ``"pool_grow"`` with ``{"n": 2}``, and return who has answered what, and who has not.

        Raises:
            BrokerError: Redis could not be reached, or the user lacks a permission (``bulltask acl operator``).
        """
        context = self._context
        await context.aconnect()  # sets the clock
        conversation = await context.arun(self._conversation(name, arguments or {}, destination, timeout))
        while conversation.waits:
            await context.asleep(POLL_S)
            await context.arun(conversation.read())
        return await context.arun(conversation.end())

    async def broadcast(
        self,
        command: str,
        arguments: Mapping[str, Any] | None = None,
        destination: Destination = None,
        reply: bool = False,
        timeout: Duration = 2,
    ) -> Replies:
        """Give an order, by its name as a method here; :meth:`order` returns more."""
        if not reply:
            context = self._context
            await context.aconnect()
            await context.arun(self._conversation(command, arguments or {}, destination, None))
            return None
        answers = await self.order(command, arguments, destination=destination, timeout=timeout)
        done = {worker: {"ok": value} for worker, value in answers.replies.items()}
        return [{worker: answer} for worker, answer in sorted((answers.results() | done).items())]

    def inspect(self, destination: Destination = None, timeout: Duration = 2) -> AsyncInspect:
        """Return an object that asks the workers: ``app.control.inspect().active()``."""
        return AsyncInspect(self, destination, timeout)

    async def ping(self, destination: Destination = None, timeout: Duration = 2) -> list[dict[str, Any]]:
        """Return ``[{"web-1@host-7-0f3a9b": {"ok": "pong"}}]``."""
        return await self.broadcast("ping", None, destination, True, timeout) or []

    async def shutdown(
        self, destination: Destination = None, cold: bool = False, reply: bool = False, timeout: Duration = 2
    ) -> Replies:
        """Stop workers: warm, or cold, which kills their children and releases the jobs."""
        return await self.broadcast("shutdown", {"cold": cold}, destination, reply, timeout)

    async def pause(self, destination: Destination = None, reply: bool = False, timeout: Duration = 2) -> Replies:
        """Let workers acquire no jobs until :meth:`resume`; running jobs continue. Queues are not paused."""
        return await self.broadcast("pause", None, destination, reply, timeout)

    async def resume(self, destination: Destination = None, reply: bool = False, timeout: Duration = 2) -> Replies:
        """Let paused workers acquire jobs again."""
        return await self.broadcast("resume", None, destination, reply, timeout)

    async def pool_grow(
        self, n: int = 1, destination: Destination = None, reply: bool = False, timeout: Duration = 2
    ) -> Replies:
        """Add ``n`` children, up to twice the number at the start plus two."""
        return await self.broadcast("pool_grow", {"n": n}, destination, reply, timeout)

    async def pool_shrink(
        self, n: int = 1, destination: Destination = None, reply: bool = False, timeout: Duration = 2
    ) -> Replies:
        """Remove ``n`` children when their jobs have ended; one remains."""
        return await self.broadcast("pool_shrink", {"n": n}, destination, reply, timeout)

    async def pool_restart(
        self, destination: Destination = None, reply: bool = False, timeout: Duration = 2
    ) -> Replies:
        """Replace the children: others start now, and the old ones exit when their jobs have ended.

        The code is not loaded again; for that, restart the worker (``HUP``).
        """
        return await self.broadcast("pool_restart", None, destination, reply, timeout)

    async def autoscale(
        self,
        max: int | None = None,  # noqa: A002 - Celery's names
        min: int | None = None,  # noqa: A002
        destination: Destination = None,
        reply: bool = False,
        timeout: Duration = 2,
    ) -> Replies:
        """Change the limits of the number of children, of workers with ``worker_autoscale``."""
        return await self.broadcast("autoscale", {"maximum": max, "minimum": min}, destination, reply, timeout)

    async def rate_limit(
        self,
        task_name: str,
        rate_limit: str | float,
        destination: Destination = None,
        reply: bool = False,
        timeout: Duration = 2,
    ) -> Replies:
        """Change the rate limit of a task (``"10/m"``; 0 for none) until the worker restarts.

        The worker that acquires a job applies its limit, so give the order to all workers.
        """
        arguments = {"task_name": task_name, "rate_limit": rate_limit}
        return await self.broadcast("rate_limit", arguments, destination, reply, timeout)

    async def time_limit(
        self,
        task_name: str,
        soft: float | None = None,
        hard: float | None = None,
        destination: Destination = None,
        reply: bool = False,
        timeout: Duration = 2,
    ) -> Replies:
        """Change the time limits of a task, in seconds, for attempts that start from now on; ``None``: the app's."""
        arguments = {"task_name": task_name, "soft": soft, "hard": hard}
        return await self.broadcast("time_limit", arguments, destination, reply, timeout)

    async def add_consumer(  # noqa: PLR0913, PLR0917 - Celery's arguments
        self,
        queue: str,
        exchange: str | None = None,
        exchange_type: str | None = None,
        routing_key: str | None = None,
        options: Mapping[str, Any] | None = None,
        destination: Destination = None,
        reply: bool = False,
        timeout: Duration = 2,
    ) -> Replies:
        """Let workers fetch jobs from another queue, too, or again after :meth:`cancel_consumer`.

        For another queue, a worker replaces its children, and running jobs continue. Without a destination, the order
        goes to the workers that have cancelled the queue; if there are none, to all.

        Args:
            queue: The queue's name.
            exchange: For code written for Celery: only the name of the queue, as in Celery's default.
            exchange_type: For code written for Celery: only ``direct``.
            routing_key: For code written for Celery: only the name of the queue.
            options: For code written for Celery: only empty.
            destination: See the class.
            reply: See the class.
            timeout: See the class.

        Raises:
            ConfigError: Jobs would be routed by an exchange, which Redis does not have.
            InvalidNameError: The queue's name is invalid.
        """
        check_routing(queue, exchange, exchange_type, routing_key, options)
        return await self.broadcast("add_consumer", {"queue": queue}, destination, reply, timeout)

    async def cancel_consumer(
        self, queue: str, destination: Destination = None, reply: bool = False, timeout: Duration = 2
    ) -> Replies:
        """Let workers fetch no more jobs from one of their queues; running jobs continue."""
        return await self.broadcast("cancel_consumer", {"queue": queue}, destination, reply, timeout)

    async def log_level(
        self, level: str, destination: Destination = None, reply: bool = False, timeout: Duration = 2
    ) -> Replies:
        """Change the log level of workers until they restart: ``debug``, ``info`` …"""
        return await self.broadcast("log_level", {"level": level}, destination, reply, timeout)

    @overload
    async def revoke(
        self, task_id: str, destination: Any = None, terminate: bool = False, signal: Any = "SIGTERM"
    ) -> Revocation: ...
    @overload
    async def revoke(
        self, task_id: JobIds, destination: Any = None, terminate: bool = False, signal: Any = "SIGTERM"
    ) -> list[Revocation]: ...

    async def revoke(
        self, task_id: Any, destination: Any = None, terminate: bool = False, signal: Any = "SIGTERM"
    ) -> Revocation | list[Revocation]:
        """Revoke a job, or several, by id; see :meth:`bulltask.result.AsyncResult.revoke`.

        The queue of each job is looked up, as by ``app.AsyncResult``. If it is known, ``app.queue(name).revoke(id)``
        makes one round trip less.

        Args:
            task_id: The job's id, or several ids.
            destination: Has no effect; for code written for Celery.
            terminate: Also cancel a running job.
            signal: Has no effect; for code written for Celery.

        Returns:
            What happened to the job; for several ids, a list.

        Raises:
            SchedulerJobError: The job is the next iteration of a job scheduler: remove the scheduler instead.
            BrokerError: Redis could not be reached. It is safe to call again.
        """
        if destination is not None:
            warn_user("the argument destination has no effect: a job is revoked in Redis, for all workers")
        if terminate and signal not in {None, "SIGTERM", "TERM"}:
            warn_user(
                "the argument signal has no effect: the worker raises an exception in the task, and kills the process "
                "if the task does not end"
            )
        if isinstance(task_id, str):
            return await self._app.AsyncResult(task_id).arevoke(terminate=terminate)
        return [await self._app.AsyncResult(one).arevoke(terminate=terminate) for one in task_id]

    @overload
    async def terminate(self, task_id: str, signal: Any = "SIGTERM") -> Revocation: ...
    @overload
    async def terminate(self, task_id: JobIds, signal: Any = "SIGTERM") -> list[Revocation]: ...

    async def terminate(self, task_id: Any, signal: Any = "SIGTERM") -> Revocation | list[Revocation]:
        """Revoke a job, or several, and cancel them if they are running: ``revoke(…, terminate=True)``."""
        outcome: Revocation | list[Revocation] = await self.revoke(task_id, None, True, signal)
        return outcome

    async def purge(self) -> int:
        """Remove all waiting jobs of the app's queues, and return how many there were (see ``queue.drain()``)."""
        count = 0
        for name in self._own_queues():
            queue = self._app.aqueue(name)
            count += await queue.count()
            await queue.drain()
        return count

    discard_all = purge


@checked
class AsyncInspect(InspectBase):
    """Asks the live workers; created by ``app.ainspect()``.

    Each method returns the answers by worker id; ``None`` if no worker has answered in time.
    """

    def __init__(self, control: AsyncControl, destination: Destination, timeout: Duration) -> None:
        self._control = control
        self._destination = destination
        self._timeout = timeout

    async def active(self, safe: bool | None = None) -> dict[str, Any] | None:
        """Return the running jobs: ``id``, ``name``, ``args``, ``kwargs``, ``queue``, ``time_start``, ``worker_pid``.

        Args:
            safe: Has no effect; for code written for Celery.
        """
        del safe
        return await self._ask("active")

    async def reserved(self, safe: bool | None = None) -> dict[str, Any] | None:
        """Return the jobs that children have prefetched, in the form of :meth:`active`."""
        del safe
        return await self._ask("reserved")

    async def registered(self) -> dict[str, Any] | None:
        """Return the names of the workers' tasks."""
        return await self._ask("registered")

    registered_tasks = registered

    async def stats(self) -> dict[str, Any] | None:
        """Return figures of the workers and their processes."""
        return await self._ask("stats")

    async def conf(self, with_defaults: bool = False) -> dict[str, Any] | None:
        """Return the settings that were set, or all; secrets are ``***``."""
        return await self._ask("conf", {"with_defaults": with_defaults})

    async def ping(self) -> dict[str, Any] | None:
        """Return ``{"web-1@host-7-0f3a9b": {"ok": "pong"}}``."""
        found = await self._ask("ping")
        return found and {worker: {"ok": answer} if answer == "pong" else answer for worker, answer in found.items()}

    async def active_queues(self) -> dict[str, Any] | None:
        """Return the queues from which the workers fetch jobs: ``name``, and ``key`` in Redis."""
        return await self._ask("active_queues")

    async def _ask(self, name: str, arguments: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
        answers = await self._control.order(name, arguments, destination=self._destination, timeout=self._timeout)
        return answers.results() or None
