"""The setting ``task_annotations``: task options that the app sets without changing the tasks' code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bulltask.errors import ConfigError

__all__ = ["Annotations", "parse_annotations"]

Annotations = Sequence[Any]
"""Dictionaries of options by task name, or objects with Celery's method ``annotate``."""


def parse_annotations(value: Any, name: str) -> Annotations | None:
    """Return the parts of ``task_annotations``, or ``None`` if there are none.

    Args:
        value: A dictionary ``{"shop.tasks.pay": {"time_limit": 30}, "*": {"max_retries": 5}}``, an object whose methods
            ``annotate(task)`` and ``annotate_any()`` return options or ``None``, or a list of these.
        name: Name of the setting, for the message.

    Raises:
        ConfigError: The value is invalid.
    """
    if value is None or value in ((), [], {}):
        return None
    parts = list(value) if isinstance(value, list | tuple) else [value]
    for part in parts:
        if not isinstance(part, Mapping) and not hasattr(part, "annotate"):
            raise ConfigError(
                f"{name} must be a dictionary of options by task name, or a list of them, not {part!r:.200}"
            )
        for task, options in part.items() if isinstance(part, Mapping) else ():
            if not isinstance(options, Mapping):
                raise ConfigError(
                    f"{name}[{task!r:.200}] must be a dictionary of the task's options, not {options!r:.200}"
                )
    return parts
