"""``@app.task`` and ``@shared_task``: turn functions into tasks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, TypeVar, Unpack, overload

from bulltask.registry.batches import BatchJob
from bulltask.registry.context import Context
from bulltask.registry.current import current_sender
from bulltask.registry.naming import task_name
from bulltask.registry.option_types import BatchTaskKeywords, TaskKeywords
from bulltask.registry.shared import add_shared
from bulltask.registry.task import AnyTask, AsyncTask, Task
from bulltask.registry.task_options import TaskOptions

__all__ = ["BatchTaskDecorator", "BoundTaskDecorator", "TaskDecorator", "decorate", "shared_task"]

P = ParamSpec("P")
R = TypeVar("R")
A = TypeVar("A")

# An ``async def`` is a function as well, so each pair of overloads below overlaps; the first match wins.
_AsyncFunction = Callable[P, Coroutine[Any, Any, R]]


class TaskDecorator(Protocol):
    """Return type of ``@app.task(…)`` with options: turns a function into a ``Task`` or an ``AsyncTask``."""

    @overload
    def __call__(self, function: _AsyncFunction[P, R], /) -> AsyncTask[P, R]: ...  # type: ignore[overload-overlap]
    @overload
    def __call__(self, function: Callable[P, R], /) -> Task[P, R]: ...


class BatchTaskDecorator(Protocol):
    """Return type of ``@app.task(batch=100, …)``: the function receives a list of jobs, and a call has one argument.

    A type checker also chooses it for ``@app.task(**options)``, so it accepts any other function, too.
    """

    @overload
    def __call__(self, function: _AsyncFunction[[list[BatchJob[A]]], None], /) -> AsyncTask[[A], None]: ...  # type: ignore[overload-overlap]
    @overload
    def __call__(self, function: _AsyncFunction[[list[BatchJob[A]]], Sequence[R] | None], /) -> AsyncTask[[A], R]: ...  # type: ignore[overload-overlap]
    @overload
    def __call__(self, function: Callable[[list[BatchJob[A]]], None], /) -> Task[[A], None]: ...
    @overload
    def __call__(self, function: Callable[[list[BatchJob[A]]], Sequence[R] | None], /) -> Task[[A], R]: ...
    @overload
    def __call__(self, function: _AsyncFunction[P, R], /) -> AsyncTask[P, R]: ...  # type: ignore[overload-overlap]
    @overload
    def __call__(self, function: Callable[P, R], /) -> Task[P, R]: ...


class BoundTaskDecorator(Protocol):
    """Return type of ``@app.task(bind=True, …)``: the function's first parameter is the :class:`Context`."""

    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, function: Callable[Concatenate[Context, P], Coroutine[Any, Any, R]], /
    ) -> AsyncTask[P, R]: ...
    @overload
    def __call__(self, function: Callable[Concatenate[Context, P], R], /) -> Task[P, R]: ...


@overload
def shared_task(function: _AsyncFunction[P, R], /) -> AsyncTask[P, R]: ...  # type: ignore[overload-overlap]
@overload
def shared_task(function: Callable[P, R], /) -> Task[P, R]: ...
@overload
def shared_task(*, name: str | None = None, **options: Unpack[BatchTaskKeywords]) -> BatchTaskDecorator: ...
@overload
def shared_task(
    *, bind: Literal[True], name: str | None = None, **options: Unpack[TaskKeywords]
) -> BoundTaskDecorator: ...
@overload
def shared_task(
    *, bind: Literal[False] = False, name: str | None = None, **options: Unpack[TaskKeywords]
) -> TaskDecorator: ...


def shared_task(
    function: Callable[..., Any] | None = None,
    /,
    *,
    bind: bool = False,
    name: str | None = None,
    **options: Any,
) -> Any:
    """Turn a function into a task of every app, for libraries that have no app; options as in :meth:`App.task`."""
    return decorate(function, current_sender, add_shared, bind=bind, name=name, options=options)


def decorate(
    function: Callable[..., Any] | None,
    sender: Callable[[], Any],
    add: Callable[[AnyTask[Any, Any]], None],
    *,
    bind: bool,
    name: str | None,
    options: Mapping[str, Any],
) -> Any:
    """Turn a function into a task, or return the decorator that does so if there is no function yet.

    Args:
        function: A plain function or an ``async def``.
        sender: Returns the app that sends the task's calls.
        add: Registers the task.
        bind, name, options: As for :meth:`App.task`.

    Raises:
        DuplicateTaskError: Another function has this name.
        ConfigError, TypeError: An option has an invalid value or an unknown name.
    """
    task_options = TaskOptions.of(options)

    def turn_into_task(target: Callable[..., Any]) -> AnyTask[Any, Any]:
        kind: type[AnyTask[Any, Any]] = AsyncTask if inspect.iscoroutinefunction(target) else Task
        task = kind(target, name or task_name(target), task_options, sender, bind=bind)
        add(task)
        return task

    return turn_into_task if function is None else turn_into_task(function)
