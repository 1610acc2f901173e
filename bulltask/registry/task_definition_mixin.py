"""``TaskDefinitionMixin``: the methods of an app that define its tasks."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from importlib import import_module
from typing import Any, Literal, ParamSpec, TypeVar, Unpack, overload

from bulltask.errors import ConfigError
from bulltask.registry.current import current_task_class
from bulltask.registry.decorators import (
    BatchTaskDecorator,
    BoundTaskDecorator,
    ClassTaskDecorator,
    TaskDecorator,
    decorate,
    register_instance,
    use_class,
)
from bulltask.registry.option_types import BatchTaskKeywords, TaskKeywords
from bulltask.registry.shared import SHARED
from bulltask.registry.task import AnyTask, AsyncTask
from bulltask.registry.task import Task as SyncTask
from bulltask.registry.tasks import Tasks

__all__ = ["TaskDefinitionMixin"]

P = ParamSpec("P")
R = TypeVar("R")
B = TypeVar("B", bound=AnyTask[..., Any])
T = TypeVar("T", bound=AnyTask[..., Any])

# An ``async def`` is a function as well, so each pair of overloads below overlaps; the first match wins.
_AsyncFunction = Callable[P, Coroutine[Any, Any, R]]


class TaskDefinitionMixin:
    """Defines and registers tasks: a base class of ``App``.

    Attributes:
        tasks: Its tasks by name.
    """

    tasks: Tasks
    _task_class: type[AnyTask[..., Any]] | str

    @property
    def Task(self) -> type[AnyTask[..., Any]]:
        """The class of its tasks that have no ``base``, and of shared tasks while the app is the current one.

        If it is changed, the existing tasks change their class, too. A name, ``"module:Class"``, is imported when the
        first task needs the class, because its module may import the app.

        Raises:
            ConfigError: The name cannot be imported, or a new class does not match the function of a task.
        """
        if isinstance(self._task_class, str):
            module, _, name = self._task_class.replace(":", ".").rpartition(".")
            try:
                self.Task = getattr(import_module(module), name)
            except (AttributeError, ImportError, ValueError) as exc:
                raise ConfigError(f"cannot import task_cls, {self._task_class!r}: {exc}") from exc
        assert not isinstance(self._task_class, str)
        return self._task_class

    @Task.setter
    def Task(self, kind: type[AnyTask[..., Any]]) -> None:
        self._task_class = kind
        is_current = current_task_class() is kind
        tasks = [task for task in self.tasks.values() if is_current or task.name not in SHARED]
        self.tasks.refresh(use_class(tasks, kind))

    @overload
    def task(self, function: _AsyncFunction[P, R], /) -> AsyncTask[P, R]: ...  # type: ignore[overload-overlap]
    @overload
    def task(self, function: Callable[P, R], /) -> SyncTask[P, R]: ...
    @overload
    def task(
        self,
        /,
        *,
        base: type[AnyTask[..., Any]] | None = None,
        name: str | None = None,
        **options: Unpack[BatchTaskKeywords],
    ) -> BatchTaskDecorator: ...
    @overload
    def task(
        self, /, *, bind: Literal[True], base: type[B], name: str | None = None, **options: Unpack[TaskKeywords]
    ) -> ClassTaskDecorator[B]: ...
    @overload
    def task(
        self, /, *, bind: Literal[True], name: str | None = None, **options: Unpack[TaskKeywords]
    ) -> BoundTaskDecorator: ...
    @overload
    def task(
        self,
        /,
        *,
        bind: Literal[False] = False,
        base: type[AnyTask[..., Any]] | None = None,
        name: str | None = None,
        **options: Unpack[TaskKeywords],
    ) -> TaskDecorator: ...

    def task(
        self,
        function: Callable[..., Any] | None = None,
        /,
        *,
        bind: bool = False,
        base: type[AnyTask[..., Any]] | None = None,
        name: str | None = None,
        **options: Any,
    ) -> Any:
        """Turn a function into a task: ``@app.task`` or ``@app.task(queue="mail", …)``.

        Args:
            function: A plain function or an ``async def``.
            bind: Pass a :class:`Context` as the first argument (``self`` in Celery).
            base: The task's class, a subclass of :class:`bulltask.Task`; default: ``task_cls`` of the app. A bound
                function then receives the task itself.
            name: The task's name; default: ``module.function``.
            options: See :class:`bulltask.registry.task_options.TaskOptions`. ``max_retries=None`` means unlimited
                retries.

        Raises:
            DuplicateTaskError: Another function has this name.
            ConfigError, TypeError: An option has an invalid value or an unknown name.
        """
        return decorate(
            function,
            lambda: self,
            self.tasks.add,
            bind=bind,
            name=name,
            options=options,
            base=base or self.Task,
            is_default=base is None,
        )

    def register_task(self, task: T | type[T]) -> T:
        """Register a task class that defines ``run``, or an instance of it (Celery's ``register_task``).

        Its name is the attribute ``name``; default: ``module.Class``.

        Raises:
            ConfigError: It is not a task class, defines no ``run``, or its methods do not match ``run``.
        """
        instance = task() if isinstance(task, type) else task
        register_instance(instance, lambda: self)
        self.tasks.add(instance)
        return instance
