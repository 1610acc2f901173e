# Generated from bulltask/queue/aio/control.py by tools/generate_sync.py (make sync): do not edit.
"""``Control`` and ``Inspect``: give orders to live workers, and ask them, as in Celery."""

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

__all__ = ["Control", "Inspect"]


@checked
class Control(ControlBase):
    """Orders to the live workers that use the app's server; created by ``app.control``.

    The supervisor of each worker executes an order within a second, also while all its children are busy, and at most
    once. The arguments that several methods have:

    * ``destination``: workers' names or ids, ids without the process id, or patterns of ids such as ``web-*``; default:
      all workers.
    * ``reply``: Wait for the replies, and return them as a list: ``[{"web-1@host-7-0f3a9b": {"ok": "…"}}]``. Otherwise,
      the order waits in Redis for up to a minute until its worker takes it, and the result is ``None``.
    * ``timeout``: How long to wait for replies. Then the order is withdrawn from the workers that have not taken it.

    :meth:`order` also returns who has not answered.
    """

    def order(
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
        context.connect()  # sets the clock
        conversation = context.run(self._conversation(name, arguments or {}, destination, timeout))
        while conversation.waits:
            context.sleep(POLL_S)
            context.run(conversation.read())
        return context.run(conversation.end())

    def broadcast(
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
            context.connect()
            context.run(self._conversation(command, arguments or {}, destination, None))
            return None
        answers = self.order(command, arguments, destination=destination, timeout=timeout)
        done = {worker: {"ok": value} for worker, value in answers.replies.items()}
        return [{worker: answer} for worker, answer in sorted((answers.results() | done).items())]

    def inspect(self, destination: Destination = None, timeout: Duration = 2) -> Inspect:
        """Return an object that asks the workers: ``app.control.inspect().active()``."""
        return Inspect(self, destination, timeout)

    def ping(self, destination: Destination = None, timeout: Duration = 2) -> list[dict[str, Any]]:
        """Return ``[{"web-1@host-7-0f3a9b": {"ok": "pong"}}]``."""
        return self.broadcast("ping", None, destination, True, timeout) or []

    def shutdown(
        self, destination: Destination = None, cold: bool = False, reply: bool = False, timeout: Duration = 2
    ) -> Replies:
        """Stop workers: warm, or cold, which kills their children and releases the jobs."""
        return self.broadcast("shutdown", {"cold": cold}, destination, reply, timeout)

    def pause(self, destination: Destination = None, reply: bool = False, timeout: Duration = 2) -> Replies:
        """Let workers acquire no jobs until :meth:`resume`; running jobs continue. Queues are not paused."""
        return self.broadcast("pause", None, destination, reply, timeout)

    def resume(self, destination: Destination = None, reply: bool = False, timeout: Duration = 2) -> Replies:
        """Let paused workers acquire jobs again."""
        return self.broadcast("resume", None, destination, reply, timeout)

    def pool_grow(
        self, n: int = 1, destination: Destination = None, reply: bool = False, timeout: Duration = 2
    ) -> Replies:
        """Add ``n`` children, up to twice the number at the start plus two."""
        return self.broadcast("pool_grow", {"n": n}, destination, reply, timeout)

    def pool_shrink(
        self, n: int = 1, destination: Destination = None, reply: bool = False, timeout: Duration = 2
    ) -> Replies:
        """Remove ``n`` children when their jobs have ended; one remains."""
        return self.broadcast("pool_shrink", {"n": n}, destination, reply, timeout)

    def pool_restart(self, destination: Destination = None, reply: bool = False, timeout: Duration = 2) -> Replies:
        """Replace the children: others start now, and the old ones exit when their jobs have ended.

        The code is not loaded again; for that, restart the worker (``HUP``).
        """
        return self.broadcast("pool_restart", None, destination, reply, timeout)

    def autoscale(
        self,
        max: int | None = None,  # noqa: A002 - Celery's names
        min: int | None = None,  # noqa: A002
        destination: Destination = None,
        reply: bool = False,
        timeout: Duration = 2,
    ) -> Replies:
        """Change the limits of the number of children, of workers with ``worker_autoscale``."""
        return self.broadcast("autoscale", {"maximum": max, "minimum": min}, destination, reply, timeout)

    def rate_limit(
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
        return self.broadcast("rate_limit", arguments, destination, reply, timeout)

    def time_limit(
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
        return self.broadcast("time_limit", arguments, destination, reply, timeout)

    def add_consumer(  # noqa: PLR0913, PLR0917 - Celery's arguments
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
        return self.broadcast("add_consumer", {"queue": queue}, destination, reply, timeout)

    def cancel_consumer(
        self, queue: str, destination: Destination = None, reply: bool = False, timeout: Duration = 2
    ) -> Replies:
        """Let workers fetch no more jobs from one of their queues; running jobs continue."""
        return self.broadcast("cancel_consumer", {"queue": queue}, destination, reply, timeout)

    def log_level(
        self, level: str, destination: Destination = None, reply: bool = False, timeout: Duration = 2
    ) -> Replies:
        """Change the log level of workers until they restart: ``debug``, ``info`` …"""
        return self.broadcast("log_level", {"level": level}, destination, reply, timeout)

    @overload
    def revoke(
        self, task_id: str, destination: Any = None, terminate: bool = False, signal: Any = "SIGTERM"
    ) -> Revocation: ...
    @overload
    def revoke(
        self, task_id: JobIds, destination: Any = None, terminate: bool = False, signal: Any = "SIGTERM"
    ) -> list[Revocation]: ...

    def revoke(
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
            return self._app.AsyncResult(task_id).revoke(terminate=terminate)
        return [self._app.AsyncResult(one).revoke(terminate=terminate) for one in task_id]

    @overload
    def terminate(self, task_id: str, signal: Any = "SIGTERM") -> Revocation: ...
    @overload
    def terminate(self, task_id: JobIds, signal: Any = "SIGTERM") -> list[Revocation]: ...

    def terminate(self, task_id: Any, signal: Any = "SIGTERM") -> Revocation | list[Revocation]:
        """Revoke a job, or several, and cancel them if they are running: ``revoke(…, terminate=True)``."""
        outcome: Revocation | list[Revocation] = self.revoke(task_id, None, True, signal)
        return outcome

    def purge(self) -> int:
        """Remove all waiting jobs of the app's queues, and return how many there were (see ``queue.drain()``)."""
        count = 0
        for name in self._own_queues():
            queue = self._app.queue(name)
            count += queue.count()
            queue.drain()
        return count

    discard_all = purge


@checked
class Inspect(InspectBase):
    """Asks the live workers; created by ``app.inspect()``.

    Each method returns the answers by worker id; ``None`` if no worker has answered in time.
    """

    def __init__(self, control: Control, destination: Destination, timeout: Duration) -> None:
        self._control = control
        self._destination = destination
        self._timeout = timeout

    def active(self, safe: bool | None = None) -> dict[str, Any] | None:
        """Return the running jobs: ``id``, ``name``, ``args``, ``kwargs``, ``queue``, ``time_start``, ``worker_pid``.

        Args:
            safe: Has no effect; for code written for Celery.
        """
        del safe
        return self._ask("active")

    def reserved(self, safe: bool | None = None) -> dict[str, Any] | None:
        """Return the jobs that children have prefetched, in the form of :meth:`active`."""
        del safe
        return self._ask("reserved")

    def registered(self) -> dict[str, Any] | None:
        """Return the names of the workers' tasks."""
        return self._ask("registered")

    registered_tasks = registered

    def stats(self) -> dict[str, Any] | None:
        """Return figures of the workers and their processes."""
        return self._ask("stats")

    def conf(self, with_defaults: bool = False) -> dict[str, Any] | None:
        """Return the settings that were set, or all; secrets are ``***``."""
        return self._ask("conf", {"with_defaults": with_defaults})

    def ping(self) -> dict[str, Any] | None:
        """Return ``{"web-1@host-7-0f3a9b": {"ok": "pong"}}``."""
        found = self._ask("ping")
        return found and {worker: {"ok": answer} if answer == "pong" else answer for worker, answer in found.items()}

    def active_queues(self) -> dict[str, Any] | None:
        """Return the queues from which the workers fetch jobs: ``name``, and ``key`` in Redis."""
        return self._ask("active_queues")

    def _ask(self, name: str, arguments: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
        answers = self._control.order(name, arguments, destination=self._destination, timeout=self._timeout)
        return answers.results() or None
