"""``app.control``: the part of Celery's remote control that bulltask has."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final, Protocol, overload

from bulltask.jobs.states import Revocation
from bulltask.result import AsyncResult
from bulltask.user_warnings import warn_user

__all__ = ["Control"]

_NO_MESSAGES: Final = (
    "there are no control messages, because workers read their state from Redis; use the methods of app.queue(…): "
    "pause(), resume(), drain(), get_workers(), …"
)


class _App(Protocol):
    """The parts of an app that this module uses."""

    def AsyncResult(self, job_id: str) -> AsyncResult[Any]:
        """Return a handle for a job."""
        ...


class Control:
    """Revokes jobs by their ids (Celery's ``app.control.revoke``).

    Args:
        app: The app.
    """

    def __init__(self, app: _App) -> None:
        self._app = app

    @overload
    def revoke(
        self, task_id: str, destination: Any = None, terminate: bool = False, signal: Any = "SIGTERM"
    ) -> Revocation: ...
    @overload
    def revoke(
        self,
        task_id: list[str] | tuple[str, ...] | set[str],
        destination: Any = None,
        terminate: bool = False,
        signal: Any = "SIGTERM",
    ) -> list[Revocation]: ...

    def revoke(
        self,
        task_id: str | Iterable[str],
        destination: Any = None,
        terminate: bool = False,
        signal: Any = "SIGTERM",
    ) -> Revocation | list[Revocation]:
        """Revoke a job, or several, by id; see :meth:`bulltask.result.AsyncResult.revoke`.

        The queue of each job is looked up, as by :meth:`bulltask.App.queue_of`. If it is known,
        ``app.queue(name).revoke(id)`` makes one round trip less.

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
        if terminate and signal not in (None, "SIGTERM", "TERM"):
            warn_user(
                "the argument signal has no effect: the worker raises an exception in the task, and kills the process "
                "if the task does not end"
            )
        if isinstance(task_id, str):
            return self._app.AsyncResult(task_id).revoke(terminate=terminate)
        return [self._app.AsyncResult(one).revoke(terminate=terminate) for one in task_id]

    if not TYPE_CHECKING:  # type checkers would accept any name

        def __getattr__(self, name: str) -> object:
            """Say what to use instead of Celery's other methods."""
            raise AttributeError(f"app.control has no {name!r}: {_NO_MESSAGES}", name=name, obj=self)
