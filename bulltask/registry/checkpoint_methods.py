"""The methods of a bound task's context that continue a job where its last attempt stopped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, overload

from bulltask.errors import ConfigError
from bulltask.registry.checkpointed_items import CheckpointedItems, Items, Page, Source
from bulltask.registry.checkpoints import Checkpoints

__all__ = ["CheckpointMethods"]

T = TypeVar("T")


class CheckpointMethods:
    """Methods of :class:`bulltask.Context` for tasks with ``checkpoint=True``.

    Args:
        task: The task's name.
        checkpoints: The job's cursor, ``None`` if the task has no checkpoints.
    """

    def __init__(self, task: str, checkpoints: Checkpoints | None) -> None:
        self._task, self.checkpoints = task, checkpoints

    @overload
    def iterate(self, source: Items[T], *, total: int | None = None) -> CheckpointedItems[T]: ...
    @overload
    def iterate(
        self, source: Callable[[Any], Page[T]], *, cursor: Callable[[T], Any], total: int | None = None
    ) -> CheckpointedItems[T]: ...

    def iterate(
        self, source: Source[T], *, cursor: Callable[[T], Any] | None = None, total: int | None = None
    ) -> CheckpointedItems[T]:
        """Loop over items, so that the job continues after the last finished item when it runs again.

        An item has finished when the loop asks for the next one. If the worker stops, the loop ends between two items,
        and the job is released.

        Args:
            source: The items, in the same order in each attempt. The cursor is then the number of finished items, which
                the next attempt skips. Alternatively, a function that receives the cursor (``None`` at first) and
                returns the next items after it, in order. It is called again until it returns no items.
            cursor: Required if ``source`` is a function: returns the cursor after an item, a small JSON value such as a
                primary key. ``None`` means that no item follows.
            total: The number of items. If given, the job's progress is stored in percent, together with its cursor.

        Returns:
            An object for ``for``, and in an async task for ``async for``.

        Raises:
            ConfigError: The task has no ``checkpoint=True``, or has called this method before.
            TypeError: ``source`` is a function without ``cursor``, or ``cursor`` was given without a function.
        """
        checkpoints = self._checkpoints()
        if checkpoints.in_loop:
            raise ConfigError(
                f"task {self._task!r} calls self.iterate() twice, but a job has one cursor: split it into two tasks"
            )
        if callable(source) != (cursor is not None):
            raise TypeError("self.iterate() requires cursor= if source is a function, and does not accept it otherwise")
        checkpoints.in_loop, checkpoints.total = True, total
        return CheckpointedItems(checkpoints, source, cursor)

    @property
    def cursor(self) -> Any:
        """The job's cursor: the position after the last finished item; ``None`` if no item has finished.

        Raises:
            ConfigError: The task has no ``checkpoint=True``.
        """
        return self._checkpoints().cursor

    def checkpoint(self, cursor: Any) -> None:
        """Move the job's cursor without :meth:`iterate`: call this method after each part of the work.

        Args:
            cursor: Where the next attempt continues: a small JSON value, which :attr:`cursor` returns.

        Raises:
            ConfigError: The task has no ``checkpoint=True``, or uses :meth:`iterate`.
            EncodeError: The value is not plain JSON.
            WorkerShutdown: The worker is stopping (a ``BaseException``, which ``except Exception`` does not catch).
            LockMismatchError, JobNotFoundError: Another worker has the job, or it was removed.
        """
        checkpoints = self._checkpoints_without_loop()
        if checkpoints.advance(cursor):
            checkpoints.save()
        checkpoints.release_if_stopping()

    async def acheckpoint(self, cursor: Any) -> None:
        """:meth:`checkpoint` for async tasks."""
        checkpoints = self._checkpoints_without_loop()
        if checkpoints.advance(cursor):
            await checkpoints.asave()
        checkpoints.release_if_stopping()

    def _checkpoints_without_loop(self) -> Checkpoints:
        checkpoints = self._checkpoints()
        if checkpoints.in_loop:
            raise ConfigError(
                f"task {self._task!r} uses self.iterate(), which moves the cursor itself: do not call self.checkpoint()"
            )
        return checkpoints

    def _checkpoints(self) -> Checkpoints:
        if self.checkpoints is None:
            raise ConfigError(f"task {self._task!r} has no cursor: add checkpoint=True to its decorator")
        return self.checkpoints
