"""Attributes of tasks that exist for code written for Celery."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bulltask.ports import Sender
from bulltask.registry.signature import Signature
from bulltask.result import AsyncResult

__all__ = ["CeleryTask"]


class CeleryTask:
    """A task with more of Celery's names: a base class of :class:`bulltask.registry.task.AnyTask`."""

    _sender: Callable[[], Sender]

    @property
    def app(self) -> Any:
        """The app that sends the task's calls."""
        return self._sender()

    def AsyncResult(self, task_id: str) -> AsyncResult[Any]:
        """Return the handle of a job by its id; see :meth:`bulltask.App.AsyncResult`."""
        app: Any = self._sender()
        result: AsyncResult[Any] = app.AsyncResult(task_id)
        return result

    def signature(
        self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, **options: Any
    ) -> Signature[Any, Any]:
        """Return a call that is sent later. Type checkers check only the arguments of ``task.s(…).set(…)``.

        Args:
            args, kwargs: The arguments; the result of the previous call comes before them.
            options: As for :meth:`bulltask.registry.task.AnyTask.apply_async`; and ``immutable=True``.

        Raises:
            TypeError: The task has no such parameters.
        """
        immutable = bool(options.pop("immutable", False))
        task: Any = self
        return Signature(task, args, kwargs, options, immutable=immutable)

    subtask = signature
