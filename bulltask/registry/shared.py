"""``shared_task``: tasks of libraries that do not know the app.

The one piece of process-wide state of the package: Celery users expect the decorator to work in any module, before
any app exists.
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
"""Every shared task of this process; each app's registry looks here too."""

_current: weakref.ref[Any] | None = None


def set_current(sender: Sender) -> None:
    """Make ``sender`` the app that shared tasks send through; the app made last wins, as in Celery."""
    global _current  # noqa: PLW0603 - see above: the one piece of process-wide state
    _current = weakref.ref(sender)


def current_sender() -> Sender:
    """Return the app that shared tasks send through.

    Raises:
        ConfigError: no app exists in this process.
    """
    sender: Sender | None = None if _current is None else _current()
    if sender is None:
        raise ConfigError("a shared task was sent but this process has no App; import the module that makes it first")
    return sender


def add_shared(task: AnyTask[Any, Any]) -> None:
    """Register a shared task; see :meth:`Tasks.add`."""
    SHARED.add(task)
