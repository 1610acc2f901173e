"""``shared_task``: tasks in libraries that have no app.

This module has the package's only process-wide state, because the decorator works in any module before an app exists,
as in Celery.
"""

from __future__ import annotations

import weakref
from typing import Any

from bulltask.errors import ConfigError
from bulltask.ports import Sender
from bulltask.registry.task import AnyTask
from bulltask.registry.tasks import Tasks

__all__ = ["SHARED", "add_shared", "current_sender", "set_current"]

SHARED = Tasks()
"""All of this process's shared tasks; every app's registry includes them."""

_current: weakref.ref[Any] | None = None


def set_current(sender: Sender) -> None:
    """Make ``sender`` the app that sends shared tasks. As in Celery, it is the app that was created last."""
    global _current  # noqa: PLW0603 - see above: the only process-wide state
    _current = weakref.ref(sender)


def current_sender() -> Sender:
    """Return the app that sends shared tasks.

    Raises:
        ConfigError: This process has no app.
    """
    sender: Sender | None = None if _current is None else _current()
    if sender is None:
        raise ConfigError("a shared task was sent, but this process has no App: import the module that creates it")
    return sender


def add_shared(task: AnyTask[Any, Any]) -> None:
    """Register a shared task; see :meth:`Tasks.add`."""
    SHARED.add(task)
