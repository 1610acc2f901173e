"""Tasks by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from bulltask.config.annotations import Annotations
from bulltask.config.config import Config
from bulltask.config.payload_settings import check_serializer
from bulltask.errors import DuplicateTaskError, TaskNotRegisteredError, did_you_mean
from bulltask.registry.annotate import annotate
from bulltask.registry.task import AnyTask

__all__ = ["Tasks"]


class Tasks(Mapping[str, AnyTask[Any, Any]]):
    """An app's tasks by name.

    Args:
        shared: The tasks of ``shared_task``, which every app includes.
        builtin: The tasks of bulltask's own jobs; they are found by name, but not listed.
    """

    def __init__(
        self,
        shared: Mapping[str, AnyTask[Any, Any]] | None = None,
        builtin: Mapping[str, AnyTask[Any, Any]] | None = None,
    ) -> None:
        self._tasks: dict[str, AnyTask[Any, Any]] = {}
        self._shared = {} if shared is None else shared
        self._builtin = {} if builtin is None else builtin
        self._annotations: Annotations = ()
        self._queues: dict[str, None] = {}
        self._has_handlers = False

    def add(self, task: AnyTask[Any, Any]) -> None:
        """Register a task.

        A function that is defined again replaces its earlier definition. This happens after ``importlib.reload``, when
        a notebook cell runs twice, or when a file is imported under two names.

        Raises:
            DuplicateTaskError: Another function already has the name; the message shows both locations.
        """
        other = self.get(task.name)
        if other is not None and not _is_same_function(other, task):
            raise DuplicateTaskError(
                f"two tasks are named {task.name!r:.200}: {other.location} and {task.location}; "
                "give one of them another name with @app.task(name='…')"
            )
        annotate(task, self._annotations)
        self._tasks[task.name] = task
        self._has_handlers |= task.has_handlers

    def refresh(self, changed: Iterable[AnyTask[Any, Any]]) -> None:
        """Apply ``task_annotations`` again to tasks that have another class now."""
        for task in changed:
            annotate(task, self._annotations)
            self._has_handlers |= task.has_handlers

    def add_queues(self, names: Iterable[str]) -> None:
        """Let workers process these queues, even if no task has one of them as its option ``queue``."""
        self._queues.update(dict.fromkeys(names))

    @property
    def queues(self) -> tuple[str, ...]:
        """The queues of the tasks, apart from the default queue, and those of :meth:`add_queues`."""
        more = self._shared.queues if isinstance(self._shared, Tasks) else ()
        queues = (task.options.queue for task in self.values() if task.options.queue)
        return tuple(dict.fromkeys([*queues, *self._queues, *more]))

    def configure(self, config: Config) -> None:
        """Apply ``task_annotations`` to all tasks, including those added later, and check their serializers.

        Raises:
            ConfigError: An option is unknown or invalid, or the app cannot use a serializer; the message names the
                task.
        """
        annotations = config.annotations or ()
        for task in self.values():
            annotate(task, annotations)
            check_serializer(task.options.serializer, config, f"the serializer of task {task.name} is cloudpickle")
        self._annotations = annotations

    @property
    def have_handlers(self) -> bool:
        """Whether any task has handlers, such as ``on_success``."""
        return self._has_handlers or (isinstance(self._shared, Tasks) and self._shared.have_handlers)

    def __getitem__(self, name: str) -> AnyTask[Any, Any]:
        task = self._tasks.get(name) or self._shared.get(name)
        if task is None:
            raise TaskNotRegisteredError(f"task {name!r:.200} is not registered{did_you_mean(name, self)}")
        return task

    def get(self, name: str, default: Any = None) -> Any:
        """Return the task, or ``default``; builds no error message, because it is on the worker's hot path."""
        return self._tasks.get(name) or self._shared.get(name) or self._builtin.get(name) or default

    def __contains__(self, name: object) -> bool:
        return name in self._tasks or name in self._shared

    def __iter__(self) -> Iterator[str]:
        yield from self._tasks
        yield from (name for name in self._shared if name not in self._tasks)

    def __len__(self) -> int:
        return len(set(self._tasks) | set(self._shared))


def _is_same_function(first: AnyTask[Any, Any], second: AnyTask[Any, Any]) -> bool:
    """Compare by location, or by module and name: an edit moves a function, and a file may be imported twice."""
    if first.location == second.location:
        return True
    module, name = first.function.__module__, first.function.__qualname__
    return "<lambda>" not in name and (module, name) == (second.function.__module__, second.function.__qualname__)
