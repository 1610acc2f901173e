"""The types of ``@app.task(…)`` and ``@shared_task(…)`` with options."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, overload

from bulltask.registry.context import Context
from bulltask.registry.task import AsyncTask, Task

__all__ = ["BoundTaskDecorator", "TaskDecorator"]

P = ParamSpec("P")
R = TypeVar("R")

# An ``async def`` is a function as well, so each pair of overloads below overlaps; the first match wins.
_AsyncFunction = Callable[P, Coroutine[Any, Any, R]]


class TaskDecorator(Protocol):
    """Return type of ``@app.task(…)`` with options: turns a function into a ``Task`` or an ``AsyncTask``."""

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
