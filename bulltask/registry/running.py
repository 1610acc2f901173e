"""The context of the attempt that the current code belongs to, and ``current_task``."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, cast

from bulltask.jobs.job import RunningJob
from bulltask.registry.context import Context
from bulltask.registry.current_job import enter_job, in_started_thread

__all__ = ["LazyContext", "current_context", "current_task", "enter_attempt", "enter_context", "running_task"]


class LazyContext:
    """The context of an attempt. It is created on first use, because most unbound tasks do not need it.

    Args:
        create: Creates it.
        context: The context of a bound task, which was created with its arguments.

    Attributes:
        created: The context, ``None`` until it is used.
    """

    __slots__ = ("_create", "created")

    def __init__(self, create: Callable[[], Context], context: Context | None) -> None:
        self._create, self.created = create, context

    def get(self) -> Context:
        """Return the context."""
        if self.created is None:
            self.created = self._create()
        return self.created


_current: ContextVar[Context | LazyContext | None] = ContextVar("bulltask_context", default=None)


def current_context(task: str) -> Context | None:
    """Return the context of the attempt, or direct call, of a task that this code belongs to; ``None`` for none."""
    context = _running_context()
    return None if context is None or context.name != task else context


def enter_context(context: Context | LazyContext | None) -> Context | LazyContext | None:
    """Make ``context`` the current one, and return the previous one."""
    previous = _current.get()
    _current.set(context)
    return previous


def enter_attempt(job: RunningJob, context: LazyContext) -> None:
    """Make a job and its context the current ones."""
    enter_job(job)
    _current.set(context)


def running_task() -> Any:
    """Return what ``self`` is in the running task if it is bound; ``None`` outside a task, and in a batch."""
    context = _running_context()
    if context is None:
        return None
    return context.task if context.task is not None and context.task.has_base else context


def _running_context() -> Context | None:
    if (context := _current.get()) is None:
        context = in_started_thread(_current)
    return context.get() if isinstance(context, LazyContext) else context


if TYPE_CHECKING:
    _Base = Context
else:
    _Base = object


class _CurrentTask(_Base):
    """A proxy for the running task; outside a task, it equals ``None`` (Celery's ``current_task``)."""

    if not TYPE_CHECKING:  # type checkers would accept any name

        def __getattr__(self, name: str) -> Any:
            if (task := running_task()) is None:
                raise AttributeError(f"current_task has no attribute {name!r}, because no task is running here")
            return getattr(task, name)

    def __bool__(self) -> bool:
        return running_task() is not None

    def __eq__(self, other: object) -> bool:
        return other is self or bool(running_task() == other)

    def __hash__(self) -> int:
        return hash(running_task())

    def __repr__(self) -> str:
        return f"<current_task: {running_task()!r}>"


current_task: _CurrentTask = cast(Any, _CurrentTask)()
"""The running task, for functions that a task calls. It has the attributes of ``self`` in a bound task. Outside a task,
it is false and equals ``None``.

It is a context variable, which ``asyncio.to_thread`` and asyncio tasks inherit. Other threads that a sync task starts
see it while that task is the only one that its process is running. A task that another task calls directly does not
change it."""
