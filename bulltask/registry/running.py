"""The context of the attempt that the current code belongs to, for tasks that are instances of a user's class."""

from __future__ import annotations

from contextvars import ContextVar

from bulltask.registry.context import Context

__all__ = ["current_context", "enter_context"]

_current: ContextVar[Context | None] = ContextVar("bulltask_context", default=None)


def current_context(task: str) -> Context | None:
    """Return the context of the attempt, or direct call, of a task that this code belongs to; ``None`` for none."""
    context = _current.get()
    return None if context is None or context.name != task else context


def enter_context(context: Context | None) -> Context | None:
    """Make ``context`` the current one, and return the previous one."""
    previous = _current.get()
    _current.set(context)
    return previous
