"""The current app, which sends shared tasks and empty groups, because these belong to no app.

It is the package's only process-wide state. As in Celery, ``@shared_task`` must work before an app exists.
"""

from __future__ import annotations

import weakref
from contextlib import suppress
from importlib import import_module
from typing import Any

from bulltask.errors import ConfigError
from bulltask.ports import Sender

__all__ = ["current_app", "current_sender", "current_task_class", "registered_task", "set_current"]

_current: weakref.ref[Any] | None = None


def set_current(sender: Sender) -> None:
    """Make ``sender`` the current app. As in Celery, it is the app that was created last."""
    global _current  # noqa: PLW0603 - see above: the only process-wide state
    _current = weakref.ref(sender)


def current_sender() -> Sender:
    """Return the current app.

    Raises:
        ConfigError: This process has no app.
    """
    sender: Sender | None = None if _current is None else _current()
    if sender is None:
        raise ConfigError(
            "a shared task, or a result without an app, needs the current app, but this process has no App: import the "
            "module that creates it"
        )
    return sender


def current_task_class() -> Any:
    """Return the class of the current app's tasks that have no ``base``; ``None`` without an app."""
    return getattr(None if _current is None else _current(), "Task", None)


class _CurrentApp:
    """A proxy for the app that is current when it is used (Celery's ``current_app``)."""

    def __getattr__(self, name: str) -> Any:
        return getattr(current_sender(), name)

    def __repr__(self) -> str:
        return "<the current app>"


current_app: Any = _CurrentApp()
"""The app that was created last, for modules that cannot import it."""


def registered_task(name: str, module: str) -> Any:
    """Return a task of the current app. A task is pickled as a call of this function.

    Args:
        name: The task's name.
        module: The module that defines it; imported first.

    Raises:
        ConfigError: This process has no app.
        TaskNotRegisteredError: The current app has no such task.
    """
    with suppress(ImportError):
        import_module(module)
    sender: Any = current_sender()
    return sender.tasks[name]
