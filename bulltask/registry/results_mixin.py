"""``ResultsMixin``: the handles of an app's jobs by id."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar, overload

from bulltask.config.config import Config
from bulltask.ports import ResultReader
from bulltask.registry.task import AnyTask
from bulltask.registry.tasks import Tasks
from bulltask.result import AsyncResult

__all__ = ["ResultsMixin"]

R = TypeVar("R")


class _App(Protocol):
    """The parts of an app that this module uses."""

    @property
    def config(self) -> Config:
        """The settings."""
        ...

    @property
    def tasks(self) -> Tasks:
        """The tasks."""
        ...

    @property
    def results(self) -> ResultReader:
        """The reader of results."""
        ...

    def queue_of(self, job_id: str) -> str:
        """Return the queue that has the job."""
        ...


class ResultsMixin:
    """Creates result handles: a base class of ``App``."""

    @overload
    def result(self: _App, job_id: str, queue: str | None = None, *, task: None = None) -> AsyncResult[Any]: ...
    @overload
    def result(self: _App, job_id: str, queue: str | None = None, *, task: AnyTask[..., R]) -> AsyncResult[R]: ...

    def result(
        self: _App, job_id: str, queue: str | None = None, *, task: AnyTask[..., Any] | None = None
    ) -> AsyncResult[Any]:
        """Return a handle for any job, including jobs that Node sent.

        Args:
            job_id: The job's id.
            queue: The job's queue; default: the app's default queue.
            task: The job's task, whose type hint determines the type of the result; default: the result is JSON.
        """
        decode = None if task is None else task.result_decoder
        return AsyncResult(job_id, queue or self.config.default_queue, self.results, decode=decode)

    def AsyncResult(self: _App, job_id: str) -> AsyncResult[Any]:
        """Return a handle for a job whose queue is not known (Celery's ``app.AsyncResult``): see :meth:`queue_of`.

        If the queue is known, :meth:`result` makes no round trip.
        """
        return AsyncResult(job_id, self.queue_of(job_id), self.results)

    def queue_of(self: _App, job_id: str) -> str:
        """Return the queue that has a job: the default queue, or a queue of a registered task.

        If there are several such queues, Redis is queried in one round trip, with an ``EXISTS`` for each of them. The
        call blocks, even in async code.

        Returns:
            The first queue with this job; the default queue if none of them has it.

        Raises:
            BrokerError: Redis could not be reached.
        """
        default = self.config.default_queue
        queues = list(dict.fromkeys([default, *self.tasks.queues]))
        return default if len(queues) == 1 else self.results.queue_of(job_id, queues) or default
