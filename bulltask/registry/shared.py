"""``shared_task``: tasks in libraries that have no app."""

from __future__ import annotations

from typing import Any

from bulltask.registry.task import AnyTask
from bulltask.registry.tasks import Tasks

__all__ = ["SHARED", "add_shared"]

SHARED = Tasks()
"""All of this process's shared tasks; every app's registry includes them."""


def add_shared(task: AnyTask[Any, Any]) -> None:
    """Register a shared task; see :meth:`Tasks.add`."""
    SHARED.add(task)
