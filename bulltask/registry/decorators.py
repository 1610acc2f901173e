"""``@app.task`` and ``@shared_task``: turn functions into tasks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, TypeVar, Unpack, overload

from bulltask.errors import ConfigError
from bulltask.registry.batches import BatchJob
from bulltask.registry.context import Context
from bulltask.registry.current import current_sender, current_task_class
from bulltask.registry.naming import task_name
from bulltask.registry.option_types import BatchTaskKeywords, TaskKeywords
from bulltask.registry.shared import add_shared
from bulltask.registry.task import AnyTask, AsyncTask, Task
from bulltask.registry.task_class import OPTIONS, TaskClass, attributes_of_class, options_of_class
from bulltask.registry.task_options import TaskOptions

__all__ = [
    "BatchTaskDecorator",
    "BoundTaskDecorator",
    "ClassTaskDecorator",
    "TaskDecorator",
    "decorate",
    "register_instance",
    "shared_task",
    "use_class",
]

P = ParamSpec("P")
R = TypeVar("R")
A = TypeVar("A")
B_co = TypeVar("B_co", bound=AnyTask[..., Any], covariant=True)

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


class ClassTaskDecorator(Protocol[B_co]):
    """Return type of ``@app.task(bind=True, base=…)``: the function's first parameter is the task itself."""

    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, function: Callable[Concatenate[B_co, P], Coroutine[Any, Any, R]], /
    ) -> AsyncTask[P, R]: ...
    @overload
    def __call__(self, function: Callable[Concatenate[B_co, P], R], /) -> Task[P, R]: ...


@overload
def shared_task(function: _AsyncFunction[P, R], /) -> AsyncTask[P, R]: ...  # type: ignore[overload-overlap]
@overload
def shared_task(function: Callable[P, R], /) -> Task[P, R]: ...
@overload
def shared_task(
    *,
    base: type[AnyTask[..., Any]] | None = None,
    name: str | None = None,
    **options: Unpack[BatchTaskKeywords],
) -> BatchTaskDecorator: ...
@overload
def shared_task(
    *, bind: Literal[True], base: type[B_co], name: str | None = None, **options: Unpack[TaskKeywords]
) -> ClassTaskDecorator[B_co]: ...
@overload
def shared_task(
    *, bind: Literal[True], name: str | None = None, **options: Unpack[TaskKeywords]
) -> BoundTaskDecorator: ...
@overload
def shared_task(
    *,
    bind: Literal[False] = False,
    base: type[AnyTask[..., Any]] | None = None,
    name: str | None = None,
    **options: Unpack[TaskKeywords],
) -> TaskDecorator: ...


def shared_task(
    function: Callable[..., Any] | None = None,
    /,
    *,
    bind: bool = False,
    base: type[AnyTask[..., Any]] | None = None,
    name: str | None = None,
    **options: Any,
) -> Any:
    """Turn a function into a task of every app, for libraries that have no app; options as in :meth:`App.task`.

    Without ``base``, it has the class ``app.Task`` of the current app.
    """
    kind = base or current_task_class()
    return decorate(
        function, current_sender, add_shared, bind=bind, name=name, options=options, base=kind, is_default=base is None
    )


def decorate(  # noqa: PLR0913 - those of the decorators
    function: Callable[..., Any] | None,
    sender: Callable[[], Any],
    add: Callable[[AnyTask[Any, Any]], None],
    *,
    bind: bool,
    name: str | None,
    options: Mapping[str, Any],
    base: type[AnyTask[Any, Any]] | None = None,
    is_default: bool = False,
) -> Any:
    """Turn a function into a task, or return the decorator that does so if there is no function yet.

    Args:
        function: A plain function or an ``async def``.
        sender: Returns the app that sends the task's calls.
        add: Registers the task.
        bind, name, options, base: As for :meth:`App.task`.
        is_default: ``base`` is that of the app, and may change: :func:`use_class`.

    Raises:
        DuplicateTaskError: Another function has this name.
        ConfigError, TypeError: An option has an invalid value or an unknown name.
    """
    kind = Task if base is None else base
    _options_of(kind, options)  # errors are raised before there is a function

    def turn_into_task(target: Callable[..., Any]) -> AnyTask[Any, Any]:
        definition = _Definition(target, name or task_name(target), options, sender, bind)
        task = definition.task(kind)
        if is_default:
            vars(task)["_definition"] = kind, definition
        add(task)
        return task

    return turn_into_task if function is None else turn_into_task(function)


@dataclass(frozen=True, slots=True)
class _Definition:
    """What a decorator was given, except for the class."""

    function: Callable[..., Any]
    name: str
    options: Mapping[str, Any]
    sender: Callable[[], Any]
    bind: bool

    def task(self, kind: type[AnyTask[Any, Any]]) -> AnyTask[Any, Any]:
        """Return a task that is an instance of a class."""
        task_options, attributes = _options_of(kind, self.options)
        task = _new_task(kind, self.function, self.name, task_options, self.sender, bind=self.bind)
        vars(task).update(attributes)
        return task


def use_class(tasks: Iterable[AnyTask[Any, Any]], kind: type[AnyTask[Any, Any]]) -> list[AnyTask[Any, Any]]:
    """Change the class of those tasks that have no ``base``, because their app has another one; return these tasks.

    Raises:
        ConfigError: The class does not match the function of a task; the message names both.
    """
    changed = []
    for task in tasks:
        present, definition = vars(task).get("_definition", (kind, None))
        if present is not kind:
            new = definition.task(kind)
            object.__setattr__(task, "__class__", type(new))
            vars(task).clear()
            vars(task).update({**vars(new), "_definition": (kind, definition)})
            task.prepare()  # because an attribute may refer to the task
            changed.append(task)
    return changed


def _options_of(kind: type[AnyTask[Any, Any]], given: Mapping[str, Any]) -> tuple[TaskOptions, dict[str, Any]]:
    """Return the options of a task, and the attributes that the decorator sets because the task's class has them."""
    if kind in (Task, AsyncTask):
        return TaskOptions.of(given), {}
    inherited, declared = options_of_class(kind), attributes_of_class(kind)
    options = {name: value for name, value in given.items() if name in OPTIONS or name not in declared}
    own = {name: value for name, value in given.items() if name in inherited or name not in options}
    return TaskOptions.of({**inherited, **options}), own


def _new_task(
    kind: type[AnyTask[Any, Any]],
    function: Callable[..., Any],
    name: str,
    options: TaskOptions,
    sender: Callable[[], Any],
    *,
    bind: bool,
) -> AnyTask[Any, Any]:
    """Return a task that is an instance of ``kind``: of ``Task``, or of a user's class.

    Raises:
        ConfigError: ``kind`` is not a task class, or its methods do not match the function.
    """
    if not (isinstance(kind, type) and issubclass(kind, AnyTask)):
        raise ConfigError(f"the base of task {name!r} must be a subclass of bulltask.Task, not {kind!r}")
    has_base = kind not in (Task, AsyncTask)
    if inspect.iscoroutinefunction(function) and not issubclass(kind, AsyncTask):
        kind = _async_class(kind) if has_base else AsyncTask
    task = kind.__new__(kind)
    AnyTask.__init__(task, function, name, options, sender, bind=bind, has_base=has_base)
    if has_base:
        task.__init__()  # type: ignore[misc] # that of the user's class
    return task


def register_instance(task: AnyTask[Any, Any], sender: Callable[[], Any]) -> None:
    """Turn an instance of a user's class that defines ``run`` into a task.

    Raises:
        ConfigError: The class defines no ``run``, or its methods do not match ``run``.
    """
    kind = type(task)
    if not isinstance(task, AnyTask) or kind.run is TaskClass.run:
        raise ConfigError(f"register_task needs a subclass of bulltask.Task with a method run, not {kind.__qualname__}")
    name = vars(task).get("name") or getattr(kind, "name", None) or task_name(kind)
    options = TaskOptions.of(options_of_class(kind))
    AnyTask.__init__(task, kind.run, name, options, sender, bind=True, has_base=True)


def _async_class(kind: type[AnyTask[Any, Any]]) -> type[AnyTask[Any, Any]]:
    return type(kind.__name__, (kind, AsyncTask), {"__module__": kind.__module__, "__qualname__": kind.__qualname__})
